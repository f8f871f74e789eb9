"""The first of the two places that shift, number by number, and against a naive double loop."""

from __future__ import annotations

import random

import pytest
import torch
from draft_helpers import EMBEDDING, random_row

from eyas.draft.attention import Document
from eyas.features.shard import FeatureRow
from eyas.train.batch import countable_steps, make_batch


def naive_steps(supervised: list[bool], num_steps: int) -> list[int]:
    """DESIGN.md section 2 as it is written: row i counts at step k iff x[i+1] .. x[i+2+k] are all there and all supervised."""
    found = []
    for i in range(len(supervised)):
        count = 0
        for k in range(num_steps):
            needed = range(i + 1, i + 2 + k + 1)
            if all(j < len(supervised) and supervised[j] for j in needed):
                count += 1
        found.append(count)
    return found


def five_tokens() -> FeatureRow:
    """x0 .. x4 = 10 .. 14 with x2, x3, x4 supervised, as both tables have them."""
    supervised = torch.tensor([False, False, True, True, True])
    aux = torch.arange(5.0).view(5, 1, 1).expand(5, 3, 2)
    return FeatureRow("five", torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32), supervised, aux.clone(), 100 + aux[:, 0].clone())


def test_the_table_in_the_docstring_of_batch_holds_number_by_number() -> None:
    batch = make_batch([five_tokens()], EMBEDDING, 5, torch.float32)
    assert batch.aux[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert batch.next_T.tolist() == [11, 12, 13, 14, 0]
    assert torch.equal(batch.embedded, EMBEDDING[batch.next_T])
    assert batch.label_T.tolist() == [12, 13, 14, 0, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert countable_steps(five_tokens().supervised, 5).tolist() == [0, 2, 1, 0, 0]
    assert (batch.rows_R.tolist(), batch.num_steps_R.tolist()) == ([1, 2], [2, 1])
    assert batch.documents == [Document(0, 5, 0, 2)]


def test_the_alignment_table_of_the_design_holds_number_by_number() -> None:
    batch = make_batch([five_tokens()], EMBEDDING, 2, torch.float32)
    rows = dict(zip(batch.rows_R.tolist(), batch.num_steps_R.tolist(), strict=True))
    # row i=1 step 0: reads aux[1], emb(x2), predicts x3, counts; its teacher is last[2]
    assert (batch.aux[1, 0, 0], batch.next_T[1], batch.label_T[1], batch.last[1 + 1, 0]) == (1, 12, 13, 102)
    # row i=1 step 1: reads h0[1], emb(x3), predicts x4, counts; its teacher is last[3]
    assert (batch.next_T[1 + 1], batch.label_T[1 + 1], batch.last[1 + 1 + 1, 0], rows[1]) == (13, 14, 103, 2)
    # row i=0 step 0: reads aux[0], emb(x1), predicts x2, does not count: x1 is not sampled by the target
    assert (batch.aux[0, 0, 0], batch.next_T[0], batch.label_T[0]) == (0, 11, 12)
    assert 0 not in rows


@pytest.mark.parametrize("supervised", [".", "s", "..", "s.", ".s", "ss", "...", "sss", ".ss.ss.", "ss.s.sss", ".sssss", "sssss.", "s" * 12, "." * 12])
@pytest.mark.parametrize("num_steps", [1, 2, 5, 20])
def test_countable_steps_are_those_of_a_double_loop_at_the_edges(supervised: str, num_steps: int) -> None:
    mask = [sign == "s" for sign in supervised]
    assert countable_steps(torch.tensor(mask, dtype=torch.bool), num_steps).tolist() == naive_steps(mask, num_steps)


def test_countable_steps_are_those_of_a_double_loop_over_random_masks() -> None:
    generator = random.Random(0)
    for _ in range(400):
        length, share, num_steps = generator.randint(1, 24), generator.random(), generator.randint(1, 7)
        mask = [generator.random() < share for _ in range(length)]
        assert countable_steps(torch.tensor(mask), num_steps).tolist() == naive_steps(mask, num_steps), (mask, num_steps)


def test_no_step_counts_across_two_turns() -> None:
    """The token between two turns is the template's: no draft step may read or predict over it."""
    batch = make_batch([random_row(".sss.ssss")], EMBEDDING, 7, torch.float32)
    assert dict(zip(batch.rows_R.tolist(), batch.num_steps_R.tolist(), strict=True)) == {0: 2, 1: 1, 4: 3, 5: 2, 6: 1}


@pytest.mark.parametrize("supervised", [".", "s", "..", "s.", ".s", ".....", "..s.."])
def test_a_document_that_supervises_nothing_gives_positions_but_no_rows(supervised: str) -> None:
    row = random_row(supervised)
    batch = make_batch([row], EMBEDDING, 3, torch.float32)
    assert batch.num_tokens == len(supervised) == len(batch.aux) == len(batch.last) == len(batch.label_T)
    assert batch.next_T.tolist() == [*row.tokens[1:].tolist(), 0]
    assert len(batch.rows_R) == len(batch.num_steps_R) == 0
    assert batch.documents == [Document(0, len(supervised), 0, 0)]


def test_packing_keeps_documents_apart() -> None:
    rows = [random_row(supervised, seed) for seed, supervised in enumerate([".sss", "s", "....", "sss", ".ss.ss"])]
    packed = make_batch(rows, EMBEDDING, 3, torch.float32)
    alone = [make_batch([row], EMBEDDING, 3, torch.float32) for row in rows]
    for name in ("aux", "last", "embedded", "next_T", "label_T", "positions_T", "num_steps_R"):
        assert torch.equal(getattr(packed, name), torch.cat([getattr(batch, name) for batch in alone])), name
    start = row_start = 0
    for doc, batch in zip(packed.documents, alone, strict=True):
        assert doc == Document(start, start + batch.num_tokens, row_start, row_start + len(batch.rows_R))
        assert torch.equal(packed.rows_R[doc.row_start : doc.row_end], batch.rows_R + start)
        start, row_start = doc.end, doc.row_end
    assert bool((packed.rows_R[1:] > packed.rows_R[:-1]).all())


def test_the_last_token_of_a_document_never_reads_the_first_of_the_next() -> None:
    first, second = random_row("sss", 1), random_row("sss", 2)
    batch = make_batch([first, second], EMBEDDING, 3, torch.float32)
    assert batch.next_T.tolist() == [*first.tokens[1:].tolist(), 0, *second.tokens[1:].tolist(), 0]
    assert batch.label_T.tolist() == [*first.tokens[2:].tolist(), 0, 0, *second.tokens[2:].tolist(), 0, 0]


def test_features_come_in_the_compute_dtype() -> None:
    batch = make_batch([random_row(".sss")], EMBEDDING, 2, torch.bfloat16)
    assert (batch.aux.dtype, batch.last.dtype, batch.embedded.dtype, batch.next_T.dtype) == (*[torch.bfloat16] * 3, torch.int64)

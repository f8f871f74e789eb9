"""The draft's vocabulary and the two tensors by which engines translate, there and back."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.vocab.mapping import choose_ids, from_d2t, to_d2t, to_t2d


def naive_ids(counts: list[int], size: int, forced: list[int]) -> list[int]:
    by_rank = sorted(range(len(counts)), key=lambda token: (token not in forced, -counts[token] if token not in forced else 0, token))
    return sorted(by_rank[:size])


def test_choosing_equals_sorting_by_forced_then_count_then_id() -> None:
    generator = random.Random(0)
    for _ in range(200):
        vocab_size = generator.randint(2, 60)
        size = generator.randint(1, vocab_size)
        counts = [generator.choice([0, 0, 1, 1, 2, 50, 10**12]) for _ in range(vocab_size)]
        forced = generator.sample(range(vocab_size), generator.randint(0, size))
        assert choose_ids(torch.tensor(counts), size, forced).tolist() == naive_ids(counts, size, forced)


def test_forced_tokens_are_always_in_even_if_never_seen() -> None:
    counts = torch.tensor([9, 9, 9, 9, 0, 9, 0])
    ids = choose_ids(counts, 3, [6, 4, 6])
    assert ids.tolist() == [0, 4, 6]
    assert counts.tolist() == [9, 9, 9, 9, 0, 9, 0], "the counts belong to the caller"


def test_ties_go_to_the_lower_id() -> None:
    assert choose_ids(torch.tensor([1, 5, 5, 5, 5, 2]), 2, []).tolist() == [1, 2]
    assert choose_ids(torch.zeros(10, dtype=torch.int64), 4, []).tolist() == [0, 1, 2, 3]


def test_the_whole_vocabulary_maps_to_itself() -> None:
    ids = choose_ids(torch.randint(9, (50,), generator=torch.Generator().manual_seed(0)), 50, [])
    assert ids.tolist() == list(range(50))
    assert not to_d2t(ids).any()
    assert to_t2d(ids, 50).all()


def test_ids_survive_the_way_through_d2t_and_t2d() -> None:
    generator = torch.Generator().manual_seed(1)
    for vocab_size, size in ((2, 1), (50, 50), (320, 200), (5000, 17), (5000, 4999)):
        ids = choose_ids(torch.randint(100, (vocab_size,), generator=generator), size, [vocab_size - 1])
        d2t, t2d = to_d2t(ids), to_t2d(ids, vocab_size)
        assert (d2t.dtype, t2d.dtype, list(d2t.shape), list(t2d.shape)) == (torch.int64, torch.bool, [size], [vocab_size])
        assert bool((ids[1:] > ids[:-1]).all())
        assert int(t2d.sum()) == size
        assert torch.equal(t2d.nonzero()[:, 0], ids)
        assert torch.equal(from_d2t(d2t, vocab_size), ids)
        assert [i + int(d2t[i]) for i in range(size)] == ids.tolist(), "as an engine reads it"


def test_an_int32_mapping_of_another_trainer_is_read() -> None:
    ids = torch.tensor([3, 7, 8, 31])
    found = from_d2t(to_d2t(ids).int(), 32)
    assert torch.equal(found, ids)
    assert found.dtype == torch.int64


@pytest.mark.parametrize(
    "d2t",
    [
        pytest.param(torch.tensor([3, 7, 8, 31]), id="absolute ids"),
        pytest.param(torch.tensor([3.0, 6.0, 6.0]), id="floating point"),
        pytest.param(torch.tensor([0, 0, 30]), id="one id too high"),
        pytest.param(torch.tensor([-1, 0, 0]), id="a negative id"),
        pytest.param(torch.tensor([5, 3, 0]), id="descending ids"),
        pytest.param(torch.tensor([5, 4, 4]), id="an id twice"),
        pytest.param(torch.zeros(2, 2, dtype=torch.int64), id="a matrix"),
        pytest.param(torch.zeros(0, dtype=torch.int64), id="empty"),
        pytest.param(torch.zeros(33, dtype=torch.int64), id="longer than the vocabulary"),
    ],
)
def test_what_is_no_mapping_of_offsets_is_refused(d2t: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="d2t must"):
        from_d2t(d2t, 32)

"""The chunked loss against plain torch, in value and gradient, and its independence of how rows are split into batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from draft_helpers import (
    DRAFT_VOCAB,
    EMBEDDING,
    WIDTH,
    assert_same_gradients,
    gradients,
    random_draft,
    random_head,
    random_ids,
    random_row,
    relative_error,
    small_shape,
)
from torch.nn import functional as F

from eyas.config import TrainSection
from eyas.draft.model import Draft
from eyas.draft.product import Linear
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch, make_batch
from eyas.train.loop import Materials, optimizer_step, steps_of
from eyas.train.loss import Objective, Teacher, loss_backward
from eyas.train.optim import make_optimizer
from eyas.train.unroll import StepOutput, unroll

CPU = torch.device("cpu")
K = 4
MASKS = [".sssssss", "ss", "...", ".ss.sssss", "s", ".ssssssssssssssssssss"]


def some_steps(batch: Batch) -> list[StepOutput]:
    """Made-up hidden states, as leaves, with the positions and counts of a real unroll."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for k in range(K):
        hidden = torch.randn(len(batch.rows_R), WIDTH, generator=generator).requires_grad_()
        found.append(StepOutput(hidden, (batch.rows_R + k).clamp(max=batch.num_tokens - 1), batch.num_steps_R > k))
    return found


def plain_loss(
    steps: list[StepOutput], weight: torch.Tensor, head: TargetHead, ids: torch.Tensor, last: torch.Tensor, denominator: float, kind: str
) -> tuple[torch.Tensor, list[float]]:
    """Full logits of all rows, the whole target vocabulary, torch's own cross-entropy with soft labels, gradients by autograd. The teacher of position p stands
    at last[p + 1]."""
    total, per_step = torch.zeros(()), []
    for k, step in enumerate(steps):
        part = torch.zeros(())
        for r in range(len(step.at_R)):
            if step.counts_R[r]:
                state = last[int(step.at_R[r]) + 1]
                target_logits = head.head @ (F.rms_norm(state, state.shape, None, head.norm_eps) * head.norm_weight)
                if head.softcap is not None:
                    target_logits = head.softcap * (target_logits / head.softcap).tanh()
                p = target_logits.softmax(-1)[ids]
                p, logits = p / p.sum(), weight @ step.hidden_RD[r]
                cross_entropy = F.cross_entropy(logits[None], p[None])
                if kind == "soft":
                    part = part + cross_entropy
                else:
                    accepted = torch.minimum(p, logits.softmax(-1)).sum()
                    share = (-3 * accepted.detach()).exp()
                    part = part + share * (cross_entropy - torch.special.entr(p).sum()) + (1 - share) * (1 - accepted)
        per_step.append(part.item())
        total = total + 0.8**k * part / denominator
    return total, per_step


@pytest.mark.parametrize("chunk", [1, 3, 7, 1024])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["soft", "lk"])
def test_the_chunked_loss_equals_plain_torch(chunk: int, softcap: float | None, kind: Literal["soft", "lk"]) -> None:
    head, ids = random_head(softcap=softcap), random_ids()
    batch = make_batch([random_row(mask, seed) for seed, mask in enumerate(MASKS)], EMBEDDING, K, torch.float32, chunk=chunk)
    steps = some_steps(batch)
    hidden = [step.hidden_RD for step in steps]
    lm_head = random_lm_head()
    weight = lm_head.weight
    loss, sums = loss_backward(steps, lm_head, Teacher(head, ids, torch.float32, CPU), batch, Objective(0.8, 13.0, kind))
    fast = [tensor.grad for tensor in (weight, *hidden)]
    plain, per_step = plain_loss(steps, weight, head, ids, batch.last, 13.0, kind)
    slow = torch.autograd.grad(plain, [weight, *hidden])
    assert relative_error(loss, plain) < 1e-5
    assert relative_error(sums.loss, torch.tensor(per_step)) < 1e-5
    for found, wanted in zip(fast, slow, strict=True):
        assert relative_error(found, wanted) < 1e-5


def random_lm_head(weight: torch.Tensor | None = None) -> Linear:
    """With this weight in place of a random one, if there is one."""
    lm_head = Linear(WIDTH, DRAFT_VOCAB)
    with torch.no_grad():
        lm_head.weight.copy_(torch.randn(DRAFT_VOCAB, WIDTH, generator=torch.Generator().manual_seed(8)) if weight is None else weight)
    return lm_head


def test_a_softcap_of_the_target_changes_what_is_learnt() -> None:
    """Else the comparison above would not see a forgotten one."""
    ids, last = random_ids(), random_row("....").last
    plain, capped = (Teacher(random_head(softcap=cap), ids, torch.float32, CPU).head.logits(last).softmax(-1) for cap in (None, 2.0))
    assert relative_error(capped, plain) > 0.05


def test_the_teacher_is_the_targets_distribution_renormalised_over_the_draft_vocabulary() -> None:
    head, ids, last = random_head(), random_ids(), random_row("......").last
    p = head.logits(last).softmax(-1)[:, ids]
    assert p.sum(-1).max() < 0.999, "some mass must lie outside"
    assert relative_error(Teacher(head, ids, torch.float32, CPU).head.logits(last).softmax(-1), p / p.sum(-1, keepdim=True)) < 1e-5


@pytest.mark.parametrize("chunk", [3, 1024])
@pytest.mark.parametrize("kind", ["soft", "lk"])
def test_a_row_that_does_not_count_contributes_exactly_nothing(chunk: int, kind: Literal["soft", "lk"]) -> None:
    teacher = Teacher(random_head(), random_ids(), torch.float32, CPU)
    batch = make_batch([random_row(mask, seed) for seed, mask in enumerate(MASKS)], EMBEDDING, K, torch.float32, chunk=chunk)
    lm_head = random_lm_head()
    weight = lm_head.weight
    steps = some_steps(batch)
    found = []
    for filler in (None, 1e6):  # what stands in such a row may be anything at all
        weight.grad = None
        if filler is not None:
            steps = [replace(step, hidden_RD=step.hidden_RD.detach().masked_fill(~step.counts_R[:, None], filler).requires_grad_()) for step in steps]
        loss, sums = loss_backward(steps, lm_head, teacher, batch, Objective(0.8, 1.0, kind))
        found.append((loss, sums, [tensor.grad for tensor in (weight, *(step.hidden_RD for step in steps))]))
        for step, gradient in zip(steps, found[-1][2][1:], strict=True):
            assert not gradient[~step.counts_R].any()
            assert gradient[step.counts_R].any(dim=-1).all()
    assert any(bool((~step.counts_R).any()) for step in steps)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][2][0], found[1][2][0])
    assert torch.equal(found[0][1].loss, found[1][1].loss)


@pytest.mark.parametrize("chunk", [3, 1024])
def test_loss_sums_count_rows_and_agreements_as_a_loop_does(chunk: int) -> None:
    head, ids = random_head(), random_ids()
    batch = make_batch([random_row(mask, seed) for seed, mask in enumerate(MASKS)], EMBEDDING, K, torch.float32, chunk=chunk)
    # Half of the rows are given the very direction of the teacher's best token, so that agreements are many but not all.
    draft_head = head.head[ids].clone()
    best = head.logits(batch.last)[:, ids].argmax(-1)
    steps = some_steps(batch)
    for step in steps:
        with torch.no_grad():
            teachers = best[(step.at_R + 1).clamp(max=batch.num_tokens - 1)]
            step.hidden_RD[::2] = 10 * F.normalize(draft_head[teachers[::2]], dim=-1)
    _, sums = loss_backward(steps, random_lm_head(draft_head), Teacher(head, ids, torch.float32, CPU), batch, Objective(0.8, 1.0))
    rows, agreed = [0] * K, [0] * K
    for k, step in enumerate(steps):
        for r in range(len(step.at_R)):
            if step.counts_R[r]:
                rows[k] += 1
                agreed[k] += int((draft_head @ step.hidden_RD[r]).argmax() == best[step.at_R[r] + 1])
    assert sums.rows.tolist() == rows
    assert sums.agreed.tolist() == agreed
    assert 0 < sum(agreed) < sum(rows)
    both = sums + sums
    assert (both.rows.tolist(), both.agreed.tolist()) == ([2 * n for n in rows], [2 * n for n in agreed])


def test_a_step_that_no_row_reaches_adds_nothing_and_breaks_nothing() -> None:
    draft, head = random_draft(small_shape()), random_head()
    batch = make_batch([random_row(".ss")], EMBEDDING, K, torch.float32)
    _, sums = loss_backward(unroll(draft, batch, K), draft.lm_head, Teacher(head, random_ids(), torch.float32, CPU), batch, Objective(0.8, 1.0))
    assert sums.rows.tolist() == [1, 0, 0, 0]
    assert all(torch.isfinite(gradient).all() for gradient in gradients(draft).values())


class RowsInMemory:
    """What optimizer_step asks of a feature reader."""

    def __init__(self, rows: list[FeatureRow]) -> None:
        self.rows = {row.key: row for row in rows}

    def row(self, key: str) -> FeatureRow:
        return self.rows[key]

    def parts(self, schedule: Any, whole: Any) -> list[Any]:
        return [schedule]


def step_gradients(rows: list[FeatureRow], split: list[int], draft: Draft) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """The gradients that the real optimizer_step reaches with the rows split into batches of the given sizes."""
    head, ids = random_head(), random_ids()
    section = TrainSection(unroll_steps=K, grad_clip=1e9)
    materials = Materials(RowsInMemory(rows), [], [], head.embedding, Teacher(head, ids, torch.float32, CPU), ids, torch.float32, CPU)  # type: ignore[arg-type]
    keys, start = [], 0
    for size in split:
        keys.append([row.key for row in rows[start : start + size]])
        start += size
    (step,) = steps_of(materials, section, [keys])
    sums, norm = optimizer_step(draft, make_optimizer(draft, section, torch.float32), materials, section, step, 0.0)
    return gradients(draft), sums.rows.tolist(), float(norm)


@pytest.mark.parametrize("split", [[4, 4], [1] * 8, [7, 1], [1, 2, 5]])
def test_the_gradient_does_not_depend_on_how_rows_are_split_into_batches(split: list[int]) -> None:
    """Rows of very unlike numbers of supervised tokens: a mean of means would be far off."""
    masks = [".ssssssssssssssss", ".ss", "..sssss", ".ss", ".sss.ss", "sssssssss", ".ss", "....ss"]
    rows = [random_row(mask, seed) for seed, mask in enumerate(masks, start=50)]
    draft = random_draft(small_shape())
    whole, num_rows, norm = step_gradients(rows, [8], draft)
    parts, num_rows_split, norm_split = step_gradients(rows, split, draft)
    assert num_rows == num_rows_split
    assert abs(norm - norm_split) <= 1e-5 * norm
    assert_same_gradients(parts, whole, 1e-5)


def test_the_denominator_is_the_rows_that_count_at_step_0_of_the_whole_optimiser_step() -> None:
    rows = [random_row(mask, seed) for seed, mask in enumerate([".ssssss", ".ss", "...sss"], start=60)]
    draft = random_draft(small_shape())
    found, num_rows, _ = step_gradients(rows, [1, 2], draft)
    head, batch = random_head(), make_batch(rows, EMBEDDING, K, torch.float32)
    assert num_rows[0] == len(batch.rows_R) == 5 + 1 + 2
    loss_backward(unroll(draft, batch, K), draft.lm_head, Teacher(head, random_ids(), torch.float32, CPU), batch, Objective(0.8, 8.0))
    assert_same_gradients(found, gradients(draft), 1e-5)

"""The learning rate rises, falls, ends where it should, and never starts again."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from draft_helpers import random_draft, small_shape

from eyas.config import TrainSection
from eyas.train.optim import Muon, make_optimizer, orthogonal, rate_share

SCHEDULES = [(1000, 0.03), (1000, 0.0), (1000, 1.0), (37, 0.1), (10, 0.03), (2, 0.03), (1, 0.03)]


def rates(section: TrainSection, total: int) -> list[float]:
    return [section.lr * rate_share(section, step, total) for step in range(total)]


@pytest.mark.parametrize(("total", "warmup"), SCHEDULES)
def test_the_rate_rises_to_lr_and_then_only_falls(total: int, warmup: float) -> None:
    section = TrainSection(lr=0.01, warmup=warmup, final_lr=0.05)
    found = rates(section, total)
    peak = found.index(max(found))
    assert max(found) == pytest.approx(0.01)
    assert all(a < b for a, b in itertools.pairwise(found[: peak + 1]))
    assert all(a >= b for a, b in itertools.pairwise(found[peak:]))
    assert all(0 < rate <= 0.01 for rate in found)


def test_warming_up_is_a_straight_line_over_its_share_of_the_steps() -> None:
    section = TrainSection(lr=0.01, warmup=0.1)
    assert rates(section, 100)[:10] == pytest.approx([0.001 * (step + 1) for step in range(10)])
    assert rates(section, 100)[11] < 0.01


def test_half_way_down_the_rate_is_half_way_between_peak_and_end() -> None:
    section = TrainSection(lr=0.01, warmup=0.0, final_lr=0.2)
    assert rates(section, 20_001)[10_000] == pytest.approx(0.01 * (0.2 + 0.8 * 0.5), rel=1e-3)


@pytest.mark.parametrize("total", [2, 10, 37, 1000])
@pytest.mark.parametrize("final_lr", [0.0, 0.05, 1.0])
def test_the_last_step_is_made_at_final_lr_times_lr(total: int, final_lr: float) -> None:
    section = TrainSection(lr=0.01, warmup=0.03, final_lr=final_lr)
    assert rates(section, total)[-1] == pytest.approx(final_lr * 0.01, abs=1e-9)


def test_the_rate_depends_on_the_step_alone_so_that_resuming_cannot_restart_it() -> None:
    section = TrainSection(lr=0.01)
    forward = rates(section, 50)
    assert [section.lr * rate_share(section, step, 50) for step in reversed(range(50))] == list(reversed(forward))
    assert not any(math.isclose(rate, forward[0]) for rate in forward[3:-1])


def test_weight_decay_is_on_matrices_alone() -> None:
    draft = random_draft(small_shape(norm_before_fc=True))
    groups = make_optimizer(draft, TrainSection(weight_decay=0.1), torch.float32).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    assert decayed == {id(p) for p in draft.parameters() if p.dim() == 2}
    assert sum(len(group["params"]) for group in groups) == len(list(draft.parameters()))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_muon_moves_as_torch_does(shape: tuple[int, int]) -> None:
    """torch.optim.Muon, which multiplies in bfloat16, is the reference; ours in bfloat16 takes the same steps."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    mine = Muon([{"params": [ours], "lr": 0.01, "weight_decay": 0.1}], torch.bfloat16)
    reference = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)  # five steps of 0.01 x 0.2 sqrt(24) = 0.05; bfloat16 products
    assert not torch.allclose(ours, torch.ones(shape) * (1 - 0.001) ** 5, atol=1e-2)


def test_muon_brings_all_singular_values_near_one() -> None:
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix, torch.float32))
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.equal(orthogonal(matrix.T, torch.float32), orthogonal(matrix, torch.float32).T)


def test_muon_moves_the_layers_matrices_and_adamw_the_rest() -> None:
    draft = random_draft(small_shape(norm_before_fc=True))
    adamw, muon = make_optimizer(draft, TrainSection(optimizer="muon"), torch.float32).parts
    moved = {id(weight) for group in muon.param_groups for weight in group["params"]}
    assert moved == {id(weight) for name, weight in draft.named_parameters() if weight.dim() == 2 and name != "lm_head.weight"}
    assert {id(weight) for group in adamw.param_groups for weight in group["params"]} == {id(weight) for weight in draft.parameters()} - moved
    (alone,) = make_optimizer(draft, TrainSection(optimizer="adamw"), torch.float32).parts
    assert sum(len(group["params"]) for group in alone.param_groups) == len(list(draft.parameters()))

"""Sampling that is not the target's own shows in where the tokens lie on its line of likelihood, however it is off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome

from eyas.evaluate.fairness import BINS, counted, judged, points

NUM_TOKENS, VOCAB = 3000, 50


def logits() -> torch.Tensor:
    return 2.0 * torch.randn(NUM_TOKENS, VOCAB, generator=torch.Generator().manual_seed(0))


def draw(logits_AV: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits_AV.softmax(-1), 1, generator=torch.Generator().manual_seed(1))[:, 0]


def without_the_unlikely(logits_AV: torch.Tensor) -> torch.Tensor:
    sorted_AV, order_AV = logits_AV.softmax(-1).sort(-1, descending=True)
    return logits_AV.scatter(1, order_AV, torch.where(sorted_AV.cumsum(-1) - sorted_AV < 0.9, logits_AV.gather(1, order_AV), -1e9))


UNFAIR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "colder": lambda logits_AV: logits_AV / 0.7,
    "hotter": lambda logits_AV: logits_AV / 1.4,
    "half greedy, half at random": lambda logits_AV: torch.cat([logits_AV[: NUM_TOKENS // 2] * 100, logits_AV[NUM_TOKENS // 2 :] * 0]),
    "top_p 0.9": without_the_unlikely,
    "of the place before": lambda logits_AV: logits_AV.roll(1, 0),
}


def test_tokens_of_the_own_distribution_fill_all_bins_alike() -> None:
    logits_AV = logits()
    found = judged([counted(part.log_softmax(-1), drawn) for part, drawn in zip(logits_AV.split(100), draw(logits_AV).split(100), strict=True)])
    assert found and found.fair and found.p_value > 0.01 and found.tokens == sum(found.bins) == NUM_TOKENS and len(found.bins) == BINS


@pytest.mark.parametrize("how", UNFAIR)
def test_any_other_way_of_sampling_is_told(how: str) -> None:
    found = judged([counted(logits().log_softmax(-1), draw(UNFAIR[how](logits())))])
    assert found and not found.fair and found.p_value < 1e-6 and found.moved > 0.03


def test_rounding_as_of_another_engine_is_no_unfairness() -> None:
    noise = 0.05 * torch.randn(NUM_TOKENS, VOCAB, generator=torch.Generator().manual_seed(2))
    found = judged([counted(logits().log_softmax(-1), draw(logits() + noise))])
    assert found and found.fair


def test_a_token_lies_behind_all_that_are_likelier_and_equals_in_order() -> None:
    log_p = torch.tensor([[0.2, 0.5, 0.2, 0.1]]).repeat(4, 1).log()
    found = points(log_p, torch.arange(4)).tolist()
    for point, (low, high) in zip(found, [(0.5, 0.7), (0.0, 0.5), (0.7, 0.9), (0.9, 1.0)], strict=True):
        assert low <= point <= high
    assert judged([]) is None


def test_an_evaluation_at_a_temperature_says_what_holds_there(make_run: Callable[..., Path], tmp_path: Path, eyas: Callable[..., Outcome]) -> None:
    path = make_run(train={"epochs": 1}, evaluate={"temperature": 1.0, "max_new_tokens": 40, "prompts_per_category": 4})
    outcome = eyas("run", path)
    assert outcome.code == 0 and "draft tokens, sampled, the draft greedy" in outcome.out and "if the draft samples" in outcome.out, outcome.err
    assert "not drawn from the target's own" not in outcome.err
    summary: dict[str, Any] = json.loads((tmp_path / "runs" / "run" / "evaluate" / "summary.json").read_text())
    assert summary["temperature"] == 1.0 and summary["greedy_identical"] is None and summary["prompts_that_differ"] == []
    assert summary["fairness"]["fair"] and summary["fairness"]["tokens"] == summary["num_tokens"]
    assert summary["acceptance_length"] == summary["simulated_acceptance_length"], "of the very answers that the draft helped to write"
    assert [line["draft_tokens"] for line in summary["outlook"]] == list(range(1, 8))
    lines = [(line["acceptance_length"], line["tree_of_2"], line["tree_of_4"]) for line in summary["outlook"]]
    assert all(1 <= chain <= two <= four for chain, two, four in lines) and all(line["sampled_draft"] >= 1 for line in summary["outlook"])
    assert "nothing to do" in eyas("run", path).err and eyas("run", path, "--set", "evaluate.temperature=0").code == 0

"""Whether sampled text is drawn from the target's own distribution.

Lay the tokens of a vocabulary on a line from 0 to 1, the likeliest first, each as long as it is likely. Of a token drawn from that distribution a point drawn
from its piece lies anywhere on the line alike, whatever came before. So the points of all tokens of all answers fill equal bins equally; of an engine that
samples colder, hotter or otherwise with a draft than without they do not.

Legend: A tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

BINS = 20
UNLIKELY = 1e-4  # the chance that a sound engine is blamed
NOTICEABLE = 0.03  # of the points in another bin than they should be; two engines that round differently stay below it


def points(log_p_AV: torch.Tensor, tokens_A: torch.Tensor) -> torch.Tensor:
    """[A], where on the line each token drawn lies. log_p: of every token at each place, at the temperature of sampling; tokens int64."""
    p_AV = log_p_AV.double().exp()
    own_A1 = p_AV.gather(1, tokens_A[:, None])
    before = torch.arange(p_AV.shape[1]) < tokens_A[:, None]
    first_A = torch.where((p_AV > own_A1) | ((p_AV == own_A1) & before), p_AV, 0.0).sum(1)
    generator = torch.Generator().manual_seed(int(tokens_A.sum()))
    return first_A + own_A1[:, 0] * torch.rand(len(tokens_A), generator=generator, dtype=torch.float64)


def counted(log_p_AV: torch.Tensor, tokens_A: torch.Tensor) -> list[int]:
    """How many points of an answer fall into each bin."""
    return torch.histc(points(log_p_AV, tokens_A), BINS, 0.0, 1.0).long().tolist()


@dataclass(frozen=True)
class Fairness:
    """bins: points in each. moved: the share of them that should lie in others. p_value: the chance of so much in fair sampling (Pearson's chi-square)."""

    tokens: int
    bins: list[int]
    moved: float
    p_value: float
    fair: bool


def judged(answers: Iterable[Sequence[int]]) -> Fairness | None:
    """From the bins of each answer; None where nothing was sampled."""
    bins = torch.tensor(list(answers), dtype=torch.float64).reshape(-1, BINS).sum(0)
    expected = bins.sum() / BINS
    if not expected:
        return None
    moved = float((bins - expected).abs().sum() / (2 * bins.sum()))
    statistic = ((bins - expected) ** 2 / expected).sum()
    p_value = float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2, dtype=torch.float64), statistic / 2))
    return Fairness(int(bins.sum()), bins.long().tolist(), moved, p_value, p_value > UNLIKELY or moved < NOTICEABLE)

"""Whether texts were drawn from the distribution that they should come from: Pearson's chi-square test against the exact one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch

EXPECTED = 5  # texts in a cell, below which the test is not exact and cells are put together


def exact(
    logits: Callable[[list[int]], torch.Tensor], prompt: list[int], length: int, temperature: float, least: float, stops: Collection[int] = ()
) -> dict[tuple[int, ...], float]:
    """The probability of each text of `length` tokens behind the prompt, or of fewer with one of `stops` at the end, that has at least `least`. logits: of the
    next token [V]."""
    found = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in found.items():
            if text and text[-1] in stops:
                longer[text] = chance
                continue
            p_V = (logits([*prompt, *text]).double() / temperature).softmax(-1)
            longer |= {(*text, token): chance * float(p_V[token]) for token in (chance * p_V >= least).nonzero().flatten().tolist()}
        found = longer
    return found


def p_value(texts: Sequence[Sequence[int]], probabilities: dict[tuple[int, ...], float]) -> float:
    """The chance that texts drawn from the distribution are as far from it as these. Texts without a probability are one cell."""
    seen = Counter(tuple(text) for text in texts)
    cells = [(seen[text], len(texts) * chance) for text, chance in probabilities.items() if len(texts) * chance >= EXPECTED]
    cells.append((len(texts) - sum(count for count, _ in cells), len(texts) - sum(expected for _, expected in cells)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))

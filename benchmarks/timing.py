"""How benchmarks time a training step: ours and the peers' alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def random_tokens(rows: int, length: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length))


def timed(step: Callable[[int], None], num_packs: int, repeat: int) -> dict[str, Any]:
    """Steps over all packs in turn, `repeat` times, after a round that is not counted (and two of the first pack, for compilations).

    -> seconds: of one round, the median of all; first_round: seconds of the one that was not counted; peak_gb: the most memory that
    tensors held, in 10^9 bytes.
    """
    cuda = torch.cuda.is_available()

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = wait()
    for index in (0, 0, *range(num_packs)):
        step(index)
    first = wait() - start
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rounds = []
    for _ in range(repeat):
        start = wait()
        for index in range(num_packs):
            step(index)
        rounds.append(wait() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    return {"seconds": sorted(rounds)[len(rounds) // 2], "first_round": first, "peak_gb": peak}

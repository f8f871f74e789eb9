"""Which target tokens the draft can say, and the two tensors by which engines translate.

Legend: V target vocabulary, Vd draft vocabulary.

    ids  int64 [Vd]  target ids in the draft vocabulary, ascending; draft id i means target id ids[i]
    d2t  int64 [Vd]  offsets: ids[i] - i, as vLLM and SGLang read it (target id = i + d2t[i])
    t2d  bool  [V]   whether a target token is in the draft vocabulary
"""

from __future__ import annotations

import torch


def choose_ids(counts: torch.Tensor, size: int, forced: list[int]) -> torch.Tensor:
    """The `size` most frequent tokens by counts int64 [V], `forced` ones always among them; ties go to the lower id. int64 [Vd], ascending."""
    assert size <= len(counts), (size, len(counts))
    priority = counts.clone()
    priority[torch.tensor(sorted(set(forced)), dtype=torch.long)] = torch.iinfo(torch.int64).max
    order = torch.argsort(priority, descending=True, stable=True)
    return order[:size].sort().values


def to_d2t(ids: torch.Tensor) -> torch.Tensor:
    """ids [Vd] -> offsets int64 [Vd]."""
    return ids - torch.arange(len(ids))


def to_t2d(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """ids [Vd] -> bool [V]."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)


def from_d2t(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """offsets [Vd] -> ids int64 [Vd]. Raises ValueError for what is no mapping: not integer, not ascending, out of range (absolute ids, say)."""
    if d2t.is_floating_point() or d2t.dim() != 1:
        raise ValueError(f"d2t must be a vector of integers, not {d2t.dtype} {list(d2t.shape)}")
    ids = d2t.long() + torch.arange(len(d2t))
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= vocab_size or bool((ids[1:] <= ids[:-1]).any()):
        raise ValueError(f"d2t must hold offsets, so that i + d2t[i] ascends within [0, {vocab_size}); absolute ids do not")
    return ids

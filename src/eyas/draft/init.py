"""First weights of a draft."""

from __future__ import annotations

import torch

from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.target.embeddings import TargetHead

STD = 0.02  # of random matrices, as Llama's initializer_range


def new_draft(shape: DraftShape, seed: int, ids: torch.Tensor, head: TargetHead | None) -> Draft:
    """Random matrices, norms of ones. With `head`, the draft's head begins as the target's own, rows `ids` int64 [Vd].

    The final norm begins as ones even then: the target's is made for states that the draft does not have yet, and training begins at twice the loss.
    """
    draft = Draft(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * STD)
        if head is not None:
            draft.lm_head.weight.copy_(head.head[ids])
    return draft

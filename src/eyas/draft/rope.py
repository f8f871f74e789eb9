"""Rotary positions of the draft, computed by transformers from the same parameters that are exported.

Legend: R rows, H heads, d head width.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.draft.fused import fused
from eyas.draft.shape import DraftShape


class Rope(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters=dict(shape.rope_parameters),
        )
        self.table = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def forward(self, positions_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [R] -> cos, sin float32 [R, 1, d]."""
        like = torch.empty(0, dtype=torch.float32, device=positions_R.device)
        cos_1Rd, sin_1Rd = self.table(like, positions_R[None])
        return cos_1Rd[0, :, None], sin_1Rd[0, :, None]


def turned(x_RHd: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns pairs (first half, second half) of each head, as Llama does; in float32, returned in x's dtype."""
    cos, sin = cos_sin
    first, second = x_RHd.float().chunk(2, dim=-1)
    return (x_RHd.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x_RHd.dtype)


rotate = fused(turned)

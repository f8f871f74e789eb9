"""Attention that treats a few new tokens one by one, exactly as plain decoding would have.

Verifying four drafted tokens in one forward rounds differently from four forwards of one token, and in bfloat16 that is enough for greedy texts to
part. Where it comes from on a CPU is attention alone: the bfloat16 matrix products there give each row the same bits in a batch of one and of
sixteen. So with the queries of a short forward attended to one after the other, speculative greedy decoding writes the tokens of plain decoding.
Registered with transformers' public AttentionInterface; the work itself is done by its sdpa attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "eyas_rowwise"
FEW = 16  # new tokens; a forward of more is a prompt, which both ways of decoding read alike


def rowwise_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **keywords: Any
) -> tuple[torch.Tensor, None]:
    """query [B, H, n, d], key and value [B, G, T, d] with the n new positions last, mask [B, 1, n, T] or None -> [B, n, H, d]."""
    num_new, length = query.shape[2], key.shape[2]
    if num_new == 1 or num_new > FEW or num_new == length:
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)
        return attended, None
    rows = []
    for j in range(num_new):
        end = length - num_new + j + 1
        mask = None if attention_mask is None else attention_mask[:, :, j : j + 1, :end]
        if mask is not None and (mask if mask.dtype == torch.bool else mask == 0).all():
            mask = None  # nothing hidden: plain decoding passes no mask
        attended, _ = sdpa_attention_forward(module, query[:, :, j : j + 1], key[:, :, :end], value[:, :, :end], mask, **keywords)
        rows.append(attended)
    return torch.cat(rows, dim=1), None


AttentionInterface.register(NAME, rowwise_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

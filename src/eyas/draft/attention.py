"""The two attentions of the draft: unrolled over K steps for training, and with a cache for drafting.

Legend: T positions of the pack, L of one document, R rows (positions whose outputs are wanted), C of one document,
H query heads, G key-value heads, h query heads of one key-value head, d head width, k step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Document:
    """Where one document lies: positions [start, end) of the pack, rows [row_start, row_end) of the wanted ones."""

    start: int
    end: int
    row_start: int
    row_end: int


def unrolled_attention(
    q_RHd: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    rows_R: torch.Tensor,
    documents: list[Document],
) -> torch.Tensor:
    """Attention of step k = len(own_keys); returns [R, H, d].

    keys, values: step 0's, one [L, G, d] a document. The row at position i sees those of positions <= i of its document, and its own keys of
    steps 1..k, one [R, G, d] a step.
    One softmax over both is exact; nothing is approximated. On a CPU all of it is float32: documents of all lengths are as many shapes, and the
    bfloat16 library there takes longer to prepare for a new one than these small products take.
    """
    dtype = q_RHd.dtype
    if q_RHd.device.type == "cpu":
        q_RHd, keys, values = q_RHd.float(), [key.float() for key in keys], [value.float() for value in values]
        own_keys, own_values = [key.float() for key in own_keys], [value.float() for value in own_values]
    groups, width = keys[0].shape[1], keys[0].shape[2]
    repeat = q_RHd.shape[1] // groups
    q_GRhd = q_RHd.view(len(q_RHd), groups, repeat, width).transpose(0, 1) * width**-0.5
    own_GRhk = q_GRhd.new_empty(*q_GRhd.shape[:3], 0)
    if own_keys:
        own_GRhk = torch.cat([(q_GRhd * key_RGd.transpose(0, 1).unsqueeze(2)).sum(-1, keepdim=True) for key_RGd in own_keys], dim=-1)
    # Split once rather than sliced in the loop: the gradient of a slice is a whole tensor of zeros.
    row_counts = [doc.row_end - doc.row_start for doc in documents]
    mixed_parts, weight_parts = [], []
    parts = zip(documents, keys, values, q_GRhd.split(row_counts, 1), own_GRhk.split(row_counts, 1), rows_R.split(row_counts), strict=True)
    for doc, keys_LGd, values_LGd, q_GCd, own_GCk, at_C in parts:
        num_rows = len(at_C)
        if num_rows == 0:
            continue
        hidden_CL = torch.arange(doc.start, doc.end, device=at_C.device) > at_C[:, None]
        scores_GChL = (q_GCd.reshape(groups, num_rows * repeat, width) @ keys_LGd.permute(1, 2, 0)).view(groups, num_rows, repeat, -1)
        scores_GChL = scores_GChL.masked_fill(hidden_CL[None, :, None], float("-inf"))
        # float32: a bf16 softmax over a long document loses the tail
        weights = torch.cat((scores_GChL, own_GCk), dim=-1).softmax(-1, dtype=torch.float32).to(q_RHd.dtype)
        to_keys, to_own = weights.split([doc.end - doc.start, len(own_keys)], dim=-1)
        mixed_parts.append((to_keys.reshape(groups, num_rows * repeat, -1) @ values_LGd.transpose(0, 1)).view(groups, num_rows, repeat, width))
        weight_parts.append(to_own)
    mixed_GRhd = torch.cat(mixed_parts, dim=1)
    if own_values:
        for weight_GRh, value_RGd in zip(torch.cat(weight_parts, dim=1).unbind(-1), own_values, strict=True):
            mixed_GRhd = mixed_GRhd + weight_GRh.unsqueeze(-1) * value_RGd.transpose(0, 1).unsqueeze(2)
    return mixed_GRhd.transpose(0, 1).reshape(q_RHd.shape).to(dtype)


def cached_attention(q_RHd: torch.Tensor, keys_TGd: torch.Tensor, values_TGd: torch.Tensor) -> torch.Tensor:
    """Causal attention of R new rows, the last R of T positions; returns [R, H, d]."""
    num_rows, length = len(q_RHd), len(keys_TGd)
    hidden_RT = torch.ones(num_rows, length, dtype=torch.bool, device=q_RHd.device).tril(length - num_rows)
    attended_HRd = torch.nn.functional.scaled_dot_product_attention(
        q_RHd.transpose(0, 1), keys_TGd.transpose(0, 1), values_TGd.transpose(0, 1), attn_mask=hidden_RT, enable_gqa=True
    )
    return attended_HRd.transpose(0, 1)

"""The two attentions of the draft: unrolled over K steps for training, and with a cache for drafting.

Legend: T positions of the pack, R rows (positions whose outputs are wanted), H query heads, G key-value heads, d head width, k step.
"""

from __future__ import annotations

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
    keys_TGd: torch.Tensor,
    values_TGd: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    rows_R: torch.Tensor,
    documents: list[Document],
) -> torch.Tensor:
    """Attention of step k = len(own_keys); returns [R, H, d].

    The row at position i sees the step-0 keys of positions <= i of its document, and its own keys of steps 1..k, one [R, G, d] a step.
    One softmax over both is exact; nothing is approximated.
    """
    groups, width = keys_TGd.shape[1], keys_TGd.shape[2]
    repeat = q_RHd.shape[1] // groups
    q_GRhd = q_RHd.view(len(q_RHd), groups, repeat, width).transpose(0, 1)
    own_scores_GRhk = [(q_GRhd * key_RGd.transpose(0, 1).unsqueeze(2)).sum(-1, keepdim=True) for key_RGd in own_keys]
    outputs = []
    for doc in documents:
        if doc.row_start == doc.row_end:
            continue
        here = slice(doc.row_start, doc.row_end)
        num_rows = doc.row_end - doc.row_start
        keys_GdL = keys_TGd[doc.start : doc.end].permute(1, 2, 0)
        hidden_RL = torch.arange(doc.start, doc.end, device=rows_R.device) > rows_R[here, None]
        scores_GRhL = (q_GRhd[:, here].reshape(groups, num_rows * repeat, width) @ keys_GdL).view(groups, num_rows, repeat, -1)
        # float32: a bf16 softmax over a long document loses the tail
        scores_GRhL = scores_GRhL.float().masked_fill(hidden_RL[None, :, None], float("-inf"))
        scores = torch.cat([scores_GRhL, *(own[:, here].float() for own in own_scores_GRhk)], dim=-1) * width**-0.5
        weights = scores.softmax(-1).to(q_RHd.dtype)
        length = doc.end - doc.start
        mixed = (weights[..., :length].reshape(groups, num_rows * repeat, length) @ values_TGd[doc.start : doc.end].transpose(0, 1)).view(groups, num_rows, repeat, width)
        for step, value_RGd in enumerate(own_values):
            mixed = mixed + weights[..., length + step, None] * value_RGd[here].transpose(0, 1).unsqueeze(2)
        outputs.append(mixed)
    return torch.cat(outputs, dim=1).transpose(0, 1).reshape(q_RHd.shape)


def cached_attention(q_RHd: torch.Tensor, keys_TGd: torch.Tensor, values_TGd: torch.Tensor) -> torch.Tensor:
    """Causal attention of R new rows, the last R of T positions; returns [R, H, d]."""
    num_rows, length = len(q_RHd), len(keys_TGd)
    hidden_RT = torch.ones(num_rows, length, dtype=torch.bool, device=q_RHd.device).tril(length - num_rows)
    attended_HRd = torch.nn.functional.scaled_dot_product_attention(
        q_RHd.transpose(0, 1), keys_TGd.transpose(0, 1), values_TGd.transpose(0, 1), attn_mask=hidden_RT, enable_gqa=True
    )
    return attended_HRd.transpose(0, 1)

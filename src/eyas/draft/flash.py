"""The unrolled attention on a GPU: one causal flash attention over step 0's keys, and each row's own keys of later steps merged into its softmax, exactly.

Attention over both is a weighted sum of the two: with L the log-sum-exp of all scores, step 0's output counts exp(L0 - L) and own value j counts exp(s_j - L).
Backward needs no more: flash attention's own backward, given the merged output and L in place of its own, computes p = exp(s - L) and
delta = sum(grad * output), which are the merged ones. (Algorithm 2 of FlashAttention-2, arXiv 2307.08691, lines 11 to 16.)

Queries of positions that are no rows are zeros: attention over documents of a few thousand tokens is a few hundredths of a step, and then nothing has to be
packed twice.

The merge is compiled for each number of own keys. So there are few such numbers: a list of them is filled up with keys that weigh nothing.

Legend: T positions of the pack, R rows, H query heads, G key-value heads, d head width, J own keys of a row so far, filled up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eyas.draft.fused import fused

OWN_MULTIPLE = 3  # seven steps then merge 27 keys instead of 21, and compile 2 lists instead of 6


def flash_fits(keys: torch.Tensor) -> bool:
    """Whether torch's flash attention takes such keys: on a GPU, 16 bits, heads of up to 256."""
    return keys.is_cuda and keys.dtype in (torch.bfloat16, torch.float16) and keys.shape[-1] % 8 == 0 and keys.shape[-1] <= 256


def flash_forward(
    q_THd: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, starts: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal attention within documents; starts int32 [N + 1]. -> out [T, H, d], log-sum-exp float32 [H, T], and two that backward wants back."""
    out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(q_THd, k_TGd, v_TGd, starts, starts, longest, longest, 0.0, True, False)
    return out, lse, seed, unused


def flash_backward(
    grad_THd: torch.Tensor, q_THd: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, out_THd: torch.Tensor, lse_HT: torch.Tensor,
    starts: torch.Tensor, longest: int, seed: torch.Tensor, unused: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> gradients of q, k, v, the same bits each time: left to itself, the kernel adds parts of q's in whatever order they come."""
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # the kernel writes all of it
    try:
        q, k, v = torch.ops.aten._flash_attention_backward(
            grad_THd, q_THd, k_TGd, v_TGd, out_THd, lse_HT, starts, starts, longest, longest, 0.0, True, seed, unused
        )
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    return q, k, v


def flash_unrolled_attention(
    q_RHd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    rows_R: torch.Tensor,
    row_of_T: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """As `unrolled_attention`, over packed keys and values of step 0; row_of_T: the row at each position, R where none is. Returns [R, H, d]."""
    out: torch.Tensor = _Merged.apply(q_RHd, k_TGd, v_TGd, rows_R, row_of_T, starts, longest, len(own_keys), *own_keys, *own_values)
    return out


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_RHd: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, rows_R: torch.Tensor, row_of_T: torch.Tensor, starts: torch.Tensor,
        longest: int, num_own: int, *own: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        (q_THd,) = spread(row_of_T, q_RHd)
        out_THd, lse_HT, seed, unused = flash_forward(q_THd, k_TGd, v_TGd, starts, longest)
        weights_RHJ = torch.empty(0)
        if num_own:
            out_RHd, lse_RH, weights_RHJ = merge(q_RHd, out_THd, lse_HT.T, rows_R, *filled(own[:num_own], own[num_own:]))
            lse_HT = lse_HT.index_copy(1, rows_R, lse_RH.T)
        else:
            out_RHd = out_THd.index_select(0, rows_R)
        ctx.save_for_backward(q_RHd, k_TGd, v_TGd, rows_R, row_of_T, starts, out_RHd, lse_HT, seed, unused, weights_RHJ, *own)
        ctx.longest, ctx.num_own = longest, num_own
        return out_RHd

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RHd,) = grads
        q_RHd, k_TGd, v_TGd, rows_R, row_of_T, starts, out_RHd, lse_HT, seed, unused, weights_RHJ, *own = ctx.saved_tensors
        grad_RHd = grad_RHd.contiguous()
        q_THd, out_THd, grad_THd = spread(row_of_T, q_RHd, out_RHd, grad_RHd)
        grad_q_THd, grad_k, grad_v = flash_backward(grad_THd, q_THd, k_TGd, v_TGd, out_THd, lse_HT, starts, ctx.longest, seed, unused)
        grads_own: list[torch.Tensor] = []
        if ctx.num_own:
            own_keys, own_values, _ = filled(own[: ctx.num_own], own[ctx.num_own :])
            grad_q, keys, values = merge_backward(grad_RHd, q_RHd, out_RHd, grad_q_THd, rows_R, weights_RHJ, own_keys, own_values)
            grads_own = [*keys[: ctx.num_own], *values[: ctx.num_own]]
        else:
            grad_q = grad_q_THd.index_select(0, rows_R)
        return grad_q, grad_k, grad_v, *(None,) * 5, *grads_own


def filled(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Keys and values, as many as the next multiple says, and what is added to their scores [J]: 0, or for those that fill up, minus infinity."""
    more = -len(keys) % OWN_MULTIPLE
    added_J = torch.zeros(len(keys) + more, device=keys[0].device)
    added_J[len(keys) :] = float("-inf")
    # As other tensors over the same memory: torch compiles anew where one tensor comes twice.
    return [*keys, *(keys[0].detach() for _ in range(more))], [*values, *(values[0].detach() for _ in range(more))], added_J


@fused
def spread(row_of_T: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[R, H, d] each -> [T, H, d], zeros where there is no row."""
    there_T11 = (row_of_T < len(tensors[0]))[:, None, None]
    return [torch.where(there_T11, x_RHd[row_of_T.clamp(max=len(x_RHd) - 1)], 0.0) for x_RHd in tensors]


@fused
def merge(
    q_RHd: torch.Tensor,
    out_THd: torch.Tensor,
    lse_TH: torch.Tensor,
    rows_R: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    added_J: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> output over step 0's and own keys [R, H, d], its log-sum-exp float32 [R, H], the own keys' weights float32 [R, H, J]."""
    out_RHd, lse_RH = out_THd[rows_R], lse_TH[rows_R]
    groups = own_keys[0].shape[1]
    q_RGhd = q_RHd.unflatten(1, (groups, -1)).float() * q_RHd.shape[-1] ** -0.5
    scores_RHJ = torch.stack([(q_RGhd * key.float().unsqueeze(2)).sum(-1).flatten(1) for key in own_keys], dim=-1) + added_J
    merged_RH = torch.logsumexp(torch.cat((lse_RH.unsqueeze(-1), scores_RHJ), dim=-1), dim=-1)
    weights_RHJ = (scores_RHJ - merged_RH.unsqueeze(-1)).exp()
    mixed_RGhd = (out_RHd.float() * (lse_RH - merged_RH).exp().unsqueeze(-1)).unflatten(1, (groups, -1))
    for j, value in enumerate(own_values):
        mixed_RGhd = mixed_RGhd + weights_RHJ[..., j].unflatten(1, (groups, -1)).unsqueeze(-1) * value.float().unsqueeze(2)
    return mixed_RGhd.flatten(1, 2).to(out_RHd.dtype), merged_RH, weights_RHJ


@fused
def merge_backward(
    grad_RHd: torch.Tensor,
    q_RHd: torch.Tensor,
    out_RHd: torch.Tensor,
    grad_q_THd: torch.Tensor,
    rows_R: torch.Tensor,
    weights_RHJ: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """-> the gradient of q [R, H, d], of which grad_q_THd is step 0's part, and the gradients of own keys and values [R, G, d]."""
    groups, scale = own_keys[0].shape[1], q_RHd.shape[-1] ** -0.5
    grad_RGhd, q_RGhd = grad_RHd.float().unflatten(1, (groups, -1)), q_RHd.float().unflatten(1, (groups, -1))
    delta_RGh = (grad_RHd.float() * out_RHd.float()).sum(-1).unflatten(1, (groups, -1))
    grad_q_RGhd = grad_q_THd[rows_R].float().unflatten(1, (groups, -1))
    keys, values = [], []
    for j, (key, value) in enumerate(zip(own_keys, own_values, strict=True)):
        weight_RGh = weights_RHJ[..., j].unflatten(1, (groups, -1))
        by_score_RGh1 = (weight_RGh * ((grad_RGhd * value.float().unsqueeze(2)).sum(-1) - delta_RGh) * scale).unsqueeze(-1)
        grad_q_RGhd = grad_q_RGhd + by_score_RGh1 * key.float().unsqueeze(2)
        keys.append((by_score_RGh1 * q_RGhd).sum(2).to(key.dtype))
        values.append((weight_RGh.unsqueeze(-1) * grad_RGhd).sum(2).to(value.dtype))
    return grad_q_RGhd.flatten(1, 2).to(q_RHd.dtype), keys, values

"""What torch's flash attention computes, in plain torch: it has no such kernel for a CPU.

Legend: T positions of a pack, L of one document, H query heads, G key-value heads, d head width.
"""

from __future__ import annotations

import torch


def naive_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """One document's causal scores [H, L, L]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones(len(q), len(q), device=q.device).triu(1).bool(), float("-inf"))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
    """-> out [T, H, d], log-sum-exp [H, T], and two that backward does not read."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = slice(start, end)
        scores = naive_scores(q[part], k[part])
        repeated = v[part].repeat_interleave(q.shape[1] // v.shape[1], 1).float()
        out[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), repeated).to(q.dtype)
        lse[:, part] = scores.logsumexp(-1)
    return out, lse, torch.empty(0), torch.empty(0)


def backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, starts: torch.Tensor, *unused: object
) -> tuple[torch.Tensor, ...]:
    """Flash attention's backward as its paper states it: p from the given log-sum-exp, delta from the given output."""
    grad_q, grad_k, grad_v = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = slice(start, end)
        p = (naive_scores(q[part], k[part]) - lse[:, part, None]).exp()
        g = grad[part].float()
        delta = (g * out[part].float()).sum(-1).T
        dp = torch.einsum("qhd,khd->hqk", g, v[part].repeat_interleave(repeat, 1).float())
        ds = p * (dp - delta[..., None]) * q.shape[-1] ** -0.5
        grad_q[part] = torch.einsum("hqk,khd->qhd", ds, k[part].repeat_interleave(repeat, 1).float())
        grad_k[part] = torch.einsum("hqk,qhd->khd", ds, q[part].float()).unflatten(1, (-1, repeat)).sum(2)
        grad_v[part] = torch.einsum("hqk,qhd->khd", p, g).unflatten(1, (-1, repeat)).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

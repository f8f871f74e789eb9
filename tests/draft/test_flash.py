"""The attention of the GPU against the reference: merged softmax, its gradients, odd shapes."""

from __future__ import annotations

import random

import pytest
import torch

import eyas.draft.flash as flash
from eyas.draft.attention import Document, unrolled_attention


def naive_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """One document's causal scores [H, L, L]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones(len(q), len(q), device=q.device).triu(1).bool(), float("-inf"))


def stand_in_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
    """What torch's flash attention returns, computed plainly: it has no such kernel for a CPU."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = slice(start, end)
        scores = naive_scores(q[part], k[part])
        repeated = v[part].repeat_interleave(q.shape[1] // v.shape[1], 1).float()
        out[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), repeated).to(q.dtype)
        lse[:, part] = scores.logsumexp(-1)
    return out, lse, torch.empty(0), torch.empty(0)


def stand_in_backward(
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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
    else:
        monkeypatch.setattr(flash, "flash_forward", stand_in_forward)
        monkeypatch.setattr(flash, "flash_backward", stand_in_backward)
    return torch.device(request.param)


# Documents as (length, positions that are rows): one token, none supervised, spans at both ends, all.
PACKS = {
    "one document": [(7, [1, 2, 3])],
    "one token, nothing supervised, both ends": [(1, []), (1, [0]), (9, []), (11, [0, 1, 2, 8, 9, 10]), (5, [0, 1, 2, 3, 4])],
    "long": [(130, list(range(60, 130))), (70, list(range(0, 70, 3)))],
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (8, 2, 80), (4, 1, 128)])
@pytest.mark.parametrize("num_own", [0, 1, 6])
def test_values_and_gradients_are_those_of_the_reference(device: torch.device, pack: str, heads: int, groups: int, width: int, num_own: int) -> None:
    documents, rows = [], []
    start = 0
    for length, wanted in PACKS[pack]:
        documents.append(Document(start, start + length, len(rows), len(rows) + len(wanted)))
        rows += [start + position for position in wanted]
        start += length
    rows_R = torch.tensor(rows, device=device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(random.Random(pack).randrange(1000) + num_own)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    q, k, v = draw(len(rows), heads, width), draw(start, groups, width), draw(start, groups, width)
    own_keys, own_values = ([draw(len(rows), groups, width) for _ in range(num_own)] for _ in range(2))
    grad = draw(len(rows), heads, width).detach()
    lengths = [doc.end - doc.start for doc in documents]
    inputs = [q, k, v, *own_keys, *own_values]

    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    truth = unrolled_attention(exact[0], exact[1].split(lengths), exact[2].split(lengths), exact[3 : 3 + num_own], exact[3 + num_own :], rows_R, documents)
    truth_grads = torch.autograd.grad(truth, exact, grad.float())
    starts = torch.tensor([0, *(doc.end for doc in documents)], dtype=torch.int32, device=device)
    found = flash.flash_unrolled_attention(q, k, v, own_keys, own_values, rows_R, starts, max(lengths))
    found_grads = torch.autograd.grad(found, inputs, grad)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip((found, *found_grads), (truth, *truth_grads), strict=True):
        assert (one.float() - other).norm() <= limit * other.norm() + 1e-6

"""The attention of the GPU against the reference: merged softmax, its gradients, odd shapes."""

from __future__ import annotations

import random

import plain_flash
import pytest
import torch

import eyas.draft.flash as flash
from eyas.draft.attention import Document, unrolled_attention


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
    else:
        monkeypatch.setattr(flash, "flash_forward", plain_flash.forward)
        monkeypatch.setattr(flash, "flash_backward", plain_flash.backward)
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
    row_of_T = torch.full((start,), len(rows), device=device)
    row_of_T[rows_R] = torch.arange(len(rows), device=device)
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
    found = flash.flash_unrolled_attention(q, k, v, own_keys, own_values, rows_R, row_of_T, starts, max(lengths))
    found_grads = torch.autograd.grad(found, inputs, grad)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip((found, *found_grads), (truth, *truth_grads), strict=True):
        assert (one.float() - other).norm() <= limit * other.norm() + 1e-6

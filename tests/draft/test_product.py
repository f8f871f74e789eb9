"""Products with float32 master weights, against plain torch in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from eyas.draft.factor import Float8, Plain
from eyas.draft.norm import RMSNorm
from eyas.draft.product import GatedMLP, Linear
from eyas.train.optim import Optimizers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device(request.param)


def close(found: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> bool:
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    return bool((found.float() - truth.float()).norm() <= limit * truth.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 37])
def test_a_gated_mlp_used_twice_has_the_values_and_gradients_of_plain_torch(device: torch.device, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    mlp, norm = GatedMLP(24, 56).to(device), RMSNorm(24, 1e-5).to(device)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(24) + 0.5)
    x = torch.randn(num_rows, 24, device=device, dtype=dtype, requires_grad=True)
    found = mlp(mlp(x, norm), norm)
    found.float().pow(2).sum().backward()

    weights = [layer.weight.detach().to(dtype).float().requires_grad_() for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    exact, scale = x.detach().float().requires_grad_(), norm.weight.detach().requires_grad_()
    truth = exact
    for _ in range(2):
        normed = F.rms_norm(truth, (24,), scale, 1e-5)
        truth = truth + F.linear(F.silu(F.linear(normed, weights[0])) * F.linear(normed, weights[1]), weights[2])
    truth.pow(2).sum().backward()
    assert found.dtype == dtype and close(found, truth, dtype) and close(x.grad, exact.grad, dtype)
    for layer, weight in zip((mlp.gate_proj, mlp.up_proj, mlp.down_proj), weights, strict=True):
        assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32 and close(layer.weight.grad, weight.grad, dtype)
    assert close(norm.weight.grad, scale.grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_over_uses_and_over_backward_passes(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Linear(16, 8).to(device)
    total = torch.zeros(8, 16, device=device)
    for _ in range(3):
        x = torch.randn(5, 16, device=device, dtype=dtype)
        (layer(x).sum() + 2 * layer(x).sum()).backward()
        total += 3 * x.float().sum(0).expand(8, 16)
    assert layer.weight.grad is not None and close(layer.weight.grad, total, dtype)


def cast(layer: Linear) -> torch.Tensor:
    factor = layer.factor(torch.bfloat16)
    assert isinstance(factor, Plain)
    return factor.weight_OI


def test_the_cast_follows_the_weight(device: torch.device) -> None:
    layer = Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device, dtype=torch.bfloat16)
    first = layer.factor(torch.bfloat16)
    assert isinstance(first, Plain)
    assert layer.factor(torch.bfloat16) is first, "cast once"
    optimizer = Optimizers([torch.optim.AdamW([{"params": list(layer.parameters()), "peak": 0.5}], fused=True)])
    layer(x).float().sum().backward()
    optimizer.set_rates(1.0)
    optimizer.step()
    assert torch.equal(cast(layer), layer.weight.detach().bfloat16()) and not torch.equal(cast(layer), first.weight_OI)
    layer.load_state_dict({"weight": torch.ones(4, 4)})
    assert torch.equal(cast(layer), torch.ones(4, 4, device=device, dtype=torch.bfloat16))


def test_what_was_cast_while_measuring_serves_in_training(device: torch.device) -> None:
    layer = Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        layer(x)
    layer(x).float().sum().backward()
    assert layer.weight.grad is not None


def test_a_product_in_float8_is_that_of_the_rounded_factors(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = Linear(64, 48).to(device)
    layer.float8 = True
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-3, 3, 48, device=device)[:, None])  # a scale for all rows would lose most of them
    x = (torch.randn(32, 64, device=device) * torch.logspace(-3, 3, 32, device=device)[:, None]).bfloat16().requires_grad_()
    assert isinstance(layer.factor(torch.bfloat16), Float8)
    found = layer(x)
    grad = torch.randn(32, 48, device=device).bfloat16()
    found.backward(grad)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.double().abs().amax(-1, keepdim=True) / 448
        return (tensor.double() / scale).float().to(torch.float8_e4m3fn).double() * scale

    weight = layer.weight.detach()
    assert close(found, rounded(x.detach()) @ rounded(weight).T, torch.bfloat16)
    assert x.grad is not None and close(x.grad, rounded(grad) @ rounded(weight.T).T, torch.bfloat16)
    assert layer.weight.grad is not None and close(layer.weight.grad, grad.double().T @ x.detach().double(), torch.bfloat16), "not in float8"


def test_a_weight_of_odd_sizes_stays_in_the_inputs_dtype(device: torch.device) -> None:
    layer = Linear(24, 48).to(device)
    layer.float8 = True
    assert isinstance(layer.factor(torch.bfloat16), Plain)

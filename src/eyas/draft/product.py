"""Products with float32 master weights: made in the dtype of the input, their weight gradients summed in float32.

A weight is cast once after each change, not at each of the K steps of an unroll. Its gradient is added to what is there by the product itself where the
library can do that (a GPU): K steps then move two tensors of the weight's size each, not five.

Legend: R rows, I and O the widths of input and output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from eyas.draft.fused import fused


class Linear(nn.Linear):
    """Multiplies in the input's dtype; the weight [O, I] stays float32."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)
        self.cast: tuple[int, torch.Tensor] | None = None  # the weight's version, and what it was cast to

    def forward(self, x_RI: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x_RI, self.weight, self.weight_in(x_RI.dtype))
        return product

    def weight_in(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`, cast anew only if it has changed."""
        version = self.weight._version
        if self.cast is None or self.cast[0] != version or self.cast[1].dtype != dtype or self.cast[1].device != self.weight.device:
            with torch.inference_mode(False):  # kept beyond a measurement under inference mode, and then needed for training
                self.cast = version, self.weight.detach().to(dtype)
        return self.cast[1]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: torch.Tensor, weight_OI: torch.Tensor, cast_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_RI, weight_OI, cast_OI)
        return x_RI @ cast_OI.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RO,) = grads
        x_RI, weight_OI, cast_OI = ctx.saved_tensors
        grad_x = grad_RO @ cast_OI if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(weight_OI, grad_RO, x_RI) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class GatedMLP(nn.Module):
    """Llama's MLP: down(silu(gate(x)) * up(x)). Backward keeps gate and up and computes their product again: a third of the activations less."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner_width)
        self.up_proj = Linear(width, inner_width)
        self.down_proj = Linear(inner_width, width)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        out: torch.Tensor = _GatedMLP.apply(x_RD, *(layer.weight for layer in layers), *(layer.weight_in(x_RD.dtype) for layer in layers))
        return out


class _GatedMLP(torch.autograd.Function):
    """gate_ID, up_ID, down_DI: weights as cast."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor,
        gate_ID: torch.Tensor, up_ID: torch.Tensor, down_DI: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        gate_RI, up_RI = x_RD @ gate_ID.T, x_RD @ up_ID.T
        ctx.save_for_backward(x_RD, gate_RI, up_RI, gate_weight, up_weight, down_weight, gate_ID, up_ID, down_DI)
        return gated(gate_RI, up_RI) @ down_DI.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RD,) = grads
        x_RD, gate_RI, up_RI, gate_weight, up_weight, down_weight, gate_ID, up_ID, down_DI = ctx.saved_tensors
        inner_RI, grad_gate_RI, grad_up_RI = gated_backward(gate_RI, up_RI, grad_RD @ down_DI)
        grad_down = weight_gradient(down_weight, grad_RD, inner_RI)
        grad_gate, grad_up = weight_gradient(gate_weight, grad_gate_RI, x_RD), weight_gradient(up_weight, grad_up_RI, x_RD)
        grad_x = torch.addmm(grad_gate_RI @ gate_ID, grad_up_RI, up_ID)
        return grad_x, grad_gate, grad_up, grad_down, None, None, None


@fused
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@fused
def gated_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> gated(gate, up) once more, and the gradients of gate and up."""
    wide, share = gate.float(), torch.sigmoid(gate.float())
    silu = wide * share
    grad_gate = grad.float() * up.float() * share * (1 + wide * (1 - share))
    return (silu.to(gate.dtype) * up), grad_gate.to(gate.dtype), (grad.float() * silu).to(up.dtype)


def weight_gradient(weight_OI: torch.Tensor, grad_RO: torch.Tensor, x_RI: torch.Tensor) -> torch.Tensor | None:
    """The weight's gradient in float32; None where it was added to `weight.grad` at once, which a GPU's library does in the product itself."""
    if not grad_RO.is_cuda:
        return (grad_RO.T @ x_RI).to(weight_OI.dtype)
    if weight_OI.grad is None:
        weight_OI.grad = torch.zeros_like(weight_OI)
    add_product(weight_OI.grad, grad_RO.T, x_RI)
    return None


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, with total in float32 and the factors in their own dtype."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right

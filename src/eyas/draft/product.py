"""Products with float32 master weights: made in the dtype of the input or in float8, their weight gradients summed in float32.

A weight is cast once after each change, not at each of the K steps of an unroll. Its gradient is added to what is there by the product itself where the
library can do that (a GPU): K steps then move two tensors of the weight's size each, not five. Backward so adds to `weight.grad` itself and gives
autograd nothing for the weight: read `weight.grad` after `backward()`. (The weight itself is kept, not saved: under recomputation a saved tensor comes
back as another, whose gradient nobody reads.)

Legend: R rows, I and O the widths of input and output, J columns of the input at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from eyas.draft.factor import Factor, Float8, Plain, takes_float8
from eyas.draft.fused import fused
from eyas.draft.norm import RMSNorm, rms_norm, rms_norm_backward


class Linear(nn.Linear):
    """Multiplies in the input's dtype, or in float8 if `float8` is set and its sizes allow it; the weight [O, I] stays float32."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)
        self.float8 = False
        self.cast: tuple[tuple[int, torch.dtype, torch.device, bool], Factor] | None = None  # what the factor was made of, and it

    def forward(self, x_RJ: torch.Tensor, more_RO: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """The product plus `more`. first: the column of the weight that the first of x belongs to; x may have fewer than the weight."""
        product: torch.Tensor = _Product.apply(x_RJ, more_RO, self.weight, self.factor(x_RJ.dtype).columns(first, x_RJ.shape[1]), first)
        return product

    def factor(self, dtype: torch.dtype) -> Factor:
        """What products with the weight take of it, made anew only if it has changed."""
        made_of = self.weight._version, dtype, self.weight.device, self.float8
        if self.cast is None or self.cast[0] != made_of:
            kind: type[Plain] | type[Float8] = Float8 if self.float8 and takes_float8(self.weight) else Plain
            with torch.inference_mode(False):  # kept beyond a measurement under inference mode, and then needed for training
                self.cast = made_of, kind.of(self.weight.detach(), dtype)
        return self.cast[1]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RJ: torch.Tensor, more_RO: torch.Tensor | None, weight_OI: torch.Tensor, factor: Factor, first: int) -> torch.Tensor:
        ctx.save_for_backward(x_RJ)
        ctx.weight, ctx.factor, ctx.first = weight_OI, factor, first
        return factor.times(factor.left(x_RJ), more_RO)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RO,) = grads
        (x_RJ,) = ctx.saved_tensors
        grad_x = ctx.factor.back(grad_RO) if ctx.needs_input_grad[0] else None
        add_weight_gradient(ctx.weight, grad_RO, x_RJ, ctx.first)
        return grad_x, grad_RO if ctx.needs_input_grad[1] else None, None, None, None


def normed_products(norm: RMSNorm, x_RD: torch.Tensor, layers: Sequence[Linear], first: int = 0) -> tuple[torch.Tensor, ...]:
    """-> x normalised, and its product with each layer's weight from column `first` on. Backward keeps x alone, and normalises it again."""
    factors = [layer.factor(x_RD.dtype).columns(first, x_RD.shape[1]) for layer in layers]
    out: tuple[torch.Tensor, ...] = _NormedProducts.apply(x_RD, norm.weight, norm.eps, first, factors, *(layer.weight for layer in layers))
    return out


class _NormedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: torch.Tensor, norm_weight: torch.Tensor, eps: float, first: int, factors: list[Factor], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_RD, norm_weight)
        ctx.weights, ctx.factors, ctx.eps, ctx.first = weights, factors, eps, first
        normed_RD = rms_norm(x_RD, norm_weight, eps)
        left = factors[0].left(normed_RD)
        return normed_RD, *(factor.times(left) for factor in factors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad_RD, *grad_products = grads
        x_RD, norm_weight = ctx.saved_tensors
        normed_RD = rms_norm(x_RD, norm_weight, ctx.eps)
        nothing = (None,) * (3 + len(ctx.weights))
        total_RD = grad_RD  # autograd's, and not to be changed; the first sum is ours
        for grad_RO, weight, factor in zip(grad_products, ctx.weights, ctx.factors, strict=True):
            if grad_RO is None:
                continue
            add_weight_gradient(weight, grad_RO, normed_RD, ctx.first)
            total_RD = factor.back(grad_RO, total_RD, in_place=total_RD is not grad_RD)
        if total_RD is None:
            return None, None, *nothing
        return *rms_norm_backward(total_RD, x_RD, norm_weight, ctx.eps, None), *nothing


class GatedMLP(nn.Module):
    """Llama's MLP: down(silu(gate(x)) * up(x)). Backward keeps gate and up and computes their product again: a third of the activations less."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner_width)
        self.up_proj = Linear(width, inner_width)
        self.down_proj = Linear(inner_width, width)

    def forward(self, stream_RD: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """The stream, plus the MLP of the stream normalised."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        factors = [layer.factor(stream_RD.dtype) for layer in layers]
        out: torch.Tensor = _GatedMLP.apply(stream_RD, norm.weight, norm.eps, factors, *(layer.weight for layer in layers))
        return out


class _GatedMLP(torch.autograd.Function):
    """factors: of gate, up and down."""

    @staticmethod
    def forward(
        ctx: Any, stream_RD: torch.Tensor, norm_weight: torch.Tensor, eps: float, factors: list[Factor],
        gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        gate, up, down = factors
        left = gate.left(rms_norm(stream_RD, norm_weight, eps))
        gate_RI, up_RI = gate.times(left), up.times(left)
        ctx.save_for_backward(stream_RD, gate_RI, up_RI, norm_weight)
        ctx.weights, ctx.factors, ctx.eps = (gate_weight, up_weight, down_weight), factors, eps
        return down.times(down.left(gated(gate_RI, up_RI)), stream_RD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RD,) = grads
        stream_RD, gate_RI, up_RI, norm_weight = ctx.saved_tensors
        gate_weight, up_weight, down_weight = ctx.weights
        gate, up, down = ctx.factors
        # The most memory that a training step holds is held here, so what was kept is overwritten: nobody reads it again.
        grad_up_RI = down.back(grad_RD)  # for now that of gate's and up's product
        gated_backward(gate_RI, up_RI, grad_up_RI)
        grad_gate_RI, inner_RI = gate_RI, up_RI
        add_weight_gradient(down_weight, grad_RD, inner_RI)
        x_RD = rms_norm(stream_RD, norm_weight, ctx.eps)
        add_weight_gradient(gate_weight, grad_gate_RI, x_RD)
        grad_x = gate.back(grad_gate_RI)
        add_weight_gradient(up_weight, grad_up_RI, x_RD)
        grad_x = up.back(grad_up_RI, grad_x, in_place=True)
        return *rms_norm_backward(grad_x, stream_RD, norm_weight, ctx.eps, grad_RD), *(None,) * 5


@fused
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@fused
def gated_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> None:
    """In place of gate comes its gradient, in place of up gated(gate, up) once more, and in place of grad the gradient of up."""
    wide, share, wide_grad = gate.float(), torch.sigmoid(gate.float()), grad.float()
    silu = wide * share
    inner, grad_gate, grad_up = silu.to(gate.dtype) * up, wide_grad * up.float() * share * (1 + wide * (1 - share)), wide_grad * silu
    gate.copy_(grad_gate)
    up.copy_(inner)
    grad.copy_(grad_up)


def add_weight_gradient(weight_OI: torch.Tensor, grad_RO: torch.Tensor, x_RJ: torch.Tensor, first: int = 0) -> None:
    """Adds grad.T @ x to the columns of `weight.grad`, float32, from `first` on."""
    if not weight_OI.requires_grad:
        return
    if weight_OI.grad is None:
        if x_RJ.shape[1] == weight_OI.shape[1]:
            weight_OI.grad = product_in(weight_OI.dtype, grad_RO.T, x_RJ)
            return
        weight_OI.grad = torch.zeros_like(weight_OI)
    add_product(weight_OI.grad[:, first : first + x_RJ.shape[1]], grad_RO.T, x_RJ)


def product_in(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right of factors in a dtype of their own."""
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, with total in float32 and the factors in their own dtype."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right

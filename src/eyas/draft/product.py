"""Products with float32 master weights: made in the dtype of the input, their weight gradients summed in float32.

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

from eyas.draft.fused import fused
from eyas.draft.norm import RMSNorm, rms_norm, rms_norm_backward


class Linear(nn.Linear):
    """Multiplies in the input's dtype; the weight [O, I] stays float32."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)
        self.cast: tuple[int, torch.Tensor] | None = None  # the weight's version, and what it was cast to

    def forward(self, x_RJ: torch.Tensor, more_RO: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """The product plus `more`. first: the column of the weight that the first of x belongs to; x may have fewer than the weight."""
        product: torch.Tensor = _Product.apply(x_RJ, more_RO, self.weight, self.weight_in(x_RJ.dtype), first)
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
    def forward(ctx: Any, x_RJ: torch.Tensor, more_RO: torch.Tensor | None, weight_OI: torch.Tensor, cast_OI: torch.Tensor, first: int) -> torch.Tensor:
        ctx.save_for_backward(x_RJ, cast_OI)
        ctx.weight, ctx.first = weight_OI, first
        cast_JO = cast_OI[:, first : first + x_RJ.shape[1]].T
        return x_RJ @ cast_JO if more_RO is None else torch.addmm(more_RO, x_RJ, cast_JO)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RO,) = grads
        x_RJ, cast_OI = ctx.saved_tensors
        grad_x = grad_RO @ cast_OI[:, ctx.first : ctx.first + x_RJ.shape[1]] if ctx.needs_input_grad[0] else None
        add_weight_gradient(ctx.weight, grad_RO, x_RJ, ctx.first)
        return grad_x, grad_RO if ctx.needs_input_grad[1] else None, None, None, None


def normed_products(norm: RMSNorm, x_RD: torch.Tensor, layers: Sequence[Linear], first: int = 0) -> tuple[torch.Tensor, ...]:
    """-> x normalised, and its product with each layer's weight from column `first` on. Backward keeps x alone, and normalises it again."""
    casts = [layer.weight_in(x_RD.dtype) for layer in layers]
    out: tuple[torch.Tensor, ...] = _NormedProducts.apply(x_RD, norm.weight, norm.eps, first, *(layer.weight for layer in layers), *casts)
    return out


class _NormedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: torch.Tensor, norm_weight: torch.Tensor, eps: float, first: int, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        casts = weights[len(weights) // 2 :]
        ctx.save_for_backward(x_RD, norm_weight, *casts)
        ctx.weights, ctx.eps, ctx.columns = weights[: len(casts)], eps, slice(first, first + x_RD.shape[1])
        normed_RD = rms_norm(x_RD, norm_weight, eps)
        return normed_RD, *(normed_RD @ cast[:, ctx.columns].T for cast in casts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad_RD, *grad_products = grads
        x_RD, norm_weight, *casts = ctx.saved_tensors
        normed_RD = rms_norm(x_RD, norm_weight, ctx.eps)
        nothing = (None,) * (2 + 2 * len(casts))
        total_RD = grad_RD  # autograd's, and not to be changed; the first sum is ours
        for grad_RO, weight, cast in zip(grad_products, ctx.weights, casts, strict=True):
            if grad_RO is None:
                continue
            add_weight_gradient(weight, grad_RO, normed_RD, ctx.columns.start)
            if total_RD is None:
                total_RD = grad_RO @ cast[:, ctx.columns]
            elif total_RD is grad_RD:
                total_RD = torch.addmm(grad_RD, grad_RO, cast[:, ctx.columns])
            else:
                total_RD.addmm_(grad_RO, cast[:, ctx.columns])
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
        casts = [layer.weight_in(stream_RD.dtype) for layer in layers]
        out: torch.Tensor = _GatedMLP.apply(stream_RD, norm.weight, norm.eps, *(layer.weight for layer in layers), *casts)
        return out


class _GatedMLP(torch.autograd.Function):
    """gate_ID, up_ID, down_DI: weights as cast."""

    @staticmethod
    def forward(
        ctx: Any, stream_RD: torch.Tensor, norm_weight: torch.Tensor, eps: float,
        gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, gate_ID: torch.Tensor, up_ID: torch.Tensor, down_DI: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        x_RD = rms_norm(stream_RD, norm_weight, eps)
        gate_RI, up_RI = x_RD @ gate_ID.T, x_RD @ up_ID.T
        ctx.save_for_backward(stream_RD, gate_RI, up_RI, norm_weight, gate_ID, up_ID, down_DI)
        ctx.weights, ctx.eps = (gate_weight, up_weight, down_weight), eps
        return torch.addmm(stream_RD, gated(gate_RI, up_RI), down_DI.T)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RD,) = grads
        stream_RD, gate_RI, up_RI, norm_weight, gate_ID, up_ID, down_DI = ctx.saved_tensors
        gate_weight, up_weight, down_weight = ctx.weights
        # The most memory that a training step holds is held here, so what was kept is overwritten: nobody reads it again.
        grad_up_RI = grad_RD @ down_DI  # for now that of gate's and up's product
        gated_backward(gate_RI, up_RI, grad_up_RI)
        grad_gate_RI, inner_RI = gate_RI, up_RI
        add_weight_gradient(down_weight, grad_RD, inner_RI)
        x_RD = rms_norm(stream_RD, norm_weight, ctx.eps)
        add_weight_gradient(gate_weight, grad_gate_RI, x_RD)
        grad_x = grad_gate_RI @ gate_ID
        add_weight_gradient(up_weight, grad_up_RI, x_RD)
        grad_x.addmm_(grad_up_RI, up_ID)
        return *rms_norm_backward(grad_x, stream_RD, norm_weight, ctx.eps, grad_RD), *(None,) * 7


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

"""A weight as products take it: in the dtype of the input, or in float8.

float8: e4m3 with a scale for each row of the left factor and for each row of the right one, sums in float32 inside the product, results in the input's dtype.
A GPU of compute capability 8.9 and up multiplies them about twice as fast as bfloat16; elsewhere the same rounding is done and float32 multiplied. Weight
gradients are not made so: they are sums over all tokens, and small ones matter.

Legend: R rows, I and O the widths of input and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eyas.draft.fused import fused

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # sizes of a weight that the product takes


class Factor(Protocol):
    def columns(self, first: int, count: int) -> Factor:
        """Of these columns of the weight alone."""

    def left(self, x_RI: torch.Tensor) -> Any:
        """What `times` wants of x; the same for all weights."""

    def times(self, left: Any, more_RO: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T, plus `more`."""

    def back(self, grad_RO: torch.Tensor, more_RI: torch.Tensor | None = None, in_place: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
        """grad @ weight, plus `more`, which may be changed if in_place says so; or into `out`."""


@dataclass(frozen=True)
class Plain:
    weight_OI: torch.Tensor

    @classmethod
    def of(cls, weight_OI: torch.Tensor, dtype: torch.dtype) -> Plain:
        return cls(weight_OI.to(dtype))

    def columns(self, first: int, count: int) -> Plain:
        return Plain(self.weight_OI[:, first : first + count])

    def left(self, x_RI: torch.Tensor) -> Any:
        return x_RI

    def times(self, left: Any, more_RO: torch.Tensor | None = None) -> torch.Tensor:
        product: torch.Tensor = left @ self.weight_OI.T if more_RO is None else torch.addmm(more_RO, left, self.weight_OI.T)
        return product

    def back(self, grad_RO: torch.Tensor, more_RI: torch.Tensor | None = None, in_place: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
        if more_RI is None:
            return torch.mm(grad_RO, self.weight_OI, out=out)
        return more_RI.addmm_(grad_RO, self.weight_OI) if in_place else torch.addmm(more_RI, grad_RO, self.weight_OI)


Scaled = tuple[torch.Tensor, torch.Tensor]  # float8 [R, I], and the scale of each row, float32 [R, 1]


@dataclass(frozen=True)
class Float8:
    """rows: the weight [O, I], a scale for each output. turned: the same turned over, [I, O], a scale for each input. dtype: of results."""

    rows: Scaled
    turned: Scaled
    dtype: torch.dtype

    @classmethod
    def of(cls, weight_OI: torch.Tensor, dtype: torch.dtype) -> Float8:
        return cls(scaled(weight_OI), scaled(weight_OI.T.contiguous()), dtype)

    def columns(self, first: int, count: int) -> Float8:
        (values_OI, scale_O1), (turned_IO, scale_I1) = self.rows, self.turned
        part = slice(first, first + count)
        return Float8((values_OI[:, part], scale_O1), (turned_IO[part], scale_I1[part]), self.dtype)

    def left(self, x_RI: torch.Tensor) -> Any:
        return scaled(x_RI)

    def times(self, left: Any, more_RO: torch.Tensor | None = None) -> torch.Tensor:
        return _plus(_product(left, self.rows, self.dtype), more_RO)

    def back(self, grad_RO: torch.Tensor, more_RI: torch.Tensor | None = None, in_place: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
        product = _plus(_product(scaled(grad_RO), self.turned, self.dtype), more_RI)
        return product if out is None else out.copy_(product)


def takes_float8(weight_OI: torch.Tensor) -> bool:
    """Whether a GPU multiplies a weight of this size in float8."""
    return not any(size % MULTIPLE for size in weight_OI.shape)


@fused
def scaled(x_RI: torch.Tensor) -> Scaled:
    """Each row over its scale, which makes its largest value the largest of e4m3."""
    wide_RI = x_RI.float()
    scale_R1 = wide_RI.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (wide_RI / scale_R1).to(FLOAT8), scale_R1


def _product(left: Scaled, right: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """[R, I] and [O, I] -> [R, O]."""
    (x_RI, scale_R1), (weight_OI, scale_O1) = left, right
    if x_RI.is_cuda and len(x_RI):
        product: Any = torch._scaled_mm(x_RI, weight_OI.T, scale_a=scale_R1, scale_b=scale_O1.T, out_dtype=dtype, use_fast_accum=True)
        return product
    return ((x_RI.float() * scale_R1) @ (weight_OI.float() * scale_O1).T).to(dtype)


def _plus(product: torch.Tensor, more: torch.Tensor | None) -> torch.Tensor:
    return product if more is None else product.add_(more)

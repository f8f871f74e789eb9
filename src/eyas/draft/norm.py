"""RMSNorm, and its gradient for functions that compute a norm again in backward rather than keep its output.

Legend: R rows, D width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from eyas.draft.fused import fused


class RMSNorm(nn.Module):
    """Normalises in float32, returns the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


rms_norm = fused(plain_rms_norm)


@fused
def rms_norm_backward(
    grad_RD: torch.Tensor, x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float, more_RD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the gradient of x, with `more` that comes to x past the norm, in x's dtype; that of the weight in float32."""
    x, grad = x_RD.float(), grad_RD.float()
    scale_R1 = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    unit = x * scale_R1
    pulled = grad * weight_D
    grad_x = scale_R1 * (pulled - unit * (pulled * unit).mean(-1, keepdim=True))
    if more_RD is not None:
        grad_x = grad_x + more_RD.float()
    return grad_x.to(x_RD.dtype), (grad * unit).sum(0)

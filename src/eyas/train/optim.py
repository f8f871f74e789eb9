"""What moves the weights: Muon for the layer's matrices, AdamW for the head, the norms, or for all; a warm-up and a cosine for both.

Weights, gradients and moments are float32. Muon replaces the momentum of a matrix by the nearest matrix whose singular values are all about one, so
that directions with small gradients move too. On a fixed budget it beat AdamW clearly (docs/log.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from eyas.config import TrainSection
from eyas.draft.model import Draft

MUON_MOMENTUM = 0.95
# Five steps of x <- a x + (b xx' + c (xx')^2) x bring singular values from (0, 1] to about one; coefficients and momentum by Keller Jordan,
# "Muon: an optimizer for hidden layers in neural networks" (2024), as in torch.optim.Muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with the precision of its products as an argument: that one multiplies in bfloat16 only, which a CPU without instructions for it does
    at a tenth of its float32 speed. The update's size matches AdamW's: 0.2 sqrt(max(rows, columns)) ("Muon is scalable for LLM training", arXiv 2502.16982).
    """

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight]["momentum"] = torch.zeros_like(weight)
                momentum = self.state[weight]["momentum"]
                momentum.lerp_(weight.grad, 1 - MUON_MOMENTUM)
                update = orthogonal(weight.grad.lerp(momentum, MUON_MOMENTUM), self.dtype)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.addcmul_(update.to(weight.dtype), torch.as_tensor(group["lr"]), value=-0.2 * math.sqrt(max(weight.shape)))


def orthogonal(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [m, n] with all its singular values moved to about one; products in `dtype`, result in that dtype."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Optimizers:
    """Several torch optimisers as one. `state` and `param_groups` are those of all of them; each group knows its highest learning rate, `peak`. Learning rates
    are tensors beside the weights, which a CUDA graph (graph.py) reads anew each time."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        for group in self.param_groups:
            device = next((weight.device for weight in group["params"]), None)
            group["lr"] = torch.zeros((), device=device)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        return {weight: state for part in self.parts for weight, state in part.state.items()}

    def restore(self, weight: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Puts back what `state` gave for this weight."""
        (owner,) = [part for part in self.parts for group in part.param_groups if any(weight is other for other in group["params"])]
        owner.state[weight] = {name: value.to(weight.device) for name, value in state.items()}

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def set_rates(self, share: float) -> None:
        """`share` of the peak learning rates."""
        for group in self.param_groups:
            group["lr"].fill_(group["peak"] * share)

    def step(self) -> None:
        for part in self.parts:
            part.step()
        self.moved()

    def moved(self) -> None:
        """torch's fused AdamW and CUDA graphs change weights without counting it, and what was cast from them (draft/product.py) would stay as it was."""
        torch.autograd.graph.increment_version([weight for group in self.param_groups for weight in group["params"]])


def make_optimizer(draft: Draft, section: TrainSection, dtype: torch.dtype) -> Optimizers:
    """dtype: of Muon's products. Weight decay falls on matrices alone: pulling norm weights to zero would fight what they are for. With section.freeze_head
    the head is given no gradient from here on."""
    head = draft.lm_head.weight.requires_grad_(not section.freeze_head)
    matrices = [weight for weight in draft.parameters() if weight.dim() > 1 and weight is not head]
    vectors = [weight for weight in draft.parameters() if weight.dim() == 1]
    decayed: dict[str, Any] = {"params": [] if section.freeze_head else [head], "peak": section.lr, "weight_decay": section.weight_decay}
    adamw = [decayed, {"params": vectors, "peak": section.lr, "weight_decay": 0.0}]
    parts: list[torch.optim.Optimizer] = []
    if section.optimizer == "muon":
        parts.append(Muon([{"params": matrices, "peak": section.muon_lr, "weight_decay": section.weight_decay}], dtype))
    else:
        decayed["params"] += matrices
    cuda = head.is_cuda
    return Optimizers([torch.optim.AdamW(adamw, lr=section.lr, betas=(0.9, section.beta2), fused=True, capturable=cuda), *parts])


def rate_share(section: TrainSection, step: int, total: int) -> float:
    """The share of the peak learning rates at optimiser step `step` (from 0) of `total`: a pure function, so that resuming cannot restart it."""
    warmup = max(1, round(section.warmup * total))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, total - warmup)
    return section.final_lr + (1 - section.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))

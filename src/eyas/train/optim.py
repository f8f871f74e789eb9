"""AdamW on float32 weights, with a warm-up and a cosine."""

from __future__ import annotations

import math

import torch

from eyas.config import TrainSection
from eyas.draft.model import Draft


def make_optimizer(draft: Draft, section: TrainSection) -> torch.optim.AdamW:
    """Weight decay on matrices alone: pulling norm weights to zero would fight what they are for."""
    matrices = [parameter for parameter in draft.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in draft.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=section.lr, betas=(0.9, section.beta2), fused=True)


def learning_rate(section: TrainSection, step: int, total: int) -> float:
    """The learning rate of optimiser step `step` (from 0) of `total`: a pure function, so that resuming cannot restart it."""
    warmup = max(1, round(section.warmup * total))
    if step < warmup:
        return section.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return section.lr * (section.final_lr + (1 - section.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))

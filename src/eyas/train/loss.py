"""Soft cross-entropy to the target's distribution, without ever holding logits of all rows.

Rule for the teacher's mass outside the draft vocabulary: the teacher is renormalised over the draft vocabulary, and every row counts alike.

Chunks of rows: logits, loss and the gradients of rows and head in one pass, so that backward only scales what is there.

Legend: T positions, R rows, D hidden width, Vd draft vocabulary, C rows of a chunk, k step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch
from eyas.train.unroll import StepOutput

CHUNK = 1024  # rows whose logits exist at once


class Teacher:
    """The target's distribution over the draft vocabulary: final norm in float32, the product in the compute dtype."""

    def __init__(self, head: TargetHead, ids: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.norm_weight, self.norm_eps, self.softcap = head.norm_weight.to(device), head.norm_eps, head.softcap
        self.head = head.head[ids].to(device, dtype)

    def probabilities(self, last_CD: torch.Tensor) -> torch.Tensor:
        """last [C, D] of layer N -> float32 [C, Vd]."""
        last = last_CD.float()
        normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + self.norm_eps) * self.norm_weight
        logits = (normed.to(self.head.dtype) @ self.head.T).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits.softmax(-1)


@dataclass(frozen=True)
class LossSums:
    """Per step k, float64 [K] on the CPU: rows that count, summed cross-entropy, rows whose most likely token is the teacher's."""

    rows: torch.Tensor
    cross_entropy: torch.Tensor
    agreed: torch.Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.rows + other.rows, self.cross_entropy + other.cross_entropy, self.agreed + other.agreed)


def draft_loss(steps: list[StepOutput], head_weight: torch.Tensor, teacher: Teacher, batch: Batch, step_weight: float, denominator: float) -> tuple[torch.Tensor, LossSums]:
    """sum over steps and counting rows of step_weight**k * cross-entropy, divided by `denominator`.

    denominator: the rows that count at step 0 in the whole optimiser step, over all its batches, so that the split into batches changes nothing.
    head_weight float32 [Vd, D]. Returns the loss, to be called backward on, and its parts.
    """
    sums = torch.zeros(3, len(steps), dtype=torch.float64)
    weights = [step_weight**k / denominator for k in range(len(steps))]
    counted = [step.counts_R.nonzero()[:, 0] for step in steps]
    rows = [step.hidden_RD[index] for step, index in zip(steps, counted, strict=True)]
    positions = [step.at_R[index] + 1 for step, index in zip(steps, counted, strict=True)]
    loss = _ChunkedLoss.apply(head_weight, teacher, batch.last, positions, weights, sums, *rows)
    return loss, LossSums(*sums)


class _ChunkedLoss(torch.autograd.Function):
    """rows: per step [C_k, D], those that count; positions: per step, where in `last` their teacher stands. Fills `sums` [3, K]."""

    @staticmethod
    def forward(ctx: Any, head_weight: torch.Tensor, teacher: Teacher, last_TD: torch.Tensor, positions: list[torch.Tensor], weights: list[float], sums: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        head = head_weight.to(rows[0].dtype)
        grad_head = torch.zeros_like(head_weight)
        grad_rows = [torch.empty_like(row) for row in rows]
        loss = torch.zeros((), dtype=torch.float32, device=head.device)
        bounds = torch.arange(0, len(last_TD) + CHUNK, CHUNK, device=head.device)
        cuts = [torch.searchsorted(at, bounds).tolist() for at in positions]
        # One chunk of teacher positions serves all steps: the teacher is computed once for each position, not once a step.
        for chunk in range(len(bounds) - 1):
            parts = [(k, slice(cut[chunk], cut[chunk + 1])) for k, cut in enumerate(cuts) if cut[chunk] < cut[chunk + 1]]
            if not parts:
                continue
            needed, where = torch.unique(torch.cat([positions[k][part] for k, part in parts]), return_inverse=True)
            teacher_p = teacher.probabilities(last_TD[needed])
            best = teacher_p.max(-1).indices
            begin = 0
            for k, part in parts:
                index = where[begin : begin + part.stop - part.start]
                begin += part.stop - part.start
                logits = (rows[k][part] @ head.T).float()
                log_q = logits.log_softmax(-1)
                p = teacher_p[index]
                cross_entropy = -torch.dot(p.view(-1), log_q.view(-1))
                loss += weights[k] * cross_entropy
                sums[0, k] += part.stop - part.start
                sums[1, k] += cross_entropy.item()
                sums[2, k] += (log_q.max(-1).indices == best[index]).sum().item()
                grad_logits = log_q.exp_().sub_(p).mul_(weights[k]).to(head.dtype)
                grad_rows[k][part] = grad_logits @ head
                grad_head += grad_logits.T @ rows[k][part]
        ctx.save_for_backward(grad_head, *grad_rows)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (scale,) = grads
        grad_head, *grad_rows = ctx.saved_tensors
        return grad_head * scale, None, None, None, None, None, *(grad * scale.to(grad.dtype) for grad in grad_rows)

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
        self.head = head.restricted(ids, dtype, device)

    def probabilities(self, last_CD: torch.Tensor) -> torch.Tensor:
        """last [C, D] of layer N -> float32 [C, Vd]."""
        return self.head.logits(last_CD).softmax(-1)


@dataclass(frozen=True)
class LossSums:
    """Per step k, float64 [K] on the CPU: rows that count, summed cross-entropy, rows whose most likely token is the teacher's."""

    rows: torch.Tensor
    cross_entropy: torch.Tensor
    agreed: torch.Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.rows + other.rows, self.cross_entropy + other.cross_entropy, self.agreed + other.agreed)


def draft_loss(
    steps: list[StepOutput], head_weight: torch.Tensor, teacher: Teacher, batch: Batch, step_weight: float, denominator: float
) -> tuple[torch.Tensor, LossSums]:
    """sum over steps and counting rows of step_weight**k * cross-entropy, divided by `denominator`.

    denominator: the rows that count at step 0 in the whole optimiser step, over all its batches, so that the split into batches changes nothing.
    head_weight float32 [Vd, D]. Returns the loss, to be called backward on, and its parts.
    """
    sums = torch.zeros(3, len(steps), dtype=torch.float64, device=head_weight.device)
    weights = [step_weight**k / denominator for k in range(len(steps))]
    taught_by_KR = torch.stack([(step.at_R + 1).clamp(max=batch.num_tokens - 1) for step in steps])
    counts_KR = torch.stack([step.counts_R for step in steps])
    loss = _ChunkedLoss.apply(head_weight, teacher, batch.last, taught_by_KR, counts_KR, weights, sums, *(step.hidden_RD for step in steps))
    return loss, LossSums(*sums.cpu())


class _ChunkedLoss(torch.autograd.Function):
    """rows: per step [R, D]; taught_by_KR: where in `last` their teacher stands; counts_KR: whether they count. Fills `sums` [3, K].

    Rows that do not count are computed with weight zero: there are few, and constant shapes are worth more than they cost.
    """

    @staticmethod
    def forward(
        ctx: Any, head_weight: torch.Tensor, teacher: Teacher, last_TD: torch.Tensor, taught_by_KR: torch.Tensor, counts_KR: torch.Tensor,
        weights: list[float], sums: torch.Tensor, *rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        head = head_weight.to(rows[0].dtype)
        grad_head = torch.zeros_like(head_weight)
        grad_rows = [torch.empty_like(row) for row in rows]
        loss = torch.zeros((), dtype=torch.float32, device=head.device)
        for start in range(0, len(rows[0]), CHUNK):
            part = slice(start, start + CHUNK)
            # The steps of a chunk share most of their teachers: each is computed once, not once a step.
            needed, where_KC = torch.unique(taught_by_KR[:, part], return_inverse=True)
            teacher_p = teacher.probabilities(last_TD[_padded(needed)])
            best = teacher_p.max(-1).indices
            for k, row in enumerate(rows):
                counts_C = counts_KR[k, part]
                log_q = (row[part] @ head.T).float().log_softmax(-1)
                p = teacher_p[where_KC[k]]
                cross_entropy_C = -torch.linalg.vecdot(p, log_q) * counts_C
                loss += weights[k] * cross_entropy_C.sum()
                agreed_C = (log_q.max(-1).indices == best[where_KC[k]]) & counts_C
                sums[:, k] += torch.stack((counts_C.sum(dtype=torch.float64), cross_entropy_C.sum(dtype=torch.float64), agreed_C.sum(dtype=torch.float64)))
                grad_logits = log_q.exp_().sub_(p).mul_((weights[k] * counts_C)[:, None]).to(head.dtype)
                grad_rows[k][part] = grad_logits @ head
                grad_head += grad_logits.T @ row[part]
        ctx.save_for_backward(grad_head, *grad_rows)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (scale,) = grads
        grad_head, *grad_rows = ctx.saved_tensors
        return grad_head * scale, None, None, None, None, None, None, *(grad * scale.to(grad.dtype) for grad in grad_rows)


def _padded(index: torch.Tensor) -> torch.Tensor:
    """The index made a multiple of 128 long with copies of its last entry: a matrix library prepares anew for every shape that it has not met."""
    missing = -len(index) % 128
    return torch.cat((index, index[-1:].expand(missing))) if missing else index

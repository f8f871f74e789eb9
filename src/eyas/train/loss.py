"""Soft cross-entropy to the target's distribution, without ever holding logits of all rows.

Rule for the teacher's mass outside the draft vocabulary: the teacher is renormalised over the draft vocabulary, and every row counts alike.

Chunks of rows: logits, loss and the gradients of rows and head in one pass, so that backward only scales what is there.

Legend: T positions, R rows, D hidden width, Vd draft vocabulary, C rows of a chunk, k step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eyas.draft.fused import fused
from eyas.draft.product import add_product
from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch, Chunk
from eyas.train.unroll import StepOutput


class Teacher:
    """The target's logits over the draft vocabulary: final norm in float32, the product in the compute dtype."""

    def __init__(self, head: TargetHead, ids: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.head = head.restricted(ids, dtype, device)

    def logits(self, last_CD: torch.Tensor) -> torch.Tensor:
        """last [C, D] of layer N -> [C, Vd] in the compute dtype, the softcap still to come."""
        return self.head.normed(last_CD).to(self.head.head.dtype) @ self.head.head.T


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
    counts_KR = torch.stack([step.counts_R for step in steps])
    loss = _ChunkedLoss.apply(head_weight, teacher, batch.last, batch.chunks, counts_KR, weights, sums, *(step.hidden_RD for step in steps))
    return loss, LossSums(*sums.cpu())


class _ChunkedLoss(torch.autograd.Function):
    """rows: per step [R, D]; chunks: which of them exist at once and where in `last` their teachers stand; counts_KR: whether they count. Fills `sums`
    [3, K].

    Rows that do not count are computed with weight zero: there are few, and constant shapes are worth more than they cost.
    """

    @staticmethod
    def forward(
        ctx: Any, head_weight: torch.Tensor, teacher: Teacher, last_TD: torch.Tensor, chunks: list[Chunk], counts_KR: torch.Tensor,
        weights: list[float], sums: torch.Tensor, *rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        head = head_weight.to(rows[0].dtype)
        grad_head = torch.zeros_like(head_weight) if ctx.needs_input_grad[0] else head_weight.new_empty(0)
        grad_rows = [torch.empty_like(row) for row in rows]
        loss = torch.zeros((), dtype=torch.float32, device=head.device)
        for chunk in chunks:
            part = slice(chunk.start, chunk.end)
            teacher_NV = teacher.logits(last_TD[chunk.needed_N])
            for k, row in enumerate(rows):
                counts_C = counts_KR[k, part]
                cross_entropy_C, agreed_C, grad_logits = compare(
                    row[part] @ head.T, teacher_NV, chunk.where_KC[k], counts_C, weights[k] * counts_C, teacher.head.softcap
                )
                loss += weights[k] * cross_entropy_C.sum()
                sums[:, k] += torch.stack((counts_C.sum(dtype=torch.float64), cross_entropy_C.sum(dtype=torch.float64), agreed_C.sum(dtype=torch.float64)))
                grad_rows[k][part] = grad_logits @ head
                if ctx.needs_input_grad[0]:
                    add_product(grad_head, grad_logits.T, row[part])
        ctx.save_for_backward(grad_head, *grad_rows)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (scale,) = grads
        grad_head, *grad_rows = ctx.saved_tensors
        return (
            (grad_head * scale if ctx.needs_input_grad[0] else None),
            None,
            None,
            None,
            None,
            None,
            None,
            *(grad * scale.to(grad.dtype) for grad in grad_rows),
        )


@fused
def compare(
    logits_CV: torch.Tensor, teacher_NV: torch.Tensor, where_C: torch.Tensor, counts_C: torch.Tensor, weight_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> cross-entropy of each row that counts, whether it agrees with its teacher on the likeliest token, and the weighted gradient of the logits."""
    teacher_CV = teacher_NV[where_C].float()
    if softcap is not None:
        teacher_CV = softcap * torch.tanh(teacher_CV / softcap)
    p_CV = teacher_CV.softmax(-1)
    log_q_CV = logits_CV.float().log_softmax(-1)
    cross_entropy_C = -(p_CV * log_q_CV).sum(-1) * counts_C
    agreed_C = (log_q_CV.argmax(-1) == teacher_CV.argmax(-1)) & counts_C
    grad_CV = ((log_q_CV.exp() - p_CV) * weight_C[:, None]).to(logits_CV.dtype)
    return cross_entropy_C, agreed_C, grad_CV

"""How far the draft's distribution is from the target's, without ever holding logits of all rows.

p is the target's distribution, q the draft's, both over the draft vocabulary. Two losses of a row:

    soft   cross-entropy: -sum p log q
    lk     w KL(p, q) + (1 - w) TV(p, q), with w = exp(-3 a) and no gradient through it; a = sum min(p, q) = 1 - TV is the chance that speculative sampling
           accepts a token drawn from q. Far from p the cross-entropy leads, near it the acceptance itself. ("LK Losses", arXiv 2602.23881, the hybrid.)

Rule for the target's mass outside the draft vocabulary: p is renormalised over the draft vocabulary, and every row counts alike.

Chunks of rows: logits, loss and the gradients of rows and head in one pass, so that backward only scales what is there.

Legend: T positions, R rows, D hidden width, Vd draft vocabulary, C rows of a chunk, k step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from eyas.draft.fused import fused
from eyas.draft.product import add_product
from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch, Chunk
from eyas.train.unroll import StepOutput

LK_DECAY = 3.0  # the paper's best


class Teacher:
    """The target's logits over the draft vocabulary: final norm in float32, the product in the compute dtype."""

    def __init__(self, head: TargetHead, ids: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.head = head.restricted(ids, dtype, device)

    def logits(self, last_CD: torch.Tensor) -> torch.Tensor:
        """last [C, D] of layer N -> [C, Vd] in the compute dtype, the softcap still to come."""
        return self.head.normed(last_CD).to(self.head.head.dtype) @ self.head.head.T


@dataclass(frozen=True)
class LossSums:
    """Per step k, float64 [K]: rows that count, their summed loss, and how many of them find the teacher's likeliest token the likeliest."""

    rows: torch.Tensor
    loss: torch.Tensor
    agreed: torch.Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.rows + other.rows, self.loss + other.loss, self.agreed + other.agreed)

    def cpu(self) -> LossSums:
        """Waits for the device; not before there is nothing more to give it."""
        return LossSums(self.rows.cpu(), self.loss.cpu(), self.agreed.cpu())


@dataclass(frozen=True)
class Objective:
    """kind: of a row's loss. step_weight: step k weighs step_weight**k. denominator: the rows that count at step 0 in the whole optimiser step, over all its
    batches, so that the split into batches changes nothing."""

    step_weight: float
    denominator: float
    kind: Literal["soft", "lk"] = "soft"


def draft_loss(steps: list[StepOutput], head_weight: torch.Tensor, teacher: Teacher, batch: Batch, objective: Objective) -> tuple[torch.Tensor, LossSums]:
    """The weighted sum over steps and counting rows, divided by the denominator. head_weight float32 [Vd, D].

    Returns the loss, to be called backward on once, and its parts on the device.
    """
    sums = torch.zeros(3, len(steps), dtype=torch.float64, device=head_weight.device)
    counts_KR = torch.stack([step.counts_R for step in steps])
    loss = _ChunkedLoss.apply(head_weight, teacher, batch.last, batch.chunks, counts_KR, objective, sums, *(step.hidden_RD for step in steps))
    return loss, LossSums(*sums)


class _ChunkedLoss(torch.autograd.Function):
    """rows: per step [R, D]; chunks: which of them exist at once and where in `last` their teachers stand; counts_KR: whether they count. Fills `sums`
    [3, K].

    Rows that do not count are computed with weight zero: there are few, and constant shapes are worth more than they cost.
    """

    @staticmethod
    def forward(
        ctx: Any, head_weight: torch.Tensor, teacher: Teacher, last_TD: torch.Tensor, chunks: list[Chunk], counts_KR: torch.Tensor,
        objective: Objective, sums: torch.Tensor, *rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        head = head_weight.to(rows[0].dtype)
        grad_head = torch.zeros_like(head_weight) if ctx.needs_input_grad[0] else None
        grad_rows = [torch.empty_like(row) for row in rows]
        weights = [objective.step_weight**k / objective.denominator for k in range(len(rows))]
        loss = torch.zeros((), dtype=torch.float32, device=head.device)
        for chunk in chunks:
            part = slice(chunk.start, chunk.end)
            teacher_NV = teacher.logits(last_TD[chunk.needed_N])
            for k, row in enumerate(rows):
                counts_C = counts_KR[k, part]
                loss_C, agreed_C, grad_logits = compare(
                    row[part] @ head.T, teacher_NV, chunk.where_KC[k], counts_C, weights[k] * counts_C, teacher.head.softcap, objective.kind == "lk"
                )
                loss += weights[k] * loss_C.sum()
                sums[:, k] += torch.stack([column.sum(dtype=torch.float64) for column in (counts_C, loss_C, agreed_C)])
                torch.mm(grad_logits, head, out=grad_rows[k][part])
                if grad_head is not None:
                    add_product(grad_head, grad_logits.T, row[part])
        ctx.gradients = grad_head, grad_rows
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (scale,) = grads
        grad_head, grad_rows = ctx.gradients
        del ctx.gradients  # held by no one else, the head's becomes `head_weight.grad` itself, not a copy of half a gigabyte
        for grad in (*grad_rows, *([] if grad_head is None else [grad_head])):
            grad.mul_(scale.to(grad.dtype))
        return grad_head, None, None, None, None, None, None, *grad_rows


@fused
def compare(
    logits_CV: torch.Tensor, teacher_NV: torch.Tensor, where_C: torch.Tensor, counts_C: torch.Tensor, weight_C: torch.Tensor, softcap: float | None,
    lk: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the loss of each row that counts, whether it agrees with its teacher on the likeliest token, and the weighted gradient of the logits."""
    teacher_CV = teacher_NV[where_C].float()
    if softcap is not None:
        teacher_CV = softcap * torch.tanh(teacher_CV / softcap)
    log_q_CV = logits_CV.float().log_softmax(-1)
    q_CV = log_q_CV.exp()
    agreed_C = (log_q_CV.argmax(-1) == teacher_CV.argmax(-1)) & counts_C
    if lk:
        log_p_CV = teacher_CV.log_softmax(-1)
        p_CV = log_p_CV.exp()
        accepted_C = torch.minimum(p_CV, q_CV).sum(-1)
        share_C = (-LK_DECAY * accepted_C).exp()
        loss_C = share_C * (p_CV * (log_p_CV - log_q_CV)).sum(-1) + (1 - share_C) * (1 - accepted_C)
        # Of -sum min(p, q): only where q < p does q count, and softmax carries that to every logit.
        short_CV = q_CV < p_CV
        short_C = (q_CV * short_CV).sum(-1)
        grad_CV = share_C[:, None] * (q_CV - p_CV) + (1 - share_C)[:, None] * q_CV * (short_C[:, None] - short_CV.float())
    else:
        p_CV = teacher_CV.softmax(-1)
        loss_C = -(p_CV * log_q_CV).sum(-1)
        grad_CV = q_CV - p_CV
    return loss_C * counts_C, agreed_C, (grad_CV * weight_C[:, None]).to(logits_CV.dtype)

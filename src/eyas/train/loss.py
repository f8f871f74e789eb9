"""How far the draft's distribution is from the target's, without ever holding logits of all rows.

p is the target's distribution, q the draft's, both over the draft vocabulary. Two losses of a row:

    soft   cross-entropy: -sum p log q
    lk     w KL(p, q) + (1 - w) TV(p, q), with w = exp(-3 a) and no gradient through it; a = sum min(p, q) = 1 - TV is the chance that speculative sampling
           accepts a token drawn from q. Far from p the cross-entropy leads, near it the acceptance itself. ("LK Losses", arXiv 2602.23881, the hybrid.)

Rule for the target's mass outside the draft vocabulary: p is renormalised over the draft vocabulary, and every row counts alike.

Chunks of rows: logits, loss and the gradients of rows and head in one pass.

Legend: T positions, R rows, D hidden width, V and Vd the draft vocabulary, C rows of a chunk, N their teachers, k step of K, B = CK.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from eyas.draft.fused import fused
from eyas.draft.product import Linear, add_weight_gradient
from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch
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

    @classmethod
    def nothing(cls, num_steps: int, device: torch.device) -> LossSums:
        return cls(*torch.zeros(3, num_steps, dtype=torch.float64, device=device))

    @property
    def stacked(self) -> torch.Tensor:
        """[3, K], in the order of the fields."""
        return torch.stack([self.rows, self.loss, self.agreed])


@dataclass(frozen=True)
class Objective:
    """kind: of a row's loss. step_weight: step k weighs step_weight**k. denominator: the rows that count at step 0 in the whole optimiser step, over all its
    batches, so that the split into batches changes nothing; a tensor where a graph reads it anew each time."""

    step_weight: float
    denominator: float | torch.Tensor
    kind: Literal["soft", "lk"] = "soft"


def loss_backward(steps: list[StepOutput], lm_head: Linear, teacher: Teacher, batch: Batch, objective: Objective) -> tuple[torch.Tensor, LossSums]:
    """The weighted sum over steps and counting rows, divided by the denominator, and its backward pass.

    Returns the loss and its parts, on the device. Rows that do not count are computed with weight zero: there are few, and constant shapes are worth more
    than they cost.
    """
    loss, sums, grad_RKD = _forward(steps, lm_head, teacher, batch, objective)
    torch.autograd.backward([step.hidden_RD for step in steps], list(grad_RKD.unbind(1)))
    return loss, sums


@torch.no_grad()
def _forward(steps: list[StepOutput], lm_head: Linear, teacher: Teacher, batch: Batch, objective: Objective) -> tuple[torch.Tensor, LossSums, torch.Tensor]:
    """Adds to the head's gradient, and returns that of the rows, [R, K, D]. A function of its own: what it needs is gone before backward needs most."""
    device, dtype, num_steps = lm_head.weight.device, steps[0].hidden_RD.dtype, len(steps)
    head = lm_head.factor(dtype)
    counts_RK = torch.stack([step.counts_R for step in steps], dim=1)
    # Made on the device: to bring them there would wait until it has done all that it was given.
    weights_K = objective.step_weight ** torch.arange(num_steps, dtype=torch.float64, device=device) / objective.denominator
    weight_RK = counts_RK * weights_K.float()
    sums = torch.zeros(3, num_steps, dtype=torch.float64, device=device)
    loss = torch.zeros((), device=device)
    grad_RKD = torch.empty(len(counts_RK), num_steps, lm_head.in_features, dtype=dtype, device=device)
    for chunk in batch.chunks:
        # All steps of a few rows rather than one step of many: larger products, and the teachers are shared.
        part = slice(chunk.start, chunk.end)
        counts_CK, weight_CK = counts_RK[part], weight_RK[part]
        rows_BD = torch.stack([step.hidden_RD[part] for step in steps], dim=1).flatten(0, 1)
        taught = distribution(teacher.logits(batch.last[chunk.needed_N]), teacher.head.softcap)
        logits_BV = head.times(head.left(rows_BD))
        loss_B, agreed_B = compare(logits_BV, *taught, chunk.where_CK.flatten(), counts_CK.flatten(), weight_CK.flatten(), objective.kind == "lk")
        loss_CK = loss_B.view(counts_CK.shape)
        loss += (weight_CK * loss_CK).sum()
        sums += torch.stack([column.sum(0, dtype=torch.float64) for column in (counts_CK, loss_CK, agreed_B.view(counts_CK.shape))])
        head.back(logits_BV, out=grad_RKD[part].flatten(0, 1))
        add_weight_gradient(lm_head.weight, logits_BV, rows_BD)
    lm_head.cast = None  # a quarter of a gigabyte that backward can use
    return loss, LossSums(*sums), grad_RKD


@fused
def distribution(logits_NV: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The teacher's: p float32 [N, V], its entropy [N], and the likeliest token [N]."""
    logits_NV = logits_NV.float()
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    p_NV, log_sum_N = softmax(logits_NV)
    return p_NV, log_sum_N - (p_NV * logits_NV).sum(-1), logits_NV.argmax(-1)


@fused
def compare(
    logits_BV: torch.Tensor, p_NV: torch.Tensor, entropy_N: torch.Tensor, likeliest_N: torch.Tensor, where_B: torch.Tensor, counts_B: torch.Tensor,
    weight_B: torch.Tensor, lk: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the loss of each row that counts, and whether it agrees with its teacher on the likeliest token. The logits become their weighted gradient."""
    wide_BV, p_BV = logits_BV.float(), p_NV[where_B]
    q_BV, log_sum_B = softmax(wide_BV)
    agreed_B = (wide_BV.argmax(-1) == likeliest_N[where_B]) & counts_B
    loss_B = log_sum_B - (p_BV * wide_BV).sum(-1)  # -sum p log q; without the logarithms of q, one pass over the logits makes all sums
    grad_BV = q_BV - p_BV
    if lk:
        accepted_B = torch.minimum(p_BV, q_BV).sum(-1)
        share_B = (-LK_DECAY * accepted_B).exp()
        loss_B = share_B * (loss_B - entropy_N[where_B]) + (1 - share_B) * (1 - accepted_B)
        # Of -sum min(p, q): only where q < p does q count, and softmax carries that to every logit.
        short_BV = q_BV < p_BV
        short_B = (q_BV * short_BV).sum(-1)
        grad_BV = share_B[:, None] * grad_BV + (1 - share_B)[:, None] * q_BV * (short_B[:, None] - short_BV.float())
    logits_BV.copy_(grad_BV * weight_B[:, None])
    return loss_B * counts_B, agreed_B


def softmax(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> softmax [B, V] and log-sum-exp [B] of float32 logits. Written out where it is compiled; elsewhere torch's own softmax is faster than its exp."""
    largest_B = logits_BV.amax(-1)
    if torch.compiler.is_compiling():
        exp_BV = (logits_BV - largest_B.unsqueeze(-1)).exp()
        sum_B = exp_BV.sum(-1)
        return exp_BV * (1 / sum_B).unsqueeze(-1), largest_B + sum_B.log()
    softmax_BV = logits_BV.softmax(-1)
    return softmax_BV, largest_B - softmax_BV.amax(-1).log()  # the largest is 1 / sum

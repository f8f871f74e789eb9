"""Acceptance simulated from features: K draft steps from every row at once, then rounds as they are served.

A round starts at row i, whose draft tokens predict x[i+2], x[i+3], ...; m of them match the text; the target adds one; the next round starts at
row i + m + 1. On greedy text of the target this is exact: what the target would verify is what stands there.

    text        x5 x6 x7 x8 x9    K = 2, first round at row 4 (x5 is known)
    row 4       drafts x6 right, x7 wrong   -> m = 1, the target gives x7, next row 6
    row 6       drafts x8 right, x9 right   -> m = 2, all of the text is there

Legend: R rows, K steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.draft.model import Draft
from eyas.evaluate.fairness import counted
from eyas.export.check import ExportedDraft
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch, make_batch
from eyas.train.unroll import unroll


@dataclass(frozen=True)
class Acceptance:
    """rounds: target forwards that verified a draft. drafted[k], accepted[k]: rounds in which position k was up for comparison (all before it
    accepted, text left), and in which it matched."""

    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def length(self) -> float | None:
        """Acceptance length: 1 + accepted draft tokens a round, with the token that the target adds. None without rounds."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def per_position(self) -> list[float | None]:
        """Conditional rates a_k: of the rounds that came to position k, the share that accepted it."""
        return [accepted / drafted if drafted else None for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]

    @property
    def survival(self) -> list[float | None]:
        """Cumulative rates: of all rounds, the share that accepted positions 0 to k."""
        return [accepted / self.rounds if self.rounds else None for accepted in self.accepted]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Acceptance:
        """From its fields as JSON gives them back."""
        return cls(values["rounds"], tuple(values["drafted"]), tuple(values["accepted"]))

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.rounds + other.rounds,
            tuple(a + b for a, b in zip(self.drafted, other.drafted, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )


def interval(prompts: Sequence[Acceptance]) -> list[float] | None:
    """The acceptance length's 95% interval over prompts: what other prompts of the same kind would give, by drawing these anew 2,000 times. None of fewer
    than two prompts."""
    prompts = [each for each in prompts if each.rounds]
    if len(prompts) < 2:
        return None
    counts = torch.tensor([[each.rounds, sum(each.accepted)] for each in prompts], dtype=torch.float64)
    drawn = torch.randint(0, len(prompts), (2000, len(prompts)), generator=torch.Generator().manual_seed(0))
    rounds, accepted = counts[drawn].sum(1).unbind(1)
    return torch.quantile(1 + accepted / rounds, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


def nothing(num_draft_tokens: int) -> Acceptance:
    return Acceptance(0, (0,) * num_draft_tokens, (0,) * num_draft_tokens)


def one_round(matched: int, possible: int, num_draft_tokens: int) -> Acceptance:
    """A round that accepted `matched` of the `possible` tokens that were still to come (at most num_draft_tokens)."""
    return Acceptance(
        1,
        tuple(int(k < possible and k <= matched) for k in range(num_draft_tokens)),
        tuple(int(k < matched) for k in range(num_draft_tokens)),
    )


def simulate_rounds(matches_RK: torch.Tensor, num_steps_R: torch.Tensor, positions_R: torch.Tensor) -> Acceptance:
    """Rounds over the rows of one document. matches bool [R, K]: step k of the row gave the text's token; num_steps [R]: steps with text to compare.

    positions_R ascend; where they leave a gap (another turn), a new run of rounds starts.
    """
    num_draft_tokens = matches_RK.shape[1]
    leading_R = matches_RK.long().cumprod(1).sum(1)
    leading, steps, positions = leading_R.tolist(), num_steps_R.tolist(), positions_R.tolist()
    total = nothing(num_draft_tokens)
    row = 0
    while row < len(positions):
        possible = min(steps[row], num_draft_tokens)
        matched = min(leading[row], possible)
        total = total + one_round(matched, possible, num_draft_tokens)
        following = positions[row] + matched + 1
        row += 1
        while row < len(positions) and positions[row] < following and positions[row] == positions[row - 1] + 1:
            row += 1
    return total


@dataclass(frozen=True)
class Foreseen:
    """What the draft says over one document, from every row at once.

    rank int64 [R, K]: how many tokens step k of the row finds likelier than the text's, all before it being the text's; FAR where that is outside the draft
    vocabulary, or there is none. num_steps int64 [R] and positions int64 [R] as in `simulate_rounds`. rate float32 [R, K], of a text drawn from the target: the
    chance that the text's token was proposed by a draft that samples too, and taken (outlook.py). sampled: bins of fairness.py, of such a text.
    """

    rank_RK: torch.Tensor
    num_steps_R: torch.Tensor
    positions_R: torch.Tensor
    rate_RK: torch.Tensor | None = None
    sampled: Sequence[int] = ()

    def acceptance(self, num_draft_tokens: int, width: int = 1) -> Acceptance:
        """Of a chain of draft tokens; with `width`, of a tree of the so many likeliest tokens at each place, behind each of which the same follows."""
        if len(self.positions_R) == 0:
            return nothing(num_draft_tokens)
        return simulate_rounds(self.rank_RK[:, :num_draft_tokens] < width, self.num_steps_R, self.positions_R)


FAR = 1 << 30


@dataclass(frozen=True)
class Drawn:
    """That a text was drawn from the target at this temperature. log_p [T]: the target's log-probability of the token behind each position."""

    temperature: float
    log_p_T: torch.Tensor


@torch.no_grad()
def foresee(draft: Draft, ids: torch.Tensor, batch: Batch, num_draft_tokens: int, drawn: Drawn | None = None) -> list[Foreseen]:
    """One a document of the batch. ids int64 [Vd] is the draft vocabulary."""
    place_V = torch.full((draft.shape.vocab_size,), -1, device=ids.device).scatter_(0, ids, torch.arange(len(ids), device=ids.device))
    ranks, rates = [], []
    for step in unroll(draft, batch, num_draft_tokens) if len(batch.rows_R) else []:
        place_R = place_V[batch.label_T[step.at_R]]
        there_R = (place_R >= 0) & step.counts_R
        logits_RV, place_R = draft.lm_head(step.hidden_RD), place_R.clamp(min=0)
        ranks.append(torch.where(there_R, rank_of(logits_RV, place_R), FAR))
        if drawn is not None:
            log_q_R = (logits_RV.float() / drawn.temperature).log_softmax(-1).gather(1, place_R[:, None])[:, 0]
            log_p_R = drawn.log_p_T[(step.at_R + 1).clamp(max=len(drawn.log_p_T) - 1)]
            rates.append(torch.where(there_R, (log_q_R - log_p_R).clamp(max=0).exp(), 0.0))
    rank_RK = torch.stack(ranks, dim=1).cpu() if ranks else torch.empty(0, num_draft_tokens, dtype=torch.long)
    rate_RK = torch.stack(rates, dim=1).cpu() if rates else torch.empty(0, num_draft_tokens)
    num_steps_R, rows_R = batch.num_steps_R.cpu(), batch.rows_R.cpu()
    spans = [slice(doc.row_start, doc.row_end) for doc in batch.documents]
    return [Foreseen(rank_RK[span], num_steps_R[span], rows_R[span], None if drawn is None else rate_RK[span]) for span in spans]


def rank_of(logits_RV: torch.Tensor, place_R: torch.Tensor) -> torch.Tensor:
    """How many places come before `place`, likeliest first, equals in order, as argmax has it: int64 [R]."""
    own_R1 = logits_RV.gather(1, place_R[:, None])
    before = torch.arange(logits_RV.shape[1], device=logits_RV.device) < place_R[:, None]
    return ((logits_RV > own_R1) | ((logits_RV == own_R1) & before)).sum(1)


def simulate(draft: Draft, ids: torch.Tensor, batch: Batch, num_draft_tokens: int) -> list[Acceptance]:
    """One Acceptance a document of the batch."""
    return [found.acceptance(num_draft_tokens) for found in foresee(draft, ids, batch, num_draft_tokens)]


@dataclass(frozen=True)
class Simulator:
    """A draft and what it needs of its target, in the dtype and on the device on which it computes. head: the target's; temperature: of the answers."""

    exported: ExportedDraft
    embedding: torch.Tensor
    head: TargetHead
    temperature: float

    @classmethod
    def of(cls, exported: ExportedDraft, head: TargetHead, temperature: float, dtype: torch.dtype, device: torch.device) -> Simulator:
        return cls(ExportedDraft(exported.draft.to(device, dtype), exported.ids.to(device)), head.embedding.to(device, dtype), head, temperature)

    def foresee(self, states_TLD: torch.Tensor, prompt: list[int], answer: list[int], num_draft_tokens: int) -> Foreseen:
        """What the draft says over one answer of the target. states_TLD: the target's on prompt and answer, at the draft's three layers and the last."""
        text, drawn = [*prompt, *answer], None
        sampled: Sequence[int] = ()
        tokens = torch.tensor(text, dtype=torch.int32)
        if self.temperature > 0:
            log_p_T = torch.zeros(len(text) - 1)
            log_p_AV = (self.head.logits(states_TLD[len(prompt) - 1 : -1, 3]) / self.temperature).log_softmax(-1)
            log_p_T[len(prompt) - 1 :] = log_p_AV.gather(1, tokens[len(prompt) :, None].long())[:, 0]
            sampled = counted(log_p_AV, tokens[len(prompt) :].long())
            drawn = Drawn(self.temperature, log_p_T.to(self.embedding.device))
        row = FeatureRow("", tokens, torch.arange(len(text)) >= len(prompt), states_TLD[:, :3], states_TLD[:, 3])
        batch = make_batch([row], self.embedding, num_draft_tokens, self.embedding.dtype).to(self.embedding.device)
        (found,) = foresee(self.exported.draft, self.exported.ids, batch, num_draft_tokens, drawn)
        return replace(found, sampled=sampled)

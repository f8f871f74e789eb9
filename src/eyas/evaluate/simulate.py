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
from dataclasses import dataclass
from typing import Any

import torch

from eyas.draft.model import Draft
from eyas.export.check import ExportedDraft
from eyas.features.shard import FeatureRow
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


@torch.no_grad()
def simulate(draft: Draft, embedding: torch.Tensor, ids: torch.Tensor, batch: Batch, num_draft_tokens: int) -> list[Acceptance]:
    """One Acceptance a document of the batch. embedding [V, D] in the compute dtype, ids int64 [Vd] the draft vocabulary."""
    if len(batch.rows_R) == 0:
        return [nothing(num_draft_tokens) for _ in batch.documents]
    matches = []
    for step in unroll(draft, embedding, batch, num_draft_tokens):
        best_R = draft.lm_head(step.hidden_RD).argmax(-1)
        matches.append((ids[best_R] == batch.label_T[step.at_R]) & step.counts_R)
    matches_RK = torch.stack(matches, dim=1).cpu()
    num_steps_R, rows_R = batch.num_steps_R.cpu(), batch.rows_R.cpu()
    return [
        simulate_rounds(matches_RK[doc.row_start : doc.row_end], num_steps_R[doc.row_start : doc.row_end], rows_R[doc.row_start : doc.row_end])
        for doc in batch.documents
    ]


def simulate_answer(
    states_TLD: torch.Tensor, exported: ExportedDraft, embedding: torch.Tensor, prompt: list[int], answer: list[int], num_draft_tokens: int
) -> Acceptance:
    """The acceptance of one answer of the target. states_TLD: the target's states on prompt and answer, at the draft's three layers and the last."""
    text = [*prompt, *answer]
    supervised = torch.arange(len(text)) >= len(prompt)
    row = FeatureRow("", torch.tensor(text, dtype=torch.int32), supervised, states_TLD[:, :3], states_TLD[:, 3])
    batch = make_batch([row], num_draft_tokens, embedding.dtype).to(embedding.device)
    return simulate(exported.draft, embedding, exported.ids, batch, num_draft_tokens)[0]

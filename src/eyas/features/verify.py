"""Proof of capture: the features themselves must reproduce the target's own log-probabilities.

Norm and head applied to `last` give the target's distribution. If a layer is off by one, the final norm is missing or doubled, or rows were
mixed up, the log-probabilities of the row's tokens are wrong by whole nats.

From the same states: whether the text is the target's own. A draft learns to foresee what it is shown, and serves what the target says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from eyas.errors import UserError
from eyas.features.codec import FLOAT8, decode
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead

# Mean |difference| in nats. float32: rounding of two ways to sum. bfloat16: the engine's own logits are rounded to 8 bits, 0.01 to 0.03 measured
# on SmolLM2-135M; float8 features 0.08. The faults that this looks for cost 1 nat and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, FLOAT8: 0.5}
POLICY_ROWS, POLICY_POSITIONS = 64, 8
FOREIGN_NATS = 0.3  # of surprise beyond the target's own uncertainty; measured in docs/data.md
END_NATS = 3.0  # of surprise by the end of an answer
POSITIONS = 32  # of a row that are looked at, spread evenly: the head of a large target is slow on a CPU


def capture_error(tokens: torch.Tensor, last: torch.Tensor, head: TargetHead, log_probabilities: torch.Tensor) -> float:
    """Mean |log p by features - log p by the engine| over up to `POSITIONS` of the row's tokens, in nats; 0 for a row of one token, which says nothing.

    tokens int [T]; last [T, D] of layer N; log_probabilities [P - 1], the engine's own for the first P <= T tokens but the very first.
    """
    count = len(log_probabilities)
    if count == 0:
        return 0.0
    at = torch.linspace(0, count - 1, min(count, POSITIONS)).round().long()
    log_p = head.logits(last[at]).log_softmax(-1).gather(-1, tokens[at + 1, None].long())[:, 0]
    return float((log_p - log_probabilities[at]).abs().mean())


def prove_capture(error: float, num_layers: int, tolerance: float) -> None:
    """Raises UserError, before anything is stored, if a row's `capture_error` is larger than `tolerance`."""
    if not error <= tolerance:  # also catches NaN
        raise UserError(
            f"Proof of capture failed: norm and head on layer {num_layers} miss the target's own log-probabilities by {error:.3g} nats on average "
            f"(at most {tolerance:g} allowed). Likely, in this order: the final norm of this model type is not the one in src/eyas/target/embeddings.py, "
            "the tapped layer is not the last, rows were mixed up. No shard was written; please report it with the model's config.json."
        )


@dataclass(frozen=True)
class Policy:
    """How likely the target was to write the supervised tokens: over `tokens` of them, the mean of -log p, that of the target's own uncertainty there (its
    entropy), both in nats, and the share that it would have said greedily. end_surprise: the mean of -log p of `ends` stop tokens.

    Of text that it sampled itself at temperature 1 the first two are equal but for chance, of text it was surer of the first is smaller. What others wrote
    surprises it: the first is larger.
    """

    tokens: int
    surprise: float
    uncertainty: float
    greedy: float
    ends: int
    end_surprise: float

    @property
    def foreign(self) -> bool:
        return self.surprise - self.uncertainty > FOREIGN_NATS

    @property
    def ends_elsewhere(self) -> bool:
        return self.ends > 0 and self.end_surprise > END_NATS


def policy_of(rows: Sequence[FeatureRow], head: TargetHead, stop_ids: Collection[int]) -> Policy | None:
    """Over a few supervised tokens of each row, and the last stop token among them; None if there are none."""
    log_p, said, ends = [], [], []
    for row in rows:
        (at,) = row.supervised[1:].nonzero(as_tuple=True)  # the state at t gives token t + 1
        if not len(at):
            continue
        count = min(len(at), POLICY_POSITIONS)
        middle = at[((torch.arange(count) + 0.5) * len(at) / count).long()]  # of equal parts: both ends are unlike the rest
        stops = at[torch.isin(row.tokens[at + 1].long(), torch.tensor(list(stop_ids), dtype=torch.long))][-1:]
        chosen = torch.cat((middle, stops))
        last = decode(row.last[chosen], None if row.scale is None else row.scale[chosen, -1], torch.float32)
        log_p.append(head.logits(last).log_softmax(-1))
        said.append(row.tokens[chosen + 1].long())
        ends.append(torch.arange(len(chosen)) >= count)
    if not said:
        return None
    all_log_p, all_said, end = torch.cat(log_p), torch.cat(said), torch.cat(ends)
    surprise = -all_log_p.gather(-1, all_said[:, None])[:, 0].double()
    uncertainty = torch.special.entr(all_log_p.exp()).sum(-1)
    return Policy(
        tokens=int((~end).sum()),
        surprise=float(surprise[~end].mean()),
        uncertainty=float(uncertainty[~end].mean()),
        greedy=float((all_log_p.argmax(-1) == all_said)[~end].double().mean()),
        ends=int(end.sum()),
        end_surprise=float(surprise[end].mean()) if end.any() else 0.0,
    )

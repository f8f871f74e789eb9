"""Proof of capture: the features themselves must reproduce the target's own log-probabilities.

Norm and head applied to `last` give the target's distribution. If a layer is off by one, the final norm is missing or doubled, or rows were
mixed up, the log-probabilities of the row's tokens are wrong by whole nats.
"""

from __future__ import annotations

import torch

from eyas.errors import UserError
from eyas.features.codec import FLOAT8
from eyas.target.embeddings import TargetHead

# Mean |difference| in nats. float32: rounding of two ways to sum. bfloat16: the engine's own logits are rounded to 8 bits, 0.01 to 0.03 measured
# on SmolLM2-135M; float8 features 0.08. The faults that this looks for cost 1 nat and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, FLOAT8: 0.5}
POSITIONS = 32  # of a row that are looked at, spread evenly: the head of a large target is slow on a CPU


def capture_error(tokens: torch.Tensor, last: torch.Tensor, head: TargetHead, log_probabilities: torch.Tensor) -> float:
    """Mean |log p by features - log p by the engine| over up to `POSITIONS` of the row's tokens, in nats; 0 for a row of one token, which says nothing.

    tokens int [T]; last [T, D] of layer N; log_probabilities [T - 1], the engine's own for the tokens but the first.
    """
    count = len(tokens) - 1
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

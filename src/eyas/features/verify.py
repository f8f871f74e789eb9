"""Proof of capture: the features themselves must reproduce the target's own log-probabilities.

Norm and head applied to `last` give the target's distribution. If a layer is off by one, the final norm is missing or doubled, or rows were
mixed up, the log-probabilities of the row's tokens are wrong by whole nats.
"""

from __future__ import annotations

import torch

from eyas.errors import UserError
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead
from eyas.target.engine import TargetEngine

# Mean |difference| in nats. float32: rounding of two ways to sum. bfloat16: the engine's own logits are rounded to 8 bits, 0.01 to 0.03 measured
# on SmolLM2-135M; the faults that this looks for cost 1 nat and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def capture_error(row: FeatureRow, head: TargetHead, engine: TargetEngine) -> float:
    """Mean |log p by features - log p by the engine| over the row's tokens but the first, in nats."""
    log_p = head.logits(row.last).log_softmax(-1)[:-1].gather(-1, row.tokens[1:, None].long())[:, 0]
    return float((log_p - engine.log_probabilities(row.tokens.tolist())).abs().mean())


def prove_capture(row: FeatureRow, head: TargetHead, engine: TargetEngine, tolerance: float) -> float:
    """Returns the error. Raises UserError, before anything is stored, if it is larger than `tolerance`."""
    error = capture_error(row, head, engine)
    if not error <= tolerance:  # also catches NaN
        raise UserError(
            f"Proof of capture failed: norm and head on layer {engine.spec.num_layers} miss the target's own log-probabilities by {error:.3g} nats on average "
            f"(at most {tolerance:g} allowed). Likely, in this order: the final norm of this model type is not the one in src/eyas/target/embeddings.py, "
            "the tapped layer is not the last, rows were mixed up. No shard was written; please report it with the model's config.json."
        )
    return error

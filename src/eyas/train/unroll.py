"""K draft steps over a batch, as they will happen when serving. The second of the two places that shift.

    row i = 1       reads                      embedding of       rope   predicts        teacher
    step 0          fused aux of position 1    x2 = next_T[1]     1      x3 = label_T[1]   last of position 2
    step 1          its own hidden of step 0   x3 = next_T[2]     2      x4 = label_T[2]   last of position 3
    step k          its own hidden of k - 1    next_T[i + k]      i + k  label_T[i + k]    last of position i + k + 1

Legend: T positions of the pack, R rows, D hidden width, k step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eyas.draft.attention import unrolled_attention
from eyas.draft.flash import flash_fits, flash_unrolled_attention
from eyas.draft.model import Draft
from eyas.train.batch import Batch


@dataclass(frozen=True)
class StepOutput:
    """hidden_RD: what the head reads. at_R: i + k, the position whose label this step predicts. counts_R: whether the row counts at this step."""

    hidden_RD: torch.Tensor
    at_R: torch.Tensor
    counts_R: torch.Tensor


def unroll(draft: Draft, embedding: torch.Tensor, batch: Batch, num_steps: int, recompute: bool = False) -> list[StepOutput]:
    """embedding [V, D] is the target's, in the compute dtype. Keys and values of step 0 are computed for all positions, the rest for rows alone.

    recompute: backward computes each step again from its hidden state, instead of keeping all that it needs from the way forward.
    """
    layer = draft.midlayer
    hidden_TD = draft.fuse(batch.aux)
    x_TE, residual_TD = layer.read(F.embedding(batch.next_T, embedding), hidden_TD)
    keys_TGd, values_TGd = layer.keys_values(x_TE, draft.rope(batch.positions_T))
    if flash_fits(keys_TGd):
        attend = partial(flash_unrolled_attention, k_TGd=keys_TGd, v_TGd=values_TGd, starts=batch.starts, longest=batch.longest)
    else:  # split once rather than sliced at each step: the gradient of a slice is a whole tensor of zeros
        lengths = [doc.end - doc.start for doc in batch.documents]
        attend = partial(unrolled_attention, keys=keys_TGd.split(lengths), values=values_TGd.split(lengths), documents=batch.documents)
    # index_select, whose gradient adds rows; that of x[rows] sorts them first.
    first = [tensor.index_select(0, batch.rows_R) for tensor in (x_TE, residual_TD)]
    positions_R = batch.positions_T[batch.rows_R]

    def step(
        k: int, at_R: torch.Tensor, hidden_RD: torch.Tensor, own_keys: list[torch.Tensor], own_values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """-> what the head reads, the next hidden state, own keys and values with this step's."""
        cos_sin = draft.rope(positions_R + k)
        if k == 0:
            x_RE, residual_RD = first
        else:
            x_RE, residual_RD = layer.read(F.embedding(batch.next_T[at_R], embedding), hidden_RD)
            own_key, own_value = layer.keys_values(x_RE, cos_sin)
            own_keys, own_values = [*own_keys, own_key], [*own_values, own_value]
        attended_RHd = attend(layer.queries(x_RE, cos_sin), own_keys=own_keys, own_values=own_values, rows_R=batch.rows_R)
        return *draft.outputs(*layer.finish(attended_RHd, residual_RD)), own_keys, own_values

    make = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False) if recompute else step
    hidden_RD, steps = hidden_TD, []
    own_keys: list[torch.Tensor] = []
    own_values: list[torch.Tensor] = []
    for k in range(num_steps):
        # A row near its document's end may point behind it; it does not count there, and the clamp only keeps the index legal.
        at_R = (batch.rows_R + k).clamp(max=batch.num_tokens - 1)
        normed_RD, hidden_RD, own_keys, own_values = make(k, at_R, hidden_RD, own_keys, own_values)
        steps.append(StepOutput(normed_RD, at_R, batch.num_steps_R > k))
    return steps

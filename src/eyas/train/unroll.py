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
from typing import Protocol

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eyas.draft.attention import Document, unrolled_attention
from eyas.draft.flash import flash_fits, flash_unrolled_attention
from eyas.draft.model import DecoderLayer, Draft
from eyas.train.batch import Batch


@dataclass(frozen=True)
class StepOutput:
    """hidden_RD: what the head reads. at_R: i + k, the position whose label this step predicts. counts_R: whether the row counts at this step."""

    hidden_RD: torch.Tensor
    at_R: torch.Tensor
    counts_R: torch.Tensor


Own = list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # per layer: own keys and own values of the steps so far, [R, G, d] each


def unroll(draft: Draft, embedding: torch.Tensor, batch: Batch, num_steps: int, recompute: bool = False) -> list[StepOutput]:
    """embedding [V, D] is the target's, in the compute dtype. Keys and values of step 0 are computed for all positions, the rest for rows alone.

    Of a draft with several layers, step 0 of all but the last is computed for all positions: the next layer's keys there hang on it.
    recompute: backward computes each step again from its hidden state, instead of keeping all that it needs from the way forward.
    """
    first_layer, later_layers = draft.midlayer, draft.later_layers
    hidden_TD = draft.fuse(batch.aux)
    cos_sin = draft.rope(batch.positions_T)
    x_TE, residual_TD = first_layer.read(F.embedding(batch.next_T, embedding), hidden_TD)
    attentions = [_attention_over(*first_layer.self_attn.keys_values(x_TE, cos_sin), batch)]
    layer: DecoderLayer = first_layer
    for following in later_layers:
        attended_THd = attentions[-1](layer.self_attn.queries(x_TE, cos_sin), own_keys=[], own_values=[], everywhere=True)
        x_TE, residual_TD = following.read(*layer.finish(attended_THd, residual_TD))
        attentions.append(_attention_over(*following.self_attn.keys_values(x_TE, cos_sin), batch))
        layer = following
    # index_select, whose gradient adds rows; that of x[rows] sorts them first.
    of_step_0 = [tensor.index_select(0, batch.rows_R) for tensor in (x_TE, residual_TD)]
    positions_R = batch.positions_T[batch.rows_R]

    def step(k: int, at_R: torch.Tensor, hidden_RD: torch.Tensor, own: Own) -> tuple[torch.Tensor, torch.Tensor, Own]:
        """-> what the head reads, the next hidden state, own keys and values with this step's."""
        cos_sin = draft.rope(positions_R + k)
        if k == 0:  # all but the last layer is behind us
            x_RE, residual_RD = of_step_0
            attended_RHd = attentions[-1](layer.self_attn.queries(x_RE, cos_sin), own_keys=[], own_values=[])
            return *draft.outputs(*layer.finish(attended_RHd, residual_RD)), own

        def attended(number: int, layer: DecoderLayer, x_RE: torch.Tensor) -> torch.Tensor:
            key, value = layer.self_attn.keys_values(x_RE, cos_sin)
            keys, values = [*own[number][0], key], [*own[number][1], value]
            grown.append((keys, values))
            return attentions[number](layer.self_attn.queries(x_RE, cos_sin), own_keys=keys, own_values=values)

        grown: Own = []
        x_RE, residual_RD = first_layer.read(F.embedding(batch.next_T[at_R], embedding), hidden_RD)
        stream_RD, update_RD = first_layer.finish(attended(0, first_layer, x_RE), residual_RD)
        for number, later in enumerate(later_layers, start=1):
            x_RD, residual_RD = later.read(stream_RD, update_RD)
            stream_RD, update_RD = later.finish(attended(number, later, x_RD), residual_RD)
        return *draft.outputs(stream_RD, update_RD), grown

    make = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False) if recompute else step
    own: Own = [([], []) for _ in attentions]
    hidden_RD, steps = hidden_TD, []
    for k in range(num_steps):
        # A row near its document's end may point behind it; it does not count there, and the clamp only keeps the index legal.
        at_R = (batch.rows_R + k).clamp(max=batch.num_tokens - 1)
        normed_RD, hidden_RD, own = make(k, at_R, hidden_RD, own)
        steps.append(StepOutput(normed_RD, at_R, batch.num_steps_R > k))
    return steps


class _Attend(Protocol):
    def __call__(self, q: torch.Tensor, *, own_keys: list[torch.Tensor], own_values: list[torch.Tensor], everywhere: bool = False) -> torch.Tensor: ...


def _attention_over(keys_TGd: torch.Tensor, values_TGd: torch.Tensor, batch: Batch) -> _Attend:
    """The attention of one layer's queries, of the batch's rows or of every position, to these keys of step 0 and to own ones."""
    lengths = [doc.end - doc.start for doc in batch.documents]
    flash = flash_fits(keys_TGd)
    # Split once rather than sliced at each step: the gradient of a slice is a whole tensor of zeros.
    keys, values = ([], []) if flash else (keys_TGd.split(lengths), values_TGd.split(lengths))

    def attend(q: torch.Tensor, *, own_keys: list[torch.Tensor], own_values: list[torch.Tensor], everywhere: bool = False) -> torch.Tensor:
        rows_R = torch.arange(batch.num_tokens, device=q.device) if everywhere else batch.rows_R
        if flash:
            return flash_unrolled_attention(q, keys_TGd, values_TGd, own_keys, own_values, rows_R, batch.starts, batch.longest)
        documents = [Document(doc.start, doc.end, doc.start, doc.end) for doc in batch.documents] if everywhere else batch.documents
        return unrolled_attention(q, keys, values, own_keys, own_values, rows_R, documents)

    return attend

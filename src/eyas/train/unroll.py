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
from eyas.draft.model import DecoderLayer, Draft, Read
from eyas.draft.shared import Selection
from eyas.train.batch import Batch


@dataclass(frozen=True)
class StepOutput:
    """hidden_RD: what the head reads. at_R: i + k, the position whose label this step predicts. counts_R: whether the row counts at this step."""

    hidden_RD: torch.Tensor
    at_R: torch.Tensor
    counts_R: torch.Tensor


Own = list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # per layer: own keys and own values of the steps so far, [R, G, d] each


def unroll(draft: Draft, batch: Batch, num_steps: int, recompute: bool = False) -> list[StepOutput]:
    """Keys and values of step 0 are computed for all positions, the rest for rows alone.

    Of a draft with several layers, step 0 of all but the last is computed for all positions: the next layer's keys there hang on it.
    recompute: backward computes each step again from its hidden state, instead of keeping all that it needs from the way forward.
    """
    first_layer, later_layers = draft.midlayer, draft.later_layers
    # Of more than one layer, step 0 of the first asks for all positions, and so may all steps.
    whose_queries = Chosen(batch, everywhere=bool(later_layers))
    whose_keys = Chosen(batch, everywhere=True)
    embedded = first_layer.embed(batch.embedded, whose_queries.positions)
    hidden_TD = draft.fuse(batch.aux)
    cos_sin = draft.rope(batch.positions_T)
    rows = Selection(batch.rows_R, batch.row_of_T)
    layer: DecoderLayer = first_layer
    read = first_layer.read_all(hidden_TD, embedded, None if later_layers else rows, None if later_layers else whose_queries.at(0))
    attentions = [_attention_over(*layer.self_attn.keys_values(read.k, read.v, cos_sin), batch)]
    for number, following in enumerate(later_layers, start=1):
        stream_TD = layer.finish(attentions[-1](layer.self_attn.queries(read.q, cos_sin), own_keys=[], own_values=[], everywhere=True), read.residual)
        read, layer = following.read_all(stream_TD, rows if number == len(later_layers) else None), following
        attentions.append(_attention_over(*layer.self_attn.keys_values(read.k, read.v, cos_sin), batch))
    positions_R = batch.positions_T[batch.rows_R]

    def step(k: int, hidden_RD: torch.Tensor, own: Own) -> tuple[torch.Tensor, torch.Tensor, Own]:
        """-> what the head reads, the next hidden state, own keys and values with this step's."""
        cos_sin = draft.rope(positions_R + k)
        if k == 0:  # all but the last layer is behind us
            attended_RHd = attentions[-1](layer.self_attn.queries(read.q, cos_sin), own_keys=[], own_values=[])
            return *draft.outputs(layer.finish(attended_RHd, read.residual)), own

        def after(number: int, layer: DecoderLayer, read: Read) -> torch.Tensor:
            key, value = layer.self_attn.keys_values(read.k, read.v, cos_sin)
            keys, values = [*own[number][0], key], [*own[number][1], value]
            grown.append((keys, values))
            return layer.finish(attentions[number](layer.self_attn.queries(read.q, cos_sin), own_keys=keys, own_values=values), read.residual)

        grown: Own = []
        stream_RD = after(0, first_layer, first_layer.read(hidden_RD, embedded, whose_queries.at(k), whose_keys.at(k)))
        for number, later in enumerate(later_layers, start=1):
            stream_RD = after(number, later, later.read(stream_RD))
        return *draft.outputs(stream_RD), grown

    make = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False) if recompute else step
    own: Own = [([], []) for _ in attentions]
    hidden_RD, steps = hidden_TD, []
    for k in range(num_steps):
        normed_RD, hidden_RD, own = make(k, hidden_RD, own)
        steps.append(StepOutput(normed_RD, batch.at(k), batch.num_steps_R > k))
    return steps


class Chosen:
    """The positions whose embeddings the steps read, all or those that queries need, and which of them go with the rows at each step."""

    def __init__(self, batch: Batch, everywhere: bool) -> None:
        self.batch = batch
        self.positions = None if everywhere else Selection(batch.asking_N, batch.rank_T)

    def at(self, k: int) -> Selection:
        batch, num_rows = self.batch, len(self.batch.rows_R)
        at_R, unmoved = batch.at(k), max(0, batch.num_tokens - k)
        back_T = F.pad(batch.row_of_T[:unmoved], (batch.num_tokens - unmoved, 0), value=num_rows)
        if self.positions is None:
            return Selection(at_R, back_T)
        asking_N, rank_T = self.positions.where_R, batch.rank_T
        there_N = torch.arange(len(asking_N), device=at_R.device) == rank_T[asking_N]  # not one of the copies that fill it up
        return Selection(rank_T[at_R], torch.where(there_N, back_T[asking_N], num_rows))


class _Attend(Protocol):
    def __call__(self, q: torch.Tensor, *, own_keys: list[torch.Tensor], own_values: list[torch.Tensor], everywhere: bool = False) -> torch.Tensor: ...


def _attention_over(keys_TGd: torch.Tensor, values_TGd: torch.Tensor, batch: Batch) -> _Attend:
    """The attention of one layer's queries, of the batch's rows or of every position, to these keys of step 0 and to own ones."""
    lengths = [doc.end - doc.start for doc in batch.documents]
    flash = flash_fits(keys_TGd)
    # Split once rather than sliced at each step: the gradient of a slice is a whole tensor of zeros.
    keys, values = ([], []) if flash else (keys_TGd.split(lengths), values_TGd.split(lengths))

    def attend(q: torch.Tensor, *, own_keys: list[torch.Tensor], own_values: list[torch.Tensor], everywhere: bool = False) -> torch.Tensor:
        all_T = torch.arange(batch.num_tokens, device=q.device)
        rows_R, row_of_T = (all_T, all_T) if everywhere else (batch.rows_R, batch.row_of_T)
        if flash:
            return flash_unrolled_attention(q, keys_TGd, values_TGd, own_keys, own_values, rows_R, row_of_T, batch.starts, batch.longest)
        documents = [Document(doc.start, doc.end, doc.start, doc.end) for doc in batch.documents] if everywhere else batch.documents
        return unrolled_attention(q, keys, values, own_keys, own_values, rows_R, documents)

    return attend

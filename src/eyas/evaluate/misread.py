"""Why a server accepts less than the features of its own answers give: it reads the draft otherwise than it was trained, and this looks for how.

Each reading is one mistake that engines and converters have made, applied to the exported draft. What it would accept over the served answers is simulated, and
the readings that come nearest to the served rates, position by position, are named.

Legend: T tokens, L layers, D hidden width, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.evaluate.simulate import Acceptance, Simulator, nothing
from eyas.export.check import ExportedDraft
from eyas.target.embeddings import TargetHead

SWITCHES = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
NEARER = 0.5  # of the distance that the draft as it was trained has from what was served, for a reading to be named
NAMED = 3
Answered = Sequence[tuple[list[int], list[int]]]  # prompt and answer


@dataclass(frozen=True)
class Reading:
    """says: the end of "it serves as if ..". layers: whose states are fed to the draft."""

    says: str
    draft: Draft
    ids: torch.Tensor
    embedding: torch.Tensor
    layers: list[int]


def readings(exported: ExportedDraft, head: TargetHead) -> Iterator[Reading]:
    """First the draft as it was trained; then each mistake. In float32 on the CPU."""
    draft, shape = exported.draft, exported.draft.shape
    right = Reading("all were as it should be", draft, exported.ids, head.embedding, shape.aux_layers)
    yield right
    for switch in SWITCHES:
        value: Any = not getattr(shape, switch)
        yield replace(right, says=f"{switch} were {str(value).lower()}", draft=_built(draft, replace(shape, **{switch: value})))
    yield replace(right, says="the final norm had no weights", draft=_changed(draft, "norm.weight", torch.ones_like))
    yield replace(right, says="the head were the target's own", draft=_changed(draft, "lm_head.weight", lambda weight: head.head[exported.ids]))
    plain = {"rope_type": "default", "rope_theta": shape.rope_parameters["rope_theta"]}
    if shape.rope_parameters["rope_type"] != "default":
        yield replace(right, says="rope were not scaled", draft=_built(draft, replace(shape, rope_parameters=plain)))
    if shape.rope_parameters["rope_theta"] != 10_000:
        other = {**shape.rope_parameters, "rope_theta": 10_000.0}
        yield replace(right, says="rope_theta were 10000", draft=_built(draft, replace(shape, rope_parameters=other)))
    yield replace(right, says="rope turned neighbours, not halves, of a head", draft=_interleaved(draft))
    places = torch.arange(len(exported.ids))
    if shape.draft_vocab_size < shape.vocab_size:
        yield replace(right, says="there were no d2t", ids=places)
        yield replace(right, says="d2t were added to the target's ids", ids=(exported.ids + places).clamp(max=shape.vocab_size - 1))
    yield replace(right, says="the embedding were zeros", embedding=torch.zeros_like(head.embedding))
    yield replace(right, says="the embedding were scaled by the root of the width", embedding=head.embedding * math.sqrt(shape.hidden_size))
    for step in (1, -1):
        moved = [min(max(layer + step, 0), shape.target_layers) for layer in shape.aux_layers]
        yield replace(right, says=f"the aux layers were {moved}", layers=moved)
    yield replace(right, says="the aux layers came in reverse order", layers=shape.aux_layers[::-1])


def _built(draft: Draft, shape: DraftShape) -> Draft:
    """The same weights in another shape: norms that it lacks are ones, norms that it has too many are left out."""
    other = Draft(shape)
    other.load_state_dict(draft.state_dict(), strict=False)
    return other.eval()


def _changed(draft: Draft, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Draft:
    other = _built(draft, draft.shape)
    with torch.no_grad():
        weight = other.get_parameter(name)
        weight.copy_(change(weight))
    return other


def _interleaved(draft: Draft) -> Draft:
    """Pairs (0, 1), (2, 3), .. turned where (0, d/2), (1, d/2 + 1), .. should be: the same as giving each head's rows of q and k in that order."""
    d = draft.shape.head_dim
    order = torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])
    for layer in ("midlayer", *(f"layers.{number}" for number in draft.layers)):
        for part in ("q", "k"):
            draft = _changed(draft, f"{layer}.self_attn.{part}_proj.weight", lambda weight: weight.unflatten(0, (-1, d))[:, order].flatten(0, 1))
            if draft.shape.qk_norm:
                draft = _changed(draft, f"{layer}.self_attn.{part}_norm.weight", lambda weight: weight[order])
    return draft


@dataclass(frozen=True)
class Explanation:
    """What a reading would accept, and how far that is from what was served."""

    as_if: str
    acceptance_length: float
    distance: float


def explained(
    served: Acceptance, answered: Answered, capture: Callable[[list[int]], list[torch.Tensor]], exported: ExportedDraft, simulator: Simulator
) -> list[Explanation]:
    """The readings that come near what was served, the nearest first; empty if none does. capture: layers -> the target's states [T, L, D] on each prompt with
    its answer. exported: the draft in float32; simulator: in which dtype and where it is to be simulated."""
    tried = list(readings(exported, simulator.head))
    last = exported.draft.shape.target_layers
    layers = sorted({layer for reading in tried for layer in reading.layers} | {last})
    states, found = capture(layers), []
    for reading in tried:
        places = [layers.index(layer) for layer in (*reading.layers, last)]
        total = nothing(len(served.accepted))
        other = Simulator.of(
            ExportedDraft(_built(reading.draft, reading.draft.shape), reading.ids), replace(simulator.head, embedding=reading.embedding), 0.0,
            simulator.embedding.dtype, simulator.embedding.device,
        )  # fmt: skip
        for states_TLD, (prompt, answer) in zip(states, answered, strict=True):
            total = total + other.foresee(states_TLD[:, places], prompt, answer, len(served.accepted)).acceptance(len(served.accepted))
        found.append(Explanation(reading.says, total.length or 0.0, _distance(total, served)))
    right, mistakes = found[0], sorted(found[1:], key=lambda each: each.distance)
    return [each for each in mistakes if each.distance < NEARER * right.distance][:NAMED]


def _distance(one: Acceptance, other: Acceptance) -> float:
    """Of the shares of rounds that come past each position, summed: by so much the acceptance lengths differ at most."""
    return sum(abs((a or 0.0) - (b or 0.0)) for a, b in zip(one.survival, other.survival, strict=True))

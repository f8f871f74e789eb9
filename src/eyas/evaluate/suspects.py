"""Whether the draft learnt from what the target gives now: some held-out rows go through the target once more.

A draft that was trained on the states of another layer, on another row's, on zeros, or on spans that are off by one, accepts little, and no loss curve says
why. Each such fault is looked for here and named.

Legend: T tokens of a row, L layers, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from eyas.errors import UserError
from eyas.features.codec import decode
from eyas.features.index import INDEX
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow
from eyas.prepare.chat import Chat
from eyas.prepare.rows import read_rows
from eyas.stage import Context

ROWS = 4
TOKENS = 192  # of each row, its first; later ones change nothing about them
ALIKE = 0.9  # cosine; bfloat16 in two engines leaves more than 0.99 between the states of one token
NEARER = 2e-3
SIZES = (0.8, 1.25)
Capture = Callable[[list[list[int]], list[int]], list[torch.Tensor]]


def told_suspects(context: Context, layers: list[int], searched: list[int], capture: Capture, chat: Chat) -> list[str]:
    """As `suspects`, each said as a warning."""
    found = suspects(context.run_folder, layers, searched, capture, chat)
    for fault in found:
        context.reporter.say(f"evaluate: warning: {fault}")
    return found


def suspects(run_folder: Path, layers: list[int], searched: list[int], capture: Capture, chat: Chat) -> list[str]:
    """Sentences; empty if all is well. layers: of the stored features, the last of them `last`. searched: layers among which the one is looked for that stands
    in another's place. capture: rows of tokens and layers -> states [T, L, D] of each."""
    if not (run_folder / "features" / INDEX).exists():  # deleted to make room
        return []
    try:
        reader = FeatureReader(run_folder / "features")
        keys = sorted(row.key for row in read_rows(run_folder / "prepare") if row.holdout and row.key in reader.places)[:ROWS]
        rows = [reader.row(key) for key in keys]
    except UserError as error:
        return [str(error)]
    if not rows:
        return []
    found = _of_spans(rows, chat)
    stored = [_states(row)[:TOKENS] for row in rows]
    fresh = [states.float() for states in capture([row.tokens[:TOKENS].tolist() for row in rows], searched)]
    for position, layer in enumerate(layers):
        name = "the last layer" if position == len(layers) - 1 else f"aux layer {position + 1}"
        if fault := _of_layer([states[:, position] for states in stored], fresh, searched, layer):
            step = f"Move {run_folder / 'features'} away and run `eyas run` again."
            found.append(f"{name} ({layer}) of the stored features {fault}. {step}")
    return found


def _states(row: FeatureRow) -> torch.Tensor:
    """[T, L, D] float32"""
    stored = torch.cat([row.aux.view(torch.uint8), row.last[:, None].view(torch.uint8)], 1).view(row.aux.dtype)
    return decode(stored, row.scale, torch.float32)


def _of_layer(stored: list[torch.Tensor], fresh: list[torch.Tensor], searched: list[int], layer: int) -> str:
    """stored: [T, D] of each row; fresh: [T, L, D] at `searched`. What is wrong, as the end of a sentence; empty if nothing is."""
    place = searched.index(layer)
    size = _median([one.norm(dim=-1) / states[:, place].norm(dim=-1).clamp(min=1e-30) for one, states in zip(stored, fresh, strict=True)])
    if size == 0:
        return "are zeros"
    # Neighbouring layers are much alike: a wrong one shows by another that is more so.
    likeness = [_alike(stored, [states[:, other] for states in fresh]) for other in range(len(searched))]
    best = max(range(len(searched)), key=likeness.__getitem__)
    if likeness[best] >= ALIKE and likeness[best] > likeness[place] + NEARER:
        return f"are those of layer {searched[best]}"
    if likeness[place] >= ALIKE:
        return "" if SIZES[0] < size < SIZES[1] else f"have {size:.2g} times the size of what the target gives now: a norm too many, or one too few"
    for turn in range(1, len(stored)):
        others = [fresh[(row + turn) % len(fresh)][:, place] for row in range(len(fresh))]
        if _alike(stored, others) >= ALIKE:
            return "are those of other rows"
    return "are not what the target gives now: another revision of it, another template, or a fault in capture"


def _alike(stored: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The median cosine of the tokens that both have."""
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(stored, other, strict=True)]
    return _median([torch.nn.functional.cosine_similarity(a, b, dim=-1) for a, b in pairs])


def _median(values: list[torch.Tensor]) -> float:
    return float(torch.cat(values).median())


def _of_spans(rows: list[FeatureRow], chat: Chat) -> list[str]:
    """An answer begins where the template's generation prompt ends; a span that begins elsewhere is off."""
    question = [{"role": "user", "content": "a"}]
    with_prompt, without = chat.text(question, True), chat.text(question, False)
    ending = chat.ids(with_prompt[len(without) :]) if with_prompt.startswith(without) else []
    starts = [(row.tokens.tolist(), at) for row in rows for at in _starts(row.supervised)]
    if not ending or not starts:
        return []
    right = sum(tokens[max(0, at - len(ending)) : at] == ending for tokens, at in starts)
    for shift in (1, -1, 2, -2):
        moved = sum(tokens[max(0, at - shift - len(ending)) : max(0, at - shift)] == ending for tokens, at in starts)
        if moved > right:
            where = "late" if shift > 0 else "early"
            return [f"the supervised spans begin {abs(shift)} token too {where}: {moved} of {len(starts)} answers. Run `eyas prepare` again; report it."]
    return []


def _starts(supervised: torch.Tensor) -> list[int]:
    before = torch.cat([torch.zeros(1, dtype=torch.bool), supervised[:-1]])
    return torch.nonzero(supervised & ~before).flatten().tolist()

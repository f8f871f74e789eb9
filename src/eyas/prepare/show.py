"""Rows as a person reads them: what is supervised in green on a terminal, between « and » elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from eyas.errors import UserError
from eyas.features.reader import FeatureReader
from eyas.prepare.chat import Chat
from eyas.prepare.rows import LINES, PreparedRow, first_rows, read_rows

SAMPLE = 3  # rows that `eyas prepare` shows
SHOWN_TOKENS = 120  # of each end of a row in a sample


def as_text(row: PreparedRow, chat: Chat, shortened: bool = False) -> Text:
    """The row, with what is supervised marked; shortened: without its middle, if it is long."""
    tokens, supervised = row.tokens.tolist(), row.supervised.tolist()
    cut = shortened and len(tokens) > 2 * SHOWN_TOKENS
    parts = [slice(0, SHOWN_TOKENS), slice(len(tokens) - SHOWN_TOKENS, len(tokens))] if cut else [slice(0, len(tokens))]
    text = Text()
    for number, part in enumerate(parts):
        if number:
            text.append(f"\n[... {len(tokens) - 2 * SHOWN_TOKENS:,} tokens ...]\n", style="dim")
        start = part.start
        for end in range(part.start + 1, part.stop + 1):
            if end == part.stop or supervised[end] != supervised[start]:
                stretch = chat.decode(tokens[start:end])
                text.append(f"«{stretch}»" if supervised[start] else stretch, style="green" if supervised[start] else None)
                start = end
    return text


def sample(folder: Path, chat: Chat) -> Text:
    """The first few rows of a finished prepare/ folder."""
    text = Text()
    for number, row in enumerate(first_rows(folder, SAMPLE)):
        text.append(f"--- row {number}, {len(row.tokens):,} tokens; what the draft learns to say stands between « and »\n", style="bold")
        text.append(as_text(row, chat, shortened=True))
        text.append("\n")
    return text


def find_row(folder: Path, name: str) -> tuple[PreparedRow, dict[str, Any], int]:
    """(row, its line in rows.jsonl, its number) by number, key or conversation. Raises UserError if there is none."""
    rows = read_rows(folder)
    for number, (row, line) in enumerate(zip(rows, (folder / LINES).read_bytes().splitlines(), strict=True)):
        about: dict[str, Any] = json.loads(line)
        if name in (str(number), row.key, about["conversation"]) or (len(name) >= 6 and row.key.startswith(name)):
            return row, about, number
    raise UserError(f"There is no row {name} in {folder}. Give a number from 0 to {len(rows) - 1:,}, the beginning of a key, or a conversation's id.")


def described(run_folder: Path, name: str, chat: Chat, layers: list[int]) -> Text:
    """All that is known of a row: where it comes from, its text, and the size of its features. layers: of the target, the last one too."""
    row, about, number = find_row(run_folder / "prepare", name)
    text = Text()
    text.append(f"row {number}, key {row.key}, conversation {about['conversation']} from {about['source']}\n", style="bold")
    side = "held out" if row.holdout else "trained on"
    text.append(f"{len(row.tokens):,} tokens, {int(row.supervised.sum()):,} of them supervised (between « and »), {side}\n")
    text.append(as_text(row, chat))
    reader = FeatureReader(run_folder / "features") if (run_folder / "features").is_dir() else None
    if reader is None or row.key not in reader.places:
        text.append("\nno features are stored of it\n")
        return text
    found = reader.row(row.key)
    states = torch.cat((found.aux.float(), found.last.float()[:, None]), dim=1)
    if found.scale is not None:
        states = states * found.scale.float().unsqueeze(-1)
    text.append(f"\nfeatures in {reader.places[row.key][0].file}; norm over tokens: least, median, largest\n")
    for layer, norms in zip(layers, states.norm(dim=-1).T, strict=True):
        text.append(f"  layer {layer:>3}  {norms.min():>10.4g} {norms.median():>10.4g} {norms.max():>10.4g}\n")
    return text

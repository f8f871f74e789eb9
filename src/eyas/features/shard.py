"""One shard file: whole rows of features. And the index that lists complete shards.

Legend: T tokens of all rows of the shard, R rows, A aux layers (3), D hidden width.

    tokens int32 [T]   supervised bool [T]   aux [T, A, D]   last [T, D]   offsets int64 [R + 1]

A shard is written under another name, synced, renamed, and only then entered with its checksum in index.jsonl, which only grows:
what the index lists is complete. Its first line says what all shards in the folder were captured from.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.artifact import fsync_folder, hash_file, whole_lines, write_tensors
from eyas.errors import UserError

INDEX = "index.jsonl"


@dataclass(frozen=True)
class FeatureRow:
    """tokens int32 [T], supervised bool [T], aux [T, A, D] of the aux layers, last [T, D] of layer N before the final norm."""

    key: str
    tokens: torch.Tensor
    supervised: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class ShardEntry:
    file: str
    bytes: int
    xxh3: str
    keys: list[str]
    lengths: list[int]


def write_shard(folder: Path, number: int, rows: list[FeatureRow]) -> ShardEntry:
    """Writes the shard and enters it in the index; returns its entry."""
    path = folder / f"shard-{number:05d}.safetensors"
    lengths = [len(row.tokens) for row in rows]
    tensors = {
        "tokens": torch.cat([row.tokens for row in rows]),
        "supervised": torch.cat([row.supervised for row in rows]),
        "aux": torch.cat([row.aux for row in rows]),
        "last": torch.cat([row.last for row in rows]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    write_tensors(path, tensors, {"keys": json.dumps([row.key for row in rows])})
    entry = ShardEntry(path.name, path.stat().st_size, hash_file(path), [row.key for row in rows], lengths)
    _append(folder, entry.__dict__)
    return entry


def open_index(folder: Path, capture: dict[str, Any]) -> list[ShardEntry]:
    """The complete shards captured as `capture` says; shards of anything else, and what the index does not list, are removed."""
    path = folder / INDEX
    lines = whole_lines(path)
    if not lines or _parsed(path, lines[0]).get("capture") != capture:
        path.unlink(missing_ok=True)
        entries = []
        _append(folder, {"capture": capture})
    else:
        entries = [_entry(path, line) for line in lines[1:]]
    listed = {entry.file for entry in entries}
    for stray in folder.glob("shard-*"):
        if stray.name not in listed:
            stray.unlink()
    return [entry for entry in entries if (folder / entry.file).exists()]


def read_index(folder: Path) -> list[ShardEntry]:
    """Raises UserError if there is no index."""
    lines = whole_lines(folder / INDEX)
    if not lines:
        raise UserError(f"{folder / INDEX} is missing or empty, so nothing says which shards are complete. Run `eyas extract` again.")
    return [_entry(folder / INDEX, line) for line in lines[1:]]


def _parsed(path: Path, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged. Delete the folder {path.parent} and run `eyas extract` again.")
    return value


def _entry(path: Path, line: bytes) -> ShardEntry:
    try:
        return ShardEntry(**_parsed(path, line))
    except TypeError:
        raise UserError(f"{path} is damaged. Delete the folder {path.parent} and run `eyas extract` again.") from None


def next_number(folder: Path) -> int:
    """One that no shard listed in the index has had, lost ones included: a name stands for one content for ever."""
    return 1 + max((int(entry.file[6:11]) for entry in read_index(folder)), default=-1)


def check_shard(folder: Path, entry: ShardEntry) -> None:
    """Raises UserError if the file is not the one that was entered."""
    path = folder / entry.file
    if not path.exists():
        raise UserError(f"{path} is gone. Delete {folder / 'manifest.json'} and run `eyas extract`: it captures only what is missing.")
    if path.stat().st_size != entry.bytes or hash_file(path) != entry.xxh3:
        raise UserError(
            f"{path} is damaged: its checksum is not the one in {INDEX}. Delete it and {folder / 'manifest.json'}, then run `eyas extract`: it captures "
            f"only what is missing."
        )


def _append(folder: Path, entry: dict[str, Any]) -> None:
    path = folder / INDEX
    new = not path.exists()
    with open(path, "ab") as file:
        file.write((json.dumps(entry) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    if new:
        fsync_folder(folder)

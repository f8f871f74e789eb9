"""One shard file: whole rows of features. And the index that lists complete shards.

Legend: T tokens of all rows of the shard, R rows, A aux layers (3), D hidden width.

    tokens int32 [T]   supervised bool [T]   aux [T, A, D]   last [T, D]   offsets int64 [R + 1]   scale float32 [T, A + 1], with float8 alone

A shard is written under another name, synced, renamed, and only then entered with its checksum in index.jsonl, which only grows:
what the index lists is complete. Its first line says what all shards in the folder were captured from.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from eyas.artifact import append_lines, fsync_folder, hash_file, whole_lines
from eyas.errors import UserError
from eyas.features.codec import FLOAT8, decode

INDEX = "index.jsonl"


class Row(Protocol):
    """key; tokens int32 [T]; supervised bool [T]."""

    @property
    def key(self) -> str: ...
    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def supervised(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class FeatureRow:
    """tokens int32 [T], supervised bool [T], aux [T, A, D] of the aux layers, last [T, D] of layer N before the final norm, as stored; scale float32
    [T, A + 1] of float8, the aux layers' and then last's."""

    key: str
    tokens: torch.Tensor
    supervised: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class ShardEntry:
    file: str
    bytes: int
    xxh3: str
    keys: list[str]
    lengths: list[int]


@dataclass(frozen=True)
class OpenShard:
    """A file laid out for rows whose states are still to come; nobody reads it before `enter` has renamed it and listed it.

    Whoever runs the target writes a row's aux [T, A, D] at byte `aux_at(row)` of `part`, its last [T, D] at `last_at(row)`, and with float8 its scales
    [T, A + 1] at `scale_at(row)`.
    """

    path: Path
    keys: list[str]
    tokens: list[torch.Tensor]  # int32 [T] a row
    width: int  # D
    num_aux: int  # A
    dtype: torch.dtype
    starts: list[int]  # the first token of each row in the shard, and the end
    begin: int  # byte at which aux begins; last follows, and the scales end there

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")

    def aux_at(self, row: int) -> int:
        return self.begin + self.starts[row] * self.num_aux * self.width * self.dtype.itemsize

    def last_at(self, row: int) -> int:
        return self.begin + (self.starts[-1] * self.num_aux + self.starts[row]) * self.width * self.dtype.itemsize

    def scale_at(self, row: int) -> int:
        return self.begin - (self.starts[-1] - self.starts[row]) * (self.num_aux + 1) * 4

    def places(self, row: int) -> dict[str, int]:
        """Where each part of the row's states goes, by name."""
        places = {"aux": self.aux_at(row), "last": self.last_at(row)}
        return {**places, "scale": self.scale_at(row)} if self.dtype == FLOAT8 else places

    def put(self, row: int, parts: dict[str, torch.Tensor]) -> None:
        """aux [T, A, D] and last [T, D] in the shard's dtype, and scale float32 [T, A + 1] if that is float8."""
        with open(self.part, "rb+", buffering=0) as file:
            for name, at in self.places(row).items():
                tensor = parts[name]
                assert tensor.dtype == (torch.float32 if name == "scale" else self.dtype) and len(tensor) == len(self.tokens[row])
                file.seek(at)
                data = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                while data:
                    data = data[file.write(data) :]

    def last(self, row: int) -> torch.Tensor:
        """What stands there for `last` of a row, decoded: float32 [T, D]."""
        part = slice(self.starts[row], self.starts[row + 1])
        with safe_open(self.part, "pt") as file:
            scale = file.get_slice("scale")[part][:, -1] if self.dtype == FLOAT8 else None
            return decode(file.get_slice("last")[part], scale, torch.float32)


def open_shard(folder: Path, number: int, rows: Sequence[Row], num_aux: int, width: int, dtype: torch.dtype) -> OpenShard:
    """Lays out the file: everything but the states is written, and it has its full size."""
    starts = [0, *itertools.accumulate(len(row.tokens) for row in rows)]
    name = {torch.float32: "F32", torch.bfloat16: "BF16", FLOAT8: "F8_E4M3"}[dtype]
    offsets, tokens, supervised = torch.tensor(starts), torch.cat([row.tokens for row in rows]), torch.cat([row.supervised for row in rows])
    header: dict[str, Any] = {"__metadata__": {"keys": json.dumps([row.key for row in rows])}}
    end = 0
    entries = [  # from wide to narrow, so that each begins at a multiple of its own width
        ("offsets", "I64", [len(starts)], 8), ("tokens", "I32", [starts[-1]], 4), ("scale", "F32", [starts[-1], num_aux + 1], 4),
        ("aux", name, [starts[-1], num_aux, width], dtype.itemsize), ("last", name, [starts[-1], width], dtype.itemsize),
        ("supervised", "BOOL", [starts[-1]], 1),
    ]  # fmt: skip
    for entry, kind, shape, size in entries:
        if entry != "scale" or dtype == FLOAT8:
            begin, end = end, end + math.prod(shape) * size
            header[entry] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format lets a header end in spaces
    data = 8 + len(text)
    begin = data + header["aux"]["data_offsets"][0]
    path = folder / f"shard-{number:05d}.safetensors"
    shard = OpenShard(path, [row.key for row in rows], [row.tokens for row in rows], width, num_aux, dtype, starts, begin)
    with open(shard.part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + offsets.numpy().tobytes() + tokens.numpy().tobytes())
        file.seek(data + header["supervised"]["data_offsets"][0])
        file.write(supervised.numpy().tobytes())
    return shard


def finish(shard: OpenShard) -> str:
    """Syncs the filled file and returns its checksum; may run in a thread, as it takes most of the time."""
    with open(shard.part, "rb+") as file:
        os.fsync(file.fileno())
    return hash_file(shard.part)


def enter(folder: Path, shard: OpenShard, checksum: str) -> ShardEntry:
    """Renames the finished file and enters it in the index; returns its entry."""
    shard.part.replace(shard.path)
    fsync_folder(folder)
    entry = ShardEntry(shard.path.name, shard.path.stat().st_size, checksum, shard.keys, [len(tokens) for tokens in shard.tokens])
    append_lines(folder / INDEX, [entry.__dict__])
    return entry


def write_shard(folder: Path, number: int, rows: list[FeatureRow]) -> ShardEntry:
    """Writes a shard of rows that are all there, and enters it in the index; returns its entry."""
    shard = open_shard(folder, number, rows, rows[0].aux.shape[1], rows[0].last.shape[1], rows[0].last.dtype)
    for index, row in enumerate(rows):
        shard.put(index, {"aux": row.aux, "last": row.last, **({} if row.scale is None else {"scale": row.scale})})
    return enter(folder, shard, finish(shard))


def open_index(folder: Path, capture: dict[str, Any]) -> list[ShardEntry]:
    """The complete shards captured as `capture` says; shards of anything else, and what the index does not list, are removed."""
    path = folder / INDEX
    lines = whole_lines(path)
    if not lines or _parsed(path, lines[0]).get("capture") != capture:
        path.unlink(missing_ok=True)
        entries = []
        append_lines(path, [{"capture": capture}])
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

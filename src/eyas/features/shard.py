"""One shard file: whole rows of features, which says itself what it is and whether it is whole.

Legend: T tokens of all rows of the shard, R rows, A aux layers (3), D hidden width.

    tokens int32 [T]   supervised bool [T]   aux [T, A, D]   last [T, D]   offsets int64 [R + 1]   scale float32 [T, A + 1], with float8 alone

Its header holds the keys of its rows, a hash of what they were captured from, and a checksum of the whole file (as it is with zeros in the checksum's own
place), so that the index beside it (features/index.py) can be made anew. It is written under another name, synced, renamed, and then listed.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from eyas.artifact import hash_file, hash_written, tensors_head
from eyas.features.codec import FLOAT8, decode

DTYPE_OF = {  # by its name in safetensors
    "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": FLOAT8,
}  # fmt: skip
NO_SUM = "0" * 32  # what stands in the header until the file is whole
SUM_AT = 8 + len('{"__metadata__": {"xxh3": "')  # behind the header's length, as the format has it


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


def open_shard(folder: Path, number: int, rows: Sequence[Row], num_aux: int, width: int, dtype: torch.dtype, capture: str = "") -> OpenShard:
    """Lays out the file: everything but the states is written, and it has its full size. capture: a hash of what the rows are captured from."""
    starts = [0, *itertools.accumulate(len(row.tokens) for row in rows)]
    name = {dtype: name for name, dtype in DTYPE_OF.items()}[dtype]
    offsets, tokens, supervised = torch.tensor(starts), torch.cat([row.tokens for row in rows]), torch.cat([row.supervised for row in rows])
    header: dict[str, Any] = {"__metadata__": {"xxh3": NO_SUM, "capture": capture, "keys": json.dumps([row.key for row in rows])}}
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
    head = tensors_head(header)
    data = len(head)
    begin = data + header["aux"]["data_offsets"][0]
    path = folder / f"shard-{number:05d}.safetensors"
    shard = OpenShard(path, [row.key for row in rows], [row.tokens for row in rows], width, num_aux, dtype, starts, begin)
    with open(shard.part, "wb") as file:
        _reserve(file.fileno(), data + end)
        file.write(head + offsets.numpy().tobytes() + tokens.numpy().tobytes())
        file.seek(data + header["supervised"]["data_offsets"][0])
        file.write(supervised.numpy().tobytes())
    return shard


def _reserve(handle: int, size: int) -> None:
    """A disk without room says so now, and not in the middle of a forward. Raises OSError if it has none."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # some file systems cannot
                raise


def finish(shard: OpenShard) -> str:
    """Puts the checksum into the filled file, syncs it, and returns the checksum; may run in a thread, as it takes most of the time."""
    checksum = hash_written(shard.part, SUM_AT, NO_SUM.encode())
    with open(shard.part, "rb+") as file:
        file.seek(SUM_AT)
        file.write(checksum.encode())
        file.flush()
        os.fsync(file.fileno())
    return checksum


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a shard that is known to be sound, mapped: nothing is read before it is used. (safetensors would copy each slice once more.)"""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (size,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, about in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            dtype, (start, end) = DTYPE_OF[about["dtype"]], about["data_offsets"]
            flat = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=8 + size + start) if end > start else torch.empty(0, dtype=torch.uint8)
            tensors[name] = flat.view(dtype).view(about["shape"])
    return tensors


def shard_sum(path: Path) -> str:
    """The checksum of a shard file, whatever stands in the checksum's place."""
    return hash_file(path, SUM_AT, NO_SUM.encode())

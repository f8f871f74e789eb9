"""Rows of tokens with supervised spans, as they lie in prepare/.

    rows.safetensors   tokens int32 [T], supervised bool [T], offsets int64 [R + 1], holdout bool [R], keys uint8 [R, 16]
    rows.jsonl         a line a row: key, conversation, source, sizes, side
    prompts.jsonl      held-out conversations up to their first user turn, for evaluation

Written row by row, however many there are; only a few bytes of each stay in memory.

Legend: T tokens of all rows, R rows.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from eyas.artifact import fsync_folder
from eyas.errors import UserError

ROWS, LINES, PROMPTS = "rows.safetensors", "rows.jsonl", "prompts.jsonl"
DTYPES = {"tokens": "I32", "supervised": "BOOL", "offsets": "I64", "holdout": "BOOL", "keys": "U8"}


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """`key` is a hash of tokens and supervised spans, the name under which features are stored; columns: tokens and supervised of all rows."""

    key: str
    columns: tuple[torch.Tensor, torch.Tensor]
    start: int
    end: int
    holdout: bool

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [T]"""
        return self.columns[0][self.start : self.end]

    @property
    def supervised(self) -> torch.Tensor:
        """bool [T]"""
        return self.columns[1][self.start : self.end]


def row_key(tokens: np.ndarray, supervised: np.ndarray) -> bytes:
    """16 bytes: a hash of the row's tokens int32 [T] and supervised spans bool [T]."""
    digest = xxhash.xxh3_128(tokens.tobytes())
    digest.update(supervised.tobytes())
    return digest.digest()


class RowsWriter:
    """A context manager; what it leaves is whole only after `finish`.

    A held-out conversation whose first user turn is also asked in training goes to training in the end: its figures would flatter the draft.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets = array("q", [0])
        self.keys = bytearray()
        self.holdout = bytearray()
        self.seen: set[bytes] = set()
        self.trained: set[int] = set()  # hashes of first user turns
        self.held: list[tuple[int, int | None]] = []  # row, and the hash of its conversation's first user turn
        self.supervised = 0

    def __enter__(self) -> RowsWriter:
        self.files: dict[str, BinaryIO] = {}
        for name in ("tokens", "supervised", LINES, PROMPTS):
            self.files[name] = open(self.folder / f"{name}.part", "wb")  # closed in __exit__
        return self

    def __exit__(self, *unused: object) -> None:
        for name, file in self.files.items():
            file.close()
            (self.folder / f"{name}.part").unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, supervised: np.ndarray, holdout: bool, asked: int | None, about: dict[str, Any]) -> bool:
        """Whether the row is new. asked: hash of its conversation's first user turn; about: what rows.jsonl says of it."""
        key = row_key(tokens, supervised)
        if key in self.seen:
            return False
        self.seen.add(key)
        if holdout:
            self.held.append((len(self.holdout), asked))
        elif asked is not None:
            self.trained.add(asked)
        self.keys += key
        self.holdout.append(holdout)
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.supervised += int(supervised.sum())
        self.files["tokens"].write(tokens.tobytes())
        self.files["supervised"].write(supervised.tobytes())
        self.files[LINES].write(json.dumps({"key": key.hex(), **about, "tokens": len(tokens), "supervised": int(supervised.sum())})[:-1].encode() + b"\n")
        return True

    def add_prompt(self, asked: int, prompt: dict[str, Any]) -> None:
        """Of a held-out conversation that has rows."""
        self.files[PROMPTS].write(struct.pack("<Q", asked).hex().encode() + json.dumps(prompt).encode() + b"\n")

    def finish(self) -> int:
        """Writes the three files. Returns how many held-out rows went to training."""
        moved = [row for row, asked in self.held if asked in self.trained]
        for row in moved:
            self.holdout[row] = False
        for file in self.files.values():
            file.flush()
        self._write_rows()
        with open(self.folder / f"{LINES}.part", "rb") as lines, open(self.folder / f"{LINES}.tmp", "wb") as out:
            for line, holdout in zip(lines, self.holdout, strict=True):
                out.write(line[:-1] + (b', "holdout": true}\n' if holdout else b', "holdout": false}\n'))
        with open(self.folder / f"{PROMPTS}.part", "rb") as lines, open(self.folder / f"{PROMPTS}.tmp", "wb") as out:
            out.writelines(line[16:] for line in lines if struct.unpack("<Q", bytes.fromhex(line[:16].decode()))[0] not in self.trained)
        for name in (ROWS, LINES, PROMPTS):
            temporary = self.folder / f"{name}.tmp"
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        fsync_folder(self.folder)
        return len(moved)

    def _write_rows(self) -> None:
        """The columns one after another behind a header, as safetensors lays them out. (Its own writer wants all of them in memory.)"""
        num_tokens, num_rows = self.offsets[-1], len(self.holdout)
        shapes = {"offsets": [num_rows + 1], "tokens": [num_tokens], "holdout": [num_rows], "keys": [num_rows, 16], "supervised": [num_tokens]}
        sizes = {"offsets": 8 * (num_rows + 1), "tokens": 4 * num_tokens, "holdout": num_rows, "keys": 16 * num_rows, "supervised": num_tokens}
        header, at = {}, 0
        for name, shape in shapes.items():  # widest first: each begins at a multiple of its own width
            header[name] = {"dtype": DTYPES[name], "shape": shape, "data_offsets": [at, at + sizes[name]]}
            at += sizes[name]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.folder / f"{ROWS}.tmp", "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.write(self.offsets.tobytes())
            for name, held in (("tokens", None), ("holdout", self.holdout), ("keys", self.keys), ("supervised", None)):
                if held is not None:
                    out.write(held)
                else:
                    with open(self.folder / f"{name}.part", "rb") as column:
                        shutil.copyfileobj(column, out, 1 << 20)


def first_rows(folder: Path, count: int) -> list[PreparedRow]:
    """The first few rows of a finished prepare/ folder, however many there are."""
    with safe_open(folder / ROWS, "pt") as file:
        offsets = file.get_slice("offsets")[: count + 1].tolist()
        columns = file.get_slice("tokens")[: offsets[-1]], file.get_slice("supervised")[: offsets[-1]]
        keys, holdout = file.get_slice("keys")[:count].numpy(), file.get_slice("holdout")[:count].tolist()
    return [PreparedRow(keys[row].tobytes().hex(), columns, offsets[row], offsets[row + 1], holdout[row]) for row in range(len(offsets) - 1)]


def read_rows(folder: Path) -> list[PreparedRow]:
    """All rows of a finished prepare/ folder, in order. Raises UserError if they are not what was written."""
    try:
        with safe_open(folder / ROWS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in DTYPES}
        offsets, holdout = tensors["offsets"].tolist(), tensors["holdout"].tolist()
        keys = tensors["keys"].numpy().tobytes()
        columns = tensors["tokens"], tensors["supervised"]
        rows = [
            PreparedRow(keys[16 * row : 16 * row + 16].hex(), columns, start, end, held)
            for row, (start, end, held) in enumerate(zip(offsets[:-1], offsets[1:], holdout, strict=True))
        ]
        tokens, supervised = (column.numpy() for column in columns)
        whole = all(bytes.fromhex(row.key) == row_key(tokens[row.start : row.end], supervised[row.start : row.end]) for row in rows)
    except (SafetensorError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"{folder / ROWS} is damaged. Delete {folder / 'manifest.json'} and run `eyas prepare`; written answers are kept.")
    return rows

"""Features by row key, from mapped shard files; each shard is checked against its checksum when it is first touched.

Legend: T tokens of a row, A aux layers, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from eyas.errors import UserError
from eyas.features.index import REPAIR, ShardEntry, check_shard, read_index
from eyas.features.shard import FeatureRow, map_tensors


class FeatureReader:
    """lengths: key -> tokens of the row. Raises UserError for a missing row or a damaged shard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, tuple[ShardEntry, int]] = {}
        self.lengths: dict[str, int] = {}
        for entry in read_index(folder):
            start = 0
            for key, length in zip(entry.keys, entry.lengths, strict=True):
                self.places[key] = (entry, start)
                self.lengths[key] = length
                start += length
        self.files: dict[str, dict[str, torch.Tensor]] = {}

    def require(self, keys: Iterable[str]) -> None:
        missing = [key for key in keys if key not in self.places]
        if missing:
            raise UserError(f"{self.folder} lacks the features of {len(missing):,} rows (the first is {missing[0]}). {REPAIR}")

    def parts(self, schedule: Sequence[list[list[str]]], whole: Sequence[list[str]]) -> Iterator[Sequence[list[list[str]]]]:
        """The schedule as it is: all features are there."""
        yield schedule

    def row(self, key: str) -> FeatureRow:
        """Its tensors lie in the mapped file, and are copied by whoever packs them."""
        entry, start = self.places[key]
        if entry.file not in self.files:
            check_shard(self.folder, entry)
            self.files[entry.file] = map_tensors(self.folder / entry.file)
        tensors, part = self.files[entry.file], slice(start, start + self.lengths[key])
        return FeatureRow(key, **{name: tensors[name][part] for name in ("tokens", "supervised", "aux", "last", "scale") if name in tensors})

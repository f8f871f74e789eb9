"""Features by row key, from mapped shard files; each shard is checked against its checksum when it is first touched.

Legend: T tokens of a row, A aux layers, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from eyas.errors import UserError
from eyas.features.index import REPAIR, ShardEntry, check_shard, read_index
from eyas.features.shard import FeatureRow


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
        self.files: dict[str, Any] = {}

    def require(self, keys: Iterable[str]) -> None:
        missing = [key for key in keys if key not in self.places]
        if missing:
            raise UserError(f"{self.folder} lacks the features of {len(missing):,} rows (the first is {missing[0]}). {REPAIR}")

    def row(self, key: str) -> FeatureRow:
        entry, start = self.places[key]
        if entry.file not in self.files:
            check_shard(self.folder, entry)
            self.files[entry.file] = safe_open(self.folder / entry.file, "pt")
        file, end = self.files[entry.file], start + self.lengths[key]
        names = ["tokens", "supervised", "aux", "last", *(["scale"] if "scale" in file.keys() else [])]  # noqa: SIM118 (no dictionary)
        return FeatureRow(key, *(file.get_slice(name)[start:end] for name in names))

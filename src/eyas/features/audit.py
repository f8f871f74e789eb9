"""`eyas verify`: reads the whole feature store, and says of every shard and row whether it is what it should be.

A shard is held against its entry in the index; a row's tokens and supervised spans against its key, which is a hash of them; the rows there are against
those that were prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from eyas.artifact import read_json
from eyas.features.capture import LOST
from eyas.features.index import INDEX, READERS, ShardEntry, entries_left, fault_of
from eyas.prepare.rows import row_key


@dataclass
class Audit:
    """faults: a sentence each, for people. bad: shards to capture anew, with the keys of their rows. missing: rows that were prepared and have no
    features, nor a reason for that."""

    shards: int = 0
    rows: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list)
    bad: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def audit(folder: Path, wanted: list[str], advance: Callable[[int], None]) -> Audit:
    """wanted: keys of the rows that should have features. advance: told of bytes as they are read. Reads and changes nothing."""
    found = Audit()
    entries, fault = entries_left(folder)  # of a damaged index too: a shard may be damaged besides
    if fault:
        found.faults.append(f"{folder / INDEX} {fault}, so nothing says which shards are complete")
    newest = {key: entry.file for entry in entries for key in entry.keys}  # a lost shard stays listed; its rows stand in a later one
    read = set(newest.values())
    entries = [entry for entry in entries if entry.file in read]
    found.shards, found.bytes = len(entries), sum(entry.bytes for entry in entries)

    def check(entry: ShardEntry) -> str | None:
        fault = fault_of(folder, entry) or _wrong_row(folder, entry)
        advance(entry.bytes)
        return fault

    with ThreadPoolExecutor(READERS) as pool:
        for entry, fault in zip(entries, pool.map(check, entries), strict=True):
            if fault:
                found.faults.append(f"{folder / entry.file} {fault} ({len(entry.keys):,} rows)")
                found.bad[entry.file] = entry.keys
    good = {key for entry in entries if entry.file not in found.bad for key in entry.keys}
    lost = read_json(folder / LOST) if (folder / LOST).exists() else {}
    found.rows = sum(key in good for key in wanted)
    found.missing = [key for key in wanted if key not in good and key not in lost]
    return found


def _wrong_row(folder: Path, entry: ShardEntry) -> str | None:
    """A file can be whole and yet hold other rows than it says, if what wrote it was at fault."""
    with safe_open(folder / entry.file, "pt") as file:
        tokens, supervised = (file.get_tensor(name).numpy() for name in ("tokens", "supervised"))
    start = 0
    for number, (key, length) in enumerate(zip(entry.keys, entry.lengths, strict=True)):
        part = slice(start, start + length)
        if row_key(tokens[part], supervised[part]).hex() != key:
            return f"holds other tokens in row {number} than its key says"
        start += length
    return None

"""The index of the feature store: which shards are whole, and what all of them were captured from.

index.jsonl: its first line says what was captured, then one line a shard, each with a checksum of itself. A shard is entered after it was renamed to its
name, so what is listed is complete.
Nothing hangs on the index alone: shards say themselves what they are, and it is made anew from them if it is damaged, gone, or lacks one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eyas.artifact import append_lines, difference, fsync_folder, hash_json, whole_lines, write_bytes
from eyas.errors import UserError
from eyas.features.shard import OpenShard, shard_sum

INDEX = "index.jsonl"
CHEAP_BYTES = 2 << 30  # of features that are captured anew without asking, should a setting change
READERS = 4  # threads that read shards to check them
REPAIR = "Run `eyas verify RUN.toml --repair`: it captures anew what is damaged or missing, and nothing else."


@dataclass(frozen=True)
class ShardEntry:
    file: str
    bytes: int
    xxh3: str
    keys: list[str]
    lengths: list[int]


def enter(folder: Path, shard: OpenShard, checksum: str) -> ShardEntry:
    """Renames the finished file and enters it in the index; returns its entry."""
    shard.part.replace(shard.path)
    fsync_folder(folder)
    entry = ShardEntry(shard.path.name, shard.path.stat().st_size, checksum, shard.keys, [len(tokens) for tokens in shard.tokens])
    append_lines(folder / INDEX, [_line(entry)])
    return entry


def open_index(folder: Path, capture: dict[str, Any], say: Callable[[str], None] = lambda line: None) -> list[ShardEntry]:
    """The complete shards captured as `capture` says. Those that the index lacks are read and entered; those of anything else, and what is not whole, are
    removed. Raises UserError rather than remove much that was captured otherwise."""
    path = folder / INDEX
    found = [_parsed(line) for line in whole_lines(path)]
    known = bool(found) and found[0] == {"capture": capture}
    if not known and found:
        _refuse_to_discard(folder, found[0], capture)
    listed = [entry for entry in map(_entry, found[1:]) if entry is not None] if known else []
    for part in folder.glob("shard-*.tmp"):
        part.unlink()
    names = {entry.file for entry in listed}
    strays = sorted(file for file in folder.glob("shard-*") if file.name not in names)
    if strays:
        say(f"extract: reading {len(strays)} shards that {path} does not list")
    if not found or not isinstance(found[0], dict):
        _refuse_to_discard_unnamed(folder, strays, hash_json(capture))
    adopted = []
    with ThreadPoolExecutor(READERS) as pool:
        for stray, entry in zip(strays, pool.map(lambda file: read_entry(file, hash_json(capture)), strays), strict=True):
            if entry is None:
                stray.unlink()
            else:
                adopted.append(entry)
    if not known or len(listed) < len(found) - 1:  # a damaged index: one that is written as a whole takes its place
        write_bytes(path, "".join(json.dumps(line) + "\n" for line in ({"capture": capture}, *map(_line, listed))).encode())
    if adopted:
        append_lines(path, map(_line, adopted))
    return [entry for entry in (*listed, *adopted) if (folder / entry.file).exists()]


def _refuse_to_discard(folder: Path, first: Any, capture: dict[str, Any]) -> None:
    """Raises UserError if features that were dear to capture would be deleted because a setting, or the target, is another now."""
    size = sum(file.stat().st_size for file in folder.glob("shard-*"))
    changed = difference(first["capture"], capture) if isinstance(first, dict) and isinstance(first.get("capture"), dict) else None
    if changed and size > CHEAP_BYTES:
        name, made, wanted = changed
        raise UserError(
            f"{folder} holds {size / 1e9:.1f} GB of features that were captured with {name} = {made}, and now it is {wanted}. Set that back, choose another "
            f"run.folder, or delete {folder} if they are not wanted any more."
        )


def _refuse_to_discard_unnamed(folder: Path, strays: list[Path], capture: str) -> None:
    """The same where no index says what the others were captured from."""
    size = sum(stray.stat().st_size for stray in strays if _captured_from(stray) not in (None, capture))
    if size > CHEAP_BYTES:
        raise UserError(
            f"{folder} holds {size / 1e9:.1f} GB of features that were captured with other settings or from another target, and its {INDEX} is gone or "
            f"damaged, so nothing says which. Set back what was changed since, choose another run.folder, or delete {folder} if they are not wanted any more."
        )


def _captured_from(path: Path) -> str | None:
    """What a shard says of itself; None if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("capture")
    except (OSError, SafetensorError):
        return None


def read_index(folder: Path) -> list[ShardEntry]:
    """Raises UserError if there is no index, or a damaged one."""
    whole, fault = entries_left(folder)
    if fault:
        raise UserError(f"{folder / INDEX} {fault}, so nothing says which shards are complete. {REPAIR}")
    return whole


def entries_left(folder: Path) -> tuple[list[ShardEntry], str | None]:
    """Those that can be read, and what is wrong with the index, as the end of a sentence; None if nothing is."""
    lines = whole_lines(folder / INDEX)
    entries = [_entry(_parsed(line)) for line in lines[1:]]
    whole = [entry for entry in entries if entry is not None]
    if not lines:
        return [], "is missing or empty"
    return whole, "is damaged" if len(whole) < len(entries) else None


def read_entry(path: Path, capture: str) -> ShardEntry | None:
    """The entry of a shard that is whole and was captured from what `capture` is the hash of; else None."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about["capture"] != capture:
                return None
            keys, offsets = json.loads(about["keys"]), file.get_tensor("offsets")
        checksum = shard_sum(path)
    except (OSError, SafetensorError, ValueError, KeyError):
        return None
    if about.get("xxh3") != checksum or len(offsets) != len(keys) + 1:
        return None
    return ShardEntry(path.name, path.stat().st_size, checksum, keys, offsets.diff().tolist())


def fault_of(folder: Path, entry: ShardEntry) -> str | None:
    """Why the file is not the one that was entered; None if it is."""
    path = folder / entry.file
    if not path.exists():
        return "is gone"
    if path.stat().st_size != entry.bytes:
        return f"is damaged: it has {path.stat().st_size:,} bytes, not {entry.bytes:,}"
    if shard_sum(path) != entry.xxh3:
        return f"is damaged: its checksum is not the one in {INDEX}"
    return None


def check_shard(folder: Path, entry: ShardEntry) -> None:
    """Raises UserError if the file is not the one that was entered."""
    if fault := fault_of(folder, entry):
        raise UserError(f"{folder / entry.file} {fault}. {REPAIR}")


def next_number(folder: Path) -> int:
    """One that no shard listed in the index has had, lost ones included: a name stands for one content for ever."""
    return 1 + max((int(entry.file[6:11]) for entry in read_index(folder)), default=-1)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _line(entry: ShardEntry) -> dict[str, Any]:
    """What stands in the index, with a checksum: one flipped bit in a length would otherwise give wrong rows."""
    return {**entry.__dict__, "sum": hash_json(entry.__dict__)}


def _entry(value: Any) -> ShardEntry | None:
    """None for a line that is not as it was written."""
    if not isinstance(value, dict) or value.pop("sum", None) != hash_json(value):
        return None
    return ShardEntry(**value)

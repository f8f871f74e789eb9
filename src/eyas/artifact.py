"""What a stage leaves on disk: files, and a manifest written last.

A run folder holds one folder a stage. `started.json` says what the work in it is for, `manifest.json` that the work is complete:

    settings   everything outside the run folder that the result depends on (settings, hashes of files, the target's fingerprint)
    parents    the content hash of each stage it was made from
    counts     what went in, what came out, what was dropped and why
    content    a hash of what came out; a stage redone with the same result leaves its children valid

Only JSON and safetensors; every file is written under another name, synced and renamed, so that a name that exists is whole.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from eyas import __version__
from eyas.errors import UserError

SCHEMA = 1
MANIFEST = "manifest.json"
STARTED = "started.json"
BLOCK = 1 << 18  # bytes that are read at once: they stay in the processor's cache
MAPPED = 1 << 24


@dataclass(frozen=True)
class Manifest:
    stage: str
    settings: dict[str, Any]
    parents: dict[str, str]
    counts: dict[str, Any]
    content: str
    seconds: float


def fsync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary, metadata)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)


def tensors_head(header: dict[str, Any]) -> bytes:
    """How a safetensors file with this header begins; its data follows, from a multiple of 8 bytes on."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format lets a header end in spaces
    return struct.pack("<Q", len(text)) + text


def read_json(path: Path) -> Any:
    """Raises UserError if the file is not JSON; FileNotFoundError if it is not there."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Delete the folder {path.parent} and run the stage again.") from None


def whole_lines(path: Path) -> list[bytes]:
    """The lines of an append-only file, none if it is not there. A last line that a dying process left unfinished is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    return data[:end].splitlines()


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Adds JSON lines, synced; a process that dies here leaves at most an unfinished last line, which `whole_lines` cuts off."""
    new = not path.exists()
    with open(path, "ab") as file:
        file.write("".join(json.dumps(value) + "\n" for value in values).encode())
        file.flush()
        os.fsync(file.fileno())
    if new:
        fsync_folder(path.parent)


def hash_json(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, ensure_ascii=True).encode())


def hash_file(path: Path, at: int = 0, instead: bytes = b"") -> str:
    """The checksum of a file, of it as if `instead` stood at byte `at`."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(BLOCK))  # one, used again: fresh memory for each read costs more than the hash
    with open(path, "rb", buffering=0) as file:
        if instead:
            digest.update(file.read(at) + instead)
            file.seek(at + len(instead))
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def hash_written(path: Path, at: int, instead: bytes) -> str:
    """The same of a file that this process has just written: mapped, which is twice as fast where all of it is in memory. (A disk that fails under a mapped
    file ends the process, and not with a sentence; what comes from a disk is read.)"""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data, memoryview(data) as view:
        digest.update(view[:at])
        digest.update(instead)
        for start in range(at + len(instead), len(view), MAPPED):
            digest.update(view[start : start + MAPPED])
    return digest.hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished stage, None if the stage is not finished. Raises UserError for one of another schema."""
    try:
        found = read_json(folder / MANIFEST)
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or (found.get("schema") == SCHEMA and not Manifest.__dataclass_fields__.keys() <= found.keys()):
        raise UserError(f"{folder / MANIFEST} is damaged. Delete it and run the stage again.")
    if found.get("schema") != SCHEMA:
        raise UserError(
            f"{folder} was written with schema {found.get('schema')} (Eyas {found.get('eyas')}); Eyas {__version__} reads schema {SCHEMA}. "
            "Choose another run.folder, or delete this one."
        )
    return Manifest(**{key: found[key] for key in Manifest.__dataclass_fields__})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, {"schema": SCHEMA, "eyas": __version__, **manifest.__dict__})


def begin(folder: Path, settings: dict[str, Any], parents: dict[str, str], reusable: tuple[str, ...]) -> bool:
    """Opens a stage's folder for work; returns whether it goes on with work begun earlier for the same settings and parents.

    Work begun for something else is removed, except files matching `reusable`, whose entries say themselves what they are valid for.
    """
    this = {"schema": SCHEMA, "settings": settings, "parents": parents}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        same = read_json(folder / STARTED) == json.loads(json.dumps(this))
    except (FileNotFoundError, UserError):
        same = False
    (folder / MANIFEST).unlink(missing_ok=True)
    if not same:
        (folder / STARTED).unlink(missing_ok=True)
        for path in folder.iterdir():
            if any(path.match(pattern) for pattern in reusable):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(folder / STARTED, this)
    return same


def difference(made: Any, wanted: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two settings differ: (dotted name, value there, value wanted), or None."""
    if isinstance(made, dict) and isinstance(wanted, dict):
        for key in sorted(made.keys() | wanted.keys()):
            found = difference(made.get(key), wanted.get(key), f"{name}.{key}" if name else str(key))
            if found:
                return found
        return None
    return None if made == wanted else (name, made, wanted)

"""`eyas verify` finds every fault that a store can have, names it, and repairs that and nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Outcome, conversation, make_tiny_target, write_run

from eyas.artifact import hash_json
from eyas.features.index import INDEX, fault_of, read_index
from eyas.features.reader import FeatureReader
from eyas.features.shard import SUM_AT, shard_sum

Eyas = Callable[..., Outcome]


@pytest.fixture
def run_file(tmp_path: Path, eyas: Eyas) -> Path:
    target = make_tiny_target(tmp_path / "target", num_layers=3, hidden_size=256)
    path = write_run(tmp_path, target, [conversation(n, 1 + n % 2) for n in range(23)], features={"shard_mib": 1, "batch_tokens": 64, "dtype": "float32"})
    assert eyas("run", path, "--until", "extract").code == 0
    return path


def store(run_file: Path) -> Path:
    return run_file.parent / "runs" / "run" / "features"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2000] ^= 4
    path.write_bytes(data)


def change_tokens_and_seal(path: Path) -> None:
    """A file that is whole, with other tokens than its keys say: what a fault of ours would leave."""
    before, data = shard_sum(path), bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    start, _ = json.loads(data[8 : 8 + size])["tokens"]["data_offsets"]
    data[8 + size + start] ^= 1
    path.write_bytes(data)
    data[SUM_AT : SUM_AT + 32] = shard_sum(path).encode()
    path.write_bytes(data)
    index, after = path.parent / INDEX, shard_sum(path)
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines[1:]:
        del line["sum"]
        line["xxh3"] = after if line["xxh3"] == before else line["xxh3"]
        line["sum"] = hash_json(line)
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (entry,) = [entry for entry in read_index(path.parent) if entry.file == path.name]
    assert fault_of(path.parent, entry) is None


def flip_and_damage_the_index(folder: Path) -> None:
    """Two faults at once: what can still be read of the index must be held against the files."""
    flip(folder / "shard-00001.safetensors")
    lines = (folder / INDEX).read_bytes().splitlines(keepends=True)
    (folder / INDEX).write_bytes(b"".join([*lines[:-1], lines[-1].replace(b"shard-", b"shbrd-")]))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda folder: flip(folder / "shard-00001.safetensors"), "its checksum is not the one"),
    "a truncated file": (lambda folder: (folder / "shard-00001.safetensors").write_bytes(b"abc"), "it has 3 bytes"),
    "a file gone": (lambda folder: (folder / "shard-00001.safetensors").unlink(), "shard-00001.safetensors is gone"),
    "other tokens": (lambda folder: change_tokens_and_seal(folder / "shard-00001.safetensors"), "holds other tokens in row 0"),
    "a flipped bit and a damaged index": (flip_and_damage_the_index, "its checksum is not the one"),
    "no index": (lambda folder: (folder / INDEX).unlink(), "is missing or empty"),
}


def test_a_sound_store_is_said_to_be_sound(run_file: Path, eyas: Eyas) -> None:
    outcome = eyas("verify", run_file)
    assert outcome.code == 0 and "all whole; 23 rows" in outcome.err


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_fault_is_named_and_repaired_and_nothing_else_is_captured(run_file: Path, eyas: Eyas, damage: str) -> None:
    folder = store(run_file)
    before = FeatureReader(folder)
    truth = {key: before.row(key) for key in before.places}
    truth = {key: (row.tokens.clone(), row.aux.clone(), row.last.clone()) for key, row in truth.items()}
    act, says = DAMAGE[damage]
    act(folder)
    kept = {file: file.stat().st_ino for file in folder.glob("shard-*") if file.name != "shard-00001.safetensors"}
    outcome = eyas("verify", run_file)
    assert outcome.code == 2 and says in outcome.err and "--repair" in outcome.err
    assert eyas("verify", run_file, "--repair").code == 0
    assert "all whole; 23 rows" in eyas("verify", run_file).err
    assert all(file.stat().st_ino == inode for file, inode in kept.items())
    found = FeatureReader(folder)
    for key, states in truth.items():
        row = found.row(key)
        assert all(torch.equal(one, other) for one, other in zip((row.tokens, row.aux, row.last), states, strict=True))


def test_a_store_made_with_other_settings_is_not_captured_anew_by_a_repair(run_file: Path, eyas: Eyas) -> None:
    flip(store(run_file) / "shard-00001.safetensors")
    outcome = eyas("verify", run_file, "--repair", "--set", "features.layers=[0, 1, 2]")
    assert outcome.code == 2 and "features.layers" in outcome.err and len(list(store(run_file).glob("shard-*"))) > 2


def test_without_features_there_is_nothing_to_verify(tmp_path: Path, run_file: Path, eyas: Eyas) -> None:
    outcome = eyas("verify", run_file, "--set", f"run.folder={tmp_path / 'other'}")
    assert outcome.code == 2 and "no features yet" in outcome.err

"""Shards: what the index lists is whole, what it does not list is gone, and a changed byte is never read as a feature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eyas.features.index
from eyas.artifact import BLOCK, MAPPED, hash_file, hash_json, hash_written
from eyas.errors import UserError
from eyas.features.codec import FLOAT8, decode, encode
from eyas.features.index import INDEX, REPAIR, ShardEntry, enter, fault_of, open_index, read_entry, read_index
from eyas.features.reader import FeatureReader
from eyas.features.shard import SUM_AT, FeatureRow, finish, open_shard
from eyas.train.batch import make_batch

CAPTURE = {"layers": [1, 2, 3], "target": "w"}


def row(key: str, length: int = 5, width: int = 4) -> FeatureRow:
    draw = torch.Generator().manual_seed(sum(key.encode()))
    return FeatureRow(
        key,
        torch.randint(0, 100, (length,), generator=draw, dtype=torch.int32),
        torch.rand(length, generator=draw) > 0.5,
        torch.randn(length, 3, width, generator=draw),
        torch.randn(length, width, generator=draw),
    )


def write_shard(folder: Path, number: int, rows: list[FeatureRow]) -> ShardEntry:
    shard = open_shard(folder, number, rows, rows[0].aux.shape[1], rows[0].last.shape[1], rows[0].last.dtype, hash_json(CAPTURE))
    for index, row in enumerate(rows):
        shard.put(index, {"aux": row.aux, "last": row.last, **({} if row.scale is None else {"scale": row.scale})})
    return enter(folder, shard, finish(shard))


def same(a: FeatureRow, b: FeatureRow) -> bool:
    return a.key == b.key and all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "supervised", "aux", "last"))


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    open_index(tmp_path, CAPTURE)
    write_shard(tmp_path, 0, [row("a", 3), row("b", 7)])
    write_shard(tmp_path, 1, [row("c", 1)])
    return tmp_path


def test_each_row_is_read_back_as_it_was_written(two_shards: Path) -> None:
    reader = FeatureReader(two_shards)
    assert reader.lengths == {"a": 3, "b": 7, "c": 1}
    for key, length in reader.lengths.items():
        assert same(reader.row(key), row(key, length))


def test_bfloat16_features_keep_their_type(tmp_path: Path) -> None:
    open_index(tmp_path, CAPTURE)
    given = row("a")
    write_shard(tmp_path, 0, [FeatureRow(given.key, given.tokens, given.supervised, given.aux.bfloat16(), given.last.bfloat16())])
    found = FeatureReader(tmp_path).row("a")
    assert found.last.dtype == found.aux.dtype == torch.bfloat16 and torch.equal(found.last, given.last.bfloat16())


def test_float8_features_come_with_their_scales_and_are_decoded_on_the_device(tmp_path: Path) -> None:
    open_index(tmp_path, CAPTURE)
    rows, truth = [], []
    for key, length in (("a", 5), ("b", 9), ("c", 1)):
        given = row(key, length, 30)
        states = torch.cat((given.aux, given.last[:, None]), dim=1)
        stored, scale = encode(states, FLOAT8)
        rows.append(replace(given, aux=stored[:, :-1], last=stored[:, -1], scale=scale))
        truth.append(decode(stored, scale, torch.float32))
    write_shard(tmp_path, 0, rows)
    reader = FeatureReader(tmp_path)
    assert reader.row("b").aux.dtype == FLOAT8
    batch = make_batch([reader.row(key) for key in "abc"], torch.zeros(100, 30), 2, torch.float32, 32).to(torch.device("cpu"))
    wanted = torch.cat([*truth, torch.zeros(17, 4, 30)])
    assert torch.equal(batch.aux, wanted[:, :-1]) and torch.equal(batch.last, wanted[:, -1]) and batch.scale is None


def test_killed_between_shard_and_index_loses_nothing(two_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*unused: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(eyas.features.index, "append_lines", dies)
        with pytest.raises(KeyboardInterrupt):
            write_shard(two_shards, 2, [row("d")])
    assert "d" not in FeatureReader(two_shards).lengths
    assert [entry.keys for entry in open_index(two_shards, CAPTURE)] == [["a", "b"], ["c"], ["d"]]
    assert same(FeatureReader(two_shards).row("d"), row("d"))


def test_killed_while_writing_a_shard_leaves_a_part_that_is_removed(two_shards: Path) -> None:
    part = two_shards / "shard-00002.safetensors.tmp"
    part.write_bytes(b"half")
    open_index(two_shards, CAPTURE)
    assert not part.exists()


def spoil_last_line(index: Path, kept: int) -> None:
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])


def spoil_inside(index: Path, line: bytes) -> None:
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(lines[0] + line + lines[2])


SPOILT: dict[str, Callable[[Path], object]] = {
    "gone": lambda index: index.unlink(),
    "empty": lambda index: index.write_bytes(b""),
    "first line torn": lambda index: index.write_bytes(index.read_bytes()[:9]),
    "zeros": lambda index: index.write_bytes(bytes(index.stat().st_size)),
    "last line torn at once": lambda index: spoil_last_line(index, 1),
    "last line torn": lambda index: spoil_last_line(index, 20),
    "last line without its end": lambda index: spoil_last_line(index, -1),
    "a line of zeros": lambda index: spoil_inside(index, b"\x00\x00\n"),
    "a line of something else": lambda index: spoil_inside(index, b"[]\n"),
    "half an entry": lambda index: spoil_inside(index, b'{"file": "shard-00001.safetensors"}\n'),
}


@pytest.mark.parametrize("damage", SPOILT)
def test_a_damaged_index_is_made_anew_from_the_shards(two_shards: Path, damage: str) -> None:
    SPOILT[damage](two_shards / INDEX)
    assert sorted(entry.keys for entry in open_index(two_shards, CAPTURE)) == [["a", "b"], ["c"]]
    reader = FeatureReader(two_shards)
    assert same(reader.row("a"), row("a", 3)) and same(reader.row("b"), row("b", 7)) and same(reader.row("c"), row("c", 1))
    assert len(open_index(two_shards, CAPTURE)) == 2


@pytest.mark.parametrize("damage", ["gone", "a line of zeros"])
def test_an_index_made_anew_lists_no_damaged_shard(two_shards: Path, damage: str) -> None:
    SPOILT[damage](two_shards / INDEX)
    flip(two_shards / "shard-00000.safetensors")
    assert [entry.keys for entry in open_index(two_shards, CAPTURE)] == [["c"]]
    assert not (two_shards / "shard-00000.safetensors").exists()


def test_a_changed_byte_anywhere_in_the_index_gives_no_wrong_row_and_is_mended(two_shards: Path) -> None:
    index = two_shards / INDEX
    whole = index.read_bytes()
    for at in range(len(whole)):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            reader = FeatureReader(two_shards)
            assert all(same(reader.row(key), row(key, {"a": 3, "b": 7, "c": 1}[key])) for key in reader.places)
        except UserError as error:
            assert REPAIR in str(error)
        assert sorted(entry.keys for entry in open_index(two_shards, CAPTURE)) == [["a", "b"], ["c"]]
        assert sorted(FeatureReader(two_shards).places) == ["a", "b", "c"]


def test_a_changed_byte_anywhere_in_a_shard_is_found(two_shards: Path) -> None:
    path = two_shards / "shard-00001.safetensors"
    whole = path.read_bytes()
    (entry,) = [entry for entry in read_index(two_shards) if entry.file == path.name]
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        listed, alone = fault_of(two_shards, entry), read_entry(path, hash_json(CAPTURE))
        # The checksum inside matters where the index has none, and there alone.
        assert alone is None and (listed is not None or SUM_AT <= at < SUM_AT + 32)


def test_shards_captured_otherwise_are_discarded(two_shards: Path) -> None:
    assert open_index(two_shards, CAPTURE | {"layers": [0, 2, 3]}) == []
    assert not list(two_shards.glob("shard-*"))
    assert read_index(two_shards) == []


def test_opening_again_keeps_what_is_there(two_shards: Path) -> None:
    before = (two_shards / INDEX).read_bytes()
    assert len(open_index(two_shards, CAPTURE)) == 2
    assert (two_shards / INDEX).read_bytes() == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip, "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.unlink(), "is gone"),
    ],
    ids=["flipped", "cut", "longer", "empty", "missing"],
)
def test_a_damaged_shard_is_refused_by_name_and_the_others_are_read(two_shards: Path, damage: Callable[[Path], object], says: str) -> None:
    path = two_shards / "shard-00000.safetensors"
    damage(path)
    reader = FeatureReader(two_shards)
    with pytest.raises(UserError, match=says) as caught:
        reader.row("b")
    assert str(path) in str(caught.value) and REPAIR in str(caught.value)
    assert same(reader.row("c"), row("c", 1))


def test_two_shards_changed_for_one_another_are_refused(two_shards: Path) -> None:
    write_shard(two_shards, 2, [row("e", 1)])  # as large as shard 1
    first, second = two_shards / "shard-00001.safetensors", two_shards / "shard-00002.safetensors"
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(UserError, match="damaged"):
        FeatureReader(two_shards).row("c")


def test_a_missing_row_is_refused_with_its_key(two_shards: Path) -> None:
    reader = FeatureReader(two_shards)
    reader.require(["a", "c"])
    with pytest.raises(UserError, match=r"1 rows .*zz"):
        reader.require(["a", "zz"])


@pytest.mark.parametrize("damage", ["gone", "empty", "a line of zeros", "a line of something else", "half an entry"])
def test_a_damaged_index_is_not_read_but_named(two_shards: Path, damage: str) -> None:
    SPOILT[damage](two_shards / INDEX)
    with pytest.raises(UserError, match=INDEX) as caught:
        FeatureReader(two_shards)
    assert REPAIR in str(caught.value)


def test_a_row_captured_again_is_read_from_its_newest_shard(two_shards: Path) -> None:
    (two_shards / "shard-00000.safetensors").unlink()
    assert [entry.keys for entry in open_index(two_shards, CAPTURE)] == [["c"]]
    write_shard(two_shards, 2, [row("b", 7), row("a", 3)])
    reader = FeatureReader(two_shards)
    assert same(reader.row("a"), row("a", 3)) and same(reader.row("b"), row("b", 7))


def test_a_file_just_written_has_the_checksum_that_reading_it_gives(tmp_path: Path) -> None:
    """Of lengths around the blocks in which both are taken."""
    for size in (50, 100, BLOCK + 20, MAPPED + 60, 2 * MAPPED + 7):
        path = tmp_path / "file"
        path.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
        for at in (0, 18):
            assert hash_written(path, at, b"0" * 32) == hash_file(path, at, b"0" * 32) != hash_file(path)

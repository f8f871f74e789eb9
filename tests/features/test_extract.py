"""The stage extract: what is stored is what the target computes for that row alone, however rows were batched, stopped and gone on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome, conversation, make_tiny_target, write_run
from transformers import AutoModelForCausalLM

import eyas.features.capture
import eyas.features.index as eyas_index
from eyas.artifact import read_manifest
from eyas.config import load
from eyas.errors import UserError
from eyas.features.codec import decode
from eyas.features.index import INDEX, ShardEntry
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow, OpenShard
from eyas.pipeline import Run
from eyas.prepare.rows import read_rows
from eyas.target.engine import Filled
from eyas.target.spec import read_spec
from eyas.target.transformers_engine import TransformersEngine, batches


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 wide: 4 KiB of float32 features a token, so that a shard of 1 MiB is full after 256 tokens."""
    return make_tiny_target(tmp_path_factory.mktemp("wide") / "target", num_layers=4, hidden_size=256)


def extract(folder: Path, target: Path, rows: list[dict[str, Any]] | None = None, **features: Any) -> tuple[dict[str, FeatureRow], dict[str, Any], Run]:
    """(features by key, counts, the run)."""
    folder.mkdir(exist_ok=True)
    run = Run(load(write_run(folder, target, rows, features={"shard_mib": 1, **features}), []))
    run.up_to("extract")
    manifest = read_manifest(run.folder / "features")
    assert manifest is not None
    reader = FeatureReader(run.folder / "features")
    return {row.key: reader.row(row.key) for row in read_rows(run.folder / "prepare")}, manifest.counts, run


def assert_close(a: dict[str, FeatureRow], b: dict[str, FeatureRow], relative: float) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key].tokens, b[key].tokens) and torch.equal(a[key].supervised, b[key].supervised)
        for name in ("aux", "last"):
            mine, other = getattr(a[key], name), getattr(b[key], name)
            assert (mine - other).norm() <= relative * other.norm(), (key, name)


def test_stored_features_are_the_states_that_transformers_gives_for_the_row_alone(tmp_path: Path, tiny_target: Path) -> None:
    found, _, _ = extract(tmp_path, tiny_target, layers=[0, 3, 5])
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    for row in found.values():
        with torch.inference_mode():
            out = model(input_ids=row.tokens[None].long(), output_hidden_states=True)
            for position, k in enumerate((0, 3, 5)):
                truth = out.hidden_states[k][0]
                assert (row.aux[:, position] - truth).norm() <= 1e-6 * truth.norm(), k
            # Transformers gives layer N after the final norm; Eyas stores it before.
            logits = model.lm_head(model.model.norm(row.last))
            assert (logits - out.logits[0]).norm() <= 1e-6 * out.logits[0].norm()


@pytest.mark.parametrize("batch_tokens", [1, 300, 100_000])
def test_features_do_not_depend_on_how_rows_are_batched(tmp_path: Path, tiny_target: Path, batch_tokens: int) -> None:
    usual, _, _ = extract(tmp_path / "usual", tiny_target)
    other, _, _ = extract(tmp_path / "other", tiny_target, batch_tokens=batch_tokens)
    assert_close(other, usual, 1e-6)


def test_float8_features_are_near_and_half_as_large_and_say_how_near(tmp_path: Path, wide_target: Path) -> None:
    usual, wide, _ = extract(tmp_path / "usual", wide_target, dtype="bfloat16")
    found, counts, run = extract(tmp_path / "float8", wide_target, dtype="float8")
    assert found.keys() == usual.keys() and counts["bytes"] < 0.52 * wide["bytes"]
    for key, row in found.items():
        aux, last = decode(row.aux, row.scale[:, :-1], torch.float32), decode(row.last, row.scale[:, -1], torch.float32)
        for near, exact in ((aux, usual[key].aux), (last, usual[key].last)):
            assert 0.01 < (near - exact.float()).norm() / exact.float().norm() < 0.04
    assert len(counts["rounding"]) == 4 and all(0.01 < off < 0.04 for off in counts["rounding"])
    assert 0 < max(wide["rounding"]) < 0.004 and counts["proof_of_capture_nats"] < 0.5
    run.up_to("export")


def test_batches_hold_every_row_once_and_never_more_than_batch_tokens_with_padding() -> None:
    lengths = [3, 9, 9, 1, 60, 2, 2, 2, 30]
    for limit in (1, 9, 60, 200, 10**6):
        found = list(batches(lengths, limit))
        assert [row for batch in found for row in batch] == list(range(len(lengths)))
        assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= limit for batch in found)


def test_rows_as_short_as_can_be_are_captured_beside_long_ones(tiny_target: Path) -> None:
    spec = read_spec(tiny_target)
    engine = TransformersEngine(spec, torch.device("cpu"), torch.float32, False)
    rows = [[5], [5, 9], list(range(3, 103))]
    for alone, batched in zip((engine.capture([row], [0, 3, 6])[0] for row in rows), engine.capture(rows, [0, 3, 6]), strict=True):
        assert alone.shape == batched.shape
        assert (alone - batched).norm() <= 1e-6 * alone.norm()


def test_a_run_that_dies_inside_goes_on_without_capturing_complete_shards_again(tmp_path: Path, wide_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, counts, _ = extract(tmp_path / "whole", wide_target, batch_tokens=64)
    assert counts["shards"] >= 3
    real = eyas.features.capture.enter
    written: list[ShardEntry] = []

    def dies_at_the_third(folder: Path, shard: OpenShard, checksum: str) -> ShardEntry:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(real(folder, shard, checksum))
        return written[-1]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(eyas.features.capture, "enter", dies_at_the_third)
        extract(tmp_path / "part", wide_target, batch_tokens=64)
    files = [tmp_path / "part" / "runs" / "run" / "features" / entry.file for entry in written]
    before = [file.stat() for file in files]
    done, counts, _ = extract(tmp_path / "part", wide_target, batch_tokens=64)
    assert [(s.st_ino, s.st_mtime_ns) for s in before] == [(s.st_ino, s.st_mtime_ns) for s in (file.stat() for file in files)]
    assert counts["rows_captured_now"] == len(whole) - sum(len(entry.keys) for entry in written)
    assert_close(done, whole, 1e-6)


def test_a_shard_that_was_lost_is_captured_again_and_it_alone(tmp_path: Path, wide_target: Path) -> None:
    before, counts, run = extract(tmp_path, wide_target, batch_tokens=64)
    assert counts["shards"] >= 3
    reader = FeatureReader(run.folder / "features")
    entry = next(entry for entry, _ in reader.places.values() if entry.file == "shard-00001.safetensors")
    (run.folder / "features" / entry.file).unlink()
    (run.folder / "features" / "manifest.json").unlink()
    after, counts, _ = extract(tmp_path, wide_target, batch_tokens=64)
    assert counts["rows_captured_now"] == len(entry.keys)
    assert_close(after, before, 1e-6)


def test_a_new_shard_never_takes_the_name_of_a_lost_one(tmp_path: Path, wide_target: Path) -> None:
    """The index still lists the lost one: its rows, wanted again later, would be looked for in the new file."""
    rows = [conversation(n, 1 + n % 2) for n in range(22)]
    everything, _, run = extract(tmp_path, wide_target, rows, batch_tokens=64)
    reader = FeatureReader(run.folder / "features")
    last = max((entry for entry, _ in reader.places.values()), key=lambda entry: entry.file)
    assert len(last.keys) >= 2
    (run.folder / "features" / last.file).unlink()
    order = [row.key for row in read_rows(run.folder / "prepare")]
    fewer = [row for row, key in zip(rows, order, strict=True) if key != last.keys[0]]  # one of the lost rows is not wanted for now
    extract(tmp_path, wide_target, fewer, batch_tokens=64)
    again, _, _ = extract(tmp_path, wide_target, rows, batch_tokens=64)  # now it is wanted again
    assert_close(again, everything, 1e-6)


def test_only_new_rows_are_captured_when_data_is_added(tmp_path: Path, tiny_target: Path) -> None:
    extract(tmp_path, tiny_target, [conversation(n) for n in range(12)])
    _, counts, _ = extract(tmp_path, tiny_target, [conversation(n) for n in range(15)])
    assert (counts["rows"], counts["rows_captured_now"]) == (15, 3)


def test_features_that_were_dear_are_not_thrown_away_for_another_setting(
    tmp_path: Path, tiny_target: Path, eyas: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, tiny_target)
    assert eyas("run", path, "--until", "extract").code == 0
    shards = {file: file.stat().st_ino for file in (tmp_path / "runs" / "run" / "features").glob("shard-*")}
    monkeypatch.setattr(eyas_index, "CHEAP_BYTES", 1000)
    for override, name in (("features.layers=[0, 1, 2]", "features.layers"), ("features.dtype=bfloat16", "features.dtype")):
        outcome = eyas("run", path, "--set", override)
        assert outcome.code == 2 and name in outcome.error and "GB of features" in outcome.error and "run.folder" in outcome.error
    other = AutoModelForCausalLM.from_pretrained(tiny_target)
    other.lm_head.weight.data[0, 0] += 1  # another revision of the target
    changed = shutil.copytree(tiny_target, tmp_path / "changed")
    other.save_pretrained(changed)
    assert "target.weights" in eyas("run", path, "--set", f"target.path={changed}").error
    for damage in (b"", b"nonsense\n", None):
        index = tmp_path / "runs" / "run" / "features" / INDEX
        index.unlink() if damage is None else index.write_bytes(damage)
        outcome = eyas("run", path, "--set", "features.layers=[0, 1, 2]")
        assert outcome.code == 2 and "GB of features" in outcome.error and "gone or damaged" in outcome.error
    assert {file: file.stat().st_ino for file in shards} == shards
    assert eyas("run", path, "--until", "extract").code == 0, "set back, they serve"
    assert {file: file.stat().st_ino for file in shards} == shards


def test_a_capture_of_the_wrong_rows_stores_nothing(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TransformersEngine.states

    def mixed_up(self: TransformersEngine, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        return [states.flip(0) for states in real(self, rows, layers)]

    monkeypatch.setattr(TransformersEngine, "states", mixed_up)
    with pytest.raises(UserError, match="Proof of capture failed"):
        extract(tmp_path, tiny_target)
    assert not list((tmp_path / "runs" / "run" / "features").glob("shard-*.safetensors"))


@pytest.mark.parametrize("wrong", ["one layer early", "normed", "nan"])
def test_a_wrong_last_layer_fails_the_proof_of_capture(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    real = TransformersEngine.states

    def capture(self: TransformersEngine, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        states = [one.clone() for one in real(self, rows, [*layers[:3], layers[3] - 1] if wrong == "one layer early" else layers)]
        for one in states:
            if wrong == "normed":
                one[:, 3] = self.model.model.norm(one[:, 3]) * torch.linspace(0.5, 2, one.shape[-1])
            elif wrong == "nan":
                one[-1, 3, 0] = float("nan")
        return states

    monkeypatch.setattr(TransformersEngine, "states", capture)
    with pytest.raises(UserError, match="No shard was written"):
        extract(tmp_path, tiny_target)


def test_a_row_with_a_token_that_the_target_does_not_have_is_left_out_and_counted(tmp_path: Path, tiny_target: Path) -> None:
    run = Run(load(write_run(tmp_path, tiny_target), []))
    run.up_to("prepare")
    spec = read_spec(tiny_target)
    row = read_rows(run.folder / "prepare")[0]
    assert eyas.features.capture._refused(row, spec) is None
    beyond = replace(row, columns=(torch.tensor([5, spec.vocab_size], dtype=torch.int32), torch.ones(2, dtype=torch.bool)), start=0, end=2)
    assert "outside the target's vocabulary" in (eyas.features.capture._refused(beyond, spec) or "")


def lose(monkeypatch: pytest.MonkeyPatch, keys: set[str]) -> None:
    """The engine brings no features of the rows `keys`."""
    real = TransformersEngine.fill

    def fill(self: TransformersEngine, shards: Iterable[OpenShard], layers: Sequence[int], *told: Callable[..., None]) -> Iterator[Filled]:
        for filled in real(self, shards, layers, *told):
            yield replace(filled, lost={row: "it was lost" for row, key in enumerate(filled.shard.keys) if key in keys})

    monkeypatch.setattr(TransformersEngine, "fill", fill)


def test_rows_that_the_engine_does_not_bring_are_counted_and_the_run_goes_on_without_them(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, run = extract(tmp_path / "whole", tiny_target)
    lost = set(list(whole)[3:5])
    with monkeypatch.context() as patch:
        lose(patch, lost)
        folder = tmp_path / "part"
        folder.mkdir()
        run = Run(load(write_run(folder, tiny_target), []))
        run.up_to("train")
    manifest = read_manifest(run.folder / "features")
    assert manifest is not None and manifest.counts["rows_lost"] == {"it was lost": 2} and manifest.counts["rows"] == len(whole) - 2
    reader = FeatureReader(run.folder / "features")
    assert reader.places.keys() == whole.keys() - lost
    assert_close({key: reader.row(key) for key in reader.places}, {key: row for key, row in whole.items() if key not in lost}, 1e-6)
    assert not list((run.folder / "features").glob("*.tmp"))


def test_an_engine_that_loses_many_rows_stops_the_run(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, _ = extract(tmp_path / "whole", tiny_target)
    lose(monkeypatch, set(list(whole)[:11]))
    with pytest.raises(UserError, match="11 of 24 rows have no features: 11 it was lost"):
        extract(tmp_path / "part", tiny_target)

"""The whole job: what is skipped, gone on with, done again or refused, and that it never depends on how often it was stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SOURCE, Outcome, conversation, make_tiny_target, write_run

from eyas.artifact import begin, difference, read_manifest
from eyas.config import load
from eyas.features.reader import FeatureReader
from eyas.pipeline import STAGES, Run
from eyas.stage import Stage
from eyas.target.transformers_engine import TransformersEngine

Eyas = Callable[..., Outcome]
ALL = ["prepare", "extract", "vocab", "train", "export", "evaluate"]
FOLDERS = dict(zip(ALL, ["prepare", "features", "vocab", "train", "export", "evaluate"], strict=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """The folder of a finished run, with its run file; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished")
    Run(load(write_run(folder, tiny_target), [])).up_to("evaluate")
    return folder


@pytest.fixture
def run_file(finished: Path, tmp_path: Path) -> Path:
    """The run file of a copy of the finished run. The data stays where it was, for its path is part of what a run depends on."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    text = (finished / "run.toml").read_text().replace('"data.jsonl"', json.dumps(str(finished / "data.jsonl")))
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the name of each stage that is really worked on."""
    names: list[str] = []
    real = Run.do

    def do(self: Run, stage: Stage, why: str) -> None:
        names.append(stage.name)
        real(self, stage, why)

    monkeypatch.setattr(Run, "do", do)
    return names


def counts(run_file: Path, stage: str) -> dict[str, Any]:
    manifest = read_manifest(run_file.parent / "runs" / "run" / FOLDERS[stage])
    assert manifest is not None
    return manifest.counts


def test_a_run_stops_after_the_stage_it_is_told_and_goes_on_from_there(eyas: Eyas, make_run: Callable[..., Path], done: list[str]) -> None:
    path = make_run()
    for until, expected in (("vocab", ["prepare", "extract", "vocab"]), ("export", ["train", "export"]), ("evaluate", ["evaluate"])):
        done.clear()
        assert eyas("run", path, "--until", until).code == 0
        assert done == expected


def test_a_second_run_does_nothing_and_says_so(eyas: Eyas, run_file: Path, done: list[str]) -> None:
    outcome = eyas("run", run_file)
    assert outcome.code == 0 and done == []
    assert "nothing to do" in outcome.err


def test_a_stage_alone_that_is_done_says_so(eyas: Eyas, run_file: Path, done: list[str]) -> None:
    for name in ALL:
        assert "nothing to do" in eyas(name, run_file).err
    assert done == []


@pytest.mark.parametrize(
    ("override", "redone"),
    [
        ("train.lr=5e-4", ["train", "export", "evaluate"]),
        ("train.epochs=3", ["train", "export", "evaluate"]),
        ("draft.fc_norm=false", ["train", "export", "evaluate"]),
        ("vocab.size=100", ["vocab", "train", "export", "evaluate"]),
        ("features.layers=[0, 2, 4]", ["extract", "train", "export", "evaluate"]),
        ("features.dtype=bfloat16", ["extract", "train", "export", "evaluate"]),
        ("export.dtype=bfloat16", ["export", "evaluate"]),
        ("evaluate.num_draft_tokens=2", ["evaluate"]),
        ("features.batch_tokens=64", []),
        ("features.shard_mib=1", []),
        ("features.layers=[1, 3, 5]", []),  # the default, written out
        ("train.tokens_per_batch=64", []),
        ("train.checkpoint_every=7", []),
        ("data.generate_batch=3", []),
        ("vocab.size=200", []),
    ],
)
def test_a_changed_setting_redoes_the_stages_that_depend_on_it_and_no_others(
    eyas: Eyas, run_file: Path, done: list[str], override: str, redone: list[str]
) -> None:
    outcome = eyas("run", run_file, "--set", override)
    assert outcome.code == 0, outcome.err
    assert done == redone
    done.clear()
    assert eyas("run", run_file, "--set", override).code == 0 and done == []


def test_a_changed_seed_begins_with_the_rows_but_captures_none_again(eyas: Eyas, run_file: Path, done: list[str]) -> None:
    assert eyas("run", run_file, "--set", "run.seed=1").code == 0
    assert done[0] == "prepare" and "train" in done
    assert counts(run_file, "extract")["rows_captured_now"] == 0, "only the held-out part changed, not a single row"


def test_a_changed_row_is_captured_alone(eyas: Eyas, make_run: Callable[..., Path], done: list[str]) -> None:
    path = make_run()
    assert eyas("run", path, "--until", "train").code == 0
    data = path.parent / "data.jsonl"
    lines = data.read_text().splitlines()
    row = json.loads(lines[5])
    row["messages"][-1]["content"] += " and then"
    lines[5] = json.dumps(row)
    data.write_text("\n".join(lines) + "\n")
    done.clear()
    assert eyas("run", path).code == 0
    assert done == ALL
    assert counts(path, "extract")["rows_captured_now"] == 1 and counts(path, "extract")["rows"] == 24


def test_a_stage_redone_with_the_same_result_leaves_its_children(eyas: Eyas, make_run: Callable[..., Path], done: list[str]) -> None:
    path = make_run()
    assert eyas("run", path, "--until", "export").code == 0
    data = path.parent / "data.jsonl"
    data.write_text(data.read_text().replace("\n", "\n\n"))  # other bytes, the same rows
    done.clear()
    assert eyas("run", path, "--until", "export").code == 0
    assert done == ["prepare"]


def test_a_setting_changed_and_set_back_gives_the_first_result_again(eyas: Eyas, run_file: Path, finished: Path) -> None:
    model = Path("runs/run/export/vllm/model.safetensors")
    assert eyas("run", run_file, "--until", "export", "--set", "train.lr=5e-4").code == 0
    assert (run_file.parent / model).read_bytes() != (finished / model).read_bytes()
    assert eyas("run", run_file, "--until", "export").code == 0
    assert (run_file.parent / model).read_bytes() == (finished / model).read_bytes()


def test_training_on_stale_features_is_refused_with_both_sides(eyas: Eyas, run_file: Path, done: list[str]) -> None:
    error = eyas("train", run_file, "--set", "features.layers=[0, 2, 4]").error
    assert "features" in error and "[1, 3, 5]" in error and "[0, 2, 4]" in error and "`eyas extract`" in error
    assert done == []


def test_a_stage_before_its_parents_is_refused(eyas: Eyas, make_run: Callable[..., Path]) -> None:
    error = eyas("train", make_run()).error
    assert "is not finished" in error and "`eyas prepare`" in error


@pytest.mark.parametrize("stage", ALL)
def test_a_deleted_manifest_redoes_its_stage_with_the_same_result(eyas: Eyas, run_file: Path, done: list[str], stage: str) -> None:
    before = read_manifest(run_file.parent / "runs" / "run" / FOLDERS[stage])
    (run_file.parent / "runs" / "run" / FOLDERS[stage] / "manifest.json").unlink()
    assert eyas("run", run_file).code == 0
    assert done == [stage]
    after = read_manifest(run_file.parent / "runs" / "run" / FOLDERS[stage])
    assert before is not None and after is not None and after.content == before.content


def test_a_deleted_stage_folder_redoes_its_stage(eyas: Eyas, run_file: Path, done: list[str]) -> None:
    shutil.rmtree(run_file.parent / "runs" / "run" / "vocab")
    assert eyas("run", run_file).code == 0
    assert done == ["vocab"]


@pytest.mark.parametrize(
    ("change", "says"), [(lambda m: m | {"schema": 99}, "schema 99"), (lambda m: {k: v for k, v in m.items() if k != "schema"}, "schema None")]
)
def test_a_manifest_of_another_schema_is_refused(eyas: Eyas, run_file: Path, change: Callable[[dict[str, Any]], dict[str, Any]], says: str) -> None:
    path = run_file.parent / "runs" / "run" / "features" / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    error = eyas("run", run_file).error
    assert str(path.parent) in error and says in error and "schema 1" in error
    assert says in eyas("status", run_file.parent / "runs" / "run").error


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": 1}'])
def test_a_damaged_manifest_is_refused_by_name(eyas: Eyas, run_file: Path, text: str) -> None:
    path = run_file.parent / "runs" / "run" / "vocab" / "manifest.json"
    path.write_text(text)
    assert str(path.parent) in eyas("run", run_file).error


def test_status_shows_every_stage(eyas: Eyas, run_file: Path) -> None:
    (run_file.parent / "runs" / "run" / "train" / "manifest.json").unlink()
    outcome = eyas("status", run_file.parent / "runs" / "run")
    lines = {line.split()[0]: line for line in outcome.out.splitlines() if line.split()}
    assert outcome.code == 0 and all(name in lines for name in ALL)
    assert "done in" in lines["prepare"] and "done in" not in lines["train"]
    found = json.loads(eyas("status", run_file.parent / "runs" / "run", "--json").out)
    assert list(found) == ALL
    assert [found[name]["done"] for name in ALL] == [True, True, True, False, True, True]


def test_status_of_a_stopped_run_says_how_far_it_came(eyas: Eyas, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(features={"batch_tokens": 64})
    real, calls = TransformersEngine.states, []

    def twice(self: Any, rows: Any, layers: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(self, rows, layers)

    monkeypatch.setattr(TransformersEngine, "states", twice)
    assert eyas("run", path).code == 130
    progress = json.loads(eyas("status", path.parent / "runs" / "run", "--json").out)["extract"]["progress"]
    assert progress["state"] == "stopped" and 0 < progress["done"] < progress["total"] and progress["unit"] == "tokens"


def test_progress_of_a_damaged_file_is_no_reason_to_fail(eyas: Eyas, run_file: Path) -> None:
    (run_file.parent / "runs" / "run" / "train" / "manifest.json").unlink()
    for text in ("", "{}", "[]"):
        (run_file.parent / "runs" / "run" / "train" / "progress.json").write_text(text)
        assert eyas("status", run_file.parent / "runs" / "run").code == 0


KILL = """
import os, signal, sys
import eyas.features.index as index
from eyas.config import load
from eyas.pipeline import Run
real, calls = index.append_lines, []
def append(path, values):
    calls.append(path)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, values)
index.append_lines = append
from pathlib import Path
Run(load(Path(sys.argv[1]), [])).up_to("extract")
"""


@pytest.mark.slow
def test_kill_9_between_a_shard_and_its_entry_loses_nothing_and_gives_no_wrong_row(eyas: Eyas, tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", num_layers=3, hidden_size=256)
    path = write_run(tmp_path, target, [conversation(n, 1 + n % 2) for n in range(23)], features={"shard_mib": 1, "batch_tokens": 64, "dtype": "float32"})
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run([sys.executable, "-c", KILL, str(path)], env=environment, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    features = tmp_path / "runs" / "run" / "features"
    assert not (features / "manifest.json").exists() and (features / "shard-00002.safetensors").exists()
    complete = [features / f"shard-{number:05d}.safetensors" for number in (0, 1, 2)]
    before = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in complete]
    assert eyas("run", path, "--until", "extract").code == 0
    assert [(file.stat().st_ino, file.stat().st_mtime_ns) for file in complete] == before, "complete shards are not captured again"
    assert eyas("run", path, "--until", "extract", "--set", f"run.folder={tmp_path / 'whole'}").code == 0
    mine, whole = FeatureReader(features), FeatureReader(tmp_path / "whole" / "features")
    assert mine.lengths == whole.lengths
    kept = sum(entry.file in {file.name for file in complete} for entry, _ in mine.places.values())
    assert counts(path, "extract")["rows_captured_now"] == len(mine.lengths) - kept
    for key in whole.lengths:
        a, b = mine.row(key), whole.row(key)
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.supervised, b.supervised)
        assert torch.equal(a.aux, b.aux) and torch.equal(a.last, b.last)


def test_two_runs_of_one_file_give_the_same_bytes(eyas: Eyas, run_file: Path, finished: Path) -> None:
    assert eyas("run", run_file, "--until", "export", "--set", "run.folder=again").code == 0
    for name in ("prepare/rows.safetensors", "vocab/mapping.safetensors", "export/vllm/model.safetensors"):
        assert (run_file.parent / "again" / name).read_bytes() == (finished / "runs" / "run" / name).read_bytes()


def test_work_begun_for_other_settings_is_removed_but_for_what_says_itself_what_it_is(tmp_path: Path) -> None:
    assert begin(tmp_path, {"a": 1}, {}, ("kept-*",)) is False
    for name in ("kept-1", "gone"):
        (tmp_path / name).touch()
    assert begin(tmp_path, {"a": 1}, {}, ("kept-*",)) is True and (tmp_path / "gone").exists()
    assert begin(tmp_path, {"a": 2}, {}, ("kept-*",)) is False
    assert (tmp_path / "kept-1").exists() and not (tmp_path / "gone").exists()


def test_a_difference_is_named_by_its_first_place() -> None:
    assert difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ("a.c", 2, 3)
    assert difference({"a": [1]}, {"a": [1]}) is None
    assert difference({"a": 1}, {}) == ("a", 1, None)


def test_the_stages_stand_in_an_order_in_which_parents_come_first() -> None:
    seen: set[str] = set()
    for stage in STAGES:
        assert set(stage.parents) <= seen
        seen.add(stage.name)
    assert [stage.name for stage in STAGES] == ALL

"""Features with a quota: the same training as with all of them on the disk, on a disk that never holds more than it may."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, conversation, make_tiny_target, write_run

from eyas.errors import UserError
from eyas.features.capture import Captured, Capturer
from eyas.train import loop

Eyas = Callable[..., Outcome]
CACHE: dict[str, Path] = {}


def run_of(folder: Path, keep: str, **train: Any) -> Path:
    """4 KiB of features a token, so that all rows take 5 MB. batch_tokens 1: each row goes through the target alone, and gives the same bits."""
    folder.mkdir(exist_ok=True)
    if "target" not in CACHE:
        CACHE["target"] = make_tiny_target(folder / "target", num_layers=3, hidden_size=256)
    return write_run(
        folder, CACHE["target"], [conversation(number, 1 + number % 2) for number in range(40)],
        features={"shard_mib": 1, "batch_tokens": 1, "dtype": "float32", "keep": keep}, data={"holdout": 0.15},
        train={"epochs": 2, "checkpoint_every": 5, **train},
    )  # fmt: skip


def result(path: Path) -> tuple[list[Any], bytes]:
    """(losses and gradient norms of all steps, the last weights)."""
    folder = path.parent / "runs" / "run" / "train"
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    newest = max((folder / "checkpoints").glob("step-*"))
    return [(line["step"], line["loss"], line["grad_norm"]) for line in log], (newest / "weights.safetensors").read_bytes()


@pytest.fixture
def everything(tmp_path_factory: pytest.TempPathFactory, eyas: Eyas) -> tuple[list[Any], bytes]:
    if "all" not in CACHE:
        CACHE["all"] = run_of(tmp_path_factory.mktemp("stream") / "all", "all")
        assert eyas("run", CACHE["all"], "--until", "train").code == 0
    return result(CACHE["all"])


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of features on the disk at each optimiser step."""
    seen: list[int] = []
    real = loop.optimizer_step

    def optimizer_step(draft: Any, optimizer: Any, materials: Any, *rest: Any) -> Any:
        seen.append(sum(file.stat().st_size for file in materials.reader.folder.rglob("shard-*")))
        return real(draft, optimizer, materials, *rest)

    monkeypatch.setattr(loop, "optimizer_step", optimizer_step)
    return seen


@pytest.mark.parametrize(("keep", "limit"), [("none", 3.5e6), ("3MB", 3e6), ("0.004 GB", 4e6), ("1TB", 6e6)])
def test_training_with_a_quota_is_training_with_all_features(
    keep: str, limit: float, tmp_path: Path, eyas: Eyas, everything: tuple[list[Any], bytes], most: list[int]
) -> None:
    path = run_of(tmp_path / "run", keep)
    outcome = eyas("run", path, "--until", "train")
    assert outcome.code == 0, outcome.err
    assert result(path) == everything
    assert 0 < max(most) <= limit and (max(most) < 5e6) == (keep != "1TB"), "all features take more than 5 MB"
    assert ("round 1 of" in outcome.err) == (keep != "1TB")
    assert not (tmp_path / "run" / "runs" / "run" / "features" / "round").exists()
    assert "all whole" in eyas("verify", path).err
    assert "nothing to do" in eyas("run", path, "--until", "train").err


@pytest.mark.parametrize("keep", ["none", "3MB"])
def test_processes_that_train_together_wait_for_the_first_to_capture(keep: str, tmp_path: Path, eyas: Eyas) -> None:
    """Two processes, with all features and with a quota: the same bits."""
    paths = [run_of(tmp_path / name, name if name == "all" else keep, processes=2) for name in ("all", "quota")]
    for path in paths:
        outcome = eyas("run", path, "--until", "train")
        assert outcome.code == 0, outcome.err
    assert result(paths[0]) == result(paths[1])
    said = (tmp_path / "quota" / "runs" / "run" / "log.txt").read_text()
    assert "train: 2 processes" in said and "round 2 of" in said
    assert not list((tmp_path / "quota" / "runs" / "run" / "features").glob("round*"))


def test_training_that_ends_early_leaves_no_round(tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "holdout_acceptance", lambda draft, materials, section: lengths.pop(0))
    lengths = [1.5, 1.4, 9.0]
    path = run_of(tmp_path / "run", "none", patience=1, checkpoint_every=2)
    outcome = eyas("run", path, "--until", "train")
    assert outcome.code == 0 and "has turned since step 2, whose draft is taken" in outcome.err and len(result(path)[0]) == 4, outcome.err
    assert not (tmp_path / "run" / "runs" / "run" / "features" / "round").exists()


def test_a_run_with_a_quota_that_dies_goes_on_as_if_it_had_not_and_captures_little_again(
    tmp_path: Path, eyas: Eyas, everything: tuple[list[Any], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of(tmp_path / "run", "3MB")
    real, calls, captured = loop.optimizer_step, [0], []

    def dies(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] in (3, 8, 13):
            raise KeyboardInterrupt
        return real(*arguments)

    capture = Capturer.capture

    def counting(self: Capturer, rows: list[Any], *rest: Any) -> Captured:
        captured.append(len(rows))
        return capture(self, rows, *rest)

    monkeypatch.setattr(loop, "optimizer_step", dies)
    monkeypatch.setattr(Capturer, "capture", counting)
    codes = [eyas("run", path, "--until", "train").code for _ in range(4)]
    assert codes == [130, 130, 130, 0]
    assert result(path) == everything
    assert sum(captured) < 3.5 * 40, "two epochs, and not much more"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where target and draft have GPUs of their own; here both have this CPU."""
    monkeypatch.setattr("eyas.features.stream.beside_training", lambda config: True)


@pytest.mark.parametrize(("keep", "limit"), [("none", 4.5e6), ("3MB", 3e6)])
def test_capturing_beside_training_changes_nothing_but_the_time(
    keep: str, limit: float, tmp_path: Path, eyas: Eyas, everything: tuple[list[Any], bytes], most: list[int], beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    capture = Capturer.capture

    def noted(self: Capturer, *arguments: Any) -> Captured:
        threads.add(threading.current_thread() is threading.main_thread())
        return capture(self, *arguments)

    monkeypatch.setattr(Capturer, "capture", noted)
    path = run_of(tmp_path / "run", keep)
    outcome = eyas("run", path, "--until", "train")
    assert outcome.code == 0, outcome.err
    assert result(path) == everything and threads == {True, False}
    assert 0 < max(most) <= limit, "both rounds together"
    assert not list((tmp_path / "run" / "runs" / "run" / "features").glob("round*"))


@pytest.mark.parametrize("died_in_the_second_store", [False, True])
def test_a_run_that_dies_with_two_rounds_under_way_goes_on_with_what_is_whole(
    died_in_the_second_store: bool, tmp_path: Path, eyas: Eyas, everything: tuple[list[Any], bytes], beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of(tmp_path / "run", "3MB")
    real, calls = loop.optimizer_step, [0]

    def dies(*arguments: Any) -> Any:
        calls[0] += 1
        store = Path(arguments[2].reader.here.folder).name
        if calls[0] > 4 and not died and store == ("round-next" if died_in_the_second_store else "round"):
            died.append(calls[0])
            raise KeyboardInterrupt
        return real(*arguments)

    died: list[int] = []
    monkeypatch.setattr(loop, "optimizer_step", dies)
    assert eyas("run", path, "--until", "train").code == 130 and died
    outcome = eyas("run", path, "--until", "train")
    assert outcome.code == 0 and result(path) == everything, outcome.err


def test_what_goes_wrong_beside_training_is_told(tmp_path: Path, eyas: Eyas, beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Capturer.capture

    def fails(self: Capturer, rows: list[Any], *rest: Any) -> Captured:
        if threading.current_thread() is not threading.main_thread():
            raise UserError("The disk went away. Bring it back.")
        return real(self, rows, *rest)

    monkeypatch.setattr(Capturer, "capture", fails)
    path = run_of(tmp_path / "run", "3MB")
    assert "The disk went away" in eyas("run", path, "--until", "train").error


def test_a_quota_too_small_for_one_step_is_refused_with_what_it_needs(tmp_path: Path, eyas: Eyas) -> None:
    outcome = eyas("run", run_of(tmp_path / "run", "1.6MB", tokens_per_step=512, tokens_per_batch=512), "--until", "train")
    assert outcome.code == 2 and "one optimiser step" in outcome.error and "features.keep = 1.6MB" in outcome.error


def test_rows_that_the_target_does_not_bring_are_left_out_of_their_steps(tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Capturer.capture

    def loses_one(self: Capturer, rows: list[Any], store: Path, *rest: Any) -> Captured:
        if store.name != "round" or len(rows) < 2:
            return real(self, rows, store, *rest)
        found = real(self, rows[1:], store, *rest)
        return replace(found, lost={**found.lost, rows[0].key: "it did not come"})

    monkeypatch.setattr(Capturer, "capture", loses_one)
    path = run_of(tmp_path / "run", "3MB")
    outcome = eyas("run", path, "--until", "train")
    assert outcome.code == 0 and "1 rows have no features and are left out: 1 it did not come" in outcome.err


def test_shards_of_a_round_that_was_planned_otherwise_are_not_kept(
    tmp_path: Path, eyas: Eyas, everything: tuple[list[Any], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of(tmp_path / "run", "4.5MB")
    real, calls = loop.optimizer_step, [0]

    def dies(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "optimizer_step", dies)
        assert eyas("run", path, "--until", "train").code == 130
    assert list((tmp_path / "run" / "runs" / "run" / "features" / "round").glob("shard-*"))
    outcome = eyas("run", path, "--until", "train", "--set", "features.keep=3MB")
    assert outcome.code == 0, outcome.err
    assert result(path) == everything

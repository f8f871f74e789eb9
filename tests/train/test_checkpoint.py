"""Checkpoints give back what was put in, and a training stopped anywhere ends as one that was never stopped, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_helpers import VOCAB, random_draft, random_ids, random_row, small_shape
from safetensors.torch import load_file
from training import Training as TrainingInFolder

import eyas.train.checkpoint
import eyas.train.loop
from eyas.artifact import read_manifest
from eyas.config import TrainSection, load
from eyas.draft.model import Draft
from eyas.target.embeddings import TargetHead, read_head
from eyas.target.spec import read_spec
from eyas.train.checkpoint import TrainState, latest, load_draft, save
from eyas.train.checkpoint import load as load_checkpoint
from eyas.train.graph import UpdateGraph
from eyas.train.loop import Materials, Work, make_work, optimizer_step, plain_work, steps_of
from eyas.train.loss import Teacher
from eyas.train.optim import Optimizers, make_optimizer
from eyas.vocab.run import read_ids

SECTION = TrainSection(lr=0.01, weight_decay=0.1)


def some_steps(draft: Draft, optimizer: Optimizers, first: int, count: int) -> None:
    """Optimiser steps with gradients that depend on the step's number alone."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in draft.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.set_rates(1.0)
        optimizer.step()


def trained(num_steps: int) -> tuple[Draft, Optimizers]:
    draft = random_draft(small_shape(norm_before_fc=True), 1)
    optimizer = make_optimizer(draft, SECTION, torch.float32)
    some_steps(draft, optimizer, 0, num_steps)
    return draft, optimizer


def assert_equal_bits(a: tuple[Draft, Optimizers], b: tuple[Draft, Optimizers]) -> None:
    for (name, one), (_, other) in zip(a[0].named_parameters(), b[0].named_parameters(), strict=True):
        assert torch.equal(one, other), name
        states = a[1].state[one], b[1].state[other]
        assert states[0].keys() == states[1].keys() and states[0].keys() in ({"step", "exp_avg", "exp_avg_sq"}, {"momentum"})
        for key in states[0]:
            assert torch.equal(states[0][key], states[1][key]), (name, key)
            assert states[0][key].dtype == states[1][key].dtype == torch.float32
            assert states[0][key].device == states[1][key].device


def test_a_checkpoint_gives_back_weights_moments_and_step_counters_bit_for_bit(tmp_path: Path) -> None:
    before = trained(3)
    path = save(tmp_path, *before, TrainState(3, 2, 1.25))
    draft = random_draft(small_shape(norm_before_fc=True), 2)
    after = draft, make_optimizer(draft, SECTION, torch.float32)
    assert load_checkpoint(path, *after) == TrainState(3, 2, 1.25)
    assert_equal_bits(before, after)
    some_steps(*before, 3, 4)
    some_steps(*after, 3, 4)
    assert_equal_bits(before, after)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_training_goes_on_from_a_checkpoint_on_a_gpu(tmp_path: Path) -> None:
    """The fused optimiser reads its step counters on the GPU: they must come back to where they were."""
    drafts = [random_draft(small_shape(), seed).cuda() for seed in (1, 2)]
    before, after = ((draft, make_optimizer(draft, SECTION, torch.float32)) for draft in drafts)
    for step in range(3):
        for parameter in before[0].parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        before[1].set_rates(1.0)
        before[1].step()
    load_checkpoint(save(tmp_path, *before, TrainState(3, 3, None)), *after)
    for draft, optimizer in (before, after):
        for parameter in draft.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.set_rates(1.0)
        optimizer.step()
    torch.cuda.synchronize()
    assert_equal_bits(before, after)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("by_graphs", [False, True])
def test_200_steps_on_a_gpu_are_the_same_twice_and_with_a_stop_in_the_middle_and_wait_for_nothing(by_graphs: bool, tmp_path: Path) -> None:
    """In bfloat16, through the compiled parts, flash attention and the thread that feeds the GPU."""
    device, section = torch.device("cuda"), TrainSection(unroll_steps=5, tokens_per_batch=1024)
    shape = small_shape(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512)
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for number in range(64):
        length = int(torch.randint(2, 400, (), generator=generator))
        mask = "".join("s" if share < 0.8 else "." for share in torch.rand(length, generator=generator).tolist()) + "ss"
        row = random_row(mask, number, 256)
        rows[row.key] = row
    keys = list(rows)
    batches = [keys[start : start + 2] for start in range(62)]
    schedule = [batches[step % 60 : step % 60 + (2 if step % 10 == 0 else 1)] for step in range(200)]  # some in two batches
    table = torch.randn(VOCAB, 256, generator=generator)
    head = TargetHead(table, torch.ones(256), 1e-5, table, None)
    ids = random_ids()
    reader = SimpleNamespace(row=rows.__getitem__, parts=lambda schedule, whole: [schedule])
    teacher = Teacher(head, ids, torch.bfloat16, device)
    materials = Materials(reader, [], [], table.to(torch.bfloat16), teacher, ids.to(device), torch.bfloat16, device)  # type: ignore[arg-type]

    def begun() -> tuple[Draft, Optimizers]:
        draft = random_draft(shape).to(device)
        return draft, make_optimizer(draft, section, torch.bfloat16)

    fixed = section.tokens_per_batch if by_graphs else 0

    def go(draft: Draft, optimizer: Optimizers, todo: list[list[list[str]]]) -> Work:
        make = partial(make_work, say=pytest.fail) if by_graphs else plain_work
        work = make(draft, optimizer, materials, section)
        for step in steps_of(materials, section, todo, fixed=fixed):
            optimizer_step(draft, optimizer, materials, section, step, 0.1, work)
        return work

    first, second, stopped, resumed = begun(), begun(), begun(), begun()
    go(*first, schedule)
    work = go(*second, schedule)
    assert isinstance(work.update, UpdateGraph) == by_graphs and (not by_graphs or work.update.ready)  # type: ignore[attr-defined]
    assert_equal_bits(first, second)
    (step,) = steps_of(materials, section, schedule[:1], fixed=fixed)
    torch.cuda.set_sync_debug_mode("error")  # a step is given to the GPU without a wait for anything
    try:
        optimizer_step(*second, materials, section, step, 0.1, work)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    go(*stopped, schedule[:100])
    load_checkpoint(save(tmp_path, *stopped, TrainState(100, 100, None)), *resumed)
    go(*resumed, schedule[100:])
    assert_equal_bits(first, resumed)


def test_a_draft_is_built_from_a_checkpoint_alone(tmp_path: Path) -> None:
    draft, optimizer = trained(1)
    found = load_draft(save(tmp_path, draft, optimizer, TrainState(1, 1, None)))
    assert found.shape == draft.shape
    assert found.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], value) for name, value in draft.state_dict().items())


def test_a_half_written_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    path = save(tmp_path, *trained(1), TrainState(4, 4, None))
    half = tmp_path / "step-000008.tmp"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    assert latest(tmp_path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000004"]


def test_a_folder_without_checkpoints_has_no_latest_one(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "not there") is None


def test_the_best_and_the_latest_two_are_kept_and_no_others(tmp_path: Path) -> None:
    draft, optimizer = trained(1)
    best = [4, 8, 8, 8, 20, 20, 20, 20]
    kept = []
    for number, best_step in enumerate(best, start=1):
        save(tmp_path, draft, optimizer, TrainState(4 * number, best_step, 1.0))
        kept.append(sorted(int(path.name[5:]) for path in tmp_path.iterdir()))
    assert kept == [[4], [4, 8], [8, 12], [8, 12, 16], [16, 20], [20, 24], [20, 24, 28], [20, 28, 32]]


# --- stopped and gone on with, against never stopped --------------------------------------------------------------------------------------------

CACHE: dict[str, Path] = {}


@pytest.fixture
def run_file(prepared_run: Path) -> Path:
    return prepared_run


class Training(TrainingInFolder):
    def result(self) -> dict[str, Any]:
        """All that two equal trainings must share: every checkpoint's bytes, the log, what the manifest names as the best."""
        manifest = read_manifest(self.folder / "train")
        assert manifest is not None
        files = sorted((self.folder / "train" / "checkpoints").rglob("*"))
        return {
            "bytes": {str(path.relative_to(self.folder)): path.read_bytes() for path in files if path.is_file()},
            "log": self.log(),
            "content": manifest.content,
            "counts": manifest.counts,
        }


def assert_same_result(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["log"] == wanted["log"]
    assert found["counts"] == wanted["counts"]
    assert sorted(found["bytes"]) == sorted(wanted["bytes"])
    for name, data in wanted["bytes"].items():
        assert found["bytes"][name] == data, name
    assert found["content"] == wanted["content"]


@pytest.fixture
def uninterrupted(run_file: Path) -> dict[str, Any]:
    if "whole" not in CACHE:
        whole = Training(run_file, run_file.parent / "whole")
        whole.go()
        CACHE["whole"] = whole.folder
    whole = Training.__new__(Training)
    whole.folder = CACHE["whole"]
    result = whole.result()
    assert len(result["log"]) >= 11, "the stops below need so many steps"
    return result


class Crash(Exception):
    """Stands for whatever ends a process at this very line."""


def crash_at_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, after: bool = False) -> None:
    """Makes call `number` (from 1) of owner.name raise, before or after it has done its work; later ones work again."""
    real, calls = getattr(owner, name), [0]

    def act(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] != number:
            return real(*arguments, **keywords)
        if after:
            real(*arguments, **keywords)
        raise Crash(f"call {number} of {name}")

    monkeypatch.setattr(owner, name, act)


STOPS = {
    "in the first step": (eyas.train.loop, "optimizer_step", 1, False),
    "in the fourth step, before any checkpoint": (eyas.train.loop, "optimizer_step", 4, False),
    "in one of the batches of a step": (eyas.train.loop, "loss_backward", 14, False),
    "after the eighth step's weights moved, before its line in the log": (eyas.train.loop, "optimizer_step", 8, True),
    "at the step after a checkpoint": (eyas.train.loop, "optimizer_step", 6, False),
    "in the held-out measurement": (eyas.train.loop, "holdout_acceptance", 2, False),
    "before a checkpoint's weights are written": (eyas.train.checkpoint, "write_tensors", 3, False),
    "between a checkpoint's weights and moments": (eyas.train.checkpoint, "write_tensors", 4, False),
    "before a checkpoint gets its name": (eyas.train.checkpoint, "write_json", 2, True),
    "after a checkpoint got its name, before old ones go": (eyas.train.checkpoint, "fsync_folder", 2, False),
    "in the last step": (eyas.train.loop, "optimizer_step", -1, False),
    "after the last checkpoint, before the manifest": (eyas.train.run, "hash_file", 1, False),
}


@pytest.mark.parametrize("where", STOPS)
def test_training_stopped_anywhere_and_resumed_equals_the_uninterrupted_one(
    where: str, run_file: Path, uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, number, after = STOPS[where]
    training = Training(run_file, tmp_path / "stopped")
    with monkeypatch.context() as patch:
        crash_at_call(patch, owner, name, number if number > 0 else len(uninterrupted["log"]), after)
        with pytest.raises(Crash):
            training.go()
    assert read_manifest(training.folder / "train") is None
    training.go()
    assert_same_result(training.result(), uninterrupted)


@pytest.mark.parametrize(("owner", "name", "number"), [(eyas.train.loop, "optimizer_step", 5), (eyas.train.run, "hash_file", 1)])
def test_training_ends_early_where_acceptance_turns_also_after_a_stop(
    owner: Any, name: str, number: int, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out acceptance is made to grow, to stand still for longer than its patience, and then to fall."""
    options = ("train.patience=2", "train.checkpoint_every=1")
    monkeypatch.setattr(eyas.train.loop, "holdout_acceptance", lambda draft, materials, section: lengths.pop(0))
    lengths = [1.1, 1.3, 1.29, 1.28, 1.29, 1.25, 9.0]
    whole, stopped = Training(run_file, tmp_path / "whole", *options), Training(run_file, tmp_path / "stopped", *options)
    whole.go()
    assert whole.result()["counts"]["steps"] == 6 and whole.result()["counts"]["best_step"] == 2 and lengths == [9.0]
    lengths = [1.1, 1.3, 1.29, 1.28, 1.29, 1.25, 9.0]
    with monkeypatch.context() as patch:
        crash_at_call(patch, owner, name, number)
        with pytest.raises(Crash):
            stopped.go()
    stopped.go()
    assert_same_result(stopped.result(), whole.result())


def test_a_frozen_head_stays_as_it_began_and_training_with_it_resumes_as_any_other(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("train.freeze_head=true", "train.loss=lk", "train.recompute=true")
    whole, stopped = Training(run_file, tmp_path / "whole", *options), Training(run_file, tmp_path / "stopped", *options)
    whole.go()
    with monkeypatch.context() as patch:
        crash_at_call(patch, eyas.train.loop, "optimizer_step", 8, False)
        with pytest.raises(Crash):
            stopped.go()
    stopped.go()
    assert_same_result(stopped.result(), whole.result())
    head = read_head(read_spec(Path(load(run_file, []).target.path)))
    newest = latest(whole.folder / "train" / "checkpoints")
    assert newest is not None
    weights = load_file(newest / "weights.safetensors")
    assert torch.equal(weights["lm_head.weight"], head.head[read_ids(whole.folder / "vocab")].float())


def test_training_that_crashes_again_and_again_still_ends_as_the_uninterrupted_one(
    run_file: Path, uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(run_file, tmp_path / "stopped")
    crashes = 0
    while read_manifest(training.folder / "train") is None:
        assert crashes < 10
        with monkeypatch.context() as patch:
            crash_at_call(patch, eyas.train.loop, "optimizer_step", 6, False)
            try:
                training.go()
            except Crash:
                crashes += 1
    assert crashes >= 2
    assert_same_result(training.result(), uninterrupted)


def test_a_stop_that_is_asked_for_loses_no_step_and_does_not_change_which_checkpoint_is_best(
    run_file: Path, uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody pressed Ctrl-C must not decide which weights are exported, so such a checkpoint never counts as measured."""
    del uninterrupted  # here the held-out measurement is made up: the checkpoint of the stop would be the best by far

    def made_up(*unused: Any) -> float:
        return 9.0 if made_up.stopping else 1.5  # type: ignore[attr-defined]

    made_up.stopping = False  # type: ignore[attr-defined]
    monkeypatch.setattr(eyas.train.loop, "holdout_acceptance", made_up)
    whole = Training(run_file, tmp_path / "whole")
    whole.go()
    stopped = Training(run_file, tmp_path / "stopped")
    real, calls = eyas.train.loop.optimizer_step, [0]

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            made_up.stopping = True  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(eyas.train.loop, "optimizer_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stopped.go()
    made_up.stopping = False  # type: ignore[attr-defined]
    assert len(stopped.log()) == 7
    assert latest(stopped.folder / "train" / "checkpoints").name == "step-000007"  # type: ignore[union-attr]
    stopped.go()
    assert_same_result(stopped.result(), whole.result())


def test_a_kill_while_the_log_is_shortened_loses_no_line_of_it(
    run_file: Path, uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on drops the lines behind the checkpoint; the file must be whole at every instant of that."""
    training = Training(run_file, tmp_path / "stopped")
    with monkeypatch.context() as patch:
        crash_at_call(patch, eyas.train.loop, "optimizer_step", 8)
        with pytest.raises(Crash):
            training.go()
    real = Path.write_bytes

    def killed_when_opened(path: Path, data: bytes) -> int:
        if path.name != "log.jsonl":
            return real(path, data)
        path.open("wb").close()  # where a process dies between emptying the file and writing to it
        raise Crash("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", killed_when_opened)
        crash_at_call(patch, eyas.train.loop, "optimizer_step", 1)  # another way to write it is whole, and gets as far as this
        with pytest.raises(Crash):
            training.go()
    training.go()
    assert_same_result(training.result(), uninterrupted)


def wait_for_steps(training: Training, process: subprocess.Popen[str], num_steps: int) -> None:
    log = training.folder / "train" / "log.jsonl"
    limit = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b"\n") < num_steps:
        assert process.poll() is None, f"training ended before step {num_steps}:\n{process.communicate()[1]}"
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_a_process_that_a_signal_ends_is_gone_on_with_bit_for_bit(number: signal.Signals, run_file: Path, tmp_path: Path) -> None:
    overrides = ["train.epochs=12", "train.checkpoint_every=3"]
    training = Training(run_file, tmp_path / "stopped", *overrides)
    with training.process() as process:
        wait_for_steps(training, process, 7)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"eyas train {run_file}" in stderr and "goes on from there" in stderr
        assert "Traceback" not in stderr
    else:
        assert process.returncode == -signal.SIGKILL
    assert read_manifest(training.folder / "train") is None, "the signal came too late to prove anything"
    going_on_from = load_step(training)
    assert going_on_from >= 6
    training.go()
    if "long" not in CACHE:
        whole = Training(run_file, run_file.parent / "long", *overrides)
        whole.go()
        CACHE["long"] = whole.folder
    whole = Training.__new__(Training)
    whole.folder = CACHE["long"]
    found, wanted = training.result(), whole.result()
    assert found["log"] == wanted["log"]
    last = f"train/checkpoints/step-{len(wanted['log']):06d}"
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert found["bytes"][f"{last}/{name}"] == wanted["bytes"][f"{last}/{name}"], name
    assert any(name.endswith("weights.safetensors") for name in found["bytes"])
    assert load_file(training.folder / last / "weights.safetensors").keys() == Draft(load_draft(training.folder / last).shape).state_dict().keys()


def load_step(training: Training) -> int:
    newest = max((training.folder / "train" / "checkpoints").glob("step-??????"))
    return int(newest.name[5:])

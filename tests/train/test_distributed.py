"""Several processes train as one does: the same steps to rounding, the same result twice, and nothing lost however one of them ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import SOURCE
from safetensors.torch import load_file
from training import Training as TrainingInFolder

from eyas.config import load
from eyas.errors import UserError
from eyas.train.checkpoint import latest, read_state
from eyas.train.distributed import ALONE, _reason, num_processes
from eyas.train.sampler import epoch_steps, pack, shares

CACHE: dict[str, Path] = {}


@pytest.fixture
def run_file(prepared_run: Path) -> Path:
    return prepared_run


def processes(number: int) -> str:
    return f"train.processes={number}"


class Training(TrainingInFolder):
    def wait_for(self, steps: int) -> None:
        until = time.monotonic() + 120
        while len(self.log()) < steps:
            assert time.monotonic() < until
            time.sleep(0.02)

    def weights(self) -> dict[str, torch.Tensor]:
        newest = latest(self.folder / "train" / "checkpoints")
        assert newest is not None
        return load_file(newest / "weights.safetensors")


def assert_alike(one: Training, other: Training) -> None:
    """To rounding: gradients are summed in another order."""
    pairs = list(zip(one.log(), other.log(), strict=True))
    assert all(a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3) for a, b in pairs)
    found, wanted = one.weights(), other.weights()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-3, atol=1e-4) for name in wanted)


@pytest.fixture
def alone(run_file: Path) -> Training:
    training = Training.__new__(Training)
    if "alone" not in CACHE:
        training = Training(run_file, run_file.parent / "alone")
        training.go(processes(1))
        CACHE["alone"] = training.folder
    training.folder = CACHE["alone"]
    return training


def test_two_processes_train_what_one_does_and_the_same_twice(run_file: Path, alone: Training, tmp_path: Path) -> None:
    both = [Training(run_file, tmp_path / name) for name in ("a", "b")]
    for training in both:
        training.go(processes(2))
    assert_alike(both[0], alone)
    first, second = both[0].weights(), both[1].weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other) for name, other in alone.weights().items()), "one process must have done all of it"
    manifests = [json.loads((training.folder / "train" / "manifest.json").read_text()) for training in (both[0], alone)]
    assert manifests[0]["counts"]["steps"] == manifests[1]["counts"]["steps"] and manifests[0]["settings"] == manifests[1]["settings"]
    acceptances = [manifest["counts"]["holdout_acceptance_length"] for manifest in manifests]
    assert acceptances[0] == pytest.approx(acceptances[1], abs=0.02)


def test_a_stopped_training_goes_on_with_another_number_of_processes(run_file: Path, alone: Training, tmp_path: Path) -> None:
    training = Training(run_file, tmp_path / "stopped")
    process = training.process(processes(3))
    training.wait_for(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    newest = latest(training.folder / "train" / "checkpoints")
    assert process.returncode == 130 and "goes on from there" in err and "Traceback" not in err, err
    assert newest is not None and read_state(newest).step == len(training.log()) >= 3
    training.go(processes(2))
    assert_alike(training, alone)


def test_a_stop_before_the_processes_are_ready_is_no_failure(run_file: Path, tmp_path: Path) -> None:
    training = Training(run_file, tmp_path / "early")
    process = training.process(processes(2))
    until = time.monotonic() + 60
    while len(children(process)) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on from there" in err and "Training process" not in err, err


def test_more_processes_than_rows_in_a_step_leave_some_idle(run_file: Path, alone: Training, tmp_path: Path) -> None:
    training = Training(run_file, tmp_path / "many")
    training.go(processes(5))
    assert_alike(training, alone)


def children(process: subprocess.Popen[str]) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1]) == process.pid
                and b"eyas.train.rank" in folder.joinpath("cmdline").read_bytes()
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


@pytest.fixture
def long_training(run_file: Path, tmp_path: Path) -> Iterator[tuple[Training, subprocess.Popen[str]]]:
    training = Training(run_file, tmp_path / "long", "train.epochs=200", "train.patience=0")
    process = training.process(processes(2))
    try:
        training.wait_for(6)
        yield training, process
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_dies_ends_all_with_one_sentence_and_nothing_saved_is_lost(long_training: tuple[Training, subprocess.Popen[str]]) -> None:
    training, process = long_training
    victims = children(process)
    assert len(victims) == 2
    os.kill(victims[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "error: Training process 1 of 2 was ended by SIGKILL" in err and "goes on from there" in err, err
    newest = latest(training.folder / "train" / "checkpoints")
    assert newest is not None and read_state(newest).step >= 5


def test_no_process_outlives_the_one_that_started_it(long_training: tuple[Training, subprocess.Popen[str]]) -> None:
    _, process = long_training
    left = children(process)
    process.kill()
    process.wait()
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" for pid in left):
        assert time.monotonic() < until, "a training process outlived its parent"
        time.sleep(0.1)


def test_what_a_user_can_mend_is_said_as_by_one_process(run_file: Path, tmp_path: Path) -> None:
    training = Training(run_file, tmp_path / "wild", "train.lr=1e30", "train.muon_lr=1e30", "train.warmup=0.0")
    with pytest.raises(UserError, match=r"The loss became (nan|inf) at step \d+\. Lower train\.lr"):
        training.go(processes(2))


def test_a_fault_of_ours_in_a_process_comes_with_its_traceback_and_a_process_nobody_wants_ends(tmp_path: Path) -> None:
    said = "import json; print(json.dumps({'fault': 'Traceback (most recent call last):\\n  line 7\\nKeyError: 3'}))"
    with subprocess.Popen([sys.executable, "-c", said], stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        fault = _reason(1, process, tmp_path, 2)
    assert str(fault) == "training process 1 of 2: KeyError: 3" and "line 7" in fault.__notes__[0] and not isinstance(fault, UserError)
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-m", "eyas.train.rank"], stdin=subprocess.DEVNULL, env=environment, timeout=60, check=False).returncode == 0


def test_shares_are_a_partition_of_about_equal_parts_that_nothing_but_the_rows_decides() -> None:
    lengths = {f"k{n}": 1 + (37 * n) % 101 for n in range(60)}
    keys = list(lengths)
    assert shares(keys, lengths, 1) == [keys]
    for size in (2, 3, 8):
        parts = shares(keys, lengths, size)
        assert sorted(key for part in parts for key in part) == sorted(keys) and shares(keys[::-1], lengths, size) == parts
        loads = [sum(lengths[key] for key in part) for part in parts]
        assert max(loads) - min(loads) <= max(lengths.values())
    whole = epoch_steps(keys, lengths, 400, 100, 7, 1)
    split = [epoch_steps(keys, lengths, 400, 100, 7, 1, rank, 4) for rank in range(4)]
    for number, step in enumerate(whole):
        rows = [key for part in split for batch in part[number] for key in batch]
        assert sorted(rows) == sorted(key for batch in step for key in batch)
        assert all(sum(lengths[key] for key in batch) <= 101 for part in split for batch in part[number])
    assert pack([], lengths, 100) == [] and shares([], lengths, 2) == [[], []]


def test_as_many_processes_as_gpus_unless_told_otherwise(run_file: Path) -> None:
    def count(num_gpus: int, *overrides: str) -> int:
        return num_processes(load(run_file, list(overrides)), num_gpus)

    assert count(8) == 1, "this run file asks for the CPU"
    assert count(8, "target.device=auto") == 8 and count(0, "target.device=auto") == 1 and count(8, "target.device=cuda:3") == 1
    with pytest.raises(UserError, match=r"train.processes = 4, and with target.device = 'auto' training has 2 GPUs\."):
        count(2, "target.device=auto", "train.processes=4")
    with pytest.raises(UserError, match="training has 1 GPU"):
        count(8, "target.device=cuda:3", "train.processes=2")
    assert count(0, "train.processes=2") == 2 and ALONE.total([1.5]) == [1.5]

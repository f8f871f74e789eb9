"""Whatever is wrong outside Eyas ends in one sentence on stderr - the thing, the reason, the next step - with exit code 2 and no traceback."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from conftest import SOURCE, Outcome, conversation, make_tiny_target, write_run
from training import Training

from eyas.features import capture as features_capture
from eyas.features import disk
from eyas.target.transformers_engine import TransformersEngine
from eyas.train import loop

Eyas = Callable[..., Outcome]


def run_as_a_process(*arguments: object, **keywords: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "eyas.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **keywords)


def finished(process: subprocess.Popen[str]) -> Outcome:
    out, err = process.communicate(timeout=120)
    return Outcome(process.returncode, out, err)


# The run file. tests/test_config.py has the sentences; here, that they reach the user.


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.epoch=3", ["train.epoch", "did you mean epochs"]),
        ("trian.epochs=3", ["[trian]", "did you mean train"]),
        ("train.lr=fast", ["train.lr", "'fast'"]),
        ("train.lr", ["--set section.key=value"]),
        ("vocab.size=321", ["vocab.size = 321", "320"]),
        ("vocab.size=2", ["vocab.size = 2", "3 special tokens"]),
        ("features.layers=[1, 3]", ["features.layers = [1, 3]", "[1, 3, 5]"]),
        ("features.layers=[5, 3, 1]", ["features.layers", "ascending"]),
        ("features.layers=[1, 1, 3]", ["features.layers", "different"]),
        ("features.layers=[1, 3, 7]", ["features.layers", "6 (after the last layer)"]),
        ("features.layers=[-1, 3, 5]", ["features.layers", "from 0"]),
        ("data.max_length=513", ["data.max_length = 513", "512"]),
        ("draft.num_key_value_heads=3", ["draft.num_key_value_heads = 3", "4"]),
        ("draft.num_attention_heads=6", ["draft.num_attention_heads = 6", "32"]),
        ("draft.head_dim=7", ["draft.head_dim = 7", "even"]),
        ("target.device=nonsense", ["target.device = 'nonsense'", "cpu"]),
        ("target.path=none", ["/none is not a folder", "config.json"]),
        ("data.conversations=['none.jsonl']", ["none.jsonl does not exist", "run file"]),
        ("evaluate.prompts=['none.jsonl']", ["none.jsonl does not exist", "run file"]),
        ("data.conversations=['runs']", ["runs is a folder without data files", ".jsonl"]),
        ("data.conversations=['*.nothing']", ["No file matches", "run file"]),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(eyas: Eyas, make_run: Callable[..., Path], override: str, says: list[str]) -> None:
    outcome = eyas("run", make_run(), "--set", override)
    assert all(part in outcome.error for part in says), outcome.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named(eyas: Eyas, make_run: Callable[..., Path]) -> None:
    assert "no GPU" in eyas("run", make_run(), "--set", "target.device=cuda").error


def test_an_unknown_stage_is_named_before_any_work(eyas: Eyas, make_run: Callable[..., Path]) -> None:
    path = make_run()
    error = eyas("run", path, "--until", "trian").error
    assert "--until trian" in error and "prepare, extract, vocab, train, export, evaluate" in error
    assert not (path.parent / "runs" / "run" / "prepare").exists()


def test_a_run_folder_that_is_a_file_is_named(eyas: Eyas, make_run: Callable[..., Path]) -> None:
    path = make_run()
    (path.parent / "file").touch()
    for folder in ("file", "file/below"):
        assert "run.folder" in eyas("run", path, "--set", f"run.folder={folder}").error


def test_status_of_what_is_no_run_folder_is_refused(eyas: Eyas, tmp_path: Path) -> None:
    assert "no folder" in eyas("status", tmp_path / "none").error


def test_a_real_process_says_the_same_sentence(make_run: Callable[..., Path]) -> None:
    outcome = finished(run_as_a_process("run", make_run(), "--set", "train.epoch=3"))
    assert outcome.error.endswith("checkpoint_every.") and outcome.out == ""


# The data.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["data.jsonl is empty", "JSONL"]),
        ("\n\n  \n", ["data.jsonl is empty"]),
        ('{"prompt": "a"}\n{"prompt": \n', ["data.jsonl:2 is not JSON"]),
        ("[1, 2]\n", ["data.jsonl:1 holds list"]),
        ('{"messages": [{"role": "human", "content": "a"}]}\n', ["data.jsonl:1", "'human'", "assistant"]),
        ('{"messages": [{"role": "user", "content": 7}]}\n', ["data.jsonl:1", "int"]),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}\n', ["data.jsonl:1", "surrogate"]),
        ('{"id": "\\ud83d", "prompt": "a"}\n', ["data.jsonl:1", "surrogate"]),
        ("[" * 100_000 + "\n", ["data.jsonl:1"]),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}\n', ["No row is left", "fewer than two tokens"]),
    ],
    ids=["empty", "blank lines", "not JSON", "list", "role", "number", "surrogate", "surrogate id", "deep", "nothing left"],
)
def test_data_that_is_no_conversation_is_named_with_its_line(eyas: Eyas, make_run: Callable[..., Path], text: str, says: list[str]) -> None:
    path = make_run()
    (path.parent / "data.jsonl").write_text(text)
    outcome = eyas("run", path)
    assert all(part in outcome.error for part in says), outcome.error


def test_a_row_without_an_answer_is_refused_when_none_may_be_written(eyas: Eyas, make_run: Callable[..., Path]) -> None:
    path = make_run(data={"regenerate": "never"})
    (path.parent / "data.jsonl").write_text(json.dumps(conversation(1)) + '\n{"prompt": "a"}\n')
    error = eyas("run", path).error
    assert "data.jsonl:2" in error and 'data.regenerate = "missing"' in error


# The model folder.


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def with_config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, ["is not a folder"]),
        (without("model.safetensors"), ["no weights", "Download"]),
        (cut, ["model.safetensors", "cut short"]),
        (without("config.json"), ["config.json does not exist"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json is not JSON"]),
        (lambda folder: (folder / "config.json").write_text("{}"), ["does not state model_type"]),
        (with_config(num_hidden_layers="six"), ["num_hidden_layers"]),
        (without("chat_template.jinja"), ["no chat template", "chat_template.jinja"]),
        (without("tokenizer.json"), ["tokenizer"]),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), ["tokenizer"]),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"), ["No row is left", "chat template"]),
        (with_config(model_type="no_such_model"), ["no_such_model"]),
        (with_config(num_hidden_layers=7), ["/target"]),
        (with_config(hidden_size=48), ["/target"]),
        (with_config(rope_parameters={"rope_type": "unheard", "rope_theta": 1e4}), ["unheard"]),
    ],
    ids=[
        "missing", "no weights", "truncated", "no config", "config not JSON", "empty config", "config type", "no template", "no tokenizer",
        "tokenizer not JSON", "template syntax", "model type", "a layer too many", "other width", "rope",
    ],
)  # fmt: skip
def test_a_model_folder_that_is_not_whole_is_named(
    eyas: Eyas, make_run: Callable[..., Path], tiny_target: Path, tmp_path: Path, damage: Callable[[Path], object], says: list[str]
) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    damage(folder)
    outcome = eyas("run", make_run(target={"path": str(folder)}), "--until", "extract")
    assert all(part in outcome.error for part in says), outcome.error


# Two at once.


def test_two_processes_do_not_work_in_one_run_folder(eyas: Eyas, make_run: Callable[..., Path]) -> None:
    path = make_run()
    folder = path.parent / "runs" / "run"
    folder.mkdir(parents=True)
    holder = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", holder, str(folder / "lock")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        for command in ("run", "prepare"):
            assert "in use by another eyas process" in eyas(command, path).error
        assert eyas("status", folder).code == 0, "looking is allowed"
    finally:
        process.kill()
        process.wait()
    assert eyas("prepare", path).code == 0, "the lock goes with its process"
    with open(folder / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# The disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 40 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def leave_free(disk: Path, num_bytes: int) -> Path:
    """Fills the disk but for num_bytes; returns the file that does."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(b"\0" * (shutil.disk_usage(disk).free - num_bytes))
    return ballast


def test_features_that_cannot_fit_are_refused_before_the_work(eyas: Eyas, make_run: Callable[..., Path], small_disk: Path) -> None:
    error = eyas("run", make_run(run={"folder": str(small_disk / "run")})).error
    assert "features need" in error and "GB free" in error and "run.folder" in error
    assert not list((small_disk / "run" / "features").glob("shard-*"))


@pytest.mark.parametrize("free", [0, 4096, 12288, 20480])
def test_a_disk_that_fills_during_prepare_stops_it_and_it_goes_on_when_there_is_room(
    eyas: Eyas, make_run: Callable[..., Path], small_disk: Path, free: int
) -> None:
    path = make_run(run={"folder": str(small_disk / "run")}, data={"regenerate": "all"})
    (small_disk / "run").mkdir()
    ballast = leave_free(small_disk, free)
    outcome = eyas("prepare", path)
    assert "disk is full" in outcome.error and f"eyas prepare {path}" in outcome.error
    ballast.unlink()
    assert eyas("prepare", path).code == 0
    assert eyas("prepare", path, "--set", f"run.folder={path.parent / 'elsewhere'}").code == 0
    assert (small_disk / "run" / "prepare" / "rows.safetensors").read_bytes() == (path.parent / "elsewhere" / "prepare" / "rows.safetensors").read_bytes()


def test_a_disk_that_fills_while_several_processes_train_is_said_as_by_one(eyas: Eyas, prepared_run: Path, small_disk: Path) -> None:
    training = Training(prepared_run, small_disk / "run")
    ballast = leave_free(small_disk, 200_000)
    options = [word for override in (*training.overrides, "train.processes=2") for word in ("--set", override)]
    outcome = eyas("train", prepared_run, *options)
    assert "disk is full" in outcome.error and "eyas train" in outcome.error
    ballast.unlink()
    assert eyas("train", prepared_run, *options).code == 0


def exported(folder: Path) -> bytes:
    return (folder / "export" / "vllm" / "model.safetensors").read_bytes()


def test_a_disk_that_fills_later_stops_the_run_and_the_same_command_ends_as_if_it_had_not(
    eyas: Eyas, make_run: Callable[..., Path], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FREE_FLOOR", 0)
    monkeypatch.setattr(disk, "WAIT_SECONDS", 0.0)
    path = make_run(run={"folder": str(small_disk / "run")})
    assert eyas("run", path, "--until", "prepare").code == 0
    stopped_in = []
    for free in range(0, 4_000_000, 50_000):  # each time a little further
        ballast = leave_free(small_disk, free)
        outcome = eyas("run", path, "--until", "export")
        ballast.unlink()
        if outcome.code == 0:
            break
        assert any(said in outcome.error for said in ("disk is full", "features need", "next shard needs")), outcome.err
        begun = [stage for stage in ("1 features", "2 vocab", "3 train", "4 export") if (small_disk / "run" / stage[2:]).exists()]
        stopped_in.append(max(begun, default="0 the plan"))
    assert outcome.code == 0 and "3 train" in stopped_in, stopped_in
    whole = path.parent / "whole"
    assert eyas("run", path, "--until", "export", "--set", f"run.folder={whole}").code == 0
    assert exported(small_disk / "run") == exported(whole)


@pytest.mark.parametrize("patience", [60.0, 0.5])
def test_extraction_waits_for_room_and_goes_on_or_stops_cleanly(
    eyas: Eyas, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr(disk, "FREE_FLOOR", 1 << 20)
    monkeypatch.setattr(disk, "WAIT_SECONDS", patience)
    monkeypatch.setattr(disk, "POLL_SECONDS", 0.1)
    target = make_tiny_target(tmp_path / "target", num_layers=3, hidden_size=256)
    path = write_run(tmp_path, target, run={"folder": str(small_disk / "run")}, features={"shard_mib": 1})
    real, calls = features_capture.open_shard, []

    def open_shard(*arguments: Any) -> Any:
        """When the second shard is about to be laid out, somebody fills the disk, and frees it two seconds later."""
        calls.append(arguments)
        if len(calls) == 2:
            ballast = leave_free(small_disk, 100_000)
            Timer(2.0, ballast.unlink).start()
        return real(*arguments)

    monkeypatch.setattr(features_capture, "open_shard", open_shard)
    outcome = eyas("run", path, "--until", "extract")
    assert "waiting up to" in outcome.err and "next shard needs" in outcome.err and "Free some space" in outcome.err
    state = json.loads(eyas("status", small_disk / "run", "--json").out)["extract"]["progress"]
    if patience < 1:
        assert outcome.code == 2 and "finished work is kept" in outcome.error and state["state"] == "stopped"
        time.sleep(2.5)
        outcome = eyas("run", path, "--until", "extract")
    assert outcome.code == 0, outcome.err
    assert "all whole" in eyas("verify", path).err


# Ctrl-C.


def test_ctrl_c_in_any_stage_exits_with_130_and_says_how_to_go_on(eyas: Eyas, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(data={"regenerate": "all"})

    def interrupted(*unused: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    for name in ("generate", "states"):
        with monkeypatch.context() as patch:
            patch.setattr(TransformersEngine, name, interrupted)
            outcome = eyas("run", path, "--until", "extract")
        assert outcome.code == 130 and "Traceback" not in outcome.err
        assert f"`eyas run {path} --until extract` goes on from there" in outcome.err
    assert eyas("run", path, "--until", "extract").code == 0


def test_the_command_to_go_on_with_can_be_pasted_into_a_shell(eyas: Eyas, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*unused: object) -> None:
        raise KeyboardInterrupt

    path = make_run()
    words = ["run", str(path), "--until", "extract", "--set", "features.layers=[0, 2, 4]"]
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "states", interrupted)
        outcome = eyas(*words)
    said = outcome.err.rpartition("kept; `")[2].partition("` goes on")[0]
    assert shlex.split(said) == ["eyas", *words]


def test_a_stop_in_training_changes_nothing_in_the_result(eyas: Eyas, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that spoils the draft: the weights at the stop are better than any the uninterrupted run looks at."""
    path = make_run(train={"lr": 0.3, "epochs": 4, "warmup": 0.0, "checkpoint_every": 1000})
    real = loop.StepLog.add

    def add(self: Any, **values: Any) -> None:
        real(self, **values)
        if values["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop.StepLog, "add", add)
        assert eyas("run", path, "--until", "export").code == 130
    assert eyas("run", path, "--until", "export").code == 0
    whole = path.parent / "whole"
    assert eyas("run", path, "--until", "export", "--set", f"run.folder={whole}").code == 0
    last = max((whole / "train" / "checkpoints").iterdir()).name
    weights = Path("train") / "checkpoints" / last / "weights.safetensors"
    assert (path.parent / "runs" / "run" / weights).read_bytes() == (whole / weights).read_bytes(), "the weights at the end of training"
    assert exported(path.parent / "runs" / "run") == exported(whole), "the checkpoint that is chosen"


@pytest.mark.slow
def test_a_real_ctrl_c_in_a_real_process_and_a_second_run_end_as_one_uninterrupted_run(eyas: Eyas, tmp_path: Path, tiny_target: Path) -> None:
    path = write_run(tmp_path, tiny_target, [conversation(n) for n in range(22)], train={"epochs": 40, "tokens_per_step": 128, "checkpoint_every": 1000})
    process = run_as_a_process("run", path)
    log = tmp_path / "runs" / "run" / "train" / "log.jsonl"
    end = time.monotonic() + 90
    while not (log.exists() and len(log.read_bytes().splitlines()) >= 5) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    outcome = finished(process)
    assert outcome.code == 130 and "Traceback" not in outcome.err, outcome.err
    assert f"`eyas run {path}` goes on from there" in outcome.err
    assert 5 <= len(log.read_bytes().splitlines()) < 240
    again = eyas("run", path)
    assert again.code == 0 and "going on from step" in again.err
    assert eyas("run", path, "--set", f"run.folder={tmp_path / 'whole'}").code == 0
    logs = [(folder / "train" / "log.jsonl").read_bytes().splitlines() for folder in (tmp_path / "runs" / "run", tmp_path / "whole")]
    mine, whole = ([json.loads(line)["loss"] for line in lines] for lines in logs)
    assert mine == whole
    assert exported(tmp_path / "runs" / "run") == exported(tmp_path / "whole")


def test_a_fault_of_ours_is_told_in_a_sentence_too_and_written_down(eyas: Eyas, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*unused: object) -> None:
        raise RuntimeError("some fault")

    monkeypatch.setattr(TransformersEngine, "capture", broken)
    outcome = eyas("run", make_run())
    assert outcome.code == 1 and "Traceback" not in outcome.err
    report = Path(outcome.err.strip().rpartition("report it with ")[2].rstrip("."))
    assert "some fault" in report.read_text() and "Traceback" in report.read_text()

"""What can be wrong is found before any weight is read: each fault is made on purpose and named by `eyas plan`, `doctor` or `rehearse` in one sentence.

The target's weight files here are headers over a hole in the disk: whoever read a weight would read zeros. docs/plan.md has this table for users.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, Outcome, make_tiny_target, write_run

import eyas.export.run
import eyas.foresight.doctor as doctor
from eyas.target.transformers_engine import TransformersEngine

Eyas = Callable[..., Outcome]


@dataclass(frozen=True)
class Fault:
    """command: which finds it. says: parts of its one sentence. The rest is what is broken: the run file, the target's config, its files, the machine."""

    name: str
    command: str
    says: list[str]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    files: Callable[[Path], Any] | None = None
    machine: Callable[[pytest.MonkeyPatch, Path], Any] | None = None
    words: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.name


def vllm(**more: Any) -> dict[str, dict[str, Any]]:
    return {"target": {"engine": "vllm", **more}}


def without(name: str) -> Callable[[Path], Any]:
    return lambda target: (target / name).unlink()


def edit(name: str, **changes: Any) -> Callable[[Path], Any]:
    """Changes a JSON file; None takes a key out."""

    def act(target: Path) -> None:
        values = json.loads((target / name).read_text()) | changes
        (target / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return act


def remote_code(target: Path) -> None:
    edit("tokenizer_config.json", tokenizer_class="HouseTokenizer", auto_map={"AutoTokenizer": ["house.HouseTokenizer", None]})(target)
    (target / "house.py").write_text("raise SystemExit('this must not run')\n")
    (target / "tokenizer.json").unlink()


def no_width(target: Path) -> None:
    edit("config.json", hidden_size=None)(target)
    (target / "model.safetensors").unlink()  # which would show it


def half_a_model(target: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_short(target: Path) -> None:
    os.truncate(target / "model.safetensors", (target / "model.safetensors").stat().st_size - 100)


def room(num_bytes: int) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Of every disk, beside what is left free always."""
    free = SimpleNamespace(total=1 << 40, used=0, free=(256 << 20) + num_bytes)
    return lambda monkeypatch, folder: monkeypatch.setattr(shutil, "disk_usage", lambda path: free)


def engine(**changes: Any) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """A Python of an environment whose vLLM tells of itself what Eyas expects, but for the changes."""

    def act(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        told: dict[str, Any] = {"version": "9.9", "torch": "2.99", "found": {name: words for name, (words, _) in doctor.ENTRY_POINTS.items()}}
        told["found"] |= changes.get("found", {})
        told |= {key: value for key, value in changes.items() if key != "found"}
        (folder / "told.json").write_text(json.dumps(told))
        program(folder / "python", f"#!/bin/sh\necho EYAS$(cat {folder}/told.json)\n")

    return act


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def busy_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    rows = 'case "$1" in --query-gpu=index*) echo "0, GPU-a, NVIDIA H200, 143771, 90000, 580.1";; --query-gpu=*) echo "NVIDIA H200, 143771";; '
    program(folder / "nvidia-smi", f'#!/bin/sh\n{rows}*) echo "GPU-a, {os.getpid()}, 89000";; esac\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def little_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    engine()(monkeypatch, folder)
    room(1000)(monkeypatch, folder)


def absolute_d2t(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(eyas.export.run, "to_d2t", lambda ids: ids)


def stale_vocabulary(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    real = eyas.export.run.to_t2d
    monkeypatch.setattr(eyas.export.run, "to_t2d", lambda ids, size: real(ids, size).roll(1))


def two_aux_layers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    real = eyas.export.run.draft_config

    def config(*arguments: Any) -> dict[str, Any]:
        made = real(*arguments)
        made["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = made["eagle_config"]["eagle_aux_hidden_state_layer_ids"][:2]
        return made

    monkeypatch.setattr(eyas.export.run, "draft_config", config)


def wrong_last_layer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    real = TransformersEngine.states

    def capture(self: TransformersEngine, rows: Any, layers: Any) -> list[torch.Tensor]:
        return real(self, rows, [*layers[:-1], layers[-1] - 1])

    monkeypatch.setattr(TransformersEngine, "states", capture)


LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
FAULTS = [
    Fault("a misspelt key", "plan", ["train.epoch", "did you mean epochs"], {"train": {"epoch": 3}}),
    Fault("layers out of order", "plan", ["features.layers = [5, 3, 1]", "ascending"], {"features": {"layers": [5, 3, 1]}}),
    Fault("two aux layers", "plan", ["features.layers = [1, 3]", "exactly three"], {"features": {"layers": [1, 3]}}),
    Fault("a layer that is not there", "plan", ["6 (after the last layer)"], {"features": {"layers": [1, 3, 7]}}),
    Fault("a draft vocabulary larger than the target's", "plan", ["vocab.size = 500", "320"], {"vocab": {"size": 500}}),
    Fault("rows longer than the target takes", "plan", ["data.max_length = 9,000", "512"], {"data": {"max_length": 9000}}),
    Fault("no chat template", "plan", ["chat template"], files=without("chat_template.jinja")),
    Fault("a tokenizer with code of its own, not allowed", "plan", ["trust_remote_code"], files=remote_code),
    Fault("heads that tensor parallel does not divide", "plan", ["target.tensor_parallel = 3", "4 heads", "1, 2"], vllm(tensor_parallel=3)),
    Fault(
        "more training processes than GPUs", "plan", ["train.processes = 4", "training has 2 GPUs", "Set it to 2"],
        {"train": {"processes": 4}, "target": {"device": "auto"}}, words=("--gpus", "2xH200"),
    ),
    Fault("more ranks than GPUs", "plan", ["target.tensor_parallel = 4", "1 GPUs"], vllm(tensor_parallel=4), words=("--gpus", "1xH200")),
    Fault("pipeline parallel", "plan", ["pipeline_parallel_size"], vllm(extra={"pipeline_parallel_size": 2})),
    Fault(
        "a cache that holds no whole row", "plan", ["kv_cache_memory_bytes = 4,096", "data.max_length + 1", "Raise it"],
        vllm(extra={"kv_cache_memory_bytes": 4096}),
    ),
    Fault("a GPU too small for the target", "plan", ["extract needs", "24"], vllm(), LARGE, without("model.safetensors"), words=("--gpus", "1xRTX 4090")),
    Fault("a GPU too small for training", "plan", ["train needs", "tokens_per_batch"], {"train": {"tokens_per_batch": 1 << 26}}, words=("--gpus", "1xH200")),
    Fault("a GPU that nobody knows", "plan", ["8xH2000", "did you mean H200"], words=("--gpus", "8xH2000")),
    Fault(
        "no room for vLLM beside the draft", "plan", ["take turns on a GPU", "vLLM wants 95% of 24 GB", "target.gpu_memory_utilization = 0.8"],
        vllm(gpu_memory_utilization=0.95) | {"features": {"keep": "none"}, "data": {"synthesize": 10**5}}, words=("--gpus", "1xRTX 4090"),
    ),
    Fault("a disk too small for the features", "plan", ["The features need", 'features.keep = "2GB"'], {"data": {"synthesize": 10**6}}, machine=room(3 << 30)),
    Fault("no data", "plan", ["none.jsonl does not exist"], {"data": {"conversations": ["none.jsonl"]}}),
    Fault("data of another form", "plan", ["a row needs messages"], files=lambda target: (target.parent / "data.jsonl").write_text('{"text": "a"}\n')),
    Fault("a config without a width", "plan", ["hidden_size"], files=no_width),
    Fault("a model downloaded in part", "plan", ["model-2.safetensors"], files=half_a_model),
    Fault("a weight file cut short", "plan", ["cut short"], files=cut_short),
    Fault("a final norm that is not known", "plan", ["model type 'newcomer'", "TAILS"], config={"model_type": "newcomer"}),
    Fault("layers of several streams", "plan", ["deepseek_v4", "hyper-connections"], config={"model_type": "deepseek_v4"}),
    Fault("heads of the draft that do not fit", "plan", ["num_key_value_heads = 3"], {"draft": {"num_key_value_heads": 3}}),
    Fault("an odd head width", "plan", ["draft.head_dim = 7", "even"], {"draft": {"head_dim": 7}}),
    Fault("a rope that the draft cannot take over", "plan", ["rope type 'spiral'"], config={"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}),
    Fault("a frozen head of noise", "plan", ["freeze_head"], {"train": {"freeze_head": True}, "draft": {"init_head": "random"}}),
    Fault("no such Python for vLLM", "doctor", ["nothing/python", "cannot be started"], vllm(python="nothing/python")),
    Fault("an environment without vLLM", "doctor", ["cannot import vllm", "target.python"], vllm(python=sys.executable)),
    Fault(
        "an engine whose argument was renamed", "doctor", ["collective_rpc", "extract", "takes no method"], vllm(python="./python"),
        machine=engine(found={"vllm:LLM.collective_rpc": ["self", "procedure", "args"]}),
    ),
    Fault(
        "an engine that lost an entry point", "doctor", ["run_server", "evaluate", "no server"], vllm(python="./python"),
        machine=engine(found={"vllm.entrypoints.openai.api_server:run_server": "ModuleNotFoundError: no server"}),
    ),
    Fault(
        "an engine that cannot serve this architecture", "doctor", ["knows no LlamaForCausalLM"], vllm(python="./python"),
        machine=engine(architectures=["Other"]),
    ),
    Fault(
        "a quantisation that the engine does not know", "doctor", ["quantisation 'home-made'"], vllm(python="./python"),
        {"quantization_config": {"quant_method": "home-made"}}, machine=engine(quantizations=["fp8"]),
    ),
    Fault(
        "an argument for the engine that it does not have", "doctor", ["no argument enforce_eagre", "enforce_eager"],
        vllm(python="./python", extra={"enforce_eagre": True}), machine=engine(),
    ),
    Fault("a process left over on a GPU", "doctor", ["held by process", "gpu_memory_utilization"], machine=busy_gpu),
    Fault("little shared memory", "doctor", ["/dev/shm", "--shm-size"], vllm(python="./python"), machine=little_memory),
    Fault("absolute ids in d2t", "rehearse", ["`export`", "must hold offsets"], machine=absolute_d2t),
    Fault("a draft vocabulary of another run", "rehearse", ["`export`", "same draft vocabulary"], machine=stale_vocabulary),
    Fault("a draft of two aux layers", "rehearse", ["`export`", "three"], machine=two_aux_layers),
    Fault("a last layer that is not the last", "rehearse", ["`extract`", "log-probabilities"], machine=wrong_last_layer),
]  # fmt: skip


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose weight file has its header and its length, and no weights."""
    target = make_tiny_target(tmp_path_factory.mktemp("hollow") / "target")
    file = target / "model.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as handle:
        header = 8 + int.from_bytes(handle.read(8), "little")
        handle.truncate(header)
        handle.truncate(size)
    return target


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_what_is_wrong_is_named_before_any_weight_is_read(fault: Fault, hollow: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    shutil.copytree(hollow, target)
    edit("config.json", **fault.config)(target)
    path = write_run(tmp_path, target, **fault.sections)
    if fault.files:
        fault.files(target)
    if fault.machine:
        fault.machine(monkeypatch, tmp_path)
    outcome = eyas(fault.command, path, *fault.words)
    said = " ".join((outcome.out + outcome.err).split())
    assert "Traceback" not in said
    assert outcome.code == 2 or "warn" in said, said
    assert all(part in said for part in fault.says), said
    assert not (tmp_path / "runs" / "run" / "rehearsal" / "target").exists(), "gigabytes, of a real target"


def test_without_a_fault_all_three_are_content(hollow: Path, tmp_path: Path, eyas: Eyas) -> None:
    path = write_run(tmp_path, hollow)
    for command in ("plan", "doctor", "rehearse"):
        outcome = eyas(command, path)
        assert outcome.code == 0 and "fail" not in outcome.out, (command, outcome.out, outcome.err)


def test_the_table_in_the_docs_is_this_one() -> None:
    table = [line.split(" | ") for line in (ROOT / "docs" / "plan.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert [(cells[0].removeprefix("| "), cells[1].strip("`")) for cells in table] == [(fault.name, fault.command) for fault in FAULTS]
    assert len(FAULTS) >= 25

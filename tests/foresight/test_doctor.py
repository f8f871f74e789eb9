"""eyas doctor: each thing that can be wrong with a machine is named, with the next step; nothing is changed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import VLLM_PYTHON, Outcome, write_run

import eyas.foresight.doctor as doctor
from eyas.config import load
from eyas.foresight.doctor import Finding

SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) echo "0, GPU-a, NVIDIA H200, 143771, 12, 580.1"; echo "1, GPU-b, NVIDIA H200, 143771, 90000, 580.1" ;;
  *) echo "GPU-b, {pid}, 89000" ;;
esac
"""


def by_name(findings: object) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}  # type: ignore[attr-defined]


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_it_names_what_is_there_and_leaves_nothing_behind(tmp_path: Path, tiny_target: Path, eyas: Callable[..., Outcome]) -> None:
    path = write_run(tmp_path, tiny_target)
    before = sorted(tmp_path.rglob("*"))
    outcome = eyas("doctor", path, "--json")
    assert outcome.code == 0, outcome.err
    found = {line["name"]: line for line in json.loads(outcome.out)}
    assert {"python", "torch", "transformers", "cpu", "shared memory", "disk", "open files", "clock", "target", "chat template"} <= found.keys()
    assert all(line["level"] in ("ok", "warn") for line in found.values()) and "6 layers" in found["target"]["text"]
    assert sorted(tmp_path.rglob("*")) == before
    plain = eyas("doctor")
    assert plain.code == 0 and plain.out.count("ok ") >= 9


def test_memory_that_others_hold_on_a_gpu_is_named_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "nvidia-smi", SMI.format(pid=os.getpid()))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = by_name(doctor.gpus())
    assert found["gpu 0"].level == "ok" and "143,759 of 143,771 MiB free" in found["gpu 0"].text
    assert found["gpu 1"].level == "warn" and f"process {os.getpid()} (" in found["gpu 1"].text and found["gpu 1"].step
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert by_name(doctor.gpus())["torch"].level == "fail"


def test_a_package_that_is_too_old_or_gone_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "xxhash":
            raise importlib.metadata.PackageNotFoundError
        return "4.57.0" if name == "transformers" else real(name)

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["transformers<6,>=5.17", "xxhash", 'pytest; extra == "dev"'])
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = by_name(doctor.packages())
    assert found["transformers"].level == "fail" and "4.57.0" in found["transformers"].text and "pip install" in found["transformers"].step
    assert found["xxhash"].level == "fail" and "pytest" not in found


def test_an_eyas_that_is_not_installed_is_said_to_be_so_and_all_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    found = by_name(doctor.packages())
    assert found["eyas"].level == "warn" and "pip install" in found["eyas"].step
    assert found["torch"].level == "ok"


def test_little_shared_memory_fails_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    assert [doctor.shared_memory(needed).level for needed in (True, False)] == ["fail", "warn"]
    assert "--shm-size" in doctor.shared_memory(True).step
    (disk,) = doctor.disk(Path.cwd())
    assert disk.level == "fail" and "67 MB free" in disk.text


def test_a_slow_disk_few_open_files_and_a_clock_set_back_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW_DISK", 1e15)
    (disk,) = doctor.disk(tmp_path)
    assert disk.level == "warn" and "GB/s" in disk.text
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert doctor.open_files().step == "ulimit -n 4096"
    assert doctor.clock(tmp_path).level == "ok"
    (tmp_path / "log.txt").touch()
    os.utime(tmp_path / "log.txt", (time.time() + 7200,) * 2)
    assert doctor.clock(tmp_path).level == "warn" and "2.0 h" in doctor.clock(tmp_path).text


def test_an_engine_that_cannot_serve_is_named_with_the_stage_it_would_fail_in(tmp_path: Path) -> None:
    (missing,) = doctor.vllm(str(tmp_path / "nothing"))
    (without,) = doctor.vllm(sys.executable)
    assert missing.level == without.level == "fail" and "vllm" in without.text and "target.python" in without.step
    told = {"version": "9.9", "torch": "2.99", "found": {name: arguments for name, (arguments, _) in doctor.ENTRY_POINTS.items()}}
    told["found"]["vllm:LLM.collective_rpc"] = ["procedure"]
    told["found"]["vllm.entrypoints.openai.api_server:run_server"] = "ModuleNotFoundError: no server"
    (tmp_path / "told.json").write_text(json.dumps(told))
    found = by_name(doctor.vllm(str(program(tmp_path / "python", f"#!/bin/sh\necho EYAS$(cat {tmp_path}/told.json)\n"))))
    assert found["vllm"].level == "ok" and found["SamplingParams"].level == "ok"
    assert found["LLM.collective_rpc"].level == "fail" and "extract" in found["LLM.collective_rpc"].text and "method" in found["LLM.collective_rpc"].text
    assert found["run_server"].level == "fail" and "evaluate" in found["run_server"].text


@pytest.mark.vllm
def test_the_real_engine_has_all_that_is_called_of_it(tmp_path: Path, tiny_target: Path) -> None:
    path = write_run(tmp_path, tiny_target, target={"engine": "vllm", "python": str(VLLM_PYTHON)})
    found = by_name(doctor.examine(load(path, [])))
    assert [finding for finding in found.values() if finding.level == "fail"] == []
    assert all(name.rpartition(":")[2] in found for name in doctor.ENTRY_POINTS)


def test_a_target_that_is_none_fails_and_so_does_the_command(tmp_path: Path, eyas: Callable[..., Outcome]) -> None:
    path = write_run(tmp_path, tmp_path / "nowhere")
    outcome = eyas("doctor", path)
    assert outcome.code == 2 and "fail" in outcome.out and "is not a folder" in outcome.out

"""The watch over a process that answers commands, with real processes that end, hang and report errors."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import eyas.target.worker_process
from eyas.target.worker_process import Failed, Lost, WorkerProcess

# Starts one that works and names it; then does what it is told.
PROGRAM = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.3: pass\\ntime.sleep(600)"])
while True:
    with open(f"/proc/{child.pid}/stat") as file:
        fields = file.read().split()
        if int(fields[13]) + int(fields[14]) > 1.2 * os.sysconf("SC_CLK_TCK"):
            break
    time.sleep(0.05)
out = os.fdopen(int(sys.argv[1]), "w")
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "end":
        os._exit(3)
    if do == "hang":
        time.sleep(600)
    print(json.dumps({"ok": child.pid} if do == "name" else {"error": "no such thing", "kind": "KeyError"}), file=out, flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerProcess:
    monkeypatch.setattr(eyas.target.worker_process, "CHILD_SECONDS", 1.0)
    (tmp_path / "log").touch()
    return WorkerProcess([sys.executable, "-c", PROGRAM], dict(os.environ), tmp_path / "log")


def ask(worker: WorkerProcess, do: str, hang_seconds: float = 60.0) -> int:
    worker.send({"do": do})
    return int(worker.receive(hang_seconds, lambda: None))


def test_one_that_worked_and_ended_between_two_commands_is_missed(worker: WorkerProcess) -> None:
    child = ask(worker, "name")
    os.kill(child, signal.SIGKILL)
    with pytest.raises(Lost, match=rf"its process {child} .* ended and it did not go on"):
        ask(worker, "hang")
    assert worker.process.poll() is not None


def test_one_that_ended_and_was_not_needed_is_not_missed_later(worker: WorkerProcess) -> None:
    child = ask(worker, "name")
    os.kill(child, signal.SIGKILL)
    while eyas.target.worker_process._stat(child)[0] not in ("Z", "X"):  # on a busy machine it lives a little longer
        time.sleep(0.01)
    ask(worker, "name")
    with pytest.raises(Lost, match="no sign of life for"):
        ask(worker, "hang", 3.0)


def test_its_end_and_its_errors_are_told_apart(worker: WorkerProcess, tmp_path: Path) -> None:
    ask(worker, "name")
    with pytest.raises(Lost, match="ended with code 3"):
        ask(worker, "end")
    worker.stop(0.0)
    other = WorkerProcess([sys.executable, "-c", PROGRAM], dict(os.environ), tmp_path / "log")
    with pytest.raises(Failed, match="no such thing"):
        ask(other, "anything")
    assert other.process.poll() is not None

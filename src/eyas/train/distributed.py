"""Training by several processes of one machine, one a GPU: each has the whole draft and takes its share of the rows of every optimiser step.

Gradients are summed, so a step is what one process would do with all its rows, to rounding; weights stay the same everywhere, for every process makes the
same step. The processes are children of the one that was started (`launch`), which only watches: one that dies ends all, and a signal is passed on once.

Small numbers travel by gloo on the CPU, gradients by NCCL where there are GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from eyas.config import RunConfig
from eyas.errors import UserError

TIMEOUT = timedelta(days=30)  # of a collective: others wait while the first captures a round; whoever dies is noticed by the parent
POLL_SECONDS = 0.1
STOPPED = 130  # exit code after a stop that was asked for
SAID = 2  # exit code after a sentence for the user


@dataclass(frozen=True)
class World:
    """The processes that train together. rank: which of them this one is; 0 speaks and writes."""

    rank: int = 0
    size: int = 1

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, in float64."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return list(sums.tolist())

    def wait(self) -> None:
        """Until all are here."""
        self.total([0.0])

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Each gradient becomes the sum over all processes; one that had no rows counts as zero."""
        if self.size == 1:
            return
        waiting = []
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in waiting:
            work.wait()


ALONE = World()


def num_processes(config: RunConfig, num_gpus: int) -> int:
    """How many train together. Raises UserError for more than have a GPU each."""
    device, wanted = config.target.device, config.train.processes
    found = 1 if device.startswith("cuda:") else num_gpus if device in ("auto", "cuda") else 0  # GPUs that may be trained on
    if wanted is not None and found and wanted > found:
        raise UserError(
            f"train.processes = {wanted}, and with target.device = {device!r} training has {found} GPU{'s' if found > 1 else ''}. Set it to {found} or less."
        )
    return wanted or max(1, found)


def join(rendezvous: str, rank: int, size: int, device: torch.device) -> World:
    """Becomes one of `size` processes that meet in the file `rendezvous`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size)


def launch(config: RunConfig, folder: Path, size: int, shows: bool) -> None:
    """Runs train/rank.py `size` times over, to the end. folder: the stage's own, where each process but the first has a log. shows: whether the first
    speaks to the terminal.

    Raises UserError if one fails, and KeyboardInterrupt after a stop that was asked for; then what was saved is there.
    """
    redo = shlex.join(["eyas", *sys.argv[1:]])
    job = {"config": config.model_dump(mode="json"), "folder": str(folder), "size": size, "shows": shows, "redo": redo}
    # One machine needs no network but its own; and threads that share cores must not fight for them.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // size))}
    with tempfile.TemporaryDirectory() as meeting:
        processes: list[subprocess.Popen[str]] = []
        with PassedOn(processes) as passed, contextlib.ExitStack() as logs:
            try:
                for rank in range(size):
                    errors = None if rank == 0 else logs.enter_context(open(log_of(folder, rank), "w"))
                    process = subprocess.Popen(
                        [sys.executable, "-m", "eyas.train.rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                        start_new_session=True,  # Ctrl-C comes once, from here
                    )  # fmt: skip
                    processes.append(process)
                    assert process.stdin is not None
                    process.stdin.write(json.dumps({**job, "rank": rank, "rendezvous": str(Path(meeting) / "rendezvous")}) + "\n")
                    process.stdin.flush()
                _watch(processes, folder, passed)
            finally:
                for process in processes:
                    with contextlib.suppress(OSError):
                        assert process.stdin is not None
                        process.stdin.close()
                    process.kill()
                    process.wait()
        if passed.asked and any(process.returncode == STOPPED for process in processes):
            raise KeyboardInterrupt


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _watch(processes: list[subprocess.Popen[str]], folder: Path, passed: PassedOn) -> None:
    """Waits for all. Raises UserError with what the one that failed said; others fail after it, for want of it."""
    while True:
        codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code not in (None, 0, STOPPED)}
        if failed and passed.asked:  # before it was far enough to stop by itself
            raise KeyboardInterrupt
        if failed:
            rank = min(failed, key=lambda rank: (failed[rank] != SAID, (failed[rank] or 0) >= 0, rank))
            raise _reason(rank, processes[rank], folder, len(processes))
        if None not in codes:
            return
        time.sleep(POLL_SECONDS)


def _reason(rank: int, process: subprocess.Popen[str], folder: Path, size: int) -> Exception:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):
        said = json.loads(process.stdout.read())
        if "error" in said:
            return UserError(said["error"])
        fault = RuntimeError(f"training process {rank} of {size}: {said['fault'].strip().splitlines()[-1]}")
        fault.add_note(said["fault"])
        return fault
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    where = f"; {log_of(folder, rank)} may say why" if rank else ""
    return UserError(f"Training process {rank} of {size} {how}{where}. What was saved stays: the same command goes on from there.")


class PassedOn:
    """SIGINT and SIGTERM go on to the processes; a second one ends them at once, as it would end one process."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes, self.asked = processes, False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> PassedOn:
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._pass)
        return self

    def _pass(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def __exit__(self, *unused: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Ends this process when the one that started it does, however it ends: it holds the other end of standard input."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

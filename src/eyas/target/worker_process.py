"""A process that answers JSON commands with JSON lines, watched: its death and its silence are both noticed, and named with its own stack.

Commands go to its stdin, replies come from a file descriptor of their own, all that it prints goes to a log. It leads a session, so that whatever
it starts can be found and ended with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.2
ABORT_SECONDS = 5.0  # for a hung process to write its stack
GONE_SECONDS = 10.0  # for what was killed to give back its GPU's memory
CHILD_SECONDS = 20.0  # of silence after a process of the session has ended
WORKED_SECONDS = 1.0  # of CPU time, that make a process of the session one that matters
BUSY = 0.1  # share of one core that counts as work; threads that only wait for news use about 0.01


class Lost(Exception):
    """The process died or hung: `str()` says how. What it was asked can be asked again of a new one."""


class Failed(Exception):
    """The process reported an error of its own, `str()`; asked again, it would fail again."""


class WorkerProcess:
    """Raises OSError if `command` cannot be started. The number of the replies' descriptor is appended to it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self.workers: dict[int, str] = {}  # what had worked when the last reply came, and its names
        self.read_end, write_end = os.pipe()
        self.buffer = b""
        try:
            with open(log, "ab") as out:
                self.process = subprocess.Popen(
                    [*command, str(write_end)], stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=[write_end], start_new_session=True,
                    env={**environment, "PYTHONFAULTHANDLER": "1"},  # a fatal signal then writes every thread's stack to the log
                )  # fmt: skip
        except OSError:
            os.close(self.read_end)
            raise
        finally:
            os.close(write_end)

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; the missing reply says so
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, hang_seconds: float, sign_of_life: Callable[[], Any]) -> Any:
        """The next reply. `sign_of_life` is asked about five times a second; silence is when what it returns and the log both stay as they are.

        Raises Lost if the process ends, or is silent for `hang_seconds` (its stack is then in the log, and it is gone), or for CHILD_SECONDS after one that
        it had started ended, for vLLM does not always notice; Failed for an error it reports.
        """
        workers = self.workers | self._working()
        sign, since = (sign_of_life(), self._log_size()), time.monotonic()
        while b"\n" not in self.buffer:
            if select.select([self.read_end], [], [], POLL_SECONDS)[0]:
                data = os.read(self.read_end, 1 << 20)
                if not data:
                    raise Lost(f"its process ended with code {self.process.wait()}")
                self.buffer += data
                continue
            now = (sign_of_life(), self._log_size())
            if now != sign:
                sign, since = now, time.monotonic()
            elif time.monotonic() - since > hang_seconds:
                raise Lost(self._abort(time.monotonic() - since))
            elif time.monotonic() - since > CHILD_SECONDS and (gone := sorted(workers.keys() - set(self._pids()))):
                self.stop(0.0)
                raise Lost(f"its process {gone[0]} ({workers[gone[0]]}) ended and it did not go on")
        self.workers = self._working()
        line, _, self.buffer = self.buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            self.stop(0.0)
            # vLLM's own word for its inner process having died.
            raise (Lost if reply["kind"] == "EngineDeadError" else Failed)(reply["error"].splitlines()[0])
        return reply["ok"]

    def busy(self) -> Callable[[], Any]:
        """A sign of life for work that shows none: changes while the processes together use a tenth of a core or more."""
        last = [time.monotonic(), self._cpu_seconds()]
        count = 0

        def sign() -> int:
            nonlocal count
            now, used = time.monotonic(), self._cpu_seconds()
            if used - last[1] > max(0.1, BUSY * (now - last[0])):
                last[:] = now, used
                count += 1
            return count

        return sign

    def stop(self, seconds: float) -> None:
        """Ends the process: it is let finish for `seconds` after its commands ended, then it and all that it started are killed."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)
        pids = self._pids()
        shared = {name for pid in pids for name in _shared_memory(pid)}
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        self.process.wait()
        end = time.monotonic() + GONE_SECONDS
        while self._pids() and time.monotonic() < end:
            time.sleep(0.05)
        for name in shared:  # who is killed leaves it behind
            with contextlib.suppress(OSError):
                os.unlink(name)
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1

    def _abort(self, silent: float) -> str:
        """Has every process write its stack and die; returns what is known of the hang in one line."""
        pids = self._pids()
        stopped = [pid for pid in pids if _stat(pid)[0] in ("T", "t")]
        before = self._log_size()
        for pid in [*stopped, *(pid for pid in pids if pid not in stopped)]:
            _signal(pid, signal.SIGABRT)
            _signal(pid, signal.SIGCONT)
            end = time.monotonic() + ABORT_SECONDS
            while _stat(pid)[0] not in ("Z", "X") and time.monotonic() < end:
                self.process.poll()
                time.sleep(0.05)
        self.stop(0.0)
        with open(self.log, "rb") as file:
            file.seek(before)
            # "Current thread" is the one that took the signal: the main one.
            stacks = file.read().decode(errors="replace").partition("Current thread")[2]
        frames = re.findall(r'^  File "([^"]+)", line (\d+) in (\S+)', stacks, re.M)
        where = f"; it stood in {frames[0][2]} ({frames[0][0]}:{frames[0][1]})" if frames else ""
        return f"no sign of life for {silent:.0f} s" + (f", process {', '.join(map(str, stopped))} was stopped" if stopped else "") + where

    def _pids(self) -> list[int]:
        """This process and all of its session that live."""
        leader = self.process.pid
        return [pid for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()) if _stat(pid)[1] == leader and _stat(pid)[0] not in ("Z", "X")]

    def _working(self) -> dict[int, str]:
        return {pid: _name(pid) for pid in self._pids() if _stat(pid)[2] > WORKED_SECONDS}

    def _cpu_seconds(self) -> float:
        return sum(_stat(pid)[2] for pid in self._pids())

    def _log_size(self) -> int:
        return self.log.stat().st_size


def _stat(pid: int) -> tuple[str, int, float]:
    """(state, session, CPU seconds) of a process; ("X", 0, 0.0) if there is none. The fields are those of proc(5)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0, 0.0
    return fields[0], int(fields[3]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "?"


def _shared_memory(pid: int) -> set[str]:
    """The files of shared memory that Python's multiprocessing made and the process has mapped."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            return set(re.findall(r"/dev/shm/(?:psm_|sem\.mp-)\S+", file.read()))
    except (OSError, ProcessLookupError):
        return set()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

"""Long work shows itself: a bar on a terminal, plain lines elsewhere and in the run's log, a state file that another terminal can read."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from eyas.artifact import read_json

STATE = "progress.json"
LINE_SECONDS = 10.0  # between plain lines
STATE_SECONDS = 1.0  # between writes of the state file


class Reporter:
    """Speaks for one run: to the terminal (stderr) and to `log.txt` in the run folder; one of several processes to neither.

    shows: on the terminal. writes: the log and the state file.
    """

    def __init__(self, run_folder: Path, shows: bool = True, writes: bool = True) -> None:
        self.shows, self.writes = shows, writes
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not shows)
        self.log = run_folder / "log.txt"
        self.showing = False  # whether a bar is on the terminal

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)
        self.note(line)

    def show(self, text: Text) -> None:
        """Something to read, with its colours on a terminal."""
        self.console.print(text)
        self.note(text.plain)

    def note(self, line: str) -> None:
        """Writes to the log file alone."""
        if not self.writes:
            return
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")

    def task(self, stage_folder: Path, name: str, total: float, unit: str) -> Task:
        return Task(self, stage_folder, name, total, unit)


class Task:
    """One measured piece of work; a context manager. `total` and advances are in `unit`s."""

    def __init__(self, reporter: Reporter, stage_folder: Path, name: str, total: float, unit: str) -> None:
        self.reporter, self.folder, self.name, self.total, self.unit = reporter, stage_folder, name, total, unit
        self.done = 0.0
        self.skipped = 0.0  # done by an earlier process: counts for the share, not for the rate
        self.detail = ""
        self.start = self.last_line = time.monotonic()
        self.last_state = 0.0
        self.bar: Progress | None = None

    def __enter__(self) -> Task:
        terminal = self.reporter.console.is_terminal and self.reporter.shows
        if terminal and self.total > 0 and not self.reporter.showing:  # one bar at a time: that of the work that this is a part of
            self.reporter.showing = True
            name = TextColumn("{task.description}", table_column=Column(min_width=len(self.name), no_wrap=True))
            line = TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True))
            self.bar = Progress(name, BarColumn(bar_width=12), line, console=self.reporter.console, transient=True)
            self.bar.start()
            self.bar.add_task(self.name, total=self.total, line="")
        return self

    def skip(self, amount: float) -> None:
        """Counts work found already done."""
        self.done += amount
        self.skipped += amount

    def advance(self, amount: float, detail: str = "") -> None:
        self.done += amount
        self.detail = detail or self.detail
        now = time.monotonic()
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=self.done, line=self.line())
        if now - self.last_line >= LINE_SECONDS:
            self.last_line = now
            line = f"{self.name}: {self.line()}"
            self.reporter.note(line) if self.bar else self.reporter.say(line)
        if now - self.last_state >= STATE_SECONDS:
            self.last_state = now
            self.write_state("running")

    def pause(self, why: str) -> None:
        """Says, to whoever looks, what is being waited for."""
        before, self.detail = self.detail, why
        if self.bar:
            self.bar.update(self.bar.task_ids[0], line=self.line())
        self.write_state("waiting")
        self.detail = before

    @property
    def rate(self) -> float:
        return (self.done - self.skipped) / max(time.monotonic() - self.start, 1e-9)

    def line(self) -> str:
        share = 100 * self.done / max(self.total, 1e-9)
        left = f", {clock((self.total - self.done) / self.rate)} left" if self.rate > 0 else ""
        detail = f", {self.detail}" if self.detail else ""
        return f"{share:.0f}% of {self.total:,.0f} {self.unit}, {self.rate:,.{0 if self.rate >= 10 else 2}f} {self.unit}/s{left}{detail}"

    def write_state(self, state: str) -> None:
        if not self.reporter.writes:
            return
        # Not synced: it is news, not a result, and a lost line of it loses nothing.
        left = (self.total - self.done) / self.rate if self.rate > 0 else None
        values = {
            "task": self.name, "state": state, "done": self.done, "total": self.total, "unit": self.unit, "per_second": round(self.rate, 3),
            "seconds_left": left and round(left, 1), "detail": self.detail, "updated": datetime.now().isoformat(timespec="seconds"),
        }  # fmt: skip
        temporary = self.folder / (STATE + ".tmp")
        temporary.write_text(json.dumps(values))
        temporary.replace(self.folder / STATE)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
            self.reporter.showing = False
        with contextlib.suppress(OSError):  # a full disk is reported by the work itself
            self.write_state("finished" if kind is None else "stopped")


def read_state(stage_folder: Path) -> dict[str, Any] | None:
    try:
        state = read_json(stage_folder / STATE)
    except (FileNotFoundError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = int(max(0, min(seconds, 3.6e8)))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

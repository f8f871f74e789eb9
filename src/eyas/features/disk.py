"""Room on the disk. A run that cannot fit is refused before the work; one whose disk fills up on the way waits, says what to free, and goes on."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from eyas.errors import UserError
from eyas.progress import Reporter, Task, clock

T = TypeVar("T")
FREE_FLOOR = 256 << 20  # bytes left free on the disk, for everybody else on it
WAIT_SECONDS = 900.0  # for room; a GPU that waits costs money too
POLL_SECONDS = 1.0


def require_room(folder: Path, num_bytes: int) -> None:
    """Raises UserError if all that is to come cannot fit."""
    free = shutil.disk_usage(folder).free
    if num_bytes + FREE_FLOOR > free:
        raise UserError(f"The features need {num_bytes / 1e9:.2f} GB in {folder}, and {_state(folder)}. {_advice(folder)}, or give fewer conversations.")


def with_room(folder: Path, num_bytes: int, make: Callable[[], T], task: Task, reporter: Reporter) -> T:
    """What `make` makes, which takes `num_bytes` of the disk at once; waits while they are not there. Raises UserError after WAIT_SECONDS."""
    began, said = time.monotonic(), False
    while True:
        if shutil.disk_usage(folder).free >= num_bytes + FREE_FLOOR:
            try:
                return make()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        missing = f"The next shard needs {num_bytes / 1e9:.2f} GB in {folder}, and {_state(folder)}"
        if time.monotonic() - began > WAIT_SECONDS:
            raise UserError(f"{missing}. {_advice(folder)}, then run the same command again: all finished work is kept.")
        if not said:
            said = True
            reporter.say(f"{task.name}: waiting up to {clock(WAIT_SECONDS)} for room. {missing}. {_advice(folder)}.")
        task.pause("waiting for room on the disk")
        time.sleep(POLL_SECONDS)


def _state(folder: Path) -> str:
    return f"the disk has {shutil.disk_usage(folder).free / 1e9:.2f} GB free, of which {FREE_FLOOR / 1e9:.2f} GB are left alone"


def _advice(folder: Path) -> str:
    """What could be freed, as far as it is known here: the features of other runs beside this one."""
    others = []
    for other in folder.parent.parent.glob("*/features"):
        if other != folder and (size := sum(file.stat().st_size for file in other.glob("shard-*"))):
            others.append((size, other))
    shown = ", ".join(f"{path} ({size / 1e9:.2f} GB)" for size, path in sorted(others, reverse=True)[:3])
    return f"Free some space{f' (features of other runs: {shown})' if shown else ''}, or set run.folder to another disk"

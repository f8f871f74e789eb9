"""What a log of vLLM says of its end."""

from __future__ import annotations

import re

FAULT = re.compile(r"((?:[\w.]*(?:Error|Exception)|\berror): .+)$")
# vLLM's word for memory that another process of its GPU gave back while it measured its own.
PASSING = "Error in memory profiling"
WRAPPERS = ("Engine core initialization failed", "See root cause above", "EngineDeadError", "EngineCore encountered an issue")


def cause_of_death(log: str) -> str:
    """The line of vLLM's log that names the fault, without what stands before it: the last error that does not merely point at another."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in log.splitlines()]
    faults = [found[1] for line in lines if (found := FAULT.search(line)) and not points_elsewhere(line)]
    last = (faults or [line for line in lines if line] or ["it printed nothing"])[-1]
    return (last if len(last) <= 300 else last[:297] + "...").rstrip(".)")


def points_elsewhere(line: str) -> bool:
    """Whether an error only says that there was another, in another process."""
    return any(wrapper in line for wrapper in WRAPPERS)


def passes(cause: str) -> bool:
    """Whether the same start may well succeed a moment later."""
    return PASSING in cause

"""What a stage is: a name, a folder, its parents, the settings its result depends on, and the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config import RunConfig
from eyas.progress import Reporter
from eyas.target.spec import TargetSpec


@dataclass(frozen=True)
class Context:
    """What the work of a stage is given."""

    config: RunConfig
    spec: TargetSpec
    run_folder: Path
    folder: Path  # the stage's own
    reporter: Reporter


@dataclass(frozen=True)
class Result:
    """counts go into the manifest; content is a hash of what came out."""

    counts: dict[str, Any]
    content: str


@dataclass(frozen=True)
class Stage:
    name: str  # the command
    folder: str  # inside the run folder
    parents: tuple[str, ...]
    settings: Callable[[RunConfig, TargetSpec], dict[str, Any]]
    work: Callable[[Context], Result]
    reusable: tuple[str, ...] = ()  # files that stay when settings change; their entries say what they are valid for

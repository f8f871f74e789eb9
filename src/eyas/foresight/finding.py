"""One thing that was looked at, and what it means for the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """text: the thing and the reason. step: what to do next; empty if all is well. A run with a "fail" cannot end well."""

    name: str
    level: Level
    text: str
    step: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.text.rstrip('.')}. {self.step}".strip()

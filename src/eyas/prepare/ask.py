"""Prompts -> what the target writes, each asked once.

Answers are kept in `answers.jsonl` under a hash of all that they depend on, one batch an append: whoever is interrupted goes on with the
next batch, and a batch is written whole or again, so that resuming changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from eyas.artifact import append_lines, hash_json, whole_lines
from eyas.progress import Task
from eyas.target.engine import Answer, Sampling

FILE = "answers.jsonl"


class Writer(Protocol):
    """The part of a target's engine that writes."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]: ...


class Asker:
    """Asks `engine`, `batch` prompts at once, and remembers in `folder`. setting: what else an answer depends on (the target, its precision)."""

    def __init__(self, engine: Writer, batch: int, setting: dict[str, str], folder: Path) -> None:
        self.engine, self.batch, self.setting, self.path = engine, batch, setting, folder / FILE
        entries = [json.loads(line) for line in whole_lines(self.path)]
        self.known = {entry["key"]: Answer(entry["tokens"], entry["finish"]) for entry in entries}
        self.asked: Counter[str] = Counter()  # the same prompt asked again is another question, with an answer of its own

    def ask(self, prompts: list[list[int]], sampling: Sampling, task: Task) -> list[Answer]:
        """The answers to prompts of token ids, in order; `task` advances by each."""
        groups = [prompts[start : start + self.batch] for start in range(0, len(prompts), self.batch)]
        return [answer for group in groups for answer in self._ask_batch(group, sampling, task)]

    def _ask_batch(self, prompts: list[list[int]], sampling: Sampling, task: Task) -> list[Answer]:
        keys = []
        for prompt in prompts:
            question = hash_json([prompt, sampling.__dict__, self.setting])
            keys.append(f"{question}-{self.asked[question]}")
            self.asked[question] += 1
        if all(key in self.known for key in keys):
            task.skip(len(prompts))
        else:
            seed = int(hash_json([sampling.seed, keys])[:12], 16)
            answers = self.engine.generate(prompts, replace(sampling, seed=seed))
            append_lines(self.path, [{"key": key, **answer.__dict__} for key, answer in zip(keys, answers, strict=True)])
            self.known.update(zip(keys, answers, strict=True))
            task.advance(len(prompts), f"{sum(len(answer.tokens) for answer in answers):,} tokens in the last batch")
        return [self.known[key] for key in keys]

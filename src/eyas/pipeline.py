"""The whole job, in order, and the rules by which a stage is skipped, gone on with, done again or refused.

prompts --prepare--> tokens --extract--> features --vocab--> mapping --train--> checkpoints --export--> draft --evaluate--> report
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

import eyas.evaluate.run
import eyas.export.run
import eyas.features.run
import eyas.prepare.run
import eyas.train.run
import eyas.vocab.run
from eyas.artifact import Manifest, begin, difference, read_manifest, write_manifest
from eyas.config import RunConfig
from eyas.draft.shape import draft_shape
from eyas.errors import UserError
from eyas.features.audit import audit
from eyas.features.capture import captured_from
from eyas.features.index import REPAIR
from eyas.features.stream import streams
from eyas.prepare.chat import load_chat
from eyas.prepare.rows import read_rows
from eyas.prepare.show import described
from eyas.progress import Reporter, clock
from eyas.stage import Context, Stage
from eyas.target.spec import TargetSpec, read_spec

STAGES = (
    Stage("prepare", "prepare", (), eyas.prepare.run.settings, eyas.prepare.run.work, eyas.prepare.run.REUSABLE),
    Stage("extract", "features", ("prepare",), eyas.features.run.settings, eyas.features.run.work, eyas.features.run.REUSABLE),
    Stage("vocab", "vocab", ("prepare",), eyas.vocab.run.settings, eyas.vocab.run.work),
    Stage("train", "train", ("extract", "vocab"), eyas.train.run.settings, eyas.train.run.work),
    Stage("export", "export", ("train",), eyas.export.run.settings, eyas.export.run.work),
    Stage("evaluate", "evaluate", ("export",), eyas.evaluate.run.settings, eyas.evaluate.run.work),
)
BY_NAME = {stage.name: stage for stage in STAGES}


class Run:
    """One run file applied to its run folder."""

    def __init__(self, config: RunConfig, need_weights: bool = True) -> None:
        self.config = config
        self.spec = read_spec(Path(config.target.path), need_weights)
        check_against_target(config, self.spec)
        self.folder = Path(config.run.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"run.folder {self.folder} is a file, or lies in one. Choose another run.folder.") from None
        self.reporter = Reporter(self.folder)
        self.settings = {stage.name: stage.settings(config, self.spec) for stage in STAGES}

    def up_to(self, last: str) -> None:
        """Does every stage up to `last` that is not done for these settings; says so if there is nothing to do."""
        with self.locked():
            idle = True
            for stage in STAGES[: STAGES.index(BY_NAME[last]) + 1]:
                stale = self.stale(stage)
                if stale:
                    idle = False
                    self.do(stage, stale)
            if idle:
                self.reporter.say(f"{self.folder}: everything up to {last} is done for these settings; nothing to do.")

    def begins_anew(self) -> bool:
        """Whether features are still to be captured or a draft to be trained: the dear part of a run."""
        return any(read_manifest(self.folder / BY_NAME[name].folder) is None for name in ("extract", "train"))

    def only(self, name: str) -> None:
        """Does one stage. Raises UserError if a stage before it is not done for these settings."""
        with self.locked():
            stage = BY_NAME[name]
            for parent in self._ancestors(stage):
                if stale := self.stale(parent):
                    raise UserError(
                        f"{self.folder / parent.folder} {stale}. Run `eyas {parent.name}` again, or set that back; `eyas run` does all that is needed."
                    )
            if stale := self.stale(stage):
                self.do(stage, stale)
            else:
                self.reporter.say(f"{self.folder / stage.folder} is done for these settings; nothing to do.")

    def inspect(self, row: str) -> Text:
        """All that is known of a prepared row. Raises UserError if there is no such row."""
        if read_manifest(self.folder / "prepare") is None:
            raise UserError(f"{self.folder / 'prepare'} is not finished. Run `eyas prepare` first.")
        chat = load_chat(self.spec, self.config.target.trust_remote_code, self.config.data.chat_template_kwargs)
        layers = captured_from(self.config, self.spec)["features"]["layers"]
        return described(self.folder, row, chat, [*layers, self.spec.num_layers])

    def verify(self, repair: bool) -> None:
        """Reads the feature store through; with `repair`, captures anew what is damaged or missing. Raises UserError if anything stays wrong."""
        with self.locked():
            stage = BY_NAME["extract"]
            folder = self.folder / stage.folder
            size = sum(file.stat().st_size for file in folder.glob("shard-*"))
            if not size and not (folder / "manifest.json").exists():
                raise UserError(f"{folder} holds no features yet, so there is nothing to verify. `eyas extract` captures them.")
            if read_manifest(self.folder / "prepare") is None:
                raise UserError(f"{self.folder / 'prepare'} is not finished, so nothing says which rows there should be. Run `eyas prepare` first.")
            rows = read_rows(self.folder / "prepare")
            wanted = [row.key for row in rows if row.holdout or not streams(self.config, self.spec, rows)]
            with self.reporter.task(folder, "verify", size / 1e6, "MB") as task:
                found = audit(folder, wanted, lambda read: task.advance(read / 1e6))
            for fault in found.faults:
                self.reporter.say(f"verify: {fault}")
            if not found.faults and not found.missing:
                self.reporter.say(f"verify: {found.shards:,} shards, {found.bytes / 1e6:,.0f} MB: all whole; {found.rows:,} rows, each as it was prepared")
                return
            unsound = len({key for keys in found.bad.values() for key in keys} | set(found.missing))
            summary = f"{len(found.bad):,} of {found.shards:,} shards are bad, and {unsound:,} rows have no sound features"
            if not repair:
                raise UserError(f"{folder}: {summary}. {REPAIR}")
            if (stale := self.stale(stage)) and (folder / "manifest.json").exists():
                raise UserError(f"{folder} {stale}, so a repair would capture all of it anew. Set that back, or run `eyas extract` if that is what you want.")
            self.reporter.say(f"verify: {summary}; capturing them anew")
            for file in found.bad:
                (folder / file).unlink(missing_ok=True)
            (folder / "manifest.json").unlink(missing_ok=True)
            self.do(stage, "is being repaired")

    def stale(self, stage: Stage) -> str | None:
        """None if the stage is done for these settings; else why not, as the end of a sentence about its folder."""
        manifest = read_manifest(self.folder / stage.folder)
        if manifest is None:
            return "is not finished"
        if found := difference(manifest.settings, _as_json(self.settings[stage.name])):
            name, made, wanted = found
            return f"was made with {name} = {_short(made)}; the run file now gives {_short(wanted)}"
        for parent, content in self._parents(stage).items():
            if manifest.parents.get(parent) != content:
                return f"was made from another {BY_NAME[parent].folder}/ (content {_short(manifest.parents.get(parent))}) than the one there now "
                f"({_short(content)})"
        return None

    def do(self, stage: Stage, why: str) -> None:
        folder = self.folder / stage.folder
        settings, parents = self.settings[stage.name], self._parents(stage)
        if (folder / "manifest.json").exists():
            self.reporter.say(f"{stage.name}: {folder} {why}: doing it again")
        began = time.monotonic()
        if begin(folder, settings, parents, stage.reusable) and any(folder.iterdir()):
            self.reporter.note(f"{stage.name}: going on")
        result = stage.work(Context(self.config, self.spec, self.folder, folder, self.reporter))
        seconds = round(time.monotonic() - began, 1)
        write_manifest(folder, Manifest(stage.name, settings, parents, result.counts, result.content, seconds))
        self.reporter.say(f"{stage.name}: done in {clock(seconds)}")

    def _parents(self, stage: Stage) -> dict[str, str]:
        found = {}
        for name in stage.parents:
            manifest = read_manifest(self.folder / BY_NAME[name].folder)
            found[name] = manifest.content if manifest else ""
        return found

    def _ancestors(self, stage: Stage) -> list[Stage]:
        names = set(stage.parents)
        for other in reversed(STAGES):
            if other.name in names:
                names.update(other.parents)
        return [other for other in STAGES if other.name in names]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Two processes must not work in one run folder. The lock goes with the process, however it ends."""
        handle = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.folder} is in use by another eyas process. Wait for it, or choose another run.folder.") from None
            yield
        finally:
            os.close(handle)


def check_against_target(config: RunConfig, spec: TargetSpec) -> None:
    """What the run file asks of this target must be possible. Raises UserError."""
    layers = config.features.layers or spec.default_layers
    if len(layers) != 3 or sorted(set(layers)) != layers or not layers[0] >= 0 or layers[-1] > spec.num_layers:
        raise UserError(
            f"features.layers = {layers} cannot be used: EAGLE-3 engines take exactly three different layers in ascending order, each from 0 (the embeddings) "
            f"to {spec.num_layers} (after the last layer). The default here is {spec.default_layers}."
        )
    if config.vocab.size is not None and config.vocab.size > spec.vocab_size:
        raise UserError(f"vocab.size = {config.vocab.size:,} is larger than the target's vocabulary of {spec.vocab_size:,}. Set it to that or less.")
    if config.data.max_length > spec.max_length:
        raise UserError(
            f"data.max_length = {config.data.max_length:,} is more than the target takes, {spec.max_length:,} (max_position_embeddings). Set it to that "
            f"or less."
        )
    draft_shape(config.draft, spec, eyas.vocab.run.draft_vocab_size(config, spec), layers)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

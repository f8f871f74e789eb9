"""Features with a quota (features.keep): captured round by round as training comes to them, and deleted when it has passed.

A round is a run of optimiser steps whose rows fit into the quota beside the held-out rows, which stay. The order of training does not depend on any of this,
so the losses are those of a run that keeps everything. The round that is there lies in features/round/, a store like any other: a run that dies goes on with
what of it is whole. Where target and draft have GPUs of their own they work at the same time: a round then takes half the room, and the next is captured
beside it. Of several processes that train together the first captures, and the others wait for it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from eyas.artifact import read_json, write_json
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.features.capture import LOST, Capturer, captured_from, reasons, shard_size, token_bytes
from eyas.features.index import open_index
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow
from eyas.prepare.rows import PreparedRow
from eyas.progress import Reporter
from eyas.target.engine import resolve_device
from eyas.target.spec import TargetSpec
from eyas.train.distributed import ALONE, World

UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
NONE_SHARDS = 2  # what a round holds with keep = "none"
ROUNDS = ("round", "round-next")  # folders; the second only where the next round is captured beside training

Schedule = Sequence[list[list[str]]]  # optimiser steps: batches of keys
Whole = Sequence[list[str]]  # optimiser steps: all their keys, of all processes


def quota(config: RunConfig) -> float:
    """Bytes that features may take on the disk; infinite with keep = "all"."""
    keep = config.features.keep
    if keep == "all":
        return float("inf")
    if keep == "none":
        return 0.0
    number, unit = re.fullmatch(r"([0-9.]+) ?([MGT]B)", keep).groups()  # type: ignore[union-attr]  # config.py has seen to that
    return float(number) * UNITS[unit]


def streams(config: RunConfig, spec: TargetSpec, rows: Sequence[PreparedRow]) -> bool:
    """Whether all features together are more than may be kept."""
    return sum(len(row.tokens) for row in rows) * token_bytes(config, spec) > quota(config)


def beside_training(config: RunConfig) -> bool:
    """Whether target and draft have GPUs of their own: vLLM takes the first ones, training the next."""
    return config.target.engine == "vllm" and config.target.device == "auto" and torch.cuda.device_count() > config.target.tensor_parallel


def gpus_to_train_on(config: RunConfig, streamed: bool, num_gpus: int) -> int:
    """All, or those that vLLM leaves where it captures beside training."""
    beside = streamed and config.target.engine == "vllm" and num_gpus > config.target.tensor_parallel
    return num_gpus - config.target.tensor_parallel if beside else num_gpus


def _keys(part: Whole) -> set[str]:
    return {key for step in part for key in step}


class StreamedFeatures:
    """What training reads. lengths: key -> tokens, of all rows. `row` gives those of the round and the held-out ones."""

    def __init__(self, config: RunConfig, spec: TargetSpec, rows: Sequence[PreparedRow], folder: Path, reporter: Reporter, world: World = ALONE) -> None:
        self.config, self.spec, self.folder, self.reporter, self.world = config, spec, folder, reporter, world
        self.rows = {row.key: row for row in rows}
        self.lengths = {row.key: len(row.tokens) for row in rows}
        self.kept, self.here = FeatureReader(folder), FeatureReader(folder)
        kept = sum(self.lengths[key] for key in self.kept.places if key in self.lengths) * token_bytes(config, spec)
        self.round_bytes = NONE_SHARDS * shard_size(config) if config.features.keep == "none" else quota(config) - kept
        self.capturer = Capturer(config, spec, reporter, folder / "engine.log")
        self.stays = resolve_device(config.target.device).type == "cpu"  # the target, while the draft trains: on one GPU they take turns

    def row(self, key: str) -> FeatureRow:
        return (self.here if key in self.here.places else self.kept).row(key)

    def discard_rounds(self) -> None:
        """What is left of them where training ended before the last."""
        for name in ROUNDS if self.world.rank == 0 else ():
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def parts(self, schedule: Schedule, whole: Whole) -> Iterator[Schedule]:
        """The schedule, this process's share of the whole, in rounds, each given back when its features are there; they go when the next is asked for. Beside
        training, the next round is captured meanwhile."""
        rounds, beside = self._rounds(whole)
        leads, world = self.world.rank == 0, self.world
        stores = [self.folder / name for name in (ROUNDS if beside else ROUNDS[:1])]
        begun = False  # in the second store: what a run that died had of this round
        if leads and beside and stores[1].is_dir():
            found = open_index(stores[1], captured_from(self.config, self.spec), self.reporter.say)
            begun = any(set(entry.keys) <= _keys(rounds[0]) for entry in found)
        if world.total([begun])[0]:
            stores.reverse()
        if leads and not beside:
            shutil.rmtree(self.folder / ROUNDS[1], ignore_errors=True)
        done = 0
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as pool:
            try:
                coming: Future[None] | None = None
                for number, part in enumerate(rounds):
                    store = stores[number % len(stores)]
                    if torch.cuda.is_available() and not beside:
                        torch.cuda.empty_cache()  # vLLM wants the room that training has left
                    world.wait()
                    if leads:
                        coming.result() if coming else self._fill(store, part, number, len(rounds))
                        coming = None
                        if beside and number + 1 < len(rounds):
                            coming = pool.submit(self._fill, stores[(number + 1) % len(stores)], rounds[number + 1], number + 1, len(rounds))
                    world.wait()
                    self.here = FeatureReader(store)
                    yield self._without(schedule[done : done + len(part)], part, read_json(store / LOST))
                    done += len(part)
                    self.here = self.kept
                    world.wait()
                    if leads:
                        shutil.rmtree(store)
            finally:
                self.capturer.close()  # also ends a capture that is under way

    def _fill(self, store: Path, part: Whole, number: int, total: int) -> None:
        """Captures what `store` lacks of a round, and writes down the rows without features, with the reason."""
        wanted, known, lost = _keys(part), set(), {}
        store.mkdir(exist_ok=True)
        for entry in open_index(store, captured_from(self.config, self.spec), self.reporter.say):
            if set(entry.keys) <= wanted:
                known |= set(entry.keys)
            else:  # of a round before, or one planned otherwise
                (store / entry.file).unlink()
        missing = [self.rows[key] for key in sorted(wanted - known)]
        if missing:
            self.reporter.say(f"train: round {number + 1} of {total}: capturing {len(missing):,} rows for {len(part):,} steps")
            with self.reporter.task(self.folder, "extract", sum(len(row.tokens) for row in missing), "tokens") as task:
                lost = self.capturer.capture(missing, store, task, len(self.rows)).lost
            if not (self.stays or beside_training(self.config)):
                self.capturer.release()
        write_json(store / LOST, lost)

    def _rounds(self, whole: Whole) -> tuple[list[Whole], bool]:
        """(the rounds, whether the next is captured while one is trained on: then each takes half the room). Raises UserError if a step does not fit."""
        largest = max((self._bytes(_keys([step])) for step in whole), default=0)
        if largest > self.round_bytes and self.config.features.keep != "none":
            raise UserError(
                f"The rows of one optimiser step take {largest / 1e6:,.0f} MB, and features.keep = {self.config.features.keep} leaves "
                f"{max(0.0, self.round_bytes) / 1e6:,.0f} MB beside the held-out rows. Raise it, or lower train.tokens_per_step."
            )
        beside = beside_training(self.config) and 2 * largest <= self.round_bytes
        room = self.round_bytes / 2 if beside else self.round_bytes
        rounds: list[list[list[str]]] = []
        keys: set[str] = set()
        size = 0
        for step in whole:
            rows = _keys([step])
            more = self._bytes(rows - keys)
            if not rounds or size + more > room:
                rounds.append([])
                keys, size, more = set(), 0, self._bytes(rows)
            rounds[-1].append(step)
            keys |= rows
            size += more
        return list(rounds), beside and len(rounds) > 1

    def _bytes(self, keys: set[str]) -> int:
        return sum(self.lengths[key] for key in keys) * token_bytes(self.config, self.spec)

    def _without(self, part: Schedule, whole: Whole, lost: dict[str, str]) -> Schedule:
        """The steps without rows that have no features. Raises UserError if a step has no other."""
        if not lost:
            return part
        self.reporter.say(f"train: warning: {len(lost):,} rows have no features and are left out: {reasons(lost)}")
        kept = [[[key for key in batch if key not in lost] for batch in step] for step in part]
        steps = [[batch for batch in step if batch] for step in kept]
        if any(lost.keys() >= set(step) for step in whole):
            raise UserError(f"All rows of an optimiser step have no features: {reasons(lost)}. {self.capturer.log} may say why. Remove them from the data.")
        return steps

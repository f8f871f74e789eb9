"""Rows of tokens -> shards in a store, by the target; what `extract` does for all rows at once, and training with a quota round by round.

Rows are captured in order of length, so that a batch needs little padding.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eyas.artifact import hash_json
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.features.codec import DTYPES, FLOAT8
from eyas.features.disk import with_room
from eyas.features.index import enter, next_number
from eyas.features.shard import OpenShard, finish, open_shard
from eyas.features.verify import TOLERANCE, capture_error, prove_capture
from eyas.prepare.rows import PreparedRow
from eyas.progress import Reporter, Task
from eyas.target.embeddings import TargetHead, read_head
from eyas.target.engine import Filled, TargetEngine, open_engine, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec

SHARD_MIB = {"transformers": 128, "vllm": 1024}  # vLLM is fast: larger files and fewer proofs keep up with it
FINISHERS = 4  # threads that prove, sync and hash shards
LOST = "lost.json"  # beside a store's shards: key -> reason, of rows without features
LOST_SHARE = 0.01  # of the rows, above which extraction stops


def captured_from(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    """All that features depend on but the rows themselves."""
    return {
        "features": {"layers": config.features.layers or spec.default_layers, "dtype": config.features.dtype},
        "target": {"weights": spec.fingerprint["weights"], "dtype": str(resolve_dtype(config.target.dtype, resolve_device(config.target.device)))},
    }


def token_bytes(config: RunConfig, spec: TargetSpec) -> int:
    """What the features of a token take."""
    dtype = DTYPES[config.features.dtype]
    return 4 * (spec.hidden_size * dtype.itemsize + (4 if dtype == FLOAT8 else 0))


@dataclass
class Captured:
    """lost: key -> reason, of rows without features. errors: the proof of each shard, in nats. rounding: of each aux layer and of the last, relative."""

    lost: dict[str, str] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    rounding: list[float] = field(default_factory=list)


class Closed(Exception):
    """Nobody waits for these features any more."""


class Capturer:
    """Holds the target from the first row that is asked for until `close`. log: where the engine's own words go."""

    def __init__(self, config: RunConfig, spec: TargetSpec, reporter: Reporter, log: Path) -> None:
        self.config, self.spec, self.reporter, self.log = config, spec, reporter, log
        self.engine: TargetEngine | None = None
        self.closed = False
        self.head: TargetHead | None = None

    def capture(self, rows: list[PreparedRow], store: Path, task: Task, num_all: int) -> Captured:
        """Captures rows that `store` lacks; its index is open. num_all: rows of the whole run, of which a few may be lost.

        Raises UserError if a proof of capture fails, states are not finite, or too many rows are lost; what was entered before stays.
        """
        config, spec, found = self.config, self.spec, Captured()
        found.lost = {row.key: reason for row in rows if (reason := _refused(row, spec))}
        missing = sorted((row for row in rows if row.key not in found.lost), key=lambda row: len(row.tokens))
        if not missing:
            return found
        if self.engine is None or self.head is None:
            self.engine, self.head = open_engine(config, spec, self.log, self.reporter.say), read_head(spec)
        if self.closed:
            self.release()
            raise Closed
        dtype, capture = DTYPES[config.features.dtype], captured_from(config, spec)
        tolerance = max(TOLERANCE[one] for one in (resolve_dtype(config.target.dtype, resolve_device(config.target.device)), dtype))
        layers = [*capture["features"]["layers"], spec.num_layers]

        def advance(tokens: int) -> None:
            if self.closed:
                raise Closed
            task.advance(tokens)

        def room(num_bytes: int, make: Callable[[], OpenShard]) -> OpenShard:
            advance(0)
            return with_room(store, num_bytes, make, task, self.reporter)

        while missing:
            again: set[str] = set()  # rows of a shard that others of its rows did not come for
            shards = self._open_shards(store, missing, hash_json(capture), room)
            for filled, checksum, error in finished(self.engine, shards, layers, advance, self.head):
                if filled.lost:
                    found.lost |= {filled.shard.keys[row]: reason for row, reason in filled.lost.items()}
                    self._check_lost(found.lost, num_all)
                    again |= set(filled.shard.keys) - found.lost.keys()
                    filled.shard.part.unlink()
                    continue
                _check_finite(filled)
                prove_capture(error, spec.num_layers, tolerance)
                found.errors.append(error)
                found.rounding = filled.rounding
                enter(store, filled.shard, checksum)
            missing = [row for row in missing if row.key in again]
        return found

    def release(self) -> None:
        """Gives back what the target holds; the next capture loads it anew."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def close(self) -> None:
        """The end: a capture that is under way in another thread stops at its next step."""
        self.closed = True
        self.release()

    def _open_shards(
        self, store: Path, rows: list[PreparedRow], capture: str, room: Callable[[int, Callable[[], OpenShard]], OpenShard]
    ) -> Iterator[OpenShard]:
        """Rows in order, as many a shard as reach its size; a shard takes its place on the disk when it is asked for. room: makes it once there is some."""
        shard_bytes, row_bytes = shard_size(self.config), token_bytes(self.config, self.spec)
        number = next_number(store)
        part: list[PreparedRow] = []
        for row in rows:
            part.append(row)
            num_bytes = sum(len(row.tokens) for row in part) * row_bytes
            if num_bytes >= shard_bytes or row is rows[-1]:
                yield room(num_bytes, partial(open_shard, store, number, part, 3, self.spec.hidden_size, DTYPES[self.config.features.dtype], capture))
                number, part = number + 1, []

    def _check_lost(self, lost: dict[str, str], num_all: int) -> None:
        """A few rows may be left out of a long run; more is a fault that would only be found after it."""
        if len(lost) > max(10, LOST_SHARE * num_all):
            raise UserError(
                f"{len(lost):,} of {num_all:,} rows have no features: {reasons(lost)}. {self.log} may say why; "
                f"what was captured is kept. Mend the data or the engine's settings, then run `eyas extract` again."
            )


def shard_size(config: RunConfig) -> int:
    return (config.features.shard_mib or SHARD_MIB[config.target.engine]) << 20


def finished(
    engine: TargetEngine, shards: Iterable[OpenShard], layers: list[int], advance: Callable[[int], None], head: TargetHead
) -> Iterator[tuple[Filled, str, float]]:
    """Each filled shard with its checksum, synced, and the error of its proof in nats; of one with lost rows neither means anything.

    Threads do that while the engine goes on: to hash a shard takes about as long as to fill it.
    """
    checksums: dict[Path, Future[str]] = {}
    with ThreadPoolExecutor(FINISHERS) as pool:

        def written(shard: OpenShard) -> None:
            checksums[shard.path] = pool.submit(finish, shard)

        def prove(filled: Filled) -> float:
            return capture_error(filled.shard.tokens[filled.sample], filled.shard.last(filled.sample), head, filled.log_probabilities)

        waiting: deque[tuple[Filled, Future[float]]] = deque()

        def oldest() -> tuple[Filled, str, float]:
            filled, error = waiting.popleft()
            checksum = "" if filled.lost else checksums.pop(filled.shard.path).result()
            return filled, checksum, error.result()

        for filled in engine.fill(shards, layers, advance, written):
            waiting.append((filled, pool.submit(prove, filled)))
            while waiting and waiting[0][1].done():
                yield oldest()
        while waiting:
            yield oldest()


def _check_finite(filled: Filled) -> None:
    if filled.not_finite:
        raise UserError(
            f"The target gave features that are not finite for row {filled.shard.keys[filled.not_finite[0]]}. No shard was written. "
            'Set target.dtype = "float32", or check its weights.'
        )


def _refused(row: PreparedRow, spec: TargetSpec) -> str | None:
    """Why a row cannot be given to the target, None if it can."""
    if int(row.tokens.max()) >= spec.vocab_size or int(row.tokens.min()) < 0:
        return f"a token id outside the target's vocabulary of {spec.vocab_size:,}"
    return None


def reasons(lost: dict[str, str]) -> str:
    return "; ".join(f"{count:,} {reason}" for reason, count in Counter(lost.values()).most_common(5))

"""The stage `extract`: rows of tokens -> shards of features in features/.

Rows are captured in order of length, so that a batch needs little padding; the trainer has an order of its own. A row is known by a hash of its
tokens and supervised spans: rows already captured from the same target at the same layers are kept, whatever else changed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.artifact import hash_json, read_json, write_json
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.features.codec import DTYPES, FLOAT8
from eyas.features.disk import require_room, with_room
from eyas.features.index import INDEX, enter, next_number, open_index
from eyas.features.shard import OpenShard, finish, open_shard
from eyas.features.verify import TOLERANCE, capture_error, prove_capture
from eyas.prepare.run import PreparedRow, read_rows
from eyas.stage import Context, Result
from eyas.target.embeddings import TargetHead, read_head
from eyas.target.engine import Filled, TargetEngine, open_engine, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec

REUSABLE = (INDEX, "shard-*.safetensors")
LOST = "lost.json"  # key -> reason, of rows without features
SHARD_MIB = {"transformers": 128, "vllm": 1024}  # vLLM is fast: larger files and fewer proofs keep up with it
FINISHERS = 4  # threads that prove, sync and hash shards
LOST_SHARE = 0.01  # of the rows, above which extraction stops


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    return {
        "features": {"layers": config.features.layers or spec.default_layers, "dtype": config.features.dtype},
        "target": {"weights": spec.fingerprint["weights"], "dtype": str(resolve_dtype(config.target.dtype, resolve_device(config.target.device)))},
    }


def work(context: Context) -> Result:
    config, spec, folder = context.config, context.spec, context.folder
    capture = settings(config, spec)
    store_dtype = DTYPES[config.features.dtype]
    rows = read_rows(context.run_folder / "prepare")
    entries = open_index(folder, capture, context.reporter.say)
    known = {key for entry in entries for key in entry.keys}
    missing = sorted((row for row in rows if row.key not in known), key=lambda row: len(row.tokens))
    require_room(folder, sum(len(row.tokens) for row in missing) * _token_bytes(spec, store_dtype))
    lost = {row.key: reason for row in missing if (reason := _refused(row, spec))}
    missing = [row for row in missing if row.key not in lost]
    num_missing = len(missing)
    errors: list[float] = []
    rounding: list[float] = []
    with context.reporter.task(folder, "extract", sum(len(row.tokens) for row in rows if row.key not in lost), "tokens") as task:
        task.skip(sum(len(row.tokens) for row in rows if row.key in known))
        if missing:
            engine, head = open_engine(config, spec, folder / "engine.log", context.reporter.say), read_head(spec)
            dtypes = (resolve_dtype(config.target.dtype, resolve_device(config.target.device)), store_dtype)
            tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
            shard_bytes = (config.features.shard_mib or SHARD_MIB[config.target.engine]) << 20
            layers = [*capture["features"]["layers"], spec.num_layers]

            def room(num_bytes: int, make: Callable[[], OpenShard]) -> OpenShard:
                return with_room(folder, num_bytes, make, task, context.reporter)

            try:
                while missing:
                    again: set[str] = set()  # rows of a shard that others of its rows did not come for
                    shards = _open_shards(folder, missing, spec, store_dtype, shard_bytes, hash_json(capture), room)
                    for filled, checksum, error in finished(engine, shards, layers, task.advance, head):
                        if filled.lost:
                            lost |= {filled.shard.keys[row]: reason for row, reason in filled.lost.items()}
                            _check_lost(lost, rows, folder)
                            again |= set(filled.shard.keys) - lost.keys()
                            filled.shard.part.unlink()
                            continue
                        _check_finite(filled)
                        prove_capture(error, spec.num_layers, tolerance)
                        errors.append(error)
                        rounding = filled.rounding
                        entries.append(enter(folder, filled.shard, checksum))
                    missing = [row for row in missing if row.key in again]
            finally:
                engine.close()
    wanted = {row.key for row in rows}
    write_json(folder / LOST, lost)
    num_bytes = sum(entry.bytes for entry in entries)
    counts: dict[str, Any] = {
        "rows": len(rows) - len(lost),
        "rows_lost": dict(Counter(lost.values())),
        "rows_captured_now": num_missing,
        "tokens": sum(len(row.tokens) for row in rows if row.key not in lost),
        "shards": len(entries),
        "bytes": num_bytes,
        "rows_no_longer_wanted": sum(key not in wanted for entry in entries for key in entry.keys),
        "proof_of_capture_nats": max(errors, default=None),
        "rounding": rounding,  # of each aux layer and of the last, relative
    }
    if lost:
        context.reporter.say(f"extract: warning: {len(lost):,} of {len(rows):,} rows have no features and are left out: {_reasons(lost)}")
    proof = f", proof of capture within {max(errors):.2g} nats" if errors else ""
    if store_dtype == FLOAT8 and rounding:
        proof += f", float8 within {max(rounding):.1%} of each layer"
    context.reporter.say(
        f"extract: {counts['rows']:,} rows, {counts['tokens']:,} tokens, layers {capture['features']['layers']} and {spec.num_layers}, "
        f"{counts['bytes'] / 1e6:,.0f} MB in {counts['shards']} shards{proof}"
    )
    return Result(counts, content=hash_json([capture, sorted(wanted - lost.keys())]))


def rows_with_features(run_folder: Path) -> list[PreparedRow]:
    """The prepared rows, without those that extraction counted as lost."""
    lost = read_json(run_folder / "features" / LOST)
    return [row for row in read_rows(run_folder / "prepare") if row.key not in lost]


def _token_bytes(spec: TargetSpec, dtype: torch.dtype) -> int:
    return 4 * (spec.hidden_size * dtype.itemsize + (4 if dtype == FLOAT8 else 0))


def _open_shards(
    folder: Path, rows: list[PreparedRow], spec: TargetSpec, dtype: torch.dtype, shard_bytes: int, capture: str,
    room: Callable[[int, Callable[[], OpenShard]], OpenShard],
) -> Iterator[OpenShard]:  # fmt: skip
    """Rows in order, as many a shard as reach `shard_bytes`; a shard takes its place on the disk when it is asked for. room: makes it once there is some."""
    number = next_number(folder)
    token_bytes = _token_bytes(spec, dtype)
    part: list[PreparedRow] = []
    for row in rows:
        part.append(row)
        num_bytes = sum(len(row.tokens) for row in part) * token_bytes
        if num_bytes >= shard_bytes or row is rows[-1]:
            yield room(num_bytes, partial(open_shard, folder, number, part, 3, spec.hidden_size, dtype, capture))
            number, part = number + 1, []


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


def _check_lost(lost: dict[str, str], rows: list[PreparedRow], folder: Path) -> None:
    """A few rows may be left out of a long run; more is a fault that would only be found after it."""
    if len(lost) > max(10, LOST_SHARE * len(rows)):
        raise UserError(
            f"{len(lost):,} of {len(rows):,} rows have no features: {_reasons(lost)}. {folder / 'engine.log'} may say why; "
            f"what was captured is kept. Mend the data or the engine's settings, then run `eyas extract` again."
        )


def _reasons(lost: dict[str, str]) -> str:
    return "; ".join(f"{count:,} {reason}" for reason, count in Counter(lost.values()).most_common(5))

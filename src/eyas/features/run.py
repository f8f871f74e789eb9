"""The stage `extract`: rows of tokens -> shards of features in features/.

Rows are captured in order of length, so that a batch needs little padding; the trainer has an order of its own. A row is known by a hash of its
tokens and supervised spans: rows already captured from the same target at the same layers are kept, whatever else changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import torch

from eyas.artifact import hash_json
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.features.shard import INDEX, FeatureRow, next_number, open_index, write_shard
from eyas.features.verify import TOLERANCE, prove_capture
from eyas.prepare.run import PreparedRow, read_rows
from eyas.stage import Context, Result
from eyas.target.embeddings import read_head
from eyas.target.engine import open_engine, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec

REUSABLE = (INDEX, "shard-*.safetensors")
FREE_FLOOR = 256 << 20  # bytes left free on the disk, for everybody else on it


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    return {
        "features": {"layers": config.features.layers or spec.default_layers, "dtype": config.features.dtype},
        "target": {"weights": spec.fingerprint["weights"], "dtype": str(resolve_dtype(config.target.dtype, resolve_device(config.target.device)))},
    }


def work(context: Context) -> Result:
    config, spec, folder = context.config, context.spec, context.folder
    capture = settings(config, spec)
    store_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.features.dtype]
    rows = read_rows(context.run_folder / "prepare")
    entries = open_index(folder, capture)
    known = {key for entry in entries for key in entry.keys}
    missing = sorted((row for row in rows if row.key not in known), key=lambda row: len(row.tokens))
    _check_disk(context, sum(len(row.tokens) for row in missing) * 4 * spec.hidden_size * store_dtype.itemsize)
    errors: list[float] = []
    with context.reporter.task(folder, "extract", sum(len(row.tokens) for row in rows), "tokens") as task:
        task.skip(sum(len(row.tokens) for row in rows if row.key in known))
        if missing:
            engine, head = open_engine(config, spec, folder / "engine.log"), read_head(spec)
            dtypes = (resolve_dtype(config.target.dtype, resolve_device(config.target.device)), store_dtype)
            tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
            number = next_number(folder)
            buffer: list[FeatureRow] = []
            for batch in _batches(missing, engine.capture_tokens):
                for row, states in zip(
                    batch, engine.capture([row.tokens.tolist() for row in batch], [*capture["features"]["layers"], spec.num_layers]), strict=True
                ):
                    states = states.to(store_dtype)
                    if not states.isfinite().all():
                        raise UserError(
                            f"The target gave features that are not finite for row {row.key}. No shard was written. "
                            'Set target.dtype = "float32", or check its weights.'
                        )
                    buffer.append(FeatureRow(row.key, row.tokens, row.supervised, states[:, :3].contiguous(), states[:, 3].contiguous()))
                last_batch = batch[-1] is missing[-1]
                if last_batch or sum(row.aux.nbytes + row.last.nbytes for row in buffer) >= config.features.shard_mib << 20:
                    errors.append(prove_capture(buffer[len(buffer) // 2], head, engine, tolerance))
                    entries.append(write_shard(folder, number, buffer))
                    number, buffer = number + 1, []
                task.advance(sum(len(row.tokens) for row in batch))
    wanted = {row.key for row in rows}
    num_bytes = sum(entry.bytes for entry in entries)
    counts: dict[str, Any] = {
        "rows": len(rows),
        "rows_captured_now": len(missing),
        "tokens": sum(len(row.tokens) for row in rows),
        "shards": len(entries),
        "bytes": num_bytes,
        "rows_no_longer_wanted": sum(key not in wanted for entry in entries for key in entry.keys),
        "proof_of_capture_nats": max(errors, default=None),
    }
    proof = f", proof of capture within {max(errors):.2g} nats" if errors else ""
    context.reporter.say(
        f"extract: {counts['rows']:,} rows, {counts['tokens']:,} tokens, layers {capture['features']['layers']} and {spec.num_layers}, "
        f"{counts['bytes'] / 1e6:,.0f} MB in {counts['shards']} shards{proof}"
    )
    return Result(counts, content=hash_json([capture, sorted(wanted)]))


def _batches(rows: list[PreparedRow], batch_tokens: int) -> Iterator[list[PreparedRow]]:
    """Rows in order, as many a batch as fit into batch_tokens with padding to the longest, which is the last."""
    batch: list[PreparedRow] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row.tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _check_disk(context: Context, num_bytes: int) -> None:
    free = shutil.disk_usage(context.folder).free
    if num_bytes + FREE_FLOOR > free:
        raise UserError(
            f"The features need {num_bytes / 1e9:.2f} GB in {context.folder}, and the disk has {free / 1e9:.2f} GB free, of which "
            f"{FREE_FLOOR / 1e9:.2f} GB are left alone. "
            "Free some space, set run.folder to another disk, or give fewer conversations."
        )

"""The stage `extract`: rows of tokens -> shards of features in features/.

A row is known by a hash of its tokens and supervised spans: rows already captured from the same target at the same layers are kept, whatever else changed.
With a quota (features.keep) only the held-out rows are captured here, and training has the others captured as it comes to them (features/stream.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.artifact import hash_json, read_json, write_json
from eyas.config import RunConfig
from eyas.features.capture import LOST, Capturer, captured_from, reasons, token_bytes
from eyas.features.disk import require_room
from eyas.features.index import INDEX, open_index
from eyas.features.reader import FeatureReader
from eyas.features.stream import streams
from eyas.features.verify import POLICY_ROWS, Policy, policy_of
from eyas.prepare.rows import PreparedRow, read_rows
from eyas.progress import Reporter
from eyas.stage import Context, Result
from eyas.target.embeddings import read_head
from eyas.target.spec import TargetSpec

REUSABLE = (INDEX, "shard-*.safetensors")


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    capture = captured_from(config, spec)
    return {**capture, "features": {**capture["features"], "keep": config.features.keep}}


def work(context: Context) -> Result:
    config, spec, folder = context.config, context.spec, context.folder
    capture = captured_from(config, spec)
    everything = read_rows(context.run_folder / "prepare")
    streamed = streams(config, spec, everything)
    rows = [row for row in everything if row.holdout] if streamed else everything
    known = {key for entry in open_index(folder, capture, context.reporter.say) for key in entry.keys}
    missing = [row for row in rows if row.key not in known]
    require_room(folder, sum(len(row.tokens) for row in missing) * token_bytes(config, spec))
    capturer = Capturer(config, spec, context.reporter, folder / "engine.log")
    with context.reporter.task(folder, "extract", sum(len(row.tokens) for row in rows), "tokens") as task:
        task.skip(sum(len(row.tokens) for row in rows if row.key in known))
        try:
            found = capturer.capture(missing, folder, task, len(everything))
        finally:
            capturer.close()
    entries = open_index(folder, capture)
    wanted, lost = {row.key for row in rows}, found.lost
    write_json(folder / LOST, lost)
    counts: dict[str, Any] = {
        "rows": len(rows) - len(lost),
        "rows_lost": dict(Counter(lost.values())),
        "rows_captured_now": len(missing) - len(lost),
        "tokens": sum(len(row.tokens) for row in rows if row.key not in lost),
        "shards": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
        "rows_no_longer_wanted": sum(key not in wanted for entry in entries for key in entry.keys),
        "proof_of_capture_nats": max(found.errors, default=None),
        "rounding": found.rounding,
        "rows_left_to_training": len(everything) - len(rows),
    }
    if lost:
        context.reporter.say(f"extract: warning: {len(lost):,} of {len(rows):,} rows have no features and are left out: {reasons(lost)}")
    proof = f", proof of capture within {max(found.errors):.2g} nats" if found.errors else ""
    if config.features.dtype == "float8" and found.rounding:
        proof += f", float8 within {max(found.rounding):.1%} of each layer"
    context.reporter.say(
        f"extract: {counts['rows']:,} {'held-out ' if streamed else ''}rows, {counts['tokens']:,} tokens, layers {capture['features']['layers']} and "
        f"{spec.num_layers}, {counts['bytes'] / 1e6:,.0f} MB in {counts['shards']} shards{proof}"
    )
    if policy := _policy(folder, rows, lost, spec):
        counts["policy"] = asdict(policy)
        _tell_policy(policy, context.reporter)
    if streamed:
        context.reporter.say(f"extract: features.keep = {config.features.keep}: the other {len(everything) - len(rows):,} rows are captured while training")
    return Result(counts, content=hash_json([capture, sorted({row.key for row in everything} - lost.keys())]))


def _policy(folder: Path, rows: Sequence[PreparedRow], lost: dict[str, str], spec: TargetSpec) -> Policy | None:
    reader = FeatureReader(folder)
    keys = sorted(row.key for row in rows if row.key not in lost)[:POLICY_ROWS]  # by a hash: as good as at random
    return policy_of([reader.row(key) for key in keys], read_head(spec), spec.stop_ids)


def _tell_policy(policy: Policy, reporter: Reporter) -> None:
    reporter.say(
        f"extract: of {policy.tokens} supervised tokens looked at, the target would greedily say {policy.greedy:.0%}; they surprise it by "
        f"{policy.surprise:.2f} nats each, and its own uncertainty there is {policy.uncertainty:.2f}"
    )
    if policy.foreign:
        reporter.say(
            "extract: warning: these answers are not what the target itself would say, and a draft trained on them foresees it worse. "
            'Set data.regenerate = "all" to have it answer the same prompts.'
        )
    if policy.ends_elsewhere:
        reporter.say(
            f"extract: warning: the stop token at the end of an answer surprises the target by {policy.end_surprise:.1f} nats. Look for a line break or a "
            'space behind the answers in the data; data.regenerate = "all" has the target end them itself.'
        )


def rows_with_features(run_folder: Path) -> list[PreparedRow]:
    """The prepared rows, without those that extraction counted as lost."""
    lost = read_json(run_folder / "features" / LOST)
    return [row for row in read_rows(run_folder / "prepare") if row.key not in lost]

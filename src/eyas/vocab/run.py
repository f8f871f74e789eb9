"""The stage `vocab`: supervised tokens -> the draft's vocabulary, in vocab/mapping.safetensors (ids int64 [Vd]).

Only supervised tokens of training rows count: prompts and held-out rows do not. Stop tokens and special tokens are always in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas.artifact import hash_file, write_tensors
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.prepare.chat import load_chat
from eyas.prepare.rows import PreparedRow, read_rows
from eyas.stage import Context, Result
from eyas.target.spec import TargetSpec
from eyas.vocab.mapping import choose_ids

MAPPING = "mapping.safetensors"


def draft_vocab_size(config: RunConfig, spec: TargetSpec) -> int:
    return config.vocab.size or min(32_000, spec.vocab_size)


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    return {"vocab": {"size": draft_vocab_size(config, spec)}, "target": {"tokenizer": spec.fingerprint["tokenizer"]}}


def work(context: Context) -> Result:
    size = draft_vocab_size(context.config, context.spec)
    rows = read_rows(context.run_folder / "prepare")
    chat = load_chat(context.spec, context.config.target.trust_remote_code, context.config.data.chat_template_kwargs)
    forced = sorted({token for token in [*chat.stop_ids, *chat.tokenizer.all_special_ids] if token < context.spec.vocab_size})
    if len(forced) > size:
        raise UserError(
            f"vocab.size = {size} is smaller than the tokenizer's {len(forced)} special tokens, which the draft must be able to say. Set it higher."
        )
    counts = _counts([row for row in rows if not row.holdout], context.spec.vocab_size)
    ids = choose_ids(counts, size, forced)
    write_tensors(context.folder / MAPPING, {"ids": ids})
    held = [row for row in rows if row.holdout]
    coverage = {"train": _coverage(counts, ids), "holdout": _coverage(_counts(held, context.spec.vocab_size), ids) if held else None}
    shown = f"{coverage['train']:.2%} of the supervised tokens" + (f", {coverage['holdout']:.2%} of the held-out ones" if held else "")
    context.reporter.say(f"vocab: {size:,} of {context.spec.vocab_size:,} tokens cover {shown}; {len(forced)} special tokens are always in")
    return Result(
        {"size": size, "forced": len(forced), "distinct_supervised": int((counts > 0).sum()), "coverage": coverage}, content=hash_file(context.folder / MAPPING)
    )


def _counts(rows: list[PreparedRow], vocab_size: int) -> torch.Tensor:
    return torch.bincount(torch.cat([row.tokens[row.supervised] for row in rows]), minlength=vocab_size)


def _coverage(counts: torch.Tensor, ids: torch.Tensor) -> float:
    return float(counts[ids].sum() / counts.sum())


def read_ids(folder: Path) -> torch.Tensor:
    """The draft vocabulary of a finished vocab/ folder: target ids int64 [Vd], ascending."""
    return load_file(folder / MAPPING)["ids"]

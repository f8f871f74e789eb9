"""The stage `export`: the best checkpoint -> export/vllm and export/sglang, two folders alike but for the layer ids.

config.json   model.safetensors (weights, d2t, t2d; the embedding is the target's and left out)
"""

from __future__ import annotations

import os
import shutil
from typing import Any, get_args

import torch

from eyas.artifact import hash_file, hash_json, write_json, write_tensors
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.export.check import largest_difference, load_export
from eyas.export.names import Engine, draft_config, engines_for
from eyas.stage import Context, Result
from eyas.target.spec import TargetSpec
from eyas.train.checkpoint import load_draft
from eyas.train.run import best_checkpoint
from eyas.vocab.mapping import to_d2t, to_t2d
from eyas.vocab.run import read_ids


def export_dtype(config: RunConfig, spec: TargetSpec) -> torch.dtype:
    name = spec.weight_dtype.removeprefix("torch.") if config.export.dtype == "auto" else config.export.dtype
    return {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    return {"export": {"dtype": str(export_dtype(config, spec))}}


def work(context: Context) -> Result:
    dtype = export_dtype(context.config, context.spec)
    draft, ids = load_draft(best_checkpoint(context.run_folder / "train")), read_ids(context.run_folder / "vocab")
    tensors = {name: value.to(dtype) for name, value in draft.state_dict().items()}
    if len(ids) < draft.shape.vocab_size:
        tensors |= {"d2t": to_d2t(ids), "t2d": to_t2d(ids, draft.shape.vocab_size)}
    name = str(dtype).removeprefix("torch.")
    target = {"target": context.spec.path.name, "target_weights": context.spec.fingerprint["weights"]}
    configs = {}
    engines = engines_for(draft.shape)
    for engine in get_args(Engine):
        shutil.rmtree(context.folder / engine, ignore_errors=True)
    for engine in engines:
        folder = context.folder / engine
        folder.mkdir()
        if engine == "vllm":
            write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        else:  # the same bytes on disk once
            os.link(context.folder / "vllm" / "model.safetensors", folder / "model.safetensors")
        configs[engine] = draft_config(draft.shape, engine, name, target)
        write_json(folder / "config.json", configs[engine])
    error = _check(context, engines, draft, ids, dtype)
    size = (context.folder / "vllm" / "model.safetensors").stat().st_size
    where = " and ".join([f"{context.folder}/vllm", *(f"/{engine}" for engine in engines[1:])])
    context.reporter.say(f"export: {where}, {size / 1e6:.0f} MB {name}; read back, the logits differ by {error:.1e} of their size")
    return Result({"bytes": size, "reload_difference": error}, content=hash_json([configs, hash_file(context.folder / "vllm" / "model.safetensors")]))


def _check(context: Context, engines: list[Engine], draft: Any, ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Raises UserError unless what was written gives the logits that were trained, to the rounding of its dtype."""
    worst = 0.0
    for engine in engines:
        exported = load_export(context.folder / engine)
        error = largest_difference(draft, exported.draft)
        if not torch.equal(exported.ids, ids) or not error <= (1e-6 if dtype == torch.float32 else 0.05):
            raise UserError(
                f"{context.folder / engine} does not give the logits that were trained (difference {error:.2g}). Run `eyas export` again; if it stays, "
                f"please report it."
            )
        worst = max(worst, error)
    return worst

"""What a setting does to the acceptance length: trains a draft for each variant from one set of features and simulates it on held-out prompts.

    python benchmarks/recipe.py examples/quickstart/run.toml "" "train.unroll_steps=3" "vocab.size=8192 train.lr=2e-3"

Each variant is a list of overrides of the run file, "" the run file as it is. The run must have been made up to `vocab` (`eyas run --until vocab`).
Prints, for each: optimiser steps, seconds, and the acceptance length with 3 and 5 draft tokens on the target's own greedy answers to the run file's
evaluate.prompts (evaluate.max_new_tokens each, written once, in float32), overall and by category.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from eyas.config import RunConfig, load
from eyas.draft.init import new_draft
from eyas.evaluate.prompts import Prompt, read_prompts
from eyas.evaluate.simulate import nothing, simulate
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow
from eyas.pipeline import Run
from eyas.prepare.chat import load_chat
from eyas.prepare.rows import read_rows
from eyas.target.embeddings import TargetHead, read_head
from eyas.target.engine import Sampling, keep_freed_memory, resolve_device, resolve_dtype
from eyas.target.transformers_engine import TransformersEngine
from eyas.train.batch import Batch, make_batch
from eyas.train.loop import Materials, optimizer_step, steps_of
from eyas.train.loss import Teacher
from eyas.train.optim import make_optimizer, rate_share
from eyas.train.run import shape_of
from eyas.train.sampler import epoch_steps
from eyas.vocab.mapping import choose_ids

DEEPEST = 5


def held_out(run: Run, head: TargetHead, device: torch.device, dtype: torch.dtype) -> tuple[list[Prompt], Batch]:
    """The held-out prompts and one batch of the features of the target's greedy answers to them."""
    section, spec = run.config.evaluate, run.spec
    engine = TransformersEngine(spec, device, torch.float32, run.config.target.trust_remote_code)
    prompts = read_prompts(section.prompts, section.prompts_per_category, load_chat(spec, False), spec.max_length - section.max_new_tokens)
    answers = engine.generate([prompt.tokens for prompt in prompts], Sampling(section.max_new_tokens, 0.0, 1.0, 0))
    layers = run.settings["extract"]["features"]["layers"]
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt.tokens, *answer.tokens]
        (states,) = engine.capture([text], [*layers, spec.num_layers])
        supervised = torch.arange(len(text)) >= len(prompt.tokens)
        rows.append(FeatureRow("", torch.tensor(text, dtype=torch.int32), supervised, states[:, :3], states[:, 3]))
    return prompts, make_batch(rows, head.embedding.to(dtype), DEEPEST, dtype).to(device)


def train(config: RunConfig, run: Run, head: TargetHead, reader: FeatureReader, device: torch.device, dtype: torch.dtype) -> tuple[Materials, object, int]:
    section = config.train
    rows = [row for row in read_rows(run.folder / "prepare") if not row.holdout]
    shape = shape_of(config, run.spec)
    counts = torch.bincount(torch.cat([row.tokens[row.supervised] for row in rows]), minlength=run.spec.vocab_size)
    ids = choose_ids(counts, shape.draft_vocab_size, list(run.spec.stop_ids))
    draft = new_draft(shape, config.run.seed, ids, head if config.draft.init_head == "target" else None).to(device)
    materials = Materials(reader, [row.key for row in rows], [], head.embedding.to(dtype), Teacher(head, ids, dtype, device), ids.to(device), dtype, device)
    epochs = [
        epoch_steps(materials.train_keys, reader.lengths, section.tokens_per_step, section.tokens_per_batch, config.run.seed, e) for e in range(section.epochs)
    ]
    schedule = [step for epoch in epochs for step in epoch]
    optimizer = make_optimizer(draft, section, dtype)
    for number, step in enumerate(steps_of(materials, section, schedule)):
        optimizer_step(draft, optimizer, materials, section, step, rate_share(section, number, len(schedule)))
    return materials, draft, len(schedule)


def main() -> None:
    run_file, variants = Path(sys.argv[1]), sys.argv[2:] or [""]
    keep_freed_memory()
    run = Run(load(run_file, []))
    device = resolve_device(run.config.target.device)
    dtype = resolve_dtype(run.config.train.dtype, device)
    head, reader = read_head(run.spec), FeatureReader(run.folder / "features")
    prompts, batch = held_out(run, head, device, dtype)
    for variant in variants:
        began = time.monotonic()
        materials, draft, num_steps = train(load(run_file, variant.split()), run, head, reader, device, dtype)
        seconds = time.monotonic() - began
        lengths, parts = [], {}
        for num_draft_tokens in (3, DEEPEST):
            found = simulate(draft, materials.ids, batch, num_draft_tokens)  # type: ignore[arg-type]
            lengths.append(sum(found, nothing(num_draft_tokens)).length or 0.0)
            if num_draft_tokens == 3:
                for category in dict.fromkeys(prompt.category for prompt in prompts):
                    parts[category] = sum((one for one, prompt in zip(found, prompts, strict=True) if prompt.category == category), nothing(3)).length or 0.0
        by_category = "  ".join(f"{category} {length:.2f}" for category, length in parts.items())
        print(f"{variant or 'the run file'}: {num_steps} steps, {seconds:.0f} s, tau3 {lengths[0]:.3f}, tau5 {lengths[1]:.3f}   ({by_category})", flush=True)


if __name__ == "__main__":
    main()

"""Where the time of a training step goes on a CPU, with and without what makes it fast there.

    python benchmarks/train_step_cpu.py examples/quickstart/run.toml

The run must have been made up to `vocab`. Prints tokens/s over 24 optimiser steps of the run's own rows: as trained, without filling batches up to
a multiple of rows (every batch has shapes of its own), and with freed memory given back to the system; the last is measured first, because it
cannot be undone in a process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import eyas.train.loop as loop
from eyas.config import load
from eyas.draft.init import new_draft
from eyas.features.reader import FeatureReader
from eyas.pipeline import Run
from eyas.prepare.rows import read_rows
from eyas.target.embeddings import read_head
from eyas.target.engine import keep_freed_memory, resolve_device, resolve_dtype
from eyas.train.loss import Teacher
from eyas.train.optim import make_optimizer
from eyas.train.run import shape_of
from eyas.train.sampler import epoch_steps
from eyas.vocab.run import read_ids

NUM_STEPS = 24


def main() -> None:
    run = Run(load(Path(sys.argv[1]), []))
    section, device = run.config.train, resolve_device("cpu")
    dtype = resolve_dtype(section.dtype, device)
    rows = [row for row in read_rows(run.folder / "prepare") if not row.holdout]
    reader, ids, head = FeatureReader(run.folder / "features"), read_ids(run.folder / "vocab"), read_head(run.spec)
    materials = loop.Materials(reader, [row.key for row in rows], [], head.embedding.to(dtype), Teacher(head, ids, dtype, device), ids, dtype, device)
    steps = epoch_steps(materials.train_keys, reader.lengths, section.tokens_per_step, section.tokens_per_batch, 0, 0)

    def tokens_per_second(first: int) -> float:
        draft = new_draft(shape_of(run.config, run.spec), 0, ids, head)
        optimizer = make_optimizer(draft, section, dtype)
        began, tokens = time.monotonic(), 0
        some = steps[first : first + NUM_STEPS]  # other rows each time: shapes that were met before cost nothing
        for keys, step in zip(some, loop.steps_of(materials, section, some), strict=True):
            loop.optimizer_step(draft, optimizer, materials, section, step, 0.1)
            tokens += sum(reader.lengths[key] for batch in keys for key in batch)
        return tokens / (time.monotonic() - began)

    multiple = loop.SHAPE_MULTIPLE
    tokens_per_second(0)  # warm-up: files read, kernels of the fixed shapes prepared
    print(f"freed memory given back: {tokens_per_second(NUM_STEPS):,.0f} tokens/s")
    keep_freed_memory()
    print(f"freed memory kept, as trained: {tokens_per_second(2 * NUM_STEPS):,.0f} tokens/s")
    loop.SHAPE_MULTIPLE = 1
    print(f"freed memory kept, batches not filled up: {tokens_per_second(3 * NUM_STEPS):,.0f} tokens/s")
    loop.SHAPE_MULTIPLE = multiple
    print(f"freed memory kept, as trained, again: {tokens_per_second(4 * NUM_STEPS):,.0f} tokens/s")


if __name__ == "__main__":
    main()

"""Does reading keep the training step fed? The same optimiser steps with their batches held on the device, and read from a feature store.

    python benchmarks/feed_speed.py [--folder /dev/shm] [--shape llama-8b] [--rows 64] [--length 2048] [--tokens 8192] [--dtype bfloat16 float8]

The store is written first, of random features. Then for each dtype: an epoch over it by the training loop's own steps (mapped, held against checksums, packed,
copied, decoded), and as many steps over its first batch, in turns, three times each; the median of each counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from random_store import random_rows, write_store
from train_step import SHAPES, draft_shape_of

from eyas.config import TrainSection
from eyas.draft.model import Draft
from eyas.features.codec import DTYPES
from eyas.features.reader import FeatureReader
from eyas.target.embeddings import TargetHead
from eyas.target.engine import keep_freed_memory, resolve_device
from eyas.train.feed import Step
from eyas.train.loop import Materials, Work, fixed_tokens, make_work, optimizer_step, steps_of
from eyas.train.loss import Teacher
from eyas.train.optim import make_optimizer
from eyas.train.sampler import epoch_order, pack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float8"])
    options = parser.parse_args()
    keep_freed_memory()  # as the command line does
    device, shape = resolve_device("auto"), draft_shape_of(options.shape)
    dtype, width, vocab = torch.bfloat16, shape.hidden_size, SHAPES[options.shape][5]
    torch.manual_seed(0)
    table = torch.randn(vocab, width, dtype=dtype)
    ids = torch.arange(shape.draft_vocab_size, device=device)
    teacher = Teacher(TargetHead(table, torch.ones(width), 1e-5, table, None), ids, dtype, device)
    section = TrainSection(optimizer="adamw", unroll_steps=7, tokens_per_step=options.tokens, tokens_per_batch=options.tokens)
    draft = Draft(shape).to(device)
    optimizer, fixed = make_optimizer(draft, section, dtype), fixed_tokens(draft, section, device)
    for name in options.dtype:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write_store(Path(folder), random_rows(options.rows, options.length, width, DTYPES[name], vocab))
            reader = FeatureReader(Path(folder))
            schedule = [[step] for step in pack(epoch_order(list(reader.lengths), 0, 0), reader.lengths, options.tokens)]
            materials = Materials(reader, [], [], table, teacher, ids, dtype, device)
            (held,) = steps_of(materials, section, schedule[:1], fixed=fixed)
            work = make_work(draft, optimizer, materials, section, print)

            def run(steps: Iterable[Step], materials: Materials = materials, work: Work = work) -> float:
                start = time.perf_counter()
                for step in steps:
                    optimizer_step(draft, optimizer, materials, section, step, 0.01, work)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                return time.perf_counter() - start

            run([held] * 3)  # compiles, or captures as a graph
            rounds = [(run(steps_of(materials, section, schedule, fixed=fixed)), run([held] * len(schedule))) for _ in range(3)]
            read, fed = (sorted(seconds)[1] for seconds in zip(*rounds, strict=True))
            tokens = sum(reader.lengths.values())
            size = sum(file.stat().st_size for file in Path(folder).glob("shard-*"))
            print(f"{options.shape}, {name}, {size / 1e9:.1f} GB in {options.folder or tempfile.gettempdir()}: ", end="")
            print(f"{tokens / read:,.0f} tokens/s read from the store, {tokens / fed:,.0f} with a batch that is held: {fed / read:.1%}", flush=True)


if __name__ == "__main__":
    main()

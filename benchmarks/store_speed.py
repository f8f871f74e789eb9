"""The feature store against plain copies of files: how fast rows are written and read, as a share of how fast the same bytes are copied.

    python benchmarks/store_speed.py [--folder FOLDER] [--gib 1.0] [--width 4096] [--dtype bfloat16]

Written: shards laid out, rows put in their places, checksums, fsync, index. Read: every row in the order of training, shards held against their checksums, rows
packed into batches with the embeddings of their tokens (whose bytes do not count). Beside both: the same files copied, and for writing synced. Each is done
three times in turns, the best of each counts. Files are read from the page cache; otherwise the disk would be measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from random_store import SHARD_ROWS, random_rows, write_store

from eyas.features.codec import DTYPES
from eyas.features.reader import FeatureReader
from eyas.target.engine import keep_freed_memory
from eyas.train.batch import make_batch
from eyas.train.sampler import epoch_order, pack

LENGTH, TOKENS, VOCAB = 1024, 8192, 128256  # of a row, of a batch, of the target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    keep_freed_memory()  # as the command line does
    dtype = DTYPES[options.dtype]
    (row,) = random_rows(1, LENGTH, options.width, dtype, VOCAB)
    num_bytes = sum(part.numel() * part.element_size() for part in (row.aux, row.last, row.scale) if part is not None)
    rows = random_rows(max(SHARD_ROWS, int(options.gib * 2**30 / num_bytes) // SHARD_ROWS * SHARD_ROWS), LENGTH, options.width, dtype, VOCAB)
    total = len(rows) * num_bytes
    embedding = torch.ones(VOCAB, options.width, dtype=torch.bfloat16)

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)

        def copy(sync: bool) -> None:
            for path in folder.glob("shard-*"):
                shutil.copyfile(path, folder / "copy")
                if sync:
                    with open(folder / "copy", "rb+") as file:
                        os.fsync(file.fileno())

        def read_store() -> None:
            reader = FeatureReader(folder)
            for keys in pack(epoch_order(list(reader.lengths), 0, 0), reader.lengths, TOKENS):
                make_batch([reader.row(key) for key in keys], embedding, 5, torch.bfloat16)

        print(f"{len(rows)} rows of {LENGTH:,} tokens, {options.dtype}, {total / 1e9:.2f} GB, in {options.folder or tempfile.gettempdir()}")
        write_store(folder, rows)
        compare("written", total, lambda: write_store(folder, rows), lambda: copy(sync=True))
        compare("read", total, read_store, lambda: copy(sync=False))


def compare(what: str, num_bytes: int, ours: Callable[[], None], plain: Callable[[], None]) -> None:
    best = [float("inf"), float("inf")]
    for _ in range(3):
        for index, act in enumerate((ours, plain)):
            start = time.perf_counter()
            act()
            best[index] = min(best[index], time.perf_counter() - start)
    print(f"{what}: {num_bytes / best[0] / 1e9:.2f} GB/s, plain copies {num_bytes / best[1] / 1e9:.2f} GB/s: {best[1] / best[0]:.0%}")


if __name__ == "__main__":
    main()

"""How threads share the writing of shard files, and the reading and hashing of them.

    python benchmarks/file_threads.py FOLDER [--gigabytes 4]

Prints GB/s of 1, 2, 4 and 8 threads that write 16 MiB at a time, all into one file or each into a file of its own, and of 1 and 4 that read and hash.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eyas.artifact import hash_file

BLOCK = os.urandom(16 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="threads-", dir=options.folder))
    blocks = int(options.gigabytes * 1e9) // len(BLOCK)
    try:
        for num in (1, 2, 4, 8):
            one, own = (write(folder, num, blocks, files) for files in (1, num))
            print(f"{num} threads write {one:.2f} GB/s into one file, {own:.2f} GB/s into {num}")
        files = sorted(folder.iterdir())
        for num in (1, 4):
            start = time.monotonic()
            with ThreadPoolExecutor(num) as pool:
                list(pool.map(hash_file, files))
            print(f"{num} threads read and hash {sum(file.stat().st_size for file in files) / 1e9 / (time.monotonic() - start):.2f} GB/s")
    finally:
        shutil.rmtree(folder)


def write(folder: Path, num_threads: int, num_blocks: int, num_files: int) -> float:
    """GB/s of fresh files."""
    for old in folder.iterdir():
        old.unlink()
    handles = [os.open(folder / str(number), os.O_WRONLY | os.O_CREAT) for number in range(num_files)]
    start = time.monotonic()

    def work(thread: int) -> None:
        for block in range(thread, num_blocks, num_threads):
            os.pwrite(handles[thread % num_files], BLOCK, block // num_files * len(BLOCK))

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    seconds = time.monotonic() - start
    for handle in handles:
        os.close(handle)
    return num_blocks * len(BLOCK) / 1e9 / seconds


if __name__ == "__main__":
    main()

"""What `eyas plan --calibrate` foretells of a run, beside what the run then takes: tokens, bytes, memory and time of extraction and training.

    python benchmarks/plan_check.py RUN.toml [--set SECTION.KEY=VALUE ...]

Each stage runs in a process of its own, in a run folder made anew. Memory is the most that the process held of its own
(mapped files not counted, which the system takes back when it wants); where there is a GPU, what nvidia-smi says of the fullest one, less what was taken
before. The last column is prediction / measurement. vLLM takes its whole share of a GPU for its cache, unless target.extra.kv_cache_memory_bytes says less.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eyas.foresight.hardware import smi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve() / "run"
        words = [str(options.run_file), *(word for override in [*options.overrides, f"run.folder={folder}"] for word in ("--set", override))]
        told = json.loads(eyas("plan", *words, "--json", "--calibrate")[0])
        memory = {stage: eyas(stage, *words)[1] for stage in ("prepare", "extract", "vocab", "train")}
        found: dict[str, Any] = {stage: json.loads((folder / place / "manifest.json").read_text()) for stage, place in PLACES.items()}
    seconds = {stage["name"]: stage["seconds"] for stage in told["stages"]}
    for what, foretold, measured in (
        ("tokens", told["tokens"]["tokens"], found["prepare"]["counts"]["tokens"]),
        ("bytes of features", told["tokens"]["tokens"] * told["token_bytes"], found["extract"]["counts"]["bytes"]),
        ("memory of extract, GB", told["memory"]["extract"]["need"] / 1e9, memory["extract"] / 1e9),
        ("memory of train, GB", told["memory"]["train"]["need"] / 1e9, memory["train"] / 1e9),
        ("seconds of extract", seconds["extract"], found["extract"]["seconds"]),
        ("seconds of train", seconds["train"], found["train"]["seconds"]),
    ):
        print(f"{what:<24} {foretold:>16,.2f} foretold {measured:>16,.2f} measured {foretold / measured:>6.2f}")


PLACES = {"prepare": "prepare", "extract": "features", "train": "train"}


def eyas(*words: str) -> tuple[str, int]:
    """(what it printed, bytes it held at most). Ends the benchmark if it fails."""
    most, before = 0, used() or 0
    process = subprocess.Popen([sys.executable, "-m", "eyas.cli", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.poll() is None:
        now = used()
        most = max(most, held(process.pid) if now is None else now - before)
        time.sleep(0.1)
    if process.returncode:
        sys.exit(f"eyas {' '.join(words)} ended with {process.returncode}")
    return process.stdout.read(), most


def used() -> int | None:
    """Bytes taken of the fullest GPU; None without one."""
    rows = smi("--query-gpu=memory.used")
    return max(int(row[0]) << 20 for row in rows) if rows else None


def held(pid: int) -> int:
    """Bytes of memory of its own; pages of mapped files, which the system takes back when it wants, are not among them."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:  # just ended
        return 0
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()

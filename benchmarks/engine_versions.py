"""The tests of vLLM as the target's engine, under several versions of vLLM.

    python benchmarks/engine_versions.py PYTHON [PYTHON ...] [--out FOLDER] [-k EXPRESSION]

Each PYTHON is that of an environment with some vLLM; `make env-vllm-0.30.0` makes .venv-vllm-0.30.0. Prints a table in Markdown, a row a version: what
the tests of each file said. The whole output of each run goes to FOLDER (default: the current one). Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITE = {
    "states, answers, faults": "tests/target/test_vllm_engine.py",
    "hard models": "tests/target/test_vllm_models.py",
    "vLLM's own extraction": "tests/target/test_vllm_oracle.py",
    "serving": "tests/export/test_serving_in_vllm.py",
}
FACTS = "import torch, vllm; print(vllm.__version__, torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU', sep='|')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path.cwd())
    parser.add_argument("-k", dest="expression", default="")
    options = parser.parse_args()
    print("| vLLM | torch | on | " + " | ".join(SUITE) + " |")
    print("|---" * (3 + len(SUITE)) + "|")
    failed = False
    for python in options.python:
        done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{python} has no vLLM that can be imported: {done.stderr.strip().splitlines()[-1]}")
        version, torch, device = done.stdout.strip().splitlines()[-1].split("|")
        cells = []
        for name, path in SUITE.items():
            cell, bad = run_file(path, python.absolute(), options.out / f"{version}-{name.replace(' ', '-')}.log", options.expression)
            cells.append(cell)
            failed = failed or bad
        print(f"| {version} | {torch} | {device} | " + " | ".join(cells) + " |", flush=True)
    sys.exit(failed)


def run_file(path: str, python: Path, log: Path, expression: str) -> tuple[str, bool]:
    """(what pytest said in a few words, whether anything failed)."""
    start = time.monotonic()
    words = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:warnings", "-m", "", path, *(["-k", expression] if expression else [])]
    with open(log, "w") as out:
        code = subprocess.run(words, cwd=ROOT, env={**os.environ, "EYAS_VLLM_PYTHON": str(python)}, stdout=out, stderr=out, check=False).returncode
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", log.read_text().splitlines()[-1])
    said = ", ".join(f"{number} {what}" for number, what in counts if what != "deselected") or "nothing"
    return f"{said} ({time.monotonic() - start:.0f} s)", code not in (0, 5)  # 5: no test was chosen


if __name__ == "__main__":
    main()

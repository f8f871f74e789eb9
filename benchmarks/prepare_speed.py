"""How fast conversations become rows of tokens, and how much memory that takes; beside it SpecForge's preprocessing of the same rows.

    python benchmarks/prepare_speed.py TARGET DATA.jsonl [--rows 500000] [--peers FOLDER --template qwen]

DATA.jsonl holds conversations in the OpenAI form; they are repeated, numbered so that no two are alike, until there are --rows of them. Each runs in a
process of its own, on all cores, and writes what it makes to disk. Printed: conversations/s from start to end, imports included, and the most memory that the
process and its children held at one time (proportional set size, read every half second).

--peers: FOLDER holds specforge 0.2.0's wheel, unpacked, and `datasets` with what it imports. --template: its name for the target's template.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPECFORGE = """
import json, sys
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from specforge.data.preprocessing import build_eagle3_dataset
target, data, template, out, workers = sys.argv[1:]
if __name__ == "__main__":
    raw = load_dataset("json", data_files=data, split="train", cache_dir=out + "/cache").rename_column("messages", "conversations")
    made = build_eagle3_dataset(raw, AutoTokenizer.from_pretrained(target), template, max_length=2048, num_proc=int(workers))
    print(len(made), "rows", sum(sum(row[0]) for row in made.select(range(min(1000, len(made))))["loss_mask"]), "supervised in the first 1000", file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--template", default="qwen")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        data = folder / "data.jsonl"
        many(options.data, data, options.rows)
        print(f"{options.rows:,} conversations, {data.stat().st_size / 1e6:,.0f} MB, {len(os.sched_getaffinity(0))} cores", flush=True)
        (folder / "run.toml").write_text(f'[target]\npath = "{options.target.resolve()}"\n[data]\nconversations = ["{data}"]\n')
        ours = timed("Eyas", [sys.executable, "-m", "eyas.cli", "prepare", str(folder / "run.toml")], options.rows, {})
        if options.peers:
            script = folder / "specforge_prepare.py"
            script.write_text(SPECFORGE)
            path = os.pathsep.join([str(options.peers.resolve()), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(script), str(options.target.resolve()), str(data), options.template, str(folder), str(len(os.sched_getaffinity(0)))]
            theirs = timed("SpecForge 0.2.0", command, options.rows, {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})
            print(f"  Eyas: {theirs / ours:.2f} times its speed")


def many(source: Path, out: Path, rows: int) -> None:
    given = [json.loads(line)["messages"] for line in source.read_bytes().splitlines()]
    with open(out, "w") as file:
        for number in range(rows):
            first, *rest = given[number % len(given)]
            file.write(json.dumps({"id": str(number), "messages": [{**first, "content": f"({number}) {first['content']}"}, *rest]}) + "\n")


def timed(name: str, command: list[str], rows: int, environment: dict[str, str]) -> float:
    start, most = time.perf_counter(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, start_new_session=True)
    while process.poll() is None:
        most = max(most, held_mb(process.pid))
        time.sleep(0.5)
    seconds = time.perf_counter() - start
    assert process.stderr
    said = process.stderr.read().strip().splitlines()
    if process.returncode:
        raise SystemExit(f"{name} ended with code {process.returncode}: " + "\n".join(said[-3:]))
    print(f"  {name}: {seconds:,.1f} s, {rows / seconds:,.0f} conversations/s, {most:,.0f} MB at most; {said[-1]}", flush=True)
    return seconds


def held_mb(session: int) -> float:
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getsid(int(folder.name)) == session:
                total += sum(int(line.split()[1]) for line in (folder / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        except OSError:
            continue
    return total / 1024


if __name__ == "__main__":
    main()

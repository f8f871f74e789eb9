"""The same target, the same features, the same tokens or the same seconds: how many tokens do the drafts of different trainers get accepted?

    python benchmarks/acceptance/compare.py RUN.toml [--prompts FILE ...] (--seconds 60 | --epochs 3)
        [--seeds 0 1] [--contender 'NAME=SCRIPT ARGUMENTS' or 'NAME=FOLDER' ...] [--at-once 1] [--per-set 160] [--answer-tokens 256]
        [--serve 3 7]

RUN.toml (run.toml beside this file is one) must have been run up to `vocab`. A contender that is a folder is a finished draft, and is measured as it is.
Each other one trains in a process of its own (eyas_train.py, speculators_train.py, specforge_train.py: the same rows, the same clock, each with its own code
and its documented settings) and writes its draft in the form that vLLM loads; with --at-once so many of them share the GPU, which compares equal epochs but
not equal seconds. All are measured alike: over the target's own answers to the prompts, written once by the run file's engine, greedily and at temperature 1,
the rounds with 3, 5 and 7 draft tokens are simulated from the target's states. --serve also serves each draft of the first seed with so many draft tokens in
the vLLM of the run file's target.python, and reads its counters.

Prints a line for each draft as it is done, then a table over seeds, and writes everything to RUN_FOLDER/acceptance/. What is there is not done
again; finished drafts are.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from eyas.artifact import read_json, write_json
from eyas.config import load
from eyas.evaluate.prompts import Prompt, read_prompts
from eyas.evaluate.serve import Server, server_arguments
from eyas.evaluate.simulate import Acceptance, foresee, nothing
from eyas.export.check import load_export
from eyas.features.shard import FeatureRow
from eyas.pipeline import Run
from eyas.prepare.chat import load_chat
from eyas.target.embeddings import read_head
from eyas.target.engine import Sampling, open_engine, resolve_device, resolve_dtype
from eyas.target.transformers_engine import TransformersEngine, batches
from eyas.train.batch import make_batch

HERE = Path(__file__).parent
DRAFT_TOKENS = (3, 5, 7)
TEMPERATURES = {"greedy": 0.0, "at 1": 1.0}
CONTENDERS = ("eyas=eyas_train.py", "speculators=speculators_train.py --unroll 3", "specforge=specforge_train.py")
SLOTS = 32  # requests at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--prompts", nargs="+", metavar="FILE", help="default: the run file's evaluate.prompts")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float)
    length.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--contender", action="append", metavar="NAME=SCRIPT ARGUMENTS")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trainings beside one another; with --epochs alone")
    parser.add_argument("--per-set", type=int, default=160)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--serve", nargs="*", type=int, default=[], metavar="DRAFT_TOKENS")
    options = parser.parse_args()
    if options.at_once > 1 and not options.epochs:
        parser.error("--at-once would give each training a part of the --seconds; say --epochs")
    run = Run(load(options.run_file, []))
    folder = run.folder / "acceptance"
    folder.mkdir(exist_ok=True)
    texts = written(run, options, folder / "answers.json")
    states = {name: captured(run, [[*row["prompt"], *row["answer"]] for row in rows]) for name, rows in texts.items()}
    budget = ["--seconds", f"{options.seconds:g}"] if options.seconds else ["--epochs", f"{options.epochs}"]
    drafts = [
        Contender(folder, *contender.split("=", 1), seed, budget) for seed in options.seeds for contender in options.contender or CONTENDERS
        if seed == options.seeds[0] or not Path(contender.partition("=")[2]).is_dir()
    ]  # fmt: skip
    results = []
    for start in range(0, len(drafts), options.at_once):
        together = drafts[start : start + options.at_once]
        with ThreadPoolExecutor(options.at_once) as pool:
            trainings = list(pool.map(lambda draft: draft.trained(run), together))
        for draft, trained in zip(together, trainings, strict=True):
            found = trained if "lengths" in trained else {**trained, "lengths": measured(run, draft.folder, texts, states)}
            write_json(draft.result, found)
            for number in options.serve if draft.seed == options.seeds[0] else []:
                key = f"served with {number}"
                if key not in found:
                    found[key] = served(run, draft.folder, texts["greedy"], number, options.answer_tokens, draft.result.with_name("server.log"))
                    write_json(draft.result, found)
            results.append(found)
            tell(found)
    table(results)


class Contender:
    def __init__(self, folder: Path, name: str, command: str, seed: int, budget: list[str]) -> None:
        self.name, self.command, self.seed, self.budget = name, command, seed, budget
        self.finished = Path(command).is_dir()
        self.result = folder / (name if self.finished else f"{name}-{'-'.join(budget).strip('-')}-seed-{seed}") / "result.json"
        self.folder = Path(command) if self.finished else self.result.parent

    def trained(self, run: Run) -> dict[str, Any]:
        """What is known of it: name, seed and how it was trained, now or before."""
        if self.result.exists() and not self.finished:  # what stands in the folder of a finished one may have changed
            return dict(read_json(self.result))
        self.result.parent.mkdir(exist_ok=True)
        known: dict[str, Any] = {"name": self.name, "seed": self.seed}
        if not self.finished:
            known |= train(run, self.command, self.folder, [*self.budget, "--seed", f"{self.seed}"])
            write_json(self.result, known)
        return known


def written(run: Run, options: argparse.Namespace, path: Path) -> dict[str, list[dict[str, Any]]]:
    """The target's answers, greedy and drawn: rows of set, prompt and answer."""
    if path.exists():
        return dict(read_json(path))
    chat, spec = load_chat(run.spec, run.config.target.trust_remote_code), run.spec
    prompts: list[tuple[str, Prompt]] = []
    for source in options.prompts or run.config.evaluate.prompts:
        name = Path(source).stem
        found = read_prompts([source], 1 << 30, chat, spec.max_length - options.answer_tokens)
        prompts += [(name, prompt) for prompt in found[: options.per_set]]
    texts = {}
    engine = open_engine(run.config, spec, path.with_name("engine.log"), lambda line: None)
    for name, temperature in TEMPERATURES.items():
        answers = []
        for start in range(0, len(prompts), 256):
            part = [prompt.tokens for _, prompt in prompts[start : start + 256]]
            answers += engine.generate(part, Sampling(options.answer_tokens, temperature, 1.0, 0))
        pairs = zip(prompts, answers, strict=True)
        texts[name] = [{"set": set_name, "prompt": prompt.tokens, "answer": answer.tokens} for (set_name, prompt), answer in pairs]
    engine.close()
    write_json(path, texts)
    return texts


def captured(run: Run, texts: list[list[int]]) -> list[torch.Tensor]:
    """The target's states on each text, at the run's three aux layers and the last; by transformers, in the dtype of the run file."""
    device = resolve_device(run.config.target.device)
    engine = TransformersEngine(run.spec, device, resolve_dtype(run.config.target.dtype, device), run.config.target.trust_remote_code)
    layers = [*run.settings["extract"]["features"]["layers"], run.spec.num_layers]
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    states: dict[int, torch.Tensor] = {}
    for batch in batches([len(texts[number]) for number in order], tokens_at_once(device)):
        numbers = [order[place] for place in batch]
        states.update(zip(numbers, engine.capture([texts[number] for number in numbers], layers), strict=True))
    return [states[number] for number in range(len(texts))]


def tokens_at_once(device: torch.device) -> int:
    return 16384 if device.type == "cuda" else 2048


def train(run: Run, command: str, draft: Path, budget: list[str]) -> dict[str, Any]:
    script, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, HERE / script, run.folder, draft, "--target", run.spec.path, *budget, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measured(run: Run, draft: Path, texts: dict[str, list[dict[str, Any]]], states: dict[str, list[torch.Tensor]]) -> dict[str, dict[str, dict[str, float]]]:
    """Acceptance lengths: of greedy and drawn answers, by set and in the mean of the sets, by draft tokens. The draft proposes its likeliest token always."""
    device, head = resolve_device(run.config.target.device), read_head(run.spec)
    dtype = resolve_dtype(run.config.target.dtype, device)
    exported, embedding = load_export(draft), head.embedding.to(dtype)
    model, ids = exported.draft.to(device, dtype), exported.ids.to(device)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, rows in texts.items():
        sums: dict[str, dict[int, Acceptance]] = {}
        for numbers in batches([len(row["prompt"]) + len(row["answer"]) for row in rows], tokens_at_once(device)):
            batch = make_batch([as_row(rows[number], states[kind][number]) for number in numbers], embedding, max(DRAFT_TOKENS), dtype).to(device)
            for number, seen in zip(numbers, foresee(model, ids, batch, max(DRAFT_TOKENS)), strict=True):
                part = sums.setdefault(rows[number]["set"], {k: nothing(k) for k in DRAFT_TOKENS})
                for k in DRAFT_TOKENS:
                    part[k] = part[k] + seen.acceptance(k)
        found[kind] = {name: {f"{number}": total.length or 0.0 for number, total in part.items()} for name, part in sums.items()}
        found[kind]["mean"] = {f"{number}": mean(part[f"{number}"] for part in found[kind].values()) for number in DRAFT_TOKENS}
    return found


def as_row(text: dict[str, Any], states_TLD: torch.Tensor) -> FeatureRow:
    """The answer supervised."""
    tokens = torch.tensor([*text["prompt"], *text["answer"]], dtype=torch.int32)
    return FeatureRow("", tokens, torch.arange(len(tokens)) >= len(text["prompt"]), states_TLD[:, :3], states_TLD[:, 3])


def served(run: Run, draft: Path, rows: list[dict[str, Any]], num_draft_tokens: int, answer_tokens: int, log: Path) -> dict[str, Any]:
    """What vLLM's own counters say over the same prompts, by set, and in the mean of the sets."""
    target, stops = run.config.target, list(run.spec.stop_ids)
    dtype = str(resolve_dtype(target.dtype, resolve_device(target.device))).removeprefix("torch.")
    longest = max(len(row["prompt"]) for row in rows) + answer_tokens + num_draft_tokens + 1
    arguments = server_arguments(target, run.spec.path, dtype, min(longest, run.spec.max_length), draft, num_draft_tokens)
    lengths: dict[str, float] = {}
    with Server(target.python, arguments, log, lambda line: None) as server, ThreadPoolExecutor(SLOTS) as pool:
        for name in dict.fromkeys(row["set"] for row in rows):
            before = server.counters(num_draft_tokens)
            list(pool.map(lambda row: server.complete(row["prompt"], answer_tokens, stops, 0.0), [row for row in rows if row["set"] == name]))
            after = server.counters(num_draft_tokens)
            lengths[name] = 1 + (sum(after.accepted) - sum(before.accepted)) / (after.rounds - before.rounds)
    return {**lengths, "mean": mean(lengths.values())}


def tell(found: dict[str, Any]) -> None:
    greedy, drawn = found["lengths"]["greedy"], found["lengths"]["at 1"]["mean"]
    trained = "finished"
    if "steps" in found:
        trained = f"seed {found['seed']}: {found['tokens'] / 1e6:.2f}M tokens, {found['steps']} steps, {found['seconds']:.0f} s and "
        trained += f"{found['compile_seconds']:.0f} s of compiling"
    print(
        f"{found['name']} {trained}; greedy " + "  ".join(f"{name} {joined(part)}" for name, part in greedy.items())
        + f"; at temperature 1 {joined(drawn)}",
        flush=True,
    )  # fmt: skip
    for key in sorted(key for key in found if key.startswith("served")):
        print(f"  {key} draft tokens by vLLM: " + "  ".join(f"{name} {value:.3f}" for name, value in found[key].items()), flush=True)


def joined(part: dict[str, float]) -> str:
    return " / ".join(f"{part[f'{number}']:.3f}" for number in DRAFT_TOKENS)


def table(results: list[dict[str, Any]]) -> None:
    """In the mean over sets; over seeds, the mean and the two ends."""
    print(f"\n{'acceptance length, mean of the sets':40}" + "".join(f"{f'{kind}, {number} drafted':>26}" for kind in TEMPERATURES for number in DRAFT_TOKENS))
    for name in dict.fromkeys(found["name"] for found in results):
        cells = []
        for kind in TEMPERATURES:
            for number in DRAFT_TOKENS:
                values = [found["lengths"][kind]["mean"][f"{number}"] for found in results if found["name"] == name]
                cells.append(f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"{name:40}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

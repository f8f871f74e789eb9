"""The stage `evaluate`: the exported draft on prompts that training never saw -> evaluate/summary.json.

Each prompt is answered twice by the same target in the same process, plainly and with the draft, greedily; then the acceptance is simulated
from the answer's features. rows.jsonl keeps a line a prompt, so that an interrupted evaluation goes on with the next.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eyas.artifact import hash_file, hash_json, whole_lines, write_json
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.evaluate.simulate import Acceptance, nothing, simulate
from eyas.evaluate.speculate import plain_decode, speculative_decode
from eyas.export.check import ExportedDraft, load_export
from eyas.features.shard import FeatureRow
from eyas.prepare.chat import Chat, load_chat
from eyas.prepare.run import PROMPTS, read_rows
from eyas.prepare.sources import read_conversations, source_hashes
from eyas.stage import Context, Result
from eyas.target.embeddings import read_head
from eyas.target.engine import resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec
from eyas.target.transformers_engine import TransformersEngine
from eyas.train.batch import make_batch

ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    tokens: list[int]


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    return {
        "evaluate": {
            **config.evaluate.model_dump(exclude={"prompts"}),
            "dtype": str(resolve_dtype(config.evaluate.dtype, resolve_device(config.target.device))),
        },
        "prompts": source_hashes(config.evaluate.prompts, hash_file),
        "target": dict(spec.fingerprint),
    }


def work(context: Context) -> Result:
    config, spec, section = context.config, context.spec, context.config.evaluate
    chat = load_chat(spec, config.target.trust_remote_code)
    prompts = read_prompts(
        section.prompts or [str(context.run_folder / "prepare" / PROMPTS)], section.prompts_per_category, chat, spec.max_length - section.max_new_tokens
    )
    exported = load_export(context.folder.parent / "export" / "vllm")
    device = resolve_device(config.target.device)
    dtype = resolve_dtype(section.dtype, device)
    engine = TransformersEngine(spec, device, dtype, config.target.trust_remote_code)
    engine.attend_row_by_row()
    embedding = read_head(spec).embedding.to(device, dtype)
    exported = ExportedDraft(exported.draft.to(device, dtype), exported.ids.to(device))
    done = _read_rows(context.folder / ROWS)
    with context.reporter.task(context.folder, "evaluate", len(prompts), "prompts") as task, open(context.folder / ROWS, "ab") as file:
        task.skip(sum(prompt.id in done for prompt in prompts))
        todo = [prompt for prompt in prompts if prompt.id not in done]
        if todo:  # the first forward pays for what is set up once
            _measure(engine, exported, embedding, todo[0], chat.stop_ids, min(8, section.max_new_tokens), section.num_draft_tokens, False)
        for number, prompt in enumerate(todo):
            row = _measure(engine, exported, embedding, prompt, chat.stop_ids, section.max_new_tokens, section.num_draft_tokens, number % 2 == 1)
            done[prompt.id] = row
            file.write((json.dumps(row) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
            task.advance(1, f"acceptance length {_acceptance(row['measured']).length or 0:.2f} on {prompt.id}")
    rows = [done[prompt.id] for prompt in prompts]
    summary = {
        "engine": "transformers",
        "num_draft_tokens": section.num_draft_tokens,
        "temperature": 0.0,
        "sampling": "greedy",
        "dtype": str(dtype).removeprefix("torch."),
        "max_new_tokens": section.max_new_tokens,
        "prompts_seen_in_training": _seen_in_training(prompts, context.run_folder / "prepare"),
        **_summary(rows, section.num_draft_tokens),
        "by_category": {
            category: _summary([row for row in rows if row["category"] == category], section.num_draft_tokens)
            for category in dict.fromkeys(row["category"] for row in rows)
        },
    }
    write_json(context.folder / "summary.json", summary)
    _report(summary, context)
    return Result(
        {key: summary[key] for key in ("num_prompts", "num_tokens", "acceptance_length", "simulated_acceptance_length", "greedy_identical")},
        content=hash_json(summary),
    )


def read_prompts(paths: list[str], per_category: int, chat: Chat, max_length: int) -> list[Prompt]:
    """The first turn of each row as the token ids that a server would be given. Raises UserError if there is none, or one is too long."""
    prompts: list[Prompt] = []
    taken: dict[str, int] = {}
    for conversation in read_conversations(paths):
        turn = next((message for message in conversation.messages if message["role"] == "user"), None)
        category = conversation.category or "all"
        if turn is None or taken.get(category, 0) >= per_category:
            continue
        tokens = chat.prompt_ids([turn])
        if len(tokens) > max_length:
            raise UserError(
                f"{conversation.where}: its prompt has {len(tokens):,} tokens; with the answer that is more than the target takes. Remove the row, or "
                f"lower evaluate.max_new_tokens."
            )
        taken[category] = taken.get(category, 0) + 1
        prompts.append(Prompt(f"{category}/{conversation.id}", category, tokens))
    if not prompts:
        raise UserError(f"There are no prompts to evaluate on in {', '.join(paths)}. Give some in evaluate.prompts, or set data.holdout above 0.")
    return prompts


def _measure(
    engine: TransformersEngine,
    exported: ExportedDraft,
    embedding: torch.Tensor,
    prompt: Prompt,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    num_draft_tokens: int,
    draft_first: bool,
) -> dict[str, Any]:
    """Both decodings of one prompt, in turns first, so that neither always finds the machine warm."""

    def plain() -> Any:
        return plain_decode(engine, prompt.tokens, stop_ids, max_new_tokens)

    def drafted() -> Any:
        return speculative_decode(engine, exported.draft, embedding, exported.ids, prompt.tokens, stop_ids, max_new_tokens, num_draft_tokens)

    if draft_first:
        second, first = drafted(), plain()
    else:
        first, second = plain(), drafted()
    return {
        "id": prompt.id,
        "category": prompt.category,
        "prompt": prompt.tokens,
        "answer": first.tokens,
        "identical": first.tokens == second.tokens,
        "smallest_margin": first.smallest_margin,
        "plain_seconds": first.seconds,
        "seconds": second.seconds,
        "drafted_tokens": len(second.tokens),
        "measured": asdict(second.acceptance),
        "simulated": asdict(_simulated(engine, exported, embedding, prompt.tokens, first.tokens, num_draft_tokens)),
    }


def _simulated(
    engine: TransformersEngine, exported: ExportedDraft, embedding: torch.Tensor, prompt: list[int], answer: list[int], num_draft_tokens: int
) -> Acceptance:
    text = [*prompt, *answer]
    (states_TLD,) = engine.capture([text], [*exported.draft.shape.aux_layers, engine.spec.num_layers])
    supervised = torch.arange(len(text)) >= len(prompt)
    row = FeatureRow("", torch.tensor(text, dtype=torch.int32), supervised, states_TLD[:, :3], states_TLD[:, 3])
    batch = make_batch([row], num_draft_tokens, embedding.dtype).to(embedding.device)
    return simulate(exported.draft, embedding, exported.ids, batch, num_draft_tokens)[0]


def _acceptance(values: dict[str, Any]) -> Acceptance:
    return Acceptance(values["rounds"], tuple(values["drafted"]), tuple(values["accepted"]))


def _summary(rows: list[dict[str, Any]], num_draft_tokens: int) -> dict[str, Any]:
    measured, simulated = nothing(num_draft_tokens), nothing(num_draft_tokens)
    for row in rows:
        measured, simulated = measured + _acceptance(row["measured"]), simulated + _acceptance(row["simulated"])
    plain = sum(len(row["answer"]) for row in rows) / sum(row["plain_seconds"] for row in rows)
    drafted = sum(row["drafted_tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    return {
        "num_prompts": len(rows),
        "num_tokens": sum(len(row["answer"]) for row in rows),
        "rounds": measured.rounds,
        "acceptance_length": measured.length,
        "simulated_acceptance_length": simulated.length,
        "per_position": measured.per_position,
        "survival": measured.survival,
        "greedy_identical": all(row["identical"] for row in rows),
        "prompts_that_differ": [{"id": row["id"], "smallest_margin": row["smallest_margin"]} for row in rows if not row["identical"]],
        "tokens_per_second": drafted,
        "plain_tokens_per_second": plain,
        "speedup": drafted / plain,
    }


def _seen_in_training(prompts: list[Prompt], prepare_folder: Path) -> list[str]:
    """The prompts with which some training row begins: their figures would flatter the draft."""
    wanted = {torch.tensor(prompt.tokens, dtype=torch.int32).numpy().tobytes(): prompt.id for prompt in prompts}
    lengths = sorted({len(key) for key in wanted})
    seen: set[str] = set()
    for row in read_rows(prepare_folder):
        if not row.holdout:
            data = row.tokens.numpy().tobytes()
            seen.update(wanted[data[:length]] for length in lengths if data[:length] in wanted)
    return sorted(seen)


def _read_rows(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in whole_lines(path)]
    return {row["id"]: row for row in rows}


def _report(summary: dict[str, Any], context: Context) -> None:
    k = summary["num_draft_tokens"]
    table = Table(title=f"Held-out prompts, {k} draft tokens, greedy", title_justify="left", box=None, pad_edge=False)
    for name in ("category", "prompts", "tokens", "acceptance length", "simulated", "per position", "same tokens", "tokens/s plain", "with draft", "speedup"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for category, part in [*summary["by_category"].items(), ("all", summary)]:
        rates = " ".join("-" if rate is None else f"{rate:.0%}" for rate in part["per_position"])
        length, simulated = (f"{value:.2f}" if value else "-" for value in (part["acceptance_length"], part["simulated_acceptance_length"]))
        table.add_row(
            category, f"{part['num_prompts']}", f"{part['num_tokens']:,}", length, simulated, rates, "yes" if part["greedy_identical"] else "NO",
            f"{part['plain_tokens_per_second']:.1f}", f"{part['tokens_per_second']:.1f}", f"{part['speedup']:.2f}x",
        )  # fmt: skip
    Console(width=max(120, Console().width)).print(table)
    say = context.reporter.say
    for entry in summary["prompts_that_differ"]:
        say(
            f"evaluate: {entry['id']}: the texts part; the target's two best tokens came as close as {entry['smallest_margin']:.2g} in logit"
            + (", which is rounding" if entry["smallest_margin"] < 1e-3 else "")
        )
    if summary["prompts_seen_in_training"]:
        say(
            f"evaluate: warning: {len(summary['prompts_seen_in_training'])} of the prompts were also trained on "
            f"({summary['prompts_seen_in_training'][0]}, ...): their figures flatter the draft"
        )
    say(
        f"evaluate: acceptance length {summary['acceptance_length'] or 0:.3f} (simulated {summary['simulated_acceptance_length'] or 0:.3f}), "
        f"{summary['speedup']:.2f} times the plain speed; {context.folder / 'summary.json'}"
    )

"""Measured in this process: each prompt is answered plainly and with the draft by the same target, then simulated from the answer's features.

rows.jsonl keeps a line a prompt, so that an interrupted evaluation goes on with the next.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eyas.artifact import append_lines, whole_lines
from eyas.evaluate.prompts import Prompt
from eyas.evaluate.simulate import Acceptance, interval, nothing, simulate_answer
from eyas.evaluate.speculate import plain_decode, speculative_decode
from eyas.evaluate.suspects import told_suspects
from eyas.export.check import ExportedDraft
from eyas.prepare.chat import Chat
from eyas.stage import Context
from eyas.target.embeddings import read_head
from eyas.target.engine import resolve_device
from eyas.target.transformers_engine import TransformersEngine

ROWS = "rows.jsonl"


def measure_in_process(context: Context, prompts: list[Prompt], exported: ExportedDraft, chat: Chat, dtype: torch.dtype) -> dict[str, Any]:
    """The part of summary.json that depends on how the draft was run."""
    section, k = context.config.evaluate, context.config.evaluate.num_draft_tokens
    device = resolve_device(context.config.target.device)
    engine = TransformersEngine(context.spec, device, dtype, context.config.target.trust_remote_code)
    engine.attend_row_by_row()
    layers = [*exported.draft.shape.aux_layers, context.spec.num_layers]
    faults = told_suspects(context, layers, list(range(context.spec.num_layers + 1)), engine.capture, chat)
    embedding = read_head(context.spec).embedding.to(device, dtype)
    exported = ExportedDraft(exported.draft.to(device, dtype), exported.ids.to(device))
    done = _read_rows(context.folder / ROWS)
    with context.reporter.task(context.folder, "evaluate", len(prompts), "prompts") as task:
        task.skip(sum(prompt.id in done for prompt in prompts))
        todo = [prompt for prompt in prompts if prompt.id not in done]
        if todo:  # the first forward pays for what is set up once
            _measure(engine, exported, embedding, todo[0], chat.stop_ids, min(8, section.max_new_tokens), k, False)
        for number, prompt in enumerate(todo):
            row = _measure(engine, exported, embedding, prompt, chat.stop_ids, section.max_new_tokens, k, number % 2 == 1)
            done[prompt.id] = row
            append_lines(context.folder / ROWS, [row])
            task.advance(1, f"acceptance length {Acceptance.of(row['measured']).length or 0:.2f} on {prompt.id}")
    rows = [done[prompt.id] for prompt in prompts]
    return {
        **_summary(rows, k),
        "suspects": faults,
        "by_category": {
            category: _summary([row for row in rows if row["category"] == category], k) for category in dict.fromkeys(row["category"] for row in rows)
        },
    }


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
    (states_TLD,) = engine.capture([[*prompt.tokens, *first.tokens]], [*exported.draft.shape.aux_layers, engine.spec.num_layers])
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
        "simulated": asdict(simulate_answer(states_TLD, exported, embedding, prompt.tokens, first.tokens, num_draft_tokens)),
    }


def _summary(rows: list[dict[str, Any]], num_draft_tokens: int) -> dict[str, Any]:
    measured, simulated = nothing(num_draft_tokens), nothing(num_draft_tokens)
    for row in rows:
        measured, simulated = measured + Acceptance.of(row["measured"]), simulated + Acceptance.of(row["simulated"])
    plain = sum(len(row["answer"]) for row in rows) / sum(row["plain_seconds"] for row in rows)
    drafted = sum(row["drafted_tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    return {
        "num_prompts": len(rows),
        "num_tokens": sum(len(row["answer"]) for row in rows),
        "rounds": measured.rounds,
        "acceptance_length": measured.length,
        "simulated_acceptance_length": simulated.length,
        "simulated_interval": interval([Acceptance.of(row["simulated"]) for row in rows]),
        "per_position": measured.per_position,
        "survival": measured.survival,
        "greedy_identical": all(row["identical"] for row in rows),
        "prompts_that_differ": [{"id": row["id"], "smallest_margin": row["smallest_margin"]} for row in rows if not row["identical"]],
        "tokens_per_second": drafted,
        "plain_tokens_per_second": plain,
        "speedup": drafted / plain,
    }


def _read_rows(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in whole_lines(path)]
    return {row["id"]: row for row in rows}

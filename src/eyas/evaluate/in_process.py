"""Measured in this process: each prompt is answered plainly and with the draft by the same target, then simulated from the features of the answer.

rows.jsonl keeps a line a prompt, so that an interrupted evaluation goes on with the next.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.artifact import append_lines, hash_json, whole_lines
from eyas.config import EvaluateSection
from eyas.evaluate.fairness import judged
from eyas.evaluate.outlook import by_length, deepest, outlook, seen
from eyas.evaluate.prompts import Prompt
from eyas.evaluate.simulate import Acceptance, Simulator, interval, nothing
from eyas.evaluate.speculate import Choose, Decoded, chooser, plain_decode, speculative_decode
from eyas.evaluate.suspects import told_suspects
from eyas.export.check import ExportedDraft
from eyas.prepare.chat import Chat
from eyas.stage import Context
from eyas.target.embeddings import read_head
from eyas.target.engine import resolve_device
from eyas.target.transformers_engine import TransformersEngine

ROWS = "rows.jsonl"


def measure_in_process(
    context: Context, prompts: list[Prompt], exported: ExportedDraft, chat: Chat, dtype: torch.dtype
) -> tuple[dict[str, Any], list[tuple[list[int], list[int]]]]:
    """The part of summary.json that depends on how the draft was run; and each prompt with its answer."""
    section, k = context.config.evaluate, context.config.evaluate.num_draft_tokens
    device = resolve_device(context.config.target.device)
    engine = TransformersEngine(context.spec, device, dtype, context.config.target.trust_remote_code)
    engine.attend_row_by_row()
    layers = [*exported.draft.shape.aux_layers, context.spec.num_layers]
    faults = told_suspects(context, layers, list(range(context.spec.num_layers + 1)), engine.capture, chat)
    simulator = Simulator.of(exported, read_head(context.spec), section.temperature, dtype, device)
    measurement = Measurement(engine, simulator, chat.stop_ids, section, context.config.run.seed)
    done = _read_rows(context.folder / ROWS)
    with context.reporter.task(context.folder, "evaluate", len(prompts), "prompts") as task:
        task.skip(sum(prompt.id in done for prompt in prompts))
        todo = [prompt for prompt in prompts if prompt.id not in done]
        if todo:  # the first forward pays for what is set up once
            measurement.row(todo[0], min(8, section.max_new_tokens), draft_first=False)
        for number, prompt in enumerate(todo):
            row = measurement.row(prompt, section.max_new_tokens, draft_first=number % 2 == 1)
            done[prompt.id] = row
            append_lines(context.folder / ROWS, [row])
            task.advance(1, f"acceptance length {Acceptance.of(row['measured']).length or 0:.2f} on {prompt.id}")
    rows = [done[prompt.id] for prompt in prompts]
    fairness = judged(row["sampled"] for row in rows if row["sampled"])
    found = {
        **_summary(rows, k),
        "suspects": faults,
        "fairness": fairness and asdict(fairness),
        "by_prompt_length": by_length([len(row["prompt"]) for row in rows], [Acceptance.of(row["simulated"]) for row in rows], k),
        "by_category": {
            category: _summary([row for row in rows if row["category"] == category], k) for category in dict.fromkeys(row["category"] for row in rows)
        },
    }
    return found, [(row["prompt"], row["answer"]) for row in rows]


@dataclass(frozen=True)
class Measurement:
    engine: TransformersEngine
    simulator: Simulator
    stop_ids: frozenset[int]
    section: EvaluateSection
    seed: int

    def row(self, prompt: Prompt, max_new_tokens: int, draft_first: bool) -> dict[str, Any]:
        """Both decodings of one prompt, in turns first, so that neither always finds the machine warm."""
        engine, section, exported = self.engine, self.section, self.simulator.exported
        k = section.num_draft_tokens

        def choose(side: str) -> Choose:
            return chooser(section.temperature, int(hash_json([self.seed, prompt.id, side])[:8], 16))

        def plain() -> Decoded:
            return plain_decode(engine, prompt.tokens, self.stop_ids, max_new_tokens, choose("plain"))

        def drafted() -> Decoded:
            return speculative_decode(
                engine, exported.draft, self.simulator.embedding, exported.ids, prompt.tokens, self.stop_ids, max_new_tokens, k, choose("draft")
            )

        if draft_first:
            second, first = drafted(), plain()
        else:
            first, second = plain(), drafted()
        answer = second.tokens  # a sampled text is another each time; the rounds to foresee are those that wrote this one
        (states_TLD,) = engine.capture([[*prompt.tokens, *answer]], [*exported.draft.shape.aux_layers, engine.spec.num_layers])
        found = self.simulator.foresee(states_TLD, prompt.tokens, answer, deepest(k))
        return {
            "id": prompt.id,
            "category": prompt.category,
            "prompt": prompt.tokens,
            "answer": answer,
            "identical": first.tokens == answer if section.temperature == 0 else None,
            "smallest_margin": first.smallest_margin,
            "plain_seconds": first.seconds,
            "plain_tokens": len(first.tokens),
            "seconds": second.seconds,
            "measured": asdict(second.acceptance),
            "simulated": asdict(found.acceptance(k)),
            "seen": seen(found, k),
            "sampled": found.sampled,
        }


def _summary(rows: list[dict[str, Any]], num_draft_tokens: int) -> dict[str, Any]:
    measured, simulated = nothing(num_draft_tokens), nothing(num_draft_tokens)
    for row in rows:
        measured, simulated = measured + Acceptance.of(row["measured"]), simulated + Acceptance.of(row["simulated"])
    plain = sum(row["plain_tokens"] for row in rows) / sum(row["plain_seconds"] for row in rows)
    drafted = sum(len(row["answer"]) for row in rows) / sum(row["seconds"] for row in rows)
    return {
        "num_prompts": len(rows),
        "num_tokens": sum(len(row["answer"]) for row in rows),
        "rounds": measured.rounds,
        "acceptance_length": measured.length,
        "simulated_acceptance_length": simulated.length,
        "simulated_interval": interval([Acceptance.of(row["simulated"]) for row in rows]),
        "per_position": measured.per_position,
        "survival": measured.survival,
        "greedy_identical": None if rows[0]["identical"] is None else all(row["identical"] for row in rows),
        "prompts_that_differ": [{"id": row["id"], "smallest_margin": row["smallest_margin"]} for row in rows if row["identical"] is False],
        "tokens_per_second": drafted,
        "plain_tokens_per_second": plain,
        "speedup": drafted / plain,
        "outlook": outlook([row["seen"] for row in rows], measured, drafted, plain),
    }


def _read_rows(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in whole_lines(path)]
    return {row["id"]: row for row in rows}

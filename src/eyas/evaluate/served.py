"""Measured as a user's server will show it: a stock vLLM answers all prompts with the draft, then another without.

served.jsonl keeps a line for each finished part, so that an interrupted evaluation repeats none:

    draft 1 CATEGORY    the prompts of a category one after another, with the draft: answers, seconds, vLLM's counters
    draft C             C requests at a time
    plain ...           the same without the draft
    ties                where the answers part, how near the target alone holds the two tokens to be
    fairness            of sampled answers: whether they are the target's own (fairness.py)
    suspects            what of the stored features is not what the target gives now (suspects.py)
    simulated, seen     what the features of the answers with the draft give: the acceptance, and that of other settings (outlook.py), a value a prompt
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.artifact import append_lines, whole_lines
from eyas.config import EvaluateSection
from eyas.evaluate.fairness import judged
from eyas.evaluate.outlook import by_length, deepest, outlook, seen
from eyas.evaluate.prompts import Prompt
from eyas.evaluate.serve import Server, between, server_arguments
from eyas.evaluate.simulate import Acceptance, Simulator, interval, nothing
from eyas.evaluate.suspects import told_suspects
from eyas.export.check import ExportedDraft
from eyas.prepare.chat import Chat
from eyas.progress import Task
from eyas.stage import Context
from eyas.target.embeddings import read_head
from eyas.target.engine import TargetEngine, open_engine, resolve_device
from eyas.target.transformers_engine import batches

PARTS = "served.jsonl"
WARM_UP_TOKENS = 8
# Nats. bfloat16 holds logits from 16 to 32, where the likeliest tokens' mostly lie, in steps of 0.125, and each of two may be off by one. Measured on
# SmolLM2-135M: the gap between the best two is off by 0.06 in the median, 0.2 in 95 of 100 places, 0.34 at most.
TIE_NATS = {torch.bfloat16: 0.25, torch.float32: 1e-3}


@dataclass(frozen=True)
class Pass:
    """Requests measured together, at most `concurrency` of them in flight."""

    name: str
    concurrency: int
    prompts: list[Prompt]


class Parts:
    """The finished parts by name, kept in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        for line in whole_lines(path):
            self.found.update(json.loads(line))

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def keep(self, name: str, value: Any) -> None:
        append_lines(self.path, [{name: value}])
        self.found[name] = value


def plan_passes(prompts: list[Prompt], concurrency: list[int]) -> list[Pass]:
    """One at a time by category, which is the main figure; then each concurrency over all prompts, repeated until every slot has two requests."""
    passes = [Pass(f"1 {category}", 1, [p for p in prompts if p.category == category]) for category in dict.fromkeys(p.category for p in prompts)]
    for level in sorted({1, *concurrency} - {1}):
        passes.append(Pass(f"{level}", level, list(itertools.islice(itertools.cycle(prompts), max(len(prompts), 2 * level)))))
    return passes


def serve_passes(context: Context, prompts: list[Prompt], stop_ids: frozenset[int], dtype: torch.dtype) -> Parts:
    """Serves all that is not served yet, first with the draft. Raises UserError if a server does not start, or dies."""
    section, parts = context.config.evaluate, Parts(context.folder / PARTS)
    passes = plan_passes(prompts, section.concurrency)
    stops = sorted(stop_ids)
    k = section.num_draft_tokens
    with context.reporter.task(context.folder, "evaluate", 2 * sum(len(each.prompts) for each in passes), "answers") as task:
        for side in ("draft", "plain"):
            draft = side == "draft"
            todo = [each for each in passes if f"{side} {each.name}" not in parts]
            task.skip(sum(len(each.prompts) for each in passes) - sum(len(each.prompts) for each in todo))
            if not todo and (draft or "ties" in parts):
                continue
            with _server(context, prompts, dtype, side, task) as server:
                ask, warm = partial(_answer, server, stops, section.temperature), 0
                for each in todo:
                    if warm < each.concurrency:  # what a server sets up at its first requests is not measured
                        warm = each.concurrency
                        ask(Pass("", warm, each.prompts[:warm]), min(WARM_UP_TOKENS, section.max_new_tokens), None)
                    before = server.counters(k) if draft else nothing(k)
                    answers, seconds = ask(each, section.max_new_tokens, task)
                    found = {
                        "num_tokens": sum(len(answer) for answer in answers),
                        "seconds": seconds,
                        "acceptance": asdict(between(server.counters(k), before)) if draft else None,
                        "vllm": server.version,
                        "answers": answers if each.concurrency == 1 else None,
                    }
                    parts.keep(f"{side} {each.name}", found)
                if not draft:
                    parts.keep("ties", _ties(server, passes, parts, TIE_NATS[dtype]) if section.temperature == 0 else [])
    return parts


def _server(context: Context, prompts: list[Prompt], dtype: torch.dtype, side: str, task: Task) -> Server:
    """side: "draft", with the exported draft, or "plain"."""
    section, target = context.config.evaluate, context.config.target
    # A round drafts a little beyond the end of the answer.
    longest = max(len(prompt.tokens) for prompt in prompts) + section.max_new_tokens + section.num_draft_tokens + 1
    draft = context.run_folder / "export" / "vllm" if side == "draft" else None
    name, longest = str(dtype).removeprefix("torch."), min(longest, context.spec.max_length)
    arguments = server_arguments(target, context.spec.path, name, longest, draft, section.num_draft_tokens)
    return Server(target.python, arguments, context.folder / f"server-{side}.log", lambda line: task.advance(0, line))


def serve_once(context: Context, prompts: list[Prompt], dtype: torch.dtype) -> Acceptance:
    """Whether vLLM serves target and draft at all: no plain server, no comparison. Raises UserError."""
    section = context.config.evaluate
    context.folder.mkdir(exist_ok=True)
    with context.reporter.task(context.folder, "evaluate", len(prompts), "answers") as task, _server(context, prompts, dtype, "draft", task) as server:
        _answer(server, [], 0.0, Pass("", 1, prompts), section.max_new_tokens, task)
        return server.counters(section.num_draft_tokens)


def simulate_passes(context: Context, prompts: list[Prompt], exported: ExportedDraft, chat: Chat, dtype: torch.dtype, parts: Parts) -> None:
    """The parts "simulated" and "seen": runs the target once more, in the engine of the run file, on the answers with the draft."""
    if "seen" in parts:
        return
    config, k = context.config, context.config.evaluate.num_draft_tokens
    answered = answers_with_draft(prompts, parts)
    texts = [[*prompt.tokens, *answer] for prompt, answer in answered]
    layers = [*exported.draft.shape.aux_layers, context.spec.num_layers]
    engine = engine_for(context, dtype, len(texts[-1]))
    with context.reporter.task(context.folder, "simulate", len(texts), "answers") as task:
        try:
            states = states_of(engine, texts, layers, config.features.batch_tokens, task.advance)
            faults = told_suspects(context, layers, layers, engine.capture, chat)  # one process taps one choice of layers
        finally:
            engine.close()  # its memory is wanted for the draft
        device = resolve_device(config.target.device)
        simulator = Simulator.of(exported, read_head(context.spec), config.evaluate.temperature, dtype, device)
        found = {
            prompt.id: simulator.foresee(states_TLD, prompt.tokens, answer, deepest(k)) for (prompt, answer), states_TLD in zip(answered, states, strict=True)
        }
    parts.keep("suspects", faults)
    parts.keep("fairness", (fairness := judged(each.sampled for each in found.values() if each.sampled)) and asdict(fairness))
    parts.keep("simulated", {name: asdict(each.acceptance(k)) for name, each in found.items()})
    parts.keep("seen", {name: seen(each, k) for name, each in found.items()})


def answers_with_draft(prompts: list[Prompt], parts: Parts) -> list[tuple[Prompt, list[int]]]:
    """In order of length."""
    answered = [pair for each in _single(prompts) for pair in zip(each.prompts, parts[f"draft {each.name}"]["answers"], strict=True)]
    return sorted(answered, key=lambda pair: len(pair[0].tokens) + len(pair[1]))


def states_of(
    engine: TargetEngine, texts: list[list[int]], layers: list[int], batch_tokens: int, advance: Callable[[int], None] = lambda rows: None
) -> list[torch.Tensor]:
    """The states [T, L, D] of each text, as many at once as fit into batch_tokens. advance: told of rows as they come."""
    states: list[torch.Tensor] = []
    for batch in batches([len(text) for text in texts], batch_tokens):
        states += engine.capture([texts[number] for number in batch], layers)
        advance(len(batch))
    return states


def engine_for(context: Context, dtype: torch.dtype, longest: int) -> TargetEngine:
    """The target in the run file's engine, in the dtype that it was served in, for texts of up to `longest` tokens."""
    config = context.config.model_copy(
        update={
            "target": context.config.target.model_copy(update={"dtype": str(dtype).removeprefix("torch.")}),
            "data": context.config.data.model_copy(update={"max_length": longest}),
        }
    )
    return open_engine(config, context.spec, context.folder / "engine.log", context.reporter.say)


def summarise(prompts: list[Prompt], section: EvaluateSection, parts: Parts) -> dict[str, Any]:
    """The part of summary.json that depends on how the draft was run; what is simulated is null until that is done."""
    passes = plan_passes(prompts, section.concurrency)
    single = _single(prompts)
    versions = dict.fromkeys(parts[f"{side} {each.name}"]["vllm"] for side in ("draft", "plain") for each in passes)
    levels = []
    for level in sorted({each.concurrency for each in passes}):
        figures = _figures([each for each in passes if each.concurrency == level], section, parts)
        answers = sum(len(each.prompts) for each in passes if each.concurrency == level)
        levels.append({"concurrency": level, "num_answers": answers, **{name: figures[name] for name in (*SPEEDS, "acceptance_length")}})
    return {
        "vllm_version": ", ".join(versions),
        "suspects": parts.found.get("suspects", []),
        "fairness": parts.found.get("fairness"),
        "by_prompt_length": by_length(*_simulated_lengths(prompts, parts), section.num_draft_tokens),
        **_figures(single, section, parts),
        "concurrency": levels,
        "by_category": {each.prompts[0].category: _figures([each], section, parts) for each in single},
    }


def _simulated_lengths(prompts: list[Prompt], parts: Parts) -> tuple[list[int], list[Acceptance]]:
    found = [prompt for prompt in prompts if "simulated" in parts]
    return [len(prompt.tokens) for prompt in found], [Acceptance.of(parts["simulated"][prompt.id]) for prompt in found]


SPEEDS = ("tokens_per_second", "plain_tokens_per_second", "speedup")


def _figures(passes: list[Pass], section: EvaluateSection, parts: Parts) -> dict[str, Any]:
    num_draft_tokens, greedy = section.num_draft_tokens, section.temperature == 0
    drafted, plain = ([parts[f"{side} {each.name}"] for each in passes] for side in ("draft", "plain"))
    ids = [prompt.id for each in passes for prompt in each.prompts]
    measured = sum((Acceptance.of(part["acceptance"]) for part in drafted), nothing(num_draft_tokens))
    simulations = [Acceptance.of(parts["simulated"][name]) for name in ids] if "simulated" in parts else []
    simulated = sum(simulations, nothing(num_draft_tokens))
    apart = [tie for tie in parts["ties"] if tie["id"] in ids]
    speed, plain_speed = (sum(part["num_tokens"] for part in side) / sum(part["seconds"] for part in side) for side in (drafted, plain))
    return {
        "num_prompts": len(ids),
        "num_tokens": sum(part["num_tokens"] for part in drafted),
        "rounds": measured.rounds,
        "acceptance_length": measured.length,
        "simulated_acceptance_length": simulated.length,
        "simulated_interval": interval(simulations),
        "per_position": measured.per_position,
        "survival": measured.survival,
        "greedy_identical": not apart if greedy else None,
        "num_identical": len(ids) - len(apart) if greedy else None,
        "prompts_that_differ": apart,
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed,
        "outlook": outlook([parts["seen"][name] for name in ids], measured, speed, plain_speed) if "seen" in parts else [],
    }


def _single(prompts: list[Prompt]) -> list[Pass]:
    return plan_passes(prompts, [])


def _answer(server: Server, stops: list[int], temperature: float, work: Pass, max_tokens: int, task: Task | None) -> tuple[list[list[int]], float]:
    """-> answers in order, wall-clock seconds from the first request to the last answer. A slot takes the next request when it has its answer."""
    answers: list[list[int]] = []
    pool = ThreadPoolExecutor(work.concurrency)
    began = time.monotonic()
    try:
        for answer in pool.map(lambda prompt: server.complete(prompt.tokens, max_tokens, stops, temperature), work.prompts):
            answers.append(answer)
            if task:
                task.advance(1, f"{work.concurrency} at once, {sum(map(len, answers)) / (time.monotonic() - began):,.1f} tokens/s")
        return answers, time.monotonic() - began
    finally:  # after Ctrl-C nobody waits for what is in flight: the server is stopped
        pool.shutdown(wait=False, cancel_futures=True)


def _ties(server: Server, passes: list[Pass], parts: Parts, limit: float) -> list[dict[str, Any]]:
    """For each prompt whose two answers part: where, and the log-probability of the plain token less that of the other, by the plain server; None if
    the other is not among the two likeliest there."""
    found = []
    for each in passes:
        if each.concurrency > 1:
            continue
        for prompt, plain, drafted in zip(each.prompts, *(parts[f"{side} {each.name}"]["answers"] for side in ("plain", "draft")), strict=True):
            if plain == drafted:
                continue
            both = min(len(plain), len(drafted))
            position = next((at for at in range(both) if plain[at] != drafted[at]), both)
            gap = None
            if position < both:
                best = server.best_two([*prompt.tokens, *plain[:position]])
                if plain[position] in best and drafted[position] in best:
                    gap = abs(best[plain[position]] - best[drafted[position]])
            found.append({"id": prompt.id, "position": position, "gap_nats": gap, "rounding": gap is not None and gap <= limit})
    return found

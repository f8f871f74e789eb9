"""The stage `evaluate`: the exported draft on prompts that training never saw -> evaluate/summary.json.

Each prompt is answered greedily twice, plainly and with the draft, in this process (in_process.py) or by a vLLM server (served.py); the acceptance is
also simulated from the answers' features.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from eyas.artifact import hash_file, hash_json, write_json
from eyas.config import RunConfig
from eyas.evaluate.in_process import measure_in_process
from eyas.evaluate.misread import Answered, explained
from eyas.evaluate.prompts import Prompt, read_prompts, seen_in_training
from eyas.evaluate.report import agrees, report
from eyas.evaluate.served import answers_with_draft, engine_for, serve_passes, simulate_passes, states_of, summarise
from eyas.evaluate.simulate import Acceptance, Simulator
from eyas.export.check import load_export
from eyas.prepare.chat import Chat, load_chat
from eyas.prepare.rows import PROMPTS
from eyas.prepare.sources import source_hashes
from eyas.stage import Context, Result
from eyas.target.embeddings import read_head
from eyas.target.engine import cpu_has, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec

COUNTS = ("num_prompts", "num_tokens", "acceptance_length", "simulated_acceptance_length", "greedy_identical")


def evaluation_dtype(config: RunConfig) -> torch.dtype:
    """In a server what the target is run in. In this process float32, where a forward of one token and of several choose alike; they do in bfloat16 where
    each row of a product rounds alone, which of all hardware AMX does."""
    device, asked = resolve_device(config.target.device), config.evaluate.dtype
    if config.evaluate.engine == "vllm":
        return resolve_dtype(asked or config.target.dtype, device)
    if asked == "auto":
        return torch.bfloat16 if device.type == "cpu" and cpu_has("amx_bf16") else torch.float32
    return resolve_dtype(asked or "float32", device)


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    section, target = config.evaluate, config.target
    found: dict[str, Any] = {
        "evaluate": {**section.model_dump(exclude={"prompts", "engine", "concurrency"}), "dtype": str(evaluation_dtype(config))},
        "prompts": source_hashes(section.prompts, hash_file),
        "target": dict(spec.fingerprint),
    }
    if config.data.chat_template_kwargs:
        found["chat_template_kwargs"] = config.data.chat_template_kwargs
    if section.engine == "vllm":
        found["evaluate"] |= {"engine": section.engine, "concurrency": sorted({1, *section.concurrency})}
        found["server"] = target.model_dump(include={"python", "tensor_parallel", "extra"})
    return found


def prompts_of(context: Context, chat: Chat) -> list[Prompt]:
    """Raises UserError if there are none."""
    section = context.config.evaluate
    paths = section.prompts or [str(context.run_folder / "prepare" / PROMPTS)]
    return read_prompts(paths, section.prompts_per_category, chat, context.spec.max_length - section.max_new_tokens)


def work(context: Context) -> Result:
    config, spec, section = context.config, context.spec, context.config.evaluate
    chat = load_chat(spec, config.target.trust_remote_code, config.data.chat_template_kwargs)
    prompts = prompts_of(context, chat)
    exported = load_export(context.run_folder / "export" / "vllm")
    dtype = evaluation_dtype(config)
    common = {
        "engine": section.engine,
        "num_draft_tokens": section.num_draft_tokens,
        "temperature": section.temperature,
        "sampling": "greedy" if section.temperature == 0 else "sampled, the draft greedy",
        "dtype": str(dtype).removeprefix("torch."),
        "max_new_tokens": section.max_new_tokens,
        "prompts_seen_in_training": seen_in_training(prompts, context.run_folder / "prepare"),
    }
    if section.engine == "vllm":
        parts = serve_passes(context, prompts, chat.stop_ids, dtype)
        write_json(context.folder / "summary.json", {**common, **summarise(prompts, section, parts)})  # stands, should the simulation fail
        simulate_passes(context, prompts, exported, chat, dtype, parts)
        summary = {**common, **summarise(prompts, section, parts)}
        answered = [(prompt.tokens, answer) for prompt, answer in answers_with_draft(prompts, parts)]
    else:
        measured, answered = measure_in_process(context, prompts, exported, chat, dtype)
        summary = {**common, **measured}
    summary["misread"] = [] if agrees(summary) else misread(context, summary, answered, dtype)
    write_json(context.folder / "summary.json", summary)
    report(summary, context)
    return Result({key: summary[key] for key in COUNTS}, content=hash_json(summary))


def misread(context: Context, summary: dict[str, Any], answered: Answered, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The ways of reading the draft that come nearest to what was served (misread.py)."""
    context.reporter.say("evaluate: what was served is not what the features give; looking for the mistake that would explain it")
    texts = [[*prompt, *answer] for prompt, answer in answered]

    def capture(layers: list[int]) -> list[torch.Tensor]:
        engine = engine_for(context, dtype, max(map(len, texts)))
        try:
            return states_of(engine, texts, layers, context.config.features.batch_tokens)
        finally:
            engine.close()

    folder, head = context.run_folder / "export" / "vllm", read_head(context.spec)
    simulator = Simulator.of(load_export(folder), head, 0.0, dtype, resolve_device(context.config.target.device))
    return [asdict(each) for each in explained(served_acceptance(summary), answered, capture, load_export(folder), simulator)]


def served_acceptance(summary: dict[str, Any]) -> Acceptance:
    """Its counters, from the shares of rounds that the summary gives."""
    accepted = tuple(round((share or 0.0) * summary["rounds"]) for share in summary["survival"])
    return Acceptance(summary["rounds"], (summary["rounds"], *accepted[:-1]), accepted)

"""The plan of a run: what it will read, hold, write and take, from config files and a look at the data. Nothing is loaded.

Every rule and every measured rate stands here with its source; docs/plan.md holds predictions against runs.

Legend: V target vocabulary, Vd draft vocabulary, D hidden width, K draft steps, T tokens of a batch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.artifact import read_manifest
from eyas.config import RunConfig
from eyas.draft.shape import DraftShape
from eyas.errors import UserError
from eyas.features import disk
from eyas.features.capture import token_bytes
from eyas.features.stream import gpus_to_train_on, quota
from eyas.foresight.finding import Finding, Level
from eyas.foresight.hardware import Hardware
from eyas.foresight.memory import extraction_memory, in_turns, row_cache, too_much, training_memory
from eyas.foresight.size import Size, describe_quantization, experts_used, num_experts, size_of
from eyas.foresight.tokens import Tokens, estimate
from eyas.prepare.chat import Chat, load_chat
from eyas.target.embeddings import IMPOSSIBLE, TAILS
from eyas.target.spec import TargetSpec
from eyas.train.distributed import num_processes
from eyas.train.loop import pays_as_graph
from eyas.train.run import shape_of
from eyas.vocab.run import draft_vocab_size

# Shares of the maker's bfloat16 rate that was reached on one H200 (989 TFLOP/s); docs/log.md has the runs.
EXTRACT_DENSE = 0.58  # Llama-8B shape, vLLM 0.25.1: 40,744 tokens/s with 7.0e9 weights met by each
EXTRACT_QUANTISED_EXPERTS = 0.096  # the founding case; three layers of its width with INT4 experts, one of them dense, reach 0.18 on one H200
WRITE = {"transformers": 0.32e9, "vllm": 3.5e9}  # bytes a second of features at most: SmolLM2-135M's; a target 7,168 wide
TRAIN = 0.57  # Llama-8B shape, K = 7, all supervised: 560 TFLOP/s
TRAIN_FLOAT8 = 1.22  # times as fast: 190.3 ms a step beside 231.7
LAUNCH = 0.009  # seconds that the CPU takes to give a GPU one draft step of one batch: of SmolLM2-135M's draft, K = 7, 65.4 ms where the products take less
LAUNCH_GRAPH = 0.0015  # as graphs: 10.6 ms of the same draft, 4,096 tokens
ROUGH = "the maker's rate, at the share that one H200 reached"
SHARE = 4096  # tokens of a step that keep a GPU busy
FEW_STEPS, LEAST_STEP = 700, 2048  # optimiser steps, and tokens of one: in fewer than that, half as many tokens a step taught a draft more
LOAD_PROBE = 64 << 20  # bytes read of the weight files to see how fast their disk is


@dataclass(frozen=True)
class StageCost:
    """seconds: None if no measured rate applies. source: of the rate."""

    name: str
    text: str
    seconds: float | None = None
    source: str = ""


@dataclass
class Plan:
    """All sizes in bytes; memory is of one GPU, or of the machine where there is none."""

    target: dict[str, Any]
    layers: list[dict[str, Any]]
    tokens: Tokens | None
    stages: list[StageCost]
    memory: dict[str, dict[str, Any]]
    hardware: Hardware
    token_bytes: int  # of features
    findings: list[Finding] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        return None if any(stage.seconds is None for stage in self.stages) else self.least_seconds

    @property
    def least_seconds(self) -> float:
        """Of the stages whose time is foretold."""
        return sum(stage.seconds or 0.0 for stage in self.stages)

    def cost(self, price: float) -> float:
        """Of the stages whose time is foretold, at `price` an hour of a GPU."""
        return price * max(1, self.hardware.count) * self.least_seconds / 3600

    def as_dict(self, price: float | None) -> dict[str, Any]:
        return {
            "target": self.target, "layers": self.layers, "tokens": self.tokens and asdict(self.tokens), "token_bytes": self.token_bytes,
            "stages": [asdict(stage) for stage in self.stages],
            "memory": self.memory, "hardware": asdict(self.hardware), "seconds": self.seconds,
            "price": None if price is None or self.seconds is None else self.cost(price),
            "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip


def make_plan(config: RunConfig, spec: TargetSpec, hardware: Hardware, rates: dict[str, float] | None = None) -> Plan:
    """rates: tokens a second by stage, measured on this machine."""
    size = size_of(spec)
    findings: list[Finding] = []
    chat = _chat(config, spec, findings)
    weights, stored = stored_bytes(spec, size)
    plan = Plan(
        _facts(spec, size, weights, stored, chat), _layers(config, spec), _tokens(config, chat, findings), [], {}, hardware, token_bytes(config, spec), findings
    )
    findings += _of_settings(config, spec, hardware)
    shape = _shape(config, spec, findings)
    plan.memory["extract"] = extraction_memory(config, spec, weights, hardware)
    if shape is not None:
        plan.memory["train"] = training_memory(config, spec, shape, hardware, plan.tokens)
    findings += too_much(config, spec, plan.memory, weights, hardware, plan.tokens)
    if plan.tokens is not None:
        features = plan.tokens.tokens * token_bytes(config, spec)
        findings += _of_steps(config, plan.tokens, _processes(config, hardware, False))
        findings += _of_disk(config, features)
        if hardware.count and features > quota(config) and gpus_to_train_on(config, True, hardware.count) == hardware.count:
            findings += in_turns(config, plan.memory, hardware)
        plan.stages = _stages(config, spec, shape, plan, size, weights, features, rates or {})
    return plan


def stored_bytes(spec: TargetSpec, size: Size | None) -> tuple[int, str]:
    """(bytes of the weights, where that is from); 0 if neither the files nor the config tell."""
    files = list(spec.path.glob("*.safetensors"))
    if files:
        return sum(file.stat().st_size for file in files), f"{len(files)} files"
    return (size.bytes, "counted from config.json") if size else (0, "unknown")


def _chat(config: RunConfig, spec: TargetSpec, findings: list[Finding]) -> Chat | None:
    try:
        return load_chat(spec, config.target.trust_remote_code, config.data.chat_template_kwargs)
    except UserError as error:
        here = any((spec.path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model"))
        level: Level = "fail" if here else "warn"
        text = str(error) if here else f"{spec.path} holds no tokenizer, so rows are taken as long as they may be"
        findings.append(Finding("chat template", level, text, "" if here else "Copy the tokenizer's files beside config.json."))
        return None


def _facts(spec: TargetSpec, size: Size | None, weights: int, stored: str, chat: Chat | None) -> dict[str, Any]:
    text = spec.text_config
    heads = text.get("num_attention_heads")
    if "kv_lora_rank" in text:
        attention = f"{heads} heads, latent (ranks {text.get('q_lora_rank')}/{text['kv_lora_rank']})"
    else:
        attention = f"{heads} heads, {text.get('num_key_value_heads') or heads} of keys and values"
    experts = num_experts(text)
    return {
        "path": str(spec.path), "model_type": text["model_type"], "architecture": spec.architecture, "wrapper": spec.wrapper,
        "layers": spec.num_layers, "width": spec.hidden_size,
        "attention": attention, "vocabulary": spec.vocab_size, "longest": spec.max_length, "tied": spec.tied,
        "experts": f"{experts}, of which {experts_used(text)}" if experts else "none", "quantization": describe_quantization(spec.quantization),
        "parameters": size.parameters if size else None, "active": size.active if size else None, "bytes": weights, "bytes_from": stored,
        "chat_template": chat is not None,
    }  # fmt: skip


def _layers(config: RunConfig, spec: TargetSpec) -> list[dict[str, Any]]:
    """Each wanted layer under the numbers that others give it."""
    wanted = [*(config.features.layers or spec.default_layers), spec.num_layers]
    names = ["aux 1", "aux 2", "aux 3"][: len(wanted) - 1] + [f"aux {n}" for n in range(4, len(wanted))] + ["last"]
    return [
        {
            "name": name, "eyas": k, "hidden_states": k if k < spec.num_layers else None, "vllm": k if name != "last" else None,
            "sglang": k - 1 if name != "last" else None, "output_of_layer": k - 1 if k else None,
        }
        for name, k in zip(names, wanted, strict=True)
    ]  # fmt: skip


def _tokens(config: RunConfig, chat: Chat | None, findings: list[Finding]) -> Tokens | None:
    manifest = read_manifest(Path(config.run.folder) / "prepare")
    if manifest is not None:
        counts = manifest.counts
        return Tokens(counts["rows"], counts["tokens"], counts["supervised"], 0, "counted: they are prepared")
    try:
        return estimate(config, chat)
    except UserError as error:
        findings.append(Finding("data", "fail", str(error)))
        return None


def _shape(config: RunConfig, spec: TargetSpec, findings: list[Finding]) -> DraftShape | None:
    try:
        return shape_of(config, spec)
    except UserError as error:
        findings.append(Finding("draft", "fail", str(error)))
        return None


def _of_settings(config: RunConfig, spec: TargetSpec, hardware: Hardware) -> list[Finding]:
    """What config files alone tell to be impossible, beside what pipeline.check_against_target refuses."""
    text, target = spec.text_config, config.target
    found = []
    kind = text["model_type"]
    if kind in IMPOSSIBLE:
        found.append(Finding("teacher", "fail", f"the logits of model type {kind!r} cannot be rebuilt: {IMPOSSIBLE[kind]}", "Choose another target."))
    elif kind not in TAILS:
        words = f"model type {kind!r} is new to Eyas, which must know its final norm"
        found.append(Finding("teacher", "fail", words, "Add it to TAILS in target/embeddings.py."))
    if not spec.stop_ids:
        words = f"{spec.path} names no token that ends a turn (eos_token_id)"
        found.append(Finding("stop token", "warn", words, "Add it to generation_config.json; without it answers run on to their limit."))
    heads = text.get("num_attention_heads")
    if target.engine == "vllm":
        if heads and heads % target.tensor_parallel:
            fit = [n for n in range(1, 65) if heads % n == 0 and n <= max(target.tensor_parallel, hardware.count)]
            step = f"Set target.tensor_parallel to one of {', '.join(map(str, fit))}."
            found.append(Finding("tensor parallel", "fail", f"target.tensor_parallel = {target.tensor_parallel} does not divide the {heads} heads", step))
        if hardware.count and target.tensor_parallel > hardware.count:
            words = f"target.tensor_parallel = {target.tensor_parallel}, and there are {hardware.count} GPUs"
            found.append(Finding("tensor parallel", "fail", words, f"Set it to {hardware.count} or less."))
        if target.extra.get("pipeline_parallel_size", 1) != 1:
            words = "target.extra.pipeline_parallel_size spreads the layers over processes, and features come from one"
            found.append(Finding("pipeline parallel", "fail", words, "Use target.tensor_parallel."))
        cache, need = target.extra.get("kv_cache_memory_bytes"), row_cache(config, spec)
        if isinstance(cache, int) and cache < need:
            words = f"target.extra.kv_cache_memory_bytes = {cache:,}, and keys and values of one row of data.max_length + 1 tokens take {need:,}"
            less = bool({*text.get("layer_types", [])} - {"full_attention"}) or any("mamba" in key for key in text)  # layers that keep less than a whole row
            found.append(Finding("cache", "warn" if less else "fail", words, "Raise it to that or more, or leave it out."))
    elif spec.quantization:
        words = f"the target is quantised ({describe_quantization(spec.quantization)}), which transformers runs slowly, if at all"
        found.append(Finding("engine", "warn", words, 'Set target.engine = "vllm".'))
    if config.data.max_length > config.train.tokens_per_batch:
        words = f"rows of data.max_length = {config.data.max_length:,} tokens do not fit into train.tokens_per_batch = {config.train.tokens_per_batch:,}"
        found.append(Finding("batch", "warn", words, "Such a row makes a larger batch of its own; raise train.tokens_per_batch, or lower data.max_length."))
    try:
        num_processes(config, hardware.count)
    except UserError as error:
        words, _, step = str(error).partition(". ")
        found.append(Finding("train", "fail", words, step))
    processes = _processes(config, hardware, False)
    if processes > 1 and config.train.tokens_per_step < SHARE * processes:
        words = f"train.tokens_per_step = {config.train.tokens_per_step:,} gives each of {processes} GPUs {config.train.tokens_per_step // processes:,} tokens"
        found.append(Finding("train", "warn", words, f"A GPU is busy from about {SHARE:,} on: raise it, or set train.processes = 1 for small drafts."))
    if config.evaluate.num_draft_tokens > config.train.unroll_steps + 2:
        words = f"evaluate.num_draft_tokens = {config.evaluate.num_draft_tokens}, and training unrolls {config.train.unroll_steps} steps"
        found.append(Finding("draft tokens", "warn", words, "Later tokens are drafted as they were never trained; raise train.unroll_steps."))
    if spec.vocab_size < draft_vocab_size(config, spec):
        found.append(Finding("vocab", "fail", f"vocab.size is larger than the target's vocabulary of {spec.vocab_size:,}", "Set it to that or less."))
    return found


def _num_steps(config: RunConfig, tokens: Tokens) -> int:
    return -(-tokens.tokens * config.train.epochs // config.train.tokens_per_step)


def _of_steps(config: RunConfig, tokens: Tokens, processes: int) -> list[Finding]:
    steps, size = _num_steps(config, tokens), config.train.tokens_per_step
    if steps >= FEW_STEPS or size // 2 < max(LEAST_STEP, SHARE * processes if processes > 1 else 0):
        return []
    words = f"train.tokens_per_step = {size:,} makes {steps:,} optimiser steps, which are few for a draft to learn in"
    return [Finding("steps", "warn", words, f"Set it to {size // 2}, or raise train.epochs.")]


def _of_disk(config: RunConfig, features: int) -> list[Finding]:
    folder = Path(config.run.folder)
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    here = sum(file.stat().st_size for file in (folder / "features").glob("shard-*")) if (folder / "features").is_dir() else 0
    wanted = max(0, min(features, quota(config)) - here)
    try:
        disk.require_room(place, round(wanted))
    except UserError as error:
        room = max(0, shutil.disk_usage(place).free - disk.FREE_FLOOR)
        fits = next((f"{int(0.9 * room / size)}{unit}" for unit, size in (("GB", 1e9), ("MB", 1e6)) if 0.9 * room >= size), None)
        step = f'Or set features.keep = "{fits}": they are then captured in rounds.' if fits else ""
        if config.features.dtype != "float8" and wanted * 0.51 <= room:
            step = 'Or set features.dtype = "float8", which halves them.'
        return [Finding("disk", "fail", str(error), step)]
    return []


def _stages(
    config: RunConfig, spec: TargetSpec, shape: DraftShape | None, plan: Plan, size: Size | None, weights: int, features: int, rates: dict[str, float]
) -> list[StageCost]:
    tokens, hardware = plan.tokens, plan.hardware
    assert tokens is not None
    load = rates.get("load") or (weights / rates["disk"] if rates.get("disk") else None)
    stages = []
    prepare = f"{tokens.rows:,} rows, {tokens.tokens:,} tokens, {tokens.supervised / max(1, tokens.tokens):.0%} supervised ({tokens.source})"
    if tokens.written:
        prepare += f"; the target writes up to {tokens.written:,} of them"
    seconds = 0.0 if not tokens.written else tokens.written / rates["generate"] if rates.get("generate") else None
    stages.append(StageCost("prepare", prepare, seconds, "measured here" if rates.get("generate") else "no measured rate of writing; --calibrate gives one"))
    rate, source = rates.get("extract"), "measured here"
    if not rate:
        rate, source = extraction_rate(config, spec, size, hardware), ROUGH
        rate = rate and min(rate, WRITE[config.target.engine] / token_bytes(config, spec))
    loading = f", after loading {weights / 1e9:,.1f} GB" + (f" in {load:,.0f} s" if load is not None else "")
    words = f"{features / 1e9:,.2f} GB of features, {token_bytes(config, spec):,} bytes a token{loading}"
    epochs = config.train.epochs if features > quota(config) else 1
    stages.append(StageCost("extract", words, epochs * tokens.tokens / rate + (load or 0.0) if rate else None, source if rate else "--calibrate gives a rate"))
    if shape is not None:
        rate, source = rates.get("train"), "measured here"
        if not rate:
            share = TRAIN * (TRAIN_FLOAT8 if config.train.dtype == "float8" else 1.0)
            rate = hardware.flops * share / training_flops(config, shape, tokens) if hardware.flops else None
            source = ROUGH
        processes = _processes(config, hardware, features > quota(config))
        steps = _num_steps(config, tokens)
        weighs = f"{plan.memory['train']['parameters'] / 1e6:,.1f}M weights"
        over = f" over {processes} GPUs" if processes > 1 else ""
        words = f"{config.train.epochs} epochs, about {steps:,} steps of {config.train.tokens_per_step:,} tokens{over}; {weighs}"
        seconds = tokens.tokens * config.train.epochs / rate / processes if rate else None
        if seconds is not None and source is ROUGH:  # a small draft's kernels are over before the next ones are launched
            batches = steps * -(-config.train.tokens_per_step // (config.train.tokens_per_batch * processes))
            launch = LAUNCH_GRAPH if pays_as_graph(plan.memory["train"]["parameters"], config.train) else LAUNCH
            seconds = max(seconds, batches * config.train.unroll_steps * launch)
        if seconds is not None and processes > 1 and hardware.link:  # each step, the gradients of all weights are summed in float32
            seconds += steps * 4 * plan.memory["train"]["parameters"] * 2 * (processes - 1) / processes / hardware.link
        stages.append(StageCost("train", words, seconds, source if rate else "--calibrate gives a rate"))
        stages.append(StageCost("export", f"{plan.memory['train']['parameters'] * 2 / 1e9:,.2f} GB in bfloat16", 0.0))
    return stages


def _processes(config: RunConfig, hardware: Hardware, streamed: bool) -> int:
    with contextlib.suppress(UserError):  # which is a finding
        return num_processes(config, gpus_to_train_on(config, streamed, hardware.count))
    return 1


def extraction_rate(config: RunConfig, spec: TargetSpec, size: Size | None, hardware: Hardware) -> float | None:
    """Tokens a second: products at a measured share of the chip's rate, and two all-reduces a layer between GPUs."""
    if not hardware.flops or size is None:
        return None
    ranks = config.target.tensor_parallel if config.target.engine == "vllm" else 1
    share = EXTRACT_QUANTISED_EXPERTS if spec.quantization and num_experts(spec.text_config) else EXTRACT_DENSE
    head = spec.vocab_size * spec.hidden_size  # met by the last token of each row alone
    seconds = 2 * (size.active - head) / (hardware.flops * share * ranks)
    if ranks > 1 and hardware.link:
        seconds += 2 * spec.num_layers * spec.hidden_size * 2 * 2 * (ranks - 1) / ranks / hardware.link
    return 1 / seconds


def training_flops(config: RunConfig, shape: DraftShape, tokens: Tokens) -> float:
    """Operations of the products of one token, as benchmarks/train_step.py counts them, without attention."""
    share, steps = tokens.supervised / max(1, tokens.tokens), config.train.unroll_steps
    width, query, key = shape.hidden_size, shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    fuse = 18 * width * width
    keys = 12 * (2 + (steps - 1) * share) * width * key
    queries = 6 * (1 + steps) * share * width * query
    layer = 6 * steps * share * (query * width + 3 * width * shape.intermediate_size) * shape.num_hidden_layers
    head = (4 if config.train.freeze_head else 6) * steps * share * width * shape.draft_vocab_size
    return float(fuse + keys + queries + layer + head + 2 * share * width * shape.draft_vocab_size)


def read_speed(spec: TargetSpec) -> float | None:
    """Bytes a second at which the disk gives the weight files, past the page cache; None without files."""
    files = sorted(spec.path.glob("*.safetensors"), key=lambda file: -file.stat().st_size)
    if not files:
        return None
    with open(files[0], "rb", buffering=0) as file:
        size = min(LOAD_PROBE, os.fstat(file.fileno()).st_size)
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        start, done = time.perf_counter(), 0
        while done < size and (part := file.read(4 << 20)):
            done += len(part)
        return done / max(1e-9, time.perf_counter() - start)

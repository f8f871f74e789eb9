"""How much memory extraction and training take of a GPU, or of a machine without one, and what to set where that is not there.

Legend: V target vocabulary, Vd draft vocabulary, D hidden width, K draft steps, T tokens of a batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from eyas.config import RunConfig
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.errors import UserError
from eyas.foresight.finding import Finding, Level
from eyas.foresight.hardware import Hardware
from eyas.foresight.size import cache_bytes
from eyas.foresight.tokens import Tokens
from eyas.target.engine import resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec
from eyas.train.loop import loss_chunk
from eyas.train.run import shape_of

MARGIN = 1.2  # how far a prediction of memory may be off; within it, that something does not fit is a warning
OVERHEAD = 2.5e9  # bytes of a GPU that CUDA, kernels and the allocator's gaps take beside what is counted
PROCESS = 1.0e9  # bytes of a process on a CPU: libraries, and what the allocator keeps of passing tensors
# On a CPU elementwise parts are not fused, so that more passing tensors are kept: measured on two shapes by benchmarks/plan_check.py.
CPU_ACTIVATIONS = 4.3  # times what a GPU keeps
LOGIT_BYTES = {"cuda": 6, "cpu": 34}  # for each logit of the loss's chunk
SMALLEST_BATCH = 256  # tokens; below it other settings are worth more


def extraction_memory(config: RunConfig, spec: TargetSpec, weights: int, hardware: Hardware) -> dict[str, Any]:
    """Of one rank: its share of the weights, one forward with the states that are taken from it, keys and values of one longest row."""
    width = spec.hidden_size
    if config.target.engine == "vllm":
        tokens, ranks, wide = max(config.target.max_batched_tokens, config.data.max_length + 1), config.target.tensor_parallel, 2
    else:
        tokens, ranks, wide = max(config.features.batch_tokens, config.data.max_length), 1, resolve_dtype(config.target.dtype, _device(config)).itemsize
    intermediate = spec.text_config.get("intermediate_size") or 4 * width
    forward = wide * tokens * (3 * width + 2 * intermediate // ranks)
    states = (2 if hardware.count else 1) * 4 * tokens * width * wide  # as the layers leave them, and on a GPU as they are stored
    cache = row_cache(config, spec)
    head = 0 if hardware.count else 4 * spec.vocab_size * width * (1 if spec.tied else 2)  # float32, for the proof of capture
    need = weights // ranks + forward + states + cache + head + int(OVERHEAD if hardware.count else PROCESS)
    room = hardware.bytes
    if config.target.engine == "vllm" and hardware.count:
        room = int(room * config.target.gpu_memory_utilization)
    return {"need": need, "room": room, "parts": {"weights": weights // ranks, "forward": forward, "states": states, "cache": cache, "head": head}}


def row_cache(config: RunConfig, spec: TargetSpec) -> int:
    """Bytes of one rank's keys and values of the longest row. Ranks share heads; of latent attention each keeps all."""
    ranks = config.target.tensor_parallel if config.target.engine == "vllm" and "kv_lora_rank" not in spec.text_config else 1
    return cache_bytes(spec.text_config, spec.num_layers) * (config.data.max_length + 1) // ranks


def training_memory(config: RunConfig, spec: TargetSpec, shape: DraftShape, hardware: Hardware, tokens: Tokens | None) -> dict[str, Any]:
    """Of one device. Each draft step keeps, of each supervised row, 4 D + 2 q + 2 kv + 2 MLP widths in the dtype of the products; with train.recompute one
    step alone does."""
    train = config.train
    wide = resolve_dtype(train.dtype, torch.device("cuda") if hardware.count else torch.device("cpu")).itemsize
    with torch.device("meta"):
        draft = Draft(shape)
    count = sum(parameter.numel() for parameter in draft.parameters())
    head = draft.lm_head.weight.numel()
    moved = count - (head if train.freeze_head else 0)
    matrices = sum(parameter.numel() for parameter in draft.parameters() if parameter.dim() > 1) - head
    moments = 8 * moved - (4 * matrices if train.optimizer == "muon" else 0)
    weights = 4 * count + 4 * moved + moments + (wide * count if wide < 4 else 0)
    batch = max(train.tokens_per_batch, 1)
    share = tokens.supervised / tokens.tokens if tokens and tokens.tokens else 1.0
    width, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    kept = wide * (4 * width + 2 * query + 2 * keys + 2 * shape.intermediate_size) * shape.num_hidden_layers
    steps = train.unroll_steps
    device = torch.device("cuda" if hardware.count else "cpu")
    kept = kept if hardware.count else int(CPU_ACTIVATIONS * kept)
    activations = int(batch * share * (kept + 2 * wide * width * (steps - 1) if train.recompute else kept * steps)) + batch * wide * (8 * width)
    logits = loss_chunk(device) * steps * shape.draft_vocab_size * LOGIT_BYTES[device.type]
    features = batch * 5 * width * max(2, wide) * (3 if hardware.count else 1)  # three aux layers, the last, the embedding
    # A GPU holds the head's rows alone; embeddings are looked up where rows are packed.
    frozen = wide * width * (shape.draft_vocab_size + (0 if hardware.count else spec.vocab_size))
    frozen += 0 if hardware.count else 4 * spec.vocab_size * width * (1 if spec.tied else 2)
    need = weights + activations + logits + features + frozen + int(OVERHEAD if hardware.count else PROCESS)
    parts = {"weights, gradients, moments": weights, "activations": activations, "logits": logits, "features": features, "target's rows": frozen}
    return {"need": need, "room": hardware.bytes, "parts": parts, "parameters": count}


def too_much(config: RunConfig, spec: TargetSpec, memory: dict[str, dict[str, Any]], weights: int, hardware: Hardware, tokens: Tokens | None) -> list[Finding]:
    """A finding for each that does not fit, with the nearest setting that does."""
    found = []
    place = "a GPU" if hardware.count else "the machine"
    for name, one in memory.items():
        need, room = one["need"], one["room"]
        if not room or need <= room:
            continue
        words = f"{name} needs {need / 1e9:,.1f} GB of {place}, and {room / 1e9:,.1f} GB are there for it"
        level: Level = "fail" if need > MARGIN * room else "warn"
        found.append(Finding("memory", level, words, _smaller(config, spec, name, one, weights, hardware, tokens)))
    return found


def in_turns(config: RunConfig, memory: dict[str, dict[str, Any]], hardware: Hardware) -> list[Finding]:
    """Where vLLM captures round by round on the GPUs that train: it starts only if its share of a GPU is free, and the draft stays there."""
    if "train" not in memory or config.target.engine != "vllm" or not hardware.bytes:
        return []
    parts, share = memory["train"]["parts"], config.target.gpu_memory_utilization
    held = parts["weights, gradients, moments"] + parts["target's rows"] + int(OVERHEAD)
    if share * hardware.bytes + held <= hardware.bytes:
        return []
    room = math.floor(100 * (1 - held / hardware.bytes)) / 100
    words = (
        f"with features.keep = {config.features.keep} target and draft take turns on a GPU, where the draft keeps {held / 1e9:,.1f} GB, and vLLM wants "
        f"{share:.0%} of {hardware.bytes / 1e9:,.0f} GB"
    )
    fits = memory["extract"]["need"] <= room * hardware.bytes
    step = f"Set target.gpu_memory_utilization = {room}." if fits else 'Set features.keep = "all", or shard the target over more GPUs.'
    return [Finding("memory", "fail" if share * hardware.bytes + held / MARGIN > hardware.bytes else "warn", words, step)]


def _smaller(config: RunConfig, spec: TargetSpec, name: str, memory: dict[str, Any], weights: int, hardware: Hardware, tokens: Tokens | None) -> str:
    """The nearest setting that fits."""
    room = memory["room"]
    if name == "extract":
        heads = spec.text_config.get("num_attention_heads") or 1
        if config.target.engine == "vllm":
            for ranks in range(config.target.tensor_parallel + 1, max(hardware.count, 1) + 1):
                changed = _with(config, "target", tensor_parallel=ranks)
                if heads % ranks == 0 and extraction_memory(changed, spec, weights, hardware)["need"] <= room:
                    return f"Set target.tensor_parallel = {ranks}."
            share = math.ceil(100 * memory["need"] / hardware.bytes) / 100 if hardware.count else 1.0
            if share <= 0.95:
                return f"Set target.gpu_memory_utilization = {share}."
        key, section = ("max_batched_tokens", "target") if config.target.engine == "vllm" else ("batch_tokens", "features")
        batch = getattr(getattr(config, section), key) // 2
        while batch >= SMALLEST_BATCH:
            if extraction_memory(_with(config, section, **{key: batch}), spec, weights, hardware)["need"] <= room:
                return f"Set {section}.{key} = {batch}."
            batch //= 2
        return f"The weights alone take {memory['parts']['weights'] / 1e9:,.1f} GB: more or larger GPUs are needed, or a quantised checkpoint."
    shape = shape_of(config, spec)
    batch = config.train.tokens_per_batch // 2
    while batch >= SMALLEST_BATCH:
        if training_memory(_with(config, "train", tokens_per_batch=batch), spec, shape, hardware, tokens)["need"] <= room:
            return f"Set train.tokens_per_batch = {batch}; results stay the same."
        batch //= 2
    for change in ({"recompute": True}, {"freeze_head": True}):
        changed = _with(config, "train", tokens_per_batch=SMALLEST_BATCH, **change)
        if training_memory(changed, spec, shape, hardware, tokens)["need"] <= room:
            return f"Set train.tokens_per_batch = {SMALLEST_BATCH} and train.{next(iter(change))} = true."
    return "Choose a smaller draft (draft.intermediate_size, vocab.size) or a larger GPU."


def _with(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def _device(config: RunConfig) -> torch.device:
    try:
        return resolve_device(config.target.device)
    except UserError:
        return torch.device("cuda")

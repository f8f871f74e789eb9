"""How large a target is, from its config alone: transformers builds it without memory, so any architecture it knows is counted, not guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from eyas.target.spec import TargetSpec

# Types that only their own repository's code knows, and the type in transformers of the same layers.
SAME_LAYERS = {"kimi_k2": "deepseek_v3"}
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
DTYPE_BITS = {"float32": 32, "float64": 64}  # else 16


@dataclass(frozen=True)
class Size:
    """Of the language model. active: parameters that a token meets, without the embedding. bytes: as stored, quantised where the config says so."""

    parameters: int
    active: int
    bytes: int


def size_of(spec: TargetSpec) -> Size | None:
    """None for an architecture that transformers does not know."""
    text = dict(spec.text_config)
    kind = SAME_LAYERS.get(text["model_type"], text["model_type"])
    if kind not in CONFIG_MAPPING:
        return None
    for key in ("model_type", "auto_map", "quantization_config", "dtype", "torch_dtype"):
        text.pop(key, None)
    try:
        config = CONFIG_MAPPING[kind](**{**text, "tie_word_embeddings": spec.tied})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # a config that its own class refuses, whatever way that class has to say so
        return None
    share = experts_used(spec.text_config) / max(1, num_experts(spec.text_config))
    usual = DTYPE_BITS.get(spec.weight_dtype.removeprefix("torch."), 16)
    parameters = active = 0
    bits = 0.0
    embedding = model.get_input_embeddings().weight
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        routed = ".experts." in f".{name}."
        count = parameter.numel()
        parameters += count
        active += 0 if parameter is embedding and not spec.tied else round(count * share) if routed else count
        in_layer = re.search(r"\.layers\.\d+\.", name) is not None
        quantised = in_layer and parameter.dim() > 1 and (module in linear or routed)
        bits += count * (_stored_bits(spec.quantization, f"{module}.0.{last}" if routed and module not in linear else module, usual) if quantised else usual)
    return Size(parameters, active, round(bits / 8))


def num_experts(text: dict[str, Any]) -> int:
    """Routed experts of a layer; 0 of a dense model."""
    return next((int(text[key]) for key in EXPERT_COUNTS if text.get(key)), 0)


def experts_used(text: dict[str, Any]) -> int:
    return next((int(text[key]) for key in EXPERTS_USED if text.get(key)), 0)


def cache_bytes(text: dict[str, Any], num_layers: int) -> int:
    """Bytes of keys and values that a token keeps, in 16 bits, over all layers: of latent attention what it compresses them to."""
    if "kv_lora_rank" in text:
        return 2 * num_layers * (int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0)))
    heads = int(text.get("num_attention_heads") or 1)
    width = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return 2 * num_layers * 2 * int(text.get("num_key_value_heads") or heads) * width


def describe_quantization(quantization: dict[str, Any]) -> str:
    if not quantization:
        return "none"
    weights = stored_weights(quantization)
    bits, group = weights.get("num_bits") or quantization.get("bits"), weights.get("group_size") or quantization.get("group_size")
    kind = f"{weights.get('type', 'int')}{bits}" if bits else ""
    return ", ".join(part for part in (str(quantization.get("quant_method", "unnamed")), kind, f"groups of {group}" if group else "") if part)


def is_ignored(quantization: dict[str, Any], module: str) -> bool:
    """Whether the config leaves this linear layer as it was."""
    patterns = [*(quantization.get("ignore") or []), *(quantization.get("modules_to_not_convert") or [])]
    return any(re.match(pattern[3:], module) if pattern.startswith("re:") else pattern == module or f".{pattern}." in f".{module}." for pattern in patterns)


def stored_weights(quantization: dict[str, Any]) -> dict[str, Any]:
    """What compressed-tensors says of the weights: num_bits, group_size, ..."""
    groups = quantization.get("config_groups") or {}
    return next((group["weights"] for group in groups.values() if isinstance(group, dict) and group.get("weights")), {})


def _stored_bits(quantization: dict[str, Any], module: str, usual: int) -> float:
    """Bits a weight of a linear layer takes on the disk, with its share of the scales."""
    if is_ignored(quantization, module):
        return usual
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        weights = stored_weights(quantization)
        bits = float(weights.get("num_bits") or usual)
        return bits + (16 / weights["group_size"] if (weights.get("group_size") or 0) > 0 else 0)
    if method == "fp8":
        block = quantization.get("weight_block_size")
        return 8 + (32 / (block[0] * block[1]) if block else 0)
    if method in ("gptq", "awq"):
        bits, group = float(quantization.get("bits") or 4), quantization.get("group_size") or 128
        return bits + (16 + bits) / group
    if method == "mxfp4":
        return 4.25 if ".experts" in module else usual
    if method == "bitsandbytes":
        return 4.5 if quantization.get("load_in_4bit") else 8.0
    return usual

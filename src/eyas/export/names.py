"""The exported draft's config, in the plain form that vLLM and SGLang load, and back.

Every switch is always written: engines disagree on defaults. Layer ids follow Eyas and vLLM (k: after k layers); SGLang's are one lower.
"""

from __future__ import annotations

from typing import Any, Literal

from eyas.draft.shape import DraftShape

Engine = Literal["vllm", "sglang"]


def engines_for(shape: DraftShape) -> list[Engine]:
    """Those that can serve such a draft: SGLang's EAGLE-3 has one Llama layer."""
    return ["vllm", "sglang"] if shape.num_hidden_layers == 1 and not shape.qk_norm else ["vllm"]


def layer_ids(aux_layers: list[int], engine: Engine) -> list[int]:
    return [k - 1 for k in aux_layers] if engine == "sglang" else list(aux_layers)


def draft_config(shape: DraftShape, engine: Engine, dtype: str, target: dict[str, str]) -> dict[str, Any]:
    """config.json of the exported folder; `target` names what the draft was trained for."""
    ids = layer_ids(shape.aux_layers, engine)
    return {
        # vLLM builds q/k norms for this name alone.
        "architectures": ["Eagle3Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "num_hidden_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "qk_norm": shape.qk_norm,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": shape.rope_parameters,
        "rope_theta": shape.rope_parameters["rope_theta"],
        "rope_scaling": None
        if shape.rope_parameters["rope_type"] == "default"
        else {key: value for key, value in shape.rope_parameters.items() if key != "rope_theta"},
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        "tie_word_embeddings": False,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, "norm_before_fc": shape.norm_before_fc},
        "eagle_aux_hidden_state_layer_ids": ids,
        "torch_dtype": dtype,
        "eyas": {"layer_convention": engine, "target_layers": shape.target_layers, **target},
    }


def shape_from_config(config: dict[str, Any]) -> DraftShape:
    """The inverse of draft_config. Raises ValueError unless it names three aux layers, the same in both places where engines look."""
    layers = config["eagle_aux_hidden_state_layer_ids"]
    if len(layers) != 3 or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] != layers:
        raise ValueError(f"engines need three aux layers, the same in both places of config.json, not {layers}")
    shift = 1 if config["eyas"]["layer_convention"] == "sglang" else 0
    fields = {name: config[name] for name in DraftShape.__dataclass_fields__ if name in config}
    return DraftShape(**fields, aux_layers=[k + shift for k in layers], target_layers=config["eyas"]["target_layers"])

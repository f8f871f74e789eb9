"""A rehearsal is the real pipeline on a target cut short: what it cuts, what it makes up, what it proves, and that real engines take it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import ROOT, VLLM_PYTHON, Outcome, make_tiny_target, write_run
from safetensors.torch import load_file, save_file

from eyas.foresight.cut import DTYPES, _pattern, _write_file, cut_target, made_up
from eyas.foresight.hardware import Hardware
from eyas.target.spec import read_header, read_spec

Eyas = Callable[..., Outcome]
NOISE = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": 9, "hidden_size": 64, "intermediate_size": 128,
    "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}},
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip


def test_the_first_layers_are_kept_and_nothing_else_changes(tmp_path: Path, tiny_target: Path) -> None:
    depth = cut_target(read_spec(tiny_target), tmp_path / "cut")
    whole, part = read_header(tiny_target / "model.safetensors"), read_header(tmp_path / "cut" / "model-00001.safetensors")
    assert depth == 4 and part.keys() == {name for name in whole if ".layers.4." not in name and ".layers.5." not in name}
    assert all(part[name]["shape"] == whole[name]["shape"] and part[name]["dtype"] == whole[name]["dtype"] for name in part)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tiny_target / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tiny_target, tmp_path / "cut"))
    assert after == before | {"num_hidden_layers": 4}


def test_one_layer_of_each_kind_is_among_them(tmp_path: Path) -> None:
    """Six dense layers before the first with experts, as a config may have it: four would not do."""
    config = transformers.DeepseekV3Config(**{key: value for key, value in LATENT.items() if key != "model_type"} | {"first_k_dense_replace": 6})
    make_tiny_target(tmp_path / "target")
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "target")
    assert cut_target(read_spec(tmp_path / "target"), tmp_path / "cut") == 7
    assert "model.layers.6.mlp.gate.weight" in read_header(tmp_path / "cut" / "model-00001.safetensors")


def test_lists_with_an_entry_a_layer_and_wrapped_configs_are_cut_too(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", num_layers=8)
    text = json.loads((target / "config.json").read_text()) | {"layer_types": ["full_attention"] * 8, "num_nextn_predict_layers": 0}
    (target / "config.json").write_text(json.dumps({"architectures": ["Wrapper"], "model_type": "wrapper", "text_config": text}))
    tensors = load_file(target / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()} | {"vision.layers.7.weight": torch.ones(2, 2)}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    cut_target(read_spec(target), tmp_path / "cut")
    config, names = json.loads((tmp_path / "cut" / "config.json").read_text()), read_header(tmp_path / "cut" / "model-00001.safetensors")
    assert config["architectures"] == ["Wrapper"] and config["text_config"]["num_hidden_layers"] == 4 and len(config["text_config"]["layer_types"]) == 4
    assert "vision.layers.7.weight" in names and "language_model.model.layers.3.mlp.up_proj.weight" in names
    assert "language_model.model.layers.4.mlp.up_proj.weight" not in names


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe", "gemma3_text"])
def test_without_weight_files_the_names_are_those_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """What transformers writes of such a model, and what is made from its config alone, are the same tensors."""
    base = {
        key: LATENT[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "moe_intermediate_size", "num_experts_per_tok")
    }
    config = {
        "deepseek_v3": transformers.DeepseekV3Config(**{key: value for key, value in LATENT.items() if key != "model_type"}),
        "qwen3_moe": transformers.Qwen3MoeConfig(**base, num_experts=4, num_hidden_layers=6, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False),
        "gemma3_text": transformers.Gemma3TextConfig(**base, num_hidden_layers=6, num_key_value_heads=2, head_dim=16),
    }[kind]
    make_tiny_target(tmp_path / "target")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    depth = cut_target(read_spec(tmp_path / "target"), tmp_path / "from-files")
    (tmp_path / "target" / "model.safetensors").unlink()
    assert cut_target(read_spec(tmp_path / "target", need_weights=False), tmp_path / "from-config") == depth
    one, other = (read_header(tmp_path / name / "model-00001.safetensors") for name in ("from-files", "from-config"))
    assert {name: entry["shape"] for name, entry in one.items()} == {name: entry["shape"] for name, entry in other.items()}


def test_int4_experts_are_packed_as_their_config_says(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(LATENT | {"quantization_config": INT4}))
    cut_target(read_spec(tmp_path / "target", need_weights=False), tmp_path / "cut")
    tensors = load_file(tmp_path / "cut" / "model-00001.safetensors")
    stem = "model.layers.1.mlp.experts.3.down_proj"
    assert tensors[f"{stem}.weight_packed"].shape == (64, 8) and tensors[f"{stem}.weight_packed"].dtype == torch.int32
    assert tensors[f"{stem}.weight_scale"].shape == (64, 2) and tensors[f"{stem}.weight_shape"].tolist() == [64, 64]
    assert "model.layers.1.mlp.shared_experts.down_proj.weight" in tensors and "model.layers.0.mlp.down_proj.weight" in tensors
    packed = tensors[f"{stem}.weight_packed"]
    codes = torch.stack([(packed >> 4 * place) & 15 for place in range(8)], -1).flatten(1).float() - 8
    weight = codes * tensors[f"{stem}.weight_scale"].float().repeat_interleave(32, 1)
    assert 0.01 < float(weight.std()) < 0.03, "as large as a matrix that was freshly initialised"


def test_a_quantisation_whose_names_cannot_be_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(LATENT | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ValueError, match="only their headers are read"):
        cut_target(read_spec(tmp_path / "target", need_weights=False), tmp_path / "cut")


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "low", "high"),
    [
        ("model.norm.weight", torch.bfloat16, [512], 0.9, 1.1),
        ("model.layers.0.q_norm.weight", torch.float32, [64], 0.9, 1.1),
        ("model.layers.0.self_attn.q_proj.weight", torch.bfloat16, [256, 256], 0.015, 0.025),
        ("model.layers.0.self_attn.q_proj.bias", torch.float16, [256], 0.015, 0.025),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.float32, [2, 2], 0.02, 0.02),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", torch.uint8, [4, 8], 119, 119),
        ("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn, [256, 256], 0.9, 1.1),
    ],
)
def test_made_up_values_have_an_ordinary_size(name: str, dtype: torch.dtype, shape: list[int], low: float, high: float) -> None:
    values = made_up(name, {name: (dtype, shape)}, partial(_pattern, NOISE))
    assert values.dtype == dtype
    size = float(values.double().square().mean().sqrt())
    assert low - 1e-3 <= size <= high + 1e-3, size


def test_tensors_of_all_types_and_sizes_are_written_as_a_library_reads_them(tmp_path: Path) -> None:
    """Also smaller and larger than the values that they are filled with, and of odd sizes."""
    sizes: list[list[int]] = [[], [3], [5, 7], [100, 11], [0, 4]]
    shapes = {f"{name}-{number}": (dtype, shape) for name, dtype in DTYPES.items() for number, shape in enumerate(sizes)}
    values = {dtype: (torch.arange(1, 66) % 2 == 0).to(dtype) if dtype == torch.bool else torch.arange(1, 66).to(dtype) for dtype in DTYPES.values()}
    size = _write_file(tmp_path / "model.safetensors", shapes, lambda name: values[shapes[name][0]])
    found = load_file(tmp_path / "model.safetensors")
    assert size == sum(tensor.nbytes for tensor in found.values()) and found.keys() == shapes.keys()
    for name, (dtype, shape) in shapes.items():
        assert found[name].dtype == dtype and list(found[name].shape) == shape
        count = found[name].numel()
        assert torch.equal(found[name].flatten().double(), values[dtype].double().repeat(20)[:count])


def test_a_cut_target_gives_numbers_of_an_ordinary_size(tmp_path: Path) -> None:
    """Through all of it, so that no layer overflows and no softmax stands on one token alone."""
    config = transformers.DeepseekV3Config(**{key: value for key, value in LATENT.items() if key != "model_type"})
    make_tiny_target(tmp_path / "target")
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "target")
    cut_target(read_spec(tmp_path / "target"), tmp_path / "cut")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(3, 60)[None]).logits
    assert logits.isfinite().all() and 1e-4 < float(logits.std()) < 10


def test_the_rehearsal_says_what_is_proved_and_what_is_not(tmp_path: Path, tiny_target: Path, eyas: Eyas) -> None:
    path = write_run(tmp_path, tiny_target, data={"synthesize": 8})
    outcome = eyas("rehearse", path)
    assert outcome.code == 0, outcome.err
    said = outcome.err
    assert all(f"{stage}: went through" in said for stage in ("prepare", "extract", "vocab", "train", "export", "evaluate"))
    assert "Proved:" in said and "Not provable" in said and "2 layers" in said and "user turns of its own" in said
    assert not (tmp_path / "runs" / "run" / "prepare").exists(), "the run itself is not touched"
    assert not (tmp_path / "runs" / "run" / "rehearsal" / "target").exists(), "gigabytes are not left behind"
    assert eyas("rehearse", path).code == 0, "again, over what the first left"


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_rehearses_and_serves_a_real_model_of_few_layers(smollm2: Path, tmp_path: Path, eyas: Eyas) -> None:
    data = ROOT / "examples" / "quickstart" / "data" / "conversations.jsonl"
    path = write_run(
        tmp_path, smollm2, target={"engine": "vllm", "python": str(VLLM_PYTHON), "dtype": "auto"}, data={"conversations": [str(data)], "max_length": 256},
        vocab={"size": 4096}, evaluate={"engine": "vllm"}, **{"target.extra": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}},
    )  # fmt: skip
    outcome = eyas("rehearse", path)
    assert outcome.code == 0, outcome.err
    assert "vLLM serves it beside the target" in outcome.err and "26 layers" in outcome.err
    assert "rounds" in (tmp_path / "runs" / "run" / "rehearsal" / "run" / "log.txt").read_text()


def test_a_machine_too_small_for_the_run_can_rehearse_it(tmp_path: Path, tiny_target: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.foresight.check.here", lambda: Hardware("CPU", 0, 1000))
    outcome = eyas("rehearse", write_run(tmp_path, tiny_target))
    assert outcome.code == 0 and "warning: extract needs" in outcome.err, outcome.err

"""Norm and head applied to layer N give the target's own logits, and the proof of capture sees what would spoil them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_target, shift_norms
from draft_helpers import relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GemmaConfig, GemmaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eyas.errors import UserError
from eyas.features.shard import FeatureRow
from eyas.features.verify import TOLERANCE, capture_error, prove_capture
from eyas.target.embeddings import IMPOSSIBLE, TAILS, TargetHead, read_head
from eyas.target.engine import Sampling
from eyas.target.spec import read_spec
from eyas.target.tap import LayerTap
from eyas.target.transformers_engine import TransformersEngine


def proved(row: FeatureRow, head: TargetHead, engine: TransformersEngine, tolerance: float) -> float:
    """The error of the proof of capture of `row`; raises as extraction does."""
    error = error_of(row, head, engine)
    prove_capture(error, engine.spec.num_layers, tolerance)
    return error


def error_of(row: FeatureRow, head: TargetHead, engine: TransformersEngine) -> float:
    return capture_error(row.tokens, row.last, head, engine.log_probabilities(row.tokens.tolist()))


TOKENS = [1, 50, 60, 70, 17, 300, 9, 120, 33, 2, 5, 5]


def with_random_norms(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shift_norms(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return folder


def open_target(folder: Path) -> tuple[TransformersEngine, TargetHead]:
    spec = read_spec(folder)
    return TransformersEngine(spec, torch.device("cpu"), torch.float32, False), read_head(spec)


def captured(engine: TransformersEngine, tokens: list[int], layer: int | None = None) -> FeatureRow:
    num_layers = engine.spec.num_layers
    (states,) = engine.capture([tokens], [1, 2, 3, num_layers if layer is None else layer])
    return FeatureRow("row", torch.tensor(tokens, dtype=torch.int32), torch.ones(len(tokens), dtype=torch.bool), states[:, :3], states[:, 3])


def own_logits(engine: TransformersEngine, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return engine.model(input_ids=torch.tensor([tokens])).logits[0].float()


class WithoutNorm(TargetHead):
    def normed(self, last: torch.Tensor) -> torch.Tensor:
        return last.float()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersEngine, TargetHead]:
    return open_target(with_random_norms(make_tiny_target(tmp_path_factory.mktemp("head") / "target")))


def test_norm_and_head_on_the_last_layer_give_the_models_own_logits(tiny: tuple[TransformersEngine, TargetHead]) -> None:
    engine, head = tiny
    assert relative_error(head.logits(captured(engine, TOKENS).last), own_logits(engine, TOKENS)) < 1e-6
    assert proved(captured(engine, TOKENS), head, engine, 1e-5) < 1e-5


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    engine, head = open_target(with_random_norms(make_tiny_target(tmp_path / "target", tie_word_embeddings=True)))
    assert torch.equal(head.head, head.embedding)
    assert relative_error(head.logits(captured(engine, TOKENS).last), own_logits(engine, TOKENS)) < 1e-6


def test_norm_and_head_give_the_logits_of_a_real_model(smollm2: Path) -> None:
    engine, head = open_target(smollm2)
    tokens = engine.generate([[1, 9690, 198, 2683, 359]], Sampling(12, 0.0, 1.0, 0))[0].tokens
    row = captured(engine, [1, 9690, 198, 2683, 359, *tokens])
    wanted = own_logits(engine, row.tokens.tolist())
    assert relative_error(head.logits(row.last), wanted) < 1e-5
    assert proved(row, head, engine, TOLERANCE[torch.float32]) < 1e-4
    with pytest.raises(UserError, match="Proof of capture failed"):
        proved(replace(row, last=head.normed(row.last)), head, engine, TOLERANCE[torch.bfloat16])
    with pytest.raises(UserError, match="Proof of capture failed"):
        proved(captured(engine, row.tokens.tolist(), engine.spec.num_layers - 1), head, engine, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("fault", ["doubled norm", "missing norm", "a layer too early", "a row mixed up", "positions off by one", "not a number"])
def test_a_wrong_capture_is_caught_even_at_the_wider_tolerance(fault: str, tiny: tuple[TransformersEngine, TargetHead]) -> None:
    engine, head = tiny
    row = captured(engine, TOKENS)
    faults: dict[str, tuple[FeatureRow, TargetHead]] = {
        "doubled norm": (replace(row, last=head.normed(row.last)), head),
        "missing norm": (row, WithoutNorm(**head.__dict__)),
        "a layer too early": (captured(engine, TOKENS, engine.spec.num_layers - 1), head),
        "a row mixed up": (replace(row, last=captured(engine, TOKENS[::-1]).last), head),
        "positions off by one": (replace(row, last=row.last.roll(1, 0)), head),
        "not a number": (replace(row, last=row.last * float("nan")), head),
    }
    with pytest.raises(UserError, match="Proof of capture failed"):
        proved(*faults[fault], engine, TOLERANCE[torch.bfloat16])


SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
def test_a_norm_that_multiplies_by_one_plus_its_weight_is_read_as_such(kind: str, tmp_path: Path) -> None:
    """Gemma's norm; Gemma 2 also caps its logits."""
    torch.manual_seed(0)
    if kind == "gemma":
        model: Any = GemmaForCausalLM(GemmaConfig(**SMALL))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**SMALL, query_pre_attn_scalar=8, final_logit_softcapping=2.0, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    engine, head = open_target(with_random_norms(tmp_path))
    row, wanted = captured(engine, TOKENS), own_logits(engine, TOKENS)
    assert relative_error(head.logits(row.last), wanted) < 1e-6
    assert head.softcap == (2.0 if kind == "gemma2" else None)
    without = replace(head, norm_weight=head.norm_weight - 1)
    assert error_of(row, head, engine) < 1e-5
    assert error_of(row, without, engine) > TOLERANCE[torch.bfloat16]


def test_a_model_type_whose_norm_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"model_type": "llama"', '"model_type": "brand_new"'))
    with pytest.raises(UserError, match="brand_new"):
        read_head(read_spec(folder))


# What the kinds in TAILS need beside SMALL; what a kind does not know does no harm.
MANY: dict[str, Any] = SMALL | {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16,
    "mamba_d_ssm": 64, "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8, "num_hidden_layers": 2, "attn_implementation": "eager",
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
# Kimi K2 runs on DeepSeek-V3's code; the others are an older form of a kind that is tried here under its newer name.
NOT_BUILT = {"kimi_k2", "qwen2_vl", "qwen2_5_vl"}


def config_of(kind: str) -> Any:
    values = dict(MANY)
    if kind.startswith(("deepseek", "glm_moe", "longcat", "glm4_moe_lite")):
        values |= LATENT
    if kind.startswith("lfm2"):
        values["layer_types"] = ["conv", "full_attention"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # the language model of a vision model, whose rope has three axes
        values |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}, "tie_word_embeddings": False, "head_dim": 8}
    if kind.startswith("glm4v"):
        values["rope_parameters"] |= {"mrope_section": [1, 0, 1], "partial_rotary_factor": 0.5}
    return AutoConfig.for_model(kind, **values, **{key: 0.5 for key in (TAILS[kind].times, TAILS[kind].over) if key})


@pytest.mark.parametrize("kind", sorted(TAILS.keys() - NOT_BUILT))
def test_what_stands_between_layer_n_and_the_logits_is_what_transformers_has(kind: str, tmp_path: Path) -> None:
    """A model of every kind that is said to be known, with final norm, scale and names as its own code has them."""
    torch.manual_seed(0)
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config_of(kind)).eval()
    generator = torch.Generator().manual_seed(0)
    shift_norms(model, generator)
    model.save_pretrained(tmp_path)
    own_head = torch.randn(320, 32, generator=generator)
    if not causal:
        inner = {f"model.language_model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(inner | {"lm_head.weight": own_head}, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    with torch.no_grad(), LayerTap(model, spec.num_layers, [spec.num_layers]) as tap:
        output = model(input_ids=torch.tensor([TOKENS]), use_cache=False)
        last = tap.take()[0, :, 0]
    wanted = output.logits[0] if causal else output.last_hidden_state[0] @ own_head.T
    assert relative_error(read_head(spec).logits(last), wanted) < 1e-5


@pytest.mark.parametrize("kind", sorted(IMPOSSIBLE))
def test_a_model_type_whose_logits_cannot_be_rebuilt_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    spec = read_spec(make_tiny_target(tmp_path / "target"))
    with pytest.raises(UserError, match=f"{kind}.*Choose another target"):
        read_head(replace(spec, text_config=spec.text_config | {"model_type": kind}))


def rename(folder: Path, change: Callable[[str], str], **more: torch.Tensor) -> Path:
    """Gives every tensor another name, and adds `more` under names with dots for double underscores."""
    path = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors | {name.replace("__", "."): tensor for name, tensor in more.items()}, path)
    return folder


WRAPPERS: dict[str, Callable[[str], str]] = {
    "language_model.model.": lambda name: f"language_model.{name}",  # Kimi K2.5, LLaVA and Gemma 3 of transformers 4, InternVL
    "model.language_model.": lambda name: name.replace("model.", "model.language_model."),  # transformers 5
    "model.text_model.": lambda name: name.replace("model.", "model.text_model."),  # Idefics 3, SmolVLM
    "language.model.": lambda name: f"language.{name}",  # DeepSeek-VL2
    "nothing": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_tensors_are_found_through_a_wrappers_prefix_and_not_in_its_other_models(prefix: str, tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    wanted = read_head(read_spec(folder))
    names = ("vision_tower__embeddings__weight", "model__visual__embed_tokens__weight", "mtp__embed_tokens__weight", "mtp__lm_head__weight")
    names += ("model__layers__6__embed_tokens__weight", "model__layers__6__shared_head__head__weight", "audio_tower__lm_head__weight")
    norms = {
        name: torch.zeros(32)
        for name in ("mtp__norm__weight", "norm__weight_other", "vision_tower__norm__weight", "model__layers__6__shared_head__norm__weight")
    }
    found = read_head(read_spec(rename(folder, WRAPPERS[prefix], **{name: torch.zeros(320, 32) for name in names}, **norms)))
    for one, two in ((found.embedding, wanted.embedding), (found.norm_weight, wanted.norm_weight), (found.head, wanted.head)):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("how", ["float8", "packed", "int8"])
def test_a_tensor_that_is_stored_quantised_is_refused_with_its_name(how: str, name: str, tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    spec = read_spec(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if how == "packed":  # as compressed-tensors and GPTQ name it
        tensors[name.removesuffix("weight") + "weight_packed"] = tensor.to(torch.int32)
    else:
        tensors[name] = tensor.to(torch.float8_e4m3fn if how == "float8" else torch.int8)
    tensors[name + "_scale"] = torch.ones(1)
    save_file(tensors, path)
    message = "embed_tokens.weight" if (how, name) == ("packed", "model.embed_tokens.weight") else f"{name} is stored quantised.*Quantise the target again"
    with pytest.raises(UserError, match=message):
        read_head(spec)


def test_a_scale_of_the_logits_that_the_model_type_is_not_known_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"logit_scale = 0\.5"):
        read_head(read_spec(make_tiny_target(tmp_path / "target", logit_scale=0.5)))

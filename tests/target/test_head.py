"""Norm and head applied to layer N give the target's own logits, and the proof of capture sees what would spoil them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_target
from draft_helpers import relative_error
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GemmaConfig, GemmaForCausalLM

from eyas.errors import UserError
from eyas.features.shard import FeatureRow
from eyas.features.verify import TOLERANCE, capture_error, prove_capture
from eyas.target.embeddings import TargetHead, read_head
from eyas.target.engine import Sampling
from eyas.target.spec import read_spec
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
    """Final norms of ones would let a doubled norm pass: normalising twice is then normalising once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
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

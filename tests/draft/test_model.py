"""The draft's parts: rope as the target's own code turns, dtypes at each boundary, first weights, a cache that forgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_tiny_target
from draft_helpers import WIDTH, random_draft, random_head, random_ids, relative_error, small_shape
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.config import DraftSection
from eyas.draft.init import new_draft
from eyas.draft.model import DraftCache
from eyas.draft.rope import Rope, rotate
from eyas.draft.shape import draft_shape
from eyas.errors import UserError
from eyas.target.spec import TargetSpec, read_spec

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("parameters", ROPES, ids=lambda parameters: parameters["rope_type"])
def test_rope_turns_as_the_targets_own_code_does(parameters: dict[str, Any]) -> None:
    """With the head width that is given, not the hidden width divided by the heads."""
    shape = small_shape(rope_parameters=parameters)
    config = LlamaConfig(hidden_size=24, num_attention_heads=4, head_dim=6, max_position_embeddings=64, rope_parameters=dict(parameters))
    assert LlamaAttention(config, 0).head_dim == 6
    x = torch.randn(1, 4, 20, 6, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3, 23)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    wanted, _ = apply_rotary_pos_emb(x, x, cos, sin)
    found = rotate(x[0].transpose(0, 1), Rope(shape)(positions)).transpose(0, 1)
    assert relative_error(found, wanted[0]) < 1e-6


def test_a_constant_offset_of_all_positions_changes_nothing() -> None:
    """DESIGN.md calls it immaterial, so that an engine may count positions from elsewhere."""
    draft, generator = random_draft(small_shape()), torch.Generator().manual_seed(0)
    embedding, aux = torch.randn(9, WIDTH, generator=generator), torch.randn(9, 3, WIDTH, generator=generator)
    found = [draft(embedding, draft.fuse(aux), torch.arange(9) + offset, DraftCache())[0] for offset in (0, 1, 30)]
    assert relative_error(found[1], found[0]) < 1e-5
    assert relative_error(found[2], found[0]) < 1e-5


def test_positions_one_at_a_time_equal_positions_at_once() -> None:
    draft, generator = random_draft(small_shape(num_hidden_layers=2, qk_norm=True)), torch.Generator().manual_seed(0)
    embedding, hidden = torch.randn(9, WIDTH, generator=generator), draft.fuse(torch.randn(9, 3, WIDTH, generator=generator))
    at_once, _ = draft(embedding, hidden, torch.arange(9), DraftCache())
    cache, parts = DraftCache(), []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        assert len(cache) == start
        parts.append(draft(embedding[start:end], hidden[start:end], torch.arange(start, end), cache)[0])
    assert relative_error(torch.cat(parts), at_once) < 1e-5


def test_a_cropped_cache_is_as_if_the_rest_had_never_been() -> None:
    draft, generator = random_draft(small_shape(num_hidden_layers=2)), torch.Generator().manual_seed(0)
    embedding, hidden = torch.randn(9, WIDTH, generator=generator), draft.fuse(torch.randn(9, 3, WIDTH, generator=generator))
    fresh, cropped = DraftCache(), DraftCache()
    cropped.crop(0)
    draft(embedding[:5], hidden[:5], torch.arange(5), fresh)
    draft(embedding[:8], hidden[:8], torch.arange(8), cropped)
    cropped.crop(5)
    assert len(cropped) == len(fresh) == 5
    found, wanted = (draft(embedding[5:], hidden[5:], torch.arange(5, 9), cache)[0] for cache in (cropped, fresh))
    assert relative_error(found, wanted) < 1e-6


def test_weights_stay_float32_and_products_run_in_the_dtype_fed_in() -> None:
    draft = random_draft(small_shape(norm_before_fc=True))
    hidden = draft.fuse(torch.randn(4, 3, WIDTH, dtype=torch.bfloat16))
    logits, following = draft(torch.randn(4, WIDTH, dtype=torch.bfloat16), hidden, torch.arange(4), DraftCache())
    assert {hidden.dtype, logits.dtype, following.dtype} == {torch.bfloat16}
    logits.float().sum().backward()
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in draft.parameters() if parameter.grad is not None} == {torch.float32}


def test_the_next_step_reads_the_normed_state_only_with_norm_output() -> None:
    stream = torch.randn(4, WIDTH)
    for norm_output in (True, False):
        draft = random_draft(small_shape(norm_output=norm_output))
        normed, following = draft.outputs(stream)
        assert torch.equal(normed, draft.norm(stream))
        assert torch.equal(following, normed if norm_output else stream)


def test_first_weights_depend_on_the_seed_alone() -> None:
    shape, ids = small_shape(), random_ids()
    torch.manual_seed(1)
    first = new_draft(shape, 7, ids, None).state_dict()
    torch.manual_seed(2)
    second, other = new_draft(shape, 7, ids, None).state_dict(), new_draft(shape, 8, ids, None).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].dim() > 1)
    assert all(bool((first[name] == 1).all()) for name in first if first[name].dim() == 1)


def test_with_the_targets_head_the_draft_begins_with_the_rows_of_its_own_vocabulary() -> None:
    head, ids = random_head(), random_ids()
    draft = new_draft(small_shape(), 0, ids, head)
    for i, token in enumerate(ids.tolist()):
        assert torch.equal(draft.lm_head.weight[i], head.head[token])
    assert torch.equal(draft.norm.weight, torch.ones_like(head.norm_weight))
    before = head.head.clone()
    with torch.no_grad():
        draft.lm_head.weight.add_(1)
    assert torch.equal(head.head, before), "training the draft must not move the teacher"


# --- the shape, from the target ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    return read_spec(make_tiny_target(tmp_path_factory.mktemp("shape") / "target"))


def with_text(spec: TargetSpec, **changes: Any) -> TargetSpec:
    """The spec with keys of its config changed; None removes one."""
    text = {key: value for key, value in {**spec.text_config, **changes}.items() if value is not None}
    return replace(spec, text_config=text)


def test_the_shape_is_the_targets_unless_the_run_file_says_otherwise(spec: TargetSpec) -> None:
    shape = draft_shape(DraftSection(), spec, 200, [1, 3, 5])
    assert (shape.hidden_size, shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (32, 64, 4, 2, 8)
    assert (shape.vocab_size, shape.draft_vocab_size, shape.max_position_embeddings, shape.rms_norm_eps) == (320, 200, 512, 1e-5)
    changed = draft_shape(DraftSection(intermediate_size=40, num_attention_heads=8, num_key_value_heads=4, head_dim=12), spec, 200, [1, 3, 5])
    assert (changed.intermediate_size, changed.num_attention_heads, changed.num_key_value_heads, changed.head_dim) == (40, 8, 4, 12)


def test_heads_of_a_target_that_do_not_divide_its_width_become_fewer(spec: TargetSpec) -> None:
    """transformers, and with it every engine, refuses a Llama config with such heads."""
    shape = draft_shape(DraftSection(), with_text(spec, num_attention_heads=12, num_key_value_heads=4, head_dim=8), 200, [1, 3, 5])
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (8, 4, 8)
    Rope(shape)


def test_old_and_new_forms_of_a_config_give_the_same_rope(spec: TargetSpec) -> None:
    llama3 = {key: value for key, value in ROPES[2].items() if key != "rope_theta"}
    old = with_text(spec, rope_parameters=None, rope_theta=500.0, rope_scaling=llama3)
    older = with_text(spec, rope_parameters=None, rope_theta=500.0, rope_scaling={**{k: v for k, v in llama3.items() if k != "rope_type"}, "type": "llama3"})
    new = with_text(spec, rope_parameters=ROPES[2])
    found = [draft_shape(DraftSection(), one, 200, [1, 3, 5]).rope_parameters for one in (old, older, new)]
    assert found == [ROPES[2]] * 3


def test_a_target_with_latent_attention_lends_neither_key_value_heads_nor_head_width(spec: TargetSpec) -> None:
    shape = draft_shape(DraftSection(), with_text(spec, kv_lora_rank=16, head_dim=3, num_key_value_heads=1), 200, [1, 3, 5])
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 4, 8)


@pytest.mark.parametrize(
    ("section", "word"),
    [(DraftSection(num_key_value_heads=3), "num_key_value_heads"), (DraftSection(head_dim=7), "head_dim")],
)
def test_sizes_that_do_not_fit_together_are_refused(section: DraftSection, word: str, spec: TargetSpec) -> None:
    with pytest.raises(UserError, match=word):
        draft_shape(section, spec, 200, [1, 3, 5])


def test_a_rope_that_the_draft_cannot_take_over_is_refused(spec: TargetSpec) -> None:
    with pytest.raises(UserError, match="spiral"):
        draft_shape(DraftSection(), with_text(spec, rope_parameters={"rope_type": "spiral", "rope_theta": 1.0}), 200, [1, 3, 5])

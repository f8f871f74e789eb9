"""Facts read from a model folder: through wrappers, lists and missing keys, and refused by name where the folder is no whole model."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.errors import UserError
from eyas.target.spec import read_header, read_spec


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Path) -> Path:
    """A copy of the tiny target that a test may spoil."""
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    changed = change(values)
    path.write_text(json.dumps(values if changed is None else changed))


def test_the_facts_of_a_plain_model(folder: Path) -> None:
    spec = read_spec(folder)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_length) == (6, 32, 320, 512)
    assert spec.stop_ids == (2,) and spec.tied is False and spec.weight_dtype == "float32"


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_a_wrapper_keeps_the_language_model_one_level_down(folder: Path, name: str) -> None:
    def wrap(config: dict[str, Any]) -> dict[str, Any]:
        return {"model_type": "wrapper", "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152}, name: config, "tie_word_embeddings": True}

    edit(folder / "config.json", wrap)
    spec = read_spec(folder)
    assert (spec.num_layers, spec.hidden_size, spec.text_config["model_type"]) == (6, 32, "llama")
    assert spec.tied is True, "the wrapper's own word on tied embeddings comes first"


def test_stop_ids_come_from_the_generation_config_else_from_the_config_as_one_or_many(folder: Path) -> None:
    edit(folder / "generation_config.json", lambda values: values | {"eos_token_id": [2, 0]})
    assert read_spec(folder).stop_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    assert read_spec(folder).stop_ids == (2,)
    edit(folder / "config.json", lambda values: values | {"eos_token_id": [0, 1]})
    assert read_spec(folder).stop_ids == (0, 1)
    edit(folder / "config.json", lambda values: values | {"eos_token_id": 0})
    assert read_spec(folder).stop_ids == (0,), "id 0 is an id, not nothing"
    edit(folder / "config.json", lambda values: {key: value for key, value in values.items() if key != "eos_token_id"})
    assert read_spec(folder).stop_ids == ()


def test_a_generation_config_without_a_stop_token_leaves_the_word_to_the_config(folder: Path) -> None:
    edit(folder / "generation_config.json", lambda values: values | {"eos_token_id": None})
    assert read_spec(folder).stop_ids == (2,)


def test_tied_embeddings_are_seen(folder: Path) -> None:
    edit(folder / "config.json", lambda values: values | {"tie_word_embeddings": True})
    assert read_spec(folder).tied is True


@pytest.mark.parametrize(("layers", "expected"), [(61, [2, 30, 58]), (32, [2, 16, 29]), (8, [2, 4, 5]), (6, [1, 3, 5]), (4, [0, 2, 4])])
def test_default_layers_are_early_middle_and_late_and_always_three(folder: Path, layers: int, expected: list[int]) -> None:
    edit(folder / "config.json", lambda values: values | {"num_hidden_layers": layers})
    assert read_spec(folder).default_layers == expected


@pytest.mark.parametrize("layers", range(2, 100))
def test_default_layers_are_valid_for_any_depth(tiny_target: Path, layers: int) -> None:
    from dataclasses import replace

    found = replace(read_spec(tiny_target), num_layers=layers).default_layers
    assert len(set(found)) == 3 and found == sorted(found) and found[0] >= 0 and found[-1] <= layers


def test_the_fingerprint_follows_weights_and_tokenizer_apart(folder: Path) -> None:
    before = read_spec(folder).fingerprint
    edit(folder / "tokenizer_config.json", lambda values: values | {"model_max_length": 7})
    middle = read_spec(folder).fingerprint
    assert middle["weights"] == before["weights"] and middle["tokenizer"] != before["tokenizer"]
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    after = read_spec(folder).fingerprint
    assert after["weights"] != middle["weights"] and after["tokenizer"] == middle["tokenizer"]


def test_a_model_copied_elsewhere_has_the_same_fingerprint(folder: Path, tiny_target: Path) -> None:
    assert read_spec(folder).fingerprint == read_spec(tiny_target).fingerprint


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_spec(folder)
    return str(caught.value)


@pytest.mark.parametrize("text", ["{", "", "[]", "3", "null"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert str(folder / "config.json") in refusal(folder)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {k: v for k, v in values.items() if k != key}


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_width_or_count_that_the_config_leaves_out_is_read_off_the_weights(folder: Path, key: str) -> None:
    """transformers leaves out of a wrapper's text_config what is its type's default: Gemma 3's vocab_size, Vicuna's hidden_size under LLaVA."""
    edit(folder / "config.json", without(key))
    spec = read_spec(folder)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (6, 32, 320) and key in spec.text_config


def test_layers_are_not_counted_where_the_weights_hold_more_than_the_models_own(folder: Path) -> None:
    """DeepSeek stores its extra prediction layers as further layers."""
    edit(folder / "config.json", lambda values: without("num_hidden_layers")(values) | {"num_nextn_predict_layers": 1})
    assert "num_hidden_layers" in refusal(folder)


def test_a_config_without_a_model_type_is_refused(folder: Path) -> None:
    edit(folder / "config.json", without("model_type"))
    assert "model_type" in refusal(folder)


def without_head(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith("lm_head")}, path)


def test_embeddings_are_tied_where_the_config_says_nothing_and_there_is_no_head(folder: Path) -> None:
    """As in Gemma, whose type is tied by default."""
    edit(folder / "config.json", without("tie_word_embeddings"))
    assert read_spec(folder).tied is False, "there is a head, as in Llama"
    without_head(folder)
    assert read_spec(folder).tied is True


def test_a_model_that_says_it_has_a_head_of_its_own_must_have_it(folder: Path) -> None:
    without_head(folder)
    assert "lm_head" in refusal(folder)


def test_a_wrapper_may_say_inside_or_outside_that_embeddings_are_tied(folder: Path) -> None:
    edit(folder / "config.json", lambda config: {"model_type": "wrapper", "text_config": config | {"tie_word_embeddings": True}})
    assert read_spec(folder).tied is True
    edit(folder / "config.json", lambda config: config | {"tie_word_embeddings": False})
    assert read_spec(folder).tied is False
    without_head(folder)
    assert read_spec(folder).tied is True, "one of the two says so, and there is no head"


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", "six"), ("hidden_size", None), ("vocab_size", -1), ("num_hidden_layers", 2.5)])
def test_a_config_with_a_fact_of_the_wrong_type_is_refused_with_its_name(folder: Path, key: str, value: Any) -> None:
    edit(folder / "config.json", lambda values: values | {key: value})
    assert key in refusal(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"1234567"),
        lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        lambda path: path.write_bytes(struct.pack("<Q", 2) + b"[]"),
        lambda path: path.write_bytes(struct.pack("<Q", 7) + b'{"a":1}'),
        lambda path: path.write_bytes(struct.pack("<Q", 27) + b'{"a":{"data_offsets":["x"]}}'[:27]),
        lambda path: path.write_bytes(struct.pack("<Q", 26) + b'{"a":{"data_offsets":[0]}}'),
    ],
    ids=["one byte short", "inside the header", "empty", "no length", "huge header", "list", "number", "torn header", "one offset"],
)
def test_damaged_weights_are_refused_by_name(folder: Path, damage: Callable[[Path], object]) -> None:
    path = folder / "model.safetensors"
    damage(path)
    assert str(path) in refusal(folder)


def test_a_header_lists_the_tensors(folder: Path) -> None:
    header = read_header(folder / "model.safetensors")
    assert header["model.embed_tokens.weight"]["shape"] == [320, 32] and "__metadata__" not in header

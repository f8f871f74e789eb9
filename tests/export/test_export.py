"""An exported folder gives what was trained, says all that engines ask for, and is refused once it was tampered with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config import load
from eyas.draft.model import Draft, DraftCache
from eyas.errors import UserError
from eyas.export.check import load_export
from eyas.export.names import draft_config, shape_from_config
from eyas.pipeline import Run
from eyas.target.spec import read_spec
from eyas.train.checkpoint import load_draft
from eyas.train.run import best_checkpoint
from eyas.vocab.run import read_ids

ENGINES = ["vllm", "sglang"]
CACHE: dict[str, Path] = {}


def exported_run(make_run: Callable[..., Path], name: str, **sections: dict[str, Any]) -> Path:
    """The run folder of a short run up to `export`, made by the first test that asks."""
    if name not in CACHE:
        run = Run(load(make_run(**{"train": {"epochs": 1}, **sections}), []))
        run.up_to("export")
        CACHE[name] = run.folder
    return CACHE[name]


@pytest.fixture
def run_folder(make_run: Callable[..., Path]) -> Path:
    return exported_run(make_run, "usual", draft={"norm_before_fc": True, "norm_output": False, "head_dim": 10})


@pytest.fixture
def whole_vocabulary(make_run: Callable[..., Path]) -> Path:
    return exported_run(make_run, "whole vocabulary", vocab={"size": 320})


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    """An exported folder to tamper with."""
    return Path(shutil.copytree(run_folder / "export" / "vllm", tmp_path / "copied"))


def some_logits(draft: Draft) -> torch.Tensor:
    """Three draft steps on made-up inputs, the later ones with a growing cache."""
    generator = torch.Generator().manual_seed(3)
    width = draft.shape.hidden_size
    cache, found = DraftCache(), []
    logits, hidden = draft(torch.randn(9, width, generator=generator), draft.fuse(torch.randn(9, 3, width, generator=generator)), torch.arange(9), cache)
    found.append(logits)
    for k in (1, 2):
        logits, hidden = draft(torch.randn(1, width, generator=generator), hidden[-1:], torch.tensor([8 + k]), cache)
        found.append(logits)
    return torch.cat(found)


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_an_exported_draft_gives_the_trainers_own_logits_bit_for_bit(engine: str, run_folder: Path) -> None:
    trained, exported = load_draft(best_checkpoint(run_folder / "train")), load_export(run_folder / "export" / engine)
    assert exported.draft.shape == trained.shape
    assert torch.equal(some_logits(exported.draft), some_logits(trained))
    assert torch.equal(exported.ids, read_ids(run_folder / "vocab"))


def test_an_export_in_bfloat16_is_the_trained_draft_rounded_once(make_run: Callable[..., Path]) -> None:
    folder = exported_run(make_run, "bfloat16", export={"dtype": "bfloat16"})
    tensors = load_file(folder / "export" / "vllm" / "model.safetensors")
    trained = load_draft(best_checkpoint(folder / "train"))
    for name, value in trained.state_dict().items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], value.bfloat16()), name
    assert json.loads((folder / "export" / "vllm" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_config_always_holds_every_key_that_engines_read(engine: str, run_folder: Path) -> None:
    config = json.loads((run_folder / "export" / engine / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 320, "draft_vocab_size": 200, "target_hidden_size": 32,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "norm_before_residual": True,
        "norm_before_fc": True, "fc_norm": True, "norm_output": False, "rope_theta": 10000.0, "torch_dtype": "float32",
    }  # fmt: skip
    assert {key: config.get(key, "missing") for key in wanted} == wanted
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == config["eagle_aux_hidden_state_layer_ids"]
    assert config["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize("value", [False, True])
def test_switches_are_written_whether_on_or_off(value: bool, run_folder: Path) -> None:
    """Engines disagree on defaults, so a switch that is left out means two things."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    shape = load_draft(best_checkpoint(run_folder / "train")).shape
    shape = type(shape)(**{**shape.as_dict(), **dict.fromkeys(names, value)})
    for engine in ("vllm", "sglang"):
        config = json.loads(json.dumps(draft_config(shape, engine, "float32", {})))  # type: ignore[arg-type]
        assert {name: config.get(name) for name in names} == dict.fromkeys(names, value)
        assert shape_from_config(config) == shape


def test_a_draft_of_two_layers_with_norms_over_heads_is_for_vllm_alone(make_run: Callable[..., Path]) -> None:
    folder = exported_run(make_run, "two layers", draft={"num_hidden_layers": 2, "qk_norm": True})
    trained, exported = load_draft(best_checkpoint(folder / "train")), load_export(folder / "export" / "vllm")
    assert exported.draft.shape == trained.shape and trained.shape.num_hidden_layers == 2
    with torch.no_grad():
        assert torch.equal(some_logits(exported.draft), some_logits(trained))
    config = json.loads((folder / "export" / "vllm" / "config.json").read_text())
    assert (config["architectures"], config["model_type"], config["num_hidden_layers"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3", 2)
    names = load_file(folder / "export" / "vllm" / "model.safetensors").keys()
    assert {"midlayer.self_attn.q_norm.weight", "layers.1.self_attn.k_norm.weight", "layers.1.input_layernorm.weight"} <= names
    assert not (folder / "export" / "sglang").exists()


def test_sglangs_layer_ids_are_one_lower_and_nothing_else_differs(run_folder: Path, tiny_target: Path) -> None:
    vllm, sglang = (json.loads((run_folder / "export" / engine / "config.json").read_text()) for engine in ENGINES)
    layers = read_spec(tiny_target).default_layers
    assert vllm["eagle_aux_hidden_state_layer_ids"] == layers
    assert sglang["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in layers]
    for config in (vllm, sglang):
        del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], config["eyas"]["layer_convention"]
    assert vllm == sglang
    files = [(run_folder / "export" / engine / "model.safetensors").read_bytes() for engine in ENGINES]
    assert files[0] == files[1]


def test_the_tensors_are_those_of_the_plain_form_and_the_embedding_is_left_out(run_folder: Path) -> None:
    tensors = load_file(run_folder / "export" / "vllm" / "model.safetensors")
    layer = [f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    layer += [f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"] + [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = ["input_norm.weight", *[f"fc_norm.{n}.weight" for n in range(3)]]
    assert sorted(tensors) == sorted(["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *layer, *norms])
    sizes = {"fc.weight": [32, 96], "lm_head.weight": [200, 32], "midlayer.self_attn.q_proj.weight": [40, 64], "midlayer.self_attn.k_proj.weight": [20, 64]}
    assert {name: list(tensors[name].shape) for name in sizes} == sizes
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(200) + tensors["d2t"], read_ids(run_folder / "vocab"))
    assert tensors["t2d"].sum() == 200


def test_no_mapping_is_written_when_the_draft_says_every_token(whole_vocabulary: Path) -> None:
    tensors = load_file(whole_vocabulary / "export" / "vllm" / "model.safetensors")
    assert not {"d2t", "t2d"} & tensors.keys()
    assert torch.equal(load_export(whole_vocabulary / "export" / "vllm").ids, torch.arange(320))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces or removes tensors of the exported file."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_export(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "eyas export" in message
    return message


def test_a_sound_copy_is_accepted(copy: Path) -> None:
    load_export(copy)
    rewrite(copy)
    load_export(copy)


@pytest.mark.parametrize("fault", ["absolute ids", "one id moved", "reversed", "shorter", "floating point", "missing", "t2d missing", "t2d of other tokens"])
def test_a_tampered_mapping_is_refused(fault: str, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    free = int((~t2d).nonzero()[-1])
    moved = torch.cat((torch.arange(200) + d2t, torch.tensor([free]))).sort().values[1:] - torch.arange(200)
    changes: dict[str, dict[str, torch.Tensor | None]] = {
        "absolute ids": {"d2t": d2t + torch.arange(200)},
        "one id moved": {"d2t": moved},
        "reversed": {"d2t": d2t.flip(0).contiguous()},
        "shorter": {"d2t": d2t[:-1].contiguous()},
        "floating point": {"d2t": d2t.float()},
        "missing": {"d2t": None},
        "t2d missing": {"t2d": None},
        "t2d of other tokens": {"t2d": t2d.roll(1)},
    }
    rewrite(copy, **changes[fault])
    refused(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -1000])
def test_a_truncated_weights_file_is_refused(keep: int, copy: Path) -> None:
    path = copy / "model.safetensors"
    data = path.read_bytes()
    path.unlink()  # not written through: the file may be a link
    path.write_bytes(data[:keep])
    refused(copy)


def test_a_weights_file_of_no_safetensors_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    refused(copy)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.q_proj.weight", "fc_norm.1.weight"])
def test_a_missing_or_misshapen_tensor_is_refused(name: str, copy: Path) -> None:
    whole = load_file(copy / "model.safetensors")[name]
    rewrite(copy, **{name: None})
    refused(copy)
    rewrite(copy, **{name: whole[:-1].contiguous()})
    refused(copy)


@pytest.mark.parametrize("key", ["head_dim", "vocab_size", "norm_output", "rope_parameters", "eagle_aux_hidden_state_layer_ids", "eyas"])
def test_a_config_without_a_needed_key_is_refused(key: str, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config[key]
    (copy / "config.json").write_text(json.dumps(config))
    refused(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, copy: Path) -> None:
    (copy / name).unlink()
    assert name in refused(copy)

"""Plans are held against models that transformers has counted, published figures, and runs made here."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from conftest import ROOT, Outcome, make_tiny_target, write_run
from rich.console import Console

from eyas.config import load
from eyas.features import disk
from eyas.foresight.check import planned
from eyas.foresight.hardware import Hardware, named
from eyas.foresight.plan import Plan, extraction_rate, make_plan
from eyas.foresight.show import show_plan
from eyas.foresight.size import cache_bytes, describe_quantization, size_of
from eyas.target.spec import read_spec

Eyas = Callable[..., Outcome]
KIMI = ROOT / "examples" / "kimi_k2_5"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip


def config_only(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def plan_of(path: Path, gpus: str = "", *overrides: str) -> Plan:
    return planned(load(path, list(overrides)), gpus, False, print)


def test_the_smallest_real_model_is_counted_to_the_last_weight(smollm2: Path) -> None:
    spec = read_spec(smollm2)
    size = size_of(spec)
    assert size is not None and size.parameters == sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(smollm2).parameters())
    assert abs(size.bytes / (smollm2 / "model.safetensors").stat().st_size - 1) < 0.02


def test_an_8b_llama_is_counted_from_its_config_alone(tmp_path: Path) -> None:
    """8,030,261,248 weights and 16.06 GB are what meta-llama/Llama-3.1-8B has; 131,072 bytes of keys and values a token are 32 layers of 8 heads of 128."""
    spec = read_spec(config_only(tmp_path / "target", LLAMA_8B), need_weights=False)
    size = size_of(spec)
    assert size is not None and size.parameters == 8_030_261_248 and round(size.bytes / 1e9, 2) == 16.06
    assert size.active == size.parameters - 128256 * 4096  # all but the embedding, of which a token takes one row
    assert cache_bytes(spec.text_config, spec.num_layers) == 131_072


def test_kimi_k2_5_is_counted_from_its_config_alone() -> None:
    """Published: one trillion weights, 32 billion of them met by a token, 547 GB, which are 553 of 2^30 bytes here; 57.3 kB of features a token in bfloat16."""
    spec = read_spec(KIMI / "target", need_weights=False)
    size = size_of(spec)
    assert size is not None and 1.02e12 < size.parameters < 1.04e12 and 31e9 < size.active < 33e9
    assert abs(size.bytes / 2**30 / 547 - 1) < 0.02
    assert cache_bytes(spec.text_config, 61) == 61 * 576 * 2
    assert describe_quantization(spec.quantization) == "compressed-tensors, int4, groups of 32"
    assert (spec.architecture, spec.wrapper) == ("KimiK25ForConditionalGeneration", "text_config") and (spec.num_layers, spec.hidden_size, spec.vocab_size) == (
        61,
        7168,
        163_840,
    )


def test_an_expert_counts_for_as_many_tokens_as_choose_it(tmp_path: Path) -> None:
    values = LLAMA_8B | {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        "intermediate_size": 14336, "tie_word_embeddings": False,
    }  # fmt: skip
    size = size_of(read_spec(config_only(tmp_path / "target", values), need_weights=False))
    assert size is not None and round(size.parameters / 1e9, 1) == 46.7  # mistralai/Mixtral-8x7B-v0.1
    assert round((size.active + 32000 * 4096) / 1e9, 1) == 12.9


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None}}}, "ignore": ["lm_head"]}, 8),
        ({}, 16),
    ],
)
def test_quantised_layers_count_with_their_scales(tmp_path: Path, quantization: dict[str, Any], bits: float) -> None:
    size = size_of(read_spec(config_only(tmp_path / "target", LLAMA_8B | {"quantization_config": quantization}), need_weights=False))
    layers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    rest = 8_030_261_248 - layers
    assert size is not None and size.bytes == pytest.approx(layers * bits / 8 + rest * 2, rel=1e-6)


def test_an_architecture_that_transformers_does_not_know_is_left_open(tmp_path: Path) -> None:
    assert size_of(read_spec(config_only(tmp_path / "target", LLAMA_8B | {"model_type": "newcomer"}), need_weights=False)) is None


def test_the_layers_stand_under_each_name(tmp_path: Path) -> None:
    """DESIGN: layer k is hidden_states[k] and vLLM's id k; SGLang's id is k - 1; the output of 0-based layer i is i + 1."""
    rows = plan_of(write_run(tmp_path, KIMI / "target", features={"layers": [2, 30, 58], "dtype": "bfloat16"})).layers
    assert [(row["eyas"], row["hidden_states"], row["vllm"], row["sglang"], row["output_of_layer"]) for row in rows] == [
        (2, 2, 2, 1, 1), (30, 30, 30, 29, 29), (58, 58, 58, 57, 57), (61, None, None, None, 60),
    ]  # fmt: skip


def test_rows_and_bytes_are_those_of_the_run(tmp_path: Path, tiny_target: Path, eyas: Eyas) -> None:
    path = write_run(tmp_path, tiny_target)
    foretold = plan_of(path)
    assert foretold.tokens is not None and "24 of 24" in foretold.tokens.source
    assert eyas("run", path, "--until", "train").code == 0
    folder = tmp_path / "runs" / "run"
    prepared, features, trained = (json.loads((folder / name / "manifest.json").read_text())["counts"] for name in ("prepare", "features", "train"))
    assert (foretold.tokens.rows, foretold.tokens.tokens, foretold.tokens.supervised) == (prepared["rows"], prepared["tokens"], prepared["supervised"])
    counted = plan_of(path)
    assert counted.tokens is not None and counted.tokens.source.startswith("counted") and counted.tokens.tokens == prepared["tokens"]
    foretold_bytes = counted.tokens.tokens * counted.as_dict(None)["token_bytes"]
    assert abs(foretold_bytes / features["bytes"] - 1) < 0.1, "of so few rows a shard's header is more than 2%"
    assert counted.memory["train"]["parameters"] == trained["parameters"]


def test_of_many_rows_a_sample_is_rendered(tmp_path: Path, tiny_target: Path, eyas: Eyas) -> None:
    path = write_run(tmp_path, tiny_target, [{"prompt": f"cat {n}", "completion": "the dog ran " * (1 + n % 7)} for n in range(5000)])
    foretold = plan_of(path).tokens
    assert foretold is not None and foretold.source == "2,000 of 5,000 conversations rendered"
    assert eyas("prepare", path).code == 0
    prepared = json.loads((tmp_path / "runs" / "run" / "prepare" / "manifest.json").read_text())["counts"]
    assert foretold.rows == prepared["rows"] == 5000 and abs(foretold.tokens / prepared["tokens"] - 1) < 0.02


def test_answers_still_to_be_written_count_as_the_longest(tmp_path: Path, tiny_target: Path) -> None:
    path = write_run(tmp_path, tiny_target, [{"prompt": "the cat"} for _ in range(10)])
    tokens = plan_of(path).tokens
    assert tokens is not None and tokens.written == tokens.supervised == 10 * 12 and tokens.tokens > tokens.written


def test_without_a_tokenizer_rows_count_as_the_longest(tmp_path: Path) -> None:
    found = plan_of(write_run(tmp_path, KIMI / "target", data={"max_length": 1000}), "8xH200")
    assert found.tokens is not None and found.tokens.tokens == 24 * 1000
    assert ("chat template", "warn") in [(finding.name, finding.level) for finding in found.findings]


def test_time_and_price_follow_from_the_rates(tmp_path: Path, tiny_target: Path) -> None:
    path = write_run(tmp_path, tiny_target)
    config, spec = load(path, []), read_spec(tiny_target)
    found = make_plan(config, spec, Hardware("CPU", 0, 10**10), {"extract": 100.0, "train": 10.0, "disk": 1e6})
    assert found.tokens is not None
    weights = (tiny_target / "model.safetensors").stat().st_size
    by_name = {stage.name: stage.seconds for stage in found.stages}
    assert by_name["extract"] == pytest.approx(found.tokens.tokens / 100 + weights / 1e6) and by_name["train"] == pytest.approx(2 * found.tokens.tokens / 10)
    assert found.seconds == pytest.approx(sum(seconds for seconds in by_name.values() if seconds))
    assert found.as_dict(3.0)["price"] == pytest.approx(3.0 * found.seconds / 3600)
    unknown = make_plan(config, spec, Hardware("CPU", 0, 10**10))
    assert unknown.seconds is None and unknown.as_dict(3.0)["price"] is None


def test_a_small_draft_on_a_gpu_takes_as_long_as_its_steps_are_launched(tmp_path: Path, smollm2: Path) -> None:
    """65 ms a step of seven draft steps, or 10.6 as a graph, as measured on an H200 (docs/log.md); its products alone would take less. A draft of an 8B target
    is not bound by it."""
    for recompute, launch in ((True, 0.009), (False, 0.0015)):  # what is computed anew in backward is not made a graph
        (tmp_path / f"{recompute}").mkdir()
        train = {"epochs": 100, "tokens_per_step": 1024, "tokens_per_batch": 512, "unroll_steps": 7, "recompute": recompute}
        found = plan_of(write_run(tmp_path / f"{recompute}", smollm2, train=train), "1xH200")
        assert found.tokens is not None
        steps = -(-100 * found.tokens.tokens // 1024)
        assert {stage.name: stage.seconds for stage in found.stages}["train"] == pytest.approx(2 * steps * 7 * launch)
    (tmp_path / "other").mkdir()
    large = write_run(
        tmp_path / "other", config_only(tmp_path / "8b", LLAMA_8B), train={"epochs": 100, "tokens_per_step": 8192, "tokens_per_batch": 8192, "unroll_steps": 7}
    )
    tokens, seconds = plan_of(large, "1xH200").tokens, {stage.name: stage.seconds for stage in plan_of(large, "1xH200").stages}["train"]
    assert tokens is not None and seconds is not None and seconds > 100 * tokens.tokens / 8192 * 0.1


@pytest.mark.parametrize(("engine", "rate"), [("transformers", 0.32e9), ("vllm", 3.5e9)])
def test_features_of_a_small_target_come_no_faster_than_they_are_written(engine: str, rate: float, tmp_path: Path, smollm2: Path) -> None:
    """14.0 GB in 43 s, by transformers on an H200 (docs/log.md), where the forward alone would take a second."""
    found = plan_of(write_run(tmp_path, smollm2, target={"engine": engine}), "1xH200")
    assert found.tokens is not None and found.stages[1].name == "extract"
    assert (found.stages[1].seconds or 0.0) >= 0.999 * found.tokens.tokens * 4 * 576 * 4 / rate  # 4 layers, in float32


@pytest.mark.parametrize(("size", "epochs", "told"), [(8192, 3, "4096"), (4096, 3, "2048"), (2048, 3, None), (8192, 10_000, None)])
def test_few_optimiser_steps_are_a_warning_that_names_a_smaller_one(size: int, epochs: int, told: str | None, tmp_path: Path, tiny_target: Path) -> None:
    found = plan_of(write_run(tmp_path, tiny_target, train={"tokens_per_step": size, "epochs": epochs}))
    steps = [finding.step for finding in found.findings if finding.name == "steps"]
    assert [f"Set it to {told}" in step for step in steps] == ([True] if told else [])


def test_no_step_is_advised_that_would_leave_gpus_idle(tmp_path: Path, tiny_target: Path) -> None:
    """8 x 4,096 tokens keep eight GPUs busy: half of 65,536 does, half of 32,768 does not."""
    for size, told in ((65_536, 1), (32_768, 0)):
        (tmp_path / f"{size}").mkdir()
        path = write_run(tmp_path / f"{size}", tiny_target, train={"tokens_per_step": size})
        found = plan_of(path, "8xH200", "target.device=auto")
        assert sum(finding.name == "steps" for finding in found.findings) == told


def test_the_founding_case_is_foretold_within_a_quarter() -> None:
    """It ran at about 2,280 tokens a second, eight GPUs on PCIe; which ones is not published."""
    config, spec = load(KIMI / "run.toml", []), read_spec(KIMI / "target", need_weights=False)
    for gpus in ("8xH100-PCIe", "8xRTX PRO 6000"):
        rate = extraction_rate(config, spec, size_of(spec), named(gpus))
        assert rate is not None and 0.75 < rate / 2280 < 1.25, gpus


def test_the_nearest_setting_that_fits_does_fit(tmp_path: Path) -> None:
    target = config_only(tmp_path / "target", LLAMA_8B)
    path = write_run(tmp_path, target, target={"engine": "vllm"}, vocab={"size": 32000}, train={"tokens_per_batch": 1 << 18, "dtype": "bfloat16"})
    (finding,) = [finding for finding in plan_of(path, "1xRTX 4090").findings if finding.level == "fail" and "train needs" in finding.text]
    key, value = finding.step.removeprefix("Set ").split(";")[0].split(" = ")
    assert not [other for other in plan_of(path, "1xRTX 4090", f"{key}={value}").findings if "train needs" in other.text]
    path = write_run(tmp_path, target, target={"engine": "vllm", "max_batched_tokens": 8192})
    (finding,) = [finding for finding in plan_of(path, "4xRTX 3090").findings if "extract needs" in finding.text] or [None]
    if finding is not None:
        key, value = finding.step.removeprefix("Set ").removesuffix(".").split(" = ")
        assert not [other for other in plan_of(path, "4xRTX 3090", f"{key}={value}").findings if "extract needs" in other.text]


@pytest.mark.parametrize(("room", "named"), [(40 * 10**9, '"36GB"'), (10**9, '"900MB"'), (10**6, None), (-(10**9), None)])
def test_a_quota_is_named_only_if_it_fits(room: int, named: str | None, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 50, used=0, free=disk.FREE_FLOOR + room))
    found = plan_of(write_run(tmp_path, tiny_target, data={"synthesize": 10**7}), "1xH200")
    (finding,) = [finding for finding in found.findings if finding.name == "disk"]
    assert finding.level == "fail" and "Free some space" in finding.text
    assert finding.step == (f"Or set features.keep = {named}: they are then captured in rounds." if named else "")


def test_a_run_that_cannot_end_well_does_not_begin_but_by_force(tmp_path: Path, tiny_target: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, tiny_target)
    monkeypatch.setattr("eyas.foresight.check.here", lambda: Hardware("CPU", 0, 1000))
    error = eyas("run", path, "--until", "extract").error
    assert "cannot end well" in error and "extract needs" in error and "--force" in error
    assert not (tmp_path / "runs" / "run" / "prepare").exists()
    assert eyas("run", path, "--until", "extract", "--force").code == 0


def test_the_plan_reads_no_weight_and_leaves_nothing(tmp_path: Path, eyas: Eyas) -> None:
    target = make_tiny_target(tmp_path / "target")
    path = write_run(tmp_path, target)
    with open(target / "model.safetensors", "r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        size = (target / "model.safetensors").stat().st_size
        file.truncate(header)
        file.truncate(size)
    before = sorted(tmp_path.rglob("*"))
    found = json.loads(eyas("plan", path, "--json").out)
    assert found["target"]["layers"] == 6 and found["target"]["bytes"] == size and sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_calibration_measures_what_the_plan_then_uses(tmp_path: Path, tiny_target: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.foresight.calibrate.SECONDS", 0.3)
    path = write_run(tmp_path, tiny_target, [{"prompt": f"cat {n}"} for n in range(20)])
    outcome = eyas("plan", path, "--calibrate", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    rates = json.loads((tmp_path / "runs" / "run" / "calibration.json").read_text())["rates"]
    assert rates.keys() == {"disk", "load", "generate", "extract", "train"} and all(rate > 0 for rate in rates.values())
    assert found["seconds"] is not None and all(stage["source"] in ("measured here", "") for stage in found["stages"])
    again = json.loads(eyas("plan", path, "--json").out)
    assert again["stages"] == found["stages"] or again["seconds"] == pytest.approx(found["seconds"], rel=0.5)  # the disk is timed anew


def test_hardware_that_is_named() -> None:
    assert named("8xH100") == Hardware("H100", 8, 80 * 10**9, 989e12, 200e9) and named("h200").count == 1 and named("2 x L40S").count == 2
    assert named("8xH100-PCIe").link == 10e9


def test_a_price_without_every_stages_time_is_a_least_price() -> None:
    config, spec = load(KIMI / "run.toml", []), read_spec(KIMI / "target", need_weights=False)
    plan = make_plan(config, spec, named("8xH100"))
    assert plan.seconds is None and plan.as_dict(2.5)["price"] is None, "nobody knows how long answers take"
    console = Console(record=True, width=200, file=io.StringIO())
    show_plan(plan, 2.5, console)
    assert f"at least {8 * 2.5 * plan.least_seconds / 3600:,.2f} at 2.50 a GPU hour" in console.export_text()

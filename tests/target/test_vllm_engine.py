"""A real vLLM, in its own environment, gives the states, answers and log-probabilities that transformers gives in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_tiny_target, write_run

from eyas.config import TargetSection, load
from eyas.errors import UserError
from eyas.features.reader import FeatureReader
from eyas.pipeline import Run
from eyas.target.engine import Sampling
from eyas.target.spec import TargetSpec, read_spec
from eyas.target.transformers_engine import TransformersEngine
from eyas.target.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MAX_LENGTH = 160


@pytest.fixture(scope="module")
def spec(smollm2: Path) -> TargetSpec:
    return read_spec(smollm2)


@pytest.fixture(scope="module")
def vllm(spec: TargetSpec, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} is not there; run `make env-vllm` first, or `make test`, which does")
    section = TargetSection(path=str(smollm2), engine="vllm", python=str(VLLM_PYTHON), max_batched_tokens=512, extra={"kv_cache_memory_bytes": 1 << 30})
    engine = VllmEngine(spec, section, torch.float32, MAX_LENGTH, tmp_path_factory.mktemp("vllm") / "engine.log")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def transformers(spec: TargetSpec) -> TransformersEngine:
    return TransformersEngine(spec, torch.device("cpu"), torch.float32, False)


def rows() -> list[list[int]]:
    """Of 1 token, of the greatest length, with a long common beginning, one twice, and of many lengths; more than one forward holds."""
    generator = torch.Generator().manual_seed(0)
    stem = torch.randint(3, 49_000, (100,), generator=generator).tolist()
    free = [torch.randint(3, 49_000, (length,), generator=generator).tolist() for length in (1, 2, 17, 64, 5, 90, MAX_LENGTH, 33, 128, 150, 71)]
    return [*free, [*stem, 7, 8, 9], [*stem, 7, 8], stem, stem]


def test_states_are_those_of_transformers_at_every_layer(vllm: VllmEngine, transformers: TransformersEngine, spec: TargetSpec) -> None:
    layers = [0, 1, 2, 15, 27, 29, 30]
    found = vllm.capture(rows(), layers)
    for row, states in zip(rows(), found, strict=True):
        (alone,) = transformers.capture([row], layers)
        assert states.shape == alone.shape and states.dtype == torch.float32
        for position, k in enumerate(layers):
            error = (states[:, position] - alone[:, position]).norm() / alone[:, position].norm()
            assert error < 1e-5, f"layer {k} of a row of {len(row)} tokens"


def test_the_second_call_gives_what_the_first_gave(vllm: VllmEngine) -> None:
    layers = [0, 1, 2, 15, 27, 29, 30]
    first, second = (vllm.capture(rows()[:4], layers) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_log_probabilities_are_those_of_transformers(vllm: VllmEngine, transformers: TransformersEngine) -> None:
    row = rows()[3]
    torch.testing.assert_close(vllm.log_probabilities(row), transformers.log_probabilities(row), rtol=1e-4, atol=1e-3)


def test_greedy_answers_are_those_of_transformers(vllm: VllmEngine, transformers: TransformersEngine) -> None:
    prompts = [[1, 4093, 198, *row] for row in rows()[:4]]
    sampling = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0)
    assert vllm.generate(prompts, sampling) == transformers.generate(prompts, sampling)


def test_a_python_without_vllm_is_named_with_its_log(spec: TargetSpec, tmp_path: Path) -> None:
    section = TargetSection(path=str(spec.path), engine="vllm", python=sys.executable)
    engine = VllmEngine(spec, section, torch.float32, MAX_LENGTH, tmp_path / "engine.log")
    with pytest.raises(UserError, match=r"No module named 'vllm'.*engine\.log"):
        engine.log_probabilities([1, 2, 3])


def test_a_python_that_is_not_there_is_named(spec: TargetSpec, tmp_path: Path) -> None:
    section = TargetSection(path=str(spec.path), engine="vllm", python=str(tmp_path / "python"))
    with pytest.raises(UserError, match="cannot be started"):
        VllmEngine(spec, section, torch.float32, MAX_LENGTH, tmp_path / "engine.log").log_probabilities([1, 2, 3])


def test_an_engine_that_dies_is_named_with_its_log(spec: TargetSpec, vllm: VllmEngine, tmp_path: Path) -> None:
    engine = VllmEngine(spec, vllm.section, torch.float32, MAX_LENGTH, tmp_path / "engine.log")
    engine.log_probabilities([1, 2, 3])
    assert engine.process is not None
    engine.process.kill()
    with pytest.raises(UserError, match=r"ended with code -9.*engine\.log"):
        engine.log_probabilities([1, 2, 3])


def test_tensor_parallel_2_gives_the_states_of_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny_target(tmp_path / "target", num_layers=4, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    some = [[token % 320 for token in row] for row in rows()[:6]]
    found = {}
    for ranks, cores in ((1, "0"), (2, "0|1")):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
        section = TargetSection(
            path=str(target), engine="vllm", python=str(VLLM_PYTHON), tensor_parallel=ranks, max_batched_tokens=512, extra={"kv_cache_memory_bytes": 1 << 28}
        )
        engine = VllmEngine(read_spec(target), section, torch.float32, MAX_LENGTH, tmp_path / f"engine-{ranks}.log")
        found[ranks] = engine.capture(some, [0, 2, 4])
        engine.close()
    for one, two in zip(found[1], found[2], strict=True):
        assert (one - two).norm() / one.norm() < 1e-5


def test_a_run_with_vllm_captures_what_a_run_with_transformers_captures(tmp_path: Path) -> None:
    """The stages, not the engine alone: answers written, features stored and proved, by the run file's word."""
    target = make_tiny_target(tmp_path / "target", num_layers=4, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    stores = {}
    for engine in ("transformers", "vllm"):
        folder = tmp_path / engine
        folder.mkdir()
        run_file = write_run(
            folder, target, target={"engine": engine, "python": str(VLLM_PYTHON)}, data={"regenerate": "all", "temperature": 0.0, "max_new_tokens": 6}
        )
        run_file.write_text(run_file.read_text() + "[target.extra]\nkv_cache_memory_bytes = 268435456\n")
        run = Run(load(run_file, []))
        run.up_to("extract")
        reader = FeatureReader(run.folder / "features")
        stores[engine] = {key: reader.row(key) for key in reader.places}
    assert stores["vllm"].keys() == stores["transformers"].keys(), "the same greedy answers, so the same rows"
    for key, row in stores["vllm"].items():
        for name in ("aux", "last"):
            one, other = getattr(row, name), getattr(stores["transformers"][key], name)
            assert (one - other).norm() / other.norm() < 1e-5

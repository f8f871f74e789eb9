"""The tap against vLLM's own way of taking hidden states out, which shares no code with it: the same rows, the same layers, the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import VLLM_DTYPE, VLLM_PYTHON, assert_same_states
from safetensors.torch import load_file

from eyas.config import TargetSection
from eyas.target.spec import read_spec
from eyas.target.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# Of SmolLM2's 30: its embeddings, its last layer and what lies between. Not the embeddings on a GPU: what vLLM returns there is the very tensor to which its
# eager norm then adds each layer in place (interfaces.py, _maybe_add_hidden_state), so the whole stream; 1.0 apart in 0.23.0 and 0.25.1.
LAYERS = [*([] if torch.cuda.is_available() else [0]), 1, 2, 15, 27, 29, 30]


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 49_000, (length,), generator=generator).tolist() for length in (2, 17, 64, 5, 90, 150)]


def oracle(target: Path, folder: Path) -> list[torch.Tensor]:
    """What vLLM extracts by itself, [T, L, D] float32 for each row."""
    job, out = folder / "job.json", folder / "states.safetensors"
    job.write_text(
        json.dumps(
            {
                "model": str(target),
                "rows": rows(),
                "layers": LAYERS,
                "dtype": str(VLLM_DTYPE).removeprefix("torch."),
                "out": str(out),
                "folder": str(folder / "vllm"),
            }
        )
    )
    (folder / "vllm").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [VLLM_PYTHON, Path(__file__).with_name("oracle_in_vllm.py"), job], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    states = load_file(out)
    return [states[str(index)] for index in range(len(rows()))]


def test_the_tap_takes_out_what_vllm_itself_takes_out(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} is not there; run `make env-vllm` first, or `make test`, which does")
    wanted = oracle(smollm2, tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # 20 s less
    section = TargetSection(path=str(smollm2), engine="vllm", python=str(VLLM_PYTHON), max_batched_tokens=512, extra={"kv_cache_memory_bytes": 1 << 29})
    engine = VllmEngine(read_spec(smollm2), section, VLLM_DTYPE, 160, tmp_path / "engine.log")
    try:
        found = engine.capture(rows(), LAYERS)
    finally:
        engine.close()
    assert_same_states(found, wanted, LAYERS)

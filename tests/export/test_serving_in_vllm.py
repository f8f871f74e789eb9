"""The whole chain on real parts: a draft of SmolLM2-135M-Instruct trained here, exported, loaded and served by a real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, write_run

from eyas.config import load
from eyas.pipeline import Run

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
NUM_CONVERSATIONS, NUM_DRAFT_TOKENS = 220, 3

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder: a small draft of the real model, evaluated in process on the quickstart's held-out prompts."""
    folder = tmp_path_factory.mktemp("real")
    data = ROOT / "examples" / "quickstart" / "data"
    rows = [json.loads(line) for line in (data / "conversations.jsonl").read_text().splitlines()[:NUM_CONVERSATIONS]]
    run_file = write_run(
        folder, smollm2, rows,
        target={"dtype": "auto"}, data={"max_length": 512, "holdout": 0.02, "regenerate": "never"}, features={"dtype": "bfloat16"}, vocab={"size": 4096},
        train={"epochs": 3, "tokens_per_step": 1024, "tokens_per_batch": 1024, "unroll_steps": NUM_DRAFT_TOKENS, "dtype": "auto", "checkpoint_every": 1000},
        evaluate={"prompts": [str(data / "heldout.jsonl")], "prompts_per_category": 3, "num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": 64},
        export={"dtype": "auto"},
    )  # fmt: skip
    run = Run(load(run_file, []))
    run.up_to("evaluate")
    return run.folder


def serve(folder: Path, smollm2: Path, draft: Path | None, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} is not there; run `make env-vllm` first, or `make test`, which does")
    job, out = folder / "job.json", folder / "out.json"
    job.write_text(
        json.dumps(
            {"target": str(smollm2), "draft": draft and str(draft), "num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": max_new_tokens, "prompts": prompts}
        )
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(VLLM_PYTHON), str(Path(__file__).with_name("serve_in_vllm.py")), str(job), str(out)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_the_exported_draft_serves_in_vllm_with_the_same_tokens_and_the_acceptance_that_was_simulated(trained: Path, smollm2: Path, tmp_path: Path) -> None:
    summary = json.loads((trained / "evaluate" / "summary.json").read_text())
    rows = [json.loads(line) for line in (trained / "evaluate" / "rows.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    plain = serve(tmp_path, smollm2, None, prompts, summary["max_new_tokens"])
    drafted = serve(tmp_path, smollm2, trained / "export" / "vllm", prompts, summary["max_new_tokens"])

    assert drafted["answers"] == plain["answers"], "a draft must not change a token"
    for row, answer in zip(rows, plain["answers"], strict=True):
        assert answer == row["answer"] or row["smallest_margin"] < 1e-3, f"{row['id']}: vLLM and the engine in process must write the same text"

    served = 1 + drafted["accepted"] / drafted["rounds"]
    simulated, measured = summary["simulated_acceptance_length"], summary["acceptance_length"]
    print(
        f"acceptance length, {NUM_DRAFT_TOKENS} draft tokens, greedy: served by vLLM {served:.3f}, simulated {simulated:.3f}, measured in process "
        f"{measured:.3f}"
    )
    assert simulated > 1.2, "a draft that accepts nothing would pass whatever its layers, norms, rope and vocabulary were"
    assert served == pytest.approx(simulated, rel=0.05)
    assert measured == pytest.approx(simulated, rel=0.01)
    assert summary["greedy_identical"]
    survival = [count / drafted["rounds"] for count in drafted["accepted_per_position"]]
    assert survival == pytest.approx(summary["survival"], abs=0.05)

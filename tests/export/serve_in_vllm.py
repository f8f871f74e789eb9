"""Run by the Python of a vLLM environment: serves prompts greedily, with a draft or without, and writes what came out as JSON.

    python serve_in_vllm.py JOB.json OUT.json

JOB: {"target", "draft" or null, "num_draft_tokens", "max_new_tokens", "prompts": [[token id, ...], ...]}
OUT: {"answers": [[token id, ...], ...], "rounds", "accepted", "accepted_per_position"}; the last three are vLLM's own counters, 0 without a draft.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: starts in seconds

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    speculative = {"method": "eagle3", "model": job["draft"], "num_speculative_tokens": job["num_draft_tokens"]} if job["draft"] else None
    longest = max(len(prompt) for prompt in job["prompts"]) + job["max_new_tokens"] + 16
    llm = LLM(
        model=job["target"], dtype="float32", max_model_len=longest, enforce_eager=True, kv_cache_memory_bytes=1 << 30, seed=0,
        enable_prefix_caching=False, disable_log_stats=False, speculative_config=speculative,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    counters = {metric.name: metric for metric in llm.get_metrics()} if job["draft"] else {}

    def count(name: str) -> int:
        return int(counters[name].value) if name in counters else 0

    result = {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "rounds": count("vllm:spec_decode_num_drafts"),
        "accepted": count("vllm:spec_decode_num_accepted_tokens"),
        "accepted_per_position": list(counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values) if job["draft"] else [],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

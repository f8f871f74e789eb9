"""Hidden states by vLLM's own `extract_hidden_states` method, for the test to hold the tap against. Runs in the vLLM environment, without Eyas.

    python oracle_in_vllm.py JOB.json

JOB: {"model": folder, "dtype", "rows": token ids of each row, "layers": vLLM's layer ids, ascending, "out": safetensors file, "folder": for vLLM's own files}.
Writes [T, L, D] in float32 for each row under its number.

vLLM's id k is the residual stream before its decoder layer k, and its number of layers the stream after the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class Done:
    """Stands for the event that a copy from a GPU would record."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ConnectorOnCpu(example.ExampleHiddenStatesConnector):
    """vLLM's example, which copies through pinned memory by CUDA streams; on a CPU the states are already where they can be written."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None]
        slots = (blocks * self._block_size + torch.arange(self._block_size)).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        save_file({"hidden_states": states.clone().contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        self._req_copy_events[pending.req_id] = Done()


def load_written(path: str) -> dict[str, torch.Tensor]:
    """On a GPU a thread writes the file, so it may come later."""
    for _ in range(100):
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            time.sleep(0.1)
    return load_file(path)


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if not torch.cuda.is_available():  # this file, imported once more under its own name
        connector = {"kv_connector": "ConnectorOnCpu", "kv_connector_module_path": "oracle_in_vllm"}
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=1 << 29,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        },
        kv_transfer_config={
            **connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["folder"], "use_synchronization_lock": False},
        },
    )
    outputs = llm.generate([{"prompt_token_ids": row} for row in job["rows"]], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    llm.llm_engine.step()  # in one process, a request's file is written at the step after its last
    states = {}
    for index, (row, output) in enumerate(zip(job["rows"], outputs, strict=True)):
        found = load_written(output.kv_transfer_params["hidden_states_path"])
        assert found["token_ids"].tolist()[: len(row)] == row
        states[str(index)] = found["hidden_states"][: len(row)].float().contiguous()
    save_file(states, job["out"])


if __name__ == "__main__":
    main()

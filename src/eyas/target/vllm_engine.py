"""The target run by vLLM, in a process of its own, with the Python of the user's vLLM environment: whatever version it has, whatever Eyas runs on.

Commands go to vllm_worker.py as JSON lines; tensors travel as files in shared memory, or in the temporary folder where there is none.

Legend: T tokens of a row, L captured layers, D hidden width.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import eyas
from eyas.config import TargetSection
from eyas.errors import UserError
from eyas.target.engine import Answer, Sampling
from eyas.target.spec import TargetSpec

# The worker's own small copy of Eyas: its other modules, and whatever is installed beside them, must not shadow the vLLM environment's packages.
WORKER_FILES = ("__init__.py", "errors.py", "target/__init__.py", "target/tap.py", "target/vllm_worker.py")


class VllmEngine:
    """Starts vLLM on first use, because loading takes minutes and may not be needed. max_length: tokens of the longest row or answer with its prompt."""

    def __init__(self, spec: TargetSpec, section: TargetSection, dtype: torch.dtype, max_length: int, log: Path) -> None:
        self.spec, self.section, self.dtype, self.max_length, self.log = spec, section, dtype, max_length, log
        # One call serves several forwards, because the files in between cost a little.
        self.capture_tokens = 8 * section.max_batched_tokens
        self.process: subprocess.Popen[str] | None = None
        self.folder: Path | None = None
        self.version = ""

    def capture(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        self._start()
        assert self.folder is not None
        wanted, out = self.folder / "rows.safetensors", self.folder / "states.safetensors"
        distinct = list(dict.fromkeys(tuple(row) for row in rows))  # a row asked for twice is captured once
        offsets = torch.tensor([0, *(len(row) for row in distinct)]).cumsum(0)
        save_file({"tokens": torch.tensor([token for row in distinct for token in row], dtype=torch.int32), "offsets": offsets}, wanted)
        result = self._call("capture", rows=str(wanted), layers=list(layers), out=str(out))
        if result["missing"]:
            row = distinct[result["missing"][0]]
            raise UserError(
                f"vLLM did not bring the features of {len(result['missing'])} of {len(distinct)} rows, asked together and alone "
                f"(the first has {len(row)} tokens, beginning {list(row[:8])}). Its log is {self.log}; please report it with the vLLM version, {self.version}."
            )
        states = load_file(out)
        out.unlink()
        found = {row: states[str(index)] for index, row in enumerate(distinct)}
        return [found[tuple(row)] for row in rows]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        self._start()
        # No seed for each request: that makes vLLM's sampling several times slower on a GPU.
        choice = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(self.spec.stop_ids),
        }
        answers = self._call("generate", prompts=[list(prompt) for prompt in prompts], sampling=choice)
        return [Answer(answer["tokens"], "stop" if answer["finish"] == "stop" else "length") for answer in answers]

    def log_probabilities(self, row: Sequence[int]) -> torch.Tensor:
        self._start()
        return torch.tensor(self._call("log_probabilities", row=list(row)))

    def _start(self) -> None:
        if self.process is not None:
            return
        shared = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="eyas-", dir=shared if os.access(shared, os.W_OK) else None))
        source = Path(eyas.__file__).parent
        for name in WORKER_FILES:
            (self.folder / "eyas" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, self.folder / "eyas" / name)
        arguments = {
            "model": str(self.spec.path),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensor_parallel_size": self.section.tensor_parallel,
            "gpu_memory_utilization": self.section.gpu_memory_utilization,
            "max_num_batched_tokens": max(self.section.max_batched_tokens, self.max_length + 1),
            "max_model_len": self.max_length + 1,  # vLLM wants room for the one token that it is asked to write
            "trust_remote_code": self.section.trust_remote_code,
            "disable_log_stats": True,
            **self.section.extra,
            # What capture rests on: compiled code fires no hooks, cached tokens are not computed again, chunks hide whose they are.
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
        }
        job = self.folder / "job.json"
        job.write_text(json.dumps({"engine": arguments, "num_layers": self.spec.num_layers}))
        self.replies, replies = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("r", "w"), strict=True))
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        python = self.section.python or sys.executable
        with open(self.log, "ab") as log:
            try:
                self.process = subprocess.Popen(
                    [python, "-m", "eyas.target.vllm_worker", str(job), str(replies.fileno())],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=environment, pass_fds=[replies.fileno()],
                )  # fmt: skip
            except OSError as error:
                raise UserError(f"target.python = {python!r} cannot be started: {error.strerror}. Give the python of an environment that has vLLM.") from None
        replies.close()
        self.version = self._reply("starting")["vllm"]

    def _call(self, do: str, **keywords: Any) -> Any:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **keywords}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; the missing reply says so
        return self._reply(do)

    def _reply(self, during: str) -> Any:
        assert self.process is not None
        line = self.replies.readline()
        reply = json.loads(line) if line.endswith("\n") else {"error": f"its process ended with code {self.process.wait()}"}
        if "error" in reply:
            self.close()
            raise UserError(
                f"vLLM failed while {during}: {reply['error'].splitlines()[0]}. Its log is {self.log}; mend what it names, then run the same command again."
            )
        return reply["ok"]

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def __del__(self) -> None:
        self.close()

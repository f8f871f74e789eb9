"""Runs in a process of its own, with the Python of a vLLM environment: loads the target once, then answers commands.

Of Eyas it needs only this file, tap.py and errors.py; else vllm, torch, safetensors, numpy. Of vLLM it uses only what is public: `LLM(...)`, `generate`,
`worker_extension_cls`, `collective_rpc` by method name with plain values, and the worker's `get_model()`.

    python -m eyas.target.vllm_worker JOB.json FD

JOB holds {"engine": arguments of LLM, "num_layers"}. Commands come as JSON lines on stdin, replies go as JSON lines to the file descriptor FD, because
vLLM prints to the other two. Tensors travel as safetensors files.

Legend: T tokens, L captured layers, D hidden width, n tokens of one forward.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from eyas.target.tap import find_decoder_layers, residual_stream


class Recognizer:
    """Gives the states of each forward to the rows they belong to, by content alone.

    Together, rows come whole: chunked prefill is off, so every request in a forward begins at position 0, and the tokens from there on say which row
    it is. States depend on a row's own tokens only, so rows with equal tokens are one row. What is not whole is dropped and asked for again, alone:
    then its chunks, if it comes in chunks, cannot be taken for anybody else's. (Of several requests in chunks, one that ends at position 4 and one
    that goes on at 5 would look like one run.)
    """

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = rows
        self.states: list[torch.Tensor | None] = [None] * len(rows)
        self.by_content = {row.tobytes(): index for index, row in enumerate(rows)}
        self.lengths = sorted({len(row) for row in rows}, reverse=True)
        self.alone: int | None = None  # the one row that is asked for
        self.chunks: list[torch.Tensor] = []

    def give(self, ids: np.ndarray, positions: np.ndarray, states: torch.Tensor) -> None:
        """ids, positions int64 [n]; states [n, L, D]."""
        if self.alone is not None:
            self._give_alone(ids, positions, states)
            return
        starts = np.flatnonzero(positions == 0)
        for start, end in itertools.pairwise([*starts.tolist(), len(ids)]):
            ascending = np.flatnonzero(positions[start:end] != np.arange(end - start))
            run = ids[start : start + int(ascending[0])] if len(ascending) else ids[start:end]
            # The row may be followed by what an engine pads with, so shorter rows are tried too.
            for length in self.lengths:
                index = self.by_content.get(run[:length].tobytes()) if length <= len(run) else None
                if index is not None:
                    if self.states[index] is None:
                        self.states[index] = states[start : start + length].clone()
                    break

    def ask_alone(self, index: int) -> None:
        self.alone, self.chunks = index, []

    def _give_alone(self, ids: np.ndarray, positions: np.ndarray, states: torch.Tensor) -> None:
        assert self.alone is not None
        row, done = self.rows[self.alone], sum(len(chunk) for chunk in self.chunks)
        rest = row[done : done + len(ids)]
        if len(rest) and np.array_equal(ids[: len(rest)], rest) and np.array_equal(positions[: len(rest)], np.arange(done, done + len(rest))):
            self.chunks.append(states[: len(rest)].clone())
            if done + len(rest) == len(row):
                self.states[self.alone] = torch.cat(self.chunks)

    def missing(self) -> list[int]:
        return [index for index, state in enumerate(self.states) if state is None]


class Tap:
    """Mixed into each of vLLM's workers by `worker_extension_cls`; its methods are called by `collective_rpc`."""

    eyas_layers: list[int]
    eyas_now: dict[int, torch.Tensor]  # layer -> states of the forward that is running
    eyas_ids: torch.Tensor | None  # what the embedding was last called with
    eyas_rows: Recognizer | None

    def eyas_install(self, num_layers: int, layers: list[int]) -> None:
        """Hooks the decoder layers, the embedding and the whole model; each forward then goes to the recognizer, if rows are wanted."""
        model = self.get_model()  # type: ignore[attr-defined]
        self.eyas_layers, self.eyas_now = layers, {}
        self.eyas_ids = self.eyas_rows = None
        decoder = find_decoder_layers(model, num_layers)
        if not self._eyas_writes():
            return
        for k in layers:
            if k == 0:
                decoder[0].register_forward_pre_hook(self._eyas_before_first, with_kwargs=True)
            else:
                decoder[k - 1].register_forward_hook(self._eyas_after(k))
        for module in model.modules():
            if type(module).__name__ == "VocabParallelEmbedding":  # a multimodal wrapper embeds first and calls the model without ids
                module.register_forward_pre_hook(self._eyas_embedding)
        model.register_forward_hook(self._eyas_end, with_kwargs=True)

    def _eyas_writes(self) -> bool:
        """States are the same on all ranks of a tensor-parallel group after its all-reduce; one rank keeps them."""
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    def _eyas_before_first(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = [keywords.get("hidden_states"), *arguments]
        self.eyas_now[0] = next(value for value in given if isinstance(value, torch.Tensor) and value.is_floating_point())

    def _eyas_after(self, k: int) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            self.eyas_now[k] = residual_stream(output)

        return hook

    def _eyas_embedding(self, module: Any, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], torch.Tensor) and not arguments[0].is_floating_point():
            self.eyas_ids = arguments[0]

    def _eyas_end(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        now, self.eyas_now = self.eyas_now, {}
        if self.eyas_rows is None or len(now) < len(set(self.eyas_layers)):
            return
        ids, positions = keywords.get("input_ids"), keywords["positions"]
        ids = self.eyas_ids if ids is None else ids
        assert ids is not None
        positions = positions[0] if positions.dim() > 1 else positions  # one row for each axis of a multimodal rope
        num = min(len(ids), len(positions))
        states = torch.stack([now[k][:num] for k in self.eyas_layers], dim=1).to("cpu")
        self.eyas_rows.give(ids[:num].cpu().numpy(), positions[:num].cpu().numpy(), states)

    def eyas_want(self, path: str) -> None:
        """Rows to capture: tokens int32 [T] and offsets int64 [R + 1] in a safetensors file."""
        if self._eyas_writes():
            self.eyas_rows = Recognizer(read_rows(path))

    def eyas_missing(self) -> list[int]:
        """The numbers of the rows that have not come."""
        return self.eyas_rows.missing() if self.eyas_rows is not None else []

    def eyas_ask_alone(self, index: int) -> None:
        """From now on only this row is in the engine."""
        if self.eyas_rows is not None:
            self.eyas_rows.ask_alone(index)

    def eyas_take(self, path: str) -> None:
        """Writes the states of all rows that came, [T, L, D] each under its number, and forgets them."""
        if self.eyas_rows is not None:
            states, self.eyas_rows = self.eyas_rows.states, None
            save_file({str(index): state for index, state in enumerate(states) if state is not None}, path)


def read_rows(path: str) -> list[np.ndarray]:
    tensors = load_file(path)
    offsets = tensors["offsets"].tolist()
    return [tensors["tokens"][start:end].astype(np.int64) for start, end in itertools.pairwise(offsets)]


class Server:
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**job["engine"], worker_extension_cls="eyas.target.vllm_worker.Tap")
        self.num_layers = job["num_layers"]
        self.tapped: list[int] | None = None

    def capture(self, rows: str, layers: list[int], out: str) -> dict[str, Any]:
        if self.tapped is None:
            self.llm.collective_rpc("eyas_install", args=(self.num_layers, layers))
            self.tapped = layers
        assert layers == self.tapped, "one process taps one choice of layers"
        tokens = read_rows(rows)
        self.llm.collective_rpc("eyas_want", args=(rows,))
        self._prefill(tokens)
        for index in self._missing():
            self.llm.collective_rpc("eyas_ask_alone", args=(index,))
            self._prefill([tokens[index]])
        missing = self._missing()
        self.llm.collective_rpc("eyas_take", args=(out,))
        return {"missing": missing}

    def _prefill(self, rows: list[np.ndarray]) -> None:
        from vllm import SamplingParams

        self.llm.generate([{"prompt_token_ids": row.tolist()} for row in rows], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)

    def _missing(self) -> list[int]:
        """All ranks but the one that keeps states answer with an empty list."""
        return max(self.llm.collective_rpc("eyas_missing"), key=len)

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**sampling), use_tqdm=False)
        return [{"tokens": list(output.outputs[0].token_ids), "finish": output.outputs[0].finish_reason} for output in outputs]

    def log_probabilities(self, row: list[int]) -> list[float]:
        from vllm import SamplingParams

        (output,) = self.llm.generate([{"prompt_token_ids": row}], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), use_tqdm=False)
        return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as replies:
        try:
            import vllm

            server = Server(job)
            replies.write(json.dumps({"ok": {"vllm": vllm.__version__, "pid": os.getpid()}}) + "\n")
            for line in sys.stdin:
                command = json.loads(line)
                result = getattr(server, command.pop("do"))(**command)
                replies.write(json.dumps({"ok": result}) + "\n")
        except Exception as error:
            replies.write(json.dumps({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}) + "\n")
            raise


if __name__ == "__main__":
    main()

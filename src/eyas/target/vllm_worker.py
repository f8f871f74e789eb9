"""Runs in a process of its own, with the Python of a vLLM environment: loads the target once, then answers commands.

Of Eyas it needs only this file, tap.py, errors.py and features/codec.py; else vllm, torch, safetensors, numpy. Of vLLM it uses only what is public:
`LLM(...)`, `generate`, `enqueue`, the engine's `step`, `worker_extension_cls`, `collective_rpc` by method name with plain values, and the worker's
`get_model()`.

    python -m eyas.target.vllm_worker JOB.json FD

JOB holds {"engine": arguments of LLM, "num_layers", "max_tokens" of one forward, "beat": a file that each forward touches, "written": a file that gets a
JSON line for each shard whose states are all written, "parent": the process that started this one}. Commands come as JSON lines on stdin, replies go as
JSON lines to the file descriptor FD, in the order of the commands, because vLLM prints to the other two. States never pass through here: the process that
holds the model writes them straight to their places in shard files that Eyas has laid out.

Legend: T tokens of a row, A aux layers, D hidden width, n tokens of one forward.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from eyas.features.codec import encode, joined, squares
from eyas.target.tap import find_decoder_layers, residual_stream

SLOTS = 3  # forwards whose states may wait to be written; then the model waits. Bounds memory, on the device and pinned on the host
WRITERS = 4  # threads, each at a file of its own; one writes about 2.5 GB/s into page cache


@dataclass(frozen=True)
class Piece:
    """Tokens [source, source + count) of a forward are tokens [start, start + count) of row `row`."""

    row: int
    source: int
    start: int
    count: int


class Recognizer:
    """Says to which rows the tokens of each forward belong, by content alone.

    Together, rows come whole: chunked prefill is off, so every request in a forward begins at position 0, and the tokens from there on say which row
    it is. States depend on a row's own tokens only, so rows with equal tokens are one row. What is not whole is dropped and asked for again, alone:
    then its chunks, if it comes in chunks, cannot be taken for anybody else's. (Of several requests in chunks, one that ends at position 4 and one
    that goes on at 5 would look like one run.)
    """

    def __init__(self, rows: list[np.ndarray]) -> None:
        """rows: int64 [T] each."""
        self.rows = rows
        self.done = [0] * len(rows)  # tokens that have come
        self.by_content: dict[bytes, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            self.by_content[row.tobytes()].append(index)
        self.lengths = sorted({len(row) for row in rows}, reverse=True)
        self.alone: int | None = None  # the one row that is asked for

    def give(self, ids: np.ndarray, positions: np.ndarray) -> list[Piece]:
        """ids, positions int64 [n] of one forward."""
        if self.alone is not None:
            return self._give_alone(self.alone, ids, positions)
        pieces = []
        starts = np.flatnonzero(positions == 0)
        for start, end in itertools.pairwise([*starts.tolist(), len(ids)]):
            broken = np.flatnonzero(positions[start:end] != np.arange(end - start))
            run = ids[start : start + int(broken[0])] if len(broken) else ids[start:end]
            # The row may be followed by what an engine pads with, so shorter rows are tried too.
            for length in self.lengths:
                if length <= len(run) and (found := self.by_content.get(run[:length].tobytes())):
                    for index in found:
                        if not self.done[index]:
                            self.done[index] = length
                            pieces.append(Piece(index, start, 0, length))
                    break
        return pieces

    def ask_alone(self, index: int) -> None:
        self.alone = index
        self.done[index] = 0

    def _give_alone(self, index: int, ids: np.ndarray, positions: np.ndarray) -> list[Piece]:
        done = self.done[index]
        rest = self.rows[index][done : done + len(ids)]
        if not (len(rest) and np.array_equal(ids[: len(rest)], rest) and np.array_equal(positions[: len(rest)], np.arange(done, done + len(rest)))):
            return []
        self.done[index] += len(rest)
        return [Piece(index, 0, done, len(rest))]

    def missing(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if self.done[index] < len(row)]


class Group:
    """The rows of one command: where their states go, and which files still wait for some."""

    def __init__(self, plan: str, written: str) -> None:
        """plan: a JSON file {"tokens": a safetensors file with tokens int32 [T of all rows] and offsets int64 [R + 1], "files", "places": [file, byte of
        each part by name] for each row, "dtype" to store in}."""
        with open(plan) as file:
            values = json.load(file)
        self.rows = read_rows(values["tokens"])
        self.places: list[tuple[int, dict[str, int]]] = [(file, parts) for file, parts in values["places"]]
        self.files: list[str] = values["files"]
        self.dtype: torch.dtype = getattr(torch, values["dtype"])
        self.recognizer = Recognizer(self.rows)
        self.handles = [os.open(file, os.O_WRONLY) for file in self.files]
        self.waiting = [0] * len(self.files)
        for number, _ in self.places:
            self.waiting[number] += 1
        self.not_finite: dict[int, list[int]] = defaultdict(list)  # file -> rows
        self.written = written

    def came(self, row: int, squares: np.ndarray) -> None:
        """Called when all states of a row are written; tells of the file if that was its last row. squares: of all that this process has stored."""
        file = self.places[row][0]
        self.waiting[file] -= 1
        if self.waiting[file] == 0:
            with open(self.written, "ab", buffering=0) as told:
                about = {"file": self.files[file], "not_finite": self.not_finite[file], "squares": squares.tolist()}
                told.write(json.dumps(about).encode() + b"\n")

    def close(self) -> None:
        for handle in self.handles:
            os.close(handle)
        self.handles = []


class Recorder:
    """Takes each forward's states off the device and writes them to their places, while the model goes on with the next forward.

    put() hands over and returns; it waits only when SLOTS forwards are not written yet. One thread recognises, several write.
    """

    def __init__(self, device: torch.device, max_tokens: int) -> None:
        self.device, self.max_tokens = device, max_tokens
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.slots: queue.SimpleQueue[dict[str, torch.Tensor]] = queue.SimpleQueue()
        for _ in range(SLOTS):
            self.slots.put({})  # host buffers by name, made at first use and then kept: pinning memory takes long
        self.forwards: queue.SimpleQueue[tuple[Sequence[Group], dict[str, torch.Tensor], dict[str, torch.Tensor], Any]] = queue.SimpleQueue()
        self.writers = concurrent.futures.ThreadPoolExecutor(WRITERS)
        self.idle = threading.Condition()
        self.waiting = 0  # forwards not written yet
        self.squares = np.zeros((0, 2))  # as codec.squares, of all that came
        self.fault = ""  # what went wrong in a thread; told at the next question
        threading.Thread(target=self._recognise, daemon=True).start()

    def put(self, groups: Sequence[Group], ids: torch.Tensor, positions: torch.Tensor, states: list[torch.Tensor]) -> None:
        """groups: whose rows may be in the forward, all stored in one dtype. ids, positions int [n]; states: a [n, D] tensor a layer, `last` at the end. All
        tensors may be overwritten afterwards."""
        slot = self.slots.get()
        # Layer by layer: the float32 of all at once would be gigabytes of a memory that vLLM has filled.
        codes = [encode(state.unsqueeze(1), groups[0].dtype) for state in states]
        finite = torch.stack([_finite(state) for state in states]).all(0)
        taken = {"about": torch.stack([ids.long(), positions.long(), finite.long()], dim=1)}
        taken["squares"] = torch.cat([squares(state.unsqueeze(1), *code) for state, code in zip(states, codes, strict=True)])
        # Two tensors, because a row's aux and its last stand in two places.
        taken |= {"aux": joined([stored for stored, _ in codes[:-1]], 1), "last": joined([codes[-1][0].squeeze(1)], 0)}
        scales = [scale for _, scale in codes if scale is not None]
        if scales:
            taken["scale"] = torch.cat(scales, dim=1)
        copied = None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                taken = {name: self._to_host(slot, name, tensor) for name, tensor in taken.items()}
                copied = torch.cuda.Event()
                copied.record()
        with self.idle:
            self.waiting += 1
        self.forwards.put((groups, slot, taken, copied))

    def _to_host(self, slot: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert self.stream is not None
        buffer = slot.get(name)
        if buffer is None or len(buffer) < len(tensor) or buffer.dtype != tensor.dtype:
            buffer = slot[name] = torch.empty(max(self.max_tokens, len(tensor)), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
        host = buffer[: len(tensor)]
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host

    def _recognise(self) -> None:
        while True:
            groups, slot, taken, copied = self.forwards.get()
            try:
                if copied is not None:
                    copied.synchronize()
                self._write_out(groups, taken)
            except Exception as error:
                self.fault = self.fault or f"{type(error).__name__}: {error}"
            finally:
                self.slots.put(slot)
                with self.idle:
                    self.waiting -= 1
                    self.idle.notify_all()

    def _write_out(self, groups: Sequence[Group], taken: dict[str, torch.Tensor]) -> None:
        ids, positions, finite = taken["about"].numpy().T
        came = [(group, piece) for group in groups for piece in group.recognizer.give(ids, positions)]
        if came:  # not of what an engine runs to warm up, or anew after a row was lost
            more = taken["squares"].numpy().astype(np.float64)
            self.squares = self.squares + more if len(self.squares) else more
        writes: dict[int, list[tuple[memoryview, int]]] = defaultdict(list)  # open file -> (data, byte in it)
        for group, piece in came:
            file, offsets = group.places[piece.row]
            if not finite[piece.source : piece.source + piece.count].all():
                group.not_finite[file].append(piece.row)
            for name, offset in offsets.items():
                states = taken[name][piece.source : piece.source + piece.count]
                data = memoryview(states.flatten().view(torch.uint8).numpy().data)
                writes[group.handles[file]].append((data, offset + piece.start * len(data) // piece.count))
        # A thread a file: a file system lets one writer at a time into a file.
        for done in [self.writers.submit(_write, handle, parts) for handle, parts in writes.items()]:
            done.result()
        for group, piece in came:
            if piece.start + piece.count == len(group.rows[piece.row]):
                group.came(piece.row, self.squares)

    def settle(self) -> None:
        """Returns when all that was handed over is written. Raises RuntimeError with what went wrong in a thread."""
        with self.idle:
            self.idle.wait_for(lambda: self.waiting == 0)
        if self.fault:
            raise RuntimeError(self.fault)


def _finite(state: torch.Tensor) -> torch.Tensor:
    """[n, D] -> bool [n], in one pass over the state: NaN is its own least and largest number."""
    least, largest = state.aminmax(dim=-1)
    return least.isfinite() & largest.isfinite()


def read_rows(path: str) -> list[np.ndarray]:
    """Rows of token ids, int64 [T] each, from a safetensors file with tokens and offsets."""
    tensors = load_file(path)
    return [tensors["tokens"][start:end].astype(np.int64) for start, end in itertools.pairwise(tensors["offsets"].tolist())]


def _write(handle: int, parts: list[tuple[memoryview, int]]) -> None:
    for data, offset in parts:
        while data:
            written = os.pwrite(handle, data, offset)
            data, offset = data[written:], offset + written


def spread(files: list[int]) -> list[int]:
    """The order in which rows are asked for: in turns from WRITERS files, so that the rows of one forward are written by several threads. files: that of
    each row, ascending."""
    rows: dict[int, list[int]] = defaultdict(list)
    for row, file in enumerate(files):
        rows[file].append(row)
    order, numbers = [], sorted(rows)
    for start in range(0, len(numbers), WRITERS):
        turns = itertools.zip_longest(*(rows[number] for number in numbers[start : start + WRITERS]))
        order += [row for turn in turns for row in turn if row is not None]
    return order


class Tap:
    """Mixed into each of vLLM's workers by `worker_extension_cls`; its methods are called by `collective_rpc`."""

    eyas_layers: list[int]
    eyas_now: dict[int, torch.Tensor]  # layer -> states of the forward that is running
    eyas_ids: torch.Tensor | None  # what the embedding was last called with
    eyas_recorder: Recorder | None  # on the rank that writes
    eyas_groups: dict[str, Group]  # by plan; those whose rows have not all come
    eyas_active: tuple[Group, ...]  # whose rows may be in the engine

    def eyas_install(self, num_layers: int, layers: list[int], max_tokens: int, beat: str, written: str) -> None:
        """Hooks the decoder layers, the embedding and the whole model; each forward then goes to the recorder, if rows are wanted."""
        model = self.get_model()  # type: ignore[attr-defined]
        self.eyas_layers, self.eyas_now, self.eyas_beat, self.eyas_written = layers, {}, beat, written
        self.eyas_ids = self.eyas_recorder = None
        self.eyas_groups, self.eyas_active = {}, ()
        decoder = find_decoder_layers(model, num_layers)
        if not self._eyas_writes():
            return
        self.eyas_recorder = Recorder(next(model.parameters()).device, max_tokens)
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
        self.eyas_now[0] = next(value for value in given if isinstance(value, torch.Tensor) and value.is_floating_point()).clone()

    def _eyas_after(self, k: int) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            # A tensor of its own: the next layer's norm adds into what it is given.
            stream = residual_stream(output, module)
            self.eyas_now[k] = stream if isinstance(output, tuple) and stream is not output[0] else stream.clone()

        return hook

    def _eyas_embedding(self, module: Any, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], torch.Tensor) and not arguments[0].is_floating_point():
            self.eyas_ids = arguments[0]

    def _eyas_end(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        os.utime(self.eyas_beat)
        now, self.eyas_now = self.eyas_now, {}
        if not self.eyas_active or len(now) < len(set(self.eyas_layers)):
            return
        ids, positions = keywords.get("input_ids"), keywords["positions"]
        ids = self.eyas_ids if ids is None else ids
        assert ids is not None and self.eyas_recorder is not None
        positions = positions[0] if positions.dim() > 1 else positions  # one row for each axis of a multimodal rope
        num = min(len(ids), len(positions))
        self.eyas_recorder.put(self.eyas_active, ids[:num], positions[:num], [now[k][:num] for k in self.eyas_layers])

    def eyas_want(self, plan: str) -> None:
        """From now on the rows of the plan are in the engine, too."""
        if self.eyas_recorder is not None:
            for name, group in list(self.eyas_groups.items()):
                if name == plan or not any(group.waiting):
                    group.close()
                    del self.eyas_groups[name]
            wanted = self.eyas_groups[plan] = Group(plan, self.eyas_written)
            self.eyas_active = (*(group for group in self.eyas_active if group.handles), wanted)

    def eyas_missing(self, plan: str) -> list[int] | None:
        """The numbers of the plan's rows that have not come; None if it was never wanted, or does not wait any more, and from ranks that do not write.

        Raises RuntimeError if something could not be written.
        """
        if self.eyas_recorder is None:
            return None
        self.eyas_recorder.settle()
        return self.eyas_groups[plan].recognizer.missing() if plan in self.eyas_groups else None

    def eyas_ask_alone(self, plan: str, index: int) -> None:
        """From now on only this row is in the engine."""
        if self.eyas_recorder is not None:
            self.eyas_recorder.settle()  # forwards that hold the last chunks of the row before it may still wait to be recognised
            self.eyas_active = (self.eyas_groups[plan],)
            self.eyas_groups[plan].recognizer.ask_alone(index)


Asked = tuple[bytes, bool]  # a request: its tokens, and whether their log-probabilities are wanted


@dataclass
class Reading:
    """The rows of one command while the target reads them. proofs: (row, request) of those whose log-probabilities were asked for."""

    began: float
    left: Counter[Asked]
    proofs: list[tuple[int, Asked]]
    log_probabilities: dict[int, list[float]] = field(default_factory=dict)

    def take(self, asked: Asked, output: Any) -> None:
        self.left[asked] -= 1
        if asked[1]:
            row = next(row for row, request in self.proofs if request == asked and row not in self.log_probabilities)
            self.log_probabilities[row] = _log_probabilities(output)

    @property
    def done(self) -> bool:
        return not any(self.left.values())


class Server:
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**job["engine"], worker_extension_cls="eyas.target.vllm_worker.Tap")
        self.job = job
        self.tapped: list[int] | None = None
        self.reading: deque[Reading] = deque()
        self.ended = 0.0  # when the last reading was done

    def serve(self, commands: queue.SimpleQueue[dict[str, Any] | None], reply: Callable[[Any], None]) -> None:
        """Until None comes. The rows of a capture are given to the target while it reads those of the one before: between the two the device does not wait.
        All else waits until nothing is read."""
        while True:
            while self.reading and commands.empty():
                self._step(reply)
            command = commands.get()
            if command is None:
                return
            what = command.pop("do")
            if what == "capture":
                self._begin(**command)
                continue
            while self.reading:
                self._step(reply)
            reply(getattr(self, what)(**command))

    def _begin(self, plan: str, tokens: str, files: list[int], layers: list[int], prove: list[tuple[int, int]]) -> None:
        """Gives the plan's rows to the target, whose states are written as they come and a little after. files: the file of each row. prove: (row, P): the
        log-probabilities of its first P tokens are asked for by a request of their own."""
        began = time.monotonic()
        if self.tapped is None:
            job = self.job
            self.llm.collective_rpc("eyas_install", args=(job["num_layers"], layers, job["max_tokens"], job["beat"], job["written"]))
            self.tapped = layers
        assert layers == self.tapped, "one process taps one choice of layers"
        rows = read_rows(tokens)
        self.llm.collective_rpc("eyas_want", args=(plan,))
        # Those to prove first, because vLLM waits for the device after each forward with such a row: so they share a few.
        asked = [rows[row][:count] for row, count in prove] + [rows[row] for row in spread(files)]
        self.llm.enqueue(*_requests(asked, len(prove)), use_tqdm=False)
        keys = [(row.tobytes(), number < len(prove)) for number, row in enumerate(asked)]
        self.reading.append(Reading(began, Counter(keys), [(row, key) for (row, _), key in zip(prove, keys, strict=False)]))

    def _step(self, reply: Callable[[Any], None]) -> None:
        """Lets the target go on, and answers each capture whose rows are all read with {"seconds", "log_probabilities": {row: [P - 1]}}."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                asked = np.array(output.prompt_token_ids, dtype=np.int64).tobytes(), output.prompt_logprobs is not None
                next(reading for reading in self.reading if reading.left[asked]).take(asked, output)
        while self.reading and self.reading[0].done:
            reading, now = self.reading.popleft(), time.monotonic()
            reply({"seconds": now - max(reading.began, self.ended), "log_probabilities": reading.log_probabilities})
            self.ended = now

    def settle(self, plan: str, tokens: str, files: list[int], layers: list[int], prove: list[tuple[int, int]]) -> list[int]:
        """Waits until what came of the plan's rows is written, and asks for the others, one alone; returns those that still have not come."""
        if self.tapped is None or self._missing(plan) is None:  # a new process, or all is well by now and only asked once more
            self._begin(plan, tokens, files, layers, [])
            while self.reading:
                self._step(lambda seconds: None)
        rows = read_rows(tokens)
        for index in self._missing(plan) or []:
            self.llm.collective_rpc("eyas_ask_alone", args=(plan, index))
            self.llm.generate(*_requests([rows[index]], 0), use_tqdm=False)
        return self._missing(plan) or []

    def _missing(self, plan: str) -> list[int] | None:
        return next((reply for reply in self.llm.collective_rpc("eyas_missing", args=(plan,)) if reply is not None), None)

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**sampling, detokenize=False), use_tqdm=False)
        return [{"tokens": list(output.outputs[0].token_ids), "finish": output.outputs[0].finish_reason} for output in outputs]

    def log_probabilities(self, row: list[int]) -> list[float]:
        return _log_probabilities(self.llm.generate(*_requests([np.array(row)], 1), use_tqdm=False)[0])


def _requests(rows: list[np.ndarray], num_prove: int) -> tuple[list[Any], list[Any]]:
    """Prompts and settings with which vLLM reads the rows, and gives the log-probabilities of the tokens of the first `num_prove`."""
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0 if n < num_prove else None) for n in range(len(rows))]
    return [{"prompt_token_ids": row.tolist()} for row in rows], params


def _log_probabilities(output: Any) -> list[float]:
    """Of the prompt's tokens but the first."""
    return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)]


def _read_commands(commands: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)


def _end_with_parent(parent: int) -> None:
    """If Eyas is killed, so is this process with all that vLLM has started: nothing may stay on the GPUs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an engine that hangs is ended by SIGABRT, for its stack; a dump of 100 GB must not follow
    threading.Thread(target=_end_with_parent, args=(job["parent"],), daemon=True).start()
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as replies:
        try:
            import vllm

            server = Server(job)
            replies.write(json.dumps({"ok": {"vllm": vllm.__version__, "pid": os.getpid()}}) + "\n")
            commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
            threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()

            def reply(result: Any) -> None:
                replies.write(json.dumps({"ok": result}) + "\n")

            server.serve(commands, reply)
        except Exception as error:
            kind = type(error).__name__
            replies.write(json.dumps({"error": f"{kind}: {error}", "kind": kind, "trace": traceback.format_exc()}) + "\n")
            raise


if __name__ == "__main__":
    main()

"""The target run by vLLM, in a process of its own, with the Python of the user's vLLM environment: whatever version it has, whatever Eyas runs on.

The process runs in one of two modes: `capture`, where hooks see every layer, and `generate`, vLLM's own fast mode. It loads the target when first
needed; if it dies or hangs, it is started again and asked again for what it had not answered.

Legend: T tokens of a row, L captured layers, D hidden width.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import eyas
from eyas.config import TargetSection
from eyas.errors import UserError
from eyas.features.codec import relative_rounding
from eyas.features.shard import OpenShard, open_shard
from eyas.target.engine import Answer, Filled, Sampling
from eyas.target.spec import TargetSpec
from eyas.target.vllm_log import cause_of_death, passes, points_elsewhere
from eyas.target.worker_process import Failed, Lost, WorkerProcess

Mode = Literal["capture", "generate"]
# The worker's own small copy of Eyas: its other modules, and whatever is installed beside them, must not shadow the vLLM environment's packages.
WORKER_FILES = ("__init__.py", "errors.py", "features/__init__.py", "features/codec.py", "target/__init__.py", "target/tap.py", "target/vllm_worker.py")
# One command holds the rows of about so many seconds; it is what a crash can lose. Commands get there by GROWTH each, because the files of the next are laid
# out while the target reads: a file system in memory takes a fifth of a second for a GB.
GROUP_SECONDS, GROWTH = 5.0, 2
# Of a shard's proof: log-probabilities of a whole row cost vLLM the head at every token and a wait for the device. The first shard's row is proved whole.
PROOF_TOKENS = 64
SETTLE_SECONDS = 5.0  # after its rows were read, in which a command's last states should be written
LOAD_MINUTES = 30.0  # of silence while loading that count as a hang: a slow disk may keep it waiting
STARTS = 3  # before a fault that may pass is taken for one that does not
LOSSES = 2  # in a row, without an answer between, after which the engine is not started again


@dataclass(frozen=True)
class Row:
    """A row of tokens for `open_shard`."""

    key: str
    tokens: torch.Tensor
    supervised: torch.Tensor


@dataclass
class Group:
    """Shards under way with one command."""

    shards: list[OpenShard]
    arguments: dict[str, Any]
    reply: dict[str, Any] | None = None  # what came back once all rows were read


class VllmEngine:
    """max_length: tokens of the longest row, or answer with its prompt. say: told when the engine is started again."""

    def __init__(self, spec: TargetSpec, section: TargetSection, dtype: torch.dtype, max_length: int, log: Path, say: Callable[[str], None] = print) -> None:
        self.spec, self.section, self.dtype, self.max_length, self.log, self.say = spec, section, dtype, max_length, log, say
        self.group_tokens = 0
        self.process: WorkerProcess | None = None
        self.mode: Mode = "capture"
        self.folder: Path | None = None
        self.version = ""
        self.seed = 0
        self.unanswered: deque[dict[str, Any]] = deque()
        self.lost_in_a_row = 0
        self.under_way: deque[Group] = deque()
        self.open: dict[str, OpenShard] = {}  # by file
        self.settled: dict[str, list[int]] = {}  # file whose states are all written -> rows of its group that are not finite
        self.squares = torch.zeros(0, 2)  # of the process that runs
        self.counted: set[str] = set()  # files whose tokens progress was told of

    def capture(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        """Raises UserError if a row does not come."""
        given = [torch.tensor(row, dtype=torch.int32) for row in rows]
        shard = open_shard(
            self._folder(), 0, [Row(str(n), row, torch.ones(len(row), dtype=torch.bool)) for n, row in enumerate(given)],
            len(layers) - 1, self.spec.hidden_size, self.dtype,
        )  # fmt: skip
        (filled,) = self.fill([shard], layers, lambda tokens: None, lambda shard: None)
        if filled.lost:
            row, reason = next(iter(filled.lost.items()))
            raise UserError(
                f"vLLM did not bring the features of {len(filled.lost)} of {len(rows)} rows (the first has {len(rows[row])} tokens, beginning "
                f"{list(rows[row][:8])}: {reason}). Its log is {self.log}; please report it with the vLLM version, {self.version}."
            )
        with safe_open(shard.part, "pt") as file:
            states = torch.cat([file.get_tensor("aux"), file.get_tensor("last")[:, None]], dim=1)
        shard.part.unlink()
        return list(states.tensor_split(shard.starts[1:-1]))

    def fill(
        self, shards: Iterable[OpenShard], layers: Sequence[int], advance: Callable[[int], None], written: Callable[[OpenShard], None]
    ) -> Iterator[Filled]:
        """Two groups of shards are under way at once: while the target runs on one, the last states of the other are written, and the caller seals it."""
        self._enter("capture")
        self.group_tokens = 4 * self.section.max_batched_tokens
        self.tell_advance, self.tell_written = advance, written
        for kept in (self.under_way, self.open, self.settled, self.counted):
            kept.clear()
        for number, group in enumerate(self._groups(shards)):
            opened = Group(group, {"layers": list(layers), **self._plan(group, number)})
            self.under_way.append(opened)
            self.open |= {str(shard.part.resolve()): shard for shard in group}
            self._send(do="capture", **opened.arguments)
            if len(self.under_way) == 2:
                yield from self._filled(self.under_way.popleft())
        while self.under_way:
            yield from self._filled(self.under_way.popleft())

    def _groups(self, shards: Iterable[OpenShard]) -> Iterator[list[OpenShard]]:
        group: list[OpenShard] = []
        for shard in shards:
            group.append(shard)
            if sum(shard.starts[-1] for shard in group) >= self.group_tokens:
                yield group
                group = []
        if group:
            yield group

    def _plan(self, group: list[OpenShard], number: int) -> dict[str, Any]:
        """Tells the worker which rows there are and where their states go; returns the arguments of its command."""
        tokens, plan = self._folder() / f"rows-{number}.safetensors", self._folder() / f"rows-{number}.json"
        rows = [row for shard in group for row in shard.tokens]
        save_file({"tokens": torch.cat(rows), "offsets": torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)}, tokens)
        places = [[n, shard.places(row)] for n, shard in enumerate(group) for row in range(len(shard.keys))]
        values = {
            "tokens": str(tokens), "files": [str(shard.part.resolve()) for shard in group], "places": places,
            "dtype": str(group[0].dtype).removeprefix("torch."),
        }  # fmt: skip
        plan.write_text(json.dumps(values))
        firsts = itertools.accumulate((len(shard.keys) for shard in group), initial=0)
        prove = [(first + len(shard.keys) // 2, PROOF_TOKENS) for first, shard in zip(firsts, group, strict=False)]
        if number == 0:
            prove[0] = (prove[0][0], len(rows[prove[0][0]]))
        return {"plan": str(plan), "tokens": str(tokens), "files": [n for n, shard in enumerate(group) for _ in shard.keys], "prove": prove}

    def _filled(self, group: Group) -> Iterator[Filled]:
        if group.reply is None:
            group.reply = self._receive("capturing")
        total = sum(shard.starts[-1] for shard in group.shards)
        wanted = int(GROUP_SECONDS * total / max(group.reply["seconds"], 1e-3))
        self.group_tokens = max(4 * self.section.max_batched_tokens, min(GROWTH * total, wanted))
        files = [str(shard.part.resolve()) for shard in group.shards]
        end = time.monotonic() + SETTLE_SECONDS
        while not self._all_written(files) and time.monotonic() < end:
            time.sleep(0.01)
        missing: list[int] = []
        if not self._all_written(files):
            self._send(do="settle", **group.arguments)
            for later in self.under_way:  # their answers come first
                if later.reply is None:
                    later.reply = self._receive("capturing")
            missing = self._receive("capturing")
            self._all_written(files)
        first = 0
        for shard, file in zip(group.shards, files, strict=True):
            rows = range(first, first + len(shard.keys))
            first = rows.stop
            sample = len(rows) // 2
            lost = {row - rows.start: "it did not come through the engine, asked for together and alone" for row in missing if row in rows}
            assert lost or file in self.settled
            not_finite = [row - rows.start for row in self.settled.get(file, [])]
            del self.open[file]
            yield Filled(
                shard, lost, not_finite, sample, torch.tensor(group.reply["log_probabilities"][str(rows.start + sample)]), relative_rounding(self.squares)
            )
        for name in ("plan", "tokens"):
            Path(group.arguments[name]).unlink()

    def _all_written(self, files: list[str]) -> bool:
        """Reads what the worker has told of shards written, and whether these are among them."""
        with open(self.written, "rb") as file:
            file.seek(self.written_read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self.written_read += len(whole)
        for line in whole.splitlines():
            told = json.loads(line)
            self.settled[told["file"]] = told["not_finite"]
            self.squares = torch.tensor(told["squares"])
            shard = self.open[told["file"]]
            self.tell_written(shard)
            if told["file"] not in self.counted:  # an engine that was started again fills some files twice
                self.counted.add(told["file"])
                self.tell_advance(shard.starts[-1])
        return all(file in self.settled for file in files)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        # A process begins one random stream with its seed; after a restart the stream must not begin as it did before, or answers come twice.
        self.seed = sampling.seed % 2**31
        self._enter("generate")
        # No seed for each request: that makes vLLM's sampling several times slower on a GPU.
        choice = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": [*self.spec.stop_ids, *sampling.extra_stop_ids],
        }
        self._send(do="generate", prompts=[list(prompt) for prompt in prompts], sampling=choice)
        answers = self._receive("writing answers")
        return [Answer(answer["tokens"], "stop" if answer["finish"] == "stop" else "length") for answer in answers]

    def log_probabilities(self, row: Sequence[int]) -> torch.Tensor:
        self._enter(self.mode)
        self._send(do="log_probabilities", row=list(row))
        return torch.tensor(self._receive("computing log-probabilities"))

    def _folder(self) -> Path:
        if self.folder is None:
            shared = Path("/dev/shm")
            self.folder = Path(tempfile.mkdtemp(prefix="eyas-", dir=shared if os.access(shared, os.W_OK) else None))
            atexit.register(self.close)
            for name in WORKER_FILES:
                (self.folder / "eyas" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(eyas.__file__).parent / name, self.folder / "eyas" / name)
        return self.folder

    def _enter(self, mode: Mode) -> None:
        """Has the process run in `mode`; the target is loaded anew if it ran in the other, or if a command was left without its answer."""
        if self.process is not None and self.mode == mode and not self.unanswered:
            return
        self._stop(0.0 if self.unanswered else 30.0)
        self.unanswered.clear()
        self.mode = mode
        self._start()

    def _engine_arguments(self) -> dict[str, Any]:
        if self.section.extra.get("pipeline_parallel_size", 1) != 1:
            raise UserError("target.extra.pipeline_parallel_size spreads the layers over processes, and features come from one. Use target.tensor_parallel.")
        arguments = {
            "model": str(self.spec.path),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensor_parallel_size": self.section.tensor_parallel,
            "gpu_memory_utilization": self.section.gpu_memory_utilization,
            "max_num_batched_tokens": max(self.section.max_batched_tokens, self.max_length + 1),
            "max_model_len": self.max_length + 1,  # vLLM wants room for the one token that it is asked to write
            "trust_remote_code": self.section.trust_remote_code,
            "disable_log_stats": True,
        }
        if self.mode == "generate":
            return {**arguments, "seed": self.seed, **self.section.extra}
        # What capture rests on: compiled code fires no hooks, cached tokens are not computed again. Chunks hide whose they are: rows that come in
        # chunks are asked for again alone, which is slow, so they are off unless the run file wants them.
        return {**arguments, "enable_chunked_prefill": False, **self.section.extra, "enforce_eager": True, "enable_prefix_caching": False}

    def _start(self) -> None:
        folder = self._folder()
        self.beat, self.written, self.written_read = folder / "beat", folder / "written", 0
        self.beat.touch()
        self.written.write_bytes(b"")
        arguments = self._engine_arguments()
        job = folder / "job.json"
        job.write_text(
            json.dumps(
                {
                    "engine": arguments,
                    "num_layers": self.spec.num_layers,
                    "max_tokens": arguments["max_num_batched_tokens"],
                    "beat": str(self.beat),
                    "written": str(self.written),
                    "parent": os.getpid(),
                }
            )
        )
        python = self.section.python or sys.executable
        environment = {**os.environ, "PYTHONPATH": str(folder), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        for start in itertools.count(1):
            try:
                self.process = WorkerProcess([python, "-m", "eyas.target.vllm_worker", str(job)], environment, self.log)
            except OSError as error:
                raise UserError(f"target.python = {python!r} cannot be started: {error.strerror}. Give the python of an environment that has vLLM.") from None
            try:
                self.version = self.process.receive(60 * max(LOAD_MINUTES, self.section.hang_minutes), self.process.busy())["vllm"]
                return
            except (Lost, Failed) as error:
                self._stop(0.0)
                if start == STARTS or not passes(self._cause(error)):
                    raise self._error("starting", error) from None
                self.say(f"vLLM failed while starting: {self._cause(error)}. It is started again. Its log is {self.log}.")

    def _send(self, **command: Any) -> None:
        assert self.process is not None
        self.unanswered.append(command)
        self.process.send(command)

    def _receive(self, during: str) -> Any:
        """The answer to the oldest command without one. An engine that is lost is started again, at most twice in a row, and asked again."""
        while True:
            assert self.process is not None
            try:
                reply = self.process.receive(60 * self.section.hang_minutes, self._sign_of_life())
            except Failed as error:
                self._stop(0.0)
                raise self._error(during, error) from None
            except Lost as loss:
                if self.folder is None:  # closed, by another thread: nobody waits for an answer
                    raise
                self._stop(0.0)
                self.lost_in_a_row += 1
                if self.lost_in_a_row > LOSSES:
                    raise self._error(during, loss, f" {self.lost_in_a_row} times in a row") from None
                self.say(f"vLLM was lost while {during}: {loss}. It is started again; nothing is lost. Its log is {self.log}.")
                self._start()
                self.settled.clear()  # what was not answered is written again
                for command in self.unanswered:
                    self.process.send(command)
                continue
            self.lost_in_a_row = 0
            self.unanswered.popleft()
            return reply

    def _sign_of_life(self) -> Callable[[], Any]:
        assert self.process is not None
        busy = self.process.busy()

        def sign() -> Any:
            self._all_written([])
            # Where hooks are fired, only a forward counts: an engine whose ranks wait for one another keeps its cores busy.
            return self.beat.stat().st_mtime_ns if self.mode == "capture" else busy()

        return sign

    def _error(self, during: str, error: Exception, times: str = "") -> UserError:
        return UserError(
            f"vLLM failed while {during}{times}: {self._cause(error)}. Its log is {self.log}; mend what it names, then run the same command again."
        )

    def _cause(self, error: Exception) -> str:
        words = str(error)
        return cause_of_death(self.log.read_text(errors="replace")) if points_elsewhere(words) else words

    def _stop(self, seconds: float) -> None:
        if self.process is not None:
            self.process.stop(seconds)
            self.process = None

    def close(self) -> None:
        folder, self.folder = self.folder, None
        self._stop(0.0 if self.unanswered else 30.0)
        self.unanswered.clear()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        atexit.unregister(self.close)

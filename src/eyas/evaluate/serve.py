"""A stock vLLM server: started as users start one, asked over HTTP, its counters read, and stopped.

It listens on 127.0.0.1 alone, in a session of its own at the end of a leash (leash.py), and asks for a key that only this process knows.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from eyas.config import TargetSection
from eyas.errors import UserError
from eyas.evaluate.simulate import Acceptance
from eyas.progress import clock
from eyas.target.vllm_log import cause_of_death, passes

LEASH = Path(__file__).with_name("leash.py")
SILENT_SECONDS = 1800.0  # a start that prints nothing for so long is given up; one that prints may take hours
ANSWER_SECONDS = 3600.0  # one request
TRIES = 3  # another process may take the port between our choice and vLLM's start
# What the measurement rests on, or what Eyas says itself: target.extra does not change it.
OWN = ("host", "port", "served_model_name", "api_key", "speculative_config", "enable_prefix_caching", "disable_log_stats")
COUNTER = re.compile(r"^vllm:spec_decode_(num_drafts|num_accepted_tokens_per_pos)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Passing(Exception):
    """Why a server did not start that may well start a moment later: another process answers on its port or holds it, or gave back GPU memory while vLLM
    measured its own."""


def server_arguments(section: TargetSection, model: Path, dtype: str, max_length: int, draft: Path | None = None, num_draft_tokens: int = 0) -> dict[str, Any]:
    """vLLM's own arguments by name. dtype: float32 or bfloat16; max_length: tokens of the longest prompt with its answer."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "tensor_parallel_size": section.tensor_parallel,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "max_model_len": max_length,
        **({"trust_remote_code": True} if section.trust_remote_code else {}),
        **{name: value for name, value in section.extra.items() if name not in OWN},
        "enable_prefix_caching": False,  # a prompt asked a second time would cost less than the first
    }
    if draft:
        arguments["speculative_config"] = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": num_draft_tokens}
    return arguments


def flags(arguments: dict[str, Any]) -> list[str]:
    """The same arguments on a command line: true and false as --x and --no-x, a table as JSON, a list as several words."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{flag}", *(json.dumps(each) if isinstance(each, dict | list) else str(each) for each in values)]
    return words


def read_counters(text: str, num_draft_tokens: int) -> Acceptance | None:
    """vLLM's counters since its start, from the Prometheus text of /metrics, summed over its engines; None if it has none.

    Its counts by position are cumulative: rounds in which positions 0 to k were all accepted.
    """
    rounds, accepted, found = 0, [0] * num_draft_tokens, False
    for name, labels, value in COUNTER.findall(text):
        count = round(float(value))
        if name == "num_drafts":
            rounds, found = rounds + count, True
        elif position := re.search(r'position="(\d+)"', labels):
            accepted[int(position[1])] += count
    return Acceptance(rounds, (rounds, *accepted[:-1]), tuple(accepted)) if found else None


def between(after: Acceptance, before: Acceptance) -> Acceptance:
    """What was counted from one reading to a later one."""
    return after + Acceptance(-before.rounds, tuple(-count for count in before.drafted), tuple(-count for count in before.accepted))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running server as a context manager. `progress` is told how its start goes. Raises UserError if it cannot start, or dies."""

    def __init__(self, python: str, arguments: dict[str, Any], log: Path, progress: Callable[[str], None]) -> None:
        self.python, self.arguments, self.log, self.progress = python or sys.executable, arguments, log, progress
        self.name, self.key = f"eyas-{secrets.token_hex(8)}", secrets.token_hex(16)
        self.port = 0
        self.version = ""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        if shutil.which(self.python) is None:
            raise UserError(f"target.python = {self.python!r} cannot be started. Give the python of an environment that has vLLM.")
        try:
            for _ in range(TRIES):
                try:
                    self._start()
                    return self
                except Passing as fault:
                    cause = fault
                    self.stop()
            raise UserError(f"vLLM could not start {TRIES} times: {cause}. Its log is {self.log}; run the same command again.")
        except BaseException:
            self.stop()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server and every process of its session."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()  # the leash does the rest, even if we are killed here
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
            self.process = None

    def complete(self, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], temperature: float) -> list[int]:
        """The answer to a prompt of token ids, with its stop token if it came to one; greedy at temperature 0."""
        choice = self._complete(prompt, max_tokens, {"stop_token_ids": list(stop_ids), "temperature": temperature})
        tokens = choice.get("token_ids")
        if tokens is None:
            raise UserError(f"vLLM {self.version} returns no token ids. Use vLLM 0.22 or newer, or set evaluate.engine = 'transformers'.")
        return list(tokens)

    def best_two(self, prompt: Sequence[int]) -> dict[int, float]:
        """The two likeliest next tokens and their log-probabilities in nats."""
        choice = self._complete(prompt, 1, {"logprobs": 2, "return_tokens_as_token_ids": True})
        best = sorted(choice["logprobs"]["top_logprobs"][0].items(), key=lambda item: -item[1])[:2]
        return {int(name.removeprefix("token_id:")): value for name, value in best}

    def counters(self, num_draft_tokens: int) -> Acceptance:
        """Drafts and acceptance since the start, once they stand still: vLLM counts a little later than it answers."""
        seen: list[Acceptance] = []
        while len(seen) < 2 or seen[-1] != seen[-2]:
            found = read_counters(self._ask("GET", "/metrics").decode(), num_draft_tokens)
            if found is None:
                raise UserError(f"vLLM {self.version} counts no drafts on /metrics, so it did not draft. Its log, {self.log}, says why.")
            seen.append(found)
            time.sleep(0.1)
        return seen[-1]

    def _start(self) -> None:
        self.port = free_port()
        arguments = {**self.arguments, "host": "127.0.0.1", "port": self.port, "served_model_name": self.name}
        # PYTHONPATH is for the Python that runs Eyas.
        environment = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "VLLM_API_KEY": self.key}
        command = [sys.executable, "-I", str(LEASH), self.python, "-m", "vllm.entrypoints.openai.api_server", *flags(arguments)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True)
        began = spoke = time.monotonic()
        size = 0
        while not self._healthy():
            now = time.monotonic()
            if self.process.poll() is not None:
                cause = self._cause()
                if "address already in use" in cause.lower() or passes(cause):
                    raise Passing(cause)
                raise UserError(f"vLLM ended while starting: {cause}. Its log is {self.log}; mend what it names, then run the same command again.")
            if (grown := self.log.stat().st_size) != size:
                size, spoke = grown, now
            elif now - spoke > SILENT_SECONDS:
                raise UserError(
                    f"vLLM is not ready after {clock(now - began)} and has printed nothing for {clock(SILENT_SECONDS)}. Its log is {self.log}; mend what "
                    "it names, then run the same command again."
                )
            self.progress(f"vLLM is starting, {clock(now - began)}")
            time.sleep(0.3)
        if not any(
            model["id"] == self.name for model in json.loads(self._ask("GET", "/v1/models", refused=Passing("another process answers on its port")))["data"]
        ):
            raise Passing("a stranger's server answers on its port")
        self.version = json.loads(self._ask("GET", "/version"))["version"]

    def _healthy(self) -> bool:
        try:
            return self._http("GET", "/health", None, 5.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _complete(self, prompt: Sequence[int], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
        # The model's generation_config would otherwise add its repetition penalty, top_p and top_k.
        bare = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        body = {"model": self.name, "prompt": list(prompt), "max_tokens": max_tokens, **bare, **more}
        choice: dict[str, Any] = json.loads(self._ask("POST", "/v1/completions", json.dumps(body)))["choices"][0]
        return choice

    def _ask(self, method: str, path: str, body: str | None = None, refused: Exception | None = None) -> bytes:
        try:
            status, data = self._http(method, path, body, ANSWER_SECONDS)
        except TimeoutError:
            raise UserError(f"vLLM has not answered for {clock(ANSWER_SECONDS)}. Its log is {self.log}; run the same command again.") from None
        except (OSError, http.client.HTTPException):
            self._fail("it closed the connection", 10)
        if status != 200:
            if refused:
                raise refused
            self._fail(f"{path} gave {status}, {data.decode(errors='replace')[:300]}", 10 if status >= 500 else 0)
        return data

    def _http(self, method: str, path: str, body: str | None, seconds: float) -> tuple[int, bytes]:
        # Not urllib, which would send even this through a proxy that the environment names.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _fail(self, reason: str, patience: float) -> NoReturn:
        """patience: seconds, because a server whose engine died ends only soon after, and then its log knows more than `reason`."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience)
                reason = self._cause()
        raise UserError(f"vLLM failed while answering: {reason}. Its log is {self.log}; mend what it names, then run the same command again.")

    def _cause(self) -> str:
        return cause_of_death(self.log.read_text(errors="replace"))

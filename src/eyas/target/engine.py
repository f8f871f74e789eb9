"""The one interface through which Eyas uses a target, whatever runs it.

Legend: T tokens of a row, L captured layers, D hidden width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.features.shard import OpenShard
from eyas.target.spec import TargetSpec

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float  # 0 is greedy
    top_p: float
    seed: int
    extra_stop_ids: tuple[int, ...] = ()  # tokens that end an answer beside the target's own stop tokens


@dataclass(frozen=True)
class Answer:
    """`tokens` end with the stop token if `finish` is "stop"; "length" means that the limit cut the answer off."""

    tokens: list[int]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Filled:
    """A shard whose states are written.

    lost: rows that the engine did not bring, with the reason. not_finite: rows with a state that is infinite or NaN. log_probabilities: for the proof of
    capture, the target's own for the first P <= T tokens of row `sample` but the very first, float32 [P - 1]. rounding: for each layer how far what is
    stored is from the states, relative to their size, over all that the engine has stored so far.
    """

    shard: OpenShard
    lost: dict[int, str]
    not_finite: list[int]
    sample: int
    log_probabilities: torch.Tensor
    rounding: list[float]


class TargetEngine(Protocol):
    spec: TargetSpec

    def capture(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        """The states of each row at `layers`, [T, L, D] on the CPU in the dtype the target runs in; what a row alone would give."""

    def fill(
        self, shards: Iterable[OpenShard], layers: Sequence[int], advance: Callable[[int], None], written: Callable[[OpenShard], None]
    ) -> Iterator[Filled]:
        """Writes the states of all rows into the shards, aux from all `layers` but the last, which is `last`; gives back each shard once it is filled,
        in order. Takes shards from the iterator as it needs them. advance: told of tokens as they come. written: told of a shard as soon as it stands on
        the disk, and again should it have been written anew, before it is given back; not of one with lost rows."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        """The target's answers to prompts of token ids."""

    def log_probabilities(self, row: Sequence[int]) -> torch.Tensor:
        """The target's own log-probability of each token but the first, float32 [T - 1]; the independent side of the proof of capture."""

    def close(self) -> None:
        """Gives back what the target holds; the engine is not used afterwards."""


def keep_freed_memory() -> None:
    """Lets the C library keep freed blocks for the next tensor instead of giving them back to the system, whose fresh pages cost more than the
    arithmetic on them: a training step on the CPU is about 1.1 times as fast (benchmarks/train_step_cpu.py). glibc only; elsewhere nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def resolve_device(device: str) -> torch.device:
    """Raises UserError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "cuda"):
            raise RuntimeError
    except RuntimeError:
        raise UserError(f"target.device = {device!r} is no device. Use auto, cpu, cuda or cuda:0.") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f'target.device = {device!r}, but torch finds no GPU here. Use target.device = "cpu", or install torch for your GPU.')
    return found


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it fast: on a GPU, and on a CPU with AMX tiles or AVX-512's bfloat16 instructions (4 and 2 to 3 times
    float32 there; docs/log.md), else float32. `float8` is bfloat16 where no products are."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_has("amx_bf16", "avx512_bf16") else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}[dtype]


def cpu_has(*instructions: str) -> bool:
    """Whether this CPU has one of them. One that has none for bfloat16 emulates it, at a tenth of its float32 speed."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.13 and newer
    return any(found.get(name) for name in instructions)


def open_engine(config: RunConfig, spec: TargetSpec, log: Path, say: Callable[[str], None]) -> TargetEngine:
    """The target in the engine that the run file names; what another process prints goes to the file `log`, what a person should know to `say`."""
    device = resolve_device(config.target.device)
    dtype = resolve_dtype(config.target.dtype, device)
    # Imported here: only stages that run the target pay for it.
    if config.target.engine == "vllm":
        from eyas.target.vllm_engine import VllmEngine

        return VllmEngine(spec, config.target, dtype, config.data.max_length, log, say)
    from eyas.target.transformers_engine import TransformersEngine

    return TransformersEngine(spec, device, dtype, config.target.trust_remote_code, config.features.batch_tokens)

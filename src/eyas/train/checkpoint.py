"""Everything that training needs to go on bit for bit, and nothing else: weights, optimiser moments, how many steps are done.

The order of rows and the learning rate are pure functions of the step, and training draws no random number, so no generator is kept.

    train/checkpoints/step-000100/   weights.safetensors   optimizer.safetensors   state.json (written last)
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eyas.artifact import fsync_folder, read_json, write_json, write_tensors
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.train.optim import Optimizers

KEPT = 2  # latest checkpoints kept beside the best


@dataclass(frozen=True)
class TrainState:
    """step: optimiser steps done. best_step: the checkpoint with the highest acceptance on held-out rows, best_acceptance that length; acceptance: the
    latest."""

    step: int
    best_step: int
    best_acceptance: float | None
    acceptance: float | None = None


def save(folder: Path, draft: Draft, optimizer: Optimizers, state: TrainState) -> Path:
    """Writes the checkpoint of state.step, then removes all but the best and the latest."""
    path = folder / f"step-{state.step:06d}"
    temporary = folder / f"{path.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_tensors(
        temporary / "weights.safetensors",
        {name: value.detach().cpu().contiguous() for name, value in draft.state_dict().items()},
        {"shape": json.dumps(draft.shape.as_dict())},
    )
    write_tensors(temporary / "optimizer.safetensors", _optimizer_tensors(draft, optimizer))
    write_json(temporary / "state.json", asdict(state))
    shutil.rmtree(path, ignore_errors=True)
    temporary.replace(path)
    fsync_folder(folder)
    complete = sorted(folder.glob("step-??????"))
    for old in complete[:-KEPT]:
        if old.name != f"step-{state.best_step:06d}":
            shutil.rmtree(old)
    return path


def latest(folder: Path) -> Path | None:
    """The newest checkpoint; what a dead process left half-written bears another name."""
    for leftover in folder.glob("*.tmp"):
        shutil.rmtree(leftover)
    return max(folder.glob("step-??????"), default=None)


def load(path: Path, draft: Draft, optimizer: Optimizers) -> TrainState:
    """Puts weights and moments back, exactly."""
    draft.load_state_dict(load_file(path / "weights.safetensors"))
    tensors = load_file(path / "optimizer.safetensors")
    for name, parameter in _trained(draft):
        optimizer.restore(parameter, {key.partition(".")[0]: value for key, value in tensors.items() if key.partition(".")[2] == name})
    return read_state(path)


def read_state(path: Path) -> TrainState:
    return TrainState(**read_json(path / "state.json"))


def load_draft(path: Path) -> Draft:
    """A draft from a checkpoint folder, float32 on the CPU."""
    with safe_open(path / "weights.safetensors", "pt") as file:
        shape = DraftShape(**json.loads(file.metadata()["shape"]))
    draft = Draft(shape)
    draft.load_state_dict(load_file(path / "weights.safetensors"))
    return draft.eval()


def _optimizer_tensors(draft: Draft, optimizer: Optimizers) -> dict[str, torch.Tensor]:
    state = optimizer.state
    return {f"{key}.{name}": value.detach().cpu().contiguous() for name, parameter in _trained(draft) for key, value in state[parameter].items()}


def _trained(draft: Draft) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in draft.named_parameters() if parameter.requires_grad]

"""The stage `train`: features and vocabulary -> checkpoints of the draft in train/checkpoints/, the best named in the manifest."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eyas.artifact import hash_file, read_manifest
from eyas.config import RunConfig, TrainSection
from eyas.draft.init import new_draft
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape, draft_shape
from eyas.errors import UserError
from eyas.features.reader import FeatureReader
from eyas.features.run import rows_with_features
from eyas.features.stream import StreamedFeatures, beside_training, gpus_to_train_on, streams
from eyas.prepare.rows import read_rows
from eyas.stage import Context, Result
from eyas.target.embeddings import read_head
from eyas.target.engine import resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec
from eyas.train.checkpoint import latest, read_state
from eyas.train.distributed import ALONE, World, launch, num_processes
from eyas.train.loop import Materials, holdout_agreement, simulated_acceptance, train
from eyas.train.loss import Teacher
from eyas.vocab.run import draft_vocab_size, read_ids

FEW = 20  # held-out rows, whose acceptance says little
AGREED = 0.2  # of held-out rows: below it the draft has learnt too little to tell


def shape_of(config: RunConfig, spec: TargetSpec) -> DraftShape:
    return draft_shape(config.draft, spec, draft_vocab_size(config, spec), config.features.layers or spec.default_layers)


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    section = config.train.model_dump(exclude={"tokens_per_batch", "checkpoint_every", "dtype", "recompute", "processes"})
    dtype = "float8" if config.train.dtype == "float8" else str(resolve_dtype(config.train.dtype, resolve_device(config.target.device)))
    return {
        "draft": {**shape_of(config, spec).as_dict(), "init_head": config.draft.init_head},
        "train": {**section, "dtype": dtype},
        "run": {"seed": config.run.seed},
    }


def work(context: Context) -> Result:
    config, folder = context.config, context.folder
    streamed = streams(config, context.spec, read_rows(context.run_folder / "prepare"))
    size = num_processes(config, gpus_to_train_on(config, streamed, torch.cuda.device_count()))
    latest(folder / "checkpoints")  # what a dead process left half-written goes before several look
    if size > 1:
        context.reporter.say(f"train: {size} processes, each with its share of every step")
        launch(config, folder, size, context.reporter.shows)
    else:
        train_rank(context, ALONE)
    newest = latest(folder / "checkpoints")
    assert newest is not None
    state = read_state(newest)
    best = folder / "checkpoints" / f"step-{state.best_step:06d}" / "weights.safetensors"
    counts = {
        "steps": state.step,
        "parameters": num_parameters(best),
        "best_step": state.best_step,
        "holdout_acceptance_length": state.best_acceptance,
        "holdout_draft_tokens": config.train.unroll_steps,
    }
    return Result(counts, content=hash_file(best))


def device_of(config: RunConfig, rank: int, streamed: bool) -> torch.device:
    """Where the process trains: on the GPU of its number, counted behind those on which vLLM captures meanwhile."""
    device = resolve_device(config.target.device)
    first = config.target.tensor_parallel if streamed and beside_training(config) else 0
    return torch.device("cuda", first + rank) if device.type == "cuda" and device.index is None else device


def train_rank(context: Context, world: World) -> None:
    """The training of one process, alone or as one of several; its result are the checkpoints."""
    config, spec, folder = context.config, context.spec, context.folder
    streamed = streams(config, spec, read_rows(context.run_folder / "prepare"))
    device = device_of(config, world.rank, streamed)
    dtype = resolve_dtype(config.train.dtype, device)
    rows = rows_with_features(context.run_folder)
    features = context.run_folder / "features"
    reader: FeatureReader | StreamedFeatures
    if streamed:
        reader = StreamedFeatures(config, spec, rows, features, context.reporter, world)
    else:
        reader = FeatureReader(features)
        reader.require(row.key for row in rows)
    ids = read_ids(context.run_folder / "vocab")
    head = read_head(spec)
    draft = new_draft(shape_of(config, spec), config.run.seed, ids, head if config.draft.init_head == "target" else None).to(device)
    set_products(draft, config.train, device)
    size = sum(parameter.numel() for parameter in draft.parameters())
    products = "float8" if config.train.dtype == "float8" else str(dtype).removeprefix("torch.")
    context.reporter.say(f"train: {size / 1e6:.1f}M parameters, all of them the draft's, {products} products on {device}")
    materials = Materials(
        reader=reader,
        train_keys=[row.key for row in rows if not row.holdout],
        holdout_keys=[row.key for row in rows if row.holdout],
        embedding=head.embedding.to(dtype),
        teacher=Teacher(head, ids, dtype, device),
        ids=ids.to(device),
        dtype=dtype,
        device=device,
        world=world,
    )
    state = train(draft, materials, config.train, config.run.seed, folder, context.reporter)
    if isinstance(reader, StreamedFeatures):
        reader.discard_rounds()
    elif (seen := seen_acceptance(draft, materials, config.train)) and state.acceptance and learnt_by_heart(seen, state.acceptance):
        context.reporter.say(
            f"train: on rows that it was trained on the draft has {seen:.3f}, on held-out ones {state.acceptance:.3f}: it begins to know them by heart. "
            "More of the target's own text (data.synthesize) will help it more than more epochs."
        )
    agreed, said = holdout_agreement(draft, materials, config.train)
    if ids_are_wrong(agreed, said):
        context.reporter.say(
            f"train: warning: the draft's likeliest token is its teacher's in {agreed:.0%} of the held-out rows, but the text's in {said:.0%} only. Either the "
            f"ids in {context.run_folder / 'vocab'} are not those that it was taught, or the text is not the target's own."
        )


def set_products(draft: Draft, section: TrainSection, device: torch.device) -> None:
    """As section.dtype says, in float8 or in the dtype of what is fed in. Raises UserError on a GPU that does not multiply float8."""
    if section.dtype != "float8":
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(f'train.dtype = "float8" needs a GPU of compute capability 8.9 or later; {torch.cuda.get_device_name(device)} is older. Leave it out.')
    draft.multiply_in_float8()


def num_parameters(weights: Path) -> int:
    """Of a checkpoint, by its header alone."""
    with safe_open(weights, "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def seen_acceptance(draft: Draft, materials: Materials, section: TrainSection) -> float | None:
    """Simulated acceptance length on as many training rows as there are held-out ones; None if those are too few to compare with."""
    number = len(materials.holdout_keys)
    if number < FEW or number > len(materials.train_keys):
        return None
    return simulated_acceptance(draft, materials, section, random.Random(0).sample(materials.train_keys, number))


def learnt_by_heart(seen: float, unseen: float) -> bool:
    """Acceptance lengths. Of what the draft adds to the target's own token, a fifth more on the one than on the other."""
    return seen - 1 > 1.2 * (unseen - 1)


def ids_are_wrong(agreed: float, said: float) -> bool:
    """Whether a draft that agrees with its teacher in a share of rows should say the text's token in more of them than it does."""
    return agreed > AGREED and said < agreed / 4


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint that a finished train/ folder names as its best. Raises UserError if it is gone."""
    manifest = read_manifest(folder)
    assert manifest is not None
    path = folder / "checkpoints" / f"step-{manifest.counts['best_step']:06d}"
    if not path.is_dir():
        raise UserError(f"{path}, the best checkpoint, is gone. Delete {folder / 'manifest.json'} and run `eyas train` again.")
    return path

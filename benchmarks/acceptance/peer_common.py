"""What the two peers' training scripts share: the features of a run, the loop, the written draft, and the proof that it computes what the peer trained.

A peer brings its own model code, loss, alignment, optimiser and schedule; nothing here decides any of these. It is a class with the methods of `Peer`.

Legend: T tokens of a row, D hidden width, Vd draft vocabulary, P positions of a peer's batch, R rows of Eyas's batch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._dynamo.utils import calculate_time_spent
from transformers import LlamaConfig

from eyas.artifact import read_manifest, write_json, write_tensors
from eyas.config import DraftSection
from eyas.draft.shape import DraftShape, draft_shape
from eyas.export.check import load_export
from eyas.export.names import draft_config
from eyas.features.codec import decode
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow
from eyas.prepare.rows import read_rows
from eyas.target.embeddings import TargetHead, read_head
from eyas.target.spec import TargetSpec, read_spec
from eyas.train.batch import make_batch
from eyas.train.unroll import unroll
from eyas.vocab.mapping import to_d2t, to_t2d
from eyas.vocab.run import read_ids

WARM_UP = 8  # optimiser steps' worth of batches that go forward and backward before the clock starts; their gradients are dropped
CHECKED_ROWS, CHECKED_TOKENS, CHECKED_STEPS, TOLERANCE = 4, 2048, 3, 1e-4
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Materials:
    """What a run folder gives a peer. shape: the sizes of Eyas's draft, its switches still Eyas's; keys: of the rows that are not held out; ids int64 [Vd]."""

    spec: TargetSpec
    head: TargetHead
    shape: DraftShape
    ids: torch.Tensor
    reader: FeatureReader
    keys: list[str]

    def row(self, index: int) -> FeatureRow:
        return self.reader.row(self.keys[index])


@dataclass(frozen=True)
class Work:
    """An optimiser step, still on the CPU: its batches in the form of its maker, and the tokens and supervised tokens of its rows (padding not counted)."""

    batches: list[Any]
    tokens: int
    supervised: int


class Peer(Protocol):
    """name: with its version. order: the rows of each optimiser step of an epoch, as indices. rates: the peer's own schedule over `total` steps, each as a
    share of the peak. backward: adds the gradients of one step's batches, returns the loss. draft: its weights under Eyas's names."""

    name: str

    def order(self, epoch: int) -> list[list[int]]: ...
    def work(self, rows: list[int]) -> Work: ...
    def rates(self, total: int) -> list[float]: ...
    def backward(self, batches: list[Any]) -> torch.Tensor: ...
    def forget_gradients(self) -> None: ...
    def step(self, rate: float) -> None: ...
    def draft(self) -> tuple[DraftShape, Tensors]: ...


def parser(description: str, lr: float, step_weight: float) -> argparse.ArgumentParser:
    """lr, step_weight: the peer's own defaults."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run_folder", type=Path, help="an Eyas run folder, finished up to vocab/")
    made.add_argument("out_folder", type=Path, help="where the draft is written")
    made.add_argument("--target", type=Path, required=True, help="the folder of the run's target")
    made.add_argument("--epochs", type=int, default=1)
    made.add_argument("--seconds", type=float, help="train this long instead, through as many epochs as fit")
    made.add_argument("--tokens-per-step", type=int, default=8192)
    made.add_argument("--unroll", type=int, default=7, help="K, the draft steps unrolled in training")
    made.add_argument("--step-weight", type=float, default=step_weight, help="step k weighs this to the power of k")
    made.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--check", action="store_true", help="train nothing; show that the written draft computes what the peer's training forward does")
    return made


def read_materials(run_folder: Path, target: Path) -> Materials:
    spec, manifest, ids = read_spec(target), read_manifest(run_folder / "features"), read_ids(run_folder / "vocab")
    if manifest is None or manifest.settings["target"]["weights"] != spec.fingerprint["weights"]:
        raise SystemExit(f"{run_folder / 'features'} is not finished, or was captured from another target than {target}.")
    reader = FeatureReader(run_folder / "features")
    keys = [row.key for row in read_rows(run_folder / "prepare") if not row.holdout]
    reader.require(keys)
    for key in keys:  # checks and maps every shard, so that none of that falls into the training time
        reader.row(key)
    return Materials(spec, read_head(spec), draft_shape(DraftSection(), spec, len(ids), manifest.settings["features"]["layers"]), ids, reader, keys)


def llama_config(materials: Materials) -> LlamaConfig:
    """The draft's layer for either peer: of the same sizes as Eyas's."""
    shape = materials.shape
    return LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        num_hidden_layers=1,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters=dict(shape.rope_parameters),
        pad_token_id=materials.spec.text_config.get("pad_token_id"),
        pretraining_tp=1,
    )


def states(row: FeatureRow, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """-> aux layers one beside the other [T, 3D], and layer N before the final norm [T, D]."""
    aux_scale, last_scale = (None, None) if row.scale is None else (row.scale[:, :-1], row.scale[:, -1])
    return decode(row.aux, aux_scale, dtype).flatten(1), decode(row.last, last_scale, dtype)


def on_device(batch: Tensors, device: str) -> Tensors:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def ready(batches: list[Tensors], rows: list[FeatureRow], device: str) -> Work:
    """In memory that a GPU can copy from while others go on."""
    if device == "cuda":
        batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
    return Work(batches, sum(len(row.tokens) for row in rows), sum(int(row.supervised.sum()) for row in rows))


def shares(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], total: int) -> list[float]:
    """The learning rates that a scheduler gives in `total` steps, as shares of the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(total):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def ahead(make: Callable[[list[int]], Work], steps: Iterable[list[int]], device: str) -> Iterator[Work]:
    """What `make` makes of the steps, in order; on a GPU made by threads while others train."""
    if device == "cpu":
        yield from map(make, steps)
        return
    with ThreadPoolExecutor(4) as pool:
        waiting: deque[Future[Work]] = deque()
        for rows in steps:
            waiting.append(pool.submit(make, rows))
            if len(waiting) > 6:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Trains to the end of the epochs or of the time; returns what is printed. Whatever compiles after the warm-up is taken off the clock, too."""
    device, seconds_given = options.device, options.seconds
    steps: Iterable[list[int]]
    if seconds_given is None:
        steps = [rows for epoch in range(options.epochs) for rows in peer.order(epoch)]
        rates = peer.rates(len(steps))
    else:
        steps = (rows for epoch in itertools.count() for rows in peer.order(epoch))
        rates = peer.rates(1000)
    began = time.monotonic()
    for rows in peer.order(0)[: WARM_UP if device == "cuda" else 0]:
        peer.backward(peer.work(rows).batches)
        peer.forget_gradients()
    synchronize(device)
    warm_up, compiled_before = time.monotonic() - began, calculate_time_spent()["total_wall_time"]
    say(f"{peer.name}: {warm_up:.0f} s of compiling and warming up" + ("" if seconds_given else f", {len(rates)} steps to go"))

    def compiling() -> float:
        return calculate_time_spent()["total_wall_time"] - compiled_before

    tokens = supervised = number = 0
    began = shown = time.monotonic()
    loss = torch.zeros(())
    for work in ahead(peer.work, steps, device):
        if number % 10 == 0:
            synchronize(device)  # else the clock would run ahead of the work
        seconds = time.monotonic() - began - compiling()
        if seconds_given is not None and seconds >= seconds_given:
            break
        rate = rates[number] if seconds_given is None else rates[int(len(rates) * seconds / seconds_given)]
        loss = peer.backward(work.batches)
        peer.step(rate)
        number, tokens, supervised = number + 1, tokens + work.tokens, supervised + work.supervised
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            say(f"{peer.name}: step {number}, loss {float(loss):.4f}, {tokens / (shown - began - compiling()):,.0f} tokens/s, rate {rate:.3f} of the peak")
    synchronize(device)
    seconds = time.monotonic() - began - compiling()
    if not torch.isfinite(loss):
        raise SystemExit(f"{peer.name}: the loss became {float(loss)}. Lower --lr.")
    say(f"{peer.name}: {number} steps, loss {float(loss):.4f}, {tokens:,} tokens in {seconds:.1f} s")
    return {
        "peer": peer.name, "tokens": tokens, "supervised_tokens": supervised, "steps": number, "seconds": round(seconds, 2),
        "compile_seconds": round(warm_up + compiling(), 2), "lr": options.lr, "seed": options.seed,
    }  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_draft(folder: Path, shape: DraftShape, tensors: Tensors, materials: Materials, dtype: torch.dtype) -> None:
    """The plain form that vLLM loads, without the embedding, which is the target's; read back as Eyas's simulator does."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if len(materials.ids) < shape.vocab_size:
        weights |= {"d2t": to_d2t(materials.ids), "t2d": to_t2d(materials.ids, shape.vocab_size)}
    target = {"target": materials.spec.path.name, "target_weights": materials.spec.fingerprint["weights"]}
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    write_json(folder / "config.json", draft_config(shape, "vllm", str(dtype).removeprefix("torch."), target))
    load_export(folder)


@torch.no_grad()
def compare(folder: Path, materials: Materials, rows: list[FeatureRow], starts: list[int], seen: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Asserts that the draft in `folder`, unrolled by Eyas, has the logits and the teachers that the peer's loss compared, at every row that Eyas counts.

    starts: where each row begins among the peer's positions. seen: per step its logits and its teacher's probabilities, float32 [P, Vd] each.
    """
    exported, head = load_export(folder), materials.head
    teacher = head.restricted(exported.ids, torch.float32, torch.device("cpu"))
    batch = make_batch(rows, head.embedding, len(seen), torch.float32)
    offsets = torch.cat([torch.full((doc.row_end - doc.row_start,), start - doc.start) for doc, start in zip(batch.documents, starts, strict=True)])
    for k, (step, (logits, probabilities)) in enumerate(zip(unroll(exported.draft, batch, len(seen)), seen, strict=True)):
        counted = step.counts_R
        at, theirs = batch.rows_R[counted], (batch.rows_R + offsets)[counted]
        ours = exported.draft.lm_head(step.hidden_RD[counted])
        differences = [
            relative(logits[theirs], ours),
            relative(probabilities[theirs], teacher.logits(batch.last[at + k + 1]).softmax(-1)),
        ]
        say(f"step {k}: {int(counted.sum())} rows, logits differ by {differences[0]:.1e} of the largest, the teacher's probabilities by {differences[1]:.1e}")
        assert max(differences) < TOLERANCE, "the written draft is not what the peer trains"


def disturb(model: torch.nn.Module, embedding: torch.Tensor, materials: Materials) -> None:
    """Makes the weights of a new model differ from one another as trained ones do: norms of ones could change places unseen. embedding: the model's."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter) * (1.0 if parameter.dim() == 1 else 0.2))
    assert torch.equal(embedding, materials.head.embedding), "the embedding is not the target's"


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def main(make: Callable[[Materials, argparse.Namespace], Peer], check: Callable[[Materials, argparse.Namespace], None], options: argparse.Namespace) -> None:
    if options.check:
        options.device, options.unroll = "cpu", CHECKED_STEPS
    if options.device == "cpu":
        torch.compiler.set_stance("force_eager")  # the peers compile pieces for a GPU
    materials = read_materials(options.run_folder, options.target)
    longest = max(materials.reader.lengths[key] for key in materials.keys)
    if options.check:
        options.tokens_per_step = max(CHECKED_TOKENS, longest)
        return check(materials, options)
    if longest > options.tokens_per_step:
        raise SystemExit(f"The longest row has {longest:,} tokens, and --tokens-per-step {options.tokens_per_step:,} would cut it. Set it higher.")
    with contextlib.redirect_stdout(sys.stderr):  # the peers print, too
        peer = make(materials, options)
        found = train(peer, options)
    write_draft(options.out_folder, *peer.draft(), materials, torch.bfloat16)
    print(json.dumps(found), flush=True)

"""The training loop: measure and save, read rows, forward, backward, step, in this order, visibly.

In: features, vocabulary, target head. Out: checkpoints and log.jsonl (a line an optimiser step).
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from eyas.artifact import write_bytes
from eyas.config import TrainSection
from eyas.draft.model import Draft
from eyas.errors import UserError
from eyas.evaluate.simulate import nothing, simulate
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow
from eyas.features.stream import StreamedFeatures
from eyas.progress import Reporter
from eyas.train import checkpoint
from eyas.train.batch import Batch, make_batch
from eyas.train.checkpoint import TrainState
from eyas.train.distributed import ALONE, World
from eyas.train.feed import Step, feed
from eyas.train.graph import Backward, Graphs, Say, Update, UpdateGraph
from eyas.train.loss import LossSums, Objective, Teacher, loss_backward
from eyas.train.optim import Optimizers, make_optimizer, rate_share
from eyas.train.sampler import epoch_rows, own_batches, pack
from eyas.train.unroll import unroll

FALLEN = 0.02  # of the best acceptance: more than it moves by chance from one checkpoint to the next
# Tokens of a batch times the draft's weights, below which launching bounds training: 9 ms a draft step, in which an H200 does 4e12 products and additions.
GRAPHED, SMALL = 6e11, 100_000_000  # and weights above which there is no room to hold a graph's step against a plain one
SHAPE_MULTIPLE = 128  # positions and rows of a batch; fewer shapes are faster, more padding is slower


def loss_chunk(device: torch.device) -> int:
    """Rows whose logits, of all steps, exist at once: more fill a GPU better and take more of its memory, fewer stay in a CPU's cache."""
    return 1024 if device.type == "cuda" else 256


@dataclass(frozen=True)
class Materials:
    """All that training reads. embedding [V, D] in the compute dtype on the CPU, where rows are packed, teacher in
    that dtype on the device; ids int64 [Vd] the draft vocabulary."""

    reader: FeatureReader | StreamedFeatures
    train_keys: Sequence[str]
    holdout_keys: Sequence[str]
    embedding: torch.Tensor
    teacher: Teacher
    ids: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    world: World = ALONE


@dataclass(frozen=True)
class Taken:
    """A step that the device may still be at."""

    step: int
    epoch: int
    share: float
    figures: Figures


class Figures:
    """What a step found, on its way to the CPU behind the step's own work, so that nobody who reads it waits for what the device was given after that."""

    def __init__(self, sums: LossSums, grad_norm: torch.Tensor) -> None:
        self.there = torch.cat([sums.stacked.flatten(), grad_norm.double()[None]]).to("cpu", non_blocking=True)
        self.arrived = None
        if grad_norm.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def over(self, world: World) -> tuple[LossSums, float]:
        """The sums over all processes, and the norm of the gradient."""
        if self.arrived:
            self.arrived.synchronize()
        sums, grad_norm = self.there[:-1], float(self.there[-1])
        return LossSums(*torch.tensor(world.total(sums.tolist()), dtype=torch.float64).view(3, -1)), grad_norm


def train(draft: Draft, materials: Materials, section: TrainSection, seed: int, folder: Path, reporter: Reporter) -> TrainState:
    """Trains to the end of the schedule, from the newest checkpoint in `folder` if there is one."""
    world, lengths = materials.world, materials.reader.lengths
    rows = [(epoch, step) for epoch in range(section.epochs) for step in epoch_rows(materials.train_keys, lengths, section.tokens_per_step, seed, epoch)]
    whole = [step for _, step in rows]
    schedule = [(epoch, own_batches(step, lengths, batch_tokens(section), world.rank, world.size)) for epoch, step in rows]
    optimizer = make_optimizer(draft, section, materials.dtype)
    work = make_work(draft, optimizer, materials, section, reporter.say)
    state = TrainState(0, 0, None)
    if newest := checkpoint.latest(folder / "checkpoints"):
        state = checkpoint.load(newest, draft, optimizer)
        reporter.say(f"train: going on from step {state.step} of {len(schedule)}")
        if turned(state, section):
            return state
    log = StepLog(folder / "log.jsonl", state.step, silent=world.rank > 0)
    tokens_of = [sum(lengths[key] for key in step) for step in whole]
    with reporter.task(folder, "train", sum(tokens_of), "tokens") as task, StopAtStep() as stop:
        task.skip(sum(tokens_of[: state.step]))
        told_at, taken = time.monotonic(), None
        todo = schedule[state.step :]

        def tell(taken: Taken) -> None:
            nonlocal told_at
            (sums, grad_norm), step = taken.figures.over(world), taken.step
            loss = float(sum(section.step_weight**k * total for k, total in enumerate(sums.loss.tolist())) / sums.rows[0])
            if not loss < float("inf"):
                raise UserError(f"The loss became {loss} at step {step}. Lower train.lr or train.grad_clip; `eyas train` then begins anew.")
            now = time.monotonic()
            log.add(
                step=step, epoch=taken.epoch, lr=section.lr * taken.share, loss=loss, grad_norm=grad_norm,
                losses=per_row(sums.loss, sums.rows), agreement=per_row(sums.agreed, sums.rows), seconds=now - told_at,
            )  # fmt: skip
            told_at = now
            task.advance(tokens_of[step - 1], f"step {step}/{len(schedule)}, loss {loss:.3f}, agreement {sums.agreed[0] / sums.rows[0]:.1%}")

        steps = steps_of(materials, section, [keys for _, keys in todo], whole[state.step :], fixed_tokens(draft, section, materials.device))
        for (epoch, _), step in zip(todo, steps, strict=True):
            share = rate_share(section, state.step, len(schedule))
            sums, grad_norm = optimizer_step(draft, optimizer, materials, section, step, share, work)
            state = replace(state, step=state.step + 1)
            if taken:
                tell(taken)  # the device has this step to work at
            taken = Taken(state.step, epoch, share, Figures(sums, grad_norm))
            due = state.step % section.checkpoint_every == 0 or state.step == len(schedule)
            asked = world.total([stop.asked])[0] > 0  # all stop at the same step
            if due or asked or materials.device.type != "cuda":  # a GPU has its next step before this one is told of
                tell(taken)
                taken = None
            if due:
                state = measure_and_save(draft, optimizer, materials, section, state, folder, reporter)
                if turned(state, section):
                    reporter.say(f"train: the acceptance has turned since step {state.best_step}, whose draft is taken")
                    break
                told_at = time.monotonic()
            elif asked:  # not measured: where it was stopped must not decide which checkpoint is the best
                save(draft, optimizer, materials, state, folder)
                reporter.say(f"train: step {state.step} saved")
            if asked:
                raise KeyboardInterrupt
    return state


def turned(state: TrainState, section: TrainSection) -> bool:
    """Whether the held-out acceptance has not grown for as long as `patience` allows and has clearly fallen: while the learning rate is high it may stand still
    for long. A function of the state alone, so that going on decides alike."""
    if state.best_acceptance is None or state.acceptance is None or not section.patience:
        return False
    waited = state.step - state.best_step >= section.patience * section.checkpoint_every
    return waited and state.acceptance < (1 - FALLEN) * state.best_acceptance


def steps_of(
    materials: Materials, section: TrainSection, schedule: Sequence[list[list[str]]], whole: Sequence[list[str]] | None = None, fixed: int = 0
) -> Iterator[Step]:
    """The batches of each step of the schedule, whose entries are the keys of each batch. whole: all keys of each step, of all processes; those of the schedule
    where there is one. fixed: as for `make_batch`."""
    whole = [[key for batch in step for key in batch] for step in schedule] if whole is None else whole

    def pack(rows: list[FeatureRow]) -> Batch:
        cuda = materials.device.type == "cuda"
        return make_batch(rows, materials.embedding, section.unroll_steps, materials.dtype, SHAPE_MULTIPLE, loss_chunk(materials.device), cuda, fixed)

    for part in materials.reader.parts(schedule, whole):
        yield from feed(part, materials.reader.row, pack, materials.device)


def per_row(sums: torch.Tensor, rows: torch.Tensor) -> list[float | None]:
    """Per step: the mean over the rows that count, None where there are none."""
    return [total / count if count else None for total, count in zip(sums.tolist(), rows.tolist(), strict=True)]


def optimizer_step(
    draft: Draft, optimizer: Optimizers, materials: Materials, section: TrainSection, step: Step, share: float, work: Work | None = None
) -> tuple[LossSums, torch.Tensor]:
    """One step at `share` of the peak learning rates; returns this process's loss sums and the norm of the gradient before clipping, without waiting for the
    device. work: of `make_work`, where many steps follow."""
    work = work or plain_work(draft, optimizer, materials, section)
    optimizer.zero_grad()
    optimizer.set_rates(share)
    world = materials.world
    (denominator,) = world.total([step.denominator])
    total = LossSums.nothing(section.unroll_steps, materials.device)
    for batch in step.batches:
        total = total + work.backward(batch, denominator)
    world.add_gradients(draft.parameters())
    return total, work.update()


@dataclass(frozen=True)
class Work:
    """What an optimiser step does to a GPU."""

    backward: Backward
    update: Update


def make_work(draft: Draft, optimizer: Optimizers, materials: Materials, section: TrainSection, say: Say) -> Work:
    """For many steps, as graphs where those are faster."""
    plain = plain_work(draft, optimizer, materials, section)
    if not fixed_tokens(draft, section, materials.device):
        return plain

    def add(batch: Batch, denominator: float | torch.Tensor) -> LossSums:
        return backward(draft, materials, batch, section, denominator)

    return Work(Graphs(draft, add, say), UpdateGraph(draft, optimizer, plain.update, say))


def plain_work(draft: Draft, optimizer: Optimizers, materials: Materials, section: TrainSection) -> Work:
    def add(batch: Batch, denominator: float) -> LossSums:
        return backward(draft, materials, batch, section, denominator)

    def update() -> torch.Tensor:
        grad_norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), section.grad_clip)
        optimizer.step()
        return grad_norm

    return Work(add, update)


def fixed_tokens(draft: Draft, section: TrainSection, device: torch.device) -> int:
    """The tokens for which every batch is made large enough, should its work be launched as a graph; else 0."""
    graphed = device.type == "cuda" and pays_as_graph(sum(weight.numel() for weight in draft.parameters()), section)
    return batch_tokens(section) if graphed else 0


def pays_as_graph(weights: int, section: TrainSection) -> bool:
    """Whether a GPU would be done with the kernels of a batch before they are launched."""
    return weights < SMALL and batch_tokens(section) * weights < GRAPHED and not section.recompute


def batch_tokens(section: TrainSection) -> int:
    return min(section.tokens_per_batch, section.tokens_per_step)


def backward(draft: Draft, materials: Materials, batch: Batch, section: TrainSection, denominator: float | torch.Tensor) -> LossSums:
    """Adds the batch's gradients to those of the draft."""
    steps = unroll(draft, batch, section.unroll_steps, section.recompute)
    objective = Objective(section.step_weight, denominator, section.loss)
    return loss_backward(steps, draft.lm_head, materials.teacher, batch, objective)[1]


def measure_and_save(
    draft: Draft, optimizer: Optimizers, materials: Materials, section: TrainSection, state: TrainState, folder: Path, reporter: Reporter
) -> TrainState:
    """The held-out acceptance decides which checkpoint is the best: a falling loss does not promise a longer acceptance."""
    acceptance = holdout_acceptance(draft, materials, section)
    if acceptance is None or state.best_acceptance is None or acceptance > state.best_acceptance:
        state = replace(state, best_step=state.step, best_acceptance=acceptance)
    state = replace(state, acceptance=acceptance)
    save(draft, optimizer, materials, state, folder)
    shown = (
        "no held-out rows"
        if acceptance is None
        else f"simulated acceptance length {acceptance:.3f} on held-out rows (K = {section.unroll_steps}, best {state.best_acceptance:.3f} at step "
        f"{state.best_step})"
    )
    reporter.say(f"train: step {state.step} saved, {shown}")
    return state


def save(draft: Draft, optimizer: Optimizers, materials: Materials, state: TrainState, folder: Path) -> None:
    """By the first process; the weights of all are the same, which is looked at before they are written."""
    weights = [float(parameter.detach().sum(dtype=torch.float64)) for parameter in draft.parameters()] if materials.world.size > 1 else []
    together = materials.world.total(weights)
    if not all(math.isclose(total, materials.world.size * own, rel_tol=1e-12, abs_tol=1e-12) for total, own in zip(together, weights, strict=True)):
        raise UserError(f"The processes that train have come to hold different weights at step {state.step}. Please report it; an older checkpoint goes on.")
    if materials.world.rank == 0:
        checkpoint.save(folder / "checkpoints", draft, optimizer, state)


def holdout_acceptance(draft: Draft, materials: Materials, section: TrainSection) -> float | None:
    """Over the held-out rows, whose text is the data's own, greedy or not."""
    return simulated_acceptance(draft, materials, section, materials.holdout_keys)


def simulated_acceptance(draft: Draft, materials: Materials, section: TrainSection, some: Sequence[str]) -> float | None:
    """Simulated acceptance length over these rows, by all processes together; None where there is nothing to draft."""
    total, world = nothing(section.unroll_steps), materials.world
    for keys in pack(some, materials.reader.lengths, section.tokens_per_batch)[world.rank :: world.size]:
        rows: list[FeatureRow] = [materials.reader.row(key) for key in keys]
        batch = make_batch(rows, materials.embedding, section.unroll_steps, materials.dtype).to(materials.device)
        for acceptance in simulate(draft, materials.ids, batch, section.unroll_steps):
            total = total + acceptance
    rounds, *accepted = world.total([total.rounds, *total.accepted])
    return 1 + sum(accepted) / rounds if rounds else None


@torch.no_grad()
def holdout_agreement(draft: Draft, materials: Materials, section: TrainSection) -> tuple[float, float]:
    """Of the first draft step over some held-out rows, the share whose likeliest token is the teacher's, and the share where it is the text's."""
    keys = next(iter(pack(materials.holdout_keys, materials.reader.lengths, section.tokens_per_batch)), [])
    rows: list[FeatureRow] = [materials.reader.row(key) for key in keys]
    if not rows or len((batch := make_batch(rows, materials.embedding, 1, materials.dtype).to(materials.device)).rows_R) == 0:
        return 0.0, 0.0
    (step,) = unroll(draft, batch, 1)
    said_R = draft.lm_head(step.hidden_RD).argmax(-1)
    taught_R = materials.teacher.logits(batch.last[step.at_R + 1]).argmax(-1)
    return float((said_R == taught_R).float().mean()), float((materials.ids[said_R] == batch.label_T[step.at_R]).float().mean())


class StepLog:
    """log.jsonl: a line an optimiser step. Lines behind the step that training goes on from are dropped: those steps will be done again."""

    def __init__(self, path: Path, step: int, silent: bool) -> None:
        self.path, self.silent = path, silent
        if silent:
            return
        lines = path.read_bytes().splitlines() if path.exists() else []
        write_bytes(path, b"".join(line + b"\n" for line in lines if _step_of(line) <= step))

    def add(self, **values: Any) -> None:
        if self.silent:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps(values) + "\n")


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # torn by a power cut
        return math.inf


class StopAtStep:
    """Turns the first Ctrl-C or SIGTERM into a stop after the current step, with a checkpoint; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopAtStep:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._ask)
        except ValueError:
            pass  # not in the main thread: whoever started this one decides about signals
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *unused: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

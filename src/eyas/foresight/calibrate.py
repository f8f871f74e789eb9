"""Rates of this machine, measured by a little of each stage's real work: the target is loaded once, a few rows are read, a few steps are trained.

Out: calibration.json in the run folder; the plan takes its hours from there.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from eyas.artifact import read_json, write_json
from eyas.config import RunConfig
from eyas.draft.init import new_draft
from eyas.features.capture import Capturer, captured_from
from eyas.features.index import open_index
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow
from eyas.foresight.hardware import Hardware
from eyas.foresight.plan import read_speed
from eyas.foresight.tokens import Tokens
from eyas.prepare.rows import PreparedRow
from eyas.progress import Reporter
from eyas.target.embeddings import read_head
from eyas.target.engine import Sampling, TargetEngine, keep_freed_memory, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec
from eyas.train.batch import make_batch
from eyas.train.feed import Step
from eyas.train.loop import SHAPE_MULTIPLE, Materials, fixed_tokens, loss_chunk, make_work, optimizer_step
from eyas.train.loss import Teacher
from eyas.train.optim import make_optimizer
from eyas.train.run import set_products, shape_of

FILE = "calibration.json"
SECONDS = 15.0  # of each measurement, about; the first round of each is not counted


def calibrate(config: RunConfig, spec: TargetSpec, hardware: Hardware, tokens: Tokens, say: Callable[[str], None]) -> dict[str, float]:
    """tokens: of the run, whose mean length and supervised share are taken. Returns tokens a second by stage, of "disk" bytes, and "load" in seconds."""
    keep_freed_memory()
    folder = Path(config.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    rates: dict[str, float] = {}
    if speed := read_speed(spec):
        rates["disk"] = speed
        say(f"calibrate: weights are read at {speed / 1e9:.2f} GB/s")
    length = max(8, min(config.data.max_length, tokens.tokens // max(1, tokens.rows)))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        store = Path(name)
        reads = _Reads(config, spec, store, length)
        try:
            began = time.monotonic()
            reads.act(1)
            rates["load"] = time.monotonic() - began
            say(f"calibrate: the target is loaded and has read its first row after {rates['load']:,.0f} s")
            if tokens.written:
                engine = reads.capturer.engine
                assert engine is not None
                rates["generate"] = _repeated(lambda count: _written(engine, spec, count), config.data.generate_batch or 16)
                say(f"calibrate: the target writes {rates['generate']:,.0f} tokens/s")
            batch = config.target.max_batched_tokens if config.target.engine == "vllm" else config.features.batch_tokens
            rates["extract"] = _repeated(reads.act, max(1, 4 * batch // length))
            say(f"calibrate: the target reads {rates['extract']:,.0f} tokens/s, features written and proved")
        finally:
            reads.capturer.close()
        rates["train"] = _trained(config, spec, tokens.supervised / max(1, tokens.tokens), length, store)
    say(f"calibrate: the draft trains on {rates['train']:,.0f} tokens/s")
    write_json(folder / FILE, {"hardware": f"{hardware.count} x {hardware.name}", "rates": rates})
    return rates


class _Reads:
    """Captures rows of random tokens, from half to one and a half of `length`, as extraction does: written, proved, entered."""

    def __init__(self, config: RunConfig, spec: TargetSpec, store: Path, length: int) -> None:
        self.spec, self.store, self.length = spec, store, length
        self.reporter = Reporter(store)
        self.capturer = Capturer(config, spec, self.reporter, Path(config.run.folder) / "calibrate.log")
        self.capture = captured_from(config, spec)
        self.generator = torch.Generator().manual_seed(0)
        self.number = 0

    def act(self, count: int) -> int:
        lengths = torch.linspace(0.5, 1.5, count).mul(self.length).long().clamp(8).tolist() if count > 1 else [self.length]
        rows = [self._row(length) for length in lengths]
        folder = self.store / "features"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        open_index(folder, self.capture)
        with self.reporter.task(self.store, "calibrate", 0, "tokens") as task:
            self.capturer.capture(rows, folder, task, len(rows))
        return sum(lengths)

    def _row(self, length: int) -> PreparedRow:
        self.number += 1
        tokens = torch.randint(0, self.spec.vocab_size, (length,), generator=self.generator, dtype=torch.int32)
        return PreparedRow(str(self.number), (tokens, torch.ones(length, dtype=torch.bool)), 0, length, False)


def read_calibration(config: RunConfig, hardware: Hardware) -> dict[str, float]:
    """The rates measured for this run on this machine; empty if there are none."""
    path = Path(config.run.folder) / FILE
    found = read_json(path) if path.exists() else {}
    rates: dict[str, float] = found.get("rates", {}) if found.get("hardware") == f"{hardware.count} x {hardware.name}" else {}
    return rates


def _repeated(act: Callable[[int], int], count: int) -> float:
    """Tokens a second of `act`, which takes a number of rows and returns tokens; the first call is not counted."""
    act(count)
    done, start = 0, time.monotonic()
    while time.monotonic() - start < SECONDS:
        done += act(count)
    return done / (time.monotonic() - start)


def _written(engine: TargetEngine, spec: TargetSpec, count: int) -> int:
    prompts = torch.randint(0, spec.vocab_size, (count, 32), generator=torch.Generator().manual_seed(0)).tolist()
    answers = engine.generate(prompts, Sampling(32, 1.0, 1.0, 0))
    return sum(len(answer.tokens) for answer in answers)


def _trained(config: RunConfig, spec: TargetSpec, share: float, length: int, store: Path) -> float:
    """Steps on made-up features, as training makes them: AdamW or Muon included, reading features not."""
    device = resolve_device(config.target.device)
    dtype = resolve_dtype(config.train.dtype, device)
    head = read_head(spec)
    shape = shape_of(config, spec)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(spec.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    draft = new_draft(shape, 0, ids, head).to(device)
    set_products(draft, config.train, device)
    optimizer = make_optimizer(draft, config.train, dtype)
    teacher = Teacher(head, ids, dtype, device)
    materials = Materials(FeatureReader(store / "features"), [], [], head.embedding.to(dtype), teacher, ids.to(device), dtype, device)
    fixed, work = fixed_tokens(draft, config.train, device), make_work(draft, optimizer, materials, config.train, lambda line: None)
    per_batch = max(1, config.train.tokens_per_batch // length)
    num_batches = max(1, config.train.tokens_per_step // config.train.tokens_per_batch)
    rows = [
        FeatureRow(
            str(n), ids[torch.randint(0, len(ids), (length,), generator=generator)].int(), torch.arange(length) >= round(length * (1 - share)),
            torch.randn(length, 3, spec.hidden_size, generator=generator), torch.randn(length, spec.hidden_size, generator=generator),
        )
        for n in range(per_batch)
    ]  # fmt: skip

    def step() -> None:
        batch = make_batch(rows, materials.embedding, config.train.unroll_steps, dtype, SHAPE_MULTIPLE, loss_chunk(device), fixed=fixed).to(device)
        optimizer_step(draft, optimizer, materials, config.train, Step([batch] * num_batches, float(len(rows) * length)), 1.0, work)

    for _ in range(2):  # compiled, and captured as a graph
        step()
    done, start = 0, time.monotonic()
    while time.monotonic() - start < SECONDS:
        step()
        done += 1
    return done * num_batches * per_batch * length / (time.monotonic() - start)

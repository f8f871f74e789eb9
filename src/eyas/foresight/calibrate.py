"""Rates of this machine, measured by a little of each stage's real work: the target is loaded once, a few rows are read, a few steps are trained.

Out: calibration.json in the run folder; the plan takes its hours from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from eyas.artifact import read_json, write_json
from eyas.config import RunConfig
from eyas.draft.init import new_draft
from eyas.features.reader import FeatureReader
from eyas.features.shard import FeatureRow
from eyas.foresight.hardware import Hardware
from eyas.foresight.plan import read_speed
from eyas.target.embeddings import read_head
from eyas.target.engine import Sampling, TargetEngine, open_engine, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec
from eyas.train.batch import make_batch
from eyas.train.feed import Step
from eyas.train.loop import SHAPE_MULTIPLE, Materials, loss_chunk, optimizer_step
from eyas.train.loss import Teacher
from eyas.train.optim import make_optimizer
from eyas.train.run import shape_of

FILE = "calibration.json"
SECONDS = 15.0  # of each measurement, about; the first round of each is not counted
ROW = 512  # tokens


def calibrate(config: RunConfig, spec: TargetSpec, hardware: Hardware, share: float, writes: bool, say: Callable[[str], None]) -> dict[str, float]:
    """share: of the tokens that are supervised. writes: whether the target is to write answers. Returns tokens a second by stage, and of "disk" bytes."""
    folder = Path(config.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    rates: dict[str, float] = {}
    if speed := read_speed(spec):
        rates["disk"] = speed
        say(f"calibrate: weights are read at {speed / 1e9:.2f} GB/s")
    generator = torch.Generator().manual_seed(0)
    length = min(ROW, config.data.max_length)
    layers = [*(config.features.layers or spec.default_layers), spec.num_layers]
    engine = open_engine(config, spec, folder / "calibrate.log", say)
    try:
        if writes:
            rates["generate"] = _repeated(lambda count: _written(engine, spec, count, generator), config.data.generate_batch or 16)
            say(f"calibrate: the target writes {rates['generate']:,.0f} tokens/s")
        rates["extract"] = _repeated(
            lambda count: len(engine.capture(torch.randint(0, spec.vocab_size, (count, length), generator=generator).tolist(), layers)) * length,
            max(1, config.features.batch_tokens // length),
        )
        say(f"calibrate: the target reads {rates['extract']:,.0f} tokens/s, features written")
    finally:
        engine.close()
    rates["train"] = _trained(config, spec, share, length)
    say(f"calibrate: the draft trains on {rates['train']:,.0f} tokens/s")
    write_json(folder / FILE, {"hardware": f"{hardware.count} x {hardware.name}", "rates": rates})
    return rates


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


def _written(engine: TargetEngine, spec: TargetSpec, count: int, generator: torch.Generator) -> int:
    prompts = torch.randint(0, spec.vocab_size, (count, 32), generator=generator).tolist()
    answers = engine.generate(prompts, Sampling(32, 1.0, 1.0, 0))
    return sum(len(answer.tokens) for answer in answers)


def _trained(config: RunConfig, spec: TargetSpec, share: float, length: int) -> float:
    """Steps on made-up features, as training makes them: AdamW or Muon included, reading features not."""
    device = resolve_device(config.target.device)
    dtype = resolve_dtype(config.train.dtype, device)
    head = read_head(spec)
    shape = shape_of(config, spec)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(spec.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    draft = new_draft(shape, 0, ids, head).to(device)
    optimizer = make_optimizer(draft, config.train, dtype)
    reader, teacher = FeatureReader(Path(config.run.folder) / "features"), Teacher(head, ids, dtype, device)
    materials = Materials(reader, [], [], head.embedding.to(device, dtype), teacher, ids.to(device), dtype, device)
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
        batch = make_batch(rows, config.train.unroll_steps, dtype, SHAPE_MULTIPLE, loss_chunk(device)).to(device)
        optimizer_step(draft, optimizer, materials, config.train, Step([batch] * num_batches, float(len(rows) * length)), 1.0)

    step()
    done, start = 0, time.monotonic()
    while time.monotonic() - start < SECONDS:
        step()
        done += 1
    return done * num_batches * per_batch * length / (time.monotonic() - start)

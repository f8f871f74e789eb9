"""Trains a draft with Eyas on the same clock as the peers' scripts beside it, on the same features.

    python benchmarks/acceptance/eyas_train.py RUN_FOLDER OUT_FOLDER --target TARGET_FOLDER [--epochs 1 | --seconds 60] [--set train.loss=lk] ...

In: a run folder finished up to vocab/. Out: the draft in the plain form that engines load, progress on stderr, a line of JSON on stdout. What is not said is
Eyas's own default; `--set` changes a key of [train] or [draft] of the run file.
"""

from __future__ import annotations

import argparse
from typing import Any

import peer_common as common
import torch
from peer_common import Materials, Tensors, Work

from eyas import __version__
from eyas.config import DraftSection, TrainSection, apply_override
from eyas.draft.init import new_draft
from eyas.draft.shape import DraftShape, draft_shape
from eyas.target.engine import keep_freed_memory
from eyas.train import loop
from eyas.train.batch import make_batch
from eyas.train.feed import denominator
from eyas.train.loss import Teacher
from eyas.train.optim import make_optimizer, rate_share
from eyas.train.run import set_products
from eyas.train.sampler import epoch_order, pack


class Eyas:
    name = f"Eyas {__version__}"

    def __init__(self, materials: Materials, options: argparse.Namespace) -> None:
        keep_freed_memory()
        changes: dict[str, Any] = {}
        for override in options.set:
            apply_override(changes, override)
        given = {"lr": options.lr, "unroll_steps": options.unroll, "step_weight": options.step_weight, "tokens_per_step": options.tokens_per_step}
        self.section = TrainSection(**{**given, **changes.get("train", {})})
        self.device, self.seed = torch.device(options.device), options.seed
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        spec, head, ids = materials.spec, materials.head, materials.ids
        draft = DraftSection(**changes.get("draft", {}))
        self.shape = draft_shape(draft, spec, len(ids), materials.shape.aux_layers)
        self.model = new_draft(self.shape, options.seed, ids, head if draft.init_head == "target" else None).to(self.device)
        set_products(self.model, self.section, self.device)
        self.optimizer = make_optimizer(self.model, self.section, dtype)
        self.index = {key: index for index, key in enumerate(materials.keys)}
        self.materials = loop.Materials(
            materials.reader, materials.keys, [], head.embedding.to(dtype), Teacher(head, ids, dtype, self.device), ids.to(self.device), dtype,
            self.device,
        )  # fmt: skip
        self.fixed = loop.fixed_tokens(self.model, self.section, self.device)
        self.launched = loop.make_work(self.model, self.optimizer, self.materials, self.section, common.say)

    def order(self, epoch: int) -> list[list[int]]:
        steps = pack(epoch_order(self.materials.train_keys, self.seed, epoch), self.materials.reader.lengths, self.section.tokens_per_step)
        return [[self.index[key] for key in step] for step in steps]

    def work(self, rows: list[int]) -> Work:
        keys = [self.materials.train_keys[index] for index in rows]
        packs = [[self.materials.reader.row(key) for key in part] for part in pack(keys, self.materials.reader.lengths, self.section.tokens_per_batch)]
        cuda = self.device.type == "cuda"
        chunk, dtype = loop.loss_chunk(self.device), self.materials.dtype
        steps, multiple = self.section.unroll_steps, loop.SHAPE_MULTIPLE
        batches = [make_batch(part, self.materials.embedding, steps, dtype, multiple, chunk, cuda, self.fixed) for part in packs]
        all_rows = [row for part in packs for row in part]
        tokens, supervised = sum(len(row.tokens) for row in all_rows), sum(int(row.supervised.sum()) for row in all_rows)
        return Work([(batch.pinned() if cuda else batch, denominator(batches)) for batch in batches], tokens, supervised)

    def rates(self, total: int) -> list[float]:
        return [rate_share(self.section, number, total) for number in range(total)]

    def backward(self, batches: list[Any]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        weights = self.section.step_weight ** torch.arange(self.section.unroll_steps, device=self.device)
        for batch, rows in batches:
            sums = self.launched.backward(batch.to(self.device), rows)
            total += (sums.loss * weights).sum() / rows
        return total

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad()

    def step(self, rate: float) -> None:
        self.optimizer.set_rates(rate)
        self.launched.update()
        self.optimizer.zero_grad()

    def draft(self) -> tuple[DraftShape, Tensors]:
        return self.shape, dict(self.model.state_dict())


def check(materials: Materials, options: argparse.Namespace) -> None:
    raise SystemExit("--check is for peers; Eyas's own drafts are checked in its tests.")


if __name__ == "__main__":
    arguments = common.parser(__doc__ or "", TrainSection().lr, TrainSection().step_weight)
    arguments.set_defaults(unroll=TrainSection().unroll_steps)
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    common.main(Eyas, check, arguments.parse_args())

"""Trains a draft with SpecForge 0.2.0's own model code, loss, padding and optimiser, on features that Eyas captured.

    python benchmarks/acceptance/specforge_train.py RUN_FOLDER OUT_FOLDER --target TARGET_FOLDER [--epochs 1 | --seconds 60] [--lr 1e-4] ... [--check]

In: a run folder finished up to vocab/. Out: the draft in the plain form that engines load, progress on stderr, a line of JSON on stdout. SpecForge must be
importable. What is not said here is its own default (specforge.config.schema and BF16Optimizer), which for EAGLE-3 is:

    optimiser   AdamW of 1e-4 without weight decay on float32 copies of bfloat16 weights; gradients clipped to a norm of 0.5
    schedule    a cosine to zero, after a warm-up of 1.5% of the steps
    loss        cross-entropy to the target over the draft vocabulary, step k weighing 0.8^k, 7 steps; the mean over all positions, padding too. Positions
                where the target's likeliest token is outside the draft vocabulary do not count
    model       no norm before fc; the residual before its norm, and the next step reads what the final norm has not seen; the head begins at random and is
                trained, the embedding is the target's and frozen

Its alignment (TargetHead.preprocess): tokens and teachers move by one, the mask does not. So position i holds aux[i], x[i+1] and last[i+1], and counts at step
k iff x[i+k] is supervised. The teacher's states are those behind the target's final norm, for its head applies none.

The rows of a step are split evenly into padded batches of at most --rows-per-batch, whose gradients add up.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import peer_common as common
import torch
from peer_common import Materials, Tensors, Work

if importlib.util.find_spec("triton") is None:  # its loss is written in it, and imported but not called on a CPU
    sys.modules |= {"triton": MagicMock(), "triton.language": MagicMock()}
    importlib.import_module("specforge.core.loss")
    del sys.modules["triton"], sys.modules["triton.language"]

import specforge.algorithms.eagle3.model as eagle3
from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
from specforge.config.schema import TrainingConfig
from specforge.core.loss import _compute_loss
from specforge.lr_scheduler import CosineAnnealingWarmupLR
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy

from eyas.draft.shape import DraftShape
from eyas.train.sampler import epoch_order, pack
from eyas.vocab.mapping import to_d2t, to_t2d

DEFAULTS = TrainingConfig()
STEP_WEIGHT = 0.8  # of Eagle3TrainStrategy


class SpecForge:
    name = "SpecForge 0.2.0"

    def __init__(self, materials: Materials, options: argparse.Namespace) -> None:
        self.materials, self.device = materials, options.device
        self.tokens_per_step, self.rows_per_batch, self.seed = options.tokens_per_step, options.rows_per_batch, options.seed
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.index = {key: index for index, key in enumerate(materials.keys)}
        self.collate = build_offline_collator()
        if self.device == "cpu":  # its own reference; the loss itself is a kernel for a GPU
            eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
        attention = "flex_attention" if self.device == "cuda" else "sdpa"
        config, ids = common.llama_config(materials), materials.ids
        config.draft_vocab_size, config.fc_norm = len(ids), options.fc_norm
        torch.manual_seed(options.seed)
        self.model = LlamaForCausalLMEagle3(config, attention_backend=attention)
        head = TargetHead(str(materials.spec.path))
        with torch.no_grad():
            self.model.t2d.copy_(to_t2d(ids, config.vocab_size))
            self.model.d2t.copy_(to_d2t(ids))
            self.model.embed_tokens.weight.copy_(materials.head.embedding)
            head.fc.weight.copy_(materials.head.head)
        self.model.freeze_embedding()
        head.freeze_weights()
        model = eagle3.OnlineEagle3Model(self.model, length=options.unroll, attention_backend=attention).to(self.device, self.dtype)
        self.strategy = Eagle3TrainStrategy(model, target_head=head.to(self.device, self.dtype), ploss_decay=options.step_weight)
        self.optimizer = BF16Optimizer(self.model, options.lr, max_grad_norm=DEFAULTS.max_grad_norm)
        self.lr = options.lr
        model.train()

    def order(self, epoch: int) -> list[list[int]]:
        steps = pack(epoch_order(self.materials.keys, self.seed, epoch), self.materials.reader.lengths, self.tokens_per_step)
        return [[self.index[key] for key in step] for step in steps]

    def item(self, index: int) -> Tensors:
        row = self.materials.row(index)
        aux, last = common.states(row, self.dtype)
        normed = self.materials.head.normed(last).to(self.dtype)
        raw = {"aux_hidden_state": aux[None], "hidden_state": normed[None], "input_ids": row.tokens.long(), "loss_mask": row.supervised.long()}
        return normalize_offline_sample(raw, max_len=len(row.tokens))

    def work(self, rows: list[int]) -> Work:
        count = -(-len(rows) // self.rows_per_batch)
        batches = [self.collate([self.item(index) for index in rows[number::count]]) for number in range(count)]
        return common.ready(batches, [self.materials.row(index) for index in rows], self.device)

    def rates(self, total: int) -> list[float]:
        return common.shares(lambda optimizer: CosineAnnealingWarmupLR(optimizer, total, int(DEFAULTS.warmup_ratio * total)), total)

    def forward(self, batch: Tensors) -> torch.Tensor:
        return self.strategy.forward_loss(TrainBatch([], "eagle3", common.on_device(batch, self.device), {"target_repr": "hidden_state"})).loss

    def backward(self, batches: list[Tensors]) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.forward(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    def forget_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        """Its optimiser clips, forgets the gradients and moves a schedule of its own on, which the rate given here goes before."""
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = rate * self.lr
        self.optimizer.step()

    def draft(self) -> tuple[DraftShape, Tensors]:
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith(("embed_tokens.", "d2t", "t2d"))}
        # Its own `norm_output` is something else: whether the head reads normed states. The next step never does.
        switches = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": self.model.fc_norm is not None, "norm_output": False}
        return replace(self.materials.shape, **switches), tensors


@torch.no_grad()
def check(materials: Materials, options: argparse.Namespace) -> None:
    """Its own forward over a padded batch, seen from within its loss, against the written draft."""
    peer = SpecForge(materials, options)
    common.disturb(peer.model, peer.model.embed_tokens.weight, materials)
    rows = peer.order(0)[0][: common.CHECKED_ROWS]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(logits: torch.Tensor, probabilities: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append((logits.flatten(0, 1).clone(), probabilities.flatten(0, 1).clone()))
        return logits.new_zeros(())

    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=look)
    peer.rows_per_batch = len(rows)
    (batch,) = peer.work(rows).batches
    peer.forward(batch)
    common.write_draft(options.out_folder, *peer.draft(), materials, torch.float32)
    found = [materials.row(index) for index in rows]
    width = max(len(row.tokens) for row in found)
    common.compare(options.out_folder, materials, found, [number * width for number in range(len(rows))], seen)


if __name__ == "__main__":
    arguments = common.parser(__doc__ or "", DEFAULTS.learning_rate, STEP_WEIGHT)
    arguments.add_argument("--rows-per-batch", type=int, default=8)
    arguments.add_argument("--fc-norm", action="store_true", help="a norm for each aux layer before fc, as in its EAGLE 3.1")
    common.main(SpecForge, check, arguments.parse_args())

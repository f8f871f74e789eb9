"""Trains a draft with speculators 0.9.0's own model code, loss, packing and optimiser, on features that Eyas captured.

    python benchmarks/acceptance/speculators_train.py RUN_FOLDER OUT_FOLDER --target TARGET_FOLDER [--epochs 1 | --seconds 60] [--lr 1e-3] ... [--check]

In: a run folder finished up to vocab/. Out: the draft in the plain form that engines load, progress on stderr, a line of JSON on stdout. speculators and
hs-connectors must be importable. What is not said here is its own default (speculators.train.config.schema), which for EAGLE-3 is:

    optimiser   Muon for matrices, AdamW for norms, the learning rate 1e-3 for both; weight decay 0.1 and 0.01; gradients clipped to a norm of 1
    schedule    linear to zero, after a warm-up of one in a hundred steps
    loss        KL divergence over the draft vocabulary, all steps weighing alike; it unrolls 3 steps
    model       norms before fc, before the residual and on what the next step reads; head, embedding and the target's final norm frozen, from the target

Its alignment (shift_batch): position i holds aux[i], x[i+1], last[i+1] and whether x[i+1] is supervised. Step k moves tokens, teachers and the mask on by k,
and positions count up from 1. So position i is Eyas's row i, and counts at step k iff x[i+1+k] is supervised.

Its layer slides over a window of 2,048 tokens by default; here it sees all of them, which it can be told to, and which is the same for rows no longer than
that. Its fused loss does not compile under torch 2.11; the eager one computes the same.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peer_common as common
import torch
from peer_common import Materials, Tensors, Work
from speculators.models.eagle3 import shift_batch
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.train.config.schema import TrainConfig
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.optimizers import build_optimizers
from transformers import get_linear_schedule_with_warmup

from eyas.draft.shape import DraftShape
from eyas.vocab.mapping import to_d2t, to_t2d

DEFAULTS = TrainConfig().flatten()
MAX_NORM = 1.0  # its trainer's, which has no setting for it


class CapturedRows(BaseDataset):
    """Its data set, over the rows that Eyas captured."""

    def __init__(self, materials: Materials, max_len: int, dtype: torch.dtype) -> None:
        self.materials = materials
        super().__init__(max_len, dtype)

    def __len__(self) -> int:
        return len(self.materials.keys)

    def _compute_approx_lengths(self) -> list[int]:
        return [self.materials.reader.lengths[key] for key in self.materials.keys]

    def _get_raw_data(self, index: int) -> Tensors:
        row = self.materials.row(index)
        aux, last = common.states(row, self.hidden_states_dtype)
        return {"hidden_states": aux, "input_ids": row.tokens.long(), "verifier_last_hidden_states": last, "loss_mask": row.supervised}


class Speculators:
    name = "speculators 0.9.0"

    def __init__(self, materials: Materials, options: argparse.Namespace) -> None:
        self.materials, self.device = materials, options.device
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        shape, ids = materials.shape, materials.ids
        torch.manual_seed(options.seed)
        settings = DEFAULTS | {
            "verifier_name_or_path": str(materials.spec.path), "draft_vocab_size": len(ids), "target_layer_ids": shape.aux_layers, "ttt_steps": options.unroll,
            "ttt_step_loss_decay": options.step_weight, "draft_attn_impl": "simple_flex_attention" if self.device == "cuda" else "eager",
            "loss_implementation": "eager", "optimizer": options.optimizer, "lr": options.lr, "muon_lr": options.lr,
        }  # fmt: skip
        self.model = Eagle3DraftModel.from_training_args(common.llama_config(materials), to_t2d(ids, shape.vocab_size), to_d2t(ids), **settings).to(self.device)
        self.arguments: dict[str, Any] = self.model.get_trainer_kwargs(**settings)[0]
        self.optimizers = build_optimizers(self.model, SimpleNamespace(**settings))
        self.rows = CapturedRows(materials, options.tokens_per_step, self.dtype)
        self.sampler = MultipackDistributedBatchSamplerV2(options.tokens_per_step, self.rows.approx_lengths, num_replicas=1, rank=0, seed=options.seed)
        self.collate = CollateFn(options.tokens_per_step, shape.hidden_size, dtype=self.dtype, preprocess=shift_batch)
        self.model.train()

    def order(self, epoch: int) -> list[list[int]]:
        self.sampler.set_epoch(epoch)
        return [rows.tolist() for rows in self.sampler]

    def work(self, rows: list[int]) -> Work:
        batch = self.collate([self.rows[index] for index in rows])
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        return common.ready([tensors], [self.materials.row(index) for index in rows], self.device)

    def rates(self, total: int) -> list[float]:
        return common.shares(lambda optimizer: get_linear_schedule_with_warmup(optimizer, total // 100, total), total)

    def forward(self, batch: Tensors) -> torch.Tensor:
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(**common.on_device(batch, self.device), **self.arguments)[1]

    def backward(self, batches: list[Tensors]) -> torch.Tensor:
        (batch,) = batches
        loss = self.forward(batch)
        loss.backward()
        return loss.detach()

    def forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * optimizer.defaults["lr"]
            optimizer.step()
        self.forget_gradients()

    def draft(self) -> tuple[DraftShape, Tensors]:
        config, given = self.model.config, ("embed_tokens.", "verifier_", "d2t", "t2d")
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in self.model.state_dict().items() if not name.startswith(given)}
        switches = {name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
        return replace(self.materials.shape, **switches), tensors


@torch.no_grad()
def check(materials: Materials, options: argparse.Namespace) -> None:
    """Its own forward over a packed batch, seen from within its loss, against the written draft."""
    peer = Speculators(materials, options)
    common.disturb(peer.model, peer.model.embed_tokens.weight, materials)
    rows = peer.order(0)[0][: common.CHECKED_ROWS]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append((logits[0].clone(), targets[0].softmax(-1)))
        return logits.new_zeros(logits.shape[:2])

    peer.arguments["loss_config"] = {"look": (look, 1.0)}
    peer.forward(peer.work(rows).batches[0])
    common.write_draft(options.out_folder, *peer.draft(), materials, torch.float32)
    found = [materials.row(index) for index in rows]
    lengths = torch.tensor([0, *(len(row.tokens) - 1 for row in found)])  # a token fewer than the row
    common.compare(options.out_folder, materials, found, lengths.cumsum(0)[:-1].tolist(), seen)


if __name__ == "__main__":
    arguments = common.parser(__doc__ or "", DEFAULTS["lr"], DEFAULTS["ttt_step_loss_decay"])
    arguments.add_argument("--optimizer", choices=("muon", "adamw"), default=DEFAULTS["optimizer"])
    common.main(Speculators, check, arguments.parse_args())

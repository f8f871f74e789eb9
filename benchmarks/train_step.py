"""One optimiser step of draft training at the shapes of real targets: speed, share of the chip, memory.

    python benchmarks/train_step.py --shape llama-8b [--tokens 8192] [--rows 2048x4 | FILE] [--supervised 1.0] [--steps 7] [--freeze-head] [--profile FILE]

Features are random. --rows: so many documents of so many tokens, or a JSON file with a list of [length, [[start, end] of each supervised span]], of which as
many are packed as fit. Counted: forward, backward, clipping and AdamW; not reading features. Prints tokens/s, supervised tokens/s, arithmetic done in TFLOP/s
and its share of the measured peak of bfloat16 products, and the most memory held.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from eyas.config import TrainSection
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch, make_batch
from eyas.train.loop import SHAPE_MULTIPLE, loss_chunk
from eyas.train.loss import Objective, Teacher, draft_loss
from eyas.train.optim import make_optimizer
from eyas.train.unroll import unroll

# hidden, intermediate, query heads, key-value heads, head width, target's vocabulary, draft's vocabulary
SHAPES = {
    "tiny": (64, 128, 4, 2, 16, 1000, 400),
    "llama-8b": (4096, 14336, 32, 8, 128, 128256, 32000),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936, 32000),
    "llama-70b": (8192, 28672, 64, 8, 128, 128256, 32000),
    "kimi-k2.5": (7168, 18432, 64, 64, 128, 163840, 32000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", default="2048x4")
    parser.add_argument("--supervised", type=float, default=1.0, help="share of each document, at its end")
    parser.add_argument("--steps", type=int, default=7, help="K")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--freeze-head", action="store_true")
    parser.add_argument("--profile", type=Path, help="where to write a table of kernels")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = draft_shape_of(options.shape)
    torch.manual_seed(0)
    batch = make_batch(random_rows(options, shape.hidden_size), options.steps, torch.bfloat16, SHAPE_MULTIPLE, loss_chunk(device)).to(device)
    draft = Draft(shape).to(device)
    draft.lm_head.weight.requires_grad_(not options.freeze_head)
    _, _, _, _, _, vocab, _ = SHAPES[options.shape]
    table = torch.randn(vocab, shape.hidden_size, device=device, dtype=torch.bfloat16)
    head = TargetHead(table, torch.ones(shape.hidden_size), 1e-5, table, None)
    teacher = Teacher(head, torch.arange(shape.draft_vocab_size, device=device), torch.bfloat16, device)
    section = TrainSection(optimizer="adamw", unroll_steps=options.steps)
    optimizer = make_optimizer(draft, section, torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = draft_loss(
            unroll(draft, table, batch, options.steps), draft.lm_head.weight, teacher, batch, Objective(section.step_weight, float(len(batch.rows_R)))
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), section.grad_clip)
        optimizer.step(1.0)

    seconds = timed(step, options.repeat, device)
    num_rows = int((batch.num_steps_R > 0).sum())
    work = flops(shape, batch, options.steps, options.freeze_head)
    print(f"{options.shape}: {batch.num_tokens:,} tokens in {len(batch.documents)} documents, {num_rows:,} supervised rows, K = {options.steps}, on {device}")
    print(f"  {seconds * 1e3:.1f} ms a step, {batch.num_tokens / seconds:,.0f} tokens/s, {num_rows / seconds:,.0f} supervised rows/s")
    if device.type == "cuda":
        peak = gemm_peak(device)
        print(f"  {work / seconds / 1e12:.0f} TFLOP/s, {work / seconds / peak:.0%} of the {peak / 1e12:.0f} of a large product; "
              f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")  # fmt: skip
    if options.profile:
        with torch.profiler.profile() as profile:
            step()
        options.profile.write_text(profile.key_averages().table(sort_by="cuda_time_total" if device.type == "cuda" else "cpu_time_total", row_limit=60))


def draft_shape_of(name: str) -> DraftShape:
    hidden, inner, heads, groups, width, vocab, draft_vocab = SHAPES[name]
    return DraftShape(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=groups, head_dim=width, rms_norm_eps=1e-5,
        vocab_size=vocab, draft_vocab_size=draft_vocab, max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        aux_layers=[2, 16, 29], target_layers=32, norm_before_residual=True, norm_before_fc=False, fc_norm=True, norm_output=True,
    )  # fmt: skip


def random_rows(options: argparse.Namespace, width: int) -> list[FeatureRow]:
    if Path(options.rows).exists():
        wanted: list[tuple[int, list[list[int]]]] = json.loads(Path(options.rows).read_text())
    else:
        length, count = (int(part) for part in options.rows.split("x"))
        wanted = [(length, [[round(length * (1 - options.supervised)), length]])] * count
    rows, total = [], 0
    for length, spans in wanted:
        if total + length > options.tokens:
            continue
        supervised = torch.zeros(length, dtype=torch.bool)
        for start, end in spans:
            supervised[start:end] = True
        tokens = torch.randint(0, 400, (length,), dtype=torch.int32)
        aux, last = torch.randn(length, 3, width, dtype=torch.bfloat16), torch.randn(length, width, dtype=torch.bfloat16)
        rows.append(FeatureRow(str(len(rows)), tokens, supervised, aux, last))
        total += length
    return rows


def timed(step: Any, repeat: int, device: torch.device) -> float:
    """The median of `repeat` steps, in seconds, after three that are not counted."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def flops(shape: DraftShape, batch: Batch, num_steps: int, frozen_head: bool) -> float:
    """Floating-point operations of the products of one step, two for a multiplication with its addition; backward costs twice the forward, less where no
    gradient is wanted. Attention counts causal pairs of supervised rows alone, backward 2.5 times."""
    tokens, rows = batch.num_tokens, len(batch.rows_R)
    width, inner, query, key = (
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads * shape.head_dim,
        shape.num_key_value_heads * shape.head_dim,
    )
    fuse = 2 * 2 * tokens * 3 * width * width
    keys_values = 3 * 2 * (tokens + (num_steps - 1) * rows) * 2 * width * 2 * key
    layer = 3 * 2 * num_steps * rows * (2 * width * query + query * width + 3 * width * inner)
    head = (2 if frozen_head else 3) * 2 * num_steps * rows * width * shape.draft_vocab_size
    teacher = 2 * sum(len(chunk.needed_N) for chunk in batch.chunks) * width * shape.draft_vocab_size
    pairs = float((batch.positions_T[batch.rows_R] + 1).sum())
    attention = 3.5 * 4 * num_steps * pairs * query
    return fuse + keys_values + layer + head + teacher + attention


def gemm_peak(device: torch.device) -> float:
    """FLOP/s of a bfloat16 product of 8,192 x 8,192 matrices, the best of five batches of ten."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        best = max(best, 10 * 2 * 8192**3 / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    main()

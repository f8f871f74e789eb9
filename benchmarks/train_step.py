"""One optimiser step of draft training at the shapes of real targets: speed, share of the chip, memory; and beside it the peers', on the same work.

    python benchmarks/train_step.py --shape llama-8b [--rows ROWS ...] [--tokens 8192] [--steps 7] [--freeze-head] [--graph] [--peers FOLDER]

Features are random. ROWS: so many documents of so many tokens, all supervised, as 2048x4; or a JSON file of row shapes (benchmarks/row_shapes.json), packed in
turn into as many steps as --packs says; with @0.3 behind either, each supervised span is shortened from its beginning until about that share of all tokens
is left. Counted: forward, backward, clipping and AdamW; not reading features. Prints tokens/s, supervised rows/s, arithmetic done in TFLOP/s and its share
of the measured peak of bfloat16 products, and the most memory held.

--peers: FOLDER holds speculators 0.9.0, hs-connectors 0.9.0 and specforge 0.2.0, each wheel unpacked into it (`pip download --no-deps`, `unzip`), with the
packages that they import installed. Each runs in a process of its own after ours, the same rows, the same K, AdamW included; then come the ratios. Speculators
freezes the head, and so do we beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import timed

from eyas.config import TrainSection
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead
from eyas.train.batch import Batch, make_batch
from eyas.train.graph import Graphs, UpdateGraph
from eyas.train.loop import SHAPE_MULTIPLE, loss_chunk
from eyas.train.loss import LossSums, Objective, Teacher, loss_backward
from eyas.train.optim import make_optimizer
from eyas.train.unroll import unroll

# hidden, intermediate, query heads, key-value heads, head width, target's vocabulary, draft's vocabulary
SHAPES = {
    "tiny": (64, 128, 4, 2, 16, 1000, 400),
    "smollm2-135m": (576, 1536, 9, 3, 64, 49152, 16384),
    "llama-8b": (4096, 14336, 32, 8, 128, 128256, 32000),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936, 32000),
    "llama-70b": (8192, 28672, 64, 8, 128, 128256, 32000),
    "kimi-k2.5": (7168, 18432, 64, 64, 128, 163840, 32000),
}
RowShape = tuple[int, list[tuple[int, int]]]  # tokens of a document, [start, end) of each supervised span


@dataclass(frozen=True)
class Case:
    """packs: the rows of each step."""

    name: str
    packs: list[list[RowShape]]

    @property
    def num_tokens(self) -> int:
        return sum(length for pack in self.packs for length, _ in pack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", nargs="+", default=["2048x4"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=1, help="steps of different rows, timed in turn")
    parser.add_argument("--steps", type=int, default=7, help="K")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--freeze-head", action="store_true")
    parser.add_argument("--loss", choices=("soft", "lk"), default="soft")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--float8", action="store_true", help="products in float8")
    parser.add_argument("--graph", action="store_true", help="each step as two CUDA graphs (eyas.train.graph)")
    parser.add_argument("--profile", type=Path, help="where to write a table of kernels")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--peer-batch", type=int, default=8, help="rows of a padded batch of SpecForge")
    options = parser.parse_args()
    cases = [Case(name, row_packs(name, options)) for name in options.rows]
    print(f"{options.shape}, K = {options.steps}", flush=True)
    ours = {}
    for frozen in [False, True] if options.peers else [options.freeze_head]:
        ours[frozen] = time_ours(options, cases, frozen)
    if options.peers:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        time_peer("speculators_step.py", options, cases, ours[True])
        time_peer("specforge_step.py", options, cases, ours[False])


def time_ours(options: argparse.Namespace, cases: list[Case], frozen: bool) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = draft_shape_of(options.shape)
    torch.manual_seed(0)
    draft = Draft(shape).to(device)
    if options.float8:
        draft.multiply_in_float8()
    _, _, _, _, _, vocab, _ = SHAPES[options.shape]
    table = torch.randn(vocab, shape.hidden_size, dtype=torch.bfloat16)
    head = TargetHead(table, torch.ones(shape.hidden_size), 1e-5, table, None)
    teacher = Teacher(head, torch.arange(shape.draft_vocab_size, device=device), torch.bfloat16, device)
    section = TrainSection(optimizer="adamw", unroll_steps=options.steps, freeze_head=frozen)
    optimizer = make_optimizer(draft, section, torch.bfloat16)

    def add_gradients(batch: Batch, denominator: float | torch.Tensor) -> LossSums:
        steps = unroll(draft, batch, options.steps, options.recompute)
        return loss_backward(steps, draft.lm_head, teacher, batch, Objective(section.step_weight, denominator, options.loss))[1]

    def update() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), section.grad_clip)
        optimizer.step()
        return norm

    launched = Graphs(draft, add_gradients, print) if options.graph else add_gradients
    updated = UpdateGraph(draft, optimizer, update, print) if options.graph else update

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        optimizer.set_rates(1.0)
        launched(batch, float(len(batch.rows_R)))
        updated()

    results = []
    for case in cases:
        rows = [random_rows(pack, shape.hidden_size) for pack in case.packs]
        fixed = options.tokens if options.graph else 0
        batches = [make_batch(pack, table, options.steps, torch.bfloat16, SHAPE_MULTIPLE, loss_chunk(device), fixed=fixed).to(device) for pack in rows]
        found = timed(lambda index, batches=batches: step(batches[index]), len(batches), options.repeat)
        found["rows"] = sum(int((batch.num_steps_R > 0).sum()) for batch in batches)
        found["flops"] = sum(flops(shape, batch, options.steps, frozen) for batch in batches)
        found["peak_flops"] = gemm_peak(device) if device.type == "cuda" else None
        report(f"Eyas{', head frozen' if frozen else ''}", case, found)
        results.append(found)
        if options.profile:
            with torch.profiler.profile() as profile:
                step(batches[0])
            options.profile.write_text(profile.key_averages().table(sort_by="cuda_time_total" if device.type == "cuda" else "cpu_time_total", row_limit=60))
        del batches
    return results


def report(name: str, case: Case, found: dict[str, Any]) -> None:
    share = sum(end - start for pack in case.packs for _, spans in pack for start, end in spans) / case.num_tokens
    print(f"  {case.name}: {case.num_tokens:,} tokens in {sum(map(len, case.packs))} documents and {len(case.packs)} steps, {share:.0%} supervised")
    line = f"    {name}: {found['seconds'] * 1e3:,.1f} ms, {case.num_tokens / found['seconds']:,.0f} tokens/s"
    if "rows" in found:
        line += f", {found['rows'] / found['seconds']:,.0f} supervised rows/s, {found['flops'] / found['seconds'] / 1e12:.2f} TFLOP/s"
    if found.get("peak_flops"):
        line += f", {found['flops'] / found['seconds'] / found['peak_flops']:.1%} of the {found['peak_flops'] / 1e12:.0f} of a large product"
    if found["peak_gb"] is not None:
        line += f", {found['peak_gb']:.1f} GB at most"
    print(f"{line} (first round {found['first_round']:.0f} s)", flush=True)


def time_peer(script: str, options: argparse.Namespace, cases: list[Case], ours: list[dict[str, Any]]) -> None:
    hidden, inner, heads, groups, width, vocab, draft_vocab = SHAPES[options.shape]
    job = {
        "hidden": hidden, "inner": inner, "heads": heads, "groups": groups, "width": width, "vocab": vocab, "draft_vocab": draft_vocab,
        "steps": options.steps, "repeat": options.repeat, "tokens": options.tokens, "cases": [case.packs for case in cases], "peer_batch": options.peer_batch,
        "fused_loss": torch.cuda.is_available() and not torch.__version__.startswith("2.11"),
    }  # fmt: skip
    here = Path(__file__).parent
    path = os.pathsep.join([str(options.peers), str(here), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, here / "peers" / script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    ) as peer:  # fmt: skip
        assert peer.stdin and peer.stdout
        peer.stdin.write(json.dumps(job))
        peer.stdin.close()
        results = (json.loads(line) for line in peer.stdout if line.startswith('{"peer"'))
        for found, case, mine in zip(results, cases, ours, strict=False):
            report(found["peer"], case, found)
            memory = f", {mine['peak_gb'] / found['peak_gb']:.2f} of its memory" if found["peak_gb"] else ""
            print(f"    Eyas: {found['seconds'] / mine['seconds']:.2f} times its speed{memory}", flush=True)
    if peer.returncode:
        print(f"  {script} failed with code {peer.returncode}")


def draft_shape_of(name: str) -> DraftShape:
    hidden, inner, heads, groups, width, vocab, draft_vocab = SHAPES[name]
    return DraftShape(
        num_hidden_layers=1, qk_norm=False,
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=groups, head_dim=width, rms_norm_eps=1e-5,
        vocab_size=vocab, draft_vocab_size=draft_vocab, max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        aux_layers=[2, 16, 29], target_layers=32, norm_before_residual=True, norm_before_fc=False, fc_norm=True, norm_output=True,
    )  # fmt: skip


def row_packs(name: str, options: argparse.Namespace) -> list[list[RowShape]]:
    """The rows of each step: whole ones, in order, as many as fit."""
    source, _, share = name.partition("@")
    if Path(source).exists():
        wanted, count = json.loads(Path(source).read_text()), options.packs
    else:
        length, documents = (int(part) for part in source.split("x"))
        count = -(-length * documents // options.tokens) * options.packs
        wanted = [(length, [(0, length)])] * documents * options.packs
    packs: list[list[RowShape]] = [[]]
    for length, spans in wanted:
        if packs[-1] and sum(other for other, _ in packs[-1]) + length > options.tokens:
            if len(packs) == count:
                break
            packs.append([])
        packs[-1].append((length, spans))
    if share:
        total = sum(length for pack in packs for length, _ in pack)
        scale = float(share) * total / sum(end - start for pack in packs for _, spans in pack for start, end in spans)
        packs = [[(length, [(round(end - (end - start) * scale), end) for start, end in spans]) for length, spans in pack] for pack in packs]
    return packs


def random_rows(pack: list[RowShape], width: int) -> list[FeatureRow]:
    rows = []
    for number, (length, spans) in enumerate(pack):
        supervised = torch.zeros(length, dtype=torch.bool)
        for start, end in spans:
            supervised[start:end] = True
        tokens = torch.randint(0, 400, (length,), dtype=torch.int32)
        aux, last = torch.randn(length, 3, width, dtype=torch.bfloat16), torch.randn(length, width, dtype=torch.bfloat16)
        rows.append(FeatureRow(str(number), tokens, supervised, aux, last))
    return rows


def flops(shape: DraftShape, batch: Batch, num_steps: int, frozen_head: bool) -> float:
    """Floating-point operations of the products of one step, two for a multiplication with its addition; backward costs twice the forward, less where no
    gradient is wanted. The embedding's half of q, k and v is made once, not at each step. Attention counts causal pairs of supervised rows alone, backward
    2.5 times."""
    tokens, rows, asking = batch.num_tokens, len(batch.rows_R), len(batch.asking_N)
    width, inner, query, key = (
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads * shape.head_dim,
        shape.num_key_value_heads * shape.head_dim,
    )
    fuse = 3 * 2 * tokens * 3 * width * width
    keys_values = 3 * 2 * (2 * tokens + (num_steps - 1) * rows) * width * 2 * key
    queries = 3 * 2 * (asking + num_steps * rows) * width * query
    layer = 3 * 2 * num_steps * rows * (query * width + 3 * width * inner)
    head = (2 if frozen_head else 3) * 2 * num_steps * rows * width * shape.draft_vocab_size
    teacher = 2 * sum(len(chunk.needed_N) for chunk in batch.chunks) * width * shape.draft_vocab_size
    pairs = float((batch.positions_T[batch.rows_R] + 1).sum())
    attention = 3.5 * 4 * num_steps * pairs * query
    return fuse + keys_values + queries + layer + head + teacher + attention


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

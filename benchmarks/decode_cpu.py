"""What a forward of 1 to 8 new tokens costs in decoding, by precision: why drafting pays, or does not, on a CPU.

    python benchmarks/decode_cpu.py .models/smollm2-135m-instruct

Prints the median of 25 forwards behind 250 tokens of context, float32 and bfloat16, with sdpa attention and with Eyas' row-wise attention, and
whether the linear layers of the model give a row the same bits alone and in a batch (then row-wise attention makes drafting exact).
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from eyas.target.engine import keep_freed_memory
from eyas.target.spec import read_spec
from eyas.target.transformers_engine import TransformersEngine

CONTEXT, REPEATS, COUNTS = 250, 25, (1, 2, 3, 4, 6, 8)


@torch.inference_mode()
def main() -> None:
    keep_freed_memory()
    spec = read_spec(Path(sys.argv[1]))
    ids = torch.randint(3, spec.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        engine = TransformersEngine(spec, torch.device("cpu"), dtype, False)
        same = True
        for module in engine.model.modules():
            if isinstance(module, torch.nn.Linear):
                x = torch.randn(8, module.in_features).to(dtype)
                together = F.linear(x, module.weight)
                same &= all(torch.equal(F.linear(x[:count], module.weight), together[:count]) for count in COUNTS)
        for attention in ("sdpa", "row by row"):
            if attention != "sdpa":
                engine.attend_row_by_row()
            cache = engine.new_cache()
            engine.step(ids, cache)
            medians = []
            for count in COUNTS:
                seconds = []
                for _ in range(REPEATS):
                    began = time.perf_counter()
                    engine.step(ids[:count], cache)
                    seconds.append(time.perf_counter() - began)
                    cache.crop(-count)
                medians.append(f"{count}: {statistics.median(seconds) * 1e3:.1f} ms")
            print(f"{str(dtype).removeprefix('torch.')}, {attention}: {', '.join(medians)}")
        print(f"{str(dtype).removeprefix('torch.')}: linear layers give a row the same bits in every batch size: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()

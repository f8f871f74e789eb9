"""The lengths of a run's rows and their supervised spans, and nothing else of them: what benchmarks/train_step.py needs to time real rows.

    python benchmarks/row_shapes.py RUN_FOLDER >FILE

benchmarks/row_shapes.json was made so from 600 conversations of one or two turns whose answers SmolLM2-135M-Instruct wrote (temperature 0.7, top-p 0.95, at
most 640 tokens): 210,364 tokens, 77% supervised. A list of [length, [[start, end] of each supervised span]].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from eyas.prepare.rows import read_rows


def main() -> None:
    shapes = []
    for row in read_rows(Path(sys.argv[1]) / "prepare"):
        edges = torch.cat((torch.zeros(1), row.supervised.float(), torch.zeros(1))).diff().nonzero().flatten().tolist()
        shapes.append([len(row.tokens), [list(span) for span in zip(edges[::2], edges[1::2], strict=True)]])
    print("[" + ",\n".join(json.dumps(shape, separators=(",", ":")) for shape in shapes) + "]")


if __name__ == "__main__":
    main()

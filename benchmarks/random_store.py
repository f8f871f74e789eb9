"""A feature store of random states, written as extraction writes one; what benchmarks of reading and writing share."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.features.codec import encode
from eyas.features.index import enter, open_index
from eyas.features.shard import FeatureRow, finish, open_shard

SHARD_ROWS = 16


def random_rows(count: int, length: int, width: int, dtype: torch.dtype, vocab: int) -> list[FeatureRow]:
    """Rows of `length` tokens, all supervised, that share their states: what they hold does not matter, how much they are does."""
    stored, scale = encode(torch.randn(length, 4, width, dtype=torch.bfloat16), dtype)
    aux, last = stored[:, :-1].contiguous(), stored[:, -1].contiguous()
    tokens, supervised = torch.randint(0, vocab, (length,), dtype=torch.int32), torch.ones(length, dtype=torch.bool)
    return [FeatureRow(f"{number:032x}", tokens, supervised, aux, last, scale) for number in range(count)]


def write_store(folder: Path, rows: list[FeatureRow]) -> None:
    """Anew, whatever is there."""
    for file in folder.glob("*"):
        file.unlink()
    open_index(folder, {})
    parts = {"aux": rows[0].aux, "last": rows[0].last, **({} if rows[0].scale is None else {"scale": rows[0].scale})}
    for number, start in enumerate(range(0, len(rows), SHARD_ROWS)):
        some = rows[start : start + SHARD_ROWS]
        shard = open_shard(folder, number, some, 3, rows[0].last.shape[-1], rows[0].last.dtype)
        for row in range(len(some)):
            shard.put(row, parts)
        enter(folder, shard, finish(shard))

"""Rows of features -> one packed batch. The first of the two places that shift: here the inputs of step 0 move by one, its labels by two.

    position i      0    1    2    3    4        tokens x0..x4 of one document, x2 x3 x4 supervised
    aux             a0   a1   a2   a3   a4       read at step 0
    next_T          x1   x2   x3   x4   -        embedding read at step 0
    label_T         x2   x3   x4   -    -        what step 0 predicts; its teacher is `last` of position i + 1
    num_steps       0    2    1    0    0        how many steps count: step k iff x[i+1] .. x[i+2+k] are all supervised

Only positions with num_steps > 0 become rows; the others matter through their step-0 keys and values alone.

Legend: T positions of the pack, R rows, A aux layers, D hidden width, K steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.draft.attention import Document
from eyas.features.codec import decode
from eyas.features.shard import FeatureRow

ROW_SIZES = 16  # numbers of rows that batches of a fixed number of positions may have


@dataclass(frozen=True)
class Chunk:
    """Rows [start, end) whose logits exist at once. Their teachers at all steps stand at positions needed_N, step k's of row r at needed_N[where_CK[r, k]]:
    the steps share most of them, so each is computed once. int64; needed_N is as long as a multiple of 128 with copies of its last entry, because a
    matrix library prepares anew for every shape that it has not met."""

    start: int
    end: int
    needed_N: torch.Tensor
    where_CK: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """aux [T, A, D] and last [T, D] as stored, with the scales of float8 [T, A + 1], and once `to` a device in `dtype`, in which the draft computes; embedded
    [T, D] in `dtype`, the target's embedding of next_T; next_T, label_T, positions_T int64; rows_R int64 ascending; num_steps_R int64 in 1..K, 0 for rows
    of padding; starts int32 [N + 1] where documents begin, and the end, which may stand there several times; longest: tokens of the longest document, or more.

    next_T and label_T hold 0 where their document has no such token; no row that counts reads them there.

    row_of_T int64: the row that stands at each position, the number of rows where none does. asking_N int64 ascending: positions that some step's query stands
    at; its end is filled up like that of Chunk.needed_N. rank_T int64: where each of them lies in asking_N, len(asking_N) for other positions.
    """

    aux: torch.Tensor
    last: torch.Tensor
    embedded: torch.Tensor
    next_T: torch.Tensor
    label_T: torch.Tensor
    positions_T: torch.Tensor
    rows_R: torch.Tensor
    num_steps_R: torch.Tensor
    row_of_T: torch.Tensor
    asking_N: torch.Tensor
    rank_T: torch.Tensor
    starts: torch.Tensor
    longest: int
    documents: list[Document]
    chunks: list[Chunk]
    dtype: torch.dtype
    scale: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        own = [value for value in self.__dict__.values() if isinstance(value, torch.Tensor)]
        return [*own, *(tensor for chunk in self.chunks for tensor in (chunk.needed_N, chunk.where_CK))]

    @property
    def num_tokens(self) -> int:
        return len(self.next_T)

    def at(self, k: int) -> torch.Tensor:
        """Positions int64 [R] whose next token rows read at step k. Near its document's end a row may point behind it; it does not count there, and the clamp
        only keeps the index legal."""
        return (self.rows_R + k).clamp(max=self.num_tokens - 1)

    def to(self, device: torch.device) -> Batch:
        """On the device, and decoded there."""
        moved = self._with(lambda tensor: tensor.to(device, non_blocking=True))
        if moved.scale is None:
            return moved
        scale_TL = moved.scale
        aux, last = decode(moved.aux, scale_TL[:, :-1], self.dtype), decode(moved.last, scale_TL[:, -1], self.dtype)
        return replace(moved, aux=aux, last=last, scale=None)

    def pinned(self) -> Batch:
        """In memory that a GPU can copy from while others go on."""
        return self._with(torch.Tensor.pin_memory)

    def copied(self) -> Batch:
        return self._with(torch.Tensor.clone)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Tells the allocator, should this have been made on another stream, to keep it until `stream` has passed its last use."""

        def told(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        self._with(told)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(value) for name, value in self.__dict__.items() if isinstance(value, torch.Tensor)}
        chunks = [Chunk(chunk.start, chunk.end, change(chunk.needed_N), change(chunk.where_CK)) for chunk in self.chunks]
        return replace(self, **changed, chunks=chunks)


def countable_steps(supervised_T: torch.Tensor, num_steps: int, ends_T: torch.Tensor | None = None) -> torch.Tensor:
    """How many steps count at each position, int64 [T] in 0..num_steps. ends_T: where the document of each position ends; None: all are one document."""
    position_T = torch.arange(len(supervised_T))
    ends_T = torch.full_like(position_T, len(supervised_T)) if ends_T is None else ends_T
    # Supervised tokens in a row from each position on: the distance to the next that is not supervised, or to the document's end.
    end_T = torch.where(supervised_T, ends_T, position_T).flip(0).cummin(0).values.flip(0)
    run_T = end_T - position_T
    ahead_T = torch.cat((run_T[1:], run_T.new_zeros(1))).where(position_T + 1 < ends_T, 0)
    return (ahead_T - 1).clamp(0, num_steps)


def make_batch(
    rows: Sequence[FeatureRow], embedding: torch.Tensor, num_steps: int, dtype: torch.dtype, multiple: int = 1, chunk: int = 1024, pin: bool = False,
    fixed: int = 0,
) -> Batch:  # fmt: skip
    """Packs whole rows, each a document of its own.

    embedding: [V, D], the target's. It is looked up here, wherever it is, so that a GPU need not hold it: a gigabyte at 128,256 x 4,096.
    multiple: positions and rows are filled up to a multiple of it by one more document, of zeros, whose rows have num_steps 0 and so never count.
    Matrix libraries prepare anew for every shape they have not met; with few shapes a training step on the CPU is
    1.2 times as fast (benchmarks/train_step_cpu.py).
    chunk: rows whose logits exist at once. pin: whether a GPU will copy the batch. fixed: tokens for which all batches are to be large enough, and their other
    sizes among a few, so that one CUDA graph does for many (graph.py); rows of more tokens are packed as if it were 0.
    """
    fixed = fixed if sum(len(row.tokens) for row in rows) <= fixed else 0
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens_T, supervised_T = torch.cat([row.tokens for row in rows]).long(), torch.cat([row.supervised for row in rows])
    ends = lengths.cumsum(0)
    ends_T, place_T = ends.repeat_interleave(lengths), torch.arange(len(tokens_T))
    next_T, label_T = (tokens_T.roll(-ahead).where(place_T + ahead < ends_T, 0) for ahead in (1, 2))
    positions_T = place_T - (ends - lengths).repeat_interleave(lengths)
    counts_T = countable_steps(supervised_T, num_steps, ends_T)
    (rows_R,) = counts_T.nonzero(as_tuple=True)
    num_steps_R = counts_T[rows_R]
    bounds = list(zip([0, *ends.tolist()], [0, *torch.searchsorted(rows_R, ends).tolist()], strict=True))
    documents = [Document(*parts) for parts in ((a[0], b[0], a[1], b[1]) for a, b in itertools.pairwise(bounds))]
    start, row_start = bounds[-1]
    more_rows = -row_start % (max(1, fixed // ROW_SIZES) if fixed else multiple)
    more = fixed + multiple - start if fixed else -start % multiple or (multiple if more_rows else 0)  # rows need a position of their own to stand at
    if more:
        next_T, label_T, positions_T = (torch.nn.functional.pad(column_T, (0, more)) for column_T in (next_T, label_T, positions_T))
        rows_R = torch.nn.functional.pad(rows_R, (0, more_rows), value=start + more - 1)
        num_steps_R = torch.nn.functional.pad(num_steps_R, (0, more_rows))
        documents.append(Document(start, start + more, row_start, row_start + more_rows))
    aux, last, scale = (_packed([getattr(row, name) for row in rows], more, pin) for name in ("aux", "last", "scale"))
    assert aux is not None and last is not None
    num_tokens = documents[-1].end
    embedded = torch.empty(num_tokens, embedding.shape[1], dtype=embedding.dtype, device=embedding.device, pin_memory=pin)
    torch.index_select(embedding, 0, next_T.to(embedding.device), out=embedded)
    row_of_T = torch.full((num_tokens,), len(rows_R))
    row_of_T[rows_R] = torch.arange(len(rows_R))
    asked_T = torch.zeros(num_tokens, dtype=torch.bool)
    for k in range(num_steps):
        asked_T[(rows_R + k).clamp(max=num_tokens - 1)] = True
    asking_N = _filled(asked_T.nonzero(as_tuple=True)[0], num_tokens if fixed else 128)
    starts, longest = torch.tensor([0, *(doc.end for doc in documents)], dtype=torch.int32), max(doc.end - doc.start for doc in documents)
    return Batch(
        aux=aux if scale is not None else aux.to(dtype),
        last=last if scale is not None else last.to(dtype),
        scale=scale,
        dtype=dtype,
        embedded=embedded.to(dtype),
        next_T=next_T,
        label_T=label_T,
        positions_T=positions_T,
        rows_R=rows_R,
        num_steps_R=num_steps_R,
        row_of_T=row_of_T,
        asking_N=asking_N,
        rank_T=torch.where(asked_T, asked_T.cumsum(0) - 1, len(asking_N)),
        starts=_filled(starts, 64) if fixed else starts,
        longest=1 << (longest - 1).bit_length() if fixed else longest,
        documents=documents,
        chunks=_chunks(rows_R, num_tokens, num_steps, chunk, fixed > 0),
    )


def _packed(parts: list[torch.Tensor | None], more: int, pin: bool) -> torch.Tensor | None:
    """One after another and `more` zeros behind; None if they are. Straight into pinned memory, if wanted: each copy of these takes as long as to read them."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    dtype = tensors[0].dtype
    joined = torch.uint8 if dtype.itemsize == 1 else dtype  # torch does not join float8, but any bytes
    zeros = torch.zeros(more, *tensors[0].shape[1:], dtype=joined)
    out = torch.empty(sum(map(len, tensors)) + more, *zeros.shape[1:], dtype=joined, pin_memory=pin)
    return torch.cat([*(tensor.view(joined) for tensor in tensors), zeros], out=out).view(dtype)


def _chunks(rows_R: torch.Tensor, num_tokens: int, num_steps: int, size: int, fixed: bool) -> list[Chunk]:
    chunks = []
    for start in range(0, len(rows_R), size):
        part_C = rows_R[start : start + size]
        # Step k of row i is taught by `last` of position i + k + 1. Behind the end no row counts, and the clamp only keeps the index legal.
        taught_CK = (part_C[:, None] + 1 + torch.arange(num_steps)).clamp(max=num_tokens - 1)
        needed_N, where_CK = torch.unique(taught_CK, return_inverse=True)
        chunks.append(Chunk(start, start + len(part_C), _filled(needed_N, size // 4, 5 * size // 4) if fixed else _filled(needed_N), where_CK))
    return chunks


def _filled(index_N: torch.Tensor, multiple: int = 128, least: int = 0) -> torch.Tensor:
    """Up to a multiple and to `least`, with copies of the last entry."""
    wanted = max(least, len(index_N) + -len(index_N) % multiple)
    return torch.cat((index_N, index_N[-1:].expand(wanted - len(index_N))))

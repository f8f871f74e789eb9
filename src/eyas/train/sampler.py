"""The order of training rows: a pure function of the rows' keys and lengths, the seed, the epoch, and which of how many processes takes them.

Out: a list of optimiser steps, each a list of batches, each a list of row keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash


def epoch_order(keys: Sequence[str], seed: int, epoch: int) -> list[str]:
    """Shuffled by a hash of (seed, epoch, key), so that adding a row moves no other."""
    return sorted(keys, key=lambda key: (xxhash.xxh3_64_intdigest(f"{seed} {epoch} {key}".encode()), key))


def pack(keys: Sequence[str], lengths: Mapping[str, int], capacity: int) -> list[list[str]]:
    """Whole rows in order, as many a pack as fit into `capacity` tokens; a longer row is a pack alone."""
    packs: list[list[str]] = []
    room = 0
    for key in keys:
        if lengths[key] > room or not packs:
            packs.append([])
            room = capacity
        packs[-1].append(key)
        room -= lengths[key]
    return packs


def epoch_steps(
    keys: Sequence[str], lengths: Mapping[str, int], tokens_per_step: int, tokens_per_batch: int, seed: int, epoch: int, rank: int = 0, size: int = 1
) -> list[list[list[str]]]:
    """The batches of process `rank` of `size`."""
    steps = epoch_rows(keys, lengths, tokens_per_step, seed, epoch)
    return [own_batches(step, lengths, min(tokens_per_step, tokens_per_batch), rank, size) for step in steps]


def epoch_rows(keys: Sequence[str], lengths: Mapping[str, int], tokens_per_step: int, seed: int, epoch: int) -> list[list[str]]:
    """All rows of each step. They do not hang on the number of processes, so training goes on with another."""
    return pack(epoch_order(keys, seed, epoch), lengths, tokens_per_step)


def own_batches(step: Sequence[str], lengths: Mapping[str, int], capacity: int, rank: int, size: int) -> list[list[str]]:
    """The share of process `rank` of `size` of a step's rows, maybe none, in batches of up to `capacity` tokens."""
    return pack(shares(step, lengths, size)[rank], lengths, capacity)


def shares(keys: Sequence[str], lengths: Mapping[str, int], size: int) -> list[list[str]]:
    """The rows in `size` parts of about as many tokens: the longest first, each to whom has least."""
    if size == 1:
        return [list(keys)]
    parts: list[list[str]] = [[] for _ in range(size)]
    loads = [0] * size
    for key in sorted(keys, key=lambda key: (-lengths[key], key)):
        least = loads.index(min(loads))
        parts[least].append(key)
        loads[least] += lengths[key]
    return parts

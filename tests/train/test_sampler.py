"""The order of rows: a pure function of keys, seed and epoch, and packs that hold every row exactly once."""

from __future__ import annotations

import itertools
import random

import pytest

from eyas.train.sampler import epoch_order, epoch_steps, pack

KEYS = [f"row{n}" for n in range(60)]


def some_lengths(seed: int = 0) -> dict[str, int]:
    generator = random.Random(seed)
    return {key: generator.choice([1, 7, 30, 64, 65, 200]) for key in KEYS}


def test_the_order_is_a_pure_function_of_keys_seed_and_epoch() -> None:
    random.seed(1)
    first = epoch_order(KEYS, 5, 2)
    random.seed(2)
    assert epoch_order(list(reversed(KEYS)), 5, 2) == first
    assert epoch_order(random.sample(KEYS, len(KEYS)), 5, 2) == first


def test_another_epoch_or_another_seed_gives_another_order() -> None:
    orders = {tuple(epoch_order(KEYS, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_shuffling_favours_no_row() -> None:
    """Over 400 epochs each row stands in the first half about as often as not: within five standard deviations of a fair coin."""
    firsts = dict.fromkeys(KEYS, 0)
    for epoch in range(400):
        for key in epoch_order(KEYS, 0, epoch)[: len(KEYS) // 2]:
            firsts[key] += 1
    assert all(abs(count - 200) < 5 * 10 for count in firsts.values())


def test_adding_a_row_does_not_reorder_the_others() -> None:
    before = epoch_order(KEYS, 3, 1)
    for new in ("another", "row7b", "0"):
        after = epoch_order([*KEYS, new], 3, 1)
        assert [key for key in after if key != new] == before


@pytest.mark.parametrize("capacity", [1, 64, 100, 10_000])
def test_a_pack_never_exceeds_its_capacity_unless_it_is_one_longer_row(capacity: int) -> None:
    lengths = some_lengths()
    packs = pack(KEYS, lengths, capacity)
    assert [key for one in packs for key in one] == KEYS
    for one in packs:
        assert one
        assert sum(lengths[key] for key in one) <= capacity or len(one) == 1


def test_a_pack_is_closed_only_when_the_next_row_does_not_fit() -> None:
    lengths = some_lengths()
    packs = pack(KEYS, lengths, 100)
    for one, following in itertools.pairwise(packs):
        assert sum(lengths[key] for key in one) + lengths[following[0]] > 100


@pytest.mark.parametrize(("per_step", "per_batch"), [(256, 256), (256, 64), (64, 256), (10_000, 100), (1, 1)])
def test_every_row_comes_exactly_once_an_epoch_and_batches_fit(per_step: int, per_batch: int) -> None:
    lengths = some_lengths(3)
    for epoch in range(3):
        steps = epoch_steps(KEYS, lengths, per_step, per_batch, 9, epoch)
        assert sorted(key for step in steps for batch in step for key in batch) == sorted(KEYS)
        for step in steps:
            rows = [key for batch in step for key in batch]
            assert sum(lengths[key] for key in rows) <= per_step or len(rows) == 1
            for batch in step:
                assert sum(lengths[key] for key in batch) <= min(per_step, per_batch) or len(batch) == 1


def test_tokens_per_batch_changes_no_optimiser_step() -> None:
    """It is a matter of memory alone: the rows of each step, in order, stay what they are."""
    lengths = some_lengths(4)
    flat = [[[key for batch in step for key in batch] for step in epoch_steps(KEYS, lengths, 300, per_batch, 0, 0)] for per_batch in (300, 64, 1)]
    assert flat[0] == flat[1] == flat[2]


def test_no_rows_give_no_steps() -> None:
    assert epoch_steps([], {}, 8, 8, 0, 0) == []

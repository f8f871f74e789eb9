"""Rows are recognised by their content: whatever an engine packs into a forward, each row gets its own states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from eyas.target.vllm_worker import Recognizer


def state_of(tokens: list[int], position: int) -> int:
    """A made-up state that depends, as a real one does, on all tokens up to its position."""
    return hash(tuple(tokens[: position + 1])) % 1_000_003


def forward(requests: list[tuple[list[int], int, int]], padding: int = 0) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """One forward that holds tokens [start, end) of each request."""
    ids = [token for tokens, start, end in requests for token in tokens[start:end]] + [0] * padding
    positions = [position for _, start, end in requests for position in range(start, end)] + [0] * padding
    states = [state_of(tokens, position) for tokens, start, end in requests for position in range(start, end)] + [-1] * padding
    return np.array(ids), np.array(positions), torch.tensor(states)[:, None, None]


def check(recognizer: Recognizer, rows: list[list[int]]) -> None:
    assert recognizer.missing() == []
    for row, found in zip(rows, recognizer.states, strict=True):
        assert found is not None and found[:, 0, 0].tolist() == [state_of(row, position) for position in range(len(row))]


def random_rows(seed: int) -> list[list[int]]:
    """Rows of 1 to 40 tokens over few tokens, many of them beginning alike, none twice."""
    chance = random.Random(seed)
    stem = [chance.randrange(1, 4) for _ in range(20)]
    rows = {tuple(stem[: chance.randrange(0, 20)] + [chance.randrange(1, 4) for _ in range(chance.randrange(1, 20))]) for _ in range(12)}
    return [list(row) for row in sorted(rows)]


@pytest.mark.parametrize("seed", range(200))
def test_whole_rows_in_any_order_get_their_own_states(seed: int) -> None:
    rows = random_rows(seed)
    chance = random.Random(1000 + seed)
    recognizer = Recognizer([np.array(row) for row in rows])
    order = chance.sample(range(len(rows)), len(rows))
    while order:
        count = chance.randrange(1, 6)
        recognizer.give(*forward([(rows[index], 0, len(rows[index])) for index in order[:count]], padding=chance.randrange(4)))
        order = order[count:]
    check(recognizer, rows)


@pytest.mark.parametrize("seed", range(50))
def test_a_row_alone_may_come_in_chunks(seed: int) -> None:
    rows = random_rows(seed)
    chance = random.Random(1000 + seed)
    recognizer = Recognizer([np.array(row) for row in rows])
    for index in recognizer.missing():
        recognizer.ask_alone(index)
        done = 0
        while done < len(rows[index]):
            end = min(len(rows[index]), done + chance.randrange(1, 12))
            recognizer.give(*forward([(rows[index], done, end)]))
            done = end
    check(recognizer, rows)


def test_chunks_of_several_rows_that_look_like_one_run_are_not_taken_for_it() -> None:
    """Two rows of which one ends its chunk where the other goes on: the run reads 1 2 3 4, but 3 4 followed 9 9."""
    recognizer = Recognizer([np.array([1, 2, 5]), np.array([9, 9, 3, 4])])
    recognizer.give(*forward([([9, 9, 3, 4], 0, 2)]))
    recognizer.give(*forward([([1, 2, 5], 0, 2), ([9, 9, 3, 4], 2, 4)]))
    assert recognizer.missing() == [0, 1]


def test_strangers_and_padding_are_dropped() -> None:
    recognizer = Recognizer([np.array([5, 6, 7])])
    recognizer.give(*forward([([1, 2, 3], 0, 3), ([5, 6, 8], 0, 3)], padding=4))
    assert recognizer.missing() == [0]
    recognizer.give(*forward([([1, 2, 3], 0, 3), ([5, 6, 7], 0, 3)], padding=4))
    check(recognizer, [[5, 6, 7]])


def test_leftovers_that_seem_to_continue_a_row_do_no_harm() -> None:
    recognizer = Recognizer([np.array([5, 6, 7])])
    recognizer.give(np.array([5, 6, 7, 9]), np.array([0, 1, 2, 3]), torch.tensor([state_of([5, 6, 7], i) for i in range(3)] + [0])[:, None, None])
    check(recognizer, [[5, 6, 7]])

"""Rows are recognised by their content: whatever an engine packs into a forward, each row gets its own states."""

from __future__ import annotations

import json
import os
import queue
import random
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.features.codec import FLOAT8, encode, squares
from eyas.features.index import enter
from eyas.features.shard import FeatureRow, OpenShard, finish, open_shard
from eyas.target import vllm_worker
from eyas.target.vllm_worker import WRITERS, Group, Piece, Recognizer, Recorder, Server, Tap, spread


def state_of(tokens: list[int], position: int) -> int:
    """A made-up state that depends, as a real one does, on all tokens up to its position."""
    return hash(tuple(tokens[: position + 1])) % 1_000_003


class Capture:
    """A recognizer, and the states that it gave to each row."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows
        self.recognizer = Recognizer([np.array(row) for row in rows])
        self.states = [[-1] * len(row) for row in rows]

    def forward(self, requests: list[tuple[list[int], int, int]], padding: int = 0) -> None:
        """One forward that holds tokens [start, end) of each request."""
        ids = [token for tokens, start, end in requests for token in tokens[start:end]] + [0] * padding
        positions = [position for _, start, end in requests for position in range(start, end)] + [0] * padding
        states = [state_of(tokens, position) for tokens, start, end in requests for position in range(start, end)] + [-1] * padding
        for piece in self.recognizer.give(np.array(ids), np.array(positions)):
            self.states[piece.row][piece.start : piece.start + piece.count] = states[piece.source : piece.source + piece.count]

    def check(self) -> None:
        assert self.recognizer.missing() == []
        for row, found in zip(self.rows, self.states, strict=True):
            assert found == [state_of(row, position) for position in range(len(row))]


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
    capture = Capture(rows)
    order = chance.sample(range(len(rows)), len(rows))
    while order:
        count = chance.randrange(1, 6)
        capture.forward([(rows[index], 0, len(rows[index])) for index in order[:count]], padding=chance.randrange(4))
        order = order[count:]
    capture.check()


@pytest.mark.parametrize("seed", range(50))
def test_a_row_alone_may_come_in_chunks(seed: int) -> None:
    rows = random_rows(seed)
    chance = random.Random(1000 + seed)
    capture = Capture(rows)
    for index in capture.recognizer.missing():
        capture.recognizer.ask_alone(index)
        done = 0
        while done < len(rows[index]):
            end = min(len(rows[index]), done + chance.randrange(1, 12))
            capture.forward([(rows[index], done, end)])
            done = end
    capture.check()


def test_chunks_of_several_rows_that_look_like_one_run_are_not_taken_for_it() -> None:
    """Two rows of which one ends its chunk where the other goes on: the run reads 1 2 3 4, but 3 4 followed 9 9."""
    capture = Capture([[1, 2, 5], [9, 9, 3, 4]])
    capture.forward([([9, 9, 3, 4], 0, 2)])
    capture.forward([([1, 2, 5], 0, 2), ([9, 9, 3, 4], 2, 4)])
    assert capture.recognizer.missing() == [0, 1]


def test_strangers_and_padding_are_dropped() -> None:
    capture = Capture([[5, 6, 7]])
    capture.forward([([1, 2, 3], 0, 3), ([5, 6, 8], 0, 3)], padding=4)
    assert capture.recognizer.missing() == [0]
    capture.forward([([1, 2, 3], 0, 3), ([5, 6, 7], 0, 3)], padding=4)
    capture.check()


def test_rows_with_the_same_tokens_get_the_same_states_from_one_forward() -> None:
    capture = Capture([[5, 6], [5, 6, 7], [5, 6]])
    capture.forward([([5, 6, 7], 0, 3), ([5, 6], 0, 2)])
    capture.check()


def test_leftovers_that_seem_to_continue_a_row_do_no_harm() -> None:
    recognizer = Recognizer([np.array([5, 6, 7])])
    assert recognizer.give(np.array([5, 6, 7, 9]), np.array([0, 1, 2, 3])) == [Piece(row=0, source=0, start=0, count=3)]


def laid_out(folder: Path, rows: list[list[int]], width: int, dtype: torch.dtype = torch.float32) -> OpenShard:
    given = [
        FeatureRow(str(n), torch.tensor(row, dtype=torch.int32), torch.ones(len(row), dtype=torch.bool), torch.empty(0), torch.empty(0))
        for n, row in enumerate(rows)
    ]
    return open_shard(folder, 0, given, 2, width, dtype)


def record(
    folder: Path, rows: list[list[int]], order: list[int], per_forward: int, spoil: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[OpenShard, Group]:
    """Runs rows through a recorder on the CPU, `per_forward` of them at once; spoil: the (row, position) whose state is not a number."""
    shard = laid_out(folder, rows, 3, dtype)
    group = wanted(folder, shard)
    recorder = Recorder(torch.device("cpu"), 8)
    for start in range(0, len(order), per_forward):
        some = order[start : start + per_forward]
        ids = torch.tensor([token for row in some for token in rows[row]])
        positions = torch.tensor([position for row in some for position in range(len(rows[row]))])
        states = torch.tensor([float(state_of(rows[row], position)) for row in some for position in range(len(rows[row]))])[:, None].expand(-1, 3).clone()
        if spoil and spoil[0] in some:
            states[sum(len(rows[row]) for row in some[: some.index(spoil[0])]) + spoil[1], 1] = float("nan")
        layers = [states.clone(), states + 0.25, states + 0.5]
        recorder.put([group], ids, positions, layers)
        for tensor in (ids, positions, *layers):
            tensor.zero_()  # an engine uses its buffers again at once
    recorder.settle()
    return shard, group


def wanted(folder: Path, shard: OpenShard) -> Group:
    offsets = torch.tensor(shard.starts)
    save_file({"tokens": torch.cat(shard.tokens), "offsets": offsets}, folder / "rows.safetensors")
    places = [[0, shard.places(row)] for row in range(len(shard.keys))]
    plan = {"tokens": str(folder / "rows.safetensors"), "files": [str(shard.part)], "places": places, "dtype": str(shard.dtype).removeprefix("torch.")}
    (folder / "plan.json").write_text(json.dumps(plan))
    return Group(str(folder / "plan.json"), str(folder / "written"))


@pytest.mark.parametrize("per_forward", [1, 4, 12])
def test_the_recorder_writes_each_state_to_its_place_and_tells_when_a_file_is_whole(tmp_path: Path, per_forward: int) -> None:
    rows = random_rows(5)
    order = random.Random(1).sample(range(len(rows)), len(rows))
    shard, group = record(tmp_path, rows, order, per_forward)
    assert group.recognizer.missing() == []
    assert [json.loads(line) for line in (tmp_path / "written").read_text().splitlines()] == [
        {"file": str(shard.part), "not_finite": [], "squares": [[0.0, 0.0]] * 3}
    ]
    enter(tmp_path, shard, finish(shard))
    found = load_file(shard.path)
    truth = torch.tensor([float(state_of(row, position)) for row in rows for position in range(len(row))])[:, None].expand(-1, 3)
    assert torch.equal(found["aux"][:, 0], truth) and torch.equal(found["aux"][:, 1], truth + 0.25) and torch.equal(found["last"], truth + 0.5)
    assert found["tokens"].tolist() == [token for row in rows for token in row] and found["supervised"].all()


def test_the_recorder_writes_float8_with_its_scales_and_tells_what_that_cost(tmp_path: Path) -> None:
    rows = random_rows(6)
    shard, _ = record(tmp_path, rows, random.Random(2).sample(range(len(rows)), len(rows)), 4, dtype=FLOAT8)
    (told,) = [json.loads(line) for line in (tmp_path / "written").read_text().splitlines()]
    enter(tmp_path, shard, finish(shard))
    found = load_file(shard.path)
    truth = (
        torch.tensor([float(state_of(row, position)) for row in rows for position in range(len(row))])[:, None, None] + torch.tensor([0, 0.25, 0.5])[:, None]
    )
    truth = truth.expand(-1, 3, 3)
    stored, scale = encode(truth, FLOAT8)
    assert torch.equal(found["scale"], scale) and found["aux"].dtype == FLOAT8
    assert torch.equal(torch.cat((found["aux"], found["last"][:, None]), dim=1).float(), stored.float())
    assert torch.allclose(torch.tensor(told["squares"]), squares(truth, stored, scale), rtol=1e-4)


def test_a_file_is_not_told_to_be_whole_before_its_last_row(tmp_path: Path) -> None:
    record(tmp_path, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [2, 0], 1)
    assert not (tmp_path / "written").exists()


def test_the_recorder_names_the_row_whose_states_are_not_finite(tmp_path: Path) -> None:
    record(tmp_path, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [2, 0, 1], 2, spoil=(2, 3))
    assert json.loads((tmp_path / "written").read_text())["not_finite"] == [2]


def test_the_recorder_tells_what_could_not_be_written(tmp_path: Path) -> None:
    shard = laid_out(tmp_path, [[1, 2]], 3)
    group = wanted(tmp_path, shard)
    group.close()
    group.handles = [os.open(shard.part, os.O_RDONLY)]  # as a disk that takes nothing
    recorder = Recorder(torch.device("cpu"), 8)
    for _ in range(10):  # more than may wait: nobody waits for ever
        recorder.put([group], torch.tensor([1, 2]), torch.tensor([0, 1]), [torch.ones(2, 3)] * 3)
    with pytest.raises(RuntimeError, match="Bad file descriptor"):
        recorder.settle()
    group.close()


def test_the_next_row_alone_does_not_take_the_place_of_one_whose_last_chunk_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder is behind the model: when the second row is asked for, chunks of the first are not recognised yet."""
    rows = [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    group = wanted(tmp_path, laid_out(tmp_path, rows, 3))
    recorder, tap = Recorder(torch.device("cpu"), 8), Tap()
    write_out = recorder._write_out
    monkeypatch.setattr(recorder, "_write_out", lambda *arguments: (time.sleep(0.1), write_out(*arguments)))
    tap.eyas_recorder, tap.eyas_groups = recorder, {"plan": group}
    for index, row in enumerate(rows):
        tap.eyas_ask_alone("plan", index)
        for start in range(0, len(row), 2):
            tokens = torch.tensor(row[start : start + 2])
            recorder.put([group], tokens, torch.arange(start, start + len(tokens)), [torch.ones(len(tokens), 3)] * 3)
    assert tap.eyas_missing("plan") == []
    group.close()


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_asked_for_each_once_and_in_turns_from_several_files(seed: int) -> None:
    chance = random.Random(seed)
    files = sorted(chance.choices(range(9), k=40))
    order = spread(files)
    assert sorted(order) == list(range(40))
    asked = [files[row] for row in order]
    left = Counter(asked)
    for start, file in enumerate(asked):  # while other files of its four have rows left, a file is not asked twice in a row
        left[file] -= 1
        if start and asked[start - 1] == file:
            window = sorted(set(asked)).index(file) // WRITERS
            assert not any(left[other] for other in sorted(set(asked))[window * WRITERS : (window + 1) * WRITERS] if other != file)


class OneRowAStep:
    """Stands for vLLM's LLM where only the order of commands matters: each step it reads one row."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened
        self.waiting: list[tuple[list[int], int]] = []
        self.llm_engine = self

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[None]:
        return [None]

    def enqueue(self, prompts: list[dict[str, list[int]]], sampling_params: list[int], use_tqdm: bool) -> None:
        self.happened.append(f"{len(prompts)} given")
        self.waiting += [(prompt["prompt_token_ids"], prove) for prompt, prove in zip(prompts, sampling_params, strict=True)]

    def step(self) -> list[SimpleNamespace]:
        row, prove = self.waiting.pop(0)
        self.happened.append(f"read {row}")
        entries = [None, *({token: SimpleNamespace(logprob=-float(token))} for token in row[1:])]
        return [SimpleNamespace(finished=True, prompt_token_ids=row, prompt_logprobs=entries if prove else None)]


def test_rows_of_the_next_command_are_given_before_those_of_the_first_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_worker, "_requests", lambda rows, num: ([{"prompt_token_ids": row.tolist()} for row in rows], [n < num for n in range(len(rows))]))
    happened: list[str] = []
    server = Server.__new__(Server)
    server.llm, server.tapped, server.reading, server.ended = OneRowAStep(happened), [1], deque(), 0.0
    monkeypatch.setattr(server, "generate", lambda: happened.append("nothing is read"))
    commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    # The same row twice, once to be proved whole; and a row of the second command that is one of the first.
    for number, (rows, prove) in enumerate([([[1, 2], [3, 4, 5], [1, 2]], [(0, 2), (1, 2)]), ([[6], [3, 4, 5]], [(1, 3)])]):
        path = tmp_path / f"{number}.safetensors"
        offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        save_file({"tokens": torch.tensor([token for row in rows for token in row], dtype=torch.int32), "offsets": offsets}, path)
        commands.put({"do": "capture", "plan": "", "tokens": str(path), "files": [0] * len(rows), "layers": [1], "prove": prove})
    commands.put({"do": "generate"})
    commands.put(None)
    answers: list[Any] = []
    server.serve(commands, answers.append)
    assert happened == [
        "5 given", "3 given", "read [1, 2]", "read [3, 4]", "read [1, 2]", "read [3, 4, 5]", "read [1, 2]", "read [3, 4, 5]", "read [6]", "read [3, 4, 5]",
        "nothing is read",
    ]  # fmt: skip
    assert [answer and answer["log_probabilities"] for answer in answers] == [{0: [-2.0], 1: [-4.0]}, {1: [-4.0, -5.0]}, None]

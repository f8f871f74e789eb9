"""Many conversations are rendered by other processes: the rows and their order are those of one process, and no process outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import SOURCE, write_run

import eyas.prepare.render
from eyas.artifact import read_manifest
from eyas.config import load
from eyas.errors import UserError
from eyas.pipeline import Run
from eyas.prepare.rows import LINES, PROMPTS, ROWS, first_rows, read_rows


def numbered(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number * number}"}]
    return {"id": f"n{number}", "messages": messages}


def prepared(folder: Path, target: Path, rows: list[dict[str, Any]], **data: Any) -> Path:
    folder.mkdir(exist_ok=True)
    run = Run(load(write_run(folder, target, rows, data=data), []))
    run.only("prepare")
    return run.folder / "prepare"


def test_other_processes_make_the_rows_of_one(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [numbered(n) for n in range(700)]  # more than two chunks
    data[300:300] = [{"what": 1}, {"prompt": "to be answered"}, numbered(5)]
    alone = prepared(tmp_path / "alone", tiny_target, data)
    monkeypatch.setattr(eyas.prepare.render, "ALONE_BYTES", 0)
    many = prepared(tmp_path / "many", tiny_target, data)
    assert (alone / ROWS).read_bytes() == (many / ROWS).read_bytes()
    assert (alone / PROMPTS).read_bytes() == (many / PROMPTS).read_bytes()
    assert (alone / LINES).read_text().replace("/alone/", "/many/") == (many / LINES).read_text()
    first, second = read_manifest(alone), read_manifest(many)
    assert first and second and first.counts == second.counts
    assert (first.counts["bad_rows"], first.counts["dropped"]["duplicate"], first.counts["answers_cut"]) == (1, 1, 1)
    assert sorted(path.name for path in many.iterdir() if path.suffix in (".part", ".tmp")) == []


def test_a_process_that_dies_is_a_sentence(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas.prepare.render, "ALONE_BYTES", 0)
    monkeypatch.setattr(eyas.prepare.render, "_outcomes", _die)
    with pytest.raises(UserError, match="died"):
        prepared(tmp_path, tiny_target, [numbered(n) for n in range(10)])


def _die(chunk: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_process_outlives_one_that_was_killed(tmp_path: Path, tiny_target: Path) -> None:
    path = write_run(tmp_path, tiny_target, [numbered(n) for n in range(200_000)])
    process = subprocess.Popen([sys.executable, "-m", "eyas.cli", "prepare", str(path)], env={**os.environ, "PYTHONPATH": SOURCE}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (children := children_of(process.pid)) and time.monotonic() < until:
        time.sleep(0.1)
    assert children
    time.sleep(3.0)  # for them to begin
    children = children_of(process.pid)
    process.kill()
    process.wait()
    while any(alive(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.2)
    assert not [pid for pid in children if alive(pid)]


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_prompt_asked_in_training_is_no_held_out_one_whatever_its_id_case_and_spaces(tmp_path: Path, tiny_target: Path) -> None:
    data = [numbered(n) for n in range(60)]
    again = [{**row, "id": f"again {n}", "messages": [{"role": "user", "content": f"  Question  {n} "}, row["messages"][1]]} for n, row in enumerate(data)]
    out = prepared(tmp_path, tiny_target, data + again, holdout=0.3)
    rows = [json.loads(line) for line in (out / LINES).read_text().splitlines()]
    assert [row["holdout"] for row in rows] == [row.holdout for row in read_rows(out)]
    side = {row["conversation"]: row["holdout"] for row in rows}
    for n in range(60):
        assert side[f"n{n}"] == side[f"again {n}"]
    manifest = read_manifest(out)
    assert manifest and manifest.counts["moved_to_training"] > 0 and any(side.values())
    asked = [json.loads(line)["id"] for line in (out / PROMPTS).read_text().splitlines()]
    assert sorted(asked) == sorted(name for name, held in side.items() if held)


def test_a_row_that_is_too_long_is_left_out_if_it_is_to_be(tmp_path: Path, tiny_target: Path) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "cat " * 100}]}
    out = prepared(tmp_path, tiny_target, [long, numbered(1)], too_long="drop", max_length=40, holdout=0.0)
    manifest = read_manifest(out)
    assert manifest and manifest.counts["dropped"] == {"longer than data.max_length": 1} and len(read_rows(out)) == 1


def test_rows_that_are_tokens_already_are_taken_as_they_are(tmp_path: Path, tiny_target: Path) -> None:
    data = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [5, 6, 7, 9], "labels": [-100, -100, 7, 9]},
        {"input_ids": [5, 6, 7, 10], "loss_mask": [0, 0, 0, 1]},  # one alone teaches nothing
    ]
    rows = read_rows(prepared(tmp_path, tiny_target, data, holdout=0.0))
    assert [(row.tokens.tolist(), row.supervised.tolist()) for row in rows] == [([5, 6, 7, last], [False, False, True, True]) for last in (8, 9)]
    for bad, says in (
        ({"input_ids": [1, 2], "loss_mask": [1]}, "as long as"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "not shifted"),
        ({"input_ids": [1, "a"], "loss_mask": [1, 1]}, "token ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "0 and 1"),
    ):
        with pytest.raises(UserError, match=says):
            prepared(tmp_path / says[:3], tiny_target, [bad])


def test_three_rows_are_shown_and_any_row_can_be_inspected(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(tmp_path, tiny_target, [numbered(n) for n in range(12)], holdout=0.3)
    said = capsys.readouterr().err
    assert said.count("--- row") == 3 and "«answer 0<|im_end|>»" in said.replace("\n", "")
    run = Run(load(tmp_path / "run.toml", []))
    for count in (1, 3, 12, 50):
        few, some = first_rows(out, count), read_rows(out)[:count]
        assert [(row.key, row.tokens.tolist(), row.supervised.tolist(), row.holdout) for row in few] == [
            (row.key, row.tokens.tolist(), row.supervised.tolist(), row.holdout) for row in some
        ]
    row = read_rows(out)[4]
    for name in ("4", "n4", row.key, row.key[:8]):
        text = run.inspect(name).plain
        assert "question 4" in text and "«answer 16<|im_end|>»" in text and "no features are stored" in text and "data.jsonl:5" in text
    with pytest.raises(UserError, match="no row nobody"):
        run.inspect("nobody")
    run.up_to("extract")
    lines = run.inspect("4").plain.splitlines()
    norms = {line.split()[1]: [float(size) for size in line.split()[2:]] for line in lines if line.startswith("  layer")}
    assert list(norms) == ["1", "3", "5", "6"] and all(0 < least <= median <= most for least, median, most in norms.values())


def test_bad_data_of_every_kind_is_counted_and_the_rest_is_kept(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps(numbered(n)) for n in range(3000)]
    question = {"role": "user", "content": "a"}
    bad = {
        731: "{'not': 'JSON'}",
        800: json.dumps({"messages": [{"role": "alien", "content": "x"}]}),
        801: json.dumps({"messages": [{"role": "user", "content": 7}]}),
        802: '{"prompt": "half \\ud83d"}',
        803: "[" * 100_000,
    }
    odd = {
        900: {"messages": [question, {"role": "assistant", "content": "b", "reasoning_content": "half \ud83d"}]},  # not looked at before it is rendered
        901: {"messages": [question, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        902: {"messages": [{"role": "user", "content": "extraordinarily " * 650_000}, {"role": "assistant", "content": "so"}]},  # 10 MB
        903: {"messages": [question, {"role": "assistant", "content": "b"}], "tools": "no JSON"},
    }
    for line, text in bad.items():
        good.insert(line - 1, text)
    for line, row in odd.items():
        good.insert(line - 1, json.dumps(row))
    path = write_run(tmp_path, tiny_target, [], data={"holdout": 0.0})
    (tmp_path / "data.jsonl").write_text("\n".join(good))
    run = Run(load(path, []))
    run.only("prepare")
    manifest = read_manifest(run.folder / "prepare")
    assert manifest
    counts = manifest.counts
    assert counts["bad_rows"] == 6 and counts["rows"] == 3000 and sum(counts["dropped"].values()) == 3
    assert set(counts["dropped"]) == {
        "the chat template leaves out the thought of an answer",
        "the chat template takes no tool calls",
        "no supervised pair within data.max_length",
    }
    said = capsys.readouterr().err
    assert all(f"data.jsonl:{line}" in said for line in bad) and "1 more row" in said

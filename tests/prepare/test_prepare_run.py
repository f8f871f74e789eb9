"""The stage prepare: every row read is kept or dropped for a counted reason, and the held-out part never moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import conversation, write_run

from eyas.artifact import read_manifest
from eyas.config import load
from eyas.errors import UserError
from eyas.pipeline import Run
from eyas.prepare.rows import PROMPTS, PreparedRow, read_rows


def prepare(folder: Path, target: Path, rows: list[dict[str, Any]], **data: Any) -> tuple[list[PreparedRow], dict[str, Any], Path]:
    """(rows kept, counts, the prepare folder) of the conversations `rows`."""
    folder.mkdir(exist_ok=True)
    run = Run(load(write_run(folder, target, rows, data=data), []))
    run.only("prepare")
    out = run.folder / "prepare"
    manifest = read_manifest(out)
    assert manifest is not None
    return read_rows(out), manifest.counts, out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbered(number: int) -> dict[str, Any]:
    """conversation() repeats itself after 23; this one does not."""
    return talk(f"question {number}", f"answer {number * number}", id=f"n{number}")


def talk(question: str, reply: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}], **more}


def test_rows_kept_and_rows_dropped_by_reason_make_all_rows_read(tmp_path: Path, tiny_target: Path) -> None:
    read = [
        *(conversation(n) for n in range(12)),
        talk("a", "b<|im_end|>c"),  # a stop token inside
        talk("a", ""),  # one supervised token alone teaches nothing
        conversation(0) | {"id": "again"},  # a duplicate
        talk("cat " * 200, "never reached"),  # the answer lies behind max_length
    ]
    rows, counts, _ = prepare(tmp_path, tiny_target, read)
    assert counts["conversations"] == len(read)
    assert counts["dropped"] == {
        "a stop token stands inside the answer": 1,
        "answer of fewer than two tokens": 1,
        "duplicate": 1,
        "no supervised pair within data.max_length": 1,
    }
    assert len(rows) == counts["rows"] == len(read) - sum(counts["dropped"].values())
    assert counts["tokens"] == sum(len(row.tokens) for row in rows) and counts["supervised"] == sum(int(row.supervised.sum()) for row in rows)


def test_a_few_bad_rows_are_named_and_left_out_and_more_stop_the_run(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [numbered(number) for number in range(297)]
    bad: list[Any] = [{"what": 1}, {"messages": [{"role": "alien", "content": "x"}]}, {"prompt": 3}]
    _, counts, _ = prepare(tmp_path / "few", tiny_target, [*good[:100], bad[0], *good[100:200], bad[1], *good[200:], bad[2]])
    assert counts["bad_rows"] == 3 and counts["conversations"] == 297 and counts["rows"] + sum(counts["dropped"].values()) == 297
    said = capsys.readouterr().err
    for line in (101, 202, 300):
        assert f"left out: {tmp_path / 'few' / 'data.jsonl'}:{line}" in said
    with pytest.raises(UserError, match=r"data.jsonl:291 .*\(4 of 294 rows are bad; up to 1% would be left out"):
        prepare(tmp_path / "many", tiny_target, [*good[:290], *bad, {"what": 2}])


def test_every_kept_row_has_two_supervised_tokens_side_by_side_and_a_key_of_its_own(tmp_path: Path, tiny_target: Path) -> None:
    rows, _, _ = prepare(tmp_path, tiny_target, [conversation(n, 1 + n % 3) for n in range(20)])
    assert all((row.supervised[:-1] & row.supervised[1:]).any() for row in rows)
    assert len({row.key for row in rows}) == len(rows)


def test_a_long_row_is_clipped_counted_and_given_no_false_end(tmp_path: Path, tiny_target: Path) -> None:
    rows, counts, _ = prepare(tmp_path, tiny_target, [talk("a", "cat " * 100), talk("b", "dog")], max_length=40, holdout=0.0)
    assert counts["clipped"] == 1 and len(rows[0].tokens) == 40
    assert rows[0].supervised[-1] and int(rows[0].tokens[-1]) != 2


def test_the_held_out_part_does_not_move_when_data_is_added_or_reordered(tmp_path: Path, tiny_target: Path) -> None:
    few, many = [numbered(n) for n in range(30)], [numbered(n) for n in reversed(range(60))]
    first, _, _ = prepare(tmp_path / "few", tiny_target, few)
    second, _, _ = prepare(tmp_path / "many", tiny_target, many)
    side = {row.key: row.holdout for row in second}
    assert 0 < sum(row.holdout for row in first) < len(first)
    assert all(side[row.key] == row.holdout for row in first)


def test_another_seed_draws_another_held_out_part(tmp_path: Path, tiny_target: Path) -> None:
    path = write_run(tmp_path, tiny_target, [numbered(n) for n in range(30)])
    sides = []
    for seed in (0, 1):
        run = Run(load(path, [f"run.seed={seed}", f"run.folder=run{seed}"]))
        run.only("prepare")
        sides.append([row.holdout for row in read_rows(run.folder / "prepare")])
    assert sides[0] != sides[1]


def test_prompts_hold_the_first_turns_of_held_out_conversations_and_no_others(tmp_path: Path, tiny_target: Path) -> None:
    data = [numbered(n) | {"category": f"k{n % 2}"} for n in range(30)]
    _, counts, out = prepare(tmp_path, tiny_target, data)
    held = {line["conversation"] for line in lines(out / "rows.jsonl") if line["holdout"]}
    prompts = lines(out / PROMPTS)
    assert {prompt["id"] for prompt in prompts} == held and len(held) == counts["holdout_rows"]
    by_id = {row["id"]: row for row in data}
    assert all(p["messages"] == by_id[p["id"]]["messages"][:1] and p["category"] == by_id[p["id"]]["category"] for p in prompts)


def test_a_conversation_given_twice_is_not_on_both_sides(tmp_path: Path, tiny_target: Path) -> None:
    data = [conversation(n) | {"id": f"{copy}-{n}"} for copy in range(4) for n in range(12)]
    rows, counts, out = prepare(tmp_path, tiny_target, data, holdout=0.4)
    assert counts["dropped"] == {"duplicate": len(data) - len(rows)}
    trained = {line["conversation"] for line in lines(out / "rows.jsonl") if not line["holdout"]}
    first_words = {row["id"]: row["messages"][0]["content"] for row in data}
    asked = {prompt["messages"][0]["content"] for prompt in lines(out / PROMPTS)}
    assert not asked & {first_words[name] for name in trained}, "a prompt that was trained on would flatter the draft"


def test_no_rows_at_all_and_no_rows_to_train_on_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(UserError, match="1 answer of fewer than two tokens"):
        prepare(tmp_path / "a", tiny_target, [talk("a", "")])
    with pytest.raises(UserError, match="held-out"):
        prepare(tmp_path / "b", tiny_target, [conversation(0)], holdout=0.999)


def test_all_missing_and_never_use_the_answers_that_they_say(tmp_path: Path, tiny_target: Path) -> None:
    data = [conversation(n) for n in range(6)] + [{"id": "open", "prompt": "the tree"}]
    _, never, _ = prepare(tmp_path / "never", tiny_target, data[:-1], regenerate="never")
    _, missing, _ = prepare(tmp_path / "missing", tiny_target, data, regenerate="missing")
    _, everything, _ = prepare(tmp_path / "all", tiny_target, data, regenerate="all")

    def written(counts: dict[str, Any]) -> int:
        return int(counts.get("answers_stopped", 0) + counts.get("answers_cut", 0))

    assert (written(never), written(missing), written(everything)) == (0, 1, 7)
    assert never["rows"] == 6


def test_rows_that_were_changed_on_disk_are_refused_by_name(make_run: Callable[..., Path]) -> None:
    run = Run(load(make_run(), []))
    run.up_to("prepare")
    path = run.folder / "prepare" / "rows.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1  # the tensors are the end of the file
    for damage in (bytes(data), path.read_bytes()[:-20], b""):
        path.write_bytes(damage)
        with pytest.raises(UserError, match=r"rows\.safetensors"):
            Run(load(make_run(), [])).only("extract")

"""Data files -> conversations: whatever a file holds, it becomes messages or a sentence with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from eyas.config import SourceSection
from eyas.errors import UserError
from eyas.prepare.sources import Conversation, conversation_of, data_files, raw_rows, read_conversations, source_hashes, with_open_answers

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
OPEN = {"role": "assistant", "content": None}


def read(tmp_path: Path, *lines: str | bytes) -> list[Conversation]:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return list(read_conversations([str(path)]))


def refusal(tmp_path: Path, *lines: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        read(tmp_path, *lines)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_messages_prompt_and_turns_become_messages(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"prompt": "Hi"}, {"turns": ["a", "b"]}]
    found = read(tmp_path, *map(json.dumps, rows))
    assert [c.messages for c in found] == [[USER, ANSWER], [USER], [{"role": "user", "content": "a"}, OPEN, {"role": "user", "content": "b"}, OPEN]]
    assert [c.where.rpartition(":")[2] for c in found] == ["1", "2", "3"]


ASKED = [USER, ANSWER]


@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"conversation": ASKED}, "messages", ASKED),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, "ShareGPT", ASKED),
        (
            {"conversations": [{"from": "system", "value": "S"}, {"from": "User", "value": "Hi"}, {"from": "gpt", "value": None}], "id": 7},
            "ShareGPT", [{"role": "system", "content": "S"}, USER, OPEN],
        ),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, "Alpaca", ASKED),
        ({"instruction": "Sum", "input": "1 2", "output": "3"}, "Alpaca", [{"role": "user", "content": "Sum\n\n1 2"}, {"role": "assistant", "content": "3"}]),
        ({"instruction": "Hi"}, "Alpaca", [USER]),
        ({"prompt": "Hi", "completion": "Hello"}, "prompt", ASKED),
        ({"prompt": "Hi", "response": "Hello"}, "prompt", ASKED),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, ANSWER]}, "messages", ASKED),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages", [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        ),
    ],
)  # fmt: skip
def test_each_form_that_data_sets_use_is_known_by_its_keys(tmp_path: Path, row: dict[str, Any], form: str, messages: list[dict[str, Any]]) -> None:
    (found,) = read(tmp_path, json.dumps(row))
    assert (found.form, found.messages) == (form, messages)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"conversations": [{"from": "alien", "value": "Hi"}]}, "role 'alien'"),
        ({"conversations": [{"from": ["human"], "value": "Hi"}]}, "role"),
        ({"conversations": [{"from": "human", "value": 3}]}, "type int"),
        ({"instruction": 3, "output": "x"}, "type int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}, {"type": "text", "text": "y"}]}]},
            "parts of type image_url, text",
        ),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "parts of type str"),
    ],
)
def test_a_row_of_a_known_form_that_holds_something_else_is_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, json.dumps(row))


def test_files_come_from_names_folders_and_patterns_in_one_order(tmp_path: Path) -> None:
    rows = {name: {"prompt": name} for name in ("a.jsonl", "sub/b.json", "sub/c.jsonl.gz", "d.ndjson")}
    (tmp_path / "sub").mkdir()
    for name, row in rows.items():
        data = json.dumps([row, row] if name.endswith(".json") else row).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / "notes.txt").write_text("not data")
    found = [(Path(c.where.partition(":")[0].partition("[")[0]).name, c.messages[0]["content"]) for c in read_conversations([str(tmp_path)])]
    assert found == [("a.jsonl", "a.jsonl"), ("d.ndjson", "d.ndjson")]
    assert [c.messages[0]["content"] for c in read_conversations([f"{tmp_path}/sub"])] == ["sub/b.json", "sub/b.json", "sub/c.jsonl.gz"]
    assert [c.messages[0]["content"] for c in read_conversations([f"{tmp_path}/*.ndjson", f"{tmp_path}/a.jsonl"])] == ["d.ndjson", "a.jsonl"]
    assert [Path(path).name for path in data_files([f"{tmp_path}/**/*.jsonl*"])] == ["a.jsonl", "c.jsonl.gz"]


def test_a_json_file_of_lines_is_read_by_lines(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [c.where.rpartition(":")[2] for c in read_conversations([str(tmp_path / "data.json")])] == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("data.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 5000)[:-20], "no whole gzip file"),
        ("data.jsonl.gz", b'{"prompt": "a"}', "no whole gzip file"),
        ("data.json", b'[{"prompt": "a"}, ', "data.json:1 is not JSON"),
        ("data.json", b"[]", "is empty"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=says):
        list(read_conversations([str(tmp_path / name)]))


def test_an_empty_folder_a_pattern_that_matches_nothing_and_a_dead_link_are_named(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    for name, says in (("empty", "without data files"), ("*.nothing", "No file matches"), ("link.jsonl", "does not exist")):
        with pytest.raises(UserError, match=says):
            list(read_conversations([str(tmp_path / name)]))


def test_rows_come_as_they_stand_with_file_and_line_and_what_they_take_of_the_file(tmp_path: Path) -> None:
    lines = '{"prompt": "a"}\nnonsense\n\n{"prompt": "b"}\n'
    for path in (tmp_path / "data.jsonl", tmp_path / "data.jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
        rows = list(raw_rows([str(path)]))
        assert [row.where for row in rows] == [f"{path}:{number}" for number in (1, 2, 4)]
        assert rows[1].data == b"nonsense\n" and sum(row.size for row in rows) == path.stat().st_size
        with pytest.raises(UserError, match=f"{path.name}:2 is not JSON"):
            list(read_conversations([str(path)]))


def test_blank_lines_are_passed_over_and_line_numbers_stay_true(tmp_path: Path) -> None:
    (found,) = read(tmp_path, "", "  ", json.dumps({"prompt": "Hi"}), "")
    assert found.where.endswith("data.jsonl:3")


def test_an_id_is_the_rows_own_or_follows_from_its_messages_alone(tmp_path: Path) -> None:
    given_id, number, first, same, other = read(
        tmp_path, *map(json.dumps, [{"id": "x", "prompt": "a"}, {"id": 0, "prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "category": "c"}, {"prompt": "b"}])
    )
    assert given_id.id == "x" and number.id == "0"
    assert first.id == same.id != other.id
    assert same.category == "c"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([1, 2], "holds list"),
        ("text", "holds str"),
        (None, "holds NoneType"),
        ({}, "no keys"),
        ({"text": "x", "label": 1}, "text, label"),
        ({"messages": []}, "at least one message"),
        ({"messages": "Hi"}, "must be a list"),
        ({"messages": {"role": "user"}}, "must be a list"),
        ({"messages": [USER, "Hi"]}, "message 1"),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "'human'"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "message 0"),
        ({"messages": [{"content": "Hi"}]}, "role None"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "message 1 has content of type int"),
        ({"messages": [{"role": "user", "content": None}]}, "NoneType"),
        ({"messages": [{"role": "user", "content": []}]}, "list"),
        ({"prompt": 3}, "int"),
        ({"turns": []}, "at least one text"),
        ({"turns": "Hi"}, "turns must be a list"),
        ({"turns": ["a", None]}, "NoneType"),
        ({"prompt": "half \ud83d"}, "lone surrogate"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_file_and_line(tmp_path: Path, row: Any, says: str) -> None:
    message = refusal(tmp_path, json.dumps({"prompt": "ok"}), json.dumps(row))
    assert "data.jsonl:2" in message and says in message


@pytest.mark.parametrize("line", [b"{", b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 50_000, b'{"prompt": ' + b"9" * 5_000 + b"}"])
def test_a_line_that_is_not_json_is_refused_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    assert "data.jsonl:2" in refusal(tmp_path, json.dumps({"prompt": "ok"}), line)


@pytest.mark.parametrize("key", ["id", "category"])
def test_half_a_character_in_an_id_or_category_is_refused_like_one_in_a_text(tmp_path: Path, key: str) -> None:
    assert "lone surrogate" in refusal(tmp_path, json.dumps({key: "\ud83d", "prompt": "ok"}))


def test_a_missing_and_an_empty_file_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path, says in ((tmp_path / "none.jsonl", "does not exist"), (empty, "is empty")):
        with pytest.raises(UserError, match=says) as caught:
            list(read_conversations([str(path)]))
        assert str(path) in str(caught.value)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_json_is_a_conversation_or_a_user_error(value: Any) -> None:
    for row in (value, {"messages": value}, {"messages": [value]}, {"turns": value}, {"prompt": value}):
        try:
            found = conversation_of(json.dumps(row).encode(), "data.jsonl:1")
        except UserError as error:
            assert "data.jsonl:1" in str(error)
        else:
            assert all(isinstance(m["content"], str) or m["role"] == "assistant" for m in found.messages)


def opened(messages: list[dict[str, Any]], regenerate: str) -> list[dict[str, Any]]:
    return with_open_answers(Conversation("x", messages, "data.jsonl:1"), regenerate).messages


def test_missing_leaves_given_answers_alone_and_opens_one_at_the_end() -> None:
    assert opened([USER, ANSWER], "missing") == [USER, ANSWER]
    assert opened([USER, ANSWER, USER], "missing") == [USER, ANSWER, USER, OPEN]
    assert opened([USER, OPEN, USER], "missing") == [USER, OPEN, USER, OPEN]


def test_all_opens_every_answer() -> None:
    assert opened([USER, ANSWER, USER, ANSWER], "all") == [USER, OPEN, USER, OPEN]
    assert opened([USER], "all") == [USER, OPEN]


def test_never_drops_what_no_answer_follows_and_refuses_a_row_without_any() -> None:
    assert opened([USER, ANSWER, USER], "never") == [USER, ANSWER]
    assert opened([USER, ANSWER, USER, OPEN], "never") == [USER, ANSWER]
    for messages in ([USER], [USER, OPEN]):
        with pytest.raises(UserError, match=r"data\.jsonl:1 has no assistant turn"):
            opened(messages, "never")


def test_the_read_conversation_is_not_changed_by_opening_it() -> None:
    conversation = Conversation("x", [USER], "data.jsonl:1")
    with_open_answers(conversation, "all")
    assert conversation.messages == [USER]


# --- tables in data.conversations -------------------------------------------------------------------------------------------------------------


def chats(number: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n}"}]} for n in range(number)]


def test_a_parquet_file_holds_the_same_conversations_as_lines_of_json(tmp_path: Path) -> None:
    rows = chats(600)
    rows[3]["messages"].append({"role": "tool", "content": "found", "name": "search"})  # in a table every other message has a name too: None
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    lines, table = (list(read_conversations([str(tmp_path / name)])) for name in ("lines.jsonl", "table.parquet"))
    assert [(c.id, c.messages) for c in lines] == [(c.id, c.messages) for c in table]
    assert table[599].where == f"{tmp_path / 'table.parquet'}[599]"
    assert sum(row.size for row in raw_rows([str(tmp_path / "table.parquet")])) <= (tmp_path / "table.parquet").stat().st_size
    damaged = (tmp_path / "table.parquet").read_bytes()[:-40]
    (tmp_path / "torn.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match="no sound parquet file"):
        list(read_conversations([str(tmp_path / "torn.parquet")]))


def test_a_data_set_of_the_hub_is_read_and_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the hub: `datasets` takes either."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats(20)))
    source = SourceSection(hub=str(folder), cap=5)
    assert [c.id for c in read_conversations([source])] == ["r0", "r1", "r2", "r3", "r4"]
    hashes = source_hashes([source], lambda path: path.suffix)
    assert list(hashes.values()) == [".arrow"] and '"cap":5' in next(iter(hashes))
    with pytest.raises(UserError, match="cannot be loaded"):
        list(read_conversations([SourceSection(hub=str(folder), split="nowhere")]))


def test_a_share_is_chosen_by_content_and_a_cap_takes_the_first(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(row) + "\n" for row in chats(400)]
    path.write_text("".join(lines))
    quarter = {c.id for c in read_conversations([SourceSection(path=str(path), share=0.25)])}
    path.write_text("".join(reversed(lines)))
    assert {c.id for c in read_conversations([SourceSection(path=str(path), share=0.25)])} == quarter and 70 < len(quarter) < 130
    assert [c.id for c in read_conversations([SourceSection(path=str(path), cap=2), SourceSection(path=str(path), share=0.25, cap=1)])][:2] == ["r399", "r398"]


def test_a_map_finds_values_wherever_they_stand_and_a_row_without_them_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": {"text": "why"}, "reply": "so", "n": 7}\n{"other": 1}\n')
    source = SourceSection(path=str(path), map={"prompt": "question.text", "completion": "reply", "id": "n"})
    rows = raw_rows([source])
    first = next(rows)
    found = conversation_of(first.data, first.where)
    assert (found.id, [m["content"] for m in found.messages]) == ("7", ["why", "so"])
    second = next(rows)
    with pytest.raises(UserError, match=r"data.jsonl:2 has no keys"):
        conversation_of(second.data, second.where)

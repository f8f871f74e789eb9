"""The target writes answers: in order, counted, and interrupted gives what uninterrupted gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.prepare.ask import FILE, Asker, Writer
from eyas.prepare.chat import Chat, load_chat
from eyas.prepare.regenerate import count_open, next_open, write_answers
from eyas.prepare.sources import Conversation, with_open_answers
from eyas.progress import Reporter, Task
from eyas.target.engine import Answer, Sampling
from eyas.target.spec import TargetSpec, read_spec
from eyas.target.transformers_engine import TransformersEngine

STOP = 2
GREEDY = Sampling(max_new_tokens=6, temperature=0.0, top_p=1.0, seed=0)
SAMPLED = replace(GREEDY, temperature=1.5, max_new_tokens=8)


class Killed(BaseException):
    """Stands for the end of the process at that place."""


class FakeEngine:
    """Says words that follow from the seed and the prompt; counts what it is asked; dies before the call after `calls`."""

    def __init__(self, spec: TargetSpec, words: list[list[int]], calls: float = float("inf"), length: int = 99) -> None:
        self.spec, self.words, self.calls, self.length = spec, words, calls, length
        self.asked: list[list[int]] = []
        self.batches = 0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        if self.batches >= self.calls:
            raise Killed
        self.batches += 1
        self.asked += [list(prompt) for prompt in prompts]
        drawn = random.Random(f"{sampling.seed if sampling.temperature else 0} {[list(p) for p in prompts] if sampling.temperature else ''}")
        answers = []
        for prompt in prompts:
            own = drawn if sampling.temperature else random.Random(str(list(prompt)))
            tokens = [token for _ in range(own.randint(1, 4)) for token in own.choice(self.words)] + [STOP]
            answers.append(Answer(tokens, "stop") if len(tokens) <= self.length else Answer(tokens[: self.length], "length"))
        return answers


@pytest.fixture(scope="module")
def spec(tiny_target: Path) -> TargetSpec:
    return read_spec(tiny_target)


@pytest.fixture(scope="module")
def chat(spec: TargetSpec) -> Chat:
    return load_chat(spec, False)


@pytest.fixture(scope="module")
def words(chat: Chat) -> list[list[int]]:
    return [chat.ids(" " + word) for word in ("cat", "dog", "ran", "tree", "blue")]


def talks(number: int, turns: int = 1) -> list[Conversation]:
    return [
        Conversation(
            f"c{n}",
            [m for t in range(turns) for m in ({"role": "user", "content": f"q{n} {'x ' * (n % 5)}{t}"}, {"role": "assistant", "content": None})],
            f"f:{n}",
        )
        for n in range(number)
    ]


def write(
    conversations: list[Conversation], chat: Chat, engine: Writer, folder: Path, sampling: Sampling = SAMPLED, batch: int = 4, setting: str = "w"
) -> tuple[list[Conversation], Counter[str]]:
    folder.mkdir(exist_ok=True)
    counts: Counter[str] = Counter()
    with Task(Reporter(folder), folder, "answers", count_open(conversations), "answers") as task:
        return write_answers(conversations, chat, Asker(engine, batch, {"target": setting}, folder), sampling, task, counts), counts


def texts(conversations: list[Conversation]) -> list[list[str]]:
    return [[message["content"] for message in c.messages] for c in conversations]


def test_every_open_answer_is_filled_in_place_and_in_order(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path) -> None:
    given = talks(6)
    done, counts = write(given, chat, FakeEngine(spec, words), tmp_path)
    assert [c.id for c in done] == [c.id for c in given] and count_open(done) == 0
    assert [t[0] for t in texts(done)] == [c.messages[0]["content"] for c in given]
    assert counts == {"answers_stopped": 6}
    assert all("<|im_end|>" not in t[1] for t in texts(done))


def test_turns_are_answered_one_after_another_each_seeing_the_answers_before(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path) -> None:
    engine = FakeEngine(spec, words)
    (done,), _ = write(talks(1, turns=3), chat, engine, tmp_path)
    assert engine.asked == [chat.prompt_ids(done.messages[:j]) for j in (1, 3, 5)]


def test_killed_after_any_batch_and_resumed_gives_the_same_answers_and_asks_for_none_again(
    chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path
) -> None:
    given = talks(9, turns=2)
    whole, whole_counts = write(given, chat, uncut := FakeEngine(spec, words), tmp_path / "whole")
    for calls in range(uncut.batches):
        first = FakeEngine(spec, words, calls)
        with pytest.raises(Killed):
            write(given, chat, first, tmp_path / str(calls))
        second = FakeEngine(spec, words)
        done, counts = write(given, chat, second, tmp_path / str(calls))
        assert texts(done) == texts(whole) and counts == whole_counts
        assert first.asked + second.asked == uncut.asked, "no prompt twice, none left out"


def test_killed_in_the_middle_of_a_line_the_batch_is_written_again(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path) -> None:
    given = talks(8)
    whole, _ = write(given, chat, FakeEngine(spec, words), tmp_path)
    data = (tmp_path / FILE).read_bytes()
    lines = data.splitlines(keepends=True)
    for kept in (len(data) - 3, len(b"".join(lines[:6])), len(lines[0]) // 2):
        (tmp_path / FILE).write_bytes(data[:kept])
        done, _ = write(given, chat, FakeEngine(spec, words), tmp_path)
        assert texts(done) == texts(whole)


def test_resumed_gives_the_same_where_prompts_repeat(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path) -> None:
    same = talks(1)[0].messages
    # Of one length, so sorted by id into batches of two: every batch holds the same prompt once, and one of its own.
    given = [Conversation(f"{n}", same if n % 2 else [{"role": "user", "content": f"q{n} 0"}, same[1]], f"f:{n}") for n in range(8)]
    whole, _ = write(given, chat, FakeEngine(spec, words), tmp_path, batch=2)
    again, _ = write(given, chat, FakeEngine(spec, words, calls=0), tmp_path, batch=2)
    assert texts(again) == texts(whole)


def test_a_finished_batch_is_kept_when_conversations_are_added(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path) -> None:
    write(talks(8), chat, FakeEngine(spec, words), tmp_path)
    engine = FakeEngine(spec, words)
    write([*talks(8), Conversation("long", [{"role": "user", "content": "x " * 60}, {"role": "assistant", "content": None}], "f:9")], chat, engine, tmp_path)
    assert len(engine.asked) == 1


@pytest.mark.parametrize("change", [{"setting": "other weights"}, {"sampling": replace(SAMPLED, temperature=0.5)}, {"sampling": replace(SAMPLED, seed=1)}])
def test_answers_to_another_question_are_not_used(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path, change: dict[str, Any]) -> None:
    write(talks(5), chat, FakeEngine(spec, words), tmp_path)
    engine = FakeEngine(spec, words)
    write(talks(5), chat, engine, tmp_path, **change)
    assert len(engine.asked) == 5


def test_finish_reasons_are_counted_and_a_cut_answer_ends_its_conversation(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path) -> None:
    engine = FakeEngine(spec, words, length=4)
    done, counts = write(talks(12, turns=2), chat, engine, tmp_path)
    cut = [c for c in done if c.messages[-1]["ids"][-1] != STOP]
    assert 0 < len(cut) < 12, "the lengths drawn must lie on both sides of the limit for this test to mean anything"
    assert counts["answers_cut"] == len(cut) and sum(counts.values()) == len(engine.asked)
    assert all(c.messages[-1]["role"] == "assistant" and count_open([c]) == 0 for c in done)


def test_a_cut_answer_trains_no_false_stop(chat: Chat, spec: TargetSpec, words: list[list[int]], tmp_path: Path) -> None:
    done, _ = write(talks(12), chat, FakeEngine(spec, words, length=4), tmp_path)
    for c in done:
        (row,) = chat.rows(c.messages)
        cut = c.messages[-1]["ids"][-1] != STOP
        stops = [s for token, s in zip(row.tokens, row.supervised, strict=True) if token == STOP and s]
        assert len(stops) == (0 if cut else 1)
        assert row.supervised[-1]


def test_a_character_cut_in_half_by_the_limit_is_not_taught(chat: Chat, spec: TargetSpec, tmp_path: Path) -> None:
    ids = chat.ids("cat 🙂")  # the byte-level tokenizer writes the face in four tokens
    assert chat.tokenizer.decode(ids[:-1]).endswith("\ufffd"), "the limit must fall inside the character for this test to mean anything"
    (done,), _ = write(talks(1), chat, FakeEngine(spec, [ids], length=len(ids) - 1), tmp_path)
    (row,) = chat.rows(done.messages)
    taught = [token for token, s in zip(row.tokens, row.supervised, strict=True) if s]
    assert len(taught) > 0 and taught == ids[: len(taught)], "only tokens that the target wrote"


def test_a_prompt_that_the_template_refuses_leaves_its_conversation_at_the_answers_it_has(
    tiny_target: Path, spec: TargetSpec, words: list[list[int]], tmp_path: Path
) -> None:
    chat = load_chat(spec, False)
    chat.tokenizer.chat_template = "{% if messages[-1]['content'] == 'no' %}{{ raise_exception('no') }}{% endif %}" + chat.tokenizer.chat_template
    good, bad = talks(1)[0], Conversation("bad", [{"role": "user", "content": "no"}, {"role": "assistant", "content": None}], "f:1")
    done, counts = write([good, bad], chat, FakeEngine(spec, words), tmp_path)
    assert len(done[0].messages) == 2 and [m["role"] for m in done[1].messages] == ["user"]
    assert sum(counts.values()) == 1


def test_a_tool_call_without_text_is_an_answer_and_not_one_to_be_written() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
    talk = Conversation("t", [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "b"}], "f:1")
    assert next_open(with_open_answers(talk, "missing")) is None


def test_a_real_target_killed_after_its_first_batch_resumes_to_the_same_answers(
    chat: Chat, spec: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(spec, torch.device("cpu"), torch.float32, False)
    given = talks(7)
    whole, whole_counts = write(given, chat, engine, tmp_path / "whole", batch=3)
    real: Callable[..., list[Answer]] = engine.generate
    asked = []

    def once(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        if asked:
            raise Killed
        asked.append(len(prompts))
        return real(prompts, sampling)

    monkeypatch.setattr(engine, "generate", once)
    with pytest.raises(Killed):
        write(given, chat, engine, tmp_path / "part", batch=3)

    def counted(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        asked.append(len(prompts))
        return real(prompts, sampling)

    monkeypatch.setattr(engine, "generate", counted)
    done, counts = write(given, chat, engine, tmp_path / "part", batch=3)
    assert texts(done) == texts(whole) and counts == whole_counts
    assert asked == [3, 3, 1]

"""The target writes the answers that a conversation leaves open, turn after turn.

Answers are kept in `answers.jsonl` under a hash of all that they depend on, one batch an append: whoever is interrupted goes on with the
next batch, and a batch is written whole or again, so that resuming changes nothing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from eyas.artifact import hash_json, whole_lines
from eyas.prepare.chat import Chat, Unrenderable
from eyas.prepare.sources import Conversation, is_open
from eyas.progress import Task
from eyas.target.engine import Answer, Sampling, TargetEngine

FILE = "answers.jsonl"


def next_open(conversation: Conversation) -> int | None:
    """The position of the first answer still to be written."""
    return next((j for j, m in enumerate(conversation.messages) if is_open(m)), None)


def count_open(conversations: list[Conversation]) -> int:
    return sum(is_open(message) for c in conversations for message in c.messages)


def write_answers(
    conversations: list[Conversation],
    chat: Chat,
    engine: TargetEngine,
    sampling: Sampling,
    batch: int,
    setting: dict[str, str],
    folder: Path,
    task: Task,
    counts: Counter[str],
) -> list[Conversation]:
    """Fills every open answer; a conversation whose answer was cut off by the limit ends there.

    setting: what else an answer depends on (the target, its precision). counts: gets `answers_stopped` and `answers_cut`.
    """
    known = _read(folder / FILE)
    results = list(conversations)
    asked: Counter[str] = Counter()  # the same prompt asked again is another question, with an answer of its own
    with open(folder / FILE, "ab") as file:
        while True:
            prompts = {}
            for index, conversation in enumerate(results):
                if (j := next_open(conversation)) is not None:
                    try:
                        prompts[index] = chat.prompt_ids(conversation.messages[:j])
                    except Unrenderable:  # counted when rows are made
                        results[index] = replace(conversation, messages=conversation.messages[:j])
            if not prompts:
                return results
            # Prompts of like length share a batch: less padding. The order depends on content alone, so batches are the same when resumed.
            order = sorted(prompts, key=lambda index: (len(prompts[index]), results[index].id, index))
            for start in range(0, len(order), batch):
                group = order[start : start + batch]
                keys = []
                for index in group:
                    question = hash_json([prompts[index], sampling.__dict__, setting])
                    keys.append(f"{question}-{asked[question]}")
                    asked[question] += 1
                if all(key in known for key in keys):
                    task.skip(len(group))
                else:
                    seed = int(hash_json([sampling.seed, keys])[:12], 16)
                    answers = engine.generate([prompts[index] for index in group], replace(sampling, seed=seed))
                    file.write("".join(json.dumps({"key": key, **answer.__dict__}) + "\n" for key, answer in zip(keys, answers, strict=True)).encode())
                    file.flush()
                    os.fsync(file.fileno())
                    known.update(zip(keys, answers, strict=True))
                    task.advance(len(group), f"{sum(len(answer.tokens) for answer in answers):,} tokens in the last batch")
                for index, key in zip(group, keys, strict=True):
                    results[index] = _filled(results[index], known[key], chat)
                    counts["answers_stopped" if known[key].finish == "stop" else "answers_cut"] += 1


def _filled(conversation: Conversation, answer: Answer, chat: Chat) -> Conversation:
    j = next_open(conversation)
    assert j is not None
    rest = conversation.messages[j + 1 :] if answer.finish == "stop" else []
    return replace(conversation, messages=[*conversation.messages[:j], chat.answer(answer.tokens), *rest])


def _read(path: Path) -> dict[str, Answer]:
    entries = [json.loads(line) for line in whole_lines(path)]
    return {entry["key"]: Answer(entry["tokens"], entry["finish"]) for entry in entries}

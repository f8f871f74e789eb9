"""The target writes the answers that a conversation leaves open, turn after turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from eyas.prepare.ask import Asker
from eyas.prepare.chat import Chat, Unrenderable
from eyas.prepare.sources import Conversation, is_open
from eyas.progress import Task
from eyas.target.engine import Answer, Sampling


def next_open(conversation: Conversation) -> int | None:
    """The position of the first answer still to be written."""
    return next((j for j, m in enumerate(conversation.messages) if is_open(m)), None)


def count_open(conversations: list[Conversation]) -> int:
    return sum(is_open(message) for c in conversations for message in c.messages)


def write_answers(conversations: list[Conversation], chat: Chat, asker: Asker, sampling: Sampling, task: Task, counts: Counter[str]) -> list[Conversation]:
    """Fills every open answer; a conversation whose answer was cut off by the limit ends there.

    counts: gets `answers_stopped` and `answers_cut`.
    """
    results = list(conversations)
    while True:
        prompts = {}
        for index, conversation in enumerate(results):
            if (j := next_open(conversation)) is not None:
                try:
                    prompts[index] = chat.prompt_ids(conversation.messages[:j], conversation.frame)
                except Unrenderable:  # counted when rows are made
                    results[index] = replace(conversation, messages=conversation.messages[:j])
        if not prompts:
            return results
        # Prompts of like length share a batch: less padding. The order depends on content alone, so batches are the same when resumed.
        order = sorted(prompts, key=lambda index: (len(prompts[index]), results[index].id, index))
        for index, answer in zip(order, asker.ask([prompts[index] for index in order], sampling, task), strict=True):
            results[index] = _filled(results[index], answer, chat)
            counts["answers_stopped" if answer.finish == "stop" else "answers_cut"] += 1


def _filled(conversation: Conversation, answer: Answer, chat: Chat) -> Conversation:
    j = next_open(conversation)
    assert j is not None
    rest = conversation.messages[j + 1 :] if answer.finish == "stop" else []
    return replace(conversation, messages=[*conversation.messages[:j], chat.answer(answer.tokens), *rest])

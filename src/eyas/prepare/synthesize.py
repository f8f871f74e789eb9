"""The target writes user turns itself, so that a draft can be trained with no data set at all.

A chat model that is given its template up to where the user's text would stand goes on with what a user might ask (the idea is Magpie's,
arXiv 2406.08464). In: the template. Out: conversations of one user turn, the answer left open.

    <|im_start|>user\\n   How do tides work?   <|im_end|>   \\n<|im_start|>assistant\\n
    ----- prompt -----   - the target writes -  ends a turn   not asked for
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import takewhile

from eyas.artifact import hash_json
from eyas.errors import UserError
from eyas.prepare.ask import Asker
from eyas.prepare.chat import Chat, Unrenderable
from eyas.prepare.sources import Conversation
from eyas.progress import Task
from eyas.target.engine import Answer, Sampling

SOURCE = "synthesized"
SENTINEL = "theeyasuserturn"  # letters alone, because some templates strip; "the", because every tokenizer joins it to a space before it
TRIES = 3  # for each turn that is wanted


@dataclass(frozen=True)
class EmptyTurn:
    """The template around the user's text. `prompt` is what a server's prompt begins with, whatever the user says."""

    prompt: list[int]
    end_text: str  # plain text that ends the user's, in templates without a token for it; else empty
    end_ids: tuple[int, ...]  # the first marker behind the user's text that is a token of its own
    markers: frozenset[int]  # tokens that no user's text holds


@dataclass
class Synthesis:
    """`conversations` are the usable turns, each with an open answer; `dropped` counts the others by reason."""

    conversations: list[Conversation] = field(default_factory=list)
    tried: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def empty_turn(chat: Chat) -> EmptyTurn:
    """Raises UserError for a template in which the user's text has no place of its own."""
    try:
        text = chat.text([{"role": "user", "content": SENTINEL}], generation_prompt=True)
    except Unrenderable as reason:
        raise _impossible(str(reason)) from None
    before, found, after = text.partition(SENTINEL)
    if not found or SENTINEL in after:
        raise _impossible("the chat template does not write a user's text once and as it is")
    whole = chat.ids(text)
    # Not all of `before`: a space there belongs to the token of the user's first word, so the target must write it.
    prompt = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chat.ids(before), whole, strict=False))]
    if not prompt:
        raise _impossible("the chat template writes nothing before a user's text")
    added = chat.tokenizer.added_tokens_decoder
    # Markers are not only the tokens called special: DeepSeek's <|Assistant|> is not. Runs of spaces are no markers at all.
    own = {index: str(token) for index, token in added.items() if str(token).strip()}
    end = next((token for token in chat.ids(after) if token in own), None)
    return EmptyTurn(
        prompt=prompt,
        end_text=(after if end is None else after.partition(own[end])[0]).strip(),
        end_ids=() if end is None else (end,),
        markers=frozenset(index for index in own if added[index].special or index in whole),
    )


def _impossible(reason: str) -> UserError:
    return UserError(f"data.synthesize is not possible with this target: {reason}. Set it to 0 and name files in data.conversations.")


def synthesize(
    num: int,
    turn: EmptyTurn,
    chat: Chat,
    asker: Asker,
    sampling: Sampling,
    max_length: int,
    given: set[str],
    open_task: Callable[[int], AbstractContextManager[Task]],
) -> Synthesis:
    """Samples user turns until `num` are usable or TRIES times as many were tried.

    sampling: its limit and seed count; turns are drawn from the target's own distribution, because a sharper one asks the same few questions.
    max_length: tokens of a row. given: user turns that are there already. open_task: shows the writing of so many turns.
    """
    sampling = replace(sampling, temperature=1.0, top_p=1.0, extra_stop_ids=turn.end_ids)
    found, seen = Synthesis(), set(given)
    while missing := min(num - len(found.conversations), TRIES * num - found.tried):
        with open_task(missing) as task:
            answers = asker.ask([turn.prompt] * missing, sampling, task)
        found.tried += missing
        for answer in answers:
            try:
                text = _user_text(answer, turn, chat, max_length)
                if text in seen:
                    raise Unrenderable("duplicate")
            except Unrenderable as reason:
                found.dropped[str(reason)] += 1
                continue
            seen.add(text)
            user = {"role": "user", "content": text}
            found.conversations.append(Conversation(f"{SOURCE}-{hash_json([user])[:16]}", [user, {"role": "assistant", "content": None}], SOURCE))
    return found


def _user_text(answer: Answer, turn: EmptyTurn, chat: Chat, max_length: int) -> str:
    """What the target wrote as a user. Raises Unrenderable if no user would have sent it."""
    text = chat.decode(answer.tokens[:-1] if answer.finish == "stop" else answer.tokens)
    ended = answer.finish == "stop"
    if turn.end_text:
        text, marker, _ = text.partition(turn.end_text)
        ended = ended or bool(marker)
    text = text.strip()
    if not ended:
        raise Unrenderable("no end within data.max_new_tokens")
    if not text:
        raise Unrenderable("empty")
    if not turn.markers.isdisjoint(chat.ids(text)):
        raise Unrenderable("a special token inside")
    if len(chat.prompt_ids([{"role": "user", "content": text}])) + 2 > max_length:
        raise Unrenderable("no room for an answer within data.max_length")
    return text

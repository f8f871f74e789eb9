"""Data files -> conversations.

In: JSONL files. Out: one `Conversation` a line, its messages checked, still text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.artifact import hash_json
from eyas.errors import UserError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """`messages` in the OpenAI form; an assistant message whose content is None is one that the target is to write."""

    id: str
    messages: list[Message]
    where: str  # file and line, for messages to the user; "synthesized" if the target wrote the user turn
    category: str = ""


def read_conversations(paths: list[str]) -> Iterator[Conversation]:
    """Raises UserError, with file and line, for a file that is missing, empty or not JSONL, and for a row that is no conversation."""
    for path in paths:
        number = 0
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _conversation(line, f"{path}:{number}")
        except IsADirectoryError:
            raise UserError(f"{path} is a folder; name the JSONL files in it.") from None
        except FileNotFoundError:
            raise UserError(f"{path} does not exist. Mend the path in the run file; it is relative to the run file's folder.") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from None
        if number == 0:
            raise UserError(f"{path} is empty. Give a JSONL file with one conversation or prompt a line.")


def _conversation(line: bytes, where: str) -> Conversation:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: a hundred thousand brackets
        raise UserError(f"{where} is not JSON: {error}. Each line must be one JSON object.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, not an object. A row has messages, prompt or turns.")
    messages = _messages(row, where)
    name = str(row["id"]) if row.get("id") is not None else hash_json(messages)[:16]
    category = str(row.get("category") or "")
    for key, value in (("id", name), ("category", category)):
        if not _encodable(value):
            raise UserError(f"{where}: {key} holds a lone surrogate, half a character. Mend the row.")
    return Conversation(name, messages, where, category)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_open(message: Message) -> bool:
    """Whether the target is to write this message; one that calls a tool has no text and is complete."""
    return message["role"] == "assistant" and message["content"] is None and not message.get("tool_calls")


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    if "messages" in row:
        messages = row["messages"]
    elif "turns" in row:
        messages = _each_answered(row["turns"], where)
    elif "prompt" in row:
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise UserError(f"{where} has {', '.join(row) or 'no keys'}; a row needs messages (OpenAI form), prompt (text) or turns (a list of texts).")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list with at least one message.")
    for position, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise UserError(f"{where}: message {position} has role {role!r}; it must be one of {', '.join(ROLES)}.")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and role == "assistant"):
            raise UserError(f"{where}: message {position} has content of type {type(content).__name__}; it must be text.")
        if isinstance(content, str) and not _encodable(content):
            raise UserError(f"{where}: message {position} holds a lone surrogate, half a character, which no tokenizer can read. Mend the row.")
    return [{key: value for key, value in message.items() if key != "ids"} for message in messages]  # "ids" is ours: tokens that the target sampled


def _each_answered(turns: Any, where: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: turns must be a list with at least one text.")
    return [message for turn in turns for message in ({"role": "user", "content": turn}, {"role": "assistant", "content": None})]


def with_open_answers(conversation: Conversation, regenerate: str) -> Conversation:
    """Marks the answers that the target is to write: as data.regenerate says.

    Raises UserError if it is "never" and there is no answer at all.
    """
    messages = list(conversation.messages)
    if regenerate == "never":
        while messages and (messages[-1]["role"] != "assistant" or is_open(messages[-1])):
            messages.pop()
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError(
                f'{conversation.where} has no assistant turn to learn from. Set data.regenerate = "missing" to let the target answer it, or remove the row.'
            )
    else:
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        if regenerate == "all":
            messages = [{"role": "assistant", "content": None} if message["role"] == "assistant" else message for message in messages]
    return replace(conversation, messages=messages)


def source_hashes(paths: list[str], hash_file: Callable[[Path], str]) -> dict[str, str]:
    """Each file's name and place in the list -> its content's hash, what a stage's result depends on. Folders do not count: a moved run stays valid.

    Raises UserError for a missing file.
    """
    hashes = {}
    for number, path in enumerate(paths):
        if not Path(path).is_file():
            raise UserError(f"{path} does not exist or is no file. Mend the path in the run file; it is relative to the run file's folder.")
        hashes[f"{number}: {Path(path).name}"] = hash_file(Path(path))
    return hashes

"""Data files -> rendered conversations, on all cores, in the order of the files.

A row of a file goes in and one of three comes out: what is wrong with it, a conversation whose answers the target has yet to write, or rows of tokens.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from eyas.config import DataSection, RunConfig
from eyas.errors import UserError
from eyas.prepare.chat import Chat, Row, Unrenderable, load_chat
from eyas.prepare.sources import Conversation, RawRow, bytes_of, conversation_of, is_open, raw_rows, up_to_first_user, with_open_answers
from eyas.progress import Task
from eyas.target.spec import TargetSpec

ALONE_BYTES = 8 << 20  # files up to this together are rendered sooner than other processes would start
CHUNK_ROWS, CHUNK_BYTES = 256, 4 << 20


@dataclass(frozen=True)
class Rendered:
    """rows: tokens int32 [T] and supervised bool [T] each. dropped: a reason for each row, or the conversation, that is left out. opening: what prompts.jsonl
    says of it; asked: the hash of its first user turn, None if there is none. users: its user turns, if they are wanted."""

    id: str
    where: str
    form: str
    asked: int | None
    opening: dict[str, Any]
    rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    clipped: int = 0
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bad:
    sentence: str


Outcome = Bad | Conversation | Rendered


def render_files(config: RunConfig, spec: TargetSpec, chat: Chat, task: Task) -> Iterator[Outcome]:
    """Raises UserError for a file that is missing, empty or cannot be read."""
    rows = raw_rows(config.data.conversations)
    workers = len(os.sched_getaffinity(0))
    from_hub = any(not isinstance(source, str) and source.hub for source in config.data.conversations)
    if workers == 1 or (bytes_of(config.data.conversations) <= ALONE_BYTES and not from_hub):
        for row in rows:
            yield outcome(row, chat, config.data)
            task.advance(row.size / 1e6)
        return
    waiting: deque[tuple[int, Future[list[Outcome]]]] = deque()
    chunks = _chunks(rows)
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks without the threads
    with ProcessPoolExecutor(workers, context, _start, (spec, config, os.getpid())) as pool:
        try:
            while True:
                while len(waiting) < 4 * workers and (chunk := next(chunks, None)):
                    waiting.append((sum(row.size for row in chunk), pool.submit(_outcomes, chunk)))
                if not waiting:
                    return
                size, future = waiting.popleft()
                yield from future.result()
                task.advance(size / 1e6)
        except BrokenProcessPool:
            raise UserError("A process that rendered conversations died, perhaps for want of memory. `eyas prepare` begins again from the files.") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    """So many rows that handing them over costs little, and so few bytes that all that wait fit into memory."""
    chunk: list[RawRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.data) if isinstance(row.data, bytes) else row.size
        if len(chunk) == CHUNK_ROWS or size > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def outcome(row: RawRow, chat: Chat, data: DataSection) -> Outcome:
    try:
        conversation = with_open_answers(conversation_of(row.data, row.where), data.regenerate)
    except UserError as error:
        return Bad(str(error))
    return conversation if any(is_open(message) for message in conversation.messages) else render(conversation, chat, data)


def render(conversation: Conversation, chat: Chat, data: DataSection) -> Rendered:
    """Rows cut to data.max_length, or dropped, as data.too_long says."""
    opening = up_to_first_user(conversation.messages)
    asked = opening[-1]["content"] if opening else None
    about = {"id": conversation.id, "category": conversation.category or "held out", "messages": opening}
    frame = {"tools": conversation.frame.tools, "chat_template_kwargs": conversation.frame.template_kwargs}
    prompt = {**about, **{key: value for key, value in frame.items() if value}}
    users = tuple(message["content"] for message in conversation.messages if message["role"] == "user") if data.synthesize else ()
    # Case and spaces do not make another question.
    asked_hash = None if asked is None else xxhash.xxh3_64_intdigest(" ".join(asked.casefold().split()).encode())
    found = Rendered(conversation.id, conversation.where, conversation.form, asked_hash, prompt, users=users)
    if not conversation.tokens and not any(message["role"] == "assistant" for message in conversation.messages):
        found.dropped.append("the chat template refuses its prompt")
        return found
    try:
        rows = [Row(*conversation.tokens)] if conversation.tokens else chat.rows(conversation.messages, conversation.frame)
    except Unrenderable as reason:
        found.dropped.append(str(reason))
        return found
    clipped = 0
    for row in rows:
        too_long = len(row.tokens) > data.max_length
        supervised = np.array(row.supervised[: data.max_length], dtype=np.bool_)
        if too_long and data.too_long == "drop":
            found.dropped.append("longer than data.max_length")
        # A row teaches something only if two supervised tokens stand side by side: one to read, one to predict.
        elif not (supervised[:-1] & supervised[1:]).any():
            found.dropped.append("no supervised pair within data.max_length" if too_long else "answer of fewer than two tokens")
        else:
            clipped += too_long
            found.rows.append((np.array(row.tokens[: data.max_length], dtype=np.int32), supervised))
    return replace(found, clipped=clipped)


_made: dict[str, Any] = {}  # of a worker process


def _start(spec: TargetSpec, config: RunConfig, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _made["chat"] = load_chat(spec, config.target.trust_remote_code, config.data.chat_template_kwargs)
    _made["data"] = config.data


def _end_with(parent: int) -> None:
    """kill -9 of the parent tells its children nothing."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _outcomes(chunk: list[RawRow]) -> list[Outcome]:
    return [outcome(row, _made["chat"], _made["data"]) for row in chunk]

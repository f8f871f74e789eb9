"""Data files -> conversations.

In: JSONL or JSON files, also compressed with gzip, parquet files, folders of them, patterns, Hugging Face data sets. Out: one `Conversation` a row, its
messages checked, still text. The form of a row is told by its keys:

    messages                         the OpenAI form, content as text or as text parts
    conversations / conversation     ShareGPT: from and value a message; or the OpenAI form under this name
    instruction, input?, output?     Alpaca
    prompt, completion? / response?  one user turn, and its answer
    turns                            several user turns
    input_ids, loss_mask / labels    tokens already: 1 or true where the draft is to learn, or the token itself and -100 elsewhere

Beside them may stand id, category, tools and chat_template_kwargs.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from eyas.artifact import hash_json
from eyas.config import SourceSection
from eyas.errors import UserError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
    "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".jsonl.gz", ".ndjson.gz", ".json.gz")


@dataclass(frozen=True)
class Frame:
    """What a chat template is given beside the messages: the tools on offer, and its own switches."""

    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


PLAIN = Frame()


@dataclass(frozen=True)
class Conversation:
    """`messages` in the OpenAI form; an assistant message whose content is None is one that the target is to write."""

    id: str
    messages: list[Message]
    where: str  # file and line, for messages to the user; "synthesized" if the target wrote the user turn
    category: str = ""
    form: str = "messages"  # what its row looked like
    frame: Frame = PLAIN
    tokens: tuple[list[int], list[bool]] | None = None  # with what is supervised, instead of messages


Source = str | SourceSection


def data_files(sources: Sequence[Source]) -> list[str]:
    """The files of all sources, in order. Raises UserError for a folder or pattern that stands for none."""
    return [file for source in sources if isinstance(source, str) or source.path for file in _files(source if isinstance(source, str) else source.path)]


def bytes_of(sources: Sequence[Source]) -> int:
    """Of all files together; one that is missing is named when it is read."""
    return sum(Path(path).stat().st_size for path in data_files(sources) if Path(path).is_file())


def _files(name: str) -> list[str]:
    """Those of a folder or pattern in order of their paths."""
    if Path(name).is_dir():
        # Not those of folders in it, among which may be a run folder: a pattern with ** finds them.
        found = sorted(str(path) for path in Path(name).iterdir() if path.name.endswith(SUFFIXES) and path.is_file())
        if not found:
            raise UserError(f"{name} is a folder without data files; they end in {', '.join(SUFFIXES[:4])}, or, but for the last, in these and .gz.")
        return found
    if glob.has_magic(name) and not Path(name).exists():
        found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
        if not found:
            raise UserError(f"No file matches {name}. Mend the pattern in the run file; it is relative to the run file's folder.")
        return found
    return [name]


@dataclass(frozen=True)
class RawRow:
    """where: file and line. data: the line, or what was parsed from a JSON list. size: bytes of the file that were read for it."""

    where: str
    data: Any
    size: int


def read_conversations(sources: Sequence[Source]) -> Iterator[Conversation]:
    """Raises UserError for a file that is missing, empty or cannot be read, and for a row that is no conversation."""
    for row in raw_rows(sources):
        yield conversation_of(row.data, row.where)


def raw_rows(sources: Sequence[Source]) -> Iterator[RawRow]:
    """The chosen rows of each source in turn. Raises UserError for a file that is missing, empty or cannot be read."""
    for source in sources:
        if isinstance(source, str):
            yield from _rows_of(source)
            continue
        chosen = (row for row in (_hub_rows(source) if source.hub else _rows_of(source.path)) if _in_share(row, source.share))
        yield from (_mapped(row, source.map) for row in islice(chosen, source.cap))


def _rows_of(name: str) -> Iterator[RawRow]:
    for path in _files(name):
        rows = 0
        for row in _parquet_rows(path) if path.endswith(".parquet") else _raw_rows(path):
            rows += 1
            yield row
        if rows == 0:
            raise UserError(f"{path} is empty. Give a JSONL file with one conversation or prompt a line.")


def _in_share(row: RawRow, share: float) -> bool:
    if share == 1.0:
        return True
    data = row.data.strip() if isinstance(row.data, bytes) else json.dumps(row.data, default=str).encode()
    return xxhash.xxh3_64_intdigest(data) < share * 2**64


def _mapped(row: RawRow, places: dict[str, str]) -> RawRow:
    """The row with the keys that it is to have. One that cannot be read stays as it is, and is refused for that later."""
    if not places:
        return row
    data = row.data
    if isinstance(data, bytes):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError):
            return row
    if not isinstance(data, dict):
        return row
    found = {}
    for key, place in places.items():
        value: Any = data
        for part in place.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[key] = value
    return replace(row, data=found)


def _parquet_rows(path: str) -> Iterator[RawRow]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} is a parquet file, and reading those needs the package pyarrow. Install it: pip install 'eyas[data]'.") from None
    try:
        with parquet.ParquetFile(path) as file:
            size = Path(path).stat().st_size // max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    yield RawRow(f"{path}[{number}]", row, size)
                    number += 1
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Mend the path in the run file; it is relative to the run file's folder.") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is no sound parquet file: {str(error).splitlines()[0]}") from None


def _hub_rows(source: SourceSection) -> Iterator[RawRow]:
    for number, row in enumerate(_hub_data(source)):
        yield RawRow(f"{source.hub}[{number}]", row, 0)


@functools.cache
def _hub(name: str, config: str | None, split: str, revision: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name} is a Hugging Face data set, and reading those needs the package datasets. Install it: pip install 'eyas[data]'.") from None
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # of the hub, of the network, of the data set's own files
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"The data set {name} cannot be loaded: {first} Mend hub, config, split or revision in data.conversations.") from None


def _hub_data(source: SourceSection) -> Any:
    return _hub(source.hub, source.config or None, source.split, source.revision or None)


def _raw_rows(path: str) -> Iterator[RawRow]:
    try:
        with open(path, "rb") as on_disk, gzip.GzipFile(fileobj=on_disk) if path.endswith(".gz") else on_disk as file:
            if path.removesuffix(".gz").endswith(".json") and (listed := _listed(file.read())) is not None:
                size = on_disk.tell() // max(1, len(listed))
                yield from (RawRow(f"{path}[{number}]", row, size) for number, row in enumerate(listed))
                return
            file.seek(0)
            before = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    at = on_disk.tell()
                    yield RawRow(f"{path}:{number}", line, at - before)
                    before = at
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; name the files in it.") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Mend the path in the run file; it is relative to the run file's folder.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is no whole gzip file: {str(error).rstrip('.')}. Fetch or compress it again.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _listed(data: bytes) -> list[Any] | None:
    """The rows of a JSON list; None for anything else, which is read line by line."""
    if data.lstrip()[:1] != b"[":
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def conversation_of(line: Any, where: str) -> Conversation:
    """A line of JSON, or what was parsed from one, as a conversation. Raises UserError, with `where`, for one that is none."""
    try:
        row = json.loads(line) if isinstance(line, bytes) else line
    except (ValueError, RecursionError) as error:  # RecursionError: a hundred thousand brackets
        raise UserError(f"{where} is not JSON: {error}. Each line must be one JSON object.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, not an object. A row has messages, prompt or turns.")
    tokens = _tokens(row, where) if "input_ids" in row else None
    form, messages = ("input_ids", []) if tokens else _messages(row, where)
    name = str(row["id"]) if row.get("id") is not None else hash_json(tokens or messages)[:16]
    category = str(row.get("category") or "")
    for key, value in (("id", name), ("category", category)):
        if not encodable(value):
            raise UserError(f"{where}: {key} holds a lone surrogate, half a character. Mend the row.")
    frame = Frame(_of_type(row, "tools", list, where) or None, _of_type(row, "chat_template_kwargs", dict, where) or {})
    return Conversation(name, messages, where, category, form, frame, tokens)


def _tokens(row: dict[str, Any], where: str) -> tuple[list[int], list[bool]]:
    ids, mask, labels = row["input_ids"], row.get("loss_mask"), row.get("labels")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise UserError(f"{where}: input_ids must be a list of token ids.")
    given = labels if mask is None else mask
    if not isinstance(given, list) or len(given) != len(ids):
        raise UserError(f"{where}: beside input_ids, loss_mask or labels must stand, as long as they are ({len(ids):,}).")
    if mask is not None:
        if any(value not in (0, 1) for value in mask):
            raise UserError(f"{where}: loss_mask must hold 0 and 1.")
        return ids, [bool(value) for value in mask]
    if any(label not in (-100, token) for label, token in zip(given, ids, strict=True)):
        raise UserError(f"{where}: labels must be the input_ids themselves, not shifted, and -100 where nothing is to be learnt.")
    return ids, [label != -100 for label in given]


def _of_type(row: dict[str, Any], key: str, kind: type, where: str) -> Any:
    """The row's value under `key`, which may also be that value as JSON text; None if it has none."""
    value = row.get(key)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{where}: {key} is {type(value).__name__}; it must be {'a list' if kind is list else 'an object'}.")
    return value


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_open(message: Message) -> bool:
    """Whether the target is to write this message; one that calls a tool has no text and is complete."""
    return message["role"] == "assistant" and message["content"] is None and not message.get("tool_calls")


def up_to_first_user(messages: list[Message]) -> list[Message]:
    """The messages up to the first user turn with it; none if there is no such turn."""
    return next((messages[: j + 1] for j, message in enumerate(messages) if message["role"] == "user"), [])


def _messages(row: dict[str, Any], where: str) -> tuple[str, list[Message]]:
    """(name of the row's form, its messages)."""
    listed = next((name for name in ("messages", "conversations", "conversation") if name in row), None)
    if listed:
        form, messages = "messages", row[listed]
        if isinstance(messages, list) and any(isinstance(message, dict) and "from" in message for message in messages):
            form, messages = "ShareGPT", [_from_sharegpt(message) for message in messages]
    elif "turns" in row:
        form, messages = "turns", _each_answered(row["turns"], where)
    elif "instruction" in row:
        form, messages = "Alpaca", _asked(_joined(row["instruction"], row.get("input")), row.get("output"))
    elif "prompt" in row:
        form, messages = "prompt", _asked(row["prompt"], row.get("completion", row.get("response")))
    else:
        raise UserError(
            f"{where} has {', '.join(row) or 'no keys'}; a row needs messages (OpenAI form), conversations (ShareGPT), instruction (Alpaca), prompt (text) or "
            f"turns (a list of texts)."
        )
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list with at least one message.")
    return form, [_checked(message, position, where) for position, message in enumerate(messages)]


def _checked(message: Any, position: int, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise UserError(f"{where}: message {position} has role {role!r}; it must be one of {', '.join(ROLES)}.")
    content = message.get("content")
    if (
        isinstance(content, list)
        and content
        and all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content)
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        kinds = sorted({str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content}) if isinstance(content, list) else []
        found = f"parts of type {', '.join(kinds)}" if kinds else f"type {type(content).__name__}"
        raise UserError(f"{where}: message {position} has content of {found}; it must be text.")
    if isinstance(content, str) and not encodable(content):
        raise UserError(f"{where}: message {position} holds a lone surrogate, half a character, which no tokenizer can read. Mend the row.")
    # None: what a table has for a key that other rows have. "ids" is ours: tokens that the target sampled.
    return {**{key: value for key, value in message.items() if key != "ids" and value is not None}, "content": content}


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    name = message.get("from")
    return {"role": SHAREGPT_ROLES.get(name.lower(), name) if isinstance(name, str) else name, "content": message.get("value")}


def _joined(instruction: Any, given: Any) -> Any:
    return f"{instruction}\n\n{given}" if isinstance(instruction, str) and isinstance(given, str) and given.strip() else instruction


def _asked(question: Any, answer: Any) -> list[Message]:
    return [{"role": "user", "content": question}, *([] if answer is None else [{"role": "assistant", "content": answer}])]


def _each_answered(turns: Any, where: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: turns must be a list with at least one text.")
    return [message for turn in turns for message in ({"role": "user", "content": turn}, {"role": "assistant", "content": None})]


def with_open_answers(conversation: Conversation, regenerate: str) -> Conversation:
    """Marks the answers that the target is to write: as data.regenerate says. Tokens stay as they are.

    Raises UserError if it is "never" and there is no answer at all.
    """
    messages = list(conversation.messages)
    if conversation.tokens:
        return conversation
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


def source_hashes(sources: Sequence[Source], hash_file: Callable[[Path], str]) -> dict[str, str]:
    """Each file's name and place in the list -> its content's hash, what a stage's result depends on; of a table, also what it chooses. Folders do not count:
    a moved run stays valid.

    Raises UserError for a missing file.
    """
    hashes = {}
    number = 0
    for source in sources:
        chosen = "" if isinstance(source, str) else source.model_dump_json(exclude_defaults=True, exclude={"path", "revision"})
        if not isinstance(source, str) and source.hub:
            files = sorted(entry["filename"] for entry in _hub_data(source).cache_files)
        else:
            files = _files(source if isinstance(source, str) else source.path)
        for path in files:
            if not Path(path).is_file():
                raise UserError(f"{path} does not exist or is no file. Mend the path in the run file; it is relative to the run file's folder.")
            hashes[f"{number}: {Path(path).name}{chosen if chosen != '{}' else ''}"] = hash_file(Path(path))
            number += 1
    return hashes

"""The stage `prepare`: data files, or the target alone -> rows of tokens with supervised spans.

Out, in prepare/: rows.safetensors (tokens int32 [T], supervised bool [T], offsets int64 [R + 1], holdout bool [R]),
rows.jsonl (a line a row: key, conversation, source, sizes), answers.jsonl (what the target wrote),
prompts.jsonl (held-out conversations up to their first user turn, for evaluation).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.artifact import hash_file, write_bytes, write_tensors
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.prepare.ask import FILE as ANSWERS
from eyas.prepare.ask import Asker
from eyas.prepare.chat import Chat, Row, Unrenderable, load_chat
from eyas.prepare.regenerate import count_open, write_answers
from eyas.prepare.sources import Conversation, read_conversations, source_hashes, up_to_first_user, with_open_answers
from eyas.prepare.synthesize import EmptyTurn, Synthesis, empty_turn, synthesize
from eyas.progress import Reporter
from eyas.stage import Context, Result
from eyas.target.engine import Sampling, open_engine, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec

REUSABLE = (ANSWERS,)
ROWS = "rows.safetensors"
PROMPTS = "prompts.jsonl"
BAD_SHARE = 0.01  # of the rows, that may be no conversations and are left out with a warning


@dataclass(frozen=True)
class PreparedRow:
    """tokens int32 [T], supervised bool [T]; `key` is a hash of both, the name under which features are stored."""

    key: str
    tokens: torch.Tensor
    supervised: torch.Tensor
    holdout: bool


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    data = config.data.model_dump(exclude={"conversations", "generate_batch"})
    writes = config.data.regenerate != "never" or config.data.synthesize > 0
    return {
        "data": data,
        "run": {"seed": config.run.seed},
        "sources": source_hashes(config.data.conversations, hash_file),
        "target": {"tokenizer": spec.fingerprint["tokenizer"], "weights": spec.fingerprint["weights"] if writes else ""},
    }


def work(context: Context) -> Result:
    config, spec, folder = context.config, context.spec, context.folder
    chat = load_chat(spec, config.target.trust_remote_code, config.data.chat_template_kwargs)
    counts: Counter[str] = Counter()
    conversations, num_bad = _read(config, context.reporter)
    turn = empty_turn(chat) if config.data.synthesize else None  # before the target is loaded, which may take long
    synthesis = Synthesis()
    if turn or count_open(conversations):
        conversations, synthesis = _written(context, conversations, turn, chat, counts)
    counts["conversations"], counts["bad_rows"] = len(conversations), num_bad
    dropped: Counter[str] = Counter()
    rows, lines = [], []
    seen: set[str] = set()
    for conversation in conversations:
        for row in _rows(conversation, chat, config.data.max_length, counts, dropped):
            prepared = PreparedRow(row_key(row), torch.tensor(row.tokens, dtype=torch.int32), torch.tensor(row.supervised), _held_out(conversation.id, config))
            if prepared.key in seen:
                dropped["duplicate"] += 1
                continue
            seen.add(prepared.key)
            rows.append(prepared)
            lines.append(
                {
                    "key": prepared.key,
                    "conversation": conversation.id,
                    "source": conversation.where,
                    "tokens": len(row.tokens),
                    "supervised": sum(row.supervised),
                    "holdout": prepared.holdout,
                }
            )
    _check_kept(rows, dropped, context.reporter)
    _write(folder, rows, lines)
    kept_held_out = {(line["source"], line["conversation"]) for line in lines if line["holdout"]}
    _write_prompts(folder, [conversation for conversation in conversations if (conversation.where, conversation.id) in kept_held_out])
    counts.update(
        rows=len(rows),
        holdout_rows=sum(row.holdout for row in rows),
        tokens=sum(len(row.tokens) for row in rows),
        supervised=sum(int(row.supervised.sum()) for row in rows),
    )
    share = counts["supervised"] / counts["tokens"]
    context.reporter.say(
        f"prepare: {counts['conversations']:,} conversations -> {counts['rows']:,} rows ({counts['holdout_rows']:,} held out), {counts['tokens']:,} tokens, "
        f"{share:.0%} supervised; {counts['clipped']:,} clipped, {sum(dropped.values()):,} dropped{_reasons(dropped)}"
    )
    manifest: dict[str, Any] = {**counts, "dropped": dict(dropped)}
    if synthesis.tried:
        manifest["synthesized"] = {"tried": synthesis.tried, "usable": len(synthesis.conversations), "dropped": dict(synthesis.dropped)}
    return Result(manifest, content=hash_file(folder / ROWS))


def _read(config: RunConfig, reporter: Reporter) -> tuple[list[Conversation], int]:
    """(conversations, rows that are none). Raises UserError if more than a few are none: then something else is wrong with the data."""
    bad: list[str] = []
    conversations = []
    for conversation in read_conversations(config.data.conversations, bad):
        try:
            conversations.append(with_open_answers(conversation, config.data.regenerate))
        except UserError as error:
            bad.append(str(error))
    total = len(conversations) + len(bad)
    if len(bad) > BAD_SHARE * total:
        raise UserError(bad[0] if len(bad) == 1 else f"{bad[0]} ({len(bad):,} of {total:,} rows are bad; up to {BAD_SHARE:.0%} would be left out.)")
    for sentence in bad[:5]:
        reporter.say(f"prepare: warning: left out: {sentence}")
    if len(bad) > 5:
        reporter.say(f"prepare: warning: left out: {len(bad) - 5:,} more rows that are no conversations")
    forms = Counter(conversation.form for conversation in conversations)
    if set(forms) - {"messages"}:
        reporter.say(f"prepare: rows read as {', '.join(f'{form} ({count:,})' for form, count in forms.most_common())}")
    return conversations, len(bad)


def _written(
    context: Context, conversations: list[Conversation], turn: EmptyTurn | None, chat: Chat, counts: Counter[str]
) -> tuple[list[Conversation], Synthesis]:
    """All that the target writes: with `turn` conversations beside those given, then every open answer. Raises UserError if no written turn is usable."""
    config = context.config
    dtype = resolve_dtype(config.target.dtype, resolve_device(config.target.device))
    # vLLM queues what does not fit; transformers holds the whole batch in memory.
    batch = config.data.generate_batch or (1024 if config.target.engine == "vllm" else 16)
    sampling = Sampling(config.data.max_new_tokens, config.data.temperature, config.data.top_p, config.run.seed)
    with closing(open_engine(config, context.spec, context.folder / "engine.log", context.reporter.say)) as engine:
        asker = Asker(engine, batch, {"target": context.spec.fingerprint["weights"], "dtype": str(dtype)}, context.folder)
        synthesis = _synthesized(context, conversations, turn, chat, asker, sampling) if turn else Synthesis()
        conversations = conversations + synthesis.conversations
        with context.reporter.task(context.folder, "writing answers", count_open(conversations), "answers") as task:
            return write_answers(conversations, chat, asker, sampling, task, counts), synthesis


def _synthesized(context: Context, conversations: list[Conversation], turn: EmptyTurn, chat: Chat, asker: Asker, sampling: Sampling) -> Synthesis:
    data, reporter = context.config.data, context.reporter
    found = synthesize(
        data.synthesize,
        turn,
        chat,
        asker,
        sampling,
        data.max_length,
        {message["content"] for conversation in conversations for message in conversation.messages if message["role"] == "user"},
        lambda num: reporter.task(context.folder, "writing user turns", num, "turns"),
    )
    usable = len(found.conversations)
    tally = f"{usable:,} of {found.tried:,} user turns that the target wrote are usable{_reasons(found.dropped)}"
    if not usable:
        raise UserError(f"data.synthesize = {data.synthesize:,}: {tally}. Mend what the reasons name, or set it to 0 and name files in data.conversations.")
    reporter.say(f"prepare: {tally}")
    if usable < data.synthesize:
        reporter.say(f"prepare: warning: data.synthesize asks for {data.synthesize:,} conversations; going on with {usable:,}")
    return found


def _rows(conversation: Conversation, chat: Chat, max_length: int, counts: Counter[str], dropped: Counter[str]) -> Iterator[Row]:
    """Rows of one conversation, cut to max_length tokens; what is not usable goes to `dropped` by reason."""
    if not any(message["role"] == "assistant" for message in conversation.messages):
        dropped["the chat template refuses its prompt"] += 1
        return
    try:
        rows = chat.rows(conversation.messages, conversation.frame)
    except Unrenderable as reason:
        dropped[str(reason)] += 1
        return
    for row in rows:
        clipped = Row(row.tokens[:max_length], row.supervised[:max_length])
        # A row teaches something only if two supervised tokens stand side by side: one to read, one to predict.
        if not any(a and b for a, b in zip(clipped.supervised, clipped.supervised[1:], strict=False)):
            dropped["no supervised pair within data.max_length" if len(row.tokens) > max_length else "answer of fewer than two tokens"] += 1
            continue
        counts["clipped"] += len(row.tokens) > max_length
        yield clipped


def row_key(row: Row) -> str:
    """The name of a row in the feature store: a hash of its tokens and supervised spans."""
    digest = xxhash.xxh3_128(torch.tensor(row.tokens, dtype=torch.int32).numpy().tobytes())
    digest.update(bytes(row.supervised))
    return digest.hexdigest()


def _held_out(conversation: str, config: RunConfig) -> bool:
    """Depends on the conversation's id and the seed alone, so that more data never moves a conversation to the other side."""
    return xxhash.xxh3_64_intdigest(f"{config.run.seed} {conversation}".encode()) < config.data.holdout * 2**64


def _reasons(dropped: Counter[str]) -> str:
    return f" ({'; '.join(f'{count:,} {reason}' for reason, count in dropped.most_common(5))})" if dropped else ""


def _check_kept(rows: list[PreparedRow], dropped: Counter[str], reporter: Reporter) -> None:
    if not rows:
        raise UserError(
            f"No row is left to train on: {_reasons(dropped).strip(' ()') or 'the data files hold no conversations'}. Mend the data or the settings in [data]."
        )
    if all(row.holdout for row in rows):
        raise UserError("All conversations fell into the held-out part. Give more data, or set data.holdout = 0.")
    if sum(dropped.values()) > len(rows):
        reporter.say(f"prepare: warning: more rows were dropped than kept{_reasons(dropped)}")


def _write(folder: Path, rows: list[PreparedRow], lines: list[dict[str, Any]]) -> None:
    offsets = torch.tensor([0] + [len(row.tokens) for row in rows]).cumsum(0)
    tensors = {
        "tokens": torch.cat([row.tokens for row in rows]),
        "supervised": torch.cat([row.supervised for row in rows]),
        "offsets": offsets,
        "holdout": torch.tensor([row.holdout for row in rows]),
    }
    write_tensors(folder / ROWS, tensors)
    write_bytes(folder / "rows.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())


def _write_prompts(folder: Path, conversations: list[Conversation]) -> None:
    prompts = []
    for conversation in conversations:
        if opening := up_to_first_user(conversation.messages):
            prompt = {"id": conversation.id, "category": conversation.category or "held out", "messages": opening}
            frame = {"tools": conversation.frame.tools, "chat_template_kwargs": conversation.frame.template_kwargs}
            prompts.append({**prompt, **{key: value for key, value in frame.items() if value}})
    write_bytes(folder / PROMPTS, "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode())


def read_rows(folder: Path) -> list[PreparedRow]:
    """All rows of a finished prepare/ folder, in order."""
    try:
        tensors = load_file(folder / ROWS)
        offsets = tensors["offsets"].tolist()
        keys = [json.loads(line)["key"] for line in (folder / "rows.jsonl").read_bytes().splitlines()]
        rows = [
            PreparedRow(key, tensors["tokens"][start:end], tensors["supervised"][start:end], bool(holdout))
            for key, start, end, holdout in zip(keys, offsets[:-1], offsets[1:], tensors["holdout"].tolist(), strict=True)
        ]
        whole = all(row.key == row_key(Row(row.tokens.tolist(), row.supervised.tolist())) for row in rows)
    except (SafetensorError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(
            f"{folder / ROWS} or rows.jsonl beside it is damaged. Delete {folder / 'manifest.json'} and run `eyas prepare`; written answers are kept."
        )
    return rows

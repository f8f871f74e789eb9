"""The stage `prepare`: data files, or the target alone -> rows of tokens with supervised spans.

Out, in prepare/: the files of rows.py, and answers.jsonl (what the target wrote).
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import xxhash

from eyas.artifact import hash_file
from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.prepare.ask import FILE as ANSWERS
from eyas.prepare.ask import Asker
from eyas.prepare.chat import Chat, load_chat
from eyas.prepare.regenerate import count_open, write_answers
from eyas.prepare.render import Bad, Rendered, render, render_files
from eyas.prepare.rows import ROWS, RowsWriter
from eyas.prepare.show import sample
from eyas.prepare.sources import Conversation, bytes_of, source_hashes
from eyas.prepare.synthesize import EmptyTurn, Synthesis, empty_turn, synthesize
from eyas.progress import Reporter
from eyas.stage import Context, Result
from eyas.target.engine import Sampling, open_engine, resolve_device, resolve_dtype
from eyas.target.spec import TargetSpec

REUSABLE = (ANSWERS,)
BAD_SHARE = 0.01  # of the rows, that may be no conversations and are left out with a warning
SHOWN = 5  # bad rows that are named


def settings(config: RunConfig, spec: TargetSpec) -> dict[str, Any]:
    data = config.data.model_dump(exclude={"conversations", "generate_batch"})
    writes = config.data.regenerate != "never" or config.data.synthesize > 0
    return {
        "data": data,
        "run": {"seed": config.run.seed},
        "sources": source_hashes(config.data.conversations, hash_file),
        "target": {"tokenizer": spec.fingerprint["tokenizer"], "weights": spec.fingerprint["weights"] if writes else ""},
    }


class Keeper:
    """Counts all that comes in, writes what is kept."""

    def __init__(self, config: RunConfig, writer: RowsWriter) -> None:
        self.config, self.writer = config, writer
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.forms: Counter[str] = Counter()
        self.users: set[str] = set()

    def keep(self, rendered: Rendered) -> None:
        holdout, kept = _held_out(rendered.id, self.config), 0
        for tokens, supervised in rendered.rows:
            if self.writer.add(tokens, supervised, holdout, rendered.asked, {"conversation": rendered.id, "source": rendered.where}):
                kept += 1
            else:
                self.dropped["duplicate"] += 1
        if kept and holdout and rendered.asked is not None:
            self.writer.add_prompt(rendered.asked, rendered.opening)
        self.dropped.update(rendered.dropped)
        self.forms[rendered.form] += 1
        self.counts["conversations"] += 1
        self.counts["clipped"] += rendered.clipped
        self.users.update(rendered.users)


def work(context: Context) -> Result:
    config, spec, folder, reporter = context.config, context.spec, context.folder, context.reporter
    chat = load_chat(spec, config.target.trust_remote_code, config.data.chat_template_kwargs)
    synthesis = Synthesis()
    with RowsWriter(folder) as writer:
        keeper = Keeper(config, writer)
        counts = keeper.counts
        opened = _read(context, chat, keeper)
        turn = empty_turn(chat) if config.data.synthesize else None  # before the target is loaded, which may take long
        if turn or opened:
            written, synthesis = _written(context, opened, keeper.users, turn, chat, counts)
            for conversation in written:
                keeper.keep(render(conversation, chat, config.data))
        _check_kept(writer, keeper.dropped, reporter)
        counts["moved_to_training"] = writer.finish()
        counts.update(rows=len(writer.holdout), holdout_rows=sum(writer.holdout), tokens=writer.offsets[-1], supervised=writer.supervised)
    dropped = keeper.dropped
    share = counts["supervised"] / counts["tokens"]
    reporter.say(
        f"prepare: {counts['conversations']:,} conversations -> {counts['rows']:,} rows ({counts['holdout_rows']:,} held out), {counts['tokens']:,} tokens, "
        f"{share:.0%} supervised; {counts['clipped']:,} clipped, {sum(dropped.values()):,} dropped{_reasons(dropped)}"
    )
    reporter.show(sample(folder, chat))
    manifest: dict[str, Any] = {**counts, "dropped": dict(dropped)}
    if synthesis.tried:
        manifest["synthesized"] = {"tried": synthesis.tried, "usable": len(synthesis.conversations), "dropped": dict(synthesis.dropped)}
    return Result(manifest, content=hash_file(folder / ROWS))


def _read(context: Context, chat: Chat, keeper: Keeper) -> list[Conversation]:
    """Keeps what is complete, returns conversations that have answers to be written. Raises UserError if more than a few rows are none: then something else
    is wrong with the data."""
    config, reporter = context.config, context.reporter
    bad: list[str] = []
    num_bad = 0
    opened = []
    with reporter.task(context.folder, "prepare", bytes_of(config.data.conversations) / 1e6, "MB") as task:
        for outcome in render_files(config, context.spec, chat, task):
            if isinstance(outcome, Bad):
                num_bad += 1
                bad += [outcome.sentence] if num_bad <= SHOWN else []
            elif isinstance(outcome, Conversation):
                opened.append(outcome)
            else:
                keeper.keep(outcome)
    total = keeper.counts["conversations"] + len(opened) + num_bad
    if num_bad > BAD_SHARE * total:
        raise UserError(bad[0] if num_bad == 1 else f"{bad[0]} ({num_bad:,} of {total:,} rows are bad; up to {BAD_SHARE:.0%} would be left out.)")
    for sentence in bad:
        reporter.say(f"prepare: warning: left out: {sentence}")
    if num_bad > SHOWN:
        reporter.say(f"prepare: warning: left out: {num_bad - SHOWN:,} more rows that are no conversations")
    forms = keeper.forms + Counter(conversation.form for conversation in opened)
    if set(forms) - {"messages"}:
        reporter.say(f"prepare: rows read as {', '.join(f'{form} ({count:,})' for form, count in forms.most_common())}")
    keeper.counts["bad_rows"] = num_bad
    return opened


def _written(
    context: Context, conversations: list[Conversation], users: set[str], turn: EmptyTurn | None, chat: Chat, counts: Counter[str]
) -> tuple[list[Conversation], Synthesis]:
    """All that the target writes: with `turn` conversations beside those given, asking nothing that `users` asked, then every open answer. Raises UserError
    if no written turn is usable."""
    config = context.config
    dtype = resolve_dtype(config.target.dtype, resolve_device(config.target.device))
    # vLLM queues what does not fit; transformers holds the whole batch in memory.
    batch = config.data.generate_batch or (1024 if config.target.engine == "vllm" else 16)
    sampling = Sampling(config.data.max_new_tokens, config.data.temperature, config.data.top_p, config.run.seed)
    with closing(open_engine(config, context.spec, context.folder / "engine.log", context.reporter.say)) as engine:
        asker = Asker(engine, batch, {"target": context.spec.fingerprint["weights"], "dtype": str(dtype)}, context.folder)
        synthesis = _synthesized(context, users | _users(conversations), turn, chat, asker, sampling) if turn else Synthesis()
        conversations = conversations + synthesis.conversations
        with context.reporter.task(context.folder, "writing answers", count_open(conversations), "answers") as task:
            return write_answers(conversations, chat, asker, sampling, task, counts), synthesis


def _users(conversations: list[Conversation]) -> set[str]:
    return {message["content"] for conversation in conversations for message in conversation.messages if message["role"] == "user"}


def _synthesized(context: Context, asked: set[str], turn: EmptyTurn, chat: Chat, asker: Asker, sampling: Sampling) -> Synthesis:
    data, reporter = context.config.data, context.reporter
    found = synthesize(
        data.synthesize,
        turn,
        chat,
        asker,
        sampling,
        data.max_length,
        asked,
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


def _held_out(conversation: str, config: RunConfig) -> bool:
    """Depends on the conversation's id and the seed alone, so that more data never moves a conversation to the other side."""
    return xxhash.xxh3_64_intdigest(f"{config.run.seed} {conversation}".encode()) < config.data.holdout * 2**64


def _reasons(dropped: Counter[str]) -> str:
    return f" ({'; '.join(f'{count:,} {reason}' for reason, count in dropped.most_common(5))})" if dropped else ""


def _check_kept(writer: RowsWriter, dropped: Counter[str], reporter: Reporter) -> None:
    if not writer.holdout:
        raise UserError(
            f"No row is left to train on: {_reasons(dropped).strip(' ()') or 'the data files hold no conversations'}. Mend the data or the settings in [data]."
        )
    if all(writer.holdout):
        raise UserError("All conversations fell into the held-out part. Give more data, or set data.holdout = 0.")
    if sum(dropped.values()) > len(writer.holdout):
        reporter.say(f"prepare: warning: more rows were dropped than kept{_reasons(dropped)}")

"""How many tokens a run will have: counted if they are prepared, else estimated from a sample of the data."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.config import DataSection, RunConfig
from eyas.errors import UserError
from eyas.prepare.chat import Chat
from eyas.prepare.render import Bad, outcome
from eyas.prepare.sources import Conversation, RawRow, Source, bytes_of, conversation_of, is_open, raw_rows, with_open_answers

SAMPLE = 2000  # rows of all sources together that are rendered
READ_SECONDS = 20.0  # of looking at rows without rendering them; what lies behind is extrapolated by bytes


@dataclass(frozen=True)
class Tokens:
    """Of all rows, held-out ones included. written: tokens that the target is to write first, at most. source: where this is from."""

    rows: int
    tokens: int
    supervised: int
    written: int
    source: str


def estimate(config: RunConfig, chat: Chat | None) -> Tokens:
    """Without a `chat`, rows count as long as they may be. Raises UserError for data that cannot be read, or of which nothing is a conversation."""
    data = config.data
    sample, rows, whole = _sampled(data.conversations, config.run.seed)
    kept = tokens = supervised = written = 0
    bad = ""
    for raw in sample:
        found = outcome(raw, chat, data) if chat else _unrendered(raw, data)
        if isinstance(found, Bad):
            bad = bad or found.sentence
            continue
        if isinstance(found, Conversation):
            asked, answers = _asked(found, chat), sum(is_open(message) for message in found.messages)
            length = min(data.max_length, asked + answers * data.max_new_tokens) if chat else data.max_length
            said = min(length, answers * data.max_new_tokens)
            kept, tokens, written = kept + 1, tokens + length, written + said
            supervised += said if answers else length
        else:
            kept += len(found.rows)
            tokens += sum(len(row) for row, _ in found.rows)
            supervised += sum(int(spans.sum()) for _, spans in found.rows)
    if sample and not kept and bad:
        raise UserError(bad)
    source = f"{len(sample):,} of {rows:,} conversations rendered" if chat else f"{rows:,} conversations, each taken as the longest"
    if not whole:
        source += ", their number by the bytes of those seen"
    scale = rows / max(1, len(sample))
    made, longest = data.synthesize, min(data.max_length, 2 * data.max_new_tokens)
    if made:
        source += f"; {made:,} to be synthesized, each taken as the longest"
    return Tokens(
        rows=round(kept * scale) + made,
        tokens=round(tokens * scale) + made * longest,
        supervised=round(supervised * scale) + made * longest // 2,
        written=round(written * scale) + made * longest,
        source=source,
    )


def _sampled(sources: Sequence[Source], seed: int) -> tuple[list[RawRow], int, bool]:
    """(rows chosen at random, how many there are, whether all were seen)."""
    chance = random.Random(seed)
    chosen: list[RawRow] = []
    count = size = 0
    end = time.monotonic() + READ_SECONDS
    for row in raw_rows(sources):
        count, size = count + 1, size + row.size
        if len(chosen) < SAMPLE:
            chosen.append(row)
        elif (place := chance.randrange(count)) < SAMPLE:
            chosen[place] = row
        if count % 1024 == 0 and time.monotonic() > end and size:
            return chosen, max(count, count * bytes_of(sources) // size), False
    return chosen, count, True


def _unrendered(raw: RawRow, data: DataSection) -> Bad | Conversation:
    try:
        return with_open_answers(conversation_of(raw.data, raw.where), data.regenerate)
    except UserError as error:
        return Bad(str(error))


def _asked(conversation: Conversation, chat: Chat | None) -> int:
    """Tokens of all that the target does not write, by its texts and the frame of one turn."""
    if chat is None:
        return 0
    texts = [str(message["content"]) for message in conversation.messages if not is_open(message)]
    frame = len(chat.prompt_ids([{"role": "user", "content": "a"}], conversation.frame))
    return sum(len(chat.ids(text)) + frame for text in texts)

"""Text -> token ids, as the tokenizer gives them, each stretch of text between special tokens once.

A conversation is rendered again and again with one more message, and all start with the same system message. Tokenizers cut the text at their special
tokens first and encode what lies between alone; where that holds without exception, so do we, and remember.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

REMEMBERED, LONGEST = 512, 1 << 14  # stretches, and characters of one
# Pre-tokenizers that look at nothing but the stretch itself. Metaspace is not one: it treats the first stretch of a text in its own way.
LOCAL = {"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}


class Encoder:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = getattr(tokenizer, "backend_tokenizer", None)  # None: one written in Python
        if self.backend is not None:
            self.backend.no_truncation()  # tokenizer.json may ask for either
            self.backend.no_padding()
        self.special: dict[str, int] = {}
        self.border: re.Pattern[str] | None = None
        if self.backend is not None and _stretches_are_alone(json.loads(self.backend.to_str())):
            self.special = {token.content: number for number, token in self.backend.get_added_tokens_decoder().items()}
            # As the library: the leftmost, and of those the longest.
            self.border = re.compile("(" + "|".join(re.escape(text) for text in sorted(self.special, key=len, reverse=True)) + ")") if self.special else None
        self.stretch = functools.lru_cache(REMEMBERED)(self._encoded)

    def ids(self, text: str) -> list[int]:
        if self.border is None:
            return self._encoded(text)
        ids: list[int] = []
        for part in self.border.split(text):
            if part in self.special:
                ids.append(self.special[part])
            elif part:
                ids += self.stretch(part) if len(part) <= LONGEST else self._encoded(part)
        return ids

    def _encoded(self, text: str) -> list[int]:
        # The template writes all special tokens itself; letting the tokenizer add its own would double the first.
        if self.backend is not None:
            found: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return found
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _stretches_are_alone(made_of: dict[str, Any]) -> bool:
    """Whether the tokenizer, given as its own JSON, encodes each stretch between special tokens as if it were the whole text."""
    before, normalizer = made_of.get("pre_tokenizer"), made_of.get("normalizer")
    parts = before.get("pretokenizers", [before]) if before else []
    return (
        bool(parts)
        and all(part["type"] in LOCAL and not part.get("add_prefix_space") for part in parts)
        and not (normalizer and "Prepend" in json.dumps(normalizer))
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] or (token["normalized"] and normalizer) for token in made_of["added_tokens"])
    )

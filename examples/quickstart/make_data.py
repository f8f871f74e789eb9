"""Choose the quickstart's data: `python make_data.py SOURCE_DIR` writes conversations.jsonl, prompts.jsonl and heldout.jsonl into data/.

In:  SOURCE_DIR with smollm2-onpolicy.jsonl.xz (conversations whose answers SmolLM2-135M-Instruct wrote), mt_bench.jsonl, humaneval.jsonl and
     gsm8k.jsonl (test questions). data/README.md says what they are.
Out: the same bytes on every machine: rows are chosen in the order of a hash of their id, never at random.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

NUM_CONVERSATIONS = 1000
MATH_SHARE = 0.4  # of the conversations; the source has 0.32
MAX_WORDS = 700  # user and assistant turns together
NUM_PROMPTS = 16
NUM_HELDOUT = 8  # of each category
CHAT = ("writing", "roleplay", "humanities", "stem")
REASONING = ("reasoning", "extraction", "math")

NUMBER = re.compile(
    r"\d[\d,./]*|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|hundred|half|twice|double|triple|third|quarter|dozen)\b", re.I
)
ASKS_FOR_A_NUMBER = re.compile(
    r"\bhow (?:many|much|long|far|old|tall|fast|often|big|high|heavy|deep|wide|large)\b"
    r"|\bwhat (?:is|was|are|were|will|would|percent\w*|fraction|time|size|number|the total|\w+ (?:is|was|are|will|does|did))\b"
    r"|\bwhat's the\b|\bcalculate\b|\bin (?:dollars|cents|total)\b",
    re.I,
)
# How the model opens when it plays the user. Word problems tell of a third person instead.
CHATTY_OPENING = re.compile(
    r"^\W*(?:i'?m|i am|i've|i'd|i have|i need|i want|i just|can you|could you|what(?:'s| is| are)? (?:the|some)|how (?:do|can|does|to)"
    r"|hello|hi|greetings|please|write|as an?|my name|provide|you are|premise)\b",
    re.I,
)


def is_word_problem(question: str) -> bool:
    """Whether a question is of GSM8K's kind. The source does not say; of 40 drawn from each side none was sorted wrong, though rare wordings are."""
    return len(NUMBER.findall(question)) >= 2 and bool(ASKS_FOR_A_NUMBER.search(question)) and not CHATTY_OPENING.search(question)


def normalised(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def in_hash_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())


def num_words(row: Row) -> int:
    return sum(len(message["content"].split()) for message in row["messages"])


def first_turn(row: Row) -> str:
    return row["messages"][0]["content"]


def read(path: Path) -> list[Row]:
    content = path.read_bytes()
    lines = (lzma.decompress(content) if path.suffix == ".xz" else content).split(b"\n")
    return [json.loads(line) for line in lines if line]


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n")
    print(f"{path.name}: {len(rows)} rows, {path.stat().st_size:,} bytes")


def as_said(row: Row) -> Row:
    """The source has a line break behind each answer. The model ends its answers without one: there its own likeliest token is the end of the turn."""
    messages = [{**message, "content": message["content"].removesuffix("\n")} if message["role"] == "assistant" else message for message in row["messages"]]
    return {**row, "messages": messages}


def choose_heldout(source: Path) -> list[Row]:
    """Eight questions a category; where a category joins several of MT-bench's, equally many of each."""
    mt_bench = in_hash_order(read(source / "mt_bench.jsonl"))

    def from_mt_bench(kinds: tuple[str, ...]) -> list[Row]:
        by_kind = [[row for row in mt_bench if row["category"] == kind] for kind in kinds]
        return [row for group in zip(*by_kind, strict=False) for row in group]  # one of each kind, then the next of each

    pools = {
        "chat": from_mt_bench(CHAT),
        "code": in_hash_order(read(source / "humaneval.jsonl")),
        "math": in_hash_order(read(source / "gsm8k.jsonl")),
        "reasoning": from_mt_bench(REASONING),
    }
    return [{"id": row["id"], "category": category, "turns": row["turns"][:1]} for category, rows in pools.items() for row in rows[:NUM_HELDOUT]]


def choose_training(source: Path, forbidden: set[str]) -> tuple[list[Row], list[Row]]:
    """Conversations, and prompts whose answers are dropped; no question occurs twice, in both, or in `forbidden`."""
    seen = set(forbidden)
    ordinary: list[Row] = []
    word_problems: list[Row] = []
    for row in in_hash_order(read(source / "smollm2-onpolicy.jsonl.xz")):
        question = normalised(first_turn(row))
        if num_words(row) > MAX_WORDS or question in seen:
            continue
        seen.add(question)
        (word_problems if is_word_problem(first_turn(row)) else ordinary).append(row)

    num_math, prompt_math = round(NUM_CONVERSATIONS * MATH_SHARE), round(NUM_PROMPTS * MATH_SHARE)
    chosen = word_problems[:num_math] + ordinary[: NUM_CONVERSATIONS - num_math]
    left = word_problems[num_math : num_math + prompt_math] + ordinary[NUM_CONVERSATIONS - num_math :][: NUM_PROMPTS - prompt_math]
    prompts = [{"id": row["id"], "prompt": first_turn(row)} for row in in_hash_order(left)]
    return [as_said(row) for row in in_hash_order(chosen)], prompts


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose the quickstart's data from its four source files.")
    parser.add_argument("source_dir", metavar="SOURCE_DIR", type=Path)
    source: Path = parser.parse_args().source_dir
    out = Path(__file__).parent / "data"

    heldout = choose_heldout(source)
    forbidden = {normalised(row["turns"][0]) for row in heldout}
    conversations, prompts = choose_training(source, forbidden)

    asked = {normalised(message["content"]) for row in conversations for message in row["messages"] if message["role"] == "user"}
    asked |= {normalised(row["prompt"]) for row in prompts}
    assert not asked & forbidden, "a held-out question is trained on"
    assert not {row["id"] for row in conversations} & {row["id"] for row in prompts}, "a prompt's answer is trained on"
    assert (len(conversations), len(prompts), len(heldout)) == (NUM_CONVERSATIONS, NUM_PROMPTS, 4 * NUM_HELDOUT)

    out.mkdir(exist_ok=True)
    write(out / "conversations.jsonl", conversations)
    write(out / "prompts.jsonl", prompts)
    write(out / "heldout.jsonl", heldout)
    num_math = sum(is_word_problem(first_turn(row)) for row in conversations)
    num_two_turn = sum(len(row["messages"]) == 4 for row in conversations)
    print(f"conversations: {num_math} word problems, {num_two_turn} of two turns, {sum(map(num_words, conversations)):,} words")


if __name__ == "__main__":
    main()

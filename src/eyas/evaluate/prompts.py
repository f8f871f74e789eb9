"""What a draft is measured on: the first turn of each row, rendered as a server would be given it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.errors import UserError
from eyas.prepare.chat import Chat
from eyas.prepare.rows import read_rows
from eyas.prepare.sources import read_conversations, up_to_first_user


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    tokens: list[int]


def read_prompts(paths: list[str], per_category: int, chat: Chat, max_length: int) -> list[Prompt]:
    """Each row up to its first user turn as the token ids that a server would be given. Raises UserError if there is none, or one is too long."""
    prompts: list[Prompt] = []
    taken: dict[str, int] = {}
    named: dict[str, int] = {}
    for conversation in read_conversations(paths):
        opening = up_to_first_user(conversation.messages)
        category = conversation.category or "all"
        if not opening or taken.get(category, 0) >= per_category:
            continue
        tokens = chat.prompt_ids(opening, conversation.frame)
        if len(tokens) > max_length:
            raise UserError(
                f"{conversation.where}: its prompt has {len(tokens):,} tokens; with the answer that is more than the target takes. Remove the row, or "
                f"lower evaluate.max_new_tokens."
            )
        taken[category] = taken.get(category, 0) + 1
        name = f"{category}/{conversation.id}"
        named[name] = named.get(name, 0) + 1  # files of several makers may number their rows alike
        prompts.append(Prompt(name if named[name] == 1 else f"{name} ({named[name]})", category, tokens))
    if not prompts:
        raise UserError(f"There are no prompts to evaluate on in {', '.join(paths)}. Give some in evaluate.prompts, or set data.holdout above 0.")
    return prompts


def seen_in_training(prompts: list[Prompt], prepare_folder: Path) -> list[str]:
    """The prompts with which some training row begins: their figures would flatter the draft."""
    wanted = {torch.tensor(prompt.tokens, dtype=torch.int32).numpy().tobytes(): prompt.id for prompt in prompts}
    lengths = sorted({len(key) for key in wanted})
    seen: set[str] = set()
    for row in read_rows(prepare_folder):
        if not row.holdout:
            data = row.tokens.numpy().tobytes()
            seen.update(wanted[data[:length]] for length in lengths if data[:length] in wanted)
    return sorted(seen)

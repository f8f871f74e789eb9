"""Conversations -> token rows with supervised spans, by the target's own chat template.

The template is rendered twice for each answer: the history with the generation prompt, which is what a server would be given, and the
history with the answer. What the second adds to the first is the answer: supervised up to and including its stop token, nothing after it.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n Hello!<|im_end|> \\n
    ---------------- prompt (not supervised) -------------   --supervised--  not

Legend: ids are lists of token ids; a row is one training document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from eyas.errors import UserError
from eyas.prepare.sources import Message, is_open
from eyas.target.spec import TargetSpec


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    supervised: list[bool]


class Unrenderable(Exception):
    """A conversation that cannot be rendered as the target would see it; the text is the reason under which it is counted."""


class Chat:
    def __init__(self, tokenizer: Any, stop_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else frozenset())

    def text(self, messages: list[Message], generation_prompt: bool) -> str:
        plain = [{key: value for key, value in message.items() if key != "ids"} for message in messages]
        try:
            rendered: str = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation_prompt)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise Unrenderable(f"the chat template refuses it ({type(error).__name__}: {error})"[:160]) from None
        return rendered

    def ids(self, text: str) -> list[int]:
        # The template writes all special tokens itself; letting the tokenizer add its own would double the first.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """What a server would feed the target to get the next answer."""
        return self.ids(self.text(messages, generation_prompt=True))

    def answer(self, ids: list[int]) -> Message:
        """An answer that the target wrote, as a message: its text without the stop token, and under "ids" the very tokens that were sampled."""
        text_ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return {"role": "assistant", "content": self.decode(text_ids), "ids": ids}

    def rows(self, messages: list[Message]) -> list[Row]:
        """One row if each turn's prompt continues the row so far; else one row an answer, each as it would be served. Raises Unrenderable."""
        if any(is_open(message) for message in messages):
            raise Unrenderable("an answer is missing")
        answers = [j for j, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [self._prompt_and_answer(messages, j) for j in answers]
        tokens: list[int] = []
        supervised: list[bool] = []
        for prompt, answer, num_supervised in parts:
            if prompt[: len(tokens)] != tokens:  # the template rewrites history: a thought dropped, say
                return [_row(*part) for part in parts]
            row = _row(prompt[len(tokens) :], answer, num_supervised)
            tokens, supervised = tokens + row.tokens, supervised + row.supervised
        return [Row(tokens, supervised)]

    def _prompt_and_answer(self, messages: list[Message], j: int) -> tuple[list[int], list[int], int]:
        """Ids of the prompt for message j, ids that the answer adds, how many of those are supervised."""
        if "ids" in messages[j]:  # as sampled; encoding the text again may give other tokens, which the target did not choose
            return self.prompt_ids(messages[:j]), messages[j]["ids"], len(messages[j]["ids"])
        before, after = self.text(messages[:j], generation_prompt=True), self.text(messages[: j + 1], generation_prompt=False)
        if not after.startswith(before):
            raise Unrenderable("the chat template does not continue its own generation prompt")
        prompt, whole = self.ids(before), self.ids(after)
        # Where a token would span the border, the target could not have been given half of it: then the parts are encoded apart.
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.ids(after[len(before) :])
        stops = [position for position, token in enumerate(answer) if token in self.stop_ids]
        if not stops:
            raise Unrenderable("no stop token follows the answer")
        if len(stops) > 1:
            raise Unrenderable("a stop token stands inside the answer")
        return prompt, answer, stops[0] + 1


def _row(prompt: list[int], answer: list[int], num_supervised: int) -> Row:
    return Row(prompt + answer, [False] * len(prompt) + [position < num_supervised for position in range(len(answer))])


def load_chat(spec: TargetSpec, trust_remote_code: bool) -> Chat:
    """Raises UserError if the folder has no tokenizer or no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # tokenizers raise whatever their parsers do
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"No tokenizer can be loaded from {spec.path}: {first}. Complete the folder, or set target.trust_remote_code = true if it brings code that "
            f"you trust."
        ) from None
    if not tokenizer.chat_template:
        raise UserError(
            f"{spec.path} has no chat template, so Eyas cannot know how prompts reach the target. Add the model's chat_template.jinja to the folder; "
            "a base model without one needs a template that your server uses too."
        )
    return Chat(tokenizer, spec.stop_ids)

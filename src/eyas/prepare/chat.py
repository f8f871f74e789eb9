"""Conversations -> token rows with supervised spans, by the target's own chat template.

The template is rendered twice for each answer: the history with the generation prompt, which is what a server would be given, and the
history with the answer. What the second adds to the first is the answer: supervised up to and including its stop token, nothing after it.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n Hello!<|im_end|> \\n
    ---------------- prompt (not supervised) -------------   --supervised--  not

Three kinds of templates need more:

    no stop token after the last answer (GLM: the next role's token ends a turn)   taken from what the template writes before the next message
    the last answer's thought is cut off, while the prompt opens one (DeepSeek R1)  the answer's own text follows the prompt, as the target said it
    tool calls wanted with arguments as objects, or as JSON text                    tried out once with a call of a made-up tool

Legend: ids are lists of token ids; a row is one training document.
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from eyas.errors import UserError
from eyas.prepare.encode import Encoder
from eyas.prepare.sources import PLAIN, Frame, Message, encodable, is_open
from eyas.target.spec import TargetSpec


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    supervised: list[bool]


class Unrenderable(Exception):
    """A conversation that cannot be rendered as the target would see it; the text is the reason under which it is counted."""


SENTINEL = "eyas probe"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names under which templates look for a message's thought


class Chat:
    """template_kwargs: of all conversations; a conversation's own come before them."""

    def __init__(self, tokenizer: Any, stop_ids: tuple[int, ...], template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else frozenset())
        self.template_kwargs = template_kwargs or {}
        self.encoder = Encoder(tokenizer)

    def text(self, messages: list[Message], generation_prompt: bool, frame: Frame = PLAIN) -> str:
        return self._rendered([self._plain(message, number) for number, message in enumerate(messages)], generation_prompt, frame)

    def ids(self, text: str) -> list[int]:
        return self.encoder.ids(text)

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def prompt_ids(self, messages: list[Message], frame: Frame = PLAIN) -> list[int]:
        """What a server would feed the target to get the next answer."""
        return self.ids(self.text(messages, True, frame))

    def answer(self, ids: list[int]) -> Message:
        """An answer that the target wrote, as a message: its text without the stop token, and under "ids" the very tokens that were sampled."""
        text_ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return {"role": "assistant", "content": self.decode(text_ids), "ids": ids}

    def rows(self, messages: list[Message], frame: Frame = PLAIN) -> list[Row]:
        """One row if each turn's prompt continues the row so far; else one row an answer, each as it would be served. Raises Unrenderable."""
        if any(is_open(message) for message in messages):
            raise Unrenderable("an answer is missing")
        parts = [self._prompt_and_answer(messages, j, frame) for j, message in enumerate(messages) if message["role"] == "assistant"]
        tokens: list[int] = []
        supervised: list[bool] = []
        for prompt, answer, num_supervised in parts:
            if prompt[: len(tokens)] != tokens:  # the template rewrites history: a thought dropped, say
                return [_row(*part) for part in parts]
            # Up to the stop token: what stands behind it may be another before a next turn.
            row = _row(prompt[len(tokens) :], answer[:num_supervised], num_supervised)
            tokens, supervised = tokens + row.tokens, supervised + row.supervised
        if not parts:
            return []
        _, answer, num_supervised = parts[-1]
        return [Row(tokens + answer[num_supervised:], supervised + [False] * len(answer[num_supervised:]))]

    def _prompt_and_answer(self, messages: list[Message], j: int, frame: Frame) -> tuple[list[int], list[int], int]:
        """Ids of the prompt for message j, ids that the answer adds, how many of those are supervised."""
        if "ids" in messages[j]:  # as sampled; encoding the text again may give other tokens, which the target did not choose
            return self.prompt_ids(messages[:j], frame), messages[j]["ids"], len(messages[j]["ids"])
        before, added, said = self._before_and_added(messages, j, frame)
        prompt, whole = self.ids(before), self.ids(before + added)
        # Where a token would span the border, the target could not have been given half of it: then the parts are encoded apart.
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.ids(added)
        stops = [position for position, token in enumerate(answer) if token in self.stop_ids]
        if len(stops) > (0 if said else len(self.usual_stops)):
            raise Unrenderable("a stop token stands inside the answer")
        if said:
            answer = [*answer, *self.usual_stops[:1]]
        elif not stops:
            answer = [*answer, self._stop_behind(messages, j, before + added, frame)]
        return prompt, answer, (stops[0] if stops else len(answer) - 1) + 1

    def _before_and_added(self, messages: list[Message], j: int, frame: Frame) -> tuple[str, str, bool]:
        """(prompt for message j, what the message adds to it, whether that is the answer's own text, whose stop token is still to come)."""
        message, alone = messages[j], [{"role": "user", "content": "a"}]
        before, after = self.text(messages[:j], True, frame), self.text(messages[: j + 1], False, frame)
        history = messages[:j]
        if not after.startswith(before):
            if (said := _as_said(before, message)) is not None:
                return before, said, True
            # Some write history otherwise once an answer follows (a system message, the thought of a call): then the answer as it follows a mere question.
            history, start, after = alone, self.text(alone, True, frame), self.text([*alone, message], False, frame)
            if not after.startswith(start):
                raise Unrenderable("the chat template does not continue its own generation prompt")
            added = after[len(start) :]
        else:
            added = after[len(before) :]
        if any(message.get(name) for name in THOUGHTS):
            probe = {key: value for key, value in message.items() if key not in THOUGHTS} | {THOUGHTS[0]: SENTINEL}
            if SENTINEL not in self.text([*history, probe], False, frame):
                raise Unrenderable("the chat template leaves out the thought of an answer")
        return before, added, False

    @functools.cached_property
    def usual_stops(self) -> list[int]:
        """The stop tokens that the template writes behind a plain last answer: most write one."""
        text = self.text([{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}], False)
        return [token for token in self.ids(text.rpartition(SENTINEL)[2]) if token in self.stop_ids]

    def _stop_behind(self, messages: list[Message], j: int, after: str, frame: Frame) -> int:
        """The stop token with which the template begins what follows answer j. Raises Unrenderable if there is none."""
        following = messages[j + 1 : j + 2]
        if not following or following[0]["role"] == "assistant":
            following = [{"role": "tool", "content": "a"}] if messages[j].get("tool_calls") else [{"role": "user", "content": "a"}]
        longer = self.text([*messages[: j + 1], *following], False, frame)
        if longer.startswith(after):
            behind = longer[len(after) :]
        else:  # rewritten, because something follows: what follows a plain answer begins alike
            plain: Message = {"role": "assistant", "content": SENTINEL}
            behind = self.text([{"role": "user", "content": "a"}, plain, *following], False, frame).rpartition(SENTINEL)[2]
        ids = self.ids(behind)
        if ids and ids[0] in self.stop_ids:
            return ids[0]
        raise Unrenderable("no stop token follows the answer")

    def _rendered(self, messages: list[Message], generation_prompt: bool, frame: Frame) -> str:
        options = {**self.template_kwargs, **frame.template_kwargs}
        if frame.tools:
            options["tools"] = frame.tools
        try:
            rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt, **options)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise Unrenderable(f"the chat template refuses it ({type(error).__name__}: {error})"[:160]) from None
        if not encodable(rendered):
            raise Unrenderable("it holds a lone surrogate, half a character, which no tokenizer can read")
        return rendered

    def _plain(self, message: Message, number: int) -> Message:
        """As the template wants it: a thought under every name it may look for, tool calls in the form that it takes."""
        plain = {key: value for key, value in message.items() if key != "ids" and (key != "tool_calls" or value)}
        if thought := next((plain[name] for name in THOUGHTS if plain.get(name)), None):
            plain.update(dict.fromkeys(THOUGHTS, thought))
        if not plain.get("tool_calls"):
            return plain
        if self.tool_form is None:
            raise Unrenderable("the chat template takes no tool calls")
        empty, as_text = self.tool_form
        calls = []
        for call in plain["tool_calls"]:
            function = call.get("function", call) if isinstance(call, dict) else None
            try:
                name, arguments = function["name"], function.get("arguments") or {}  # type: ignore[index, union-attr]
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (TypeError, KeyError, ValueError, AttributeError):
                arguments = None
            if not isinstance(arguments, dict):
                raise Unrenderable(f"message {number} has a tool call without a name, or with arguments that are no JSON object")
            given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
            calls.append({**call, "type": "function", "function": {**function, "name": name, "arguments": given}})  # type: ignore[dict-item]
        return {**plain, "tool_calls": calls, "content": empty if plain["content"] in (None, "") else plain["content"]}

    @functools.cached_property
    def tool_form(self) -> tuple[str | None, bool] | None:
        """(what stands for no content, whether arguments are JSON text) with which the template writes a tool call well; None if no way does."""
        user: Message = {"role": "user", "content": "a"}
        for as_text, empty in itertools.product((False, True), (None, "")):
            arguments: Any = '{"eyas_probe": 1}' if as_text else {"eyas_probe": 1}
            call = {"type": "function", "id": "eyas_tool", "function": {"name": "eyas_tool", "arguments": arguments}}
            try:
                messages = [user, {"role": "assistant", "content": empty, "tool_calls": [call]}]
                text = self._rendered(messages, False, PLAIN).removeprefix(self._rendered([user], False, PLAIN))
            except Unrenderable:
                continue
            # Written as JSON, as text or by parts (an XML-like form), but neither quoted twice nor as Python would print it.
            if "eyas_tool" in text and "eyas_probe" in text and "None" not in text and '\\"eyas_probe' not in text and "'eyas_probe'" not in text:
                return empty, as_text
        return None


def _as_said(before: str, message: Message) -> str | None:
    """The text with which the target itself went on from a prompt that opens a thought; None if that cannot be told."""
    content = message["content"]
    if any(message.get(name) for name in THOUGHTS):
        return None
    if not before.rstrip().endswith("<think>") or not isinstance(content, str) or "</think>" not in content:
        return None
    said = content.removeprefix("<think>")
    return said.removeprefix("\n") if before.endswith("\n") else said


def _row(prompt: list[int], answer: list[int], num_supervised: int) -> Row:
    return Row(prompt + answer, [False] * len(prompt) + [position < num_supervised for position in range(len(answer))])


def load_chat(spec: TargetSpec, trust_remote_code: bool, template_kwargs: dict[str, Any] | None = None) -> Chat:
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
    return Chat(tokenizer, spec.stop_ids, template_kwargs)

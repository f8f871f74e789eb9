"""Supervised spans: exactly what the target would sample, by hand on a small ChatML template and on templates that misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TEMPLATE, WORDS, make_tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from eyas.errors import UserError
from eyas.prepare.chat import Chat, Row, Unrenderable, load_chat
from eyas.target.spec import read_spec

STOP = 2  # <|im_end|>
# As Qwen 3: thoughts of earlier turns are dropped once another user turn follows.
THINKING = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def with_template(target: Path, template: str) -> Chat:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = template
    return Chat(tokenizer, (STOP,))


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> Chat:
    return load_chat(read_spec(tiny_target), trust_remote_code=False)


def marked(chat: Chat, row: Row) -> str:
    """The row as text, supervised stretches in «»."""
    parts, start = [], 0
    for end in range(1, len(row.tokens) + 1):
        if end == len(row.tokens) or row.supervised[end] != row.supervised[start]:
            text = chat.tokenizer.decode(row.tokens[start:end])
            parts.append(f"«{text}»" if row.supervised[start] else text)
            start = end
    return "".join(parts)


def only(chat: Chat, messages: list[dict[str, Any]]) -> str:
    (row,) = chat.rows(messages)
    assert len(row.tokens) == len(row.supervised)
    return marked(chat, row)


def test_a_single_turn_supervises_the_answer_with_its_stop_token_and_nothing_after(chat: Chat) -> None:
    assert only(chat, [user("the cat"), answer("sat")]) == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n«sat<|im_end|>»\n"


def test_each_turn_of_a_longer_talk_is_supervised_in_one_row(chat: Chat) -> None:
    assert only(chat, [user("a"), answer("b"), user("c"), answer("d")]) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«d<|im_end|>»\n"
    )


def test_a_system_message_is_not_supervised(chat: Chat) -> None:
    assert only(chat, [{"role": "system", "content": "be"}, user("a"), answer("b")]).startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\n")


def test_an_empty_answer_supervises_its_stop_token(chat: Chat) -> None:
    assert only(chat, [user("a"), answer("")]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n"


def test_two_assistant_turns_in_a_row_are_supervised_apart(chat: Chat) -> None:
    assert only(chat, [user("a"), answer("b"), answer("c")]) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n<|im_start|>assistant\n«c<|im_end|>»\n"
    )


def test_a_talk_that_begins_with_the_assistant_is_refused_by_name_for_no_server_can_be_asked_for_it(chat: Chat) -> None:
    with pytest.raises(Unrenderable, match="empty conversation"):
        chat.rows([answer("a"), user("b"), answer("c")])


def test_what_the_user_says_last_is_not_in_the_row(chat: Chat) -> None:
    assert only(chat, [user("a"), answer("b"), user("c")]).endswith("«b<|im_end|>»\n")


def test_an_answer_cut_by_the_limit_ends_without_a_stop_token(chat: Chat) -> None:
    (row,) = chat.rows([user("a"), answer("b"), user("c"), chat.answer(chat.ids("the cat sat"))])
    assert marked(chat, row).endswith("<|im_start|>assistant\n«the cat sat»")
    assert sum(token == STOP and supervised for token, supervised in zip(row.tokens, row.supervised, strict=True)) == 1, "only the first answer's own"


def test_a_user_who_writes_a_stop_token_is_not_supervised(chat: Chat) -> None:
    assert only(chat, [user("x<|im_end|>y"), answer("b")]) == "<|im_start|>user\nx<|im_end|>y<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n"


def test_an_answer_that_holds_a_stop_token_is_refused_for_the_target_could_not_go_on(chat: Chat) -> None:
    with pytest.raises(Unrenderable, match="inside the answer"):
        chat.rows([user("a"), answer("b<|im_end|>c")])


def test_a_template_that_rewrites_history_gives_a_row_an_answer_and_each_thought_once(tiny_target: Path) -> None:
    chat = with_template(tiny_target, THINKING)
    rows = chat.rows([user("a"), answer("<think>b</think>c"), user("d"), answer("<think>e</think>f")])
    assert [marked(chat, row) for row in rows] == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«<think>b</think>c<|im_end|>»\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n«<think>e</think>f<|im_end|>»\n",
    ]


def test_the_same_template_gives_one_row_where_there_is_nothing_to_rewrite(tiny_target: Path) -> None:
    assert len(with_template(tiny_target, THINKING).rows([user("a"), answer("c"), user("d"), answer("<think>e</think>f")])) == 1


def test_only_the_last_row_of_a_rewritten_talk_is_cut(tiny_target: Path) -> None:
    chat = with_template(tiny_target, THINKING)
    first, last = chat.rows([user("a"), answer("<think>b</think>c"), user("d"), chat.answer(chat.ids("<think>e"))])
    assert marked(chat, first).endswith("«<think>b</think>c<|im_end|>»\n") and marked(chat, last).endswith("«<think>e»")


def test_what_the_generation_prompt_supplies_is_not_supervised(tiny_target: Path) -> None:
    supplied = TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think></think>' }}{% endif %}").replace(
        "'\n' + message['content']", "'\n' + ('<think></think>' if message['role'] == 'assistant' else '') + message['content']"
    )
    assert only(with_template(tiny_target, supplied), [user("a"), answer("b")]).endswith("assistant\n<think></think>«b<|im_end|>»\n")


def test_a_template_that_does_not_continue_its_generation_prompt_is_refused(tiny_target: Path) -> None:
    chat = with_template(tiny_target, TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}{% endif %}", "{{ '<|im_start|>assistant: ' }}{% endif %}"))
    with pytest.raises(Unrenderable, match="does not continue its own generation prompt"):
        chat.rows([user("a"), answer("b")])


def test_a_template_without_a_stop_token_is_refused(tiny_target: Path) -> None:
    chat = with_template(
        tiny_target,
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    )
    with pytest.raises(Unrenderable, match="no stop token"):
        chat.rows([user("a"), answer("b")])


def test_a_template_that_raises_is_refused_with_its_own_words(tiny_target: Path) -> None:
    chat = with_template(tiny_target, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Unrenderable, match="roles must alternate"):
        chat.rows([user("a"), answer("b")])


def test_an_answer_that_is_missing_is_not_taught_as_an_empty_one(chat: Chat) -> None:
    with pytest.raises(Unrenderable, match="an answer is missing"):
        chat.rows([user("a"), {"role": "assistant", "content": None}, user("b"), answer("c")])


def test_a_template_that_writes_the_bos_and_a_tokenizer_that_adds_one_give_one(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE.replace("<|im_start|>", "")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save_pretrained(folder)
    chat = load_chat(read_spec(folder), trust_remote_code=False)
    assert chat.tokenizer("cat")["input_ids"][0] == 1, "the tokenizer must add one for this test to mean anything"
    (row,) = chat.rows([user("a"), answer("b")])
    assert row.tokens.count(1) == 1 and row.tokens[0] == 1
    assert chat.prompt_ids([user("a")]) == server_prompt(chat, [user("a")])


@pytest.mark.parametrize("setting", [{"padding_side": "left"}, {"pad_token": "<|im_end|>"}, {"pad_token": "<|endoftext|>"}])
def test_padding_settings_of_the_tokenizer_change_nothing(tiny_target: Path, chat: Chat, setting: dict[str, str]) -> None:
    other = Chat(AutoTokenizer.from_pretrained(tiny_target, **setting), (STOP,))
    talk = [user("a"), answer("the cat"), user("c"), answer("d")]
    assert other.rows(talk) == chat.rows(talk)


def test_every_stop_token_of_the_target_counts(tiny_target: Path) -> None:
    two = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|endoftext|>' }}{% endfor %}"
    chat = with_template(tiny_target, two + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    chat.stop_ids = frozenset({0, STOP})
    assert only(chat, [user("a"), answer("b")]).endswith("«b<|endoftext|>»")


def test_a_written_answer_loses_its_stop_token_only(chat: Chat) -> None:
    ids = chat.ids("the cat")
    assert chat.answer([*ids, STOP])["content"] == "the cat" == chat.answer(ids)["content"]
    assert chat.answer([STOP])["content"] == "" == chat.answer([])["content"]


def test_the_very_tokens_that_were_sampled_are_taught_even_if_encoding_their_text_gives_others(chat: Chat) -> None:
    letters = [token for letter in "the cat" for token in chat.ids(letter)]
    assert letters != chat.ids("the cat"), "the text must have two encodings for this test to mean anything"
    (row,) = chat.rows([user("a"), chat.answer([*letters, STOP])])
    assert [token for token, supervised in zip(row.tokens, row.supervised, strict=True) if supervised] == [*letters, STOP]
    first, second = chat.rows([user("a"), chat.answer([*letters, STOP]), user("b"), answer("c")])
    assert first.tokens == row.tokens
    assert marked(chat, second).count("«") == 1, "a server encodes the history from its text, so the second answer has a row of its own"


def server_prompt(chat: Chat, messages: list[dict[str, Any]]) -> list[int]:
    found = chat.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    return list(found["input_ids"] if hasattr(found, "keys") else found)


TEXT = st.lists(st.sampled_from([*WORDS, "\n", "é", "🙂", "<think>", "  ", "ASSISTANT", "0"]), max_size=6).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(system=st.none() | TEXT, turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_any_talk_is_prompted_as_a_server_would_and_supervises_the_answers_alone(chat: Chat, system: str | None, turns: list[tuple[str, str]]) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    spans = []
    for question, reply in turns:
        messages += [user(question), answer(reply)]
        prompt = server_prompt(chat, messages[:-1])
        assert chat.prompt_ids(messages[:-1]) == prompt
        spans.append((len(prompt), prompt, reply))
    (row,) = chat.rows(messages)
    expected = [False] * len(row.tokens)
    for start, prompt, reply in spans:
        assert row.tokens[:start] == prompt, "the row up to an answer is what the server is given"
        stop = row.tokens.index(STOP, start)
        assert chat.tokenizer.decode(row.tokens[start:stop]) == reply
        expected[start : stop + 1] = [True] * (stop + 1 - start)
    assert row.supervised == expected


def test_a_folder_without_a_chat_template_or_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    for name in ("chat_template.jinja", "tokenizer.json"):
        (folder / name).unlink()
        with pytest.raises(UserError, match=str(folder)):
            load_chat(read_spec(folder), trust_remote_code=False)


TOY = '''
from transformers import PreTrainedTokenizer

class ToyTokenizer(PreTrainedTokenizer):
    """A character is a token; written in Python, so it knows no offsets."""
    def __init__(self, **given):
        self.chars = {chr(n): n for n in range(128)}
        super().__init__(**given)
    @property
    def vocab_size(self): return 128
    def get_vocab(self): return dict(self.chars)
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, token): return self.chars.get(token, 0)
    def _convert_id_to_token(self, index): return chr(index)
    def convert_tokens_to_string(self, tokens): return "".join(tokens)
    def save_vocabulary(self, folder, filename_prefix=None): return ()
'''


def test_a_tokenizer_that_brings_its_own_code_is_run_only_if_it_may_be(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "toy")
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tokenization_toy.py").write_text(TOY)
    about = {"tokenizer_class": "ToyTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_toy.ToyTokenizer", None]}, "eos_token": "<|im_end|>"}
    about["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="trust_remote_code = true"):
        load_chat(read_spec(folder), trust_remote_code=False)
    chat = load_chat(read_spec(folder), trust_remote_code=True)
    assert only(chat, [user("Hi"), answer("you")]).replace(" ", "") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«you<|im_end|>»\n"

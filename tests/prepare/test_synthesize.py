"""The target writes user turns: from the very prompt that a server would build, counted, and interrupted gives what uninterrupted gives."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEMPLATE, Outcome, conversation, make_tiny_target, write_run
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from eyas.artifact import read_manifest
from eyas.config import load
from eyas.errors import UserError
from eyas.pipeline import Run
from eyas.prepare.ask import FILE, Asker, Writer
from eyas.prepare.chat import Chat, load_chat
from eyas.prepare.rows import PROMPTS, read_rows
from eyas.prepare.synthesize import SENTINEL, EmptyTurn, Synthesis, empty_turn, synthesize
from eyas.progress import Reporter
from eyas.target.engine import Answer, Sampling
from eyas.target.spec import TargetSpec, read_spec
from eyas.target.transformers_engine import TransformersEngine

STOP = 2  # <|im_end|>
LIMIT = Sampling(max_new_tokens=9, temperature=0.3, top_p=0.5, seed=0)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + TEMPLATE
LLAMA_3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + '</s>' }}"
    "{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ {'user': 'USER: ', 'assistant': 'ASSISTANT: '}[m['role']] + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class Killed(BaseException):
    """Stands for the end of the process at that place."""


class FakeUser:
    """Says one of `texts`, as the seed draws, or each in turn without end; None is a turn that meets the limit. Dies before the call after `calls`."""

    def __init__(self, spec: TargetSpec, chat: Chat, texts: Sequence[str | None], in_turn: bool = False, calls: float = float("inf")) -> None:
        self.spec, self.chat, self.texts, self.in_turn, self.calls = spec, chat, texts, in_turn, calls
        self.asked: list[list[int]] = []
        self.samplings: list[Sampling] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        if len(self.samplings) >= self.calls:
            raise Killed
        drawn = random.Random(sampling.seed)
        said = [self.texts[(len(self.asked) + i) % len(self.texts)] if self.in_turn else drawn.choice(self.texts) for i in range(len(prompts))]
        self.asked += [list(prompt) for prompt in prompts]
        self.samplings.append(sampling)
        return [Answer(self.chat.ids("the cat"), "length") if text is None else Answer([*self.chat.ids(text), STOP], "stop") for text in said]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def spec(tiny_target: Path) -> TargetSpec:
    return read_spec(tiny_target)


@pytest.fixture(scope="module")
def chat(spec: TargetSpec) -> Chat:
    return load_chat(spec, False)


def with_template(target: Path, template: str, *added: str | AddedToken) -> Chat:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens([token if isinstance(token, AddedToken) else AddedToken(token, special=True, normalized=False) for token in added])
    tokenizer.chat_template = template
    return Chat(tokenizer, (STOP,))


def write(num: int, chat: Chat, engine: Writer, folder: Path, given: set[str] | None = None, batch: int = 4, max_length: int = 64) -> Synthesis:
    folder.mkdir(exist_ok=True)
    asker, reporter = Asker(engine, batch, {}, folder), Reporter(folder)
    return synthesize(num, empty_turn(chat), chat, asker, LIMIT, max_length, given or set(), lambda n: reporter.task(folder, "user turns", n, "turns"))


def texts(synthesis: Synthesis) -> list[str]:
    return [c.messages[0]["content"] for c in synthesis.conversations]


def server_prompt(chat: Chat, text: str) -> list[int]:
    found = chat.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True)
    return list(found["input_ids"] if hasattr(found, "keys") else found)


def shown(chat: Chat, turn: EmptyTurn) -> tuple[str, str, list[str]]:
    """(prompt as text, text that ends the turn, tokens that end it)."""
    return chat.decode(turn.prompt), turn.end_text, [chat.decode([token]) for token in turn.end_ids]


def test_a_default_system_prompt_stays_in_the_prompt_for_a_server_would_send_it(tiny_target: Path) -> None:
    chat = with_template(tiny_target, DEFAULT_SYSTEM)
    assert shown(chat, empty_turn(chat)) == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "", ["<|im_end|>"])


def test_a_template_with_a_bos_gives_one_even_if_the_tokenizer_adds_one_too(tiny_target: Path) -> None:
    chat = with_template(tiny_target, LLAMA_3, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    bos = chat.ids("<|begin_of_text|>")[0]
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)])
    assert chat.tokenizer("cat")["input_ids"][0] == bos, "the tokenizer must add one for this test to mean anything"
    turn = empty_turn(chat)
    assert shown(chat, turn) == ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n", "", ["<|eot_id|>"]), "though it strips the user's text"
    assert turn.prompt.count(bos) == 1


def test_the_marker_behind_the_users_text_ends_a_turn_and_the_space_before_it_is_the_targets_to_write(tiny_target: Path) -> None:
    chat = with_template(tiny_target, MISTRAL, "<s>", "</s>", "[INST]", "[/INST]")
    assert shown(chat, empty_turn(chat)) == ("<s>[INST]", "", ["[/INST]"])


def test_a_marker_that_the_tokenizer_does_not_call_special_counts_too(tiny_target: Path) -> None:
    template = "{{ '<|User|>' + messages[0]['content'] + '<|Assistant|>' }}"
    chat = with_template(tiny_target, template, *(AddedToken(name, special=False, normalized=False) for name in ("<|User|>", "<|Assistant|>", "  ")))
    turn = empty_turn(chat)
    assert shown(chat, turn) == ("<|User|>", "", ["<|Assistant|>"])
    assert set(chat.ids("<|User|><|Assistant|>")) <= turn.markers and chat.ids("  ")[0] not in turn.markers, "a run of spaces is no marker"


def test_a_template_without_a_token_for_the_end_is_cut_at_its_words(tiny_target: Path, spec: TargetSpec, tmp_path: Path) -> None:
    chat = with_template(tiny_target, PLAIN)
    assert shown(chat, empty_turn(chat)) == ("USER:", "ASSISTANT:", [])
    found = write(2, chat, FakeUser(spec, chat, [" the cat\nASSISTANT: sat", " the dog"], in_turn=True), tmp_path)
    assert texts(found) == ["the cat", "the dog"]


@pytest.mark.parametrize("template", [DEFAULT_SYSTEM, LLAMA_3, MISTRAL, PLAIN, TEMPLATE])
@pytest.mark.parametrize("text", ["Zebras run", "the cat", "0 or 1?", "é🙂"])
def test_the_prompt_is_what_a_servers_prompt_begins_with_whatever_the_user_says(tiny_target: Path, template: str, text: str) -> None:
    chat = with_template(
        tiny_target, template, "<s>", "</s>", "[INST]", "[/INST]", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
    )
    prompt = empty_turn(chat).prompt
    assert server_prompt(chat, text)[: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('a system message is needed') }}", "a system message is needed"),
        ("<|im_start|>user\n{{ messages[0]['content'] | upper }}", "once and as it is"),
        ("<|im_start|>{{ messages[0]['content'] }}<|im_end|>{{ messages[0]['content'] }}", "once and as it is"),
        ("{{ messages[0]['content'] }}<|im_end|>", "nothing before"),
    ],
)
def test_a_template_without_a_place_for_the_users_text_is_refused_with_the_reason_and_the_next_step(tiny_target: Path, template: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"data.synthesize .*{reason}.*data.conversations"):
        empty_turn(with_template(tiny_target, template))


def test_turns_are_asked_from_the_empty_turn_at_the_targets_own_distribution(chat: Chat, spec: TargetSpec, tmp_path: Path) -> None:
    engine = FakeUser(spec, chat, [f"q {n}" for n in range(9)], in_turn=True)
    found = write(9, chat, engine, tmp_path)
    assert engine.asked == [chat.ids("<|im_start|>user\n")] * 9 and texts(found) == [f"q {n}" for n in range(9)]
    assert {(s.temperature, s.top_p, s.max_new_tokens, s.extra_stop_ids) for s in engine.samplings} == {(1.0, 1.0, 9, (STOP,))}
    assert len({s.seed for s in engine.samplings}) == 3, "a batch must not say what another said"
    assert all(c.messages[1:] == [{"role": "assistant", "content": None}] and c.where == "synthesized" for c in found.conversations)


def test_a_turn_is_named_by_its_text_alone(chat: Chat, spec: TargetSpec, tmp_path: Path) -> None:
    one = write(2, chat, FakeUser(spec, chat, ["a", "b"], in_turn=True), tmp_path / "1")
    two = write(3, chat, FakeUser(spec, chat, ["c", "b", "a"], in_turn=True), tmp_path / "2")
    ids = [{c.messages[0]["content"]: c.id for c in found.conversations} for found in (one, two)]
    assert ids[0] == {text: ids[1][text] for text in "ab"} and len(set(ids[1].values())) == 3
    assert all(name.startswith("synthesized-") for name in ids[1].values())


def test_what_no_user_would_send_is_counted_by_reason_and_others_are_asked_for_instead(chat: Chat, spec: TargetSpec, tmp_path: Path) -> None:
    said = ["the cat", " the cat ", "  \n", None, "a<|im_start|>b", "x " * 40, "given", *(f"q {n}" for n in range(5))]
    found = write(5, chat, FakeUser(spec, chat, said, in_turn=True), tmp_path, given={"given"})
    assert texts(found) == ["the cat", "q 0", "q 1", "q 2", "q 3"] and found.tried == 11
    assert found.dropped == {
        "duplicate": 2,
        "empty": 1,
        "no end within data.max_new_tokens": 1,
        "a special token inside": 1,
        "no room for an answer within data.max_length": 1,
    }
    assert found.tried == len(found.conversations) + sum(found.dropped.values())


def test_three_tries_for_each_turn_wanted_and_no_more(chat: Chat, spec: TargetSpec, tmp_path: Path) -> None:
    engine = FakeUser(spec, chat, ["a", "b"], in_turn=True)
    found = write(4, chat, engine, tmp_path)
    assert texts(found) == ["a", "b"] and found.tried == len(engine.asked) == 12 and found.dropped == {"duplicate": 10}


def test_killed_after_any_batch_and_resumed_gives_the_same_turns_and_asks_for_none_again(chat: Chat, spec: TargetSpec, tmp_path: Path) -> None:
    said = [None, "", *(f"q {n}" for n in range(12))]
    whole = write(10, chat, uncut := FakeUser(spec, chat, said), tmp_path / "whole")
    assert whole.dropped["duplicate"] and len(uncut.samplings) > 3, "more than one round for this test to mean anything"
    for calls in range(len(uncut.samplings)):
        with pytest.raises(Killed):
            write(10, chat, first := FakeUser(spec, chat, said, calls=calls), tmp_path / str(calls))
        assert write(10, chat, second := FakeUser(spec, chat, said), tmp_path / str(calls)) == whole
        assert first.samplings + second.samplings == uncut.samplings
    assert write(10, chat, FakeUser(spec, chat, said, calls=0), tmp_path / "whole") == whole


def test_the_marker_ends_a_turn_of_a_real_target_that_has_another_stop_token(tiny_target: Path, spec: TargetSpec) -> None:
    engine = TransformersEngine(spec, torch.device("cpu"), torch.float32, False)
    free = engine.generate([[1, 90, 91]], LIMIT)[0].tokens
    marker = next(token for token in free if token != STOP)
    ended = engine.generate([[1, 90, 91]], Sampling(**{**LIMIT.__dict__, "extra_stop_ids": (marker,)}))[0]
    assert ended == Answer(free[: free.index(marker) + 1], "stop")


def make_talkative_target(folder: Path) -> Path:
    """The tiny target, its head changed so that it writes letters and ends a turn after about six tokens."""
    make_tiny_target(folder, num_layers=6)
    tensors = load_file(folder / "model.safetensors")
    head_VD, norm_D = tensors["lm_head.weight"], tensors["model.norm.weight"]
    # A hidden state whose first element is always large and positive turns that column of the head into a bias.
    tensors["model.embed_tokens.weight"][:, 0] = 40.0
    norm_D.fill_(1.0)
    head_VD *= 0.2
    head_VD[:, 0] = -4.0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "abcdefghijklmnop"]
    head_VD[letters, 0] = 1.0
    head_VD[STOP, 0] = 1.2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative_target(tmp_path_factory.mktemp("talkative") / "target")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_file_that_names_a_target_alone_ends_in_prepared_rows(eyas: Callable[..., Outcome], talkative: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, talkative, [], data={"conversations": [], "synthesize": 20, "max_new_tokens": 24})
    outcome = eyas("run", path, "--until", "prepare")
    assert outcome.code == 0 and "user turns that the target wrote are usable" in outcome.err
    out = tmp_path / "runs" / "run" / "prepare"
    manifest = read_manifest(out)
    assert manifest is not None
    counts, written = manifest.counts, manifest.counts["synthesized"]
    assert written["tried"] == written["usable"] + sum(written["dropped"].values()) and written["usable"] == counts["conversations"]
    rows, entries = read_rows(out), lines(out / "rows.jsonl")
    assert len(rows) == counts["rows"] == counts["conversations"] - sum(counts["dropped"].values()) > 5
    assert all(entry["source"] == "synthesized" and entry["conversation"].startswith("synthesized-") for entry in entries)
    held = {entry["conversation"] for entry in entries if entry["holdout"]}
    assert {prompt["id"] for prompt in lines(out / PROMPTS)} == held and 0 < len(held) < len(rows), "no prompt that was trained on"
    assert "nothing to do" in eyas("run", path, "--until", "prepare").err


def test_a_stage_killed_while_turns_are_written_resumes_to_the_same_rows(talkative: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, talkative, [], data={"conversations": [], "synthesize": 12, "max_new_tokens": 24, "generate_batch": 5})
    whole = Run(load(path, ["run.folder=whole"]))
    whole.only("prepare")
    real, left = TransformersEngine.generate, [2]

    def dying(self: TransformersEngine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return real(self, prompts, sampling)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TransformersEngine, "generate", dying)
        Run(load(path, ["run.folder=part"])).only("prepare")
    assert len((tmp_path / "part" / "prepare" / FILE).read_bytes().splitlines()) == 10
    Run(load(path, ["run.folder=part"])).only("prepare")
    for name in ("rows.jsonl", "rows.safetensors", PROMPTS, FILE):
        assert (tmp_path / "part" / "prepare" / name).read_bytes() == (tmp_path / "whole" / "prepare" / name).read_bytes(), name


def test_written_conversations_stand_beside_those_of_files_even_where_files_are_not_to_be_answered(talkative: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, talkative, [conversation(n) for n in range(4)], data={"synthesize": 6, "max_new_tokens": 24, "regenerate": "never"})
    run = Run(load(path, []))
    run.only("prepare")
    sources = [entry["source"] for entry in lines(run.folder / "prepare" / "rows.jsonl")]
    assert "synthesized" in sources[4:] and not any(source == "synthesized" for source in sources[:4])


def test_the_number_of_turns_and_the_targets_weights_are_settings_of_the_stage(talkative: Path, tiny_target: Path, tmp_path: Path) -> None:
    def made(target: Path, *changes: str) -> dict[str, Any]:
        return Run(load(write_run(tmp_path, target), ["data.regenerate=never", *changes])).settings["prepare"]

    assert made(talkative)["target"]["weights"] == "" and made(talkative, "data.synthesize=3")["target"]["weights"] != ""
    assert made(talkative, "data.synthesize=3")["target"] != made(tiny_target, "data.synthesize=3")["target"]
    assert made(talkative, "data.synthesize=3")["data"] != made(talkative, "data.synthesize=4")["data"]


def test_no_usable_turn_at_all_ends_in_a_sentence_with_the_reasons(eyas: Callable[..., Outcome], talkative: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, talkative, [], data={"conversations": [], "synthesize": 3, "max_length": 8})
    error = eyas("run", path, "--until", "prepare").error
    assert "data.synthesize = 3" in error and "0 of 9" in error and "data.max_length" in error and "data.conversations" in error


def test_too_few_usable_turns_are_said_and_gone_on_with(
    eyas: Callable[..., Outcome], talkative: Path, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeUser(read_spec(talkative), chat, ["the cat", "the dog", "a bird", "a tree"])
    monkeypatch.setattr("eyas.prepare.run.open_engine", lambda *_: fake)
    outcome = eyas("run", write_run(tmp_path, talkative, [], data={"conversations": [], "synthesize": 10}), "--until", "prepare")
    assert outcome.code == 0 and "4 of 30 user turns" in outcome.err and "asks for 10 conversations; going on with 4" in outcome.err


def test_neither_files_nor_turns_to_write_is_refused_with_the_next_step(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.conversations names no file and data\.synthesize is 0.*set data\.synthesize"):
        load(write_run(tmp_path, tiny_target, data={"conversations": []}), [])


@pytest.mark.parametrize(("override", "batch"), [([], 16), (['target.engine="vllm"'], 1024), (["data.generate_batch=3"], 3)])
def test_the_batch_is_the_run_files_else_what_suits_the_engine(
    talkative: Path, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: list[str], batch: int
) -> None:
    fake = FakeUser(read_spec(talkative), chat, [f"q {n}" for n in range(4000)], in_turn=True)
    sizes: list[int] = []
    real = fake.generate

    def measured(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        sizes.append(len(prompts))
        return real(prompts, sampling)

    monkeypatch.setattr(fake, "generate", measured)
    monkeypatch.setattr("eyas.prepare.run.open_engine", lambda *_: fake)
    num = batch + 1
    Run(load(write_run(tmp_path, talkative, [], data={"conversations": [], "synthesize": num}), override)).only("prepare")
    assert max(sizes) == sizes[0] == batch


@pytest.mark.slow
def test_smollm2_writes_questions_of_its_own_and_answers_them(smollm2: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, smollm2, [], data={"conversations": [], "synthesize": 6, "max_new_tokens": 64, "holdout": 0.0})
    run = Run(load(path, []))
    run.only("prepare")
    out = run.folder / "prepare"
    chat = load_chat(read_spec(smollm2), False)
    turn = empty_turn(chat)
    before = chat.tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}], tokenize=False).partition(SENTINEL)[0]
    assert turn.prompt == chat.ids(before) and before.endswith("<|im_end|>\n<|im_start|>user\n"), "with the default system prompt"
    assert turn.end_ids == tuple(chat.ids("<|im_end|>"))
    rows = read_rows(out)
    manifest = read_manifest(out)
    assert manifest is not None and 3 <= len(rows) == manifest.counts["conversations"] - sum(manifest.counts["dropped"].values())
    assert all(row.tokens[: len(turn.prompt)].tolist() == turn.prompt and not row.supervised[: len(turn.prompt)].any() for row in rows)
    assert len({tuple(row.tokens.tolist()) for row in rows}) == len(rows)

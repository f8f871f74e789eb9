"""The engine interface, run by transformers: batching, padding and randomness change nothing that they should not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.errors import UserError
from eyas.target.engine import Answer, Sampling, resolve_device, resolve_dtype
from eyas.target.spec import read_spec
from eyas.target.transformers_engine import TransformersEngine

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0)
SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=3)
# Lengths far apart, so that padding is long; token 0, the padding's id, stands at both ends and inside.
PROMPTS = [[5], list(range(3, 60)), [0, 7, 0, 0], [1, 9, 8, 7], [0], [11, 0]]


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> TransformersEngine:
    return TransformersEngine(read_spec(tiny_target), torch.device("cpu"), torch.float32, False)


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@torch.inference_mode()
def argmax_answer(model: Any, prompt: list[int], limit: int, stops: tuple[int, ...]) -> Answer:
    """Greedy decoding as its definition says: the whole text fed anew for each token."""
    text = list(prompt)
    for _ in range(limit):
        text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
        if text[-1] in stops:
            return Answer(text[len(prompt) :], "stop")
    return Answer(text[len(prompt) :], "length")


def test_greedy_answers_are_the_argmax_whatever_the_batch_and_padding(engine: TransformersEngine, model: Any) -> None:
    truth = [argmax_answer(model, prompt, 12, (2,)) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, GREEDY) == truth
    assert [engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS] == truth
    assert engine.generate(PROMPTS[::-1], GREEDY)[::-1] == truth


def test_an_answer_ends_with_its_stop_token_and_says_why_it_ended(tiny_target: Path, model: Any) -> None:
    first = argmax_answer(model, PROMPTS[1], 12, ())
    stop = first.tokens[3]
    spec = replace(read_spec(tiny_target), stop_ids=(2, stop))
    engine = TransformersEngine(spec, torch.device("cpu"), torch.float32, False)
    stopped, other = engine.generate([PROMPTS[1], PROMPTS[3]], GREEDY)
    end = first.tokens.index(stop) + 1
    assert stopped == Answer(first.tokens[:end], "stop")
    assert other == argmax_answer(model, PROMPTS[3], 12, (2, stop)), "what ends early must not disturb its neighbour"


def test_a_stop_token_of_id_0_stops(tiny_target: Path, model: Any) -> None:
    engine = TransformersEngine(replace(read_spec(tiny_target), stop_ids=(0,)), torch.device("cpu"), torch.float32, False)
    with torch.no_grad():  # 0 is now the likeliest after anything
        engine.model.lm_head.weight.mul_(0)
    assert engine.generate([[5], [7, 8, 9]], GREEDY) == [Answer([0], "stop")] * 2


def test_a_model_without_stop_tokens_writes_to_the_limit(tiny_target: Path) -> None:
    engine = TransformersEngine(replace(read_spec(tiny_target), stop_ids=()), torch.device("cpu"), torch.float32, False)
    assert all(answer.finish == "length" and len(answer.tokens) == 12 for answer in engine.generate(PROMPTS, GREEDY))


def test_sampled_answers_follow_from_the_seed(engine: TransformersEngine) -> None:
    first = engine.generate(PROMPTS, SAMPLED)
    assert engine.generate(PROMPTS, SAMPLED) == first
    assert engine.generate(PROMPTS, replace(SAMPLED, seed=4)) != first


def test_sampling_leaves_the_global_generator_alone(engine: TransformersEngine) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    engine.generate(PROMPTS[:2], SAMPLED)
    assert torch.equal(torch.rand(3), expected)


def test_a_cold_nucleus_samples_what_greedy_writes(engine: TransformersEngine) -> None:
    assert engine.generate(PROMPTS, Sampling(12, 1.0, 1e-6, seed=5)) == engine.generate(PROMPTS, GREEDY)


def test_sampling_at_temperature_1_draws_from_the_targets_own_distribution(engine: TransformersEngine, model: Any) -> None:
    """2,048 first tokens against softmax(logits): total variation within what so many draws can miss."""
    draws = torch.tensor([answer.tokens[0] for answer in engine.generate([PROMPTS[3]] * 2048, Sampling(1, 1.0, 1.0, seed=1))])
    with torch.inference_mode():
        p = model(input_ids=torch.tensor([PROMPTS[3]])).logits[0, -1].softmax(-1)
    found = torch.bincount(draws, minlength=len(p)) / len(draws)
    allowed = 0.5 * (2 * p * (1 - p) / (3.14159 * len(draws))).sqrt().sum()  # the expected distance of an honest sample
    assert 0.5 * (found - p).abs().sum() < 1.5 * allowed


def test_habits_in_the_models_generation_config_do_not_bend_its_answers(tmp_path: Path, tiny_target: Path, model: Any) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    path = folder / "generation_config.json"
    habits = {"repetition_penalty": 5.0, "temperature": 0.1, "top_k": 2, "do_sample": True, "min_new_tokens": 3, "max_length": 8}
    path.write_text(json.dumps(json.loads(path.read_text()) | habits))
    engine = TransformersEngine(read_spec(folder), torch.device("cpu"), torch.float32, False)
    assert engine.generate(PROMPTS, GREEDY) == [argmax_answer(model, prompt, 12, (2,)) for prompt in PROMPTS]


def test_log_probabilities_are_the_log_softmax_of_the_logits(engine: TransformersEngine, model: Any) -> None:
    row = PROMPTS[1]
    with torch.inference_mode():
        log_p = model(input_ids=torch.tensor([row])).logits[0].float().log_softmax(-1)
    expected = torch.stack([log_p[i, row[i + 1]] for i in range(len(row) - 1)])
    found = engine.log_probabilities(row)
    assert found.shape == (len(row) - 1,) and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_feeding_in_pieces_gives_the_logits_of_feeding_at_once(engine: TransformersEngine, model: Any) -> None:
    row = PROMPTS[1]
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([row])).logits[0]
    cache = engine.new_cache()
    pieces = torch.cat([engine.step(row[a:b], cache) for a, b in ((0, 20), (20, 21), (21, len(row)))])
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == len(row)


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    for device in ("nonsense", "cuda:x", "meta", *(() if torch.cuda.is_available() else ("cuda", "cuda:0"))):
        with pytest.raises(UserError, match=r"target\.device") as caught:
            resolve_device(device)
        assert device in str(caught.value)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("instructions", "dtype"), [("amx_bf16", torch.bfloat16), ("avx512_bf16", torch.bfloat16), ("avx2", torch.float32)])
def test_auto_precision_is_what_the_hardware_multiplies_fast_and_a_named_one_is_kept(
    instructions: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True, "avx512_f": True}, raising=False)
    assert resolve_dtype("auto", torch.device("cpu")) == dtype
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda")) == torch.float32


def test_a_folder_that_transformers_cannot_load_is_refused_by_name(tmp_path: Path, tiny_target: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    config = json.loads((folder / "config.json").read_text())
    for change in ({"model_type": "no_such_model"}, {"hidden_size": 48}):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match="cannot load") as caught:
            TransformersEngine(read_spec(folder), torch.device("cpu"), torch.float32, False)
        assert str(folder) in str(caught.value)

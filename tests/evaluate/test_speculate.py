"""Speculative against plain decoding, token for token, and simulated against measured acceptance, count for count.

Two drafts over the tiny target: one of random weights, nearly always wrong, and one taught the target's own greedy answers, often right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from distribution import exact, p_value
from draft_helpers import random_draft

from eyas.config import DraftSection, TrainSection
from eyas.draft.init import new_draft
from eyas.draft.model import Draft
from eyas.draft.shape import draft_shape
from eyas.evaluate.outlook import expected_rounds, seen
from eyas.evaluate.simulate import Acceptance, Simulator, nothing, simulate_rounds
from eyas.evaluate.speculate import Choose, chooser, plain_decode, speculative_decode
from eyas.export.check import ExportedDraft
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import read_head
from eyas.target.spec import read_spec
from eyas.target.transformers_engine import TransformersEngine
from eyas.train.batch import make_batch
from eyas.train.loss import Objective, Teacher, loss_backward
from eyas.train.optim import make_optimizer
from eyas.train.unroll import unroll

CPU = torch.device("cpu")
NO_STOP: frozenset[int] = frozenset()
PROMPTS = [[1, 50, 60, 70], [1], [5, 200, 17, 17, 90, 3, 44], [300, 301, 302], [120] * 9, [1, 77, 31, 250, 9, 14, 88, 190, 6, 41, 230, 19]]
LENGTH = 28


@dataclass(frozen=True)
class Setting:
    """The target, what the draft needs of it, the draft vocabulary, and both drafts by name."""

    engine: TransformersEngine
    embedding: torch.Tensor
    ids: torch.Tensor
    drafts: dict[str, Draft]

    def plain(self, prompt: list[int], stop: frozenset[int], limit: int) -> list[int]:
        return plain_decode(self.engine, prompt, stop, limit).tokens

    def both(self, name: str, prompt: list[int], stop: frozenset[int], limit: int, num_draft_tokens: int) -> tuple[list[int], Acceptance, Acceptance]:
        """-> speculative tokens, measured acceptance, simulated acceptance."""
        draft = self.drafts[name]
        decoded = speculative_decode(self.engine, draft, self.embedding, self.ids, prompt, stop, limit, num_draft_tokens)
        (states_TLD,) = self.engine.capture([[*prompt, *decoded.tokens]], [*draft.shape.aux_layers, self.engine.spec.num_layers])
        simulator = Simulator.of(ExportedDraft(draft, self.ids), read_head(self.engine.spec), 0.0, torch.float32, CPU)
        simulated = simulator.foresee(states_TLD, prompt, decoded.tokens, num_draft_tokens).acceptance(num_draft_tokens)
        return decoded.tokens, decoded.acceptance, simulated


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads over a model this small spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def setting(tiny_target: Path, one_thread: None) -> Setting:
    spec = read_spec(tiny_target)
    engine = TransformersEngine(spec, CPU, torch.float32, False)
    head = read_head(spec)
    answers = [plain_decode(engine, prompt, NO_STOP, LENGTH).tokens for prompt in PROMPTS]
    said = sorted({token for answer in answers for token in answer})
    # Some tokens that the target does say are left out, so that the draft can never say them.
    ids = torch.tensor(sorted(set(range(0, 320, 2)) | set(said[::3]) | set(said[1::3])))
    shape = draft_shape(DraftSection(), spec, len(ids), spec.default_layers)
    good = new_draft(shape, 0, ids, head)
    teach(good, engine, answers, ids)
    return Setting(engine, head.embedding, ids, {"random": random_draft(shape), "good": good})


def teach(draft: Draft, engine: TransformersEngine, answers: list[list[int]], ids: torch.Tensor, num_steps: int = 60) -> None:
    """Overfits the draft to the very texts that it will be tried on: here it must be good, not general."""
    spec, head = engine.spec, read_head(engine.spec)
    rows = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = [*prompt, *answer]
        (states,) = engine.capture([text], [*draft.shape.aux_layers, spec.num_layers])
        rows.append(FeatureRow("", torch.tensor(text, dtype=torch.int32), torch.arange(len(text)) >= len(prompt), states[:, :3].clone(), states[:, 3].clone()))
    batch = make_batch(rows, head.embedding, 4, torch.float32)
    teacher = Teacher(head, ids, torch.float32, CPU)
    optimizer = make_optimizer(draft, TrainSection(optimizer="adamw", lr=5e-3), torch.float32)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_backward(unroll(draft, batch, 4), draft.lm_head, teacher, batch, Objective(0.8, float(len(batch.rows_R))))
        optimizer.set_rates(1.0)
        optimizer.step()
    draft.eval()


@pytest.mark.parametrize("name", ["random", "good"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
def test_speculative_decoding_writes_the_tokens_of_plain_decoding_and_is_simulated_exactly(setting: Setting, name: str, num_draft_tokens: int) -> None:
    measured_sum = simulated_sum = nothing(num_draft_tokens)
    for prompt in PROMPTS:
        wanted = setting.plain(prompt, NO_STOP, LENGTH)
        tokens, measured, simulated = setting.both(name, prompt, NO_STOP, LENGTH, num_draft_tokens)
        assert tokens == wanted
        assert simulated == measured
        measured_sum, simulated_sum = measured_sum + measured, simulated_sum + simulated
    assert measured_sum == simulated_sum
    assert measured_sum.length is not None
    if name == "good":
        # Accepted often, and refused often: a draft that does only one of them would leave half of the loop untried.
        assert measured_sum.length > 1.2
        assert 0 < measured_sum.accepted[-1] < measured_sum.rounds


def test_a_good_draft_saves_forwards_of_the_target(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = setting.engine.step
    monkeypatch.setattr(setting.engine, "step", lambda ids, cache: calls.append(len(ids)) or real(ids, cache))
    prompt = PROMPTS[2]
    setting.plain(prompt, NO_STOP, LENGTH)
    plain_calls = len(calls)
    calls.clear()
    decoded = speculative_decode(setting.engine, setting.drafts["good"], setting.embedding, setting.ids, prompt, NO_STOP, LENGTH, 3)
    assert plain_calls == LENGTH
    assert calls == [len(prompt)] + [4] * decoded.acceptance.rounds
    assert len(calls) < plain_calls


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 4])
def test_the_limit_may_fall_anywhere_in_a_draft(setting: Setting, num_draft_tokens: int) -> None:
    prompt = PROMPTS[0]
    text = setting.plain(prompt, NO_STOP, LENGTH)
    inside = 0
    for limit in range(1, 12):
        tokens, measured, simulated = setting.both("good", prompt, NO_STOP, limit, num_draft_tokens)
        assert tokens == text[:limit]
        assert simulated == measured
        inside += measured.rounds > 0 and limit - 1 < measured.rounds + sum(measured.accepted)
        assert measured.rounds + sum(measured.accepted) in (limit - 1, limit) or (limit == 1 and measured.rounds == 0)
    assert inside or num_draft_tokens < 3, "no limit fell on an accepted draft token"


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 4])
def test_a_stop_token_may_fall_anywhere_in_a_draft(setting: Setting, num_draft_tokens: int) -> None:
    """Each token that the target says is made the stop token in turn: known, accepted, refused or added by the target, it ends the text once."""
    ends = set()
    for prompt in PROMPTS[:3]:
        text = setting.plain(prompt, NO_STOP, LENGTH)
        for place in sorted({text.index(token) for token in text})[:8]:
            stop = frozenset([text[place]])
            tokens, measured, simulated = setting.both("good", prompt, stop, LENGTH, num_draft_tokens)
            assert tokens == setting.plain(prompt, stop, LENGTH) == text[: place + 1]
            assert simulated == measured
            ends.add(measured.rounds + sum(measured.accepted) - place)
    assert ends == {0, 1}, "a stop token must have come as the target's own token as well as inside a draft"


def test_an_answer_that_stops_at_once_has_no_round(setting: Setting) -> None:
    first = setting.plain(PROMPTS[0], NO_STOP, 1)
    tokens, measured, simulated = setting.both("good", PROMPTS[0], frozenset(first), LENGTH, 3)
    assert (tokens, measured, simulated) == (first, nothing(3), nothing(3))


def test_the_smallest_margin_is_that_of_the_targets_two_best_tokens(setting: Setting) -> None:
    prompt = PROMPTS[3]
    decoded = plain_decode(setting.engine, prompt, NO_STOP, 6)
    logits = setting.engine.model(input_ids=torch.tensor([[*prompt, *decoded.tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    assert decoded.smallest_margin == pytest.approx(float((best[:, 0] - best[:, 1]).min()), rel=1e-3)
    assert decoded.tokens == logits.argmax(-1).tolist()


SAMPLES, TEMPERATURE = 800, 0.2  # at which the tiny target has a handful of likely tokens at each place


def drawn_texts(setting: Setting, choose: Choose, name: str) -> tuple[list[list[int]], Acceptance]:
    texts, total = [], nothing(3)
    for _ in range(SAMPLES):
        decoded = speculative_decode(setting.engine, setting.drafts[name], setting.embedding, setting.ids, PROMPTS[0], NO_STOP, 4, 3, choose)
        texts.append(decoded.tokens)
        total = total + decoded.acceptance
    return texts, total


def test_sampled_texts_are_distributed_as_without_a_draft(setting: Setting) -> None:
    """Against the exact distribution of the target; and a loop that favours what was drafted is found out by the same test."""

    def logits(text: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return setting.engine.model(input_ids=torch.tensor([text])).logits[0, -1]

    probabilities = exact(logits, PROMPTS[0], 4, TEMPERATURE, 1 / SAMPLES)
    texts, acceptance = drawn_texts(setting, chooser(TEMPERATURE, 1), "good")
    assert p_value(texts, probabilities) > 0.01
    assert 0.1 * acceptance.rounds < sum(acceptance.accepted), "a draft that is never accepted proves nothing"

    fair = chooser(TEMPERATURE, 2)

    def favours_its_likeliest(logits_NV: torch.Tensor) -> torch.Tensor:
        likeliest = logits_NV.argmax(-1)
        p = (logits_NV / TEMPERATURE).softmax(-1).gather(-1, likeliest[..., None])[..., 0]
        return torch.where(p > 0.4, likeliest, fair(logits_NV))

    assert p_value(drawn_texts(setting, favours_its_likeliest, "good")[0], probabilities) < 1e-6


def test_a_sampled_text_is_simulated_exactly_and_a_draft_that_samples_as_sums_of_the_smaller_chance(setting: Setting) -> None:
    """What a greedy draft would have been accepted follows from the text. For a draft that samples: the mean over many texts is the mean of sum min(p, q)."""
    draft, prompt, head = setting.drafts["good"], PROMPTS[0], read_head(setting.engine.spec)
    simulator = Simulator.of(ExportedDraft(draft, setting.ids), head, TEMPERATURE, torch.float32, CPU)
    rates, wanted = [], []
    for number in range(150):
        decoded = speculative_decode(setting.engine, draft, setting.embedding, setting.ids, prompt, NO_STOP, 12, 3, chooser(TEMPERATURE, number))
        (states_TLD,) = setting.engine.capture([[*prompt, *decoded.tokens]], [*draft.shape.aux_layers, setting.engine.spec.num_layers])
        found = simulator.foresee(states_TLD, prompt, decoded.tokens, 3)
        assert found.acceptance(3) == decoded.acceptance
        assert found.rate_RK is not None and set(seen(found, 3)) == {"1", "2", "4", "sampled"}
        rates.append(found.rate_RK[:, 0])
        first = torch.arange(len(prompt) - 1, len(prompt) + 10)  # row i predicts x[i + 2], from the state at i + 1 on the target's side
        p_RV = (head.logits(states_TLD[first + 1, 3]) / TEMPERATURE).softmax(-1)
        row = FeatureRow("", torch.tensor([*prompt, *decoded.tokens], dtype=torch.int32), torch.arange(len(prompt) + 12) >= len(prompt),
                         states_TLD[:, :3], states_TLD[:, 3])  # fmt: skip
        (step,) = unroll(draft, make_batch([row], head.embedding, 1, torch.float32), 1)
        q_RV = torch.zeros_like(p_RV)
        q_RV[:, setting.ids] = (draft.lm_head(step.hidden_RD) / TEMPERATURE).softmax(-1).detach()
        wanted.append(torch.minimum(p_RV, q_RV).sum(-1))
    mean, spread = torch.cat(rates).mean(), torch.cat(rates).std() / len(torch.cat(rates)) ** 0.5
    assert 0.05 < mean < 0.95 and abs(mean - torch.cat(wanted).mean()) < 4 * spread


def test_rounds_in_the_mean_are_the_rounds_where_chances_are_nought_or_one() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        lengths = torch.randint(1, 9, (3,), generator=generator).tolist()
        positions, steps = [], []
        for turn, length in enumerate(lengths):
            positions += [20 * turn + at for at in range(length)]
            steps += [min(3, length - at) for at in range(length)]
        matches_RK = torch.rand(len(positions), 3, generator=generator) < 0.6
        wanted = simulate_rounds(matches_RK, torch.tensor(steps), torch.tensor(positions))
        assert expected_rounds(matches_RK.float(), torch.tensor(steps), torch.tensor(positions)) == (wanted.rounds, sum(wanted.accepted))
    (rounds, accepted), half = expected_rounds(torch.full((4, 2), 0.5), torch.tensor([2, 2, 2, 1]), torch.arange(4)), 0.5
    # Begins: row 0; row 1 by a miss; row 2 by 0 -> 2 (hit, miss) or 1 -> 2 (miss); row 3 by 0 -> 3 (two hits), 1 -> 3 (hit, miss), 2 -> 3 (miss).
    begins = [1.0, half, half * half + half * half, half * half + half * half * half + half * half]
    assert rounds == sum(begins) and accepted == sum(begins[:3]) * (half + half * half) + begins[3] * half

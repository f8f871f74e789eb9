"""Rounds as they are served: only leading matches count, and each round starts where the last one left the text.

Legend: R rows, K steps.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from draft_helpers import random_draft, random_head, random_ids, random_row, small_shape

from eyas.evaluate.outlook import by_length, outlook
from eyas.evaluate.simulate import FAR, Acceptance, Foreseen, foresee, interval, nothing, one_round, rank_of, simulate, simulate_rounds
from eyas.train.batch import countable_steps, make_batch


def rounds(matches: list[list[int]], num_steps: list[int], positions: list[int]) -> Acceptance:
    return simulate_rounds(torch.tensor(matches, dtype=torch.bool), torch.tensor(num_steps), torch.tensor(positions))


def walk(supervised: list[bool], matches: dict[int, list[bool]], num_draft_tokens: int) -> Acceptance:
    """Serves each answer from its first token, walking over the text one token at a time.

    matches[i][k]: whether the draft begun at position i says x[i+2+k] when all before it is the text's.
    """
    count, drafted, accepted = 0, [0] * num_draft_tokens, [0] * num_draft_tokens
    position = 0
    while position < len(supervised):
        if not supervised[position]:
            position += 1
            continue
        known = position  # the target itself gives the answer's first token
        while known + 1 < len(supervised) and supervised[known + 1]:
            count += 1
            row, arrived = known - 1, 0
            for k in range(num_draft_tokens):
                following = known + 1 + arrived
                if following >= len(supervised) or not supervised[following]:
                    break
                drafted[k] += 1
                if not matches[row][k]:
                    break
                accepted[k] += 1
                arrived += 1
            known += arrived
            if known + 1 < len(supervised) and supervised[known + 1]:
                known += 1  # the token that the target adds
        position = known + 1
    return Acceptance(count, tuple(drafted), tuple(accepted))


def test_the_worked_example_of_the_docstring_holds() -> None:
    """x5 is known, x9 the last; row 4 drafts x6 right and x7 wrong, row 6 drafts x8 and x9 right. What rows 5 and 7 would say is never asked."""
    for rows_between in ([0, 0], [1, 1]):
        found = rounds([[1, 0], rows_between, [1, 1], [rows_between[0], 0]], [2, 2, 2, 1], [4, 5, 6, 7])
        assert found == Acceptance(2, (2, 2), (2, 1))
        assert found.length == 1 + 3 / 2


@pytest.mark.parametrize(
    ("matches", "accepted", "drafted"),
    [
        ([1, 0, 1, 0], (1, 0, 0, 0), (1, 1, 0, 0)),
        ([1, 1, 0, 1], (1, 1, 0, 0), (1, 1, 1, 0)),
        ([0, 1, 1, 1], (0, 0, 0, 0), (1, 0, 0, 0)),
        ([1, 1, 1, 1], (1, 1, 1, 1), (1, 1, 1, 1)),
    ],
)
def test_only_leading_matches_are_accepted(matches: list[int], accepted: tuple[int, ...], drafted: tuple[int, ...]) -> None:
    found = rounds([matches], [4], [0])
    assert found == Acceptance(1, drafted, accepted)
    assert found.length == 1 + sum(accepted)
    assert found == one_round(sum(accepted), 4, 4)


def test_conditional_and_cumulative_rates_are_kept_apart() -> None:
    total = nothing(3) + one_round(3, 3, 3) + one_round(1, 3, 3) + one_round(1, 3, 3) + one_round(0, 3, 3)
    assert total.per_position == [3 / 4, 1 / 3, 1 / 1]
    assert total.survival == [3 / 4, 1 / 4, 1 / 4]
    assert total.length == 1 + sum(rate for rate in total.survival if rate is not None) == 2.25
    product = 1.0
    for conditional, cumulative in zip(total.per_position, total.survival, strict=True):
        assert conditional is not None
        product *= conditional
        assert product == pytest.approx(cumulative)


def test_no_round_gives_no_rate_instead_of_a_false_one() -> None:
    assert (nothing(2).length, nothing(2).per_position, nothing(2).survival) == (None, [None, None], [None, None])
    assert one_round(0, 2, 2).per_position == [0.0, None]


def test_a_draft_is_not_blamed_for_tokens_behind_the_end_of_the_text() -> None:
    """Two tokens were still to come and both were right: the third place of the draft was up for no comparison."""
    found = rounds([[1, 1, 0]], [2], [0])
    assert found == Acceptance(1, (1, 1, 0), (1, 1, 0))
    assert found.per_position == [1.0, 1.0, None]


def test_a_match_behind_the_end_of_the_text_is_not_counted() -> None:
    assert rounds([[1, 1, 1]], [1], [0]) == Acceptance(1, (1, 0, 0), (1, 0, 0))


def test_each_turn_begins_with_a_round_of_its_own() -> None:
    """Rows 0 to 1 and 3 to 4: a draft that would reach over the gap ends at its turn's end."""
    found = rounds([[1, 1], [1, 0], [0, 1], [1, 0]], [2, 1, 2, 1], [0, 1, 3, 4])
    assert found == one_round(2, 2, 2) + one_round(0, 2, 2) + one_round(1, 1, 2)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_rounds_equal_those_of_walking_over_the_text(num_draft_tokens: int) -> None:
    generator = random.Random(num_draft_tokens)
    for _ in range(300):
        supervised = [generator.random() < 0.8 for _ in range(generator.randint(1, 40))]
        supervised[0] = False  # a text begins with its prompt
        rate = generator.random()
        drawn = {i: [generator.random() < rate for _ in range(num_draft_tokens)] for i in range(len(supervised))}
        steps = countable_steps(torch.tensor(supervised), num_draft_tokens).tolist()
        positions = [i for i, count in enumerate(steps) if count > 0]
        wanted = walk(supervised, drawn, num_draft_tokens)
        if not positions:
            assert wanted.rounds == 0
            continue
        # As simulate() hands them over: a step that does not count is never a match.
        matches = [[int(drawn[i][k] and k < steps[i]) for k in range(num_draft_tokens)] for i in positions]
        found = rounds(matches, [steps[i] for i in positions], positions)
        assert found == wanted, (supervised, drawn)


def test_every_token_of_an_answer_but_the_first_comes_from_a_round() -> None:
    """Served rounds write the whole text: a round gives its matches and the target's own token, except where the text ends before that."""
    generator = random.Random(9)
    for _ in range(100):
        length = generator.randint(2, 30)
        steps = countable_steps(torch.tensor([False, *[True] * length]), 3)
        rows = int((steps > 0).sum())
        matches = [[int(generator.random() < 0.7 and k < steps[i]) for k in range(3)] for i in range(rows)]
        found = rounds(matches, steps[:rows].tolist(), list(range(rows)))
        assert length - 1 <= found.rounds + sum(found.accepted) <= length


def test_a_true_token_outside_the_draft_vocabulary_is_a_rejection() -> None:
    draft, head, ids = random_draft(small_shape()), random_head(), random_ids()
    row = random_row("." + "s" * 30, 5)
    outside = torch.tensor([token for token in range(40) if token not in set(ids.tolist())])
    row.tokens[1:] = outside[row.tokens[1:].long() % len(outside)].int()
    (found,) = simulate(draft, ids, make_batch([row], head.embedding, 3, torch.float32), 3)
    assert found == Acceptance(29, (29, 0, 0), (0, 0, 0))


def test_documents_of_a_batch_are_simulated_apart() -> None:
    draft, head, ids = random_draft(small_shape()), random_head(), random_ids()
    rows = [random_row(mask, seed) for seed, mask in enumerate([".sssssss", "...", "..ssss.sssss", "s"])]
    packed = simulate(draft, ids, make_batch(rows, head.embedding, 3, torch.float32), 3)
    alone = [simulate(draft, ids, make_batch([row], head.embedding, 3, torch.float32), 3)[0] for row in rows]
    assert packed == alone
    assert [acceptance.rounds > 0 for acceptance in packed] == [True, False, True, False]


def test_the_interval_over_prompts_is_as_wide_as_prompts_differ() -> None:
    """Against the normal approximation: prompts of 50 rounds whose length is 2 with a spread of 0.4 give a mean within 1.96 x 0.4 / sqrt(n)."""
    generator = random.Random(3)
    for count in (20, 200):
        prompts = [Acceptance(50, (50,), (round(50 * generator.gauss(1.0, 0.4)),)) for _ in range(count)]
        low, high = interval(prompts) or [0.0, 0.0]
        mean = 1 + sum(prompt.accepted[0] for prompt in prompts) / (50 * count)
        assert low < mean < high and (high - low) / 2 == pytest.approx(1.96 * 0.4 / count**0.5, rel=0.3)
    assert interval(prompts) == interval(prompts), "the same every time"
    assert interval(prompts[:1]) is None and interval([]) is None and interval([nothing(1), prompts[0]]) is None


def test_the_place_of_a_token_is_that_of_a_sorted_list_and_ties_go_to_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert [rank_of(logits, torch.tensor([place, place])).tolist() for place in range(4)] == [[3, 0], [0, 1], [1, 2], [2, 3]]


def test_a_tree_accepts_what_is_among_its_likeliest_and_a_chain_of_fewer_steps_is_a_part_of_the_longer() -> None:
    draft, head, ids = random_draft(small_shape()), random_head(), random_ids()
    row = random_row("." + "s" * 60, 5)
    row.tokens[1:] = ids[row.tokens[1:].long() % len(ids)].int()
    (found,) = foresee(draft, ids, make_batch([row], head.embedding, 4, torch.float32), 4)
    lengths = [[found.acceptance(k, width).length or 0 for k in (1, 2, 4)] for width in (1, 2, 4, len(ids))]
    assert all(one <= other for one, other in itertools.pairwise(lengths)) and lengths[0] < lengths[2]
    assert lengths[-1][0] == 2, "a tree of all tokens accepts every one"
    for k in (1, 2):
        assert found.acceptance(k) == simulate(draft, ids, make_batch([row], head.embedding, k, torch.float32), k)[0]
    far = Foreseen(torch.tensor([[3, FAR]]), torch.tensor([2]), torch.tensor([0]))
    assert [far.acceptance(2, width).accepted for width in (3, 4)] == [(0, 0), (1, 0)]


def test_the_speed_foretold_for_what_was_measured_is_what_was_measured_and_costs_grow_with_each_token() -> None:
    """Two draft tokens measured: 100 rounds with 60 and 40 accepted, a round of 0.15 s beside a plain step of 0.1 s, so 0.025 s a draft token."""
    measured = Acceptance(100, (100, 60), (60, 40))
    answers = [
        {"1": [[70, 40], [50, 50], [40, 60]], "2": [[70, 40]] * 3, "4": [[70, 40]] * 3},
        {"1": [[55, 45], [50, 50], [45, 55]], "2": [[1, 1]] * 3, "4": [[1, 1]] * 3},
    ]
    table = outlook(answers, measured, drafted_speed=2.0 / 0.15, plain_speed=10.0)
    assert [line["acceptance_length"] for line in table] == [1 + 85 / 125, 2.0, 1 + 115 / 85]
    speeds = [line["acceptance_length"] * 0.1 / (0.1 + tokens * 0.025) for tokens, line in enumerate(table, start=1)]
    assert [line["speedup"] for line in table] == pytest.approx(speeds) and table[1]["speedup"] == pytest.approx(2.0 / 0.15 / 10.0)
    assert outlook([], measured, 1.0, 1.0) == [] and outlook(answers, nothing(2), 1.0, 1.0) == []


def test_prompts_are_grouped_by_spans_of_length() -> None:
    simulated = [Acceptance(10, (10,), (accepted,)) for accepted in (1, 2, 3, 4)]
    found = by_length([20_000, 255, 256, 0], simulated, 1)
    assert [(part["from_tokens"], part["below_tokens"], part["num_prompts"]) for part in found] == [(0, 256, 2), (256, 1024, 1), (16384, None, 1)]
    assert [part["simulated_acceptance_length"] for part in found] == [1.3, 1.3, 1.1]
    assert found[0]["simulated_interval"] is not None and found[1]["simulated_interval"] is None

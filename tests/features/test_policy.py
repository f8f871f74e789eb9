"""Whether a text is the target's own: told by how much it surprises the target, beside how unsure the target is."""

from __future__ import annotations

import torch
from draft_helpers import random_head

from eyas.features.shard import FeatureRow
from eyas.features.verify import POLICY_POSITIONS, policy_of

NUM_ROWS, LENGTH = 200, 30


def rows(choose: object) -> list[FeatureRow]:
    """choose: logits [T, V] at a row's positions -> the token after each."""
    head, generator = random_head(), torch.Generator().manual_seed(0)
    found = []
    for number in range(NUM_ROWS):
        last = torch.randn(LENGTH, head.norm_weight.shape[0], generator=generator)
        after = choose(head.logits(last))  # type: ignore[operator]
        tokens = torch.cat((torch.zeros(1, dtype=torch.int32), after[:-1].int()))
        supervised = torch.arange(LENGTH) >= 10
        found.append(FeatureRow(str(number), tokens, supervised, last[:, None].expand(-1, 3, -1), last))
    return found


def test_what_the_target_sampled_surprises_it_as_much_as_it_is_unsure() -> None:
    policy = policy_of(rows(lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(1))[:, 0]), random_head(), ())
    assert policy and policy.tokens == NUM_ROWS * POLICY_POSITIONS
    assert abs(policy.surprise - policy.uncertainty) < 0.2 and not policy.foreign and 0.05 < policy.greedy < 0.95


def test_greedy_text_surprises_it_less_and_other_text_more() -> None:
    greedy, other = policy_of(rows(lambda logits: logits.argmax(-1)), random_head(), ()), policy_of(rows(lambda logits: logits.argmin(-1)), random_head(), ())
    assert greedy and other
    assert greedy.greedy == 1.0 and greedy.surprise < greedy.uncertainty and not greedy.foreign
    assert other.greedy == 0.0 and other.foreign


def test_rows_without_supervised_tokens_say_nothing() -> None:
    head = random_head()
    last = torch.zeros(4, head.norm_weight.shape[0])
    row = FeatureRow("a", torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool), last[:, None].expand(-1, 3, -1), last)
    assert policy_of([row], head, ()) is None and policy_of([], head, ()) is None


def test_an_end_that_the_target_would_not_have_made_is_seen_where_all_else_is_its_own() -> None:
    stop = 7
    found = rows(lambda logits: logits.argmax(-1))
    assert (own := policy_of(found, random_head(), ())) and own.ends == 0 and not own.ends_elsewhere
    for row in found:
        row.tokens[-1] = stop
    ended = policy_of(found, random_head(), (stop, 8))
    assert ended and ended.ends == NUM_ROWS and ended.tokens == own.tokens and ended.surprise == own.surprise
    log_p = torch.stack([random_head().logits(row.last[-2]).log_softmax(-1)[stop] for row in found])
    assert abs(ended.end_surprise + float(log_p.mean())) < 1e-4 and ended.ends_elsewhere

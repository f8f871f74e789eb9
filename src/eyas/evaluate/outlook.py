"""What else the answers tell: what any number of draft tokens would give, a tree of them, a draft that samples; and how it goes with the length of a prompt.

All of it follows from one unroll over an answer (simulate.py). A tree of width w holds the w likeliest tokens at each place, and the same behind each of
them: more than an engine's tree of so many tokens, which leaves out the less likely ways, so its figure is the most that such a tree can give.

A draft that samples proposes x with its own probability q(x), and the target takes it with chance min(1, p(x) / q(x)): of the tokens x that it says, drawn from
p, the share min(1, q(x) / p(x)) was proposed and taken ("Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192); in the mean over x that
is the sum of min(p, q).

Legend: R rows, K steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from eyas.evaluate.simulate import Acceptance, Foreseen, interval, nothing

WIDTHS = (1, 2, 4)
DEEPEST = 7
BOUNDS = (0, 256, 1024, 4096, 16384)  # tokens of a prompt


def deepest(num_draft_tokens: int) -> int:
    return max(DEEPEST, num_draft_tokens)


def seen(found: Foreseen, num_draft_tokens: int) -> dict[str, list[list[float]]]:
    """Of one answer, by the width of the tree: [rounds, accepted tokens] with 1, 2, .. draft tokens; under "sampled" of a draft that samples, if its rates are
    known."""
    depths = range(1, deepest(num_draft_tokens) + 1)
    widths = {str(width): [_counted(found.acceptance(k, width)) for k in depths] for width in WIDTHS}
    if found.rate_RK is None:
        return widths
    return {**widths, "sampled": [list(expected_rounds(found.rate_RK[:, :k], found.num_steps_R, found.positions_R)) for k in depths]}


def _counted(acceptance: Acceptance) -> list[float]:
    return [acceptance.rounds, sum(acceptance.accepted)]


def expected_rounds(rate_RK: torch.Tensor, num_steps_R: torch.Tensor, positions_R: torch.Tensor) -> tuple[float, float]:
    """(rounds, accepted tokens) in the mean, where step k of a row is accepted with the chance rate [R, K] if all before it are. Else as `simulate_rounds`,
    which it is for chances of 0 and 1."""
    rates, steps, positions = rate_RK.tolist(), num_steps_R.tolist(), positions_R.tolist()
    begins = [float(row == 0 or positions[row] != positions[row - 1] + 1) for row in range(len(positions))]  # the chance that a round begins here
    rounds = accepted = 0.0

    def arrive(row: int, there: int, chance: float) -> None:
        if there < len(positions) and positions[there] - positions[row] == there - row:  # else the turn ended
            begins[there] += chance

    for row, chance in enumerate(begins):
        rounds += chance
        possible = min(steps[row], rate_RK.shape[1])
        for k in range(possible):
            arrive(row, row + k + 1, chance * (1 - rates[row][k]))
            chance *= rates[row][k]
            accepted += chance
        arrive(row, row + possible + 1, chance)
    return rounds, accepted


def outlook(answers: Sequence[dict[str, list[list[float]]]], measured: Acceptance, drafted_speed: float, plain_speed: float) -> list[dict[str, Any]]:
    """For 1, 2, .. draft tokens: acceptance lengths, and the speed at batch size one as a multiple of the plain one. The speed is an estimate: a round takes a
    plain step and the same for each draft token, which what was measured gives. Speeds in tokens per second."""
    table: list[dict[str, Any]] = []
    if not answers or not measured.rounds:
        return table
    drafted_tokens = len(measured.accepted)
    plain_seconds, round_seconds = 1 / plain_speed, (1 + sum(measured.accepted) / measured.rounds) / drafted_speed
    draft_seconds = max(0.0, (round_seconds - plain_seconds) / drafted_tokens)
    for place in range(len(answers[0]["1"])):
        sums = {width: [sum(answer[width][place][part] for answer in answers) for part in (0, 1)] for width in answers[0]}
        lengths = {width: 1 + accepted / rounds if rounds else None for width, (rounds, accepted) in sums.items()}
        length = lengths["1"]
        table.append({
            "draft_tokens": place + 1,
            "acceptance_length": length,
            **{f"tree_of_{width}": lengths[str(width)] for width in WIDTHS if width > 1},
            **({"sampled_draft": lengths["sampled"]} if "sampled" in lengths else {}),
            "speedup": None if length is None else length * plain_seconds / (plain_seconds + (place + 1) * draft_seconds),
        })  # fmt: skip
    return table


def by_length(lengths: Sequence[int], simulated: Sequence[Acceptance], num_draft_tokens: int) -> list[dict[str, Any]]:
    """The simulated acceptance of the prompts in each span of lengths in tokens that has any, with its interval over them."""
    parts: dict[int, list[Acceptance]] = {}
    for length, acceptance in sorted(zip(lengths, simulated, strict=True), key=lambda pair: pair[0]):
        parts.setdefault(bisect_right(BOUNDS, length) - 1, []).append(acceptance)
    return [
        {
            "from_tokens": BOUNDS[part],
            "below_tokens": BOUNDS[part + 1] if part + 1 < len(BOUNDS) else None,
            "num_prompts": len(found),
            "simulated_acceptance_length": sum(found, nothing(num_draft_tokens)).length,
            "simulated_interval": interval(found),
        }
        for part, found in parts.items()
    ]

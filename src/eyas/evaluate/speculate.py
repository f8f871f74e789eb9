"""Decoding in process, plain and with the draft, batch size one: the same text, or the same distribution of texts, in fewer forwards of the target.

The draft proposes its likeliest tokens. The target chooses a token at each place, its likeliest or one drawn from its distribution; the proposals stand as
far as they are what it chose. Drawn so, a text is distributed as without a draft: whether it was proposed does not change how a token is drawn.

Legend: P prompt tokens, N new tokens of a forward, A aux layers, D hidden width, K draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from eyas.draft.model import Draft, DraftCache
from eyas.evaluate.simulate import Acceptance, nothing, one_round
from eyas.target.tap import LayerTap
from eyas.target.transformers_engine import TransformersEngine


@dataclass(frozen=True)
class Decoded:
    """tokens end with a stop token or at the limit; seconds include the prompt's forward."""

    tokens: list[int]
    seconds: float
    acceptance: Acceptance
    smallest_margin: float  # least logit difference between best and second best token: where it is rounding, greedy texts may part


Choose = Callable[[torch.Tensor], torch.Tensor]


def greedy(logits_NV: torch.Tensor) -> torch.Tensor:
    """[..., V] -> int64 [...]"""
    return logits_NV.argmax(-1)


def chooser(temperature: float, seed: int) -> Choose:
    """logits [..., V] -> the target's tokens int64 [...], drawn at this temperature; at 0 the likeliest."""
    if temperature == 0:
        return greedy
    generator = torch.Generator().manual_seed(seed)

    def drawn(logits_NV: torch.Tensor) -> torch.Tensor:
        p_NV = (logits_NV.float().cpu() / temperature).softmax(-1)
        return torch.multinomial(p_NV.reshape(-1, p_NV.shape[-1]), 1, generator=generator).reshape(p_NV.shape[:-1])

    return drawn


@torch.inference_mode()
def plain_decode(engine: TransformersEngine, prompt: Sequence[int], stop_ids: frozenset[int], max_new_tokens: int, choose: Choose = greedy) -> Decoded:
    began = time.perf_counter()
    cache = engine.new_cache()
    logits = engine.step(prompt, cache)[-1]
    tokens: list[int] = []
    margin = float("inf")
    while True:
        best = logits.topk(2).values
        margin = min(margin, float(best[0] - best[1]))
        tokens.append(int(choose(logits)))
        if tokens[-1] in stop_ids or len(tokens) == max_new_tokens:
            return Decoded(tokens, time.perf_counter() - began, nothing(0), margin)
        logits = engine.step(tokens[-1:], cache)[-1]


@torch.inference_mode()
def speculative_decode(
    engine: TransformersEngine,
    draft: Draft,
    embedding: torch.Tensor,
    ids: torch.Tensor,
    prompt: Sequence[int],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    num_draft_tokens: int,
    choose: Choose = greedy,
) -> Decoded:
    """Draft K tokens, score them in one forward of the target, keep those that it chooses too and the one it chooses next.

    embedding [V, D] is the target's; ids int64 [Vd] the draft vocabulary.
    """
    began = time.perf_counter()
    cache, draft_cache = engine.new_cache(), DraftCache()
    acceptance = nothing(num_draft_tokens)
    with LayerTap(engine.model, engine.spec.num_layers, draft.shape.aux_layers) as tap:
        logits = engine.step(prompt, cache)
        aux_NAD = tap.take()[0]
        tokens = [int(choose(logits[-1]))]
        text = [*prompt, tokens[0]]
        while tokens[-1] not in stop_ids and len(tokens) < max_new_tokens:
            drafted = _draft_tokens(draft, embedding, ids, aux_NAD, text, draft_cache, num_draft_tokens)
            chosen = choose(engine.step([text[-1], *drafted], cache)).tolist()
            aux_NAD = tap.take()[0]
            matched = next((k for k, token in enumerate(drafted) if token != chosen[k]), num_draft_tokens)
            new = _until_stop(chosen[: matched + 1], stop_ids, max_new_tokens - len(tokens))
            ended = new[-1] in stop_ids or len(tokens) + len(new) == max_new_tokens
            # In the last round no more than len(new) tokens were still to come: what was drafted beyond them is not counted either way.
            possible = min(num_draft_tokens, len(new)) if ended else num_draft_tokens
            acceptance = acceptance + one_round(min(matched, len(new)), possible, num_draft_tokens)
            tokens, text = tokens + new, text + new
            if matched < num_draft_tokens:
                cache.crop(matched - num_draft_tokens)  # the target's cache forgets what was drafted wrong: the last so many positions
            aux_NAD = aux_NAD[: matched + 1]
    return Decoded(tokens, time.perf_counter() - began, acceptance, float("nan"))


def _draft_tokens(
    draft: Draft, embedding: torch.Tensor, ids: torch.Tensor, aux_NAD: torch.Tensor, text: list[int], cache: DraftCache, num_draft_tokens: int
) -> list[int]:
    """Step 0 reads the features of the N newest verified positions, each with the embedding of the token after it; later steps read the draft's own."""
    num_new = len(aux_NAD)
    first = len(text) - 1 - num_new  # the position of the first of them
    cache.crop(first)  # the keys of the last round's later steps were guesses
    positions = torch.arange(first, first + num_new, device=embedding.device)
    following = torch.tensor(text[first + 1 :], device=embedding.device)
    logits, hidden = draft(F.embedding(following, embedding), draft.fuse(aux_NAD.to(embedding.dtype)), positions, cache)
    drafted = [int(ids[logits[-1].argmax()])]
    for k in range(1, num_draft_tokens):
        token = torch.tensor([drafted[-1]], device=embedding.device)
        logits, hidden = draft(F.embedding(token, embedding), hidden[-1:], positions[-1:] + k, cache)
        drafted.append(int(ids[logits[-1].argmax()]))
    return drafted


def _until_stop(tokens: list[int], stop_ids: frozenset[int], room: int) -> list[int]:
    """The tokens up to the first stop token, and at most `room`."""
    for position, token in enumerate(tokens[:room]):
        if token in stop_ids:
            return tokens[: position + 1]
    return tokens[:room]

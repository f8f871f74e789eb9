"""Builders shared by the tests of draft, training and evaluation: small random drafts, feature rows, heads.

Legend: T tokens, A aux layers (3), D hidden width, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead

WIDTH = 16
VOCAB = 40
DRAFT_VOCAB = 24


def small_shape(**changes: Any) -> DraftShape:
    """A width of 16, and heads of width 6 that are not the width divided by the heads."""
    settings: dict[str, Any] = {
        "num_hidden_layers": 1, "qk_norm": False,
        "hidden_size": WIDTH, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "max_position_embeddings": 64,
        "norm_before_residual": True, "norm_before_fc": False, "fc_norm": True, "norm_output": True, "aux_layers": [1, 2, 3], "target_layers": 4,
    }  # fmt: skip
    return DraftShape(**{**settings, **changes})


def random_draft(shape: DraftShape, seed: int = 0) -> Draft:
    """Every weight random, those of norms too: a norm of ones would hide a norm in the wrong place."""
    draft = Draft(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else 1 + 0.3 * noise)
    return draft


def random_head(seed: int = 1, softcap: float | None = None) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    embedding, norm, head = (torch.randn(*size, generator=generator) for size in ((VOCAB, WIDTH), (WIDTH,), (VOCAB, WIDTH)))
    return TargetHead(embedding, 1 + 0.3 * norm, 1e-5, head, softcap)


EMBEDDING = random_head().embedding


def random_ids(seed: int = 2) -> torch.Tensor:
    """A draft vocabulary: int64 [Vd], ascending."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values


def random_row(supervised: str, seed: int = 3, width: int = WIDTH) -> FeatureRow:
    """A row of random features; `supervised` holds a character a token: s for a supervised one, . for another."""
    generator = torch.Generator().manual_seed(seed)
    length = len(supervised)
    return FeatureRow(
        key=f"row-{seed}",
        tokens=torch.randint(VOCAB, (length,), generator=generator, dtype=torch.int32),
        supervised=torch.tensor([sign == "s" for sign in supervised], dtype=torch.bool),
        aux=torch.randn(length, 3, width, generator=generator) * torch.tensor([0.5, 2.0, 5.0])[:, None],
        last=torch.randn(length, width, generator=generator) * 3,
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """max |found - wanted| / max |wanted|; 0 where both are empty or zero."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if wanted.numel() == 0:
        return 0.0
    difference = (found.double() - wanted.double()).abs().max().item()
    return 0.0 if difference == 0 else difference / max(wanted.double().abs().max().item(), 1e-30)


def gradients(draft: Draft) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, zeros where it has none, and forgets them."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in draft.named_parameters()}
    draft.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"the gradient of {worst} is off by {errors[worst]:.2g} of its size"

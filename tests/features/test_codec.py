"""float8 with a scale for each token and layer: how far off, and that one loud token or layer costs the others nothing."""

from __future__ import annotations

import pytest
import torch

from eyas.features.codec import FLOAT8, decode, encode, relative_rounding, squares


def states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[n 40, L 4, D 96], with a first token and a layer that are a thousand times as large as the others."""
    found = torch.randn(40, 4, 96, generator=torch.Generator().manual_seed(0))
    found[0] *= 1000
    found[:, 2] *= 1000
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_is_within_a_sixteenth_of_itself_or_a_step_of_the_smallest(dtype: torch.dtype) -> None:
    """e4m3 has three bits behind the leading one; below 2**-6 of its unit it counts in steps of 2**-9."""
    given = states(dtype)
    stored, scale = encode(given, FLOAT8)
    assert stored.dtype == FLOAT8 and scale is not None and scale.shape == (40, 4) and scale.dtype == torch.float32
    found = decode(stored, scale, torch.float32)
    allowed = torch.maximum(given.float().abs() / 16, scale[..., None] * 2**-10) * 1.001
    assert ((found - given.float()).abs() <= allowed).all()


def test_a_loud_token_or_layer_costs_the_others_nothing() -> None:
    given = states()
    stored, scale = encode(given, FLOAT8)
    found = decode(stored, scale, torch.float32)
    off = ((found - given).pow(2).sum(-1) / given.pow(2).sum(-1)).sqrt()
    assert off.max() < 0.04 and off.min() > 0.01


def test_what_storing_cost_is_measured_layer_by_layer() -> None:
    given = states()
    for dtype in (FLOAT8, torch.bfloat16):
        stored, scale = encode(given, dtype)
        found = decode(stored, scale, torch.float32)
        wanted = [float((found[:, n] - given[:, n]).norm() / given[:, n].norm()) for n in range(4)]
        assert relative_rounding(squares(given, stored, scale)) == pytest.approx(wanted, rel=1e-4)
    assert relative_rounding(squares(given, *encode(given, torch.float32))) == [0.0] * 4


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    given = torch.zeros(2, 1, 8)
    given[1, 0, 3] = float("nan")
    found = decode(*encode(given, FLOAT8), torch.float32)
    assert not found[0].any() and found[1].isnan().any()

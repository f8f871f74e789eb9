"""Attention of a few new tokens is, bit for bit, attention of each of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eyas.target.rowwise import FEW, rowwise_attention


class Layer(nn.Module):
    """What transformers' attention functions read of a layer."""

    is_causal = True
    num_key_value_groups = 3


def states(num_new: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, tokens, 64, generator=generator).to(dtype) for heads, tokens in ((9, num_new), (3, length), (3, length)))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_new", [2, 4, FEW])
def test_each_new_token_gets_the_bits_that_it_gets_alone(num_new: int, dtype: torch.dtype) -> None:
    query, key, value = states(num_new, 50, dtype)
    together, _ = rowwise_attention(Layer(), query, key, value, None)
    for j in range(num_new):
        end = 50 - num_new + j + 1
        alone, _ = sdpa_attention_forward(Layer(), query[:, :, j : j + 1], key[:, :, :end], value[:, :, :end], None)
        assert torch.equal(together[:, j : j + 1], alone)


@pytest.mark.parametrize("window", [None, 7])
def test_it_is_causal_attention_within_the_mask(window: int | None) -> None:
    query, key, value = states(4, 50, torch.float32)
    at = torch.arange(46, 50)[:, None]
    seen = torch.arange(50)[None] <= at
    if window is not None:
        seen &= torch.arange(50)[None] > at - window
    found, _ = rowwise_attention(Layer(), query, key, value, seen[None, None])
    keys, values = (x.double().repeat_interleave(3, dim=1) for x in (key, value))
    scores = (query.double() @ keys.transpose(-1, -2) / 8).masked_fill(~seen, float("-inf"))
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_prompt_is_attended_to_as_always() -> None:
    query, key, value = states(30, 30, torch.float32)
    found, _ = rowwise_attention(Layer(), query, key, value, None)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, None)
    assert torch.equal(found, expected)

"""Which layer an id is, proved by models whose layer k can be told from its output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from eyas.errors import UserError
from eyas.target.tap import LayerTap, find_decoder_layers, residual_stream

N, D = 5, 4


class Adds(nn.Module):
    """A decoder layer that adds its constant to the stream."""

    def __init__(self, constant: float, form: str) -> None:
        super().__init__()
        self.constant, self.form = constant, form
        self.weight = nn.Parameter(torch.ones(D, D))

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if self.form == "tensor":
            return hidden_states + self.constant
        if self.form == "tuple":  # (stream, cache)
            return hidden_states + self.constant, None
        if self.form == "tuple with weights":  # (stream, attention weights of another shape)
            return hidden_states + self.constant, torch.zeros(1, 2, 3, 3)
        # As vLLM: what this layer adds, and the stream before it.
        stream = hidden_states if residual is None else hidden_states + residual
        return torch.full_like(stream, self.constant), stream


class Decoder(nn.Module):
    """Layer k (1-based) adds 10**(k-1), so that the stream after k layers reads 1, 11, 111, ... on top of the embeddings."""

    def __init__(self, form: str = "tensor", by_keyword: bool = False) -> None:
        super().__init__()
        self.by_keyword = by_keyword
        self.layers = nn.ModuleList([Adds(10.0**k, form) for k in range(N)])

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        stream, residual = embeddings, None
        for layer in self.layers:
            if layer.form == "pair":
                stream, residual = layer(stream, residual)
            else:
                out = layer(hidden_states=stream) if self.by_keyword else layer(stream)
                stream = out if isinstance(out, torch.Tensor) else out[0]
        return (stream if residual is None else stream + residual) * 1000  # stands for the final norm


EXPECTED = [0.0, 1.0, 11.0, 111.0, 1111.0, 11111.0]


@pytest.mark.parametrize("form", ["tensor", "tuple", "tuple with weights", "pair"])
@pytest.mark.parametrize("layers", [[0, 1, 2, 3, 4, 5], [2, 3, 5], [5, 0, 3]])
def test_layer_k_is_the_stream_after_k_layers_in_the_order_asked_for(form: str, layers: list[int]) -> None:
    model = Decoder(form)
    with LayerTap(model, N, layers) as tap, torch.no_grad():
        model(torch.zeros(2, 3, D))
        states = tap.take()
    assert states.shape == (2, 3, len(layers), D)
    assert [float(v) for v in states[0, 0, :, 0]] == [EXPECTED[k] for k in layers]
    assert all((states[:, :, i] == EXPECTED[k]).all() for i, k in enumerate(layers))


def test_embeddings_given_by_keyword_are_seen() -> None:
    model = Decoder(by_keyword=True)
    with LayerTap(model, N, [0, N]) as tap, torch.no_grad():
        model(torch.full((1, 2, D), 7.0))
        assert tap.take()[0, 0, :, 0].tolist() == [7.0, 11118.0]


def test_each_forward_is_taken_once_and_forgotten() -> None:
    model = Decoder()
    with LayerTap(model, N, [1]) as tap, torch.no_grad():
        for value in (0.0, 5.0):
            model(torch.full((1, 1, D), value))
            assert float(tap.take()[0, 0, 0, 0]) == value + 1
        with pytest.raises(KeyError):
            tap.take()


def test_hooks_are_gone_afterwards_even_after_an_error() -> None:
    model = Decoder()
    try:
        with LayerTap(model, N, [0, 1, N]):
            raise ValueError
    except ValueError:
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Multimodal(nn.Module):
    """A wrapper with a vision tower that has a module list of its own, as long as the decoder's and registered before it."""

    def __init__(self, vision_layers: int) -> None:
        super().__init__()
        self.vision_tower = nn.Module()
        self.vision_tower.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(vision_layers)])
        self.language_model = nn.Module()
        self.language_model.model = Decoder()


@pytest.mark.parametrize("vision_layers", [N, N + 2])
def test_the_decoder_is_found_through_a_wrapper_with_a_vision_tower(vision_layers: int) -> None:
    model = Multimodal(vision_layers)
    assert find_decoder_layers(model, N) is model.language_model.model.layers


def test_lists_inside_a_layer_are_not_taken_for_the_decoder() -> None:
    """A mixture of experts with as many experts as layers."""
    model = Decoder()
    for layer in model.layers:
        layer.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(N)])
    assert find_decoder_layers(model, N) is model.layers


def test_a_model_without_such_a_list_is_refused() -> None:
    with pytest.raises(UserError, match="no list of 7 decoder layers"):
        find_decoder_layers(Decoder(), 7)


def test_a_second_entry_of_another_shape_is_no_residual() -> None:
    stream = torch.ones(1, 3, D)
    assert residual_stream((stream, torch.ones(3, D))) is stream
    assert residual_stream((stream,)) is stream
    assert torch.equal(residual_stream((stream, stream)), 2 * stream)

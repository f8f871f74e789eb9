"""Hidden states out of a running model, by forward hooks on its decoder layers and nothing else.

In: any torch model and the wanted layers. Out: one [..., D] tensor a layer for each forward.
Layer k is the residual stream after k decoder layers: 0 the embeddings, N after the last layer and before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from eyas.errors import UserError


def find_decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The module list that holds the decoder layers, through any wrapper: of those with `num_layers` entries, the one with most parameters.

    Raises UserError if there is none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of {num_layers} decoder layers, the num_hidden_layers of its config; Eyas cannot tap it.")
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


# vLLM's layers that return (stream, a residual left over): adding them up would count half the layer twice. The others leave the sum to the next norm.
WHOLE = {
    "Cohere2MoeDecoderLayer", "CohereCompassDecoderLayer", "CohereDecoderLayer", "Exaone4DecoderLayer", "GraniteMoeHybridAttentionDecoderLayer",
    "GraniteMoeHybridMambaDecoderLayer", "HyperCLOVAXDecoderLayer", "Molmo2DecoderNormAfterLayer", "MolmoDecoderNormAfterLayer", "MuseGlimmerDecoderLayer",
    "PhiMoEDecoderLayer", "StablelmDecoderLayer",
}  # fmt: skip


class LayerTap:
    """Keeps what the wanted layers put out in the latest forward; a context manager that removes its hooks."""

    def __init__(self, model: nn.Module, num_layers: int, layers: Sequence[int]) -> None:
        self.layers = list(layers)
        self.states: dict[int, torch.Tensor] = {}
        decoder = find_decoder_layers(model, num_layers)
        self.handles = []
        for k in self.layers:
            assert 0 <= k <= num_layers, k
            if k == 0:
                self.handles.append(decoder[0].register_forward_pre_hook(self._before_first, with_kwargs=True))
            else:
                self.handles.append(decoder[k - 1].register_forward_hook(self._after(k)))

    def _before_first(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.states[0] = arguments[0] if arguments else keywords["hidden_states"]

    def _after(self, k: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self.states[k] = residual_stream(output, module)

        return hook

    def take(self) -> torch.Tensor:
        """The states of the latest forward, [..., len(layers), D] in the order asked for, and forgets them."""
        stacked = torch.stack([self.states[k] for k in self.layers], dim=-2)
        self.states.clear()
        return stacked

    def __enter__(self) -> LayerTap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self.handles:
            handle.remove()


def residual_stream(output: Any, layer: nn.Module | None = None) -> torch.Tensor:
    """What a decoder layer returned, as one tensor [..., D]. Most of vLLM's layers return (hidden, residual), whose sum is the stream; others
    return the stream alone or first in a tuple."""
    if isinstance(output, torch.Tensor):
        return output
    first = output[0]
    assert isinstance(first, torch.Tensor), type(first)
    second = output[1] if len(output) > 1 else None
    if isinstance(second, torch.Tensor) and second.shape == first.shape and type(layer).__name__ not in WHOLE:
        return first + second
    return first

"""Elementwise parts: on a GPU each becomes one or two kernels, elsewhere it runs as written.

torch.compile works on functions of tensors without products: products go to the vendor's library as they are. What differs from batch to batch is how many
rows there are, the first size of every tensor but a parameter. torch is told so, and compiles each function once for all of them. It would also compile
anew for a tensor that once wants a gradient and once does not: where none is recorded, it is shown none that does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
# A function that takes a list is compiled once for each length, and a length a draft step is more than the 8 after which torch gives up without an error.
torch._dynamo.config.recompile_limit = 64


def compiles(first: object) -> bool:
    """Whether a function whose first argument is this is compiled: a tensor on a GPU."""
    return isinstance(first, torch.Tensor) and first.is_cuda


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled where that pays."""
    compiled = torch.compile(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not compiles(arguments[0]):
            return function(*arguments, **keywords)
        return compiled(*(_shown(argument) for argument in arguments), **keywords)

    return call


def _shown(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(map(_shown, argument))
    if not isinstance(argument, torch.Tensor) or isinstance(argument, torch.nn.Parameter):
        return argument
    tensor = argument if torch.is_grad_enabled() else argument.detach()
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor

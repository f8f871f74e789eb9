"""Elementwise parts: on a GPU each becomes one or two kernels, elsewhere it runs as written.

torch.compile works on functions of tensors without products: products go to the vendor's library as they are. Shapes are few, because batches are filled up
to a budget of tokens, so nothing is compiled twice for long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled when its first argument is a tensor on a GPU."""
    compiled = torch.compile(function, dynamic=None)

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        first = arguments[0]
        on_gpu = isinstance(first, torch.Tensor) and first.is_cuda
        return (compiled if on_gpu else function)(*arguments, **keywords)

    return call

"""Rows that several draft steps read, each step its own selection, and whose gradient is summed once.

Step k reads the embedding of token i + k + 1 at row i. What q, k and v make of it is the same whichever step reads it, so it is made once for each
position instead of once for each step; the layer's first products are half as wide from step 1 on, and each weight gradient of theirs half as long.

Legend: T positions of the pack, N shared rows, R rows of a step, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eyas.draft.fused import fused


@dataclass(frozen=True)
class Selection:
    """where_R: the shared row that each row takes, none taken by two rows that have a gradient. back_N: the row that takes each shared row, R or more where
    none does. None: all of them, in order."""

    where_R: torch.Tensor
    back_N: torch.Tensor


class Shared:
    def __init__(self, rows_NC: torch.Tensor) -> None:
        self.grads: list[tuple[torch.Tensor, Selection | None]] = []
        self.rows_NC: torch.Tensor = _Shared.apply(rows_NC, self.grads)

    def plus(self, own_RC: torch.Tensor, selection: Selection | None) -> torch.Tensor:
        """The selected rows [R, C] and `own` added up."""
        added: torch.Tensor = _Plus.apply(own_RC, self.rows_NC, selection, self.grads)
        return added


class _Shared(torch.autograd.Function):
    """The rows as they are. Their gradient does not come through autograd, which would round it at every step, but through the list `grads`."""

    @staticmethod
    def forward(ctx: Any, rows_NC: torch.Tensor, grads: list[tuple[torch.Tensor, Selection | None]]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.grads = grads
        return rows_NC.view_as(rows_NC)

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        if not ctx.grads:
            return None, None
        parts, selections = zip(*ctx.grads, strict=True)
        ctx.grads.clear()
        all_N = torch.arange(max(map(len, parts)), device=parts[0].device)
        backs = [all_N if selection is None else selection.back_N for selection in selections]
        return summed(torch.stack(backs, dim=1), list(parts)), None


class _Plus(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_RC: torch.Tensor, rows_NC: torch.Tensor, selection: Selection | None, grads: list[tuple[torch.Tensor, Selection | None]]
    ) -> torch.Tensor:
        ctx.selection, ctx.grads = selection, grads
        return own_RC + rows_NC if selection is None else selected_plus(own_RC, rows_NC, selection.where_R)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_RC,) = grads
        ctx.grads.append((grad_RC, ctx.selection))
        return grad_RC, None, None, None


def select(rows_NC: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The selected rows [R, C], for a single reader."""
    selected: torch.Tensor = _Select.apply(rows_NC, selection)
    return selected


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NC: torch.Tensor, selection: Selection) -> torch.Tensor:
        ctx.selection = selection
        return rows_NC.index_select(0, selection.where_R)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return summed(ctx.selection.back_N[:, None], list(grads)), None


@fused
def selected_plus(own_RC: torch.Tensor, rows_NC: torch.Tensor, where_R: torch.Tensor) -> torch.Tensor:
    return own_RC + rows_NC[where_R]


@fused
def summed(back_NK: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """-> [N, C] in the parts' dtype, summed in float32 over the K parts: part k gives its row back_NK[:, k], nothing where it has no such row."""
    total = torch.zeros((), dtype=torch.float32, device=back_NK.device)
    for back_N, part in zip(back_NK.unbind(1), parts, strict=True):
        taken_NC = part[back_N.clamp(max=len(part) - 1)].float()
        total = total + torch.where((back_N < len(part)).unsqueeze(-1), taken_NC, 0.0)
    return total.to(parts[0].dtype)

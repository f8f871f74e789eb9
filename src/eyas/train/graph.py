"""On a GPU: a training step as two CUDA graphs, for drafts so small that their kernels are over before the next ones are launched. One is a batch's forward and
backward; one clips the gradients and moves the weights.

A graph is what the GPU was given, with all sizes and addresses. So batches come in few sizes (`make_batch(..., fixed=...)`), are copied to where the graph
reads them, and gradients are always the same tensors. Each graph is held against a plain run from the same state, bit for bit; if one differs or cannot be
made, all runs plainly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.draft.model import Draft
from eyas.draft.product import Linear
from eyas.train.batch import Batch
from eyas.train.loss import LossSums
from eyas.train.optim import Optimizers

Backward = Callable[[Batch, float], LossSums]  # adds a batch's gradients; the denominator of its loss
AnyBackward = Callable[[Batch, float | torch.Tensor], LossSums]
Update = Callable[[], torch.Tensor]  # clips the gradients and moves the weights; -> the gradients' norm before
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]  # -> what does it again, and where its result then stands
Say = Callable[[str], None]
MOST = 32  # graphs


class GpuCapture:
    """All graphs take their memory from one pool: they never run at once, and what one leaves is copied before the next."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):  # the thread that feeds the GPU goes on
            found = work()
        self.pool = graph.pool()
        return graph.replay, found


@dataclass(frozen=True)
class Captured:
    """batch, denominator: what the graph reads. sums: what it leaves."""

    batch: Batch
    denominator: torch.Tensor
    replay: Callable[[], None]
    sums: LossSums

    def over(self, batch: Batch, denominator: float) -> LossSums:
        torch._foreach_copy_(self.batch.tensors, batch.tensors, non_blocking=True)
        self.denominator.fill_(denominator)
        self.replay()
        return LossSums(*self.sums.stacked)


class Graphs:
    """Does `backward`, each size of batch plainly for the first time."""

    def __init__(self, draft: Draft, backward: AnyBackward, say: Say, capture: Capture | None = None) -> None:
        self.backward, self.say, self.capture = backward, say, capture or GpuCapture()
        self.layers = [module for module in draft.modules() if isinstance(module, Linear)]
        self.weights = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.grads = [torch.zeros_like(weight) for weight in self.weights]
        self.ready: dict[object, Captured] = {}
        self.met: Counter[object] = Counter()
        self.given_up = False

    def __call__(self, batch: Batch, denominator: float) -> LossSums:
        self._put_gradients()
        size = (batch.longest, *(tensor.shape for tensor in batch.tensors))
        if size in self.ready:
            return self.ready[size].over(batch, denominator)
        self.met[size] += 1
        if self.given_up or self.met[size] == 1 or len(self.ready) == MOST:  # the first time compiles what is compiled
            return self.backward(batch, denominator)
        return self._first(size, batch, denominator)

    def _put_gradients(self) -> None:
        """Those that the optimiser has dropped are zeros again, in their old place."""
        if fresh := [grad for weight, grad in zip(self.weights, self.grads, strict=True) if weight.grad is None]:
            torch._foreach_zero_(fresh)
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad

    def _first(self, size: object, batch: Batch, denominator: float) -> LossSums:
        found: list[LossSums] = []

        def plainly() -> torch.Tensor:
            found.append(self.backward(batch, denominator))
            return found[0].stacked

        def by_graph() -> torch.Tensor:
            held = batch.copied()
            there = torch.tensor(float(denominator), dtype=torch.float64, device=batch.next_T.device)
            self._forget_casts()  # the graph makes its own each time, for the weights will have moved
            replay, sums = self.capture(lambda: self.backward(held, there))
            self.ready[size] = Captured(held, there, replay, sums)
            return self.ready[size].over(batch, denominator).stacked

        if not held_against(plainly, by_graph, self.grads, self.say):
            self.given_up = True
            self.ready.clear()
        self._forget_casts()
        return found[0]

    def _forget_casts(self) -> None:
        for layer in self.layers:
            layer.cast = None


class UpdateGraph:
    """Does `update`, plainly for the first time, which makes the optimiser's moments."""

    def __init__(self, draft: Draft, optimizer: Optimizers, update: Update, say: Say, capture: Capture | None = None) -> None:
        self.optimizer, self.update, self.say, self.capture = optimizer, update, say, capture or GpuCapture()
        self.weights = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.calls, self.given_up = 0, False
        self.ready: tuple[Callable[[], None], torch.Tensor, list[torch.Tensor]] | None = None  # the gradients that the graph reads

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        if self.ready:
            return self._again()
        if self.given_up or self.calls == 1 or any(weight.grad is None for weight in self.weights):
            return self.update()
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        norms: list[torch.Tensor] = []

        def plainly() -> torch.Tensor:
            norms.append(self.update())
            return norms[0]

        if not held_against(plainly, self._captured, [*self.weights, *(weight.grad for weight in self.weights if weight.grad is not None), *moments], self.say):
            self.given_up, self.ready = True, None
        return norms[0]

    def _captured(self) -> torch.Tensor:
        replay, norm = self.capture(self.update)
        self.ready = replay, norm, [weight.grad for weight in self.weights if weight.grad is not None]
        return self._again()

    def _again(self) -> torch.Tensor:
        assert self.ready
        replay, norm, grads = self.ready
        for weight, grad in zip(self.weights, grads, strict=True):
            if weight.grad is not grad:  # of a process that had no rows, or batches too large for a graph
                grad.zero_() if weight.grad is None else grad.copy_(weight.grad)
        replay()
        self.optimizer.moved()
        return norm.clone()


def held_against(plainly: Callable[[], torch.Tensor], by_graph: Callable[[], torch.Tensor], state: Sequence[torch.Tensor], say: Say) -> bool:
    """Runs both from the same state. Whether they leave the same; if not, says so, and the state is what the plain one left."""
    before = [tensor.clone() for tensor in _plain(state)]
    wanted = plainly()
    left = [tensor.clone() for tensor in _plain(state)]
    torch._foreach_copy_(_plain(state), before)
    try:
        same = torch.equal(by_graph(), wanted) and all(map(torch.equal, state, left))
    except RuntimeError as error:
        say(f"train: no CUDA graphs: {str(error).splitlines()[0]}")
        same = False
    else:
        if not same:
            say("train: no CUDA graphs: one left something else than a plain run")
    if not same:
        torch._foreach_copy_(_plain(state), left)
    return same


def _plain(state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in state]

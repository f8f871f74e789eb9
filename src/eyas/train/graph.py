"""On a GPU: forward and backward of a batch as one CUDA graph, for drafts so small that their kernels are over before the next ones are launched.

A graph is what the GPU was given, with all sizes and addresses. So batches come in few sizes (`make_batch(..., fixed=...)`), are copied to where the graph
reads them, and gradients are always the same tensors. Each graph is held against a plain run over its first batch, bit for bit; if one differs or cannot be
made, all batches run plainly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eyas.draft.model import Draft
from eyas.draft.product import Linear
from eyas.train.batch import Batch
from eyas.train.loss import LossSums

Work = Callable[[Batch, float], LossSums]  # adds a batch's gradients; the denominator of its loss
AnyWork = Callable[[Batch, float | torch.Tensor], LossSums]
Capture = Callable[[Callable[[], LossSums]], tuple[Callable[[], None], LossSums]]  # -> what does it again, and where its result then stands
MOST = 32  # graphs


class GpuCapture:
    """All graphs take their memory from one pool: they never run at once, and what one leaves is copied before the next."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, work: Callable[[], LossSums]) -> tuple[Callable[[], None], LossSums]:
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
    """Does `work`, each size of batch plainly for the first time."""

    def __init__(self, draft: Draft, work: AnyWork, say: Callable[[str], None], capture: Capture | None = None) -> None:
        self.work, self.say, self.capture = work, say, capture or GpuCapture()
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
            return self.work(batch, denominator)
        return self._first(size, batch, denominator)

    def _put_gradients(self) -> None:
        """Those that the optimiser has dropped are zeros again, in their old place."""
        if fresh := [grad for weight, grad in zip(self.weights, self.grads, strict=True) if weight.grad is None]:
            torch._foreach_zero_(fresh)
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad

    def _first(self, size: object, batch: Batch, denominator: float) -> LossSums:
        before = [grad.clone() for grad in self.grads]
        plain = self.work(batch, denominator)
        wanted = [grad.clone() for grad in self.grads]
        torch._foreach_copy_(self.grads, before)
        held = batch.copied()
        there = torch.tensor(float(denominator), dtype=torch.float64, device=batch.next_T.device)
        try:
            self._forget_casts()  # the graph makes its own each time, for the weights will have moved
            replay, sums = self.capture(lambda: self.work(held, there))
            self._forget_casts()
            captured = Captured(held, there, replay, sums)
            found = captured.over(batch, denominator)
            same = torch.equal(found.stacked, plain.stacked) and all(map(torch.equal, self.grads, wanted))
        except RuntimeError as error:
            self.say(f"train: no CUDA graphs: {str(error).splitlines()[0]}")
            same = False
        else:
            if not same:
                self.say("train: no CUDA graphs: one gave other gradients than a plain run")
        if same:
            self.ready[size] = captured
            return found
        self.given_up = True
        self.ready.clear()
        self._forget_casts()
        torch._foreach_copy_(self.grads, wanted)
        return plain

    def _forget_casts(self) -> None:
        for layer in self.layers:
            layer.cast = None

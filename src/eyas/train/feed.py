"""The batches of each optimiser step, in order. On a GPU a thread reads, packs and copies them ahead, so that the GPU never waits for features.

In: rows of features by key. Out: batches on the device, and the rows that count at step 0 in the whole optimiser step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from eyas.features.shard import FeatureRow
from eyas.train.batch import Batch

AHEAD = 2  # optimiser steps that are ready or in the making; each holds its features on the device


@dataclass(frozen=True)
class Step:
    """denominator: counted over all batches before any backward, so that each is divided by what the whole step holds."""

    batches: list[Batch]
    denominator: float


def feed(
    schedule: Sequence[list[list[str]]], read: Callable[[str], FeatureRow], pack: Callable[[list[FeatureRow]], Batch], device: torch.device
) -> Iterator[Step]:
    """schedule: keys of each batch of each step. pack: rows -> a batch on the CPU. What `read` raises is raised at the step that it happened for."""
    if device.type != "cuda":
        for keys in schedule:
            packed = [pack([read(key) for key in batch]) for batch in keys]
            yield Step([batch.to(device) for batch in packed], denominator(packed))
        return
    ready: queue.Queue[tuple[Step, torch.cuda.Event] | BaseException] = queue.Queue(AHEAD - 1)
    stopped = threading.Event()

    def put(item: tuple[Step, torch.cuda.Event] | BaseException) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                continue

    def work() -> None:
        try:
            stream = torch.cuda.Stream(device)
            for keys in schedule:
                if stopped.is_set():
                    return
                packed = [pack([read(key) for key in batch]).pinned() for batch in keys]
                with torch.cuda.stream(stream):
                    step = Step([batch.to(device) for batch in packed], denominator(packed))
                    copied = torch.cuda.Event()
                    copied.record()
                copied.synchronize()  # before `packed`, which is being copied from, goes back to the allocator
                put((step, copied))
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        for _ in schedule:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            step, copied = item
            torch.cuda.current_stream(device).wait_event(copied)
            for batch in step.batches:
                batch.used_on(torch.cuda.current_stream(device))
            yield step
    finally:
        stopped.set()
        thread.join()


def denominator(batches: list[Batch]) -> float:
    """The rows of all batches that count at step 0."""
    return float(sum(int((batch.num_steps_R > 0).sum()) for batch in batches))

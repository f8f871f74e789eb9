"""On a GPU the elementwise parts are compiled. That must happen once, not for each new shape: a compilation takes as long as a hundred steps."""

from __future__ import annotations

from collections.abc import Iterator

import plain_flash
import pytest
import torch
from draft_helpers import EMBEDDING, random_draft, random_head, random_ids, random_row, small_shape
from torch._dynamo.utils import counters

import eyas.draft.flash
import eyas.draft.fused
import eyas.train.unroll
from eyas.train.batch import make_batch
from eyas.train.loss import Objective, Teacher, loss_backward
from eyas.train.unroll import unroll

K = 10  # more draft steps than the 8 compilations of one function after which torch gives up


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All is as on a GPU, but that torch's own interpreter runs what was compiled, and the attention kernel is written in plain torch."""
    monkeypatch.setattr(eyas.draft.fused, "compiles", lambda first: True)
    monkeypatch.setattr(eyas.train.unroll, "flash_fits", lambda keys: True)
    monkeypatch.setattr(eyas.draft.flash, "flash_forward", plain_flash.forward)
    monkeypatch.setattr(eyas.draft.flash, "flash_backward", plain_flash.backward)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **unused: graph.forward)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_batches_of_new_shapes_compile_nothing_anew(compiled: None) -> None:
    draft, head = random_draft(small_shape()), random_head()
    teacher = Teacher(head, random_ids(), torch.float32, torch.device("cpu"))
    graphs = []
    counters.clear()
    for masks in (["s" * 20], ["s" * 30, ".ssss", "s"], [".s" * 8 + "s" * 12] * 3, ["." * 40 + "s" * 50], ["s" * 13]):
        rows = [random_row(mask, seed) for seed, mask in enumerate(masks)]
        batch = make_batch(rows, EMBEDDING, K, torch.float32, multiple=8, chunk=16)
        loss_backward(unroll(draft, batch, K), draft.lm_head, teacher, batch, Objective(0.8, 10.0))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > K, "all that is meant to be compiled was"
    assert graphs[1:] == graphs[:1] * 4

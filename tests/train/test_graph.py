"""A batch's forward and backward as one CUDA graph: few sizes, the same gradients, and a plain run wherever a graph does not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import plain_flash
import pytest
import torch
from draft_helpers import EMBEDDING, VOCAB, gradients, random_draft, random_head, random_ids, random_row, relative_error, small_shape
from training import Training

import eyas.draft.flash
import eyas.train.graph
import eyas.train.unroll
from eyas.config import TrainSection
from eyas.draft.model import Draft
from eyas.features.shard import FeatureRow
from eyas.target.embeddings import TargetHead
from eyas.train import checkpoint, loop
from eyas.train.batch import Batch, make_batch
from eyas.train.graph import Graphs, UpdateGraph
from eyas.train.loss import LossSums, Objective, Teacher, loss_backward
from eyas.train.optim import Optimizers, make_optimizer
from eyas.train.unroll import unroll

K, FIXED, CHUNK = 3, 256, 64
MASKS = (["s" * 90, "..sss", "s"], ["." * 30 + "s" * 95, "s.s.s"], [".s" * 20 + "s" * 91, "sss"])  # 81 to 96 rows each


@pytest.fixture(autouse=True)
def attention_as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads where documents begin from a tensor; the one for a CPU goes by a list, which a graph would not read anew."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(eyas.train.unroll, "flash_fits", lambda keys: True)
    monkeypatch.setattr(eyas.draft.flash, "flash_forward", plain_flash.forward)
    monkeypatch.setattr(eyas.draft.flash, "flash_backward", plain_flash.backward)


def packed(rows: list[FeatureRow], fixed: int) -> Batch:
    return make_batch(rows, EMBEDDING, K, torch.float32, 8, CHUNK, fixed=fixed)


def batches(fixed: int) -> list[Batch]:
    return [packed([random_row(mask, 10 * number + seed) for seed, mask in enumerate(masks)], fixed) for number, masks in enumerate(MASKS)]


def work_of(draft: Draft) -> Callable[[Batch, float | torch.Tensor], LossSums]:
    teacher = Teacher(random_head(), random_ids(), torch.float32, torch.device("cpu"))

    def work(batch: Batch, denominator: float | torch.Tensor) -> LossSums:
        return loss_backward(unroll(draft, batch, K), draft.lm_head, teacher, batch, Objective(0.8, denominator))[1]

    return work


def update_of(draft: Draft, optimizer: Optimizers) -> Callable[[], torch.Tensor]:
    def update() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        return norm

    return update


class Pretended:
    """What a graph is, without a GPU: the same work over the same tensors, as often as wanted, and the result in the same place. leaves: makes that place."""

    def __init__(self, leaves: Callable[[], LossSums | torch.Tensor]) -> None:
        self.leaves, self.captures, self.replays = leaves, 0, 0

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        place = self.leaves()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            found = work()
            if isinstance(place, torch.Tensor):
                place.copy_(found)
            else:
                for mine, new in zip((place.rows, place.loss, place.agreed), (found.rows, found.loss, found.agreed), strict=True):
                    mine.copy_(new)

        return replay, place


def pretended_backward() -> Pretended:
    return Pretended(lambda: LossSums.nothing(K, torch.device("cpu")))


def pretended_update() -> Pretended:
    return Pretended(lambda: torch.zeros(()))


def test_a_batch_of_fixed_size_has_the_gradients_of_one_of_its_own() -> None:
    draft = random_draft(small_shape())
    for own, fixed in zip(batches(0), batches(FIXED), strict=True):
        assert fixed.num_tokens == FIXED + 8 and len(fixed.rows_R) % (FIXED // 16) == 0
        found = []
        for batch in (own, fixed):
            draft.zero_grad()
            found.append((work_of(draft)(batch, 100.0), gradients(draft)))
        (sums, grads), (other_sums, other_grads) = found
        assert torch.equal(sums.rows, other_sums.rows) and relative_error(sums.loss, other_sums.loss) < 1e-6
        assert all(relative_error(grads[name], other_grads[name]) < 1e-5 for name in grads)


def test_batches_of_one_size_are_one_graph_and_rows_too_many_for_it_are_packed_as_ever() -> None:
    sizes = {tuple(tensor.shape for tensor in batch.tensors) for batch in batches(FIXED)}
    assert len(sizes) == 1
    long = packed([random_row("s" * (FIXED + 1))], FIXED)
    assert long.num_tokens == packed([random_row("s" * (FIXED + 1))], 0).num_tokens


@pytest.mark.parametrize("optimizer_name", ["muon", "adamw"])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_by_graphs_gives_the_weights_of_training_without(frozen: bool, optimizer_name: Literal["muon", "adamw"]) -> None:
    section = TrainSection(freeze_head=frozen, optimizer=optimizer_name)
    ends = []
    for by_graphs in (False, True):
        draft = random_draft(small_shape())
        optimizer = make_optimizer(draft, section, torch.float32)
        backward, update = work_of(draft), update_of(draft, optimizer)
        graphs, updates = pretended_backward(), pretended_update()
        if by_graphs:
            backward, update = Graphs(draft, backward, pytest.fail, graphs), UpdateGraph(draft, optimizer, update, pytest.fail, updates)
        left = []
        for number in range(6):
            optimizer.zero_grad()
            optimizer.set_rates(0.1 * (number + 1))
            for batch in [batches(FIXED)[(number + n) % 3] for n in range(1 + number % 2)]:  # some steps are of two batches
                left.append(backward(batch, 50.0 + number).stacked)
            left.append(update())
        assert graphs.replays == (8 if by_graphs else 0), "all of nine but the first"
        assert updates.replays == (5 if by_graphs else 0) and updates.captures <= 1
        ends.append((draft.state_dict(), left))
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


def test_gradients_that_lie_elsewhere_than_the_graph_reads_are_taken() -> None:
    """Of a process of several that had no rows, or of a batch too large for a graph."""
    ends = []
    for by_graph in (False, True):
        draft = random_draft(small_shape())
        optimizer = make_optimizer(draft, TrainSection(), torch.float32)
        update = update_of(draft, optimizer)
        if by_graph:
            update = UpdateGraph(draft, optimizer, update, pytest.fail, pretended_update())
        for number in range(4):
            for weight in draft.parameters():
                weight.grad = torch.full_like(weight, 1.0 + number).cumsum(-1)
            optimizer.set_rates(1.0)
            update()
        ends.append(draft.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_training_run_takes_its_steps_by_graphs_and_ends_with_the_same_weights(prepared_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: batches of fixed size, one graph. Then the same batches plainly."""
    monkeypatch.setattr(loop, "fixed_tokens", lambda draft, section, device: loop.batch_tokens(section))
    ends, captures = [], (pretended_backward(), pretended_update())
    for name in ("graphs", "plain"):
        training, given = Training(prepared_run, prepared_run.parent / name, "train.unroll_steps=3"), iter(captures)
        with monkeypatch.context() as patched:
            patched.setattr(eyas.train.graph, "GpuCapture", lambda given=given: next(given))
            if name == "plain":
                patched.setattr(loop, "make_work", lambda draft, optimizer, materials, section, say: loop.plain_work(draft, optimizer, materials, section))
            training.go()
        newest = checkpoint.latest(training.folder / "train" / "checkpoints")
        assert newest is not None
        ends.append((checkpoint.load_draft(newest).state_dict(), training.log()))
    backward, update = captures
    assert 0 < backward.captures < backward.replays and update.captures == 1 and update.replays == len(ends[0][1]) - 1
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])


def cannot(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


@pytest.mark.parametrize("fault", ["it cannot be made", "it does something else"])
def test_a_graph_that_does_not_do_is_told_of_once_and_training_goes_on_plainly(fault: str) -> None:
    draft, told = random_draft(small_shape()), list[str]()

    def nothing(work: Callable[[], LossSums]) -> tuple[Callable[[], None], LossSums]:
        return lambda: None, LossSums.nothing(K, torch.device("cpu"))

    run, wanted = Graphs(draft, work_of(draft), told.append, cannot if fault == "it cannot be made" else nothing), []
    for _ in range(4):
        draft.zero_grad()
        run(batches(FIXED)[0], 50.0)
        wanted.append(gradients(draft))
    assert len(told) == 1 and told[0].startswith("train: no CUDA graphs: ")
    assert all(torch.equal(wanted[0][name], grads[name]) for grads in wanted for name in grads)


@pytest.mark.parametrize("fault", ["it cannot be made", "it does something else", "it fails half way"])
def test_an_update_that_does_not_do_as_a_graph_is_told_of_once_and_weights_move_plainly(fault: str) -> None:
    def nothing(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return lambda: None, torch.zeros(())

    def half_way(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        work()
        raise RuntimeError("out of memory")

    ends, told = [], list[str]()
    for capture in (None, {"it cannot be made": cannot, "it does something else": nothing, "it fails half way": half_way}[fault]):
        draft = random_draft(small_shape())
        optimizer = make_optimizer(draft, TrainSection(), torch.float32)
        update = update_of(draft, optimizer)
        if capture:
            update = UpdateGraph(draft, optimizer, update, told.append, capture)
        for number in range(4):
            optimizer.zero_grad()
            optimizer.set_rates(1.0)
            work_of(draft)(batches(FIXED)[number % 3], 50.0)
            update()
        ends.append((draft.state_dict(), [value for state in optimizer.state.values() for value in state.values()]))
    assert len(told) == 1 and told[0].startswith("train: no CUDA graphs: ")
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_graphs_on_a_gpu_give_the_weights_of_training_without() -> None:
    """In bfloat16, with batches of three sizes."""
    cuda, section = torch.device("cuda"), TrainSection()
    shape = small_shape(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512)
    table = torch.randn(VOCAB, 256, generator=torch.Generator().manual_seed(0))
    teacher = Teacher(TargetHead(table, torch.ones(256), 1e-5, table, None), random_ids(), torch.bfloat16, cuda)
    masks = [["s" * 300, ".ss" * 20], ["s" * 90, "." * 30 + "s" * 250], ["s" * 40, ".s" * 30 + "s" * 20]]
    given = [[random_row(mask, 10 * number + seed, 256) for seed, mask in enumerate(rows)] for number, rows in enumerate(masks)]
    ends = []
    for by_graphs in (False, True):
        draft = random_draft(shape).to(cuda)
        optimizer = make_optimizer(draft, section, torch.bfloat16)

        def add(batch: Batch, denominator: float | torch.Tensor, draft: Draft = draft) -> LossSums:
            return loss_backward(unroll(draft, batch, K), draft.lm_head, teacher, batch, Objective(0.8, denominator))[1]

        backward: Callable[[Batch, float], LossSums] = add
        update = update_of(draft, optimizer)
        if by_graphs:
            backward, update = Graphs(draft, add, pytest.fail), UpdateGraph(draft, optimizer, update, pytest.fail)
        left = []
        for number in range(12):
            optimizer.zero_grad()
            optimizer.set_rates(0.1 * (number + 1))
            for n in range(1 + number % 2):
                batch = make_batch(given[(number + n) % 3], table.to(torch.bfloat16), K, torch.bfloat16, 128, 256, pin=True, fixed=512).pinned().to(cuda)
                left.append(backward(batch, 50.0 + number).stacked)
            left.append(update())
        if by_graphs:
            assert isinstance(backward, Graphs) and len(backward.ready) == 3 and isinstance(update, UpdateGraph) and update.ready
        ends.append((draft.state_dict(), left))
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
    assert all(map(torch.equal, ends[0][1], ends[1][1]))

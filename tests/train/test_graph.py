"""A batch's forward and backward as one CUDA graph: few sizes, the same gradients, and a plain run wherever a graph does not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from eyas.train.graph import Graphs
from eyas.train.loss import LossSums, Objective, Teacher, loss_backward
from eyas.train.optim import make_optimizer
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


def pretended(work: Callable[[], LossSums]) -> tuple[Callable[[], None], LossSums]:
    """What a graph is, without a GPU: the same work over the same tensors, as often as wanted, and the result in the same place."""
    sums = LossSums.nothing(K, torch.device("cpu"))

    def replay() -> None:
        found = work()
        for mine, new in zip((sums.rows, sums.loss, sums.agreed), (found.rows, found.loss, found.agreed), strict=True):
            mine.copy_(new)

    return replay, sums


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


@pytest.mark.parametrize("frozen", [False, True])
def test_training_by_graphs_gives_the_weights_of_training_without(frozen: bool) -> None:
    section = TrainSection(freeze_head=frozen, grad_clip=1.0)
    ends = []
    for by_graphs in (False, True):
        draft = random_draft(small_shape())
        optimizer = make_optimizer(draft, section, torch.float32)
        work, replays = work_of(draft), [0]

        def counted(work: Callable[[], LossSums], replays: list[int] = replays) -> tuple[Callable[[], None], LossSums]:
            replay, sums = pretended(work)

            def again() -> None:
                replays[0] += 1
                replay()

            return again, sums

        run = Graphs(draft, work, pytest.fail, counted) if by_graphs else work
        totals = []
        for number in range(6):
            optimizer.zero_grad()
            for batch in [batches(FIXED)[(number + n) % 3] for n in range(1 + number % 2)]:  # some steps are of two batches
                totals.append(run(batch, 50.0 + number))
            optimizer.step(0.5)
        assert replays[0] == (8 if by_graphs else 0), "all of nine but the first"
        ends.append((draft.state_dict(), [total.stacked for total in totals]))
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


def test_a_training_run_takes_its_steps_by_graphs_and_ends_with_the_same_weights(prepared_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: batches of fixed size, one graph. Then the same batches plainly."""
    monkeypatch.setattr(loop, "fixed_tokens", lambda draft, section, device: loop.batch_tokens(section))
    captures: list[int] = []

    def counted(work: Callable[[], LossSums]) -> tuple[Callable[[], None], LossSums]:
        captures.append(1)
        return pretended(work)

    def plainly(draft: Draft, materials: loop.Materials, section: TrainSection, say: Callable[[str], None]) -> Callable[[Batch, float], LossSums]:
        return lambda batch, denominator: loop.backward(draft, materials, batch, section, denominator)

    ends = []
    for name in ("graphs", "plain"):
        training = Training(prepared_run, prepared_run.parent / name, "train.unroll_steps=3")
        with monkeypatch.context() as patched:
            patched.setattr(eyas.train.graph, "GpuCapture", lambda: counted)
            if name == "plain":
                patched.setattr(loop, "make_work", plainly)
            training.go()
        newest = checkpoint.latest(training.folder / "train" / "checkpoints")
        assert newest is not None
        ends.append((checkpoint.load_draft(newest).state_dict(), training.log()))
    assert 0 < len(captures) < len(ends[0][1]) / 2
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])


@pytest.mark.parametrize("fault", ["it cannot be made", "it does something else"])
def test_a_graph_that_does_not_do_is_told_of_once_and_training_goes_on_plainly(fault: str) -> None:
    draft, told = random_draft(small_shape()), list[str]()

    def bad(work: Callable[[], LossSums]) -> tuple[Callable[[], None], LossSums]:
        if fault == "it cannot be made":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return lambda: None, LossSums.nothing(K, torch.device("cpu"))

    run, wanted = Graphs(draft, work_of(draft), told.append, bad), []
    for _ in range(4):
        draft.zero_grad()
        run(batches(FIXED)[0], 50.0)
        wanted.append(gradients(draft))
    assert len(told) == 1 and told[0].startswith("train: no CUDA graphs: ")
    assert all(torch.equal(wanted[0][name], grads[name]) for grads in wanted for name in grads)


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

        def work(batch: Batch, denominator: float | torch.Tensor, draft: Draft = draft) -> LossSums:
            return loss_backward(unroll(draft, batch, K), draft.lm_head, teacher, batch, Objective(0.8, denominator))[1]

        run: Callable[[Batch, float], LossSums] = Graphs(draft, work, pytest.fail) if by_graphs else work
        totals = []
        for number in range(12):
            optimizer.zero_grad()
            for n in range(1 + number % 2):
                batch = make_batch(given[(number + n) % 3], table.to(torch.bfloat16), K, torch.bfloat16, 128, 256, pin=True, fixed=512).pinned().to(cuda)
                totals.append(run(batch, 50.0 + number))
            optimizer.step(0.5)
        if by_graphs:
            assert isinstance(run, Graphs) and len(run.ready) == 3
        ends.append((draft.state_dict(), [total.stacked for total in totals]))
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
    assert all(map(torch.equal, ends[0][1], ends[1][1]))

"""A real vLLM, in its own environment, gives the states, answers and log-probabilities that transformers gives in this process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MEMORY_FAULT, SOURCE, VLLM_DTYPE, VLLM_ERROR, VLLM_PYTHON, assert_same_states, make_tiny_target, write_run
from safetensors.torch import load_file

from eyas.config import TargetSection, load
from eyas.errors import UserError
from eyas.features.index import read_index
from eyas.features.reader import FeatureReader
from eyas.features.shard import OpenShard, open_shard
from eyas.features.verify import TOLERANCE
from eyas.pipeline import Run
from eyas.target.engine import Filled, Sampling, resolve_device
from eyas.target.spec import TargetSpec, read_spec
from eyas.target.transformers_engine import TransformersEngine
from eyas.target.vllm_engine import PROOF_TOKENS, Row, VllmEngine
from eyas.target.worker_process import _stat

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MAX_LENGTH = 160
HANG_MINUTES = 1.0 if torch.cuda.is_available() else 0.25  # a GPU's kernels are compiled at the first forward
# Not compiled: on a CPU that takes minutes, and features never are. The whole memory of the machine is not asked for.
EXTRA: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True}
EXTRA_TINY: dict[str, Any] = {**EXTRA, "kv_cache_memory_bytes": 1 << 28}


@pytest.fixture(scope="module")
def spec(smollm2: Path) -> TargetSpec:
    return read_spec(smollm2)


@pytest.fixture(scope="module")
def vllm(spec: TargetSpec, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} is not there; run `make env-vllm` first, or `make test`, which does")
    section = TargetSection(path=str(smollm2), engine="vllm", python=str(VLLM_PYTHON), max_batched_tokens=512, extra=EXTRA)
    engine = VllmEngine(spec, section, VLLM_DTYPE, MAX_LENGTH, tmp_path_factory.mktemp("vllm") / "engine.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which starts 20 s sooner
        engine._enter("capture")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    """Heads of a width that vLLM takes, and a number of them that two ranks can share."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    return read_spec(make_tiny_target(folder, num_layers=4, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32))


@pytest.fixture(scope="module")
def vllm_tiny(tiny: TargetSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    section = TargetSection(
        path=str(tiny.path), engine="vllm", python=str(VLLM_PYTHON), max_batched_tokens=512, hang_minutes=HANG_MINUTES, extra=EXTRA_TINY
    )  # fmt: skip
    engine = VllmEngine(tiny, section, VLLM_DTYPE, MAX_LENGTH, tmp_path_factory.mktemp("vllm-tiny") / "engine.log")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def transformers(spec: TargetSpec) -> TransformersEngine:
    return reference(spec)


def reference(spec: TargetSpec) -> TransformersEngine:
    return TransformersEngine(spec, resolve_device("auto"), VLLM_DTYPE, False)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def rows() -> list[list[int]]:
    """Of 1 token, of the greatest length, with a long common beginning, one twice, and of many lengths; more than one forward holds."""
    generator = torch.Generator().manual_seed(0)
    stem = torch.randint(3, 49_000, (100,), generator=generator).tolist()
    free = [torch.randint(3, 49_000, (length,), generator=generator).tolist() for length in (1, 2, 17, 64, 5, 90, MAX_LENGTH, 33, 128, 150, 71)]
    return [*free, [*stem, 7, 8, 9], [*stem, 7, 8], stem, stem]


def test_states_are_those_of_transformers_at_every_layer(vllm: VllmEngine, transformers: TransformersEngine) -> None:
    layers = [0, 1, 2, 15, 27, 29, 30]
    found = vllm.capture(rows(), layers)
    assert {states.dtype for states in found} == {VLLM_DTYPE}
    assert_same_states(found, [transformers.capture([row], layers)[0] for row in rows()], layers)


def test_the_second_call_gives_what_the_first_gave(vllm: VllmEngine) -> None:
    layers = [0, 1, 2, 15, 27, 29, 30]
    first, second = (vllm.capture(rows()[:4], layers) for _ in range(2))
    assert_same_states(first, second, layers)


def test_log_probabilities_are_those_of_transformers(vllm: VllmEngine, transformers: TransformersEngine) -> None:
    row = rows()[3]
    error = (vllm.log_probabilities(row) - transformers.log_probabilities(row)).abs()
    assert error.mean() < TOLERANCE[VLLM_DTYPE] and error.max() < 1e-3


def test_greedy_answers_are_those_of_transformers(vllm: VllmEngine, transformers: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    prompts = [[1, 4093, 198, *row] for row in rows()[:4]]
    sampling = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0)
    assert vllm.generate(prompts, sampling) == transformers.generate(prompts, sampling)


def test_a_python_without_vllm_is_named_with_its_log(spec: TargetSpec, tmp_path: Path) -> None:
    section = TargetSection(path=str(spec.path), engine="vllm", python=sys.executable)
    engine = VllmEngine(spec, section, VLLM_DTYPE, MAX_LENGTH, tmp_path / "engine.log")
    with pytest.raises(UserError, match=r"No module named 'vllm'.*engine\.log"):
        engine.log_probabilities([1, 2, 3])


def test_a_python_that_is_not_there_is_named(spec: TargetSpec, tmp_path: Path) -> None:
    section = TargetSection(path=str(spec.path), engine="vllm", python=str(tmp_path / "python"))
    with pytest.raises(UserError, match="cannot be started"):
        VllmEngine(spec, section, VLLM_DTYPE, MAX_LENGTH, tmp_path / "engine.log").log_probabilities([1, 2, 3])


def children(engine: VllmEngine) -> list[int]:
    """What the worker's process has started: vLLM's engine, which holds the model."""
    assert engine.process is not None
    return [pid for pid in engine.process._pids() if pid != engine.process.process.pid]


def many_rows(spec: TargetSpec, folder: Path) -> tuple[list[OpenShard], Callable[[], dict[str, torch.Tensor]]]:
    """60 rows in 15 shards laid out in `folder`; and a function that reads what stands in the shards, key -> [T, 3, D]."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(3, spec.vocab_size, (100 + n,), generator=generator, dtype=torch.int32) for n in range(60)]
    shards = [
        open_shard(folder, n, [Row(f"{n}-{m}", rows[4 * n + m], torch.ones(100 + 4 * n + m, dtype=torch.bool)) for m in range(4)], 2, spec.hidden_size,
                   VLLM_DTYPE)
        for n in range(15)
    ]  # fmt: skip

    def read() -> dict[str, torch.Tensor]:
        found = {}
        for shard in shards:
            tensors = load_file(shard.part)
            states = torch.cat([tensors["aux"], tensors["last"][:, None]], 1)
            found |= dict(zip(shard.keys, states.tensor_split(shard.starts[1:-1]), strict=True))
        return found

    return shards, read


@pytest.mark.parametrize("fault", ["the worker is killed", "the engine is stopped"])  # the engine is killed in a whole run, below
def test_an_engine_lost_in_the_middle_is_started_again_and_no_row_is_lost_or_doubled(vllm_tiny: VllmEngine, tmp_path: Path, fault: str) -> None:
    engine, layers = vllm_tiny, [0, 2, 4]
    said: list[str] = []
    engine.say = said.append
    shards, read = many_rows(engine.spec, tmp_path)
    list(engine.fill(shards, layers, lambda tokens: None, lambda shard: None))
    undisturbed = read()
    shards, read = many_rows(engine.spec, tmp_path)
    filled: list[Filled] = []
    told = 0

    def advance(tokens: int) -> None:
        nonlocal told
        told += tokens

    for done in engine.fill(iter(shards), layers, advance, lambda shard: None):
        filled.append(done)
        if len(filled) == 3:
            assert engine.process is not None
            if fault == "the worker is killed":
                os.kill(engine.process.process.pid, signal.SIGKILL)
            else:
                for pid in children(engine):
                    os.kill(pid, signal.SIGSTOP)
    assert [done.shard for done in filled] == shards, "each shard once, in order"
    assert not any(done.lost or done.not_finite for done in filled)
    proved = [len(done.log_probabilities) + 1 for done in filled]
    assert proved == [len(shards[0].tokens[filled[0].sample]), *[PROOF_TOKENS] * 14], "a whole row of the first shard, a beginning of the others"
    assert told == sum(shard.starts[-1] for shard in shards), "progress counts each token once"
    for key, states in read().items():
        assert relative_error(states, undisturbed[key]) < VLLM_ERROR
    assert len(said) == 1 and "started again" in said[0] and "engine.log" in said[0]
    if fault == "the engine is stopped":
        assert "no sign of life" in said[0] and "was stopped" in said[0] and "it stood in" in said[0]
        assert "most recent call first" in engine.log.read_text(), "the stack of the process that hung"


def test_an_engine_that_is_lost_again_and_again_is_given_up_and_named(tiny: TargetSpec, tmp_path: Path) -> None:
    """A program stands for it here that starts well and then dies at once: a real one that does so each time cannot be had."""
    program = tmp_path / "python"
    lines = (f"#!{sys.executable}", "import os, sys", """os.write(int(sys.argv[4]), b'{"ok": {"vllm": "0"}}\\n')""", "os.kill(os.getpid(), 9)")
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    said: list[str] = []
    engine = VllmEngine(
        tiny, TargetSection(path=str(tiny.path), engine="vllm", python=str(program)), VLLM_DTYPE, MAX_LENGTH, tmp_path / "engine.log", said.append
    )
    with pytest.raises(UserError, match=r"3 times in a row: its process ended with code -9.*engine\.log"):
        engine.log_probabilities([1, 2, 3])
    assert len(said) == 2


@pytest.mark.parametrize("failures", [2, 3])
def test_an_engine_whose_memory_another_process_disturbed_is_started_again(failures: int, tiny: TargetSpec, tmp_path: Path) -> None:
    """vLLM measures its GPU's memory when it starts, and gives up if another process gives some back meanwhile. A program says here what vLLM said then."""
    program = tmp_path / "python"
    program.write_text(f"""#!{sys.executable}
import os, sys
with open({str(tmp_path / "starts")!r}, "a+") as starts:
    starts.write("x")
    starts.seek(0)
    failed = len(starts.read()) <= {failures}
if failed:
    print({"ERROR [core.py:3] " + MEMORY_FAULT!r}, flush=True)
    os.write(int(sys.argv[4]), b'{{"error": "RuntimeError: Engine core initialization failed. See root cause above.", "kind": "RuntimeError"}}\\n')
else:
    os.write(int(sys.argv[4]), b'{{"ok": {{"vllm": "0"}}}}\\n{{"ok": [0.5]}}\\n')
""")
    program.chmod(0o755)
    said: list[str] = []
    section = TargetSection(path=str(tiny.path), engine="vllm", python=str(program))
    engine = VllmEngine(tiny, section, VLLM_DTYPE, MAX_LENGTH, tmp_path / "engine.log", said.append)
    if failures == 2:
        assert engine.log_probabilities([1, 2, 3]).tolist() == [0.5]
        engine.close()
    else:
        with pytest.raises(UserError, match=r"failed while starting: AssertionError: Error in memory profiling.*engine\.log"):
            engine.log_probabilities([1, 2, 3])
    assert len(said) == 2 and all("Error in memory profiling" in line and "started again" in line for line in said)


def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path, tiny: TargetSpec) -> None:
    """Nothing may stay on the GPUs when Eyas is killed."""
    program = f"""
import torch
from pathlib import Path
from eyas.config import TargetSection
from eyas.target.spec import read_spec
from eyas.target.vllm_engine import VllmEngine
section = TargetSection(path={str(tiny.path)!r}, engine="vllm", python={str(VLLM_PYTHON)!r}, max_batched_tokens=512, extra={EXTRA_TINY!r})
engine = VllmEngine(read_spec(Path({str(tiny.path)!r})), section, torch.float32, 160, Path({str(tmp_path / "engine.log")!r}))
engine.log_probabilities([1, 2, 3])
print(*engine.process._pids(), engine.folder, flush=True)
engine.log_probabilities([1, 2, 3] * 50)
input()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": SOURCE}
    )
    assert parent.stdout is not None
    *pids, folder = parent.stdout.readline().split()
    assert len(pids) >= 2
    parent.kill()
    parent.wait()
    end = time.monotonic() + 20
    while (alive := [pid for pid in pids if _stat(int(pid))[0] not in ("Z", "X")]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive
    shutil.rmtree(folder)


def test_rows_that_come_in_chunks_give_the_same_states(tiny: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = TargetSection(
        path=str(tiny.path), engine="vllm", python=str(VLLM_PYTHON), max_batched_tokens=512,
        extra={**EXTRA_TINY, "enable_chunked_prefill": True, "max_num_batched_tokens": 64},
    )  # fmt: skip
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = VllmEngine(tiny, section, VLLM_DTYPE, MAX_LENGTH, tmp_path / "engine.log")
    layers = [0, 2, 4]
    some = [[token % tiny.vocab_size for token in row] for row in rows()]
    for row, states in zip(some, engine.capture(some, layers), strict=True):
        (alone,) = reference(tiny).capture([row], layers)
        assert relative_error(states, alone) < VLLM_ERROR, f"a row of {len(row)} tokens"
    engine.close()


def test_layers_spread_over_processes_are_refused(spec: TargetSpec, tmp_path: Path) -> None:
    section = TargetSection(path=str(spec.path), engine="vllm", python=str(VLLM_PYTHON), extra={"pipeline_parallel_size": 2})
    with pytest.raises(UserError, match="pipeline_parallel_size"):
        VllmEngine(spec, section, VLLM_DTYPE, MAX_LENGTH, tmp_path / "engine.log").log_probabilities([1, 2, 3])


def test_tensor_parallel_2_gives_the_states_of_1(vllm_tiny: VllmEngine, tiny: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [[token % 320 for token in row] for row in rows()[:6]]
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs, or none")
    alone = vllm_tiny.capture(some, [0, 2, 4])
    vllm_tiny.close()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    section = TargetSection(path=str(tiny.path), engine="vllm", python=str(VLLM_PYTHON), tensor_parallel=2, max_batched_tokens=512, extra=EXTRA_TINY)
    engine = VllmEngine(tiny, section, VLLM_DTYPE, MAX_LENGTH, tmp_path / "engine.log")
    for one, two in zip(alone, engine.capture(some, [0, 2, 4]), strict=True):
        assert relative_error(two, one) < VLLM_ERROR
    engine.close()


def test_a_run_whose_vllm_is_killed_captures_what_a_run_with_transformers_captures(tiny: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages, not the engine alone: answers written, features stored and proved, by the run file's word; vLLM's engine is killed while it extracts."""
    send, killed = VllmEngine._send, []

    def send_and_kill(self: VllmEngine, **command: Any) -> None:
        send(self, **command)
        if command["do"] == "capture" and not killed:
            killed.extend(children(self))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(VllmEngine, "_send", send_and_kill)
    stores, orders = {}, {}
    for engine in ("transformers", "vllm"):
        folder = tmp_path / engine
        folder.mkdir()
        run_file = write_run(
            folder, tiny.path, target={"engine": engine, "python": str(VLLM_PYTHON)}, data={"regenerate": "all", "temperature": 0.0, "max_new_tokens": 6}
        )
        run_file.write_text(run_file.read_text() + "[target.extra]\nkv_cache_memory_bytes = 268435456\nenforce_eager = true\n")
        run = Run(load(run_file, []))
        run.up_to("extract")
        reader = FeatureReader(run.folder / "features")
        stores[engine] = {key: reader.row(key) for key in reader.places}
        orders[engine] = [key for entry in read_index(run.folder / "features") for key in entry.keys]
    assert killed and "It is started again" in (run.folder / "log.txt").read_text()
    assert stores["vllm"].keys() == stores["transformers"].keys(), "the same greedy answers, so the same rows"
    assert sorted(orders["vllm"]) == sorted(stores["transformers"]), "each row once"
    for key, row in stores["vllm"].items():
        for name in ("aux", "last"):
            assert relative_error(getattr(row, name), getattr(stores["transformers"][key], name)) < 1e-5

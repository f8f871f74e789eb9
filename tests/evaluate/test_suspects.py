"""Sabotage: a draft is trained on what it should not be, and `eyas evaluate` names the fault before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome, conversation, make_tiny_target, shift_norms, write_run

from eyas.prepare.chat import Chat, Row
from eyas.target.transformers_engine import TransformersEngine

Eyas = Callable[..., Outcome]
Capture = Callable[[TransformersEngine, list[list[int]], list[int]], list[torch.Tensor]]
AUX = [1, 3, 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, each of which moves the stream, so that neighbours can be told apart."""
    return make_tiny_target(tmp_path_factory.mktemp("suspects") / "target", hidden_size=64)


def run_of(folder: Path, target: Path, **sections: Any) -> Path:
    rows = [conversation(n, 1 + n % 2) for n in range(24)]
    return write_run(folder, target, rows, features={"layers": AUX, **sections.pop("features", {})}, train={"epochs": 1}, **sections)


def zeros(real: Capture, engine: TransformersEngine, rows: list[list[int]], layers: list[int]) -> list[torch.Tensor]:
    found = [states.clone() for states in real(engine, rows, layers)]
    for states in found:
        states[:, 1] = 0
    return found


def next_layers(real: Capture, engine: TransformersEngine, rows: list[list[int]], layers: list[int]) -> list[torch.Tensor]:
    return real(engine, rows, [*(layer + 1 for layer in layers[:-1]), layers[-1]])


def other_rows(real: Capture, engine: TransformersEngine, rows: list[list[int]], layers: list[int]) -> list[torch.Tensor]:
    """Aux layers of the row whose tokens are these, rotated: each row's states are there, but not its own."""
    found = [states.clone() for states in real(engine, rows, layers)]
    turned = real(engine, [row[::-1] for row in rows], layers)
    for states, wrong in zip(found, turned, strict=True):
        states[:, :-1] = wrong[:, :-1]
    return found


def normed_twice(real: Capture, engine: TransformersEngine, rows: list[list[int]], layers: list[int]) -> list[torch.Tensor]:
    found = [states.clone() for states in real(engine, rows, layers)]
    for states in found:
        aux = states[:, :-1]
        states[:, :-1] = aux * torch.rsqrt(aux.pow(2).mean(-1, keepdim=True)) * 0.1
    return found


@pytest.mark.parametrize(
    ("sabotage", "says"),
    [
        (zeros, ["aux layer 2 (3) of the stored features are zeros"]),
        (next_layers, ["aux layer 1 (1) of the stored features are those of layer 2", "(3) of the stored features are those of layer 4", "those of layer 6"]),
        (other_rows, ["aux layer 1 (1) of the stored features are not what the target gives now"]),
        (normed_twice, ["times the size of what the target gives now: a norm too many, or one too few"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_features_that_are_not_the_targets_are_named(
    sabotage: Callable[..., list[torch.Tensor]], says: list[str], dtype: str, target: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of(tmp_path, target, features={"dtype": dtype})
    real = TransformersEngine.states
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "states", lambda engine, rows, layers: sabotage(real, engine, rows, layers))
        assert eyas("run", path, "--until", "export").code == 0, "extraction proves the last layer alone"
    outcome = eyas("run", path)
    assert outcome.code == 0 and all(part in outcome.err for part in says), outcome.err
    summary = json.loads((tmp_path / "runs" / "run" / "evaluate" / "summary.json").read_text())
    assert all(any(part in fault for fault in summary["suspects"]) for part in says)


def test_states_of_other_rows_are_told_from_wrong_ones(tmp_path: Path) -> None:
    from eyas.evaluate.suspects import _of_layer

    generator = torch.Generator().manual_seed(0)
    fresh = [torch.randn(20, 1, 16, generator=generator) for _ in range(4)]
    assert _of_layer([states[:, 0] for states in fresh], fresh, [3], 3) == ""
    assert _of_layer([fresh[(row + 1) % 4][:, 0] for row in range(4)], fresh, [3], 3) == "are those of other rows"
    assert "not what the target gives" in _of_layer([torch.randn(20, 16, generator=generator) for _ in range(4)], fresh, [3], 3)


@pytest.mark.parametrize(("shift", "says"), [(1, "begin 1 token too late"), (-1, "begin 1 token too early"), (2, "begin 2 token too late")])
def test_spans_that_are_off_are_named(shift: int, says: str, target: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Chat.rows

    def shifted(self: Chat, *arguments: Any) -> list[Row]:
        moved = []
        for row in real(self, *arguments):
            spans = row.supervised
            moved.append(Row(row.tokens, [0 <= at - shift < len(spans) and spans[at - shift] for at in range(len(spans))]))
        return moved

    path = run_of(tmp_path, target)
    with monkeypatch.context() as patch:
        patch.setattr(Chat, "rows", shifted)
        assert eyas("run", path, "--until", "export").code == 0
    outcome = eyas("run", path)
    assert outcome.code == 0 and says in outcome.err, outcome.err


@pytest.mark.parametrize("keep", ["all", "none"])
def test_a_sound_run_has_no_suspects(keep: str, target: Path, tmp_path: Path, eyas: Eyas) -> None:
    path = run_of(tmp_path, target, features={"keep": keep})
    outcome = eyas("run", path)
    assert outcome.code == 0 and "evaluate: warning" not in outcome.err, outcome.err
    assert json.loads((tmp_path / "runs" / "run" / "evaluate" / "summary.json").read_text())["suspects"] == []


def test_features_that_are_gone_or_damaged_do_not_stop_an_evaluation(target: Path, tmp_path: Path, eyas: Eyas) -> None:
    path = run_of(tmp_path, target)
    assert eyas("run", path, "--until", "export").code == 0
    (shard,) = (tmp_path / "runs" / "run" / "features").glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    assert "checksum" in eyas("evaluate", path).err
    (tmp_path / "runs" / "run" / "features" / "index.jsonl").write_bytes(b"")
    (tmp_path / "runs" / "run" / "evaluate" / "manifest.json").unlink()
    outcome = eyas("evaluate", path)
    assert outcome.code == 0 and "index.jsonl is missing or empty" in outcome.err, outcome.err


def test_norms_that_differ_from_one_do_not_look_like_a_fault(tmp_path: Path, eyas: Eyas) -> None:
    import transformers

    target = make_tiny_target(tmp_path / "target", hidden_size=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    shift_norms(model, torch.Generator().manual_seed(1))
    model.save_pretrained(target)
    outcome = eyas("run", run_of(tmp_path, target))
    assert outcome.code == 0 and "evaluate: warning" not in outcome.err

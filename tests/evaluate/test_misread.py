"""An engine that reads an exported draft otherwise than it was trained is found out by what it accepts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import conversation, make_tiny_target, write_run
from safetensors.torch import load_file, save_file

from eyas.config import load
from eyas.evaluate.misread import explained, readings
from eyas.evaluate.simulate import Acceptance, Simulator, nothing
from eyas.evaluate.speculate import speculative_decode
from eyas.export.check import ExportedDraft, load_export
from eyas.features.reader import FeatureReader
from eyas.pipeline import Run
from eyas.prepare.rows import read_rows
from eyas.target.embeddings import read_head
from eyas.target.transformers_engine import TransformersEngine
from eyas.train.loop import Materials, holdout_agreement
from eyas.train.loss import Teacher
from eyas.train.run import ids_are_wrong

CPU, K = torch.device("cpu"), 3
LAYERS = [1, 3, 5]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose draft has learnt its target's greedy answers, so that each mistake costs it something."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("misread")
    target = make_tiny_target(folder / "target", hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})
    path = write_run(
        folder, target, [conversation(n) for n in range(40)],
        data={"regenerate": "all", "temperature": 0.0, "max_new_tokens": 40, "holdout": 0.1}, features={"layers": LAYERS},
        train={"epochs": 60, "checkpoint_every": 1000, "optimizer": "adamw", "lr": 3e-3, "unroll_steps": K}, vocab={"size": 300},
        evaluate={"prompts": ["data.jsonl"], "prompts_per_category": 12, "num_draft_tokens": K, "max_new_tokens": 40},
    )  # fmt: skip
    run = Run(load(path, []))
    run.up_to("evaluate")
    assert json.loads((run.folder / "evaluate" / "summary.json").read_text())["acceptance_length"] > 1.5
    return run


@pytest.fixture(scope="module")
def engine(run: Run) -> TransformersEngine:
    return TransformersEngine(run.spec, CPU, torch.float32, False)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def layers_one_higher(config: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in LAYERS]


def weights(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, change in changes.items():
            name = name.replace("__", ".")
            tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors")

    return edit


def neighbours_for_halves(weight: torch.Tensor) -> torch.Tensor:
    """Rows of q or k, 16 a head, as a checkpoint for rope of neighbours has them."""
    return torch.stack([head[list(range(0, 16, 2)) + list(range(1, 16, 2))] for head in weight.split(16)]).flatten(0, 1)


NO_D2T = "there were no d2t"
SABOTAGE: dict[str, Callable[[Path], None]] = {
    "norm_before_residual were false": edited(lambda config: config.update(norm_before_residual=False)),
    "rope_theta were 10000": edited(lambda config: config["rope_parameters"].update(rope_theta=10_000.0)),
    "the aux layers were [2, 4, 6]": edited(layers_one_higher),
    "the final norm had no weights": weights(norm__weight=torch.ones_like),
    "rope turned neighbours, not halves, of a head": weights(
        midlayer__self_attn__q_proj__weight=neighbours_for_halves, midlayer__self_attn__k_proj__weight=neighbours_for_halves
    ),
    NO_D2T: lambda folder: None,
}


def served(run: Run, engine: TransformersEngine, exported: ExportedDraft, rows: list[dict[str, Any]]) -> Acceptance:
    total, embedding = nothing(K), read_head(run.spec).embedding
    for row in rows:
        decoded = speculative_decode(engine, exported.draft, embedding, exported.ids, row["prompt"], frozenset(run.spec.stop_ids), 40, K)
        assert decoded.tokens == row["answer"], "however a draft is read, the text stays"
        total = total + decoded.acceptance
    return total


@pytest.mark.parametrize("mistake", SABOTAGE)
def test_the_mistake_that_was_made_is_the_first_to_be_named(mistake: str, run: Run, engine: TransformersEngine, tmp_path: Path) -> None:
    shutil.copytree(run.folder / "export" / "vllm", tmp_path / "draft")
    SABOTAGE[mistake](tmp_path / "draft")
    misread = load_export(tmp_path / "draft")
    if mistake == NO_D2T:
        misread = ExportedDraft(misread.draft, torch.arange(len(misread.ids)))
    rows = [json.loads(line) for line in (run.folder / "evaluate" / "rows.jsonl").read_text().splitlines()]
    answered = [(row["prompt"], row["answer"]) for row in rows]
    right = load_export(run.folder / "export" / "vllm")
    simulator = Simulator.of(load_export(run.folder / "export" / "vllm"), read_head(run.spec), 0.0, torch.float32, CPU)
    found = served(run, engine, misread, rows)

    def capture(layers: list[int]) -> list[torch.Tensor]:
        return [engine.capture([[*prompt, *answer]], layers)[0] for prompt, answer in answered]

    named = explained(found, answered, capture, right, simulator)
    assert [each.as_if for each in named][:1] == [mistake]
    assert named[0].distance < 1e-9 and named[0].acceptance_length == found.length


def test_a_draft_whose_ids_are_not_those_it_was_taught_is_told_from_its_agreement_with_the_teacher(run: Run) -> None:
    """Rows that it knows by heart stand for held-out ones: what a random target says is not foreseen otherwise."""
    exported, head, config = load_export(run.folder / "export" / "vllm"), read_head(run.spec), run.config.train
    keys = [row.key for row in read_rows(run.folder / "prepare") if not row.holdout]

    def rates(ids: torch.Tensor) -> tuple[float, float]:
        teacher = Teacher(head, exported.ids, torch.float32, CPU)
        materials = Materials(FeatureReader(run.folder / "features"), [], keys, head.embedding, teacher, ids, torch.float32, CPU)
        return holdout_agreement(exported.draft, materials, config)

    agreed, said = rates(exported.ids)
    assert agreed > 0.3 and said == pytest.approx(agreed, abs=0.02), "of greedy text the teacher's likeliest token is the text's"
    assert ids_are_wrong(*rates(exported.ids.roll(7))) and not ids_are_wrong(agreed, said) and not ids_are_wrong(0.1, 0.0)


def test_no_reading_is_the_trained_one_and_none_is_named_where_none_explains(run: Run, engine: TransformersEngine) -> None:
    exported, head = load_export(run.folder / "export" / "vllm"), read_head(run.spec)
    all_readings = list(readings(exported, head))
    assert len({reading.says for reading in all_readings}) == len(all_readings) > 12
    rows = [json.loads(line) for line in (run.folder / "evaluate" / "rows.jsonl").read_text().splitlines()]
    answered = [(row["prompt"], row["answer"]) for row in rows]
    states = {layer: [engine.capture([[*prompt, *answer]], [layer])[0] for prompt, answer in answered] for layer in range(7)}
    simulator = Simulator.of(load_export(run.folder / "export" / "vllm"), head, 0.0, torch.float32, CPU)
    nearly_all = Acceptance(100, (100, 99, 98), (99, 98, 97))
    stacked = lambda layers: [torch.cat([states[layer][row] for layer in layers], dim=1) for row in range(len(rows))]  # noqa: E731
    assert explained(nearly_all, answered, stacked, exported, simulator) == []

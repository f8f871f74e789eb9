"""What the stage `train` says of the draft that it made."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import write_run

import eyas.train.run
from eyas.config import load
from eyas.pipeline import Run
from eyas.train.run import learnt_by_heart


@pytest.mark.parametrize(("epochs", "told"), [(1, False), (60, True)])
def test_a_draft_that_knows_its_rows_by_heart_is_told_of(
    epochs: int, told: bool, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many passes over 21 rows; the three that are held out show it."""
    monkeypatch.setattr(eyas.train.run, "FEW", 3)
    path = write_run(tmp_path, tiny_target, train={"epochs": epochs, "checkpoint_every": 1000, "muon_lr": 0.02, "patience": 0})
    Run(load(path, [])).up_to("train")
    assert ("by heart" in capsys.readouterr().err) == told


def test_by_heart_is_a_fifth_more_than_on_rows_it_has_not_seen() -> None:
    assert learnt_by_heart(3.12, 2.41) and learnt_by_heart(1.5, 1.4) and not learnt_by_heart(2.6, 2.41) and not learnt_by_heart(1.0, 1.0)


def test_a_handful_of_held_out_rows_says_nothing(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, tiny_target, train={"epochs": 60, "checkpoint_every": 1000, "muon_lr": 0.02, "patience": 0})
    Run(load(path, [])).up_to("train")
    assert "by heart" not in capsys.readouterr().err

"""Trainings in run folders of their own, begun from one set of features."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import SOURCE

from eyas.config import load
from eyas.pipeline import Run


class Training:
    """prepared: a run file whose run folder holds all that training needs (the fixture `prepared_run`)."""

    def __init__(self, prepared: Path, folder: Path, *overrides: str) -> None:
        shutil.copytree(prepared.parent / "runs" / "run", folder)
        self.run_file, self.folder = prepared, folder
        self.overrides = [f"run.folder={folder}", *overrides]

    def go(self, *overrides: str) -> None:
        Run(load(self.run_file, [*self.overrides, *overrides])).only("train")

    def process(self, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "eyas.cli", "train", str(self.run_file)]
        for override in (*self.overrides, *overrides):
            command += ["--set", override]
        environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder.parent)

    def log(self) -> list[dict[str, Any]]:
        """log.jsonl without the seconds, which no two runs share."""
        path = self.folder / "train" / "log.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]

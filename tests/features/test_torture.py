"""The feature store under kill -9 and damaged files, for a short while; benchmarks/torture_store.py does it for as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT, SOURCE


@pytest.mark.slow
def test_20_kills_and_what_disks_do_give_no_wrong_row_and_lose_no_shard() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "torture_store.py", "--kills", "20"], env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no wrong row" in done.stdout

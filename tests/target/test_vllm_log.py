"""The sentence that a user is shown, out of the log of an engine that died."""

from __future__ import annotations

import pytest
from conftest import MEMORY_FAULT

from eyas.target.vllm_log import cause_of_death, passes

ENGINE_LOG = """\
INFO a
(EngineCore pid=7) ERROR 01-01 [core.py:3] ValueError: no room for the cache.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (ENGINE_LOG, "ValueError: no room for the cache"),
        ("usage: api_server.py\napi_server.py: error: unrecognized arguments: --sizes\n", "error: unrecognized arguments: --sizes"),
        ("\x1b[31mtorch.OutOfMemoryError: CUDA out of memory\x1b[0m\nbye\n", "torch.OutOfMemoryError: CUDA out of memory"),
        ("loading\nKilled\n\n", "Killed"),
        ("", "it printed nothing"),
    ],
)
def test_the_cause_is_the_last_error_that_does_not_point_at_another(log: str, cause: str) -> None:
    assert cause_of_death(log) == cause


def test_a_fault_of_the_moment_is_told_from_others() -> None:
    assert passes(cause_of_death(ENGINE_LOG + f"ERROR 01-01 [core.py:3] {MEMORY_FAULT}\n"))
    assert not passes(cause_of_death(ENGINE_LOG))

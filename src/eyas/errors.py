"""What a user is told when something cannot go on.

A sentence here names the thing, the reason and the next step. The command line prints it alone, without a traceback, and exits with 2.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class UserError(ValueError):
    """Something outside Eyas is not as it must be: a file, a setting, a model folder, a disk."""


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The entry of `words` that `word` is most likely a misspelling of, or None."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return found[0] if found else None


def explain_os_error(error: OSError, redo: str) -> str:
    """One sentence for a failed system call; `redo` is the command that goes on once the cause is gone."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full. Free some space, then run `{redo}`; all finished work is kept."
    return f"{where}{error.strerror or error}. Mend that, then run `{redo}`; all finished work is kept."


def sentence(error: Exception, redo: str) -> str | None:
    """What the user is told of an error that has its cause outside Eyas; None of a fault inside."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return explain_os_error(error, redo)
    # safetensors raises its own error type around the system's
    if "No space left on device" in str(error) or "os error 28" in str(error):
        return f"The disk is full. Free some space, then run `{redo}`; all finished work is kept."
    return None

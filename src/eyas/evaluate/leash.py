"""Runs a command in a session of its own until it ends, or until standard input closes; then nothing of that session is left.

    python leash.py COMMAND ...          exits as the command did

Whoever wants the command holds the other end of standard input. However that process ends, kill -9 too, the system closes it, so a server that holds
eight GPUs cannot outlive it. Standard library alone, started by its path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 15.0  # between the request to end and the end
GONE_SECONDS = 5.0  # for the system to take back what was killed


def main() -> int:
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_when_let_go, args=(process.pid,), daemon=True).start()
    code = process.wait()
    # Its workers may live on. The caller starts the next server only when this process has ended, so their memory must be free by then.
    until = time.monotonic() + GONE_SECONDS
    while _signal(process.pid, signal.SIGKILL) and time.monotonic() < until:
        time.sleep(0.05)
    return code if code >= 0 else 128 - code


def _end_when_let_go(group: int) -> None:
    os.read(0, 1)  # not sys.stdin, whose lock would still be held when the interpreter ends
    _signal(group, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> bool:
    """Whether there was anybody left in the group to be sent it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())

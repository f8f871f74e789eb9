"""One of several processes that train together: `python -m eyas.train.rank`, started by train/distributed.py, which writes one line of JSON to its input.

Exits with 0 at the end of training, 130 after a stop that was asked for, else with one word in JSON on standard output: 2 and {"error": sentence} for what a
user can mend, 1 and {"fault": traceback}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from eyas.config import RunConfig
from eyas.errors import sentence
from eyas.features.stream import streams
from eyas.prepare.rows import read_rows
from eyas.progress import Reporter
from eyas.stage import Context
from eyas.target.engine import keep_freed_memory
from eyas.target.spec import read_spec
from eyas.train.distributed import SAID, STOPPED, end_with_parent, join
from eyas.train.run import device_of, train_rank

FAULT = 16_000  # characters of a traceback that are passed on; a pipe takes so many at once


def main() -> None:
    said = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes where errors go
    line = b""
    while not line.endswith(b"\n"):  # not sys.stdin, whose lock would still be held at the end
        if not (byte := os.read(0, 1)):
            return  # nobody wants it any more
        line += byte
    end_with_parent()
    job = json.loads(line)
    config, folder, rank, size = RunConfig.model_validate(job["config"]), Path(job["folder"]), job["rank"], job["size"]
    keep_freed_memory()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    code = 0
    try:
        spec = read_spec(Path(config.target.path))
        streamed = streams(config, spec, read_rows(folder.parent / "prepare"))
        context = Context(config, spec, folder.parent, folder, Reporter(folder.parent, shows=rank == 0 and job["shows"], writes=rank == 0))
        train_rank(context, join(job["rendezvous"], rank, size, device_of(config, rank, streamed)))
    except KeyboardInterrupt:
        code = STOPPED
    except Exception as error:
        word = sentence(error, job["redo"])
        code = SAID if word else 1
        os.write(said, json.dumps({"error": word} if word else {"fault": traceback.format_exc()[-FAULT:]}).encode())
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # others may be gone already, and a farewell would wait for them


if __name__ == "__main__":
    main()

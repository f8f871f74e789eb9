"""One of several processes that train together: `python -m eyas.train.rank`, started by train/distributed.py, which writes one line of JSON to its input.

Exits with 0 at the end of training, 2 with a line {"error": ...} on standard output for what a user can mend, 130 after a stop that was asked for.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from eyas.config import RunConfig
from eyas.errors import UserError
from eyas.features.stream import streams
from eyas.prepare.rows import read_rows
from eyas.progress import Reporter
from eyas.stage import Context
from eyas.target.engine import keep_freed_memory
from eyas.target.spec import read_spec
from eyas.train.distributed import SAID, STOPPED, end_with_parent, join
from eyas.train.run import device_of, train_rank


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):  # not sys.stdin, whose lock would still be held at the end
        line += os.read(0, 1)
    end_with_parent()
    job = json.loads(line)
    config, folder, rank, size = RunConfig.model_validate(job["config"]), Path(job["folder"]), job["rank"], job["size"]
    keep_freed_memory()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    code = 0
    try:
        spec = read_spec(Path(config.target.path))
        streamed = streams(config, spec, read_rows(folder.parent / "prepare"))
        context = Context(config, spec, folder.parent, folder, Reporter(folder.parent, shows=rank == 0 and job["shows"], writes=rank == 0))
        train_rank(context, join(job["rendezvous"], rank, size, device_of(config, rank, streamed)))
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        code = SAID
    except KeyboardInterrupt:
        code = STOPPED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # others may be gone already, and a farewell would wait for them


if __name__ == "__main__":
    main()

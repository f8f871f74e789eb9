"""Tortures the feature store: kills whatever writes or reads it at random instants, damages its files in between, and looks for a wrong row.

    python benchmarks/torture_store.py [--kills 200] [--seed 0]

A small made-up target is extracted and trained on again and again by real processes that are killed with SIGKILL. Between two of them shards and index are
truncated, zeroed, flipped, deleted, two processes are started in one folder, the clock is set back a day; all in a file system of 50 MB, which is full now and
then (if it may be mounted, which root may). It exits with 0 only if

- no row that the reader gives ever differs by a bit from that of an undisturbed run,
- no complete and sound shard is ever written again,
- every process that was not killed ends well or with one sentence,
- each time a run ends, the draft has the weights of the undisturbed run, bit for bit.

Prints what it did and how often; the same seed draws the same faults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # and no thread is left behind when this process forks
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from conftest import conversation, make_tiny_target, write_run

from eyas.cli import guarded
from eyas.config import load
from eyas.errors import UserError
from eyas.features import disk
from eyas.features.index import INDEX, fault_of, read_index
from eyas.features.reader import FeatureReader
from eyas.pipeline import Run

SMALL = 4096  # bytes of a block that a disk loses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disk.FREE_FLOOR, disk.WAIT_SECONDS, disk.POLL_SECONDS = 1 << 20, 0.5, 0.1
    with tempfile.TemporaryDirectory() as folder:
        small = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", folder], capture_output=True, check=False).returncode == 0
        try:
            torture = Torture(Path(folder), options.seed, small)
            while torture.did["killed"] < options.kills:
                torture.round()
            torture.finish()
        finally:
            if small:
                subprocess.run(["umount", "-l", folder], check=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(torture.did.items())))
    print(f"seed {options.seed}: no wrong row, nothing written twice, every draft as undisturbed")


class Torture:
    def __init__(self, folder: Path, seed: int, small: bool) -> None:
        """small: whether the folder is on a disk of its own, which may be filled."""
        self.draw, self.did, self.small = random.Random(seed), Counter[str](), small
        self.ballast = folder / "ballast"
        target = make_tiny_target(folder / "target", num_layers=3, hidden_size=256)
        rows = [conversation(number, 1 + number % 2) for number in range(40)]
        # batch_tokens 1: each row goes through the target alone, so that capturing it again gives the same bits.
        self.path = write_run(
            folder, target, rows, features={"shard_mib": 1, "batch_tokens": 1, "dtype": "float32"}, data={"holdout": 0.1},
            train={"epochs": 1, "checkpoint_every": 2}, run={"folder": str(folder / "run")},
        )  # fmt: skip
        self.log = folder / "stderr"
        self.run_folder = folder / "run"
        start = time.monotonic()
        assert self.to_the_end("run")[0] == 0
        self.seconds = time.monotonic() - start
        reader = FeatureReader(self.features)
        self.truth = {key: reader.row(key) for key in reader.places}
        self.truth = {key: type(row)(key, row.tokens.clone(), row.supervised.clone(), row.aux.clone(), row.last.clone()) for key, row in self.truth.items()}
        self.weights = self.trained()
        shutil.rmtree(self.run_folder)

    @property
    def features(self) -> Path:
        return self.run_folder / "features"

    def trained(self) -> bytes:
        return max((self.run_folder / "train" / "checkpoints").glob("step-*")).joinpath("weights.safetensors").read_bytes()

    def start(self, command: str, clock: float = 0.0) -> int:
        """A process of its own that does what the command line does; its id. clock: seconds added to what it takes for the time."""
        child = os.fork()
        if child:
            return child
        with contextlib.suppress(BaseException):
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            if clock:
                real = time.time
                time.time = lambda: real() + clock  # type: ignore[assignment]
            try:
                guarded(lambda: self.act(command))
            except SystemExit as error:
                sys.stderr.flush()
                os._exit(int(error.code or 0))
            sys.stderr.flush()
            os._exit(0)
        os._exit(99)

    def act(self, command: str) -> None:
        run = Run(load(self.path, []))
        if command == "run":
            run.up_to("train")
        else:
            run.verify(repair=True)

    def to_the_end(self, command: str) -> tuple[int, str]:
        """(exit code, the sentence of an error)."""
        self.log.write_text("")
        return self.ended(self.start(command))

    def ended(self, child: int) -> tuple[int, str]:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors = re.findall("error: .*", self.log.read_text())  # two processes write there: a sentence may stand behind what the other had begun
        return code, errors[-1] if errors else ""

    def round(self) -> None:
        sound = self.sound()
        self.log.write_text("")
        back = self.draw.random() < 0.1
        full = self.small and self.draw.random() < 0.15
        if full:
            free, left = shutil.disk_usage(self.ballast.parent).free, self.draw.randrange(4_000_000)
            self.ballast.write_bytes(bytes(max(0, free - left)))
            self.did["disk nearly full"] += 1
        child = self.start("run", -86400.0 if back else 0.0)
        self.did["clock set back"] += back
        raced = self.draw.random() < 0.1
        if raced:
            self.second(full)
        time.sleep(self.draw.uniform(0.0, 1.1 * self.seconds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        code, sentence = self.ended(child)
        self.ballast.unlink(missing_ok=True)
        self.expect(all(self.inode(file) == inode for file, inode in sound.items()), "a sound shard was written again")
        if code == -signal.SIGKILL:
            self.did["killed"] += 1
        elif code == 0:
            self.ended_well()
        elif raced and code == 2 and "in use" in sentence:
            pass  # the second process was the first to come
        elif full and code == 2 and self.tells_of_the_disk(sentence):
            self.did["stopped by the full disk"] += 1
        else:
            self.expect(code == 2 and "--repair" in sentence, f"exit code {code} with {sentence!r}")
            self.repair()
        self.look()
        if self.draw.random() < 0.5:
            self.damage()
            self.look()

    def second(self, full: bool) -> None:
        """Two processes in one folder: one of them must be refused, whichever comes second."""
        code, sentence = self.ended(self.start("run"))
        self.did["two at once"] += 1
        if code == 0:  # the first had ended, or had not begun
            return
        good = "in use" in sentence or "--repair" in sentence or (full and self.tells_of_the_disk(sentence))
        self.expect(code == 2 and good, f"a second process: exit code {code} with {sentence!r}")

    @staticmethod
    def tells_of_the_disk(sentence: str) -> bool:
        return any(words in sentence for words in ("disk is full", "features need", "next shard needs"))

    def repair(self) -> None:
        code, sentence = self.to_the_end("verify")
        self.expect(code == 0, f"verify --repair: exit code {code} with {sentence!r}")
        self.did["repaired"] += 1

    def ended_well(self) -> None:
        """The whole run is done: it must have ended as the undisturbed one, and the next begins anew."""
        self.expect(self.trained() == self.weights, "the draft is not that of the undisturbed run")
        self.did["runs ended"] += 1
        shutil.rmtree(self.run_folder)

    def finish(self) -> None:
        for _ in range(3):
            code, sentence = self.to_the_end("run")
            if code == 0:
                return self.ended_well()
            self.expect(code == 2 and "--repair" in sentence, f"exit code {code} with {sentence!r}")
            self.repair()
        self.expect(False, "it does not end")

    def sound(self) -> dict[str, int]:
        """Files of complete shards that nothing is wrong with, and their inodes."""
        with contextlib.suppress(UserError):
            return {entry.file: self.inode(entry.file) for entry in read_index(self.features) if fault_of(self.features, entry) is None}
        return {}

    def inode(self, file: str) -> int:
        path = self.features / file
        return path.stat().st_ino if path.exists() else -1

    def look(self) -> None:
        """Every row that the reader gives must be the true one."""
        try:
            reader = FeatureReader(self.features)
        except (UserError, FileNotFoundError):
            return
        for key in reader.places:
            try:
                row = reader.row(key)
            except UserError:
                continue
            true = self.truth.get(key)
            same = true is not None and all(torch.equal(getattr(row, name), getattr(true, name)) for name in ("tokens", "supervised", "aux", "last"))
            self.expect(same, f"a wrong row: {key}")
            self.did["rows read"] += 1

    def damage(self) -> None:
        shards, index = sorted(self.features.glob("shard-*.safetensors")), self.features / INDEX
        faults: dict[str, Callable[[], object]] = {}
        if shards:
            shard = self.draw.choice(shards)
            size = shard.stat().st_size
            at = self.draw.randrange(size)
            faults["truncated shard"] = lambda: os.truncate(shard, at)
            faults["zeroed block"] = lambda: self.write(shard, at // SMALL * SMALL, bytes(min(SMALL, size - at // SMALL * SMALL)))
            faults["flipped bit"] = lambda: self.write(shard, at, bytes([shard.read_bytes()[at] ^ (1 << self.draw.randrange(8))]))
            faults["deleted shard"] = shard.unlink
        if index.exists() and index.stat().st_size:
            cut = self.draw.randrange(index.stat().st_size)
            faults["deleted index"] = index.unlink
            faults["truncated index"] = lambda: os.truncate(index, cut)
            faults["zeroed index"] = lambda: self.write(index, cut, bytes(min(64, index.stat().st_size - cut)))
            faults["flipped bit in the index"] = lambda: self.write(index, cut, bytes([index.read_bytes()[cut] ^ (1 << self.draw.randrange(8))]))
        if faults:
            name = self.draw.choice(sorted(faults))
            faults[name]()
            self.did[name] += 1

    @staticmethod
    def write(path: Path, at: int, data: bytes) -> None:
        with open(path, "rb+") as file:
            file.seek(at)
            file.write(data)

    def expect(self, good: bool, otherwise: str) -> None:
        if not good:
            kept = Path(tempfile.mkdtemp(prefix="torture-"))
            shutil.copytree(self.run_folder, kept / "run", dirs_exist_ok=True)
            shutil.copy(self.log, kept)
            sys.exit(f"{otherwise}. After {dict(self.did)}. What is there was copied to {kept}.")


if __name__ == "__main__":
    main()

"""The command line: one command for the whole job, one for each stage. Errors are one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import typer
from rich.console import Console
from rich.table import Table

from eyas import __version__
from eyas.config import load
from eyas.errors import UserError, sentence

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train EAGLE-3 draft models: prompts in, a draft that makes your model faster out.",
)
RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file; docs/run-file.md lists every key.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Overrides a key of the run file for this call.")]


def main() -> None:
    app()


def guarded(act: Callable[[], None]) -> None:
    """No user's mistake ends in a traceback; a mistake of ours writes it to a file and says where."""
    redo = shlex.join(["eyas", *sys.argv[1:]])
    try:
        act()
    except KeyboardInterrupt:
        sys.stderr.write(f"\nStopped. All finished work is kept; `{redo}` goes on from there.\n")
        sys.exit(130)
    except Exception as error:
        if said := sentence(error, redo):
            sys.stderr.write(f"error: {said}\n")
            sys.exit(2)
        report = Path("eyas-error.txt").resolve()
        report.write_text(f"eyas {__version__}, {redo}\n\n{traceback.format_exc()}")
        sys.stderr.write(f"error: a fault inside Eyas: {error!r}. Finished work is kept. Please report it with {report}.\n")
        sys.exit(1)


def _quiet_libraries() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _run(run_file: Path, overrides: list[str] | None, act: Callable[[Any], None], need_weights: bool = True) -> None:
    def work() -> None:
        config = load(run_file, overrides or [])
        from eyas.pipeline import Run  # torch and transformers take seconds to import; a misspelt key should not
        from eyas.target.engine import keep_freed_memory

        _quiet_libraries()
        keep_freed_memory()
        act(Run(config, need_weights))

    guarded(work)


STAGE_NAMES = ("prepare", "extract", "vocab", "train", "export", "evaluate")


@app.command()
def run(
    run_file: RunFile,
    overrides: Overrides = None,
    until: Annotated[str, typer.Option(metavar="STAGE", help=f"Stop after this stage: {', '.join(STAGE_NAMES)}.")] = "evaluate",
    force: Annotated[bool, typer.Option("--force", help="Begin even if the plan says that the run cannot end well.")] = False,
) -> None:
    """The whole job: every stage that is not yet done for these settings."""

    def act(work: Any) -> None:
        if until not in STAGE_NAMES:
            raise UserError(f"--until {until}: there is no such stage. The stages are {', '.join(STAGE_NAMES)}.")
        if not force and until != "prepare" and work.begins_anew():
            from eyas.foresight.check import check_before_run

            check_before_run(work.config, work.spec, work.reporter.say, "`--force` begins it all the same.")
        work.up_to(until)

    _run(run_file, overrides, act)


def _stage_command(name: str, text: str) -> None:
    @app.command(name, help=text)
    def command(run_file: RunFile, overrides: Overrides = None) -> None:
        _run(run_file, overrides, lambda work: work.only(name))


_stage_command("prepare", "Data files to tokens with supervised spans; the target writes missing answers.")
_stage_command("extract", "Tokens to features: the target's hidden states.")
_stage_command("vocab", "The draft's vocabulary, from the supervised tokens.")
_stage_command("train", "Features to checkpoints of the draft.")
_stage_command("export", "The best checkpoint to a folder that inference engines load.")
_stage_command("evaluate", "The exported draft on held-out prompts: acceptance and speed, against plain decoding.")


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def plan(
    run_file: RunFile,
    overrides: Overrides = None,
    as_json: Json = False,
    gpus: Annotated[str, typer.Option(metavar="NxNAME", help="Plan for these GPUs, such as 8xH100 or 8xH100-PCIe. Default: those of this machine.")] = "",
    price: Annotated[float | None, typer.Option(help="What a GPU costs an hour, in any currency.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine's rates first: loads the target once, takes a minute or two.")] = False,
) -> None:
    """What a run will take: tokens, bytes, memory, hours, and what will not fit. From config files and a look at the data; nothing is loaded."""

    def act() -> None:
        config = load(run_file, overrides or [])
        _quiet_libraries()
        from eyas.foresight.check import planned
        from eyas.foresight.show import show_plan

        found = planned(config, gpus, calibrate, Console(stderr=True, soft_wrap=True, highlight=False).print)
        if as_json:
            print(json.dumps(found.as_dict(price), indent=1))
        else:
            show_plan(found, price, Console(soft_wrap=True, highlight=False))
        if any(finding.level == "fail" for finding in found.findings):
            sys.exit(2)

    guarded(act)


@app.command()
def rehearse(run_file: RunFile, overrides: Overrides = None) -> None:
    """The whole run in minutes, on the target cut to a few layers with made-up weights: what can break without the real ones breaks here."""

    def act(work: Any) -> None:
        from eyas.foresight.check import check_before_run
        from eyas.foresight.rehearse import rehearse as act_out

        # Of what is cut there is room: that is rehearsed on a smaller machine, too.
        check_before_run(work.config, work.spec, work.reporter.say, forgiven=("memory", "disk"))
        with work.locked():
            act_out(work.config, work.spec, work.reporter.say)

    _run(run_file, overrides, act, need_weights=False)


@app.command()
def doctor(
    run_file: Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="Look also at what this run needs.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Is this machine fit? Packages, GPUs, engines, memory, disk, limits: each ok, warn or fail with the next step. Changes nothing."""

    def act() -> None:
        from dataclasses import asdict

        config = load(run_file, overrides or []) if run_file else None
        _quiet_libraries()
        from eyas.foresight.doctor import examine
        from eyas.foresight.show import show_findings

        console, found = Console(soft_wrap=True, highlight=False), []
        for finding in examine(config):
            found.append(finding)
            if not as_json:
                show_findings([finding], console)
        if as_json:
            print(json.dumps([asdict(finding) for finding in found], indent=1))
        if any(finding.level == "fail" for finding in found):
            sys.exit(2)

    guarded(act)


@app.command()
def verify(
    run_file: RunFile,
    overrides: Overrides = None,
    repair: Annotated[bool, typer.Option("--repair", help="Capture anew what is damaged or missing, and nothing else.")] = False,
) -> None:
    """Reads all features of a run: is every shard whole, and every row there?"""
    _run(run_file, overrides, lambda work: work.verify(repair))


@app.command()
def inspect(
    run_file: RunFile,
    row: Annotated[str, typer.Argument(metavar="ROW", help="Its number from 0, the beginning of its key, or its conversation's id.")],
    overrides: Overrides = None,
) -> None:
    """One prepared row: where it comes from, its text with what is supervised, the size of its features."""
    _run(run_file, overrides, lambda work: Console(soft_wrap=True, highlight=False).print(work.inspect(row)))


@app.command()
def status(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")],
    as_json: Json = False,
) -> None:
    """How far a run is; safe to ask while it works."""
    guarded(lambda: _print_status(run_folder, as_json))


def _print_status(run_folder: Path, as_json: bool) -> None:
    from eyas.artifact import read_manifest
    from eyas.progress import clock, read_state

    if not run_folder.is_dir():
        raise UserError(f"{run_folder} is no folder. Give a run folder, as run.folder in the run file names it.")
    found: dict[str, Any] = {}
    for name, folder in zip(STAGE_NAMES, ("prepare", "features", "vocab", "train", "export", "evaluate"), strict=True):
        manifest = read_manifest(run_folder / folder)
        state = read_state(run_folder / folder)
        found[name] = {"done": manifest is not None, "seconds": manifest and manifest.seconds, "progress": state}
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table("stage", "state", "progress", box=None)
    for name, entry in found.items():
        state = entry["progress"]
        progress = ""
        if state and not entry["done"]:
            left = "" if state["seconds_left"] is None else f", {clock(state['seconds_left'])} left"
            progress = f"{state['task']}: {state['done']:,.0f} of {state['total']:,.0f} {state['unit']}, {state['per_second']:,.1f}/s{left} "
            f"({state['state']}, {state['updated']})"
        table.add_row(name, f"done in {clock(entry['seconds'])}" if entry["done"] else "-", progress)
    Console().print(table)


@app.command()
def version() -> None:
    """The version of Eyas."""
    print(__version__)


if __name__ == "__main__":
    main()

"""The whole pipeline in minutes: everything as the run file says, but for a target cut to its first layers with made-up weights, a few rows, a few steps.

What can break without the real weights breaks here: tokenizer, template, data, engine, sharding, quantised kernels, capture, training, export, serving.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from eyas.config import RunConfig, SourceSection
from eyas.errors import UserError
from eyas.evaluate.run import evaluation_dtype, prompts_of
from eyas.evaluate.served import serve_once
from eyas.foresight.cut import cut_target
from eyas.pipeline import STAGES, Run
from eyas.prepare.chat import load_chat
from eyas.progress import Reporter, clock
from eyas.stage import Context
from eyas.target.spec import TargetSpec

ROWS = 24  # conversations of each source
ANSWER_TOKENS = 16
EVALUATED = 2  # prompts


def rehearse(config: RunConfig, spec: TargetSpec, say: Callable[[str], None]) -> None:
    """Raises UserError that names the stage in which the run would have failed."""
    folder = Path(config.run.folder) / "rehearsal"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    try:
        depth, log = _act_out(config, spec, folder, say)
    finally:
        shutil.rmtree(folder / "target", ignore_errors=True)  # gigabytes, however it ended
    say(f"rehearse: all of it in {clock(time.monotonic() - began)}; what each stage said is in {log}")
    for title, lines in (("Proved", proved(config, spec)), ("Not provable without the real weights", unproved(config, spec, depth))):
        say(f"{title}:")
        for line in lines:
            say(f"  - {line}")


def _act_out(config: RunConfig, spec: TargetSpec, folder: Path, say: Callable[[str], None]) -> tuple[int, Path]:
    """-> the layers of the cut target, and the log of the stages."""
    began = time.monotonic()
    depth = cut_target(spec, folder / "target", config.run.seed)
    size = sum(path.stat().st_size for path in (folder / "target").iterdir())
    say(f"rehearse: the target cut to {depth} of {spec.num_layers} layers with made-up weights, {size / 1e9:,.2f} GB, {clock(time.monotonic() - began)}")
    run = Run(small(config, folder, depth))
    run.reporter = Reporter(run.folder, shows=False)  # what the stages say of made-up weights would mislead
    for stage in STAGES:
        start, printed = time.monotonic(), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                if stage.name == "evaluate" and config.evaluate.engine == "vllm":
                    _serve(run)
                else:
                    run.up_to(stage.name)
        except UserError as error:
            raise UserError(f"The rehearsal failed in `{stage.name}`, and so would the run: {error}") from None
        run.reporter.note(printed.getvalue())
        say(f"rehearse: {stage.name}: went through, {clock(time.monotonic() - start)}")
    return depth, run.reporter.log


def _serve(run: Run) -> None:
    """A server with the draft; another without it would show nothing of made-up weights."""
    context = Context(run.config, run.spec, run.folder, run.folder / "evaluate", run.reporter)
    chat = load_chat(run.spec, run.config.target.trust_remote_code, run.config.data.chat_template_kwargs)
    rounds = serve_once(context, prompts_of(context, chat), evaluation_dtype(run.config)).rounds
    run.reporter.note(f"evaluate: vLLM drafted in {rounds} rounds")


def small(config: RunConfig, folder: Path, depth: int) -> RunConfig:
    """The run file, with little to do and the cut target."""
    sources: list[str | SourceSection] = []
    for source in config.data.conversations:
        section = SourceSection(path=source) if isinstance(source, str) else source
        sources.append(section.model_copy(update={"cap": min(section.cap or ROWS, ROWS)}))
    if config.data.synthesize:  # made-up weights write nothing that could be a user's turn
        made = folder / "prompts.jsonl"
        made.write_text("".join(json.dumps({"prompt": f"What is {n} and {n}?"}) + "\n" for n in range(ROWS)))
        sources.append(str(made))
    middle = max(1, depth // 2)
    layers = config.features.layers if config.features.layers and max(config.features.layers) <= depth else sorted({max(0, middle - 1), middle, middle + 1})
    answer = min(config.data.max_new_tokens, ANSWER_TOKENS)
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": str(folder / "run")}),
            "target": config.target.model_copy(update={"path": str(folder / "target")}),
            "data": config.data.model_copy(update={"conversations": sources, "synthesize": 0, "max_new_tokens": answer, "holdout": 0.2}),
            "features": config.features.model_copy(update={"layers": layers}),
            "train": config.train.model_copy(update={"epochs": 1, "checkpoint_every": 1000}),
            "evaluate": config.evaluate.model_copy(
                update={"prompts": [], "prompts_per_category": EVALUATED, "max_new_tokens": ANSWER_TOKENS, "concurrency": [1]}
            ),
        }
    )


def proved(config: RunConfig, spec: TargetSpec) -> list[str]:
    engine = config.target.engine
    lines = [
        "the tokenizer, the chat template and the data give rows with supervised spans",
        f"{engine} loads this architecture ({spec.architecture})"
        + (f", sharded over {config.target.tensor_parallel}" if config.target.tensor_parallel > 1 else "")
        + (", with its quantised kernels" if spec.quantization else ""),
        "features come out of it layer by layer, and norm and head on the last of them give its own log-probabilities",
        "the draft trains on them at its true width, vocabulary and unrolled steps",
        "the exported draft gives the trained draft's logits after it is read back",
    ]
    served = "vLLM serves it beside the target" if config.evaluate.engine == "vllm" else "it drafts for the target in this process"
    return [*lines, served]


def unproved(config: RunConfig, spec: TargetSpec, depth: int) -> list[str]:
    lines = (
        [f"the memory of the other {spec.num_layers - depth} layers, and the time to load them: `eyas plan` foretells both"] if depth < spec.num_layers else []
    )
    lines += ["that the weight files are whole and hold this model", "how many of its tokens the draft will foresee"]
    if not list(spec.path.glob("*.safetensors")):
        lines.append("the names of the tensors in the weight files, and what wraps the language model: no weight file is here")
    if config.data.synthesize:
        lines.append("that the target writes user turns of its own")
    if config.evaluate.engine != "vllm":
        lines.append('that vLLM serves the draft: set evaluate.engine = "vllm" to have that rehearsed, too')
    return lines

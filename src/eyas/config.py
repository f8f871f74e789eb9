"""The run file: TOML in, one typed and checked `RunConfig` out.

Every field says its unit and what changing it does; docs/run-file.md is made from these descriptions by `python -m eyas.config`.
Paths in a run file are relative to the folder that the run file lies in.
"""

from __future__ import annotations

import os
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.errors import UserError, nearest


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSection(Section):
    """Where results go."""

    folder: str = Field("", description="The run folder; it holds one subfolder a stage. Empty: `runs/NAME` beside the run file, NAME being the run file's.")
    seed: int = Field(
        0, ge=0, le=2**63 - 1, description="Seeds every random choice: the held-out split, sampled answers, the draft's first weights, the order of rows."
    )


class TargetSection(Section):
    """The model that will be served and made faster. It is never changed."""

    path: str = Field(description="The target's folder: config.json, *.safetensors, a tokenizer and its chat template.")
    engine: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="What runs the target to write answers and features. `transformers` runs in this process, on a CPU or one GPU; `vllm` in a process "
        "of its own, sharded over GPUs and quantised as it would be served.",
    )
    device: str = Field("auto", description="`cpu`, `cuda`, `cuda:1`, ... `auto` takes the first GPU, else the CPU.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision in which the target is run to write answers and features. `auto`: bfloat16 where the hardware multiplies it fast "
        "(a GPU, a CPU with AMX or AVX-512 bfloat16), else float32.",
    )
    trust_remote_code: bool = Field(
        False, description="Allow Python code from the target's folder to run. Needed by some models and tokenizers; it can do anything you can."
    )
    python: str = Field("", description="vllm: the Python of the environment that has vLLM. Empty: the one that runs Eyas.")
    tensor_parallel: int = Field(1, ge=1, description="vllm: GPUs that the target is sharded over.")
    gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0, description="vllm: share of each GPU's memory that it may take.")
    max_batched_tokens: int = Field(8192, ge=1, description="vllm: tokens of one forward. Higher is faster until memory runs out.")
    hang_minutes: float = Field(
        10.0, gt=0.0, description="vllm: minutes without a forward after which it counts as hung; it is then started again. Loading is not a hang."
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="vllm: any other argument of its `LLM` class, by name, for example `{ kv_cache_memory_bytes = 1073741824 }`."
    )


class SourceSection(Section):
    """A source with choices of its own, written as a table in the list: `{ path = "chats.parquet", cap = 10000 }`."""

    path: str = Field("", description="A file, a folder or a pattern, as the bare text would be.")
    hub: str = Field("", description="Instead of `path`: the id of a Hugging Face data set. Needs the `datasets` package; what it has cached is used.")
    config: str = Field("", description="hub: the configuration's name. Empty: its default.")
    split: str = Field("train", description="hub: the split.")
    revision: str = Field("", description="hub: a commit, tag or branch. Empty: the newest.")
    share: float = Field(1.0, gt=0.0, le=1.0, description="Share of the rows that is taken, chosen by their content.")
    cap: int | None = Field(None, ge=1, description="Rows taken at most, the first ones.")
    map: dict[str, str] = Field(
        default_factory=dict,
        description='Keys that rows are to have -> where their value stands, dots leading inwards: `{ prompt = "question.text", completion = "reply" }`.',
    )


class DataSection(Section):
    """The conversations that the draft learns from."""

    conversations: list[str | SourceSection] = Field(
        default_factory=list,
        description="JSONL or JSON files, also with .gz, parquet files (they need the `pyarrow` package), folders of them, patterns such as `chats/*.jsonl`; a "
        "table (see below) says more. A row holds `messages` (OpenAI form), "
        "`conversations` (ShareGPT), `instruction` with `input` and `output` (Alpaca), `prompt` (one user turn) with or without `completion`, `turns` "
        "(several user turns), or `input_ids` with `loss_mask` or `labels`. Up to 1% of the rows may be none of these; they are named and left out. May be "
        "empty if `synthesize` is not 0.",
    )
    synthesize: int = Field(
        0,
        ge=0,
        description="Conversations whose user turn the target writes itself, going on from the empty user turn of its chat template, before it answers "
        "them. Sampled at temperature 1 and top_p 1, the target's own distribution: a sharper one asks the same few questions. Turns that are empty, said "
        "before, hold special tokens or have no end within `max_new_tokens` are dropped and others sampled, at most 3 for each one wanted.",
    )
    regenerate: Literal["missing", "all", "never"] = Field(
        "missing",
        description="Whose answers are used. `missing`: the target answers what has no answer. `all`: the target answers every turn anew, in order; "
        "a draft learns most from its target's own words. `never`: rows must have answers.",
    )
    max_new_tokens: int = Field(
        512, ge=1, description="Tokens; the longest answer that the target is let write. One cut off here is trained on without a false end of turn."
    )
    temperature: float = Field(0.7, ge=0.0, description="Sampling temperature of written answers; 0 is greedy.")
    top_p: float = Field(0.95, gt=0.0, le=1.0, description="Nucleus of written answers: the smallest set of tokens with this share of the probability.")
    generate_batch: int | None = Field(
        None,
        ge=1,
        description="Conversations answered at once. Higher is faster and takes more memory. Default: what suits the engine: 16 with transformers, 1,024 "
        "with vllm.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Switches of the target's chat template, for example `{ enable_thinking = false }`: as the server will be asked. Used for answers, "
        "rows and evaluation. A data row may bring its own under the same name.",
    )
    max_length: int = Field(2048, ge=8, description="Tokens of the longest row. Memory of extraction and training grows with it.")
    too_long: Literal["clip", "drop"] = Field(
        "clip", description="What becomes of a longer row: cut at `max_length`, without a false end of turn, or left out. Both are counted."
    )
    holdout: float = Field(0.03, ge=0.0, lt=1.0, description="Share of the conversations kept out of training, to choose the best checkpoint on.")


class FeaturesSection(Section):
    """The hidden states of the target that the draft learns from."""

    layers: list[int] | None = Field(
        None,
        description="The three layers fed to the draft: k is the residual stream after k decoder layers (0 = embeddings), ascending. "
        "Default: 2, N//2 and N-3 of N layers.",
    )
    dtype: Literal["bfloat16", "float8", "float32"] = Field(
        "bfloat16",
        description="How features are stored. float8 (e4m3, a scale for each token and layer) halves the bytes; float32 doubles them and is meant for tests.",
    )
    keep: str = Field(
        "all",
        pattern=r"^(all|none|[0-9]+(\.[0-9]+)? ?(MB|GB|TB))$",
        description='How much of the features may lie on the disk: `"all"`, `"none"`, or a size such as `"40GB"`. If all of them are more than that, training '
        "has them captured round by round and deletes what it has passed; each epoch then costs the target a pass, too. `none`: a few shards at a time.",
    )
    batch_tokens: int = Field(4096, ge=1, description="Tokens of one forward of the target, padding included. Higher is faster until memory runs out.")
    shard_mib: int | None = Field(
        None, ge=1, description="MiB of one shard file, of which each is proved and entered whole. Default: 128 with transformers, 1024 with vllm."
    )


class VocabSection(Section):
    """The draft's smaller vocabulary."""

    size: int | None = Field(
        None,
        ge=2,
        description="Tokens in the draft's vocabulary. Smaller is faster to draft with; a token outside it can never be accepted. Default: 32,000 or "
        "the target's, if smaller.",
    )


class DraftSection(Section):
    """The draft's shape: one Llama-style decoder layer, as EAGLE-3 defines it, or more."""

    num_hidden_layers: int = Field(
        1, ge=1, description="Decoder layers. More accept longer and draft slower; vLLM serves them, SGLang (one layer only) does not."
    )
    intermediate_size: int | None = Field(None, ge=1, description="Width of the MLP. Default: the target's.")
    num_attention_heads: int | None = Field(None, ge=1, description="Query heads. Default: the target's.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Key and value heads; must divide the query heads. Default: the target's.")
    head_dim: int | None = Field(None, ge=2, description="Width of a head. Default: the target's.")
    qk_norm: bool = Field(False, description="A norm over each query and key head, as in Qwen 3. vLLM serves it, SGLang does not.")
    norm_before_residual: bool = Field(True, description="Take the residual after the norm of the incoming hidden state (true) or before it (false).")
    norm_before_fc: bool = Field(False, description="One norm over the three concatenated aux layers before `fc`.")
    fc_norm: bool = Field(True, description="A norm of its own for each aux layer before `fc` (EAGLE 3.1); layers of very different size then count alike.")
    norm_output: bool = Field(
        True, description="Feed the next draft step the hidden state after the final norm (EAGLE 3.1, true) or before it (EAGLE 3, false)."
    )
    init_head: Literal["target", "random"] = Field("target", description="First weights of the draft's head: the target's own rows, or random ones.")


class TrainSection(Section):
    """How the draft is trained."""

    epochs: int = Field(10, ge=1, description="Passes over the training rows. Time grows in proportion.")
    optimizer: Literal["muon", "adamw"] = Field(
        "muon", description="What moves the layer's matrices. `muon` learns more from the same tokens; AdamW always moves the head and the norms."
    )
    lr: float = Field(1e-3, gt=0.0, description="Peak learning rate of AdamW.")
    muon_lr: float = Field(3e-3, gt=0.0, description="Peak learning rate of Muon, on AdamW's scale.")
    warmup: float = Field(
        0.03,
        ge=0.0,
        le=1.0,
        description="Share of all optimiser steps over which the learning rate rises to its peak; it then falls as a cosine to `final_lr` of it.",
    )
    final_lr: float = Field(0.05, ge=0.0, le=1.0, description="The last learning rate as a share of its peak.")
    weight_decay: float = Field(0.0, ge=0.0, description="Weight decay, on matrices only, of AdamW and Muon alike.")
    beta2: float = Field(0.95, gt=0.0, lt=1.0, description="AdamW's second-moment decay.")
    grad_clip: float = Field(1.0, gt=0.0, description="Gradients are scaled down to this norm if theirs is larger.")
    tokens_per_step: int = Field(
        8192, ge=8, description="Tokens of one optimiser step, whole rows packed without padding. Higher is steadier and slower per pass."
    )
    tokens_per_batch: int = Field(
        8192,
        ge=8,
        description="Tokens held in memory at once; an optimiser step is split into as many batches as this needs. Changes memory, not results (to rounding).",
    )
    unroll_steps: int = Field(
        5, ge=1, description="K, the draft steps unrolled in training (training-time test). Draft at most about as many tokens when serving."
    )
    step_weight: float = Field(0.8, gt=0.0, description="Step k weighs step_weight**k in the loss.")
    loss: Literal["soft", "lk"] = Field(
        "soft",
        description="`soft`: cross-entropy to the target's distribution. `lk`: it gives way to the chance of acceptance itself as the draft comes near "
        "(the hybrid of arXiv 2602.23881).",
    )
    freeze_head: bool = Field(False, description='Leave the head as the target\'s own rows: less to compute and to hold. Needs `draft.init_head = "target"`.')
    processes: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None,
        description="Processes that train together, one a GPU, each on its share of every step; `tokens_per_step` is for all. Default: as many as there "
        "are GPUs. Training may go on with another number.",
    )
    recompute: bool = Field(
        False,
        description="Compute each draft step again in backward, instead of keeping it: a small part of the memory of long rows, about a quarter more time.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = Field(
        "auto",
        description="Precision of matrix products; weights, gradients of weights and optimiser state are float32 always. `auto` as for the target. `float8`: "
        "products forward and of inputs' gradients in e4m3 with a scale for each row, all else bfloat16; faster on a GPU of compute capability 8.9 or later.",
    )
    patience: int = Field(
        10,
        ge=0,
        description="Training ends early if the acceptance on the held-out rows has not grown in so many measurements and has fallen by 2%; 0: never. The best "
        "checkpoint is exported in any case.",
    )
    checkpoint_every: int = Field(
        100, ge=1, description="Optimiser steps between checkpoints, each also measured on the held-out rows. What a crash can lose is at most this."
    )


class EvaluateSection(Section):
    """How the finished draft is measured."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="What runs target and draft here. `transformers`: this process, exactly, one prompt at a time. `vllm`: a server of your own vLLM "
        "(`target.python`), started as you would start it, first with the draft, then without; its figures are those that your server will show.",
    )
    prompts: list[str] = Field(
        default_factory=list,
        description="JSONL files of prompts that training never sees: rows with `turns` or `prompt`, and a `category`. Only the first turn is used. "
        "Empty: the first turns of the held-out conversations.",
    )
    prompts_per_category: int = Field(8, ge=1, description="At most so many prompts of each category, the first of each file.")
    num_draft_tokens: int = Field(3, ge=1, description="Tokens drafted in each round.")
    max_new_tokens: int = Field(128, ge=2, description="Tokens written for each prompt.")
    temperature: float = Field(
        0.0,
        ge=0.0,
        le=2.0,
        description="0: the target answers greedily, and both texts must be the same. Above: it samples; the draft proposes its likeliest token then too, as "
        "vLLM's does by default.",
    )
    concurrency: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [1, 8, 32],
        description="vllm: how many requests are in flight at once; speed is measured at each of these, and always at 1. A draft gains most at 1. "
        "At C, all prompts are asked, repeated until there are 2 C requests.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
        None,
        description="Precision of target and draft here. Default: float32 with `transformers`, `target.dtype` with `vllm`. "
        "In float32 a forward of one token and of several agree to rounding far below what could change a greedy choice. In bfloat16 they agree where each "
        "row of a matrix product rounds alone, as on a CPU with AMX, and may part elsewhere. `auto`: with `transformers` bfloat16 on such a CPU, else "
        "float32; with `vllm` as for the target.",
    )


class ExportSection(Section):
    """The draft as engines load it."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Precision of the exported weights. `auto`: that of the target's own weights.")


class RunConfig(Section):
    run: RunSection = Field(default_factory=RunSection)
    target: TargetSection
    data: DataSection
    features: FeaturesSection = Field(default_factory=FeaturesSection)
    vocab: VocabSection = Field(default_factory=VocabSection)
    draft: DraftSection = Field(default_factory=DraftSection)
    train: TrainSection = Field(default_factory=TrainSection)
    export: ExportSection = Field(default_factory=ExportSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)


SECTIONS: dict[str, type[Section]] = {name: typing.cast(type[Section], field.annotation) for name, field in RunConfig.model_fields.items()}


def load(path: Path, overrides: list[str]) -> RunConfig:
    """Reads and checks a run file; `overrides` are `section.key=value` with a TOML value (a bare word counts as text).

    All paths in the result are absolute. Raises UserError for anything that is not as it must be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give the run file itself, a TOML file.") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Give the path of a run file; examples/quickstart/run.toml is one to start from.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}. Give a run file in TOML.") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    for override in overrides:
        apply_override(table, override)
    _refuse_unknown(table, str(path))
    try:
        config = RunConfig.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{path}: {_first_fault(error)}") from None
    if not config.data.conversations and not config.data.synthesize:
        raise UserError(
            f"{path}: data.conversations names no file and data.synthesize is 0, so there is nothing to learn from. Name JSONL files, or set "
            f"data.synthesize to the number of conversations that the target is to write itself."
        )
    for source in config.data.conversations:
        if not isinstance(source, str) and bool(source.path) == bool(source.hub):
            raise UserError(f"{path}: a table in data.conversations names {'both path and hub' if source.path else 'neither path nor hub'}; give one of them.")
    if config.train.freeze_head and config.draft.init_head != "target":
        raise UserError(
            f'{path}: train.freeze_head leaves the head as it begins, and draft.init_head = "{config.draft.init_head}" begins it with noise. '
            f'Set draft.init_head = "target", or let the head be trained.'
        )
    return _with_absolute_paths(config, path.resolve())


def apply_override(table: dict[str, Any], override: str) -> None:
    """Sets what `section.key=value` says in the sections of a run file. Raises UserError if it says nothing."""
    name, equals, value = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise UserError(f"--set {override}: write it as --set section.key=value, for example --set train.lr=1e-4.")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word: --set target.device=cpu
    inner = table.setdefault(section, {})
    if not isinstance(inner, dict):
        raise UserError(f"{section} must be a section, written as [{section}].")
    inner[key] = parsed


def _refuse_unknown(table: dict[str, Any], where: str) -> None:
    for section, values in table.items():
        if section not in SECTIONS:
            homes = [name for name, model in SECTIONS.items() if section in model.model_fields]
            near = f"[{homes[0]}] {section}" if homes else nearest(section, SECTIONS)
            raise UserError(f"{where}: there is no section [{section}]{_did_you_mean(near)} The sections are {', '.join(SECTIONS)}.")
        if not isinstance(values, dict):
            raise UserError(f"{where}: {section} must be a section, written as [{section}].")
        known = SECTIONS[section].model_fields
        for key in values:
            if key not in known:
                elsewhere = next((f"{name}.{key}" for name, model in SECTIONS.items() if key in model.model_fields), None)
                near = _did_you_mean(elsewhere or nearest(key, known))
                raise UserError(f"{where}: there is no key {section}.{key}{near} [{section}] has {', '.join(known)}.")


def _did_you_mean(word: str | None) -> str:
    return f"; did you mean {word}?" if word else "."


def _first_fault(error: ValidationError) -> str:
    # Of a value that may be text or a table, pydantic lists what is wrong with it as either; of a table only the second means anything.
    fault = next((fault for fault in error.errors() if not (fault["loc"][-1] == "str" and isinstance(fault["input"], dict))), error.errors()[0])
    name = ".".join(str(part) for part in fault["loc"] if part not in ("str", SourceSection.__name__))
    if fault["type"] == "extra_forbidden":
        entry, _, key = name.rpartition(".")
        return f"there is no key {name}{_did_you_mean(nearest(key, SourceSection.model_fields))} {entry} may have {', '.join(SourceSection.model_fields)}."
    if fault["type"] == "missing":
        section, _, key = name.partition(".")
        return f"{name} is missing. Add {key} = ... under [{section}]." if key else f"section [{name}] is missing. Add [{name}]."
    got = repr(fault["input"])
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return f"{name} = {got if len(got) < 80 else got[:77] + '...'} cannot be used: {message}."


def _with_absolute_paths(config: RunConfig, path: Path) -> RunConfig:
    def absolute(name: str) -> str:
        return str((path.parent / Path(name).expanduser()).resolve())

    def located(source: str | SourceSection) -> str | SourceSection:
        if isinstance(source, str):
            return absolute(source)
        return source.model_copy(update={"path": absolute(source.path)}) if source.path else source

    # A path, or the name of a command. Not resolved: what a virtual environment's python links to is another environment's.
    python = config.target.python
    if os.sep in python:
        python = os.path.abspath(path.parent / Path(python).expanduser())
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": absolute(config.run.folder or f"runs/{path.stem}")}),
            "target": config.target.model_copy(update={"path": absolute(config.target.path), "python": python}),
            "data": config.data.model_copy(update={"conversations": [located(source) for source in config.data.conversations]}),
            "evaluate": config.evaluate.model_copy(update={"prompts": [absolute(p) for p in config.evaluate.prompts]}),
        }
    )


def reference() -> str:
    """docs/run-file.md: every key with its type, default and meaning."""
    lines = [
        "# The run file",
        "",
        "One TOML file describes a run. Made from `src/eyas/config.py` by `python -m eyas.config > docs/run-file.md`; do not edit by hand.",
        "Paths are relative to the run file. Any key can be set for one call: `eyas run RUN.toml --set train.lr=5e-4`.",
    ]
    for section, model in SECTIONS.items():
        lines += ["", f"## [{section}]", "", model.__doc__ or "", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += _described(model)
        if section == "data":
            lines += [
                "",
                "### An entry of `data.conversations`",
                "",
                SourceSection.__doc__ or "",
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
            lines += _described(SourceSection)
    return "\n".join(lines)


def _described(model: type[BaseModel]) -> list[str]:
    """A line for each key."""
    lines = []
    for key, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{_toml(field.get_default(call_default_factory=True))}`"
        lines.append(f"| `{key}` | {_type_name(field.annotation)} | {default} | {field.description} |")
    return lines


def _toml(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if value == {}:
        return "{}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin in (types.UnionType, typing.Union, Annotated):
        return "text or table" if SourceSection in arguments else _type_name(arguments[0])
    if origin is dict:
        return "table"
    return {str: "text", int: "integer", float: "number", bool: "`true` or `false`"}[annotation]


if __name__ == "__main__":
    print(reference())

"""Targets for the tests: a tiny Llama made here, and the real SmolLM2-135M-Instruct that `make model` fetches."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import eyas

ROOT = Path(__file__).parents[1]
# The Python of the vLLM that the tests run; benchmarks/engine_versions.py names others.
VLLM_PYTHON = Path(os.environ.get("EYAS_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
VLLM_DTYPE, VLLM_ERROR = torch.float32, 1e-5  # relative
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's kernels on a GPU: else they round float32 to 11 bits before they multiply
# PYTHONPATH for processes that tests start: the same Eyas as here, and what came by that way
SOURCE = os.pathsep.join(filter(None, (str(Path(eyas.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
# What vLLM 0.25.1 said when another process of its GPU ended while it started.
MEMORY_FAULT = (
    "AssertionError: Error in memory profiling. Initial free memory 108.94 GiB, current free memory 109.45 GiB. This happens when other processes sharing "
    "the same container release GPU memory while vLLM is profiling during initialization."
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = "the a cat dog bird sat ran flew on under over mat tree river and then it was red blue green one two three four five".split()  # noqa: SIM905


def make_tiny_target(folder: Path, num_layers: int = 6, hidden_size: int = 32, **changes: Any) -> Path:
    """A random Llama of a few thousand weights with a byte-level tokenizer and a ChatML template, in the form of a downloaded model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>", unk_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    settings = {
        "vocab_size": 320, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": hidden_size // 4, "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_is_heard() -> Iterator[None]:
    """A script's shell starts what is put into the background deaf to Ctrl-C, which some tests press."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request: pytest.FixtureRequest) -> None:
    """Threads that wait for one another over a matrix of 32 x 32 make a busy machine ten times slower, and a free one no faster."""
    share = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, share) if "smollm2" in request.fixturenames else 1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as `make model` leaves it."""
    folder = ROOT / ".models" / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        pytest.fail(f"{folder} is not there; run `make model` first, or `make test`, which does")
    return folder


def conversation(number: int, num_turns: int = 1) -> dict[str, Any]:
    """A made-up conversation; other numbers give other texts."""
    words = [WORDS[(7 * number + 3 * i) % len(WORDS)] for i in range(12)]
    messages = []
    for turn in range(num_turns):
        messages += [{"role": "user", "content": " ".join(words[turn : turn + 3])}, {"role": "assistant", "content": " ".join(words[turn + 3 : turn + 11])}]
    return {"id": f"c{number}", "messages": messages}


def write_run(folder: Path, target: Path, rows: list[dict[str, Any]] | None = None, /, **sections: dict[str, Any]) -> Path:
    """A small run file over `target` and 24 made-up conversations (or `rows`) in `folder`; a section adds to or replaces what stands here."""
    rows = [conversation(n, 1 + n % 2) for n in range(24)] if rows is None else rows
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, dict[str, Any]] = {
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "data": {"conversations": ["data.jsonl"], "max_length": 128, "holdout": 0.2, "max_new_tokens": 12},
        "features": {"dtype": "float32"},
        "vocab": {"size": 200},
        "train": {"epochs": 2, "tokens_per_step": 256, "tokens_per_batch": 256, "unroll_steps": 3, "dtype": "float32", "checkpoint_every": 4},
        "evaluate": {"max_new_tokens": 16, "prompts_per_category": 2},
        "export": {"dtype": "float32"},
    }
    for section, changes in sections.items():
        values.setdefault(section, {}).update(changes)
    path = folder / "run.toml"
    lines = []
    for section, keys in values.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def toml(value: Any) -> str:
    return f"{{ {', '.join(f'{key} = {toml(each)}' for key, each in value.items())} }}" if isinstance(value, dict) else json.dumps(value)


@pytest.fixture
def make_run(tmp_path: Path, tiny_target: Path) -> Callable[..., Path]:
    """make_run(section={key: value}, ...) writes a small run file over the tiny target and 24 made-up conversations, and returns its path."""

    def make(**sections: dict[str, Any]) -> Path:
        return write_run(tmp_path, tiny_target, **sections)

    return make


@pytest.fixture(scope="session")
def prepared_run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A run file whose run folder holds all that training needs. Not to be trained in: copy the folder (training.py)."""
    from eyas.config import load
    from eyas.pipeline import Run

    path = write_run(tmp_path_factory.mktemp("prepared"), tiny_target, train={"epochs": 3, "checkpoint_every": 5, "tokens_per_batch": 128})
    Run(load(path, [])).up_to("vocab")
    return path


def shift_norms(model: torch.nn.Module, generator: torch.Generator, size: float = 0.5) -> None:
    """Norms of ones would let a doubled norm pass: normalising twice is then normalising once."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def assert_same_states(found: list[torch.Tensor], truth: list[torch.Tensor], layers: list[int]) -> None:
    """States of rows, [T, L, D] each, of SmolLM2: at each layer all rows together within VLLM_ERROR, each row alone within ten times that.

    Where SmolLM2's first token becomes a hundred times as large as all others, rounding grows as much: in float32 about one row of ten is then 1.3e-5 to
    2e-5 off, also between two runs of vLLM in which other rows shared the forward.
    """
    for position, k in enumerate(layers):
        pairs = [(one[:, position].double().cpu(), other[:, position].double().cpu()) for one, other in zip(found, truth, strict=True)]
        assert all(one.shape == other.shape for one, other in pairs)
        off, size = ([float(tensor.norm()) for tensor in tensors] for tensors in ([a - b for a, b in pairs], [b for _, b in pairs]))
        for row, (part, whole) in enumerate(zip(off, size, strict=True)):
            assert part < 10 * VLLM_ERROR * whole, f"layer {k} of row {row}, {len(truth[row])} tokens: {part / whole:.1e}"
        together = math.hypot(*off) / math.hypot(*size)
        assert together < VLLM_ERROR, f"layer {k}: {together:.1e}"


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a user's mistake must end in; asserts that it is one, with code 2 and no traceback."""
        assert "Traceback" not in self.out + self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.code == 2 and len(lines) == 1, (self.code, self.out, self.err)
        assert self.err.endswith(lines[0] + "\n"), "nothing may follow the sentence, nor may it span lines"
        return lines[0].removeprefix("error: ")


@pytest.fixture(name="eyas")
def run_eyas(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """eyas("run", path, ...) runs a command in this process, as `eyas run PATH ...` would, and returns its Outcome."""
    from eyas.cli import app

    def call(*arguments: object) -> Outcome:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr("sys.argv", ["eyas", *words])
        monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))  # where a fault of ours would leave its report
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call

"""Is this machine fit for a run? Quick, changes nothing but a file that it deletes again, safe beside work that goes on.

In: a run file, or none. Out: one `Finding` a line, each ok, warn or fail with the next step.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from eyas.config import RunConfig
from eyas.errors import UserError, nearest
from eyas.foresight.finding import Finding
from eyas.foresight.hardware import available_memory, smi
from eyas.target.spec import TargetSpec, read_spec

NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "pydantic")
PROBE_BYTES = 64 << 20  # written to the run's disk to see how fast it is
SLOW_DISK = 0.2e9  # bytes a second; features of a target 4,096 wide come at 1 GB/s and more from a fast GPU
FEW_FILES = 1024
SMALL_SHM = 1 << 30  # of /dev/shm, through which vLLM's processes speak; containers often have 64 MB
# What Eyas calls of vLLM, with the arguments it gives, and for which stage. Printed by the engine's own Python, which may be another than ours.
ENTRY_POINTS: dict[str, tuple[list[str], str]] = {
    "vllm:LLM.generate": (["prompts", "sampling_params", "use_tqdm"], "prepare, extract"),
    "vllm:LLM.enqueue": (["prompts", "sampling_params", "use_tqdm"], "extract"),
    "vllm:LLM.collective_rpc": (["method", "args"], "extract"),
    "vllm:LLMEngine.step": ([], "extract"),
    "vllm:SamplingParams": (["max_tokens", "temperature", "top_p", "stop_token_ids", "detokenize", "prompt_logprobs"], "prepare, extract"),
    "vllm.engine.arg_utils:EngineArgs": (
        [
            "model", "dtype", "seed", "tensor_parallel_size", "gpu_memory_utilization", "max_num_batched_tokens", "max_model_len", "trust_remote_code",
            "disable_log_stats", "worker_extension_cls", "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "speculative_config",
        ],
        "prepare, extract, evaluate",
    ),
    "vllm.entrypoints.openai.api_server:run_server": ([], "evaluate"),
}  # fmt: skip
ASK_ENGINE = """
import importlib, inspect, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    module, _, path = name.partition(":")
    try:
        value = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        found[name] = list(inspect.signature(value).parameters)
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
import torch, vllm
told = {"version": vllm.__version__, "torch": torch.__version__, "found": found}
try:
    told["architectures"] = list(vllm.ModelRegistry.get_supported_archs())
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    told["quantizations"] = list(QUANTIZATION_METHODS)
except Exception:  # not told, so not held against it
    pass
print("EYAS" + json.dumps(told))
"""
ENGINE_SECONDS = 180.0  # to import vLLM, which takes long from a cold disk


def examine(config: RunConfig | None) -> Iterator[Finding]:
    """Findings as they are made. Without a run file: the machine alone, and the folder that one stands in."""
    yield from packages()
    yield from gpus()
    yield processor()
    yield shared_memory(config is not None and config.target.engine == "vllm")
    yield from disk(_existing(Path(config.run.folder)) if config else Path.cwd())
    yield open_files()
    yield clock(Path(config.run.folder) if config else Path.cwd())
    if config is None:
        return
    spec = None
    for finding, found in target(config):
        yield finding
        spec = found or spec
    if config.target.engine == "vllm" or config.evaluate.engine == "vllm":
        yield from vllm(config.target.python or sys.executable, config.target.extra, spec)


def quick(config: RunConfig) -> Iterator[Finding]:
    """What costs no time: looked at before each run."""
    uses_vllm = config.target.engine == "vllm" or config.evaluate.engine == "vllm"
    yield shared_memory(config.target.engine == "vllm")
    yield open_files()
    if uses_vllm and shutil.which(config.target.python or sys.executable) is None:
        text = f"target.python = {config.target.python!r} cannot be started"
        yield Finding("vllm", "fail", text, "Give the python of an environment that has vLLM.")


def packages() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    try:
        lines = importlib.metadata.requires("eyas") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
        yield Finding("eyas", "warn", "run from a folder, not installed: which versions it needs is not known here", "pip install -e . in that folder")
    asked = {(found := Requirement(line)).name: found.specifier for line in lines if "extra ==" not in line}
    for name in sorted({*NEEDED, *asked}):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", "not installed", "Install Eyas again, with its dependencies.")
            continue
        wanted = asked.get(name)
        if wanted and not wanted.contains(version, prereleases=True):
            yield Finding(name, "fail", f"{version}, and Eyas needs {wanted}", f"pip install '{name}{wanted}'")
        else:
            yield Finding(name, "ok", version)


def gpus() -> Iterator[Finding]:
    listed = smi("--query-gpu=index,uuid,name,memory.total,memory.used,driver_version")
    import torch

    if listed is None:
        if torch.version.cuda:
            yield Finding("gpu", "warn", "torch is built for CUDA, and nvidia-smi finds no GPU", "Check the driver, or that the container was given the GPUs.")
        else:
            yield Finding("gpu", "ok", "none; targets run on the CPU, which is enough for small ones")
        return
    if not torch.cuda.is_available():
        yield Finding(
            "torch",
            "fail",
            f"torch {torch.__version__} cannot use the {len(listed)} GPUs here",
            "Install a torch built for CUDA, or for this driver's version.",
        )
    holders: dict[str, list[str]] = {}
    for uuid, pid, used in (row[:3] for row in smi("--query-compute-apps=gpu_uuid,pid,used_memory") or []):
        holders.setdefault(uuid, []).append(f"process {pid} ({_command(pid)}, {used} MiB)")
    for index, uuid, name, total, used, driver in listed:
        free = int(total) - int(used)
        text = f"{name}, {free:,} of {int(total):,} MiB free, driver {driver}"
        if free >= 0.9 * int(total):
            yield Finding(f"gpu {index}", "ok", text)
            continue
        held = "; ".join(holders.get(uuid, [])) or "no process of this machine or container shows itself"
        yield Finding(f"gpu {index}", "warn", f"{text}; held by {held}", "End what is left over of another run, or lower target.gpu_memory_utilization.")


def processor() -> Finding:
    flags = set(re.findall(r"^flags\s*:(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)[:1][0].split()) if Path("/proc/cpuinfo").exists() else set()
    fast = "AMX" if "amx_bf16" in flags else "AVX-512 bfloat16" if "avx512_bf16" in flags else "no fast bfloat16"
    return Finding("cpu", "ok", f"{len(os.sched_getaffinity(0))} cores, {fast}, {available_memory() / 1e9:,.1f} GB of memory available")


def shared_memory(needed: bool) -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "fail" if needed else "warn", "/dev/shm is not there", "vLLM cannot run without it; mount a tmpfs on it.")
    free = shutil.disk_usage(path).free
    if free >= SMALL_SHM:
        return Finding("shared memory", "ok", f"{free / 1e9:,.1f} GB free in /dev/shm")
    step = "Start the container with --shm-size=8g or --ipc=host, or delete what is left over in /dev/shm."
    return Finding("shared memory", "fail" if needed else "warn", f"{free / 1e6:,.0f} MB free in /dev/shm, through which vLLM's processes speak", step)


def disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    if free < 2 * PROBE_BYTES:
        yield Finding("disk", "fail", f"{free / 1e6:,.0f} MB free in {folder}", "Free some space, or set run.folder to another disk.")
        return
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            file.write(os.urandom(1 << 20) * (PROBE_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
            speed = PROBE_BYTES / (time.perf_counter() - start)
    except OSError as error:
        yield Finding("disk", "fail", f"{folder} cannot be written to: {error.strerror}", "Set run.folder to a folder that you may write to.")
        return
    text = f"{free / 1e9:,.1f} GB free in {folder}, written at {speed / 1e9:.2f} GB/s"
    if speed < SLOW_DISK:
        yield Finding("disk", "warn", text, "Extraction waits for such a disk; set run.folder to a local one, or features.dtype to float8.")
    else:
        yield Finding("disk", "ok", text)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FEW_FILES:
        return Finding("open files", "warn", f"a process may open {soft} (at most {hard})", f"ulimit -n {min(hard, 65536)}")
    return Finding("open files", "ok", f"a process may open {soft:,}")


def clock(folder: Path) -> Finding:
    now = time.time()
    ahead = [path for path in (*folder.glob("*"), *folder.glob("*/manifest.json")) if path.stat().st_mtime > now + 60]
    if ahead:
        hours = (ahead[0].stat().st_mtime - now) / 3600
        step = "Nothing of Eyas hangs on it, but certificates and logs do: set the clock."
        return Finding("clock", "warn", f"{ahead[0]} was written {hours:,.1f} h from now", step)
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def vllm(python: str, extra: dict[str, Any] | None = None, spec: TargetSpec | None = None) -> Iterator[Finding]:
    """The engine of the user's own environment: is what Eyas calls there, under the names it uses? Does it know `extra` and the target's architecture?"""
    try:
        done = subprocess.run([python, "-c", ASK_ENGINE, json.dumps(list(ENTRY_POINTS))], capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"did not answer in {ENGINE_SECONDS:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else f"cannot be started: {error.strerror}"
        yield Finding("vllm", "fail", f"{python} {reason}", "Set target.python to the Python of the environment that has vLLM.")
        return
    answer = next((line.removeprefix("EYAS") for line in done.stdout.splitlines() if line.startswith("EYAS")), None)
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield Finding("vllm", "fail", f"{python} cannot import vllm: {last}", "Set target.python to the Python of the environment that has vLLM.")
        return
    told: dict[str, Any] = json.loads(answer)
    yield Finding("vllm", "ok", f"{told['version']} with torch {told['torch']} at {python}")
    for name, (arguments, stages) in ENTRY_POINTS.items():
        parameters = told["found"][name]
        short = name.rpartition(":")[2]
        if isinstance(parameters, str):
            yield Finding(short, "fail", f"needed by {stages}: {parameters}", "Use a version of vLLM that docs/engines.md names, and report this one.")
        elif missing := [argument for argument in arguments if argument not in parameters and "kwargs" not in parameters]:
            text = f"needed by {stages}: takes no {', '.join(missing)}"
            yield Finding(short, "fail", text, "Use a version of vLLM that docs/engines.md names, and report this one.")
        else:
            yield Finding(short, "ok", f"serves {stages}")

    known = told["found"]["vllm.engine.arg_utils:EngineArgs"]
    if isinstance(known, list):
        for name in extra or {}:
            if name not in known:
                near = nearest(name, known)
                yield Finding("target.extra", "fail", f"vLLM has no argument {name}{f'; did you mean {near}?' if near else ''}", "Mend target.extra.")
    if spec is not None and spec.architecture not in told.get("architectures", [spec.architecture]):
        yield Finding("architecture", "fail", f"this vLLM knows no {spec.architecture}", "Use a version that does.")
    method = spec.quantization.get("quant_method") if spec else None
    if method and method not in told.get("quantizations", [method]):
        yield Finding("quantisation", "fail", f"this vLLM knows no quantisation {method!r}", "Use a version that does, or another checkpoint.")


def target(config: RunConfig) -> Iterator[tuple[Finding, TargetSpec | None]]:
    from eyas.prepare.chat import load_chat

    spec = None
    try:
        spec = read_spec(Path(config.target.path), need_weights=False)
        text = f"{spec.text_config['model_type']}, {spec.num_layers} layers, {spec.hidden_size:,} wide, vocabulary {spec.vocab_size:,}"
        yield Finding("target", "ok", text), spec
        load_chat(spec, config.target.trust_remote_code, config.data.chat_template_kwargs)
        yield Finding("chat template", "ok", "found"), None
    except UserError as error:
        yield Finding("chat template" if spec else "target", "fail", str(error)), None


def _command(pid: str) -> str:
    name = _text(Path("/proc") / pid / "comm").strip()
    return name or "of another container"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())

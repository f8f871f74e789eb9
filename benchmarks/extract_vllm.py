"""How fast features come out of vLLM, beside the same engine only reading the same rows.

    python benchmarks/extract_vllm.py --python VLLM_PYTHON --shape llama-8b [--rows 300] [--length 2048] [--store /dev/shm] [--repeat 2]

Shapes have no weight files: vLLM fills in made-up weights. Plain: vLLM as it comes (compiled, chunked prefill), asked to read the rows and write one token.
Eyas: the engine of `eyas extract`, eager with taps, until the last shard is synced, hashed, proved (the arithmetic of the proof, with a made-up head)
and entered in the index (and then removed). Both are timed after a first, uncounted pass over an
eighth of the rows. Printed: tokens/s of both, their ratio, GB/s written; on a GPU also the memory that `eyas plan` foretells beside cache and states, and that
by vLLM's own account.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from eyas.config import RunConfig, TargetSection
from eyas.features.capture import finished
from eyas.features.index import enter, open_index
from eyas.features.shard import open_shard
from eyas.foresight.hardware import Hardware
from eyas.foresight.memory import extraction_memory
from eyas.foresight.size import size_of
from eyas.target.embeddings import TargetHead
from eyas.target.spec import TargetSpec, read_spec
from eyas.target.vllm_engine import Row, VllmEngine

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Published facts of DeepSeek-V3 and Kimi-K2; the number of layers is cut to what one GPU holds.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 8192, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "attention_bias": False,
}  # fmt: skip
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group", "dynamic": False, "actorder": None,
                        "observer": "minmax", "observer_kwargs": {}, "block_structure": None},
        }
    },
}  # fmt: skip
KIMI_INT4 = {
    **DEEPSEEK_V3, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827, "vocab_size": 163840, "rope_theta": 50000.0, "quantization_config": INT4,
}  # fmt: skip
TINY = {
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
SHAPES = {"tiny": TINY, "llama-8b": LLAMA_8B, "deepseek-v3": DEEPSEEK_V3, "kimi-int4": KIMI_INT4}
EXTRA: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}

PLAIN = """
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    job = json.load(open(sys.argv[1]))
    llm = LLM(**job["engine"])
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    prompts = [{"prompt_token_ids": row} for row in job["rows"]]
    llm.generate(prompts[: len(prompts) // 8], params, use_tqdm=False)
    seconds = []
    for _ in range(job["repeat"]):
        start = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.monotonic() - start)
    json.dump(seconds, open(sys.argv[2], "w"))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--store", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--shard-mib", type=int, default=1024)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--skip-plain", action="store_true")
    parser.add_argument("--extra", type=json.loads, default={})
    options = parser.parse_args()

    config = {**SHAPES[options.shape], **({"num_hidden_layers": options.layers} if options.layers else {})}
    work = Path(tempfile.mkdtemp(prefix="extract-", dir=options.store))
    (work / "target").mkdir()
    (work / "target" / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, config["vocab_size"] - 1, (options.length,), generator=generator, dtype=torch.int32) for _ in range(options.rows)]
    num_tokens = options.rows * options.length
    try:
        plain = [] if options.skip_plain else run_plain(options, work, rows)
        ours, gigabytes, start_seconds = run_eyas(options, config, work, rows)
        foretold = memory(options, read_spec(work / "target", need_weights=False)) if torch.cuda.is_available() else ""
    finally:
        shutil.rmtree(work)
    print(f"{options.shape}: {config['num_hidden_layers']} layers of width {config['hidden_size']}, {options.rows} rows of {options.length} tokens")
    for name, seconds in (("plain", plain), ("eyas", ours)):
        if seconds:
            print(f"  {name:6} {' '.join(f'{num_tokens / s:10,.0f}' for s in seconds)} tokens/s")
    if plain:
        print(f"  ratio of the best: {min(plain) / min(ours):.3f}")
    print(f"  written: {gigabytes / min(ours):.2f} GB/s, {gigabytes:.1f} GB a pass; the engine started in {start_seconds:.0f} s{foretold}")


def memory(options: argparse.Namespace, spec: TargetSpec) -> str:
    """What plan foretells of a GPU, beside the cache and the states that are taken out, and what vLLM said when it had loaded and tried the model."""
    log, total = Path("eyas-engine.log").read_text(), torch.cuda.get_device_properties(0).total_memory
    loaded, cache = (float(re.findall(words + r" ([\d.]+) GiB", log)[-1]) * 2**30 for words in ("Model loading took", "Available KV cache memory:"))
    config = RunConfig.model_validate(
        {
            "run": {"folder": "."}, "data": {"conversations": ["-"], "max_length": options.length},
            "target": {"path": str(spec.path), "engine": "vllm", "python": options.python, "tensor_parallel": options.tensor_parallel,
                       "max_batched_tokens": options.batched_tokens},
        }
    )  # fmt: skip
    size = size_of(spec)
    assert size is not None
    found = extraction_memory(config, spec, size.bytes, Hardware("", 1, total))
    parts = found["parts"]
    return (
        f"\n  memory of a GPU: weights {parts['weights'] / 1e9:.2f} GB foretold, {loaded / 1e9:.2f} loaded; all but cache and states "
        f"{(found['need'] - parts['states'] - parts['cache']) / 1e9:.1f} GB foretold, {(options.memory * total - cache) / 1e9:.1f} by vLLM's account"
    )


def run_plain(options: argparse.Namespace, work: Path, rows: list[torch.Tensor]) -> list[float]:
    engine = {
        "model": str(work / "target"), "dtype": "bfloat16", "tensor_parallel_size": options.tensor_parallel, "gpu_memory_utilization": options.memory,
        "max_num_batched_tokens": options.batched_tokens, "max_model_len": options.length + 1, "enable_prefix_caching": False, **EXTRA, **options.extra,
    }  # fmt: skip
    (work / "plain.json").write_text(json.dumps({"engine": engine, "rows": [row.tolist() for row in rows], "repeat": options.repeat}))
    (work / "plain.py").write_text(PLAIN)
    with open(Path.cwd() / "plain.log", "w") as log:
        subprocess.run([options.python, work / "plain.py", work / "plain.json", work / "out.json"], check=True, stdout=log, stderr=log)
    seconds: list[float] = json.loads((work / "out.json").read_text())
    return seconds


def run_eyas(options: argparse.Namespace, config: dict[str, Any], work: Path, rows: list[torch.Tensor]) -> tuple[list[float], float, float]:
    """(seconds of each pass, GB of one pass, seconds to start)."""
    num_layers, width = config["num_hidden_layers"], config["hidden_size"]
    spec = TargetSpec(
        path=work / "target", text_config=config, num_layers=num_layers, hidden_size=width, vocab_size=config["vocab_size"], max_length=8192, tied=False,
        stop_ids=(), weight_dtype="bfloat16", architecture="", quantization={}, fingerprint={},
    )  # fmt: skip
    section = TargetSection(
        path=str(work / "target"), engine="vllm", python=options.python, tensor_parallel=options.tensor_parallel, gpu_memory_utilization=options.memory,
        max_batched_tokens=options.batched_tokens, extra={**EXTRA, **options.extra},
    )  # fmt: skip
    engine = VllmEngine(spec, section, torch.bfloat16, options.length, Path.cwd() / "eyas-engine.log")
    table = torch.rand(config["vocab_size"], width)
    head = TargetHead(table, torch.ones(width), 1e-5, table, None)
    layers = [*spec.default_layers, num_layers]
    per_shard = max(1, -(-(options.shard_mib << 20) // (options.length * 8 * width)))

    receive, reading = engine._receive, [0.0]

    def timed(during: str) -> Any:
        reply = receive(during)
        reading[0] += reply["seconds"] if isinstance(reply, dict) and "seconds" in reply else 0.0
        return reply

    engine._receive = timed  # type: ignore[method-assign]

    def one_pass(some: list[torch.Tensor]) -> tuple[float, float]:
        folder = work / "features"
        folder.mkdir()
        open_index(folder, {})
        start = time.monotonic()
        shards = (
            open_shard(folder, number, [Row(str(first + n), row, torch.ones(len(row), dtype=torch.bool)) for n, row in enumerate(some[first:][:per_shard])],
                       3, width, torch.bfloat16)
            for number, first in enumerate(range(0, len(some), per_shard))
        )  # fmt: skip
        size = 0
        for filled, checksum, _ in finished(engine, shards, layers, lambda tokens: None, head):
            assert not filled.lost and not filled.not_finite
            size += enter(folder, filled.shard, checksum).bytes
            filled.shard.path.unlink()  # so that any number of rows fits into memory
        seconds = time.monotonic() - start
        print(f"  (of {seconds:.1f} s the engine read for {reading[0]:.1f} s)")
        reading[0] = 0.0
        shutil.rmtree(folder)
        return seconds, size / 1e9

    start = time.monotonic()
    engine.log_probabilities([5, 6, 7])
    start_seconds = time.monotonic() - start
    one_pass(rows[: max(1, len(rows) // 8)])
    passes = [one_pass(rows) for _ in range(options.repeat)]
    engine.close()
    return [seconds for seconds, _ in passes], passes[0][1], start_seconds


if __name__ == "__main__":
    main()

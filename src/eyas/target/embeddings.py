"""The target's embedding, final norm and head, read from the weight files by name without loading the model.

Legend: V target vocabulary, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from eyas.errors import UserError
from eyas.target.spec import EMBEDDINGS, TargetSpec, decoder_prefix, embedding_name, head_name, read_header


@dataclass(frozen=True)
class Tail:
    """What a model type puts between layer N and its logits, as its modelling code in transformers 5 has it. All normalise, weigh, and multiply by the head."""

    one_plus: bool = False  # the norm's weight is stored less one
    centred: bool = False  # the mean is taken off first: a LayerNorm without bias
    norm: str = "norm.weight"  # the final norm's name beside the embedding's
    eps: str = "rms_norm_eps"  # the key of the norm's epsilon
    times: str = ""  # the key of a number that logits are multiplied by
    over: str = ""  # the key of a number that logits are divided by


TAILS = {
    # a plain RMSNorm
    **dict.fromkeys(
        (
            "afmoe", "apertus", "arcee", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
            "exaone_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "glm_moe_dsa", "gpt_oss", "hunyuan_v1_dense",
            "hunyuan_v1_moe", "kimi_k2", "kimi_linear", "llama", "llama4_text", "longcat_flash", "minimax", "minimax_m2", "ministral", "ministral3",
            "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text",
            "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar_open",
        ),
        Tail(),
    ),
    "mimo_v2_flash": Tail(eps="layernorm_epsilon"),
    # the same under another name, mostly hybrids of attention and linear layers
    **dict.fromkeys(("bamba", "jamba"), Tail(norm="final_layernorm.weight")),
    "falcon_h1": Tail(norm="final_layernorm.weight", times="lm_head_multiplier"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Tail(norm="embedding_norm.weight", eps="norm_eps")),
    "nemotron_h": Tail(norm="norm_f.weight", eps="layer_norm_epsilon"),
    # scaled logits; HyperCLOVA X multiplies by what Granite divides by
    **dict.fromkeys(("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"), Tail(over="logits_scaling")),
    "hyperclovax": Tail(times="logits_scaling"),
    # one plus the weight; gemma3n_text and gemma4_text went back to the weight alone
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax_m3_vl_text"),
        Tail(one_plus=True),
    ),
    "gemma4_text": Tail(),
    # Cohere's LayerNorm
    **dict.fromkeys(("cohere", "cohere2"), Tail(centred=True, eps="layer_norm_eps", times="logit_scale")),
}  # fmt: skip
IMPOSSIBLE = {
    "gemma3n_text": "its layers carry four streams (AltUp), not one",
    "deepseek_v4": "its layers carry several streams (hyper-connections), not one",
    "olmo": "its final norm has no weights",
    "nemotron": "its final norm has a bias",
    "phi": "its final norm and head have biases",
    "phimoe": "its final norm and head have biases",
}
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier", "dim_model_base")


@dataclass(frozen=True)
class TargetHead:
    """embedding [V, D], norm_weight [D], head [V, D], all float32 on the CPU as read; head is the embedding where they are tied.

    `norm_weight` is what the normalised state is multiplied with: one-plus and the scale of the logits already applied.
    """

    embedding: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    head: torch.Tensor
    softcap: float | None  # logits become softcap * tanh(logits / softcap), as in Gemma 2
    centred: bool = False  # the norm takes the mean off first

    def normed(self, last: torch.Tensor) -> torch.Tensor:
        """last [..., D] of layer N -> the head's input [..., D] in float32."""
        last = last.float()
        if self.centred:
            last = last - last.mean(-1, keepdim=True)
        return last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + self.norm_eps) * self.norm_weight

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """last [..., D] of layer N -> the target's logits [..., V] in float32; the product runs in the head's dtype."""
        logits = (self.normed(last).to(self.head.dtype) @ self.head.T).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def restricted(self, ids: torch.Tensor, dtype: torch.dtype, device: torch.device) -> TargetHead:
        """The same for the tokens `ids` int64 [Vd] alone: head [Vd, D] in `dtype` on `device`."""
        return replace(self, head=self.head[ids.to(self.head.device)].to(device, dtype), norm_weight=self.norm_weight.to(device))


def read_head(spec: TargetSpec) -> TargetHead:
    """Raises UserError if a tensor is missing or stored quantised, or if what the model type does with layer N is not known."""
    kind, config = spec.text_config["model_type"], spec.text_config
    if kind in IMPOSSIBLE:
        raise UserError(f"{spec.path}: Eyas cannot rebuild the logits of model type {kind!r}: {IMPOSSIBLE[kind]}. Choose another target.")
    if kind not in TAILS:
        raise UserError(
            f"{spec.path}: model type {kind!r} is new to Eyas, which must know its final norm to train on the right teacher. "
            "Add it to TAILS in src/eyas/target/embeddings.py if its final norm is a plain RMSNorm; the proof of capture will tell."
        )
    tail = TAILS[kind]
    for scale in SCALES:
        if scale not in (tail.times, tail.over) and config.get(scale, 1.0) not in (None, 1.0):
            raise UserError(
                f"{spec.path}: config.json scales the logits ({scale} = {config[scale]}), which model type {kind!r} is not known to do. Please report it."
            )
    files = {name: file for file in sorted(spec.path.glob("*.safetensors")) for name in read_header(file)}
    embedding = embedding_name(files)
    if embedding is None:
        raise UserError(f"{spec.path}: its *.safetensors files hold no tensor {' or '.join(EMBEDDINGS)}, or several. Download the model completely.")
    embedded = _read(spec.path, files, embedding)
    norm_weight = _read(spec.path, files, decoder_prefix(embedding) + tail.norm) + float(tail.one_plus)
    if tail.times:
        norm_weight = norm_weight * _scale(spec, tail.times)
    if tail.over:
        norm_weight = norm_weight / _scale(spec, tail.over)
    softcap = config.get("final_logit_softcapping")
    return TargetHead(
        embedding=embedded,
        norm_weight=norm_weight,
        norm_eps=float(config.get(tail.eps, 1e-6)),
        head=embedded if spec.tied else _read(spec.path, files, f"{head_name(files)}.weight"),
        softcap=None if softcap is None else float(softcap),
        centred=tail.centred,
    )


def _scale(spec: TargetSpec, key: str) -> float:
    """Raises UserError if config.json leaves it out: the default differs by model type."""
    if key not in spec.text_config:
        raise UserError(
            f"{spec.path}: config.json does not state {key}, by which model type {spec.text_config['model_type']!r} scales its logits. Add it there."
        )
    return float(spec.text_config[key])


def _read(folder: Path, files: dict[str, Path], name: str) -> torch.Tensor:
    """The tensor in float32. Raises UserError if it is missing or quantised."""
    stem = name.removesuffix("weight")
    if name not in files and not any(other.startswith(stem) for other in files):
        raise UserError(f"{folder}: no tensor {name} in its *.safetensors files. Download the model completely.")
    if name in files:
        with safe_open(files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):  # not float8, which means nothing without its scales
            return tensor.float()
    stored = str(tensor.dtype).removeprefix("torch.") if name in files else ", ".join(sorted(other for other in files if other.startswith(stem)))
    raise UserError(
        f"{folder}: {name} is stored quantised ({stored}). Eyas needs embedding, final norm and head in floating point. "
        "Quantise the target again with these three left out, or choose a checkpoint that leaves them out."
    )

"""The target's embedding, final norm and head, read from the weight files by name without loading the model.

Legend: V target vocabulary, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from safetensors import safe_open

from eyas.errors import UserError
from eyas.target.spec import TargetSpec, read_header

# What a model type multiplies the normalised state by: the stored weight, or one plus it (Gemma's modelling code).
RMS_WEIGHT = {
    "deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "gpt_oss", "kimi_k2", "llama", "llama4_text", "minimax_m2", "ministral", "mistral",
    "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
}  # fmt: skip
RMS_ONE_PLUS_WEIGHT = {"gemma", "gemma2", "gemma3_text"}


@dataclass(frozen=True)
class TargetHead:
    """embedding [V, D], norm_weight [D], head [V, D], all float32 on the CPU as read; head is the embedding where they are tied.

    `norm_weight` is what the normalised state is multiplied with, one-plus already applied.
    """

    embedding: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    head: torch.Tensor
    softcap: float | None  # logits become softcap * tanh(logits / softcap), as in Gemma 2

    def normed(self, last: torch.Tensor) -> torch.Tensor:
        """last [..., D] of layer N -> the head's input [..., D] in float32."""
        last = last.float()
        return last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + self.norm_eps) * self.norm_weight

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """last [..., D] of layer N -> the target's logits [..., V] in float32; the product runs in the head's dtype."""
        logits = (self.normed(last).to(self.head.dtype) @ self.head.T).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def restricted(self, ids: torch.Tensor, dtype: torch.dtype, device: torch.device) -> TargetHead:
        """The same for the tokens `ids` int64 [Vd] alone: head [Vd, D] in `dtype` on `device`."""
        return replace(self, head=self.head[ids].to(device, dtype), norm_weight=self.norm_weight.to(device))


def read_head(spec: TargetSpec) -> TargetHead:
    """Raises UserError if a tensor is missing or stored quantised, or if the model type's norm or head is not known."""
    kind = spec.text_config["model_type"]
    if kind not in RMS_WEIGHT | RMS_ONE_PLUS_WEIGHT:
        raise UserError(
            f"{spec.path}: model type {kind!r} is new to Eyas, which must know its final norm to train on the right teacher. "
            "Add it to RMS_WEIGHT in src/eyas/target/embeddings.py if its final norm is a plain RMSNorm; the proof of capture will tell."
        )
    for scale in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if spec.text_config.get(scale, 1.0) not in (None, 1.0):
            raise UserError(
                f"{spec.path}: config.json scales the logits ({scale} = {spec.text_config[scale]}), which Eyas does not yet do. Choose another target."
            )
    names = {name: path for path in sorted(spec.path.glob("*.safetensors")) for name in read_header(path)}

    def read(*endings: str) -> torch.Tensor:
        found = [
            name for name in names if any(name == ending or name.endswith("." + ending) for ending in endings) and "visual" not in name and "vision" not in name
        ]
        if not found:
            raise UserError(f"{spec.path}: no tensor named {' or '.join(endings)} in its *.safetensors files. Download the model completely.")
        name = min(found, key=len)
        with safe_open(names[name], "pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise UserError(f"{spec.path}: {name} is stored as {tensor.dtype}, quantised. Eyas needs the embedding, final norm and head in floating point.")
        return tensor.float()

    embedding = read("embed_tokens.weight", "word_embeddings.weight")
    norm = read("model.norm.weight", "language_model.norm.weight", "norm.weight")
    softcap = spec.text_config.get("final_logit_softcapping")
    return TargetHead(
        embedding=embedding,
        norm_weight=norm + 1.0 if kind in RMS_ONE_PLUS_WEIGHT else norm,
        norm_eps=float(spec.text_config.get("rms_norm_eps", 1e-6)),
        head=embedding if spec.tied else read("lm_head.weight"),
        softcap=None if softcap is None else float(softcap),
    )

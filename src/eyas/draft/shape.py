"""The draft's sizes and switches, from the run file and the target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eyas.config import DraftSection
from eyas.errors import UserError
from eyas.target.spec import TargetSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class DraftShape:
    """All that is needed to build the draft; `aux_layers` and `target_layers` travel with it because the weights mean nothing without them."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    aux_layers: list[int]
    target_layers: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def draft_shape(section: DraftSection, spec: TargetSpec, draft_vocab_size: int, aux_layers: list[int]) -> DraftShape:
    """Raises UserError if the sizes do not fit together."""
    text = spec.text_config
    heads = section.num_attention_heads or text.get("num_attention_heads") or max(1, spec.hidden_size // 128)
    # A target with latent attention (MLA) has no key-value heads or head width that a Llama layer could take over.
    latent = "kv_lora_rank" in text
    key_value_heads = section.num_key_value_heads or (heads if latent else text.get("num_key_value_heads") or heads)
    if not section.num_attention_heads and spec.hidden_size % heads:  # GLM-4.5 has 96 heads over a width of 5,120
        heads = next((n for n in range(heads, 0, -1) if spec.hidden_size % n == 0 and n % key_value_heads == 0), heads)
    head_dim = section.head_dim or (None if latent else text.get("head_dim")) or max(2, spec.hidden_size // heads)
    intermediate = section.intermediate_size or text.get("intermediate_size") or 4 * spec.hidden_size
    if heads % key_value_heads:
        raise UserError(f"draft.num_key_value_heads = {key_value_heads} does not divide draft.num_attention_heads = {heads}. Choose numbers that do.")
    if spec.hidden_size % heads:
        raise UserError(
            f"draft.num_attention_heads = {heads} does not divide the target's width of {spec.hidden_size:,}, and engines refuse such a draft. Choose one "
            f"that does; draft.head_dim may be anything even."
        )
    if head_dim % 2:
        raise UserError(f"draft.head_dim = {head_dim} is odd, and rope turns pairs. Set an even one.")
    return DraftShape(
        num_hidden_layers=section.num_hidden_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocab_size=spec.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_parameters=_rope_parameters(spec),
        max_position_embeddings=text.get("max_position_embeddings", 131_072),
        qk_norm=section.qk_norm,
        norm_before_residual=section.norm_before_residual,
        norm_before_fc=section.norm_before_fc,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
        aux_layers=aux_layers,
        target_layers=spec.num_layers,
    )


def _rope_parameters(spec: TargetSpec) -> dict[str, Any]:
    """The target's rope in the form of transformers 5, whichever form its config has. Raises UserError for a kind the draft cannot take over."""
    text = spec.text_config
    found = text.get("rope_parameters")
    if isinstance(found, dict) and found and all(isinstance(value, dict) for value in found.values()):
        found = found.get("full_attention") or next(iter(found.values()))  # one entry a layer type, as Gemma 3 has
    if not isinstance(found, dict):
        found = {"rope_theta": text.get("rope_theta", 10_000.0), **(text.get("rope_scaling") or {})}
    rope = {key: value for key, value in found.items() if key not in ("type", "partial_rotary_factor", "mrope_section", "mrope_interleaved")}
    rope["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    if rope["rope_type"] == "mrope":  # text positions of a multimodal model are plain positions
        rope["rope_type"] = "default"
    rope.setdefault("rope_theta", text.get("rope_theta", 10_000.0))
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(
            f"{spec.path}: its rope type {rope['rope_type']!r} is not one that the draft can take over ({', '.join(ROPE_TYPES)}). Choose another target."
        )
    return rope

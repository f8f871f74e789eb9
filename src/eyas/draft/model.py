"""The EAGLE-3 draft: `fc` fuses the aux layers, one decoder layer reads [embedding, hidden], a head over the draft vocabulary.

Parameters bear the names under which engines load them. Weights are float32 in training; every product runs in the dtype of what is fed in.
Norm placement follows vLLM's Eagle3LlamaForCausalLM (model_executor/models/llama_eagle3.py).

Legend: R rows, T positions, A aux layers (3), D hidden width, H query heads, G key-value heads, d head width, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from eyas.draft.attention import cached_attention
from eyas.draft.fused import fused
from eyas.draft.product import GatedMLP, Linear
from eyas.draft.rope import Rope, rotate
from eyas.draft.shape import DraftShape


class RMSNorm(nn.Module):
    """Normalises in float32, returns the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


@fused
def both_normed(
    embedding_RD: torch.Tensor, hidden_RD: torch.Tensor, embedding_weight: torch.Tensor, hidden_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> both normalised side by side [R, 2D], and the hidden state normalised [R, D]."""
    normed_RD = _rms_norm(hidden_RD, hidden_weight, eps)
    return torch.cat((_rms_norm(embedding_RD, embedding_weight, eps), normed_RD), dim=-1), normed_RD


@fused
def added_normed(stream_RD: torch.Tensor, update_RD: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the sum, and the sum normalised."""
    stream_RD = stream_RD + update_RD
    return stream_RD, _rms_norm(stream_RD, weight, eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


rms_norm = fused(_rms_norm)


class Attention(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Linear(2 * shape.hidden_size, shape.num_attention_heads * shape.head_dim)
        self.k_proj = Linear(2 * shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.v_proj = Linear(2 * shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size)


class DecoderLayer(nn.Module):
    """In parts, because training needs keys and values of all positions but queries, MLP and head of supervised rows only."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size)

    def read(self, embedding_RD: torch.Tensor, hidden_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> what q, k and v read [R, 2D], and the residual [R, D]."""
        x_RE, normed_RD = both_normed(embedding_RD, hidden_RD, self.input_layernorm.weight, self.hidden_norm.weight, self.hidden_norm.eps)
        return x_RE, normed_RD if self.norm_before_residual else hidden_RD

    def queries(self, x_RE: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return rotate(self.self_attn.q_proj(x_RE).unflatten(-1, (-1, self.self_attn.head_dim)), cos_sin)

    def keys_values(self, x_RE: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys_RGd = rotate(self.self_attn.k_proj(x_RE).unflatten(-1, (-1, self.self_attn.head_dim)), cos_sin)
        return keys_RGd, self.self_attn.v_proj(x_RE).unflatten(-1, (-1, self.self_attn.head_dim))

    def finish(self, attended_RHd: torch.Tensor, residual_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> two parts whose sum is the residual stream after the layer [R, D]."""
        norm = self.post_attention_layernorm
        stream_RD, normed_RD = added_normed(residual_RD, self.self_attn.o_proj(attended_RHd.flatten(1)), norm.weight, norm.eps)
        return stream_RD, self.mlp(normed_RD)


class Draft(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_norm = RMSNorm(3 * width, eps) if shape.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(width, eps) for _ in range(3)]) if shape.fc_norm else None
        self.fc = Linear(3 * width, width)
        self.midlayer = DecoderLayer(shape)
        self.norm = RMSNorm(width, eps)
        self.lm_head = Linear(width, shape.draft_vocab_size)
        self.rope = Rope(shape)

    def fuse(self, aux_TAD: torch.Tensor) -> torch.Tensor:
        """The aux layers of each position -> the hidden state that step 0 reads [T, D]."""
        x_TC = aux_TAD.flatten(1)
        if self.input_norm is not None:
            x_TC = self.input_norm(x_TC)
        if self.fc_norm is not None:
            x_TC = torch.cat([norm(part) for norm, part in zip(self.fc_norm, x_TC.chunk(3, dim=-1), strict=True)], dim=-1)
        return self.fc(x_TC)

    def outputs(self, stream_RD: torch.Tensor, update_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of the stream after the layer -> what the head reads [R, D], and the hidden state that the next step reads [R, D]."""
        stream_RD, normed_RD = added_normed(stream_RD, update_RD, self.norm.weight, self.norm.eps)
        return normed_RD, normed_RD if self.shape.norm_output else stream_RD

    def forward(self, embedding_RD: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, cache: DraftCache) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step over R new positions behind those in `cache`, which grows by them, as an engine does it.

        Returns logits [R, Vd] and the hidden state for the next step [R, D].
        """
        cos_sin = self.rope(positions_R)
        x_RE, residual_RD = self.midlayer.read(embedding_RD, hidden_RD)
        keys, values = cache.extend(*self.midlayer.keys_values(x_RE, cos_sin))
        attended_RHd = cached_attention(self.midlayer.queries(x_RE, cos_sin), keys, values)
        normed_RD, next_RD = self.outputs(*self.midlayer.finish(attended_RHd, residual_RD))
        return self.lm_head(normed_RD), next_RD


class DraftCache:
    """Keys and values [T, G, d] of the positions drafted from so far."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else len(self.keys)

    def extend(self, keys_RGd: torch.Tensor, values_RGd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = keys_RGd if self.keys is None else torch.cat((self.keys, keys_RGd))
        self.values = values_RGd if self.values is None else torch.cat((self.values, values_RGd))
        return self.keys, self.values

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` positions."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:length], self.values[:length]

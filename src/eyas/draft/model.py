"""The EAGLE-3 draft: `fc` fuses the aux layers, a decoder layer reads [embedding, hidden], more may follow, a head over the draft vocabulary.

Parameters bear the names under which engines load them. Weights are float32 in training; every product runs in the dtype of what is fed in.
Norm placement follows vLLM's Eagle3LlamaForCausalLM and, with q/k norms, Eagle3Qwen3ForCausalLM (model_executor/models/llama_eagle3.py, qwen3_eagle3.py).

Legend: R rows, T positions, A aux layers (3), D hidden width, H query heads, G key-value heads, d head width, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from eyas.draft.attention import cached_attention
from eyas.draft.fused import fused
from eyas.draft.product import GatedMLP, Linear
from eyas.draft.rope import Rope, rotate, turned
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
    def __init__(self, shape: DraftShape, width_in: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Linear(width_in, shape.num_attention_heads * shape.head_dim)
        self.k_proj = Linear(width_in, shape.num_key_value_heads * shape.head_dim)
        self.v_proj = Linear(width_in, shape.num_key_value_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size)
        if shape.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(shape.head_dim, shape.rms_norm_eps) for _ in range(2))
        self.qk_norm = shape.qk_norm

    def queries(self, x_RE: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._heads(self.q_proj(x_RE), self.q_norm if self.qk_norm else None, cos_sin)

    def keys_values(self, x_RE: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys_RGd = self._heads(self.k_proj(x_RE), self.k_norm if self.qk_norm else None, cos_sin)
        return keys_RGd, self.v_proj(x_RE).unflatten(-1, (-1, self.head_dim))

    def _heads(self, x_RC: torch.Tensor, norm: RMSNorm | None, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x_RHd = x_RC.unflatten(-1, (-1, self.head_dim))
        return rotate(x_RHd, cos_sin) if norm is None else normed_rotated(x_RHd, norm.weight, norm.eps, cos_sin)


@fused
def normed_rotated(x_RHd: torch.Tensor, weight: torch.Tensor, eps: float, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return turned(_rms_norm(x_RHd, weight, eps), cos_sin)


class DecoderLayer(nn.Module):
    """In parts, because training needs keys and values of all positions but queries, MLP and head of supervised rows only."""

    def __init__(self, shape: DraftShape, width_in: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, width_in)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size)

    def finish(self, attended_RHd: torch.Tensor, residual_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> two parts whose sum is the residual stream after the layer [R, D]."""
        norm = self.post_attention_layernorm
        stream_RD, normed_RD = added_normed(residual_RD, self.self_attn.o_proj(attended_RHd.flatten(1)), norm.weight, norm.eps)
        return stream_RD, self.mlp(normed_RD)


class FirstLayer(DecoderLayer):
    """Reads the embedding of a token beside the hidden state."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.norm_before_residual = shape.norm_before_residual
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def read(self, embedding_RD: torch.Tensor, hidden_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> what q, k and v read [R, 2D], and the residual [R, D]."""
        x_RE, normed_RD = both_normed(embedding_RD, hidden_RD, self.input_layernorm.weight, self.hidden_norm.weight, self.hidden_norm.eps)
        return x_RE, normed_RD if self.norm_before_residual else hidden_RD


class LaterLayer(DecoderLayer):
    """Reads what the layer before it left, as any decoder layer does."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape, shape.hidden_size)

    def read(self, stream_RD: torch.Tensor, update_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of the stream -> what q, k and v read [R, D], and the residual [R, D]."""
        stream_RD, normed_RD = added_normed(stream_RD, update_RD, self.input_layernorm.weight, self.input_layernorm.eps)
        return normed_RD, stream_RD


class Draft(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_norm = RMSNorm(3 * width, eps) if shape.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(width, eps) for _ in range(3)]) if shape.fc_norm else None
        self.fc = Linear(3 * width, width)
        self.midlayer = FirstLayer(shape)
        self.layers = nn.ModuleDict({str(number): LaterLayer(shape) for number in range(1, shape.num_hidden_layers)})
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

    @property
    def later_layers(self) -> list[LaterLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, LaterLayer)]

    def forward(self, embedding_RD: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, cache: DraftCache) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step over R new positions behind those in `cache`, which grows by them, as an engine does it.

        Returns logits [R, Vd] and the hidden state for the next step [R, D].
        """
        cos_sin = self.rope(positions_R)

        def attended(number: int, layer: DecoderLayer, x_RE: torch.Tensor) -> torch.Tensor:
            keys, values = cache.extend(number, *layer.self_attn.keys_values(x_RE, cos_sin))
            return cached_attention(layer.self_attn.queries(x_RE, cos_sin), keys, values)

        x_RE, residual_RD = self.midlayer.read(embedding_RD, hidden_RD)
        stream_RD, update_RD = self.midlayer.finish(attended(0, self.midlayer, x_RE), residual_RD)
        for number, layer in enumerate(self.later_layers, start=1):
            x_RD, residual_RD = layer.read(stream_RD, update_RD)
            stream_RD, update_RD = layer.finish(attended(number, layer, x_RD), residual_RD)
        normed_RD, next_RD = self.outputs(stream_RD, update_RD)
        return self.lm_head(normed_RD), next_RD


class DraftCache:
    """Per layer: keys and values [T, G, d] of the positions drafted from so far."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.layers[0][0]) if self.layers else 0

    def extend(self, number: int, keys_RGd: torch.Tensor, values_RGd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if number in self.layers:
            keys_TGd, values_TGd = self.layers[number]
            keys_RGd, values_RGd = torch.cat((keys_TGd, keys_RGd)), torch.cat((values_TGd, values_RGd))
        self.layers[number] = keys_RGd, values_RGd
        return self.layers[number]

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` positions."""
        self.layers = {number: (keys[:length], values[:length]) for number, (keys, values) in self.layers.items()}

"""The EAGLE-3 draft: `fc` fuses the aux layers, a decoder layer reads [embedding, hidden], more may follow, a head over the draft vocabulary.

Parameters bear the names under which engines load them. Weights are float32 in training; every product runs in the dtype of what is fed in.
Norm placement follows vLLM's Eagle3LlamaForCausalLM and, with q/k norms, Eagle3Qwen3ForCausalLM (model_executor/models/llama_eagle3.py, qwen3_eagle3.py).

Legend: R rows, T positions, A aux layers (3), D hidden width, H query heads, G key-value heads, d head width, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from eyas.draft.attention import cached_attention
from eyas.draft.fused import fused
from eyas.draft.norm import RMSNorm, plain_rms_norm
from eyas.draft.product import GatedMLP, Linear, normed_products
from eyas.draft.rope import Rope, rotate, turned
from eyas.draft.shape import DraftShape
from eyas.draft.shared import Selection, Shared, select


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

    def queries(self, q_RC: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What q_proj made -> [R, H, d]."""
        return self._heads(q_RC, self.q_norm if self.qk_norm else None, cos_sin)

    def keys_values(self, k_RC: torch.Tensor, v_RC: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """What k_proj and v_proj made -> [R, G, d] each."""
        return self._heads(k_RC, self.k_norm if self.qk_norm else None, cos_sin), v_RC.unflatten(-1, (-1, self.head_dim))

    def _heads(self, x_RC: torch.Tensor, norm: RMSNorm | None, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x_RHd = x_RC.unflatten(-1, (-1, self.head_dim))
        return rotate(x_RHd, cos_sin) if norm is None else normed_rotated(x_RHd, norm.weight, norm.eps, cos_sin)


@fused
def normed_rotated(x_RHd: torch.Tensor, weight: torch.Tensor, eps: float, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return turned(plain_rms_norm(x_RHd, weight, eps), cos_sin)


class DecoderLayer(nn.Module):
    """In parts, because training needs keys and values of all positions but queries, MLP and head of supervised rows only."""

    def __init__(self, shape: DraftShape, width_in: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, width_in)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size)

    def finish(self, attended_RHd: torch.Tensor, residual_RD: torch.Tensor) -> torch.Tensor:
        """-> the residual stream after the layer [R, D]."""
        return self.mlp(self.self_attn.o_proj(attended_RHd.flatten(1), residual_RD), self.post_attention_layernorm)


@dataclass(frozen=True)
class Read:
    """What a layer takes of its input: the products of q, k and v [R, C], and the residual stream [R, D]. k and v may be of more rows than the rest."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    residual: torch.Tensor


@dataclass(frozen=True)
class Embedded:
    """What q, k and v make of embeddings; `q` may hold fewer rows than the others."""

    q: Shared
    k: Shared
    v: Shared


class FirstLayer(DecoderLayer):
    """Reads the embedding of a token beside the hidden state: q, k and v have a half for each."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.norm_before_residual = shape.norm_before_residual
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def embed(self, embedding_TD: torch.Tensor, queries: Selection | None = None) -> Embedded:
        """The embedding's half. queries: positions that q is wanted of, all if None."""
        attention = self.self_attn
        normed_TD, k_TC, v_TC = normed_products(self.input_layernorm, embedding_TD, (attention.k_proj, attention.v_proj))
        q_NC = attention.q_proj(normed_TD if queries is None else select(normed_TD, queries))
        return Embedded(Shared(q_NC), Shared(k_TC), Shared(v_TC))

    def read(self, hidden_RD: torch.Tensor, embedded: Embedded, queries: Selection | None, keys: Selection | None) -> Read:
        """queries, keys: the rows of `embedded.q`, and of `embedded.k` and `embedded.v`, that go with the hidden states."""
        attention = self.self_attn
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        normed_RD, q_RC, k_RC, v_RC = normed_products(self.hidden_norm, hidden_RD, layers, first=hidden_RD.shape[1])
        residual_RD = normed_RD if self.norm_before_residual else hidden_RD
        return Read(embedded.q.plus(q_RC, queries), embedded.k.plus(k_RC, keys), embedded.v.plus(v_RC, keys), residual_RD)

    def read_all(self, hidden_TD: torch.Tensor, embedded: Embedded, rows: Selection | None, queries: Selection | None) -> Read:
        """Keys and values of all positions; queries and residual of `rows`, of all if None. queries: as in `read`."""
        attention = self.self_attn
        normed_TD, k_TC, v_TC = normed_products(self.hidden_norm, hidden_TD, (attention.k_proj, attention.v_proj), first=hidden_TD.shape[1])
        normed_RD = normed_TD if rows is None else select(normed_TD, rows)
        q_RC = embedded.q.plus(attention.q_proj(normed_RD, first=hidden_TD.shape[1]), queries)
        hidden_RD = hidden_TD if rows is None or self.norm_before_residual else select(hidden_TD, rows)
        return Read(q_RC, embedded.k.plus(k_TC, None), embedded.v.plus(v_TC, None), normed_RD if self.norm_before_residual else hidden_RD)


class LaterLayer(DecoderLayer):
    """Reads what the layer before it left, as any decoder layer does."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape, shape.hidden_size)

    def read(self, stream_RD: torch.Tensor) -> Read:
        attention = self.self_attn
        _, q_RC, k_RC, v_RC = normed_products(self.input_layernorm, stream_RD, (attention.q_proj, attention.k_proj, attention.v_proj))
        return Read(q_RC, k_RC, v_RC, stream_RD)

    def read_all(self, stream_TD: torch.Tensor, rows: Selection | None) -> Read:
        """Keys and values of all positions; queries and residual of `rows`, of all if None."""
        attention = self.self_attn
        normed_TD, k_TC, v_TC = normed_products(self.input_layernorm, stream_TD, (attention.k_proj, attention.v_proj))
        normed_RD, stream_RD = (normed_TD, stream_TD) if rows is None else (select(tensor, rows) for tensor in (normed_TD, stream_TD))
        return Read(attention.q_proj(normed_RD), k_TC, v_TC, stream_RD)


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

    def multiply_in_float8(self) -> None:
        """From now on, where sizes allow it; what is trained stays float32."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.float8 = True

    def fuse(self, aux_TAD: torch.Tensor) -> torch.Tensor:
        """The aux layers of each position -> the hidden state that step 0 reads [T, D]."""
        x_TC = aux_TAD.flatten(1)
        if self.input_norm is not None:
            x_TC = self.input_norm(x_TC)
        if self.fc_norm is not None:
            x_TC = torch.cat([norm(part) for norm, part in zip(self.fc_norm, x_TC.chunk(3, dim=-1), strict=True)], dim=-1)
        return self.fc(x_TC)

    def outputs(self, stream_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream after the last layer -> what the head reads [R, D], and the hidden state that the next step reads [R, D]."""
        normed_RD = self.norm(stream_RD)
        return normed_RD, normed_RD if self.shape.norm_output else stream_RD

    @property
    def later_layers(self) -> list[LaterLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, LaterLayer)]

    def forward(self, embedding_RD: torch.Tensor, hidden_RD: torch.Tensor, positions_R: torch.Tensor, cache: DraftCache) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step over R new positions behind those in `cache`, which grows by them, as an engine does it.

        Returns logits [R, Vd] and the hidden state for the next step [R, D].
        """
        cos_sin = self.rope(positions_R)

        def after(number: int, layer: DecoderLayer, read: Read) -> torch.Tensor:
            keys, values = cache.extend(number, *layer.self_attn.keys_values(read.k, read.v, cos_sin))
            return layer.finish(cached_attention(layer.self_attn.queries(read.q, cos_sin), keys, values), read.residual)

        stream_RD = after(0, self.midlayer, self.midlayer.read(hidden_RD, self.midlayer.embed(embedding_RD), None, None))
        for number, layer in enumerate(self.later_layers, start=1):
            stream_RD = after(number, layer, layer.read(stream_RD))
        normed_RD, next_RD = self.outputs(stream_RD)
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

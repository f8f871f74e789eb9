"""The target run by Hugging Face transformers, in this process, on a CPU or one GPU.

Legend: B rows of a batch, T tokens of a row, L captured layers, D hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from eyas.errors import UserError
from eyas.features.codec import encode, relative_rounding, squares
from eyas.features.shard import OpenShard
from eyas.target import rowwise
from eyas.target.engine import Answer, Filled, Sampling
from eyas.target.spec import TargetSpec
from eyas.target.tap import LayerTap


class TransformersEngine:
    def __init__(self, spec: TargetSpec, device: torch.device, dtype: torch.dtype, trust_remote_code: bool, batch_tokens: int = 4096) -> None:
        self.spec, self.device, self.dtype, self.batch_tokens = spec, device, dtype, batch_tokens
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                spec.path, dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"transformers cannot load {spec.path}: {first}. Mend the folder, or set target.trust_remote_code = true if the model brings code that "
                f"you trust."
            ) from error
        self.model, info = loaded
        # transformers fills what is missing with random numbers and a warning, and no later check could tell.
        if missing := sorted(info["missing_keys"]):
            raise UserError(
                f"{spec.path} lacks {len(missing)} of the tensors that its config.json asks for (the first is {missing[0]}). Download the model completely."
            )
        # Its habits (a repetition penalty, a top_k) would bend the answers away from the distribution that the draft is measured against.
        self.model.generation_config = GenerationConfig()
        self.model.to(device).eval().requires_grad_(False)
        # transformers 5.24 renamed the argument; both names must work, as each user has another release.
        self.cache_argument = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def capture(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        return [states_TLD.cpu() for states_TLD in self.states(rows, layers)]

    @torch.inference_mode()
    def states(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        """[T, L, D] of each row, on the device."""
        # Padding stands behind a row, and attention is causal: no token of the row sees it, so no mask is needed.
        width = max(len(row) for row in rows)
        ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
        for b, row in enumerate(rows):
            ids_BT[b, : len(row)] = torch.as_tensor(row)
        with LayerTap(self.model, self.spec.num_layers, layers) as tap:
            self.model.base_model(input_ids=ids_BT.to(self.device), use_cache=False)
            states_BTLD = tap.take()
        return [states_BTLD[b, : len(row)] for b, row in enumerate(rows)]

    def fill(
        self, shards: Iterable[OpenShard], layers: Sequence[int], advance: Callable[[int], None], written: Callable[[OpenShard], None]
    ) -> Iterator[Filled]:
        total = torch.zeros(len(layers), 2, device=self.device)
        for shard in shards:
            not_finite: list[int] = []
            for batch in batches([len(tokens) for tokens in shard.tokens], self.batch_tokens):
                finite = []
                for row, states in zip(batch, self.states([shard.tokens[row].tolist() for row in batch], layers), strict=True):
                    finite.append(states.isfinite().all())
                    stored, scale = encode(states, shard.dtype)
                    total += squares(states, stored, scale)
                    stored = stored.cpu()
                    parts = {"aux": stored[:, :-1], "last": stored[:, -1]}
                    shard.put(row, parts if scale is None else {**parts, "scale": scale.cpu()})
                not_finite += [row for row, good in zip(batch, torch.stack(finite).tolist(), strict=True) if not good]
                advance(sum(len(shard.tokens[row]) for row in batch))
            written(shard)
            sample = len(shard.keys) // 2
            yield Filled(shard, {}, not_finite, sample, self.log_probabilities(shard.tokens[sample].tolist()), relative_rounding(total.cpu()))

    @torch.inference_mode()
    def log_probabilities(self, row: Sequence[int]) -> torch.Tensor:
        ids_T = torch.as_tensor(row, device=self.device)
        logits_TV = self.model(input_ids=ids_T[None], use_cache=False).logits[0].float()
        return logits_TV[:-1].log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].cpu()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        # generate() continues at the right edge, so padding stands in front, hidden by the mask: by position, never by token value.
        width = max(len(prompt) for prompt in prompts)
        ids_BT = torch.zeros(len(prompts), width, dtype=torch.long)
        mask_BT = torch.zeros(len(prompts), width, dtype=torch.long)
        for b, prompt in enumerate(prompts):
            ids_BT[b, width - len(prompt) :] = torch.as_tensor(prompt)
            mask_BT[b, width - len(prompt) :] = 1
        choice = (
            {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature > 0 else {"do_sample": False}
        )
        stop_ids = [*self.spec.stop_ids, *sampling.extra_stop_ids]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(sampling.seed)
            full_BT = self.model.generate(
                input_ids=ids_BT.to(self.device), attention_mask=mask_BT.to(self.device), max_new_tokens=sampling.max_new_tokens,
                eos_token_id=stop_ids or None, pad_token_id=0, **choice,
            )  # fmt: skip
        return [self._answer(new.tolist(), stop_ids) for new in full_BT[:, width:]]

    def _answer(self, tokens: list[int], stop_ids: Sequence[int]) -> Answer:
        stops = [position for position, token in enumerate(tokens) if token in stop_ids]
        finish: Literal["stop", "length"] = "stop" if stops else "length"
        return Answer(tokens[: stops[0] + 1] if stops else tokens, finish)

    @torch.inference_mode()
    def step(self, ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Feeds `ids` behind what `cache` holds, which grows by them; returns logits [len(ids), V] in float32."""
        ids_1T = torch.as_tensor(ids, device=self.device)[None]
        return self.model(input_ids=ids_1T, use_cache=True, **{self.cache_argument: cache}).logits[0].float()

    def attend_row_by_row(self) -> None:
        """From now on a forward of a few tokens rounds as as many forwards of one. A model whose code has an attention of its own stays as it is."""
        with contextlib.suppress(ValueError, AttributeError, NotImplementedError):
            self.model.set_attn_implementation(rowwise.NAME)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def close(self) -> None:
        del self.model


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows in order, as many a batch as fit into batch_tokens with padding to the longest; a longer one goes alone."""
    batch: list[int] = []
    longest = 0
    for row, length in enumerate(lengths):
        if batch and (len(batch) + 1) * max(longest, length) > batch_tokens:
            yield batch
            batch, longest = [], 0
        batch.append(row)
        longest = max(longest, length)
    if batch:
        yield batch

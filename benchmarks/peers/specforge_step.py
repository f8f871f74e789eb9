"""One optimiser step of SpecForge 0.2.0's EAGLE-3 trainer, timed as its own library runs it. Started by benchmarks/train_step.py --peers FOLDER.

In: a job in JSON on stdin (see train_step.py). Out: a line of JSON for each case. FOLDER holds SpecForge's wheel, unpacked. Its head is trained, its
embedding frozen. Rows stand in batches of `peer_batch`, padded to the longest of the batch, as its own collator does; the gradients of a step's batches add
up. Its weights and moments are bfloat16 here; its own optimizer adds float32 copies, which would take more time and memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from timing import random_tokens, timed
from transformers import LlamaConfig


def main() -> None:
    job = json.load(sys.stdin)
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    device = "cuda" if torch.cuda.is_available() else "cpu"
    longest = max(length for packs in job["cases"] for pack in packs for length, _ in pack)
    llama = LlamaConfig(
        hidden_size=job["hidden"], intermediate_size=job["inner"], num_attention_heads=job["heads"], num_key_value_heads=job["groups"],
        head_dim=job["width"], vocab_size=job["vocab"], num_hidden_layers=1, max_position_embeddings=max(2048, 2 * longest), rms_norm_eps=1e-5,
        pretraining_tp=1, pad_token_id=0,
    )  # fmt: skip
    llama.draft_vocab_size = job["draft_vocab"]
    attention = "flex_attention" if device == "cuda" else "sdpa"
    torch.manual_seed(0)
    draft = LlamaForCausalLMEagle3(llama, attention_backend=attention).to(device).to(torch.bfloat16)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    kept = torch.zeros(job["vocab"], dtype=torch.bool)
    kept[: job["draft_vocab"]] = True
    draft.t2d.copy_(kept)
    draft.d2t.zero_()
    draft.embed_tokens.weight.requires_grad_(False)
    model = OnlineEagle3Model(draft, length=job["steps"], attention_backend=attention)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    head = (torch.randn(job["vocab"], job["hidden"]) * 0.02).to(device, torch.bfloat16)
    size = job["peer_batch"]

    def step(parts: list[dict[str, torch.Tensor]]) -> None:
        for part in parts:
            losses = model(**part, target=None, target_head_weight=head)[0]
            sum(0.8**k * loss for k, loss in enumerate(losses)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for packs in job["cases"]:
        steps = [[batch(pack[start : start + size], job, device) for start in range(0, len(pack), size)] for pack in packs]
        found = timed(lambda index, steps=steps: step(steps[index]), len(steps), job["repeat"])
        print(json.dumps({"peer": f"SpecForge 0.2.0, {size} rows a batch", **found}), flush=True)


def batch(rows: list[Any], job: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    count, longest, hidden = len(rows), max(length for length, _ in rows), job["hidden"]
    present, mask = (torch.zeros(count, longest, dtype=torch.long) for _ in range(2))
    for row, (length, spans) in enumerate(rows):
        present[row, :length] = 1
        for first, last in spans:
            mask[row, first:last] = 1
    columns = {
        "input_ids": random_tokens(count, longest, job["vocab"]), "attention_mask": present, "loss_mask": mask[..., None],
        "hidden_states": torch.randn(count, longest, 3 * hidden, dtype=torch.bfloat16),
        "target_hidden_for_compact": torch.randn(count, longest, hidden, dtype=torch.bfloat16),
    }  # fmt: skip
    return {name: column.to(device) for name, column in columns.items()}


if __name__ == "__main__":
    main()

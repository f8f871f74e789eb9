"""One optimiser step of speculators 0.9.0's EAGLE-3 trainer, timed as its own library runs it. Started by benchmarks/train_step.py --peers FOLDER.

In: a job in JSON on stdin (see train_step.py). Out: a line of JSON for each case. FOLDER holds the wheels of speculators and hs-connectors, unpacked. Its
head and its embedding are frozen. Rows are packed into one sequence of the step's tokens, filled up with padding, as its own loader does.
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
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    llama = LlamaConfig(
        hidden_size=job["hidden"], intermediate_size=job["inner"], num_attention_heads=job["heads"], num_key_value_heads=job["groups"],
        head_dim=job["width"], vocab_size=job["vocab"], num_hidden_layers=1, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
    )  # fmt: skip
    llama._attn_implementation = "simple_flex_attention" if device == "cuda" else "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=job["steps"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=llama, draft_vocab_size=job["draft_vocab"], norm_before_residual=True, norm_before_fc=True, norm_output=True,
        eagle_aux_hidden_state_layer_ids=[2, 16, 29],
        speculators_config=SpeculatorsConfig(algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Eagle3DraftModel(config).to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    kept = torch.zeros(job["vocab"], dtype=torch.bool)
    kept[: job["draft_vocab"]] = True
    model.load_vocab_mappings(kept, torch.zeros(job["draft_vocab"], dtype=torch.long))
    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    # Its fused loss does not compile under torch 2.11; the eager one computes the same.
    loss_config = resolve_loss_config("kl_div", "fused" if job["fused_loss"] else "eager")

    def step(columns: dict[str, torch.Tensor]) -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            _, loss, _ = model(**columns, ttt_steps=job["steps"], ttt_step_loss_decay=0.8, loss_config=loss_config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for packs in job["cases"]:
        batches = [batch(pack, job, device) for pack in packs]
        found = timed(lambda index, batches=batches: step(batches[index]), len(batches), job["repeat"])
        print(json.dumps({"peer": "speculators 0.9.0, its head frozen", **found}), flush=True)


def batch(pack: list[Any], job: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    total = job["tokens"]
    documents, positions, mask = torch.full((total,), -1), torch.ones(total, dtype=torch.long), torch.zeros(total, dtype=torch.bool)
    start = 0
    for number, (length, spans) in enumerate(pack):
        documents[start : start + length] = number
        positions[start : start + length] = torch.arange(1, length + 1)
        for first, last in spans:
            mask[start + first : start + last] = True
        start += length
    states = torch.randn(1, total, 4 * job["hidden"], dtype=torch.bfloat16)
    columns = {
        "hidden_states": states[..., : 3 * job["hidden"]], "verifier_last_hidden_states": states[..., 3 * job["hidden"] :],
        "input_ids": random_tokens(1, total, job["vocab"]), "document_ids": documents[None], "position_ids": positions[None], "loss_mask": mask[None],
    }  # fmt: skip
    return {name: column.to(device) for name, column in columns.items()}


if __name__ == "__main__":
    main()

"""Reads an exported draft back and holds it against what was trained: success is printed only after that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.artifact import read_json
from eyas.draft.model import Draft, DraftCache
from eyas.errors import UserError
from eyas.export.names import shape_from_config
from eyas.vocab.mapping import from_d2t, to_t2d

NOT_WEIGHTS = ("d2t", "t2d")


@dataclass(frozen=True)
class ExportedDraft:
    """ids int64 [Vd]: the target ids of the draft vocabulary."""

    draft: Draft
    ids: torch.Tensor


def load_export(folder: Path) -> ExportedDraft:
    """Loads an exported folder as an engine would: names, shapes and mapping are checked. Raises UserError."""
    try:
        config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
        shape = shape_from_config(config)
        ids = torch.arange(shape.vocab_size)
        if shape.draft_vocab_size < shape.vocab_size:
            ids = from_d2t(tensors["d2t"], shape.vocab_size)
            if len(ids) != shape.draft_vocab_size or not torch.equal(tensors["t2d"], to_t2d(ids, shape.vocab_size)):
                raise ValueError("d2t and t2d do not name the same draft vocabulary")
        draft = Draft(shape)
        draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items() if name not in NOT_WEIGHTS})
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or folder / 'model.safetensors'} does not exist. Run `eyas export` again.") from None
    except (ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} is no sound export: {str(error).splitlines()[0]}. Run `eyas export` again.") from None
    return ExportedDraft(draft.eval(), ids)


@torch.no_grad()
def largest_difference(trained: Draft, exported: Draft, length: int = 16) -> float:
    """max |logits - logits| / max |logits| of the two on the same made-up inputs, two draft steps deep."""
    generator = torch.Generator().manual_seed(0)
    width = trained.shape.hidden_size
    aux, embedding = torch.randn(length, 3, width, generator=generator), torch.randn(length, width, generator=generator)
    positions = torch.arange(length)
    outputs = []
    for draft in (trained, exported):
        cache = DraftCache()
        first, hidden = draft(embedding, draft.fuse(aux), positions, cache)
        second, _ = draft(embedding[:1], hidden[-1:], positions[-1:] + 1, cache)
        outputs.append(torch.cat((first, second)))
    return float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max())

"""How states are stored. bfloat16 and float32 as they are; float8 (e4m3) with a scale for each token and layer.

A scale brings the largest number of a state to the largest that e4m3 holds. One scale for several tokens or layers would lose most of them: some targets
have first tokens a thousand times as large as all others, and layers grow from the first to the last.

Legend: n tokens, L layers, D hidden width.
"""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": FLOAT8}


def encode(states_nLD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> what is stored [n, L, D], and for float8 the scales, float32 [n, L]. The states themselves if they have that dtype."""
    if dtype != FLOAT8:
        return states_nLD.to(dtype), None
    wide_nLD = states_nLD.float()
    scale_nL = wide_nLD.abs().amax(-1).clamp(min=1e-30) / LARGEST
    return (wide_nLD / scale_nL.unsqueeze(-1)).to(FLOAT8), scale_nL


def decode(stored_nLD: torch.Tensor, scale_nL: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """-> states [n, L, D] in `dtype`; any number of sizes in place of n and L."""
    if scale_nL is None:
        return stored_nLD.to(dtype)
    return (stored_nLD.float() * scale_nL.unsqueeze(-1)).to(dtype)


def joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """A copy of the parts, one behind the other. torch does not join float8, but any bytes."""
    dtype = parts[0].dtype
    return torch.cat([part.view(torch.uint8) if dtype.itemsize == 1 else part for part in parts], dim=dim).view(dtype)


def squares(states_nLD: torch.Tensor, stored_nLD: torch.Tensor, scale_nL: torch.Tensor | None) -> torch.Tensor:
    """What storing cost: per layer the sums of the squares of the differences and of the states, float32 [L, 2]."""
    if stored_nLD.dtype == states_nLD.dtype:
        return states_nLD.new_zeros(states_nLD.shape[1], 2, dtype=torch.float32)
    wide_nLD = states_nLD.float()
    off_nLD = decode(stored_nLD, scale_nL, torch.float32) - wide_nLD
    return torch.stack([tensor.pow(2).sum(dim=(0, 2)) for tensor in (off_nLD, wide_nLD)], dim=1)


def relative_rounding(squares_L2: torch.Tensor) -> list[float]:
    """Per layer: how far what is stored is from the states, relative to their size."""
    off_L, whole_L = squares_L2.double().unbind(1)
    return [float(value) for value in (off_L / whole_L.clamp(min=1e-300)).sqrt()]

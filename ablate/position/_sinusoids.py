"""Sines and cosines of positions or distances: what schemes that are made of them share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["interleaved", "half"]


def sinusoids(positions: Tensor, d_model: int, base: float = 10000.0, layout: Layout = "interleaved") -> Tensor:
    """sin(p / base^(2i/d)) and the cosine of the same for every pair i: `(T,)` to `(T, d_model)`, in float64.

    They stand at 2i and 2i+1, or all sines before all cosines. Of an odd width the last pair has its sine alone.
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * base ** (-even / d_model)
    waves = (angles.sin(), angles.cos())
    together = torch.cat(waves, dim=-1) if layout == "half" else torch.stack(waves, dim=-1).flatten(-2)
    return together[:, :d_model]

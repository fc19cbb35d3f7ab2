"""Fixed sines and cosines added to the embedding (Vaswani et al., 2017, arXiv:1706.03762)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from ablate.choice import Real, Shape
from ablate.position import Position, PositionChoice


def sinusoids(positions: Tensor, d_model: int, base: float) -> Tensor:
    """PE(p, 2i) = sin(p / base^(2i/d)), PE(p, 2i+1) = cos of the same: `(T,)` to `(T, d_model)`, in float64."""
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * base ** (-even / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[:, :d_model]


class Sinusoidal(Position):
    """Adds the wave of each position; defined for every position, so nothing bounds the length."""

    def __init__(self, d_model: int, base: float = 10000.0) -> None:
        super().__init__()
        self.d_model, self.base = d_model, base

    def embed(self, x: Tensor, start: int) -> Tensor:
        """`(B, T, D)` plus the waves `(T, D)`."""
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        return x + sinusoids(positions, self.d_model, self.base).to(x.dtype)


class Config(PositionChoice):
    """Settings of the waves."""

    base: Real = Field(10000.0, gt=1, description="the longest wave is 2π times this")

    def build(self, shape: Shape, rotary_dim: int) -> Sinusoidal:
        """The module; it has no parameters."""
        return Sinusoidal(shape.d_model, self.base)

"""Fixed sines and cosines added to the embedding (Vaswani et al., 2017, arXiv:1706.03762)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ablate.choice import Real, Shape
from ablate.position import Position, PositionChoice
from ablate.position._sinusoids import Layout, sinusoids


class Sinusoidal(Position):
    """Adds the wave of each position; defined for every position, so nothing bounds the length."""

    def __init__(self, d_model: int, base: float = 10000.0, layout: Layout = "interleaved") -> None:
        super().__init__()
        self.d_model, self.base, self.layout = d_model, base, layout

    def embed(self, x: Tensor, start: int, ids: Tensor) -> Tensor:
        """`(B, T, D)` plus the waves `(T, D)`."""
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        return x + sinusoids(positions, self.d_model, self.base, self.layout).to(x.dtype)


class Config(PositionChoice):
    """Settings of the waves."""

    embeds: ClassVar[bool] = True
    base: Real = Field(10000.0, gt=1, description="the longest wave is 2π times this")
    layout: Layout = Field("interleaved", description="sine and cosine in turn, or all sines before all cosines")

    def build(self, shape: Shape, rotary_dim: int) -> Sinusoidal:
        """The module; it has no parameters."""
        return Sinusoidal(shape.d_model, self.base, self.layout)

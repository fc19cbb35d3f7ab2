"""Gated feed-forward network with SiLU (Shazeer, 2020, arXiv:2002.05202).

Unless given, d_ff is 8/3 d_model rounded to the nearest multiple of 8, so that three matrices hold as many parameters
as the two of a plain network with 4 d_model.
"""

from __future__ import annotations

from typing import Self

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ablate.choice import Shape, Size
from ablate.feed_forward import FeedForwardChoice
from ablate.linear import PackedLinear


def default_width(d_model: int) -> int:
    """8/3 d_model to the nearest multiple of 8, at least 8."""
    return max(8, 8 * round(d_model / 3))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): `(…, D)` to `(…, D)` over d_ff features."""

    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = PackedLinear(d_model, (d_ff, d_ff), bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Each token by itself."""
        gate, up = self.gate_up.split(x)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Config(FeedForwardChoice):
    """Settings of the gated network."""

    d_ff: Size | None = Field(None, description="width of the hidden layer; 8/3 d_model unless given, a multiple of 8")
    bias: bool = Field(False, description="bias in all three projections")

    def resolve(self, shape: Shape) -> Self:
        """The width as a number."""
        return self.with_defaults(d_ff=default_width(shape.d_model))

    def build(self, shape: Shape) -> SwiGLU:
        """The module."""
        return SwiGLU(shape.d_model, self._width(shape), self.bias)

    def params(self, shape: Shape) -> int:
        """Three matrices and their biases."""
        width = self._width(shape)
        return 3 * shape.d_model * width + (2 * width + shape.d_model if self.bias else 0)

    def flops(self, shape: Shape) -> dict[str, float]:
        """Three products."""
        return {"feed_forward": 6.0 * shape.d_model * self._width(shape)}

    def _width(self, shape: Shape) -> int:
        return self.d_ff or default_width(shape.d_model)

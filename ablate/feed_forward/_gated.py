"""Two projections, one of which gates the other, and one back: what the gated networks share.

Unless given, d_ff is 8/3 d_model rounded to the nearest multiple of 8, so that three matrices hold as many parameters
as the two of a plain network with 4 d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from ablate.choice import Shape, Size
from ablate.feed_forward import FeedForwardChoice
from ablate.linear import PackedLinear


def default_width(d_model: int) -> int:
    """8/3 d_model to the nearest multiple of 8, at least 8."""
    return max(8, 8 * round(d_model / 3))


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) · up(x)): `(…, D)` to `(…, D)` over d_ff features."""

    def __init__(self, d_model: int, d_ff: int, act: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.gate_up = PackedLinear(d_model, (d_ff, d_ff), bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.act = act

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Each token by itself."""
        gate, up = self.gate_up.split(x)
        out: Tensor = self.down(self.act(gate) * up)
        return out

    def value_path(self) -> list[Tensor]:
        """All three projections' weights."""
        return [self.gate_up.weight.detach(), self.down.weight.detach()]


class GatedChoice(FeedForwardChoice):
    """Settings that the members share."""

    grows: ClassVar[tuple[str, ...]] = ("d_ff",)

    d_ff: Size | None = Field(None, description="width of the hidden layer; 8/3 d_model unless given, a multiple of 8")
    bias: bool = Field(False, description="bias in all three projections")

    def resolve(self, shape: Shape) -> Self:
        """The width as a number."""
        return self.with_defaults(d_ff=default_width(shape.d_model))

    def act(self, x: Tensor) -> Tensor:
        """The function on the gate."""
        raise NotImplementedError

    def build(self, shape: Shape) -> GatedFeedForward:
        """The module."""
        return GatedFeedForward(shape.d_model, self._width(shape), self.act, self.bias)

    def params(self, shape: Shape) -> int:
        """Three matrices and their biases."""
        width = self._width(shape)
        return 3 * shape.d_model * width + (2 * width + shape.d_model if self.bias else 0)

    def flops(self, shape: Shape) -> dict[str, float]:
        """Three products."""
        return {"feed_forward": 6.0 * shape.d_model * self._width(shape)}

    def _width(self, shape: Shape) -> int:
        return self.d_ff or default_width(shape.d_model)

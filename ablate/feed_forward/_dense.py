"""Two projections with a function between them: what the plain networks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from ablate.choice import Shape, Size
from ablate.feed_forward import FeedForwardChoice


class DenseFeedForward(nn.Module):
    """down(act(up(x))): `(…, D)` to `(…, D)` over d_ff features."""

    def __init__(self, d_model: int, d_ff: int, act: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.act = act

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Each token by itself."""
        out: Tensor = self.down(self.act(self.up(x)))
        return out

    def value_path(self) -> list[Tensor]:
        """Both projections' weights."""
        return [self.up.weight.detach(), self.down.weight.detach()]


class DenseChoice(FeedForwardChoice):
    """Settings that the members share."""

    grows: ClassVar[tuple[str, ...]] = ("d_ff",)

    d_ff: Size | None = Field(None, description="width of the hidden layer; 4 d_model unless given")
    bias: bool = Field(True, description="bias in both projections")

    def resolve(self, shape: Shape) -> Self:
        """The width as a number."""
        return self.with_defaults(d_ff=4 * shape.d_model)

    def act(self, x: Tensor) -> Tensor:
        """The function between the projections."""
        raise NotImplementedError

    def build(self, shape: Shape) -> DenseFeedForward:
        """The module."""
        return DenseFeedForward(shape.d_model, self._width(shape), self.act, self.bias)

    def params(self, shape: Shape) -> int:
        """Two matrices and their biases."""
        width = self._width(shape)
        return 2 * shape.d_model * width + (shape.d_model + width if self.bias else 0)

    def flops(self, shape: Shape) -> dict[str, float]:
        """Two products."""
        return {"feed_forward": 4.0 * shape.d_model * self._width(shape)}

    def _width(self, shape: Shape) -> int:
        return self.d_ff or 4 * shape.d_model

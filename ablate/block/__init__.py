"""The `block` slot: where normalisation and the residual path sit around the sublayers. One file a choice.

A block's module is pure wiring: `module(x, norms, sublayers)` with `x` `(B, T, D)` and two sequences of functions
`(B, T, D)` to `(B, T, D)`: the layer's norms and its sublayers (attention, perhaps cross attention, feed-forward). The
layer holds both; the block holds the dropout of what a sublayer adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from ablate.choice import Choice, Shape

Function = Callable[[Tensor], Tensor]
"""A norm or a sublayer, as the wiring sees it."""


class Block(nn.Module):
    """The wiring of one layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """Send `x` `(B, T, D)` through the sublayers."""
        raise NotImplementedError


class BlockChoice(Choice):
    """Settings, module and size of one wiring."""

    final_norm: ClassVar[bool] = False
    """Whether the stack ends in a norm of its own: part of what the placement means."""

    def n_norms(self, n_sublayers: int) -> int:
        """Norms that one layer holds."""
        return n_sublayers

    def build(self, shape: Shape) -> Block:
        """The module. It drops `shape.residual_dropout` of what each sublayer adds."""
        raise NotImplementedError(f"block '{self.name}' has no build(shape)")

    def value_gain(self, shape: Shape) -> float:
        """The factor on the initial weights of the value path: values, output and feed-forward projections."""
        return 1.0


Base = BlockChoice

"""No residual: each sublayer replaces what it read and must carry all itself (He et al., 2023, arXiv:2302.10322)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ablate.block import Block, BlockChoice, Function
from ablate.choice import Shape


class NoResidual(Block):
    """f(norm(x)) for each sublayer f."""

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x = self.dropout(sublayer(norm(x)))
        return x


class Config(BlockChoice):
    """No settings. The stack ends in a final norm."""

    final_norm: ClassVar[bool] = True

    def build(self, shape: Shape) -> NoResidual:
        """The module."""
        return NoResidual(shape.residual_dropout)

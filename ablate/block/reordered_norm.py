"""Reordered norm: only what a sublayer says is normalised, then added (OLMo 2, 2025, arXiv:2501.00656)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ablate.block import Block, BlockChoice, Function
from ablate.choice import Shape


class ReorderedNorm(Block):
    """x + norm(f(x)) for each sublayer f."""

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x = x + self.dropout(norm(sublayer(x)))
        return x


class Config(BlockChoice):
    """No settings. The stack ends in a final norm."""

    final_norm: ClassVar[bool] = True

    def build(self, shape: Shape) -> ReorderedNorm:
        """The module."""
        return ReorderedNorm(shape.residual_dropout)

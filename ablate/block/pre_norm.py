"""Pre-LN: each sublayer reads a normalised copy, the residual path is free (Xiong et al., 2020, arXiv:2002.04745)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ablate.block import Block, BlockChoice, Function
from ablate.choice import Shape


class PreNorm(Block):
    """x + f(norm(x)) for each sublayer f."""

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x = x + self.dropout(sublayer(norm(x)))
        return x


class Config(BlockChoice):
    """No settings. The stack ends in a final norm, without which its output grows with depth."""

    final_norm: ClassVar[bool] = True

    def build(self, shape: Shape) -> PreNorm:
        """The module."""
        return PreNorm(shape.residual_dropout)

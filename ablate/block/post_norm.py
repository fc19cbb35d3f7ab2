"""Post-LN: input plus sublayer is normalised, as in the first transformer (Vaswani et al., 2017, arXiv:1706.03762)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ablate.block import Block, BlockChoice, Function
from ablate.choice import Shape


class PostNorm(Block):
    """norm(x + f(x)) for each sublayer f."""

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x = norm(x + self.dropout(sublayer(x)))
        return x


class Config(BlockChoice):
    """No settings. There is no final norm: the last sublayer's norm is the last word."""

    def build(self, shape: Shape) -> PostNorm:
        """The module."""
        return PostNorm(shape.residual_dropout)

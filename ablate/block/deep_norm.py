"""DeepNorm: post-norm with a louder residual path and a softer start (Wang et al., 2022, arXiv:2203.00555).

alpha and beta follow the paper's table by the number of layers, of both stacks in an encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ablate.block import Block, BlockChoice, Function
from ablate.choice import Shape


class DeepNorm(Block):
    """norm(alpha · x + f(x)) for each sublayer f."""

    def __init__(self, alpha: float, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.alpha = alpha

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for norm, sublayer in zip(norms, sublayers, strict=True):
            x = norm(self.alpha * x + self.dropout(sublayer(x)))
        return x


class Config(BlockChoice):
    """No settings. There is no final norm: the last sublayer's norm is the last word."""

    def build(self, shape: Shape) -> DeepNorm:
        """The module."""
        return DeepNorm(_gains(shape)[0], shape.residual_dropout)

    def value_gain(self, shape: Shape) -> float:
        """The paper's beta."""
        return _gains(shape)[1]


def _gains(shape: Shape) -> tuple[float, float]:
    """Alpha and beta of the stack: alone, or the causal or the other one of two."""
    own, other = shape.n_layers, shape.partner_layers
    if not other:
        return (2 * own) ** 0.25, (8 * own) ** -0.25
    if shape.causal:
        return (3 * own) ** 0.25, (12 * own) ** -0.25
    both = (own**4 * other) ** (1 / 16)
    return 0.81 * both, 0.87 / both

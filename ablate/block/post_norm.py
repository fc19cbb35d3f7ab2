"""Post-LN: input plus sublayer is normalised, as in the first transformer (Vaswani et al., 2017, arXiv:1706.03762)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ablate.block import Block, BlockChoice, Sublayer


class PostNorm(Block):
    """norm(x + f(x)) for each sublayer f."""

    def __init__(self, norms: Sequence[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            x = norm(x + self.dropout(sublayer(x)))
        return x


class Config(BlockChoice):
    """No settings. There is no final norm: the last sublayer's norm is the last word."""

    def build(self, norms: Sequence[nn.Module], dropout: float) -> PostNorm:
        """The module."""
        return PostNorm(norms, dropout)

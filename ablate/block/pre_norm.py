"""Pre-LN: each sublayer reads a normalised copy, the residual path is free (Xiong et al., 2020, arXiv:2002.04745)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from ablate.block import Block, BlockChoice, Sublayer


class PreNorm(Block):
    """x + f(norm(x)) for each sublayer f."""

    def __init__(self, norms: Sequence[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            x = x + self.dropout(sublayer(norm(x)))
        return x


class Config(BlockChoice):
    """No settings. The stack ends in a final norm, without which its output grows with depth."""

    final_norm: ClassVar[bool] = True

    def build(self, norms: Sequence[nn.Module], dropout: float) -> PreNorm:
        """The module."""
        return PreNorm(norms, dropout)

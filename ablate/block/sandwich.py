"""Sandwich: a norm before and one behind each sublayer, in the residual branch (Peri-LN, 2025, arXiv:2502.02732).

Also the wiring of Gemma 2 (2024, arXiv:2408.00118) and, under this name, of CogView (2021, arXiv:2105.13290). Peri-LN's
norm behind the embedding is the model's setting `embed_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ablate.block import Block, BlockChoice, Function
from ablate.choice import Shape


class Sandwich(Block):
    """x + after(f(before(x))) for each sublayer f; norms lie as (before, after) of the first, then of the next."""

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        for before, after, sublayer in zip(norms[::2], norms[1::2], sublayers, strict=True):
            x = x + self.dropout(after(sublayer(before(x))))
        return x


class Config(BlockChoice):
    """No settings. The stack ends in a final norm."""

    final_norm: ClassVar[bool] = True

    def n_norms(self, n_sublayers: int) -> int:
        """Two a sublayer."""
        return 2 * n_sublayers

    def build(self, shape: Shape) -> Sandwich:
        """The module."""
        return Sandwich(shape.residual_dropout)

"""The `block` slot: where normalisation and the residual path sit around the sublayers. One file a choice.

A block's module is pure wiring: it holds the norms and gets the sublayers (attention, feed-forward, …) as functions,
`module(x, sublayers)` with `x` `(B, T, D)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from ablate.choice import Choice

Sublayer = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """The wiring of one layer."""

    def forward(self, x: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """Send `x` `(B, T, D)` through the sublayers."""
        raise NotImplementedError


class BlockChoice(Choice):
    """Settings, module and size of one wiring."""

    final_norm: ClassVar[bool] = False
    """Whether the stack ends in a norm of its own: part of what the placement means."""

    def n_norms(self, n_sublayers: int) -> int:
        """Norms that one layer holds."""
        return n_sublayers

    def build(self, norms: Sequence[nn.Module], dropout: float) -> Block:
        """The module around `n_norms` given norms."""
        raise NotImplementedError(f"block '{self.name}' has no build(norms, dropout)")


Base = BlockChoice

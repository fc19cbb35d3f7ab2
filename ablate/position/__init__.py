"""The `position` slot: how a token's place becomes part of the computation. One file a choice.

A scheme's module fills one of three hooks and leaves the others as they are. Attention calls them without asking
which scheme it has. All layers share one module, and with it its parameters; where it rotates, those of the same
rotary width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from ablate.choice import Choice, Problem, Shape


class Position(nn.Module):
    """A scheme without effect: what every scheme starts from."""

    def embed(self, x: Tensor, start: int) -> Tensor:
        """Add to the embeddings `x` `(B, T, D)` of the tokens at start … start+T-1."""
        return x

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Turn queries or keys `(B, H, T, d)` of the tokens at start … start+T-1."""
        return x

    def bias(self, q: Tensor, start: int, n_keys: int) -> Tensor | None:
        """Added to the scores of queries `q` `(B, H, T, d)` against the keys at 0 … n_keys-1: `(H, T, n_keys)`."""
        return None


class PositionChoice(Choice):
    """Settings, module and cost of one position scheme."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """The hooks that attention must call for the scheme to have its effect: "rotate", "bias"."""

    def problems(self, shape: Shape, rotary_dim: int) -> Sequence[Problem]:
        """Why the scheme cannot work in this shape, where `rotary_dim` is the width it may rotate."""
        return []

    def build(self, shape: Shape, rotary_dim: int) -> Position:
        """The module."""
        raise NotImplementedError(f"position '{self.name}' has no build(shape, rotary_dim)")

    def params(self, shape: Shape) -> int:
        """Parameters of the whole model's scheme."""
        return 0


Base = PositionChoice

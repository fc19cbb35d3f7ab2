"""The `position` slot: how a token's place becomes part of the computation. One file a choice.

A scheme's module fills one of three hooks and leaves the others as they are. The model calls `embed`, attention the
other two, without asking which scheme it has. Places are counted from 0: T tokens that follow a cache stand at
`start` … `start`+T-1, and what a hook gives for them is what it gives for them in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from ablate.choice import Choice, Problem, Shape


class Position(nn.Module):
    """A scheme without effect: what every scheme starts from."""

    def embed(self, x: Tensor, start: int, ids: Tensor) -> Tensor:
        """Add to the embeddings `x` `(B, T, D)` of the tokens `ids` `(B, T)`."""
        return x

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Turn queries or keys `(B, H, T, d)`."""
        return x

    def bias(self, q: Tensor, k: Tensor, start: int, first: int, scale: float | None = None) -> Tensor | None:
        """What is added to the scaled scores of queries `q` `(B, H, T, d)` against the keys `k` `(B, Hk, K, d)`.

        The queries stand at `start` …, the keys at `first` …, both as `rotate` left them; head h reads key head
        h // (H // Hk). Scores are scaled by `scale`, 1/√d unless given. The result is `(H, T, K)` or `(B, H, T, K)`.
        What it says of keys that are hidden is not read.
        """
        return None


class PositionChoice(Choice):
    """Settings, module and cost of one position scheme.

    `rotary_dim` is the width of a head, or of that part of it which attention hands to `rotate`; it means nothing to a
    scheme that needs neither "rotate" nor "keys".
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """What attention must offer for the scheme to have its effect: the hooks "rotate" and "bias"; "keys" where the
    biases read them."""

    embeds: ClassVar[bool] = False
    """Whether the scheme adds to the embeddings: then it cannot differ between the layers of a stack."""

    shared: ClassVar[bool] = True
    """Whether all layers of a stack with the same `rotary_dim` have one module, and with it its parameters."""

    def problems(self, shape: Shape, rotary_dim: int) -> Sequence[Problem]:
        """Why the scheme cannot work in this shape; a fault of `rotary_dim` has an empty path."""
        return []

    def build(self, shape: Shape, rotary_dim: int) -> Position:
        """The module."""
        raise NotImplementedError(f"position '{self.name}' has no build(shape, rotary_dim)")

    def params(self, shape: Shape, rotary_dim: int) -> int:
        """Parameters of one module."""
        return 0

    def flops(self, shape: Shape, rotary_dim: int, tokens: int, *, discount: bool = True) -> dict[str, float]:
        """FLOPs a token and layer of one forward pass over one sequence of `tokens` tokens, by term.

        Matrix products only, a multiply-add as two; without the `discount` as they are computed, not as causality
        needs them.
        """
        return {}


Base = PositionChoice

"""No position at all: a causal decoder knows order through its mask alone (Haviv et al., 2022, arXiv:2203.16634)."""

from __future__ import annotations

from ablate.choice import Shape
from ablate.position import Position, PositionChoice


class Config(PositionChoice):
    """No settings."""

    def build(self, shape: Shape, rotary_dim: int) -> Position:
        """A module without effect."""
        return Position()

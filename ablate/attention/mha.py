"""Multi-head attention: a key/value head for every query head (Vaswani et al., 2017, arXiv:1706.03762)."""

from __future__ import annotations

from ablate.attention._grouped import GroupedChoice
from ablate.choice import Shape


class Config(GroupedChoice):
    """Settings of multi-head attention."""

    def kv_heads(self, shape: Shape) -> int:
        """As many as query heads."""
        return shape.n_heads

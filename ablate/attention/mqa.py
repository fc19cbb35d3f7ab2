"""Multi-query attention: one key/value head for all query heads (Shazeer, 2019, arXiv:1911.02150)."""

from __future__ import annotations

from ablate.attention._grouped import GroupedChoice
from ablate.choice import Shape


class Config(GroupedChoice):
    """Settings of multi-query attention."""

    def kv_heads(self, shape: Shape) -> int:
        """One."""
        return 1

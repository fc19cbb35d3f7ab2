"""Grouped-query attention: several query heads share a key/value head (Ainslie et al., 2023, arXiv:2305.13245)."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from ablate.attention._grouped import GroupedChoice
from ablate.choice import SettingsError, Shape, Size


class Config(GroupedChoice):
    """Settings of grouped-query attention."""

    n_kv_heads: Size | None = Field(
        None,
        description="number of key/value heads; unless given the largest divisor of n_heads up to a quarter of it",
    )

    def resolve(self, shape: Shape) -> Self:
        """Number of key/value heads and width of a head as numbers."""
        return super().resolve(shape).with_defaults(n_kv_heads=_quarter(shape.n_heads))

    def problems(self, shape: Shape) -> list[SettingsError]:
        """Groups that do not come out even."""
        kv_heads = self.kv_heads(shape)
        message = f"n_heads {shape.n_heads} is not divisible by n_kv_heads {kv_heads}"
        cure = f"choose a divisor of n_heads, such as {_quarter(shape.n_heads)}"
        return [SettingsError((), message, cure)] if shape.n_heads % kv_heads else []

    def kv_heads(self, shape: Shape) -> int:
        """As the file says."""
        return self.n_kv_heads or _quarter(shape.n_heads)


def _quarter(n_heads: int) -> int:
    """A quarter of the heads, as in Mistral 7B and LLaMA 3 8B, or what divides evenly below it."""
    return next(n for n in range(max(1, n_heads // 4), 0, -1) if n_heads % n == 0)

"""Grouped-query attention: several query heads share a key/value head (Ainslie et al., 2023, arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Self

from pydantic import Field

from ablate.attention import mha, mqa
from ablate.attention._grouped import GroupedChoice
from ablate.attention._same import outputs
from ablate.choice import Identity, SettingsError, Shape, Size


class Config(GroupedChoice):
    """Settings of grouped-query attention."""

    grows: ClassVar[tuple[str, ...]] = ("n_kv_heads",)

    n_kv_heads: Size | None = Field(
        None,
        description="number of key/value heads; unless given the largest divisor of n_heads up to a quarter of it",
    )

    def resolve(self, shape: Shape) -> Self:
        """Number of key/value heads and width of a head as numbers."""
        return super().resolve(shape).with_defaults(n_kv_heads=_quarter(shape.n_heads))

    def twin(self, shape: Shape) -> Self:
        """With as many key/value heads: they are what it is."""
        return super().twin(shape).model_copy(update={"n_kv_heads": self.n_kv_heads})

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """Its two ends."""
        others = self.model_dump(exclude={"name", "n_kv_heads"})
        if shape.cross:
            return
        for n, end, what in ((shape.n_heads, mha, "as many key/value heads as heads"), (1, mqa, "one key/value head")):
            mine, same = self.model_copy(update={"n_kv_heads": n}), end.Config(**others)
            yield f"with {what} it is {end.__name__.rpartition('.')[2]}", partial(outputs, mine, same, shape)

    def problems(self, shape: Shape) -> list[SettingsError]:
        """Groups that do not come out even."""
        kv_heads = self.kv_heads(shape)
        message = f"n_heads {shape.n_heads} is not divisible by n_kv_heads {kv_heads}"
        cure = f"choose a divisor of n_heads, such as {_quarter(shape.n_heads)}"
        uneven = [SettingsError((), message, cure)] if shape.n_heads % kv_heads else []
        return [*super().problems(shape), *uneven]

    def kv_heads(self, shape: Shape) -> int:
        """As the file says."""
        return self.n_kv_heads or _quarter(shape.n_heads)


def _quarter(n_heads: int) -> int:
    """A quarter of the heads, as in Mistral 7B and LLaMA 3 8B, or what divides evenly below it."""
    return next(n for n in range(max(1, n_heads // 4), 0, -1) if n_heads % n == 0)

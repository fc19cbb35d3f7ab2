"""Learned biases of distances in buckets, wider the further away (Raffel et al., 2019, arXiv:1910.10683).

Half of the buckets hold one distance each, the others grow by the logarithm up to `max_distance`, and the last holds
what is beyond. Where keys after the query are seen, they have half of the buckets to themselves.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.choice import SettingsError, Shape, Size
from ablate.position import Position, PositionChoice
from ablate.position._distances import by_pair, distances


def buckets(relative: Tensor, n_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance (key's place minus query's), of any shape, as int64.

    The logarithm is taken in float32, as in all released code: in float64 a distance on a bound may fall on its other
    side.
    """
    if bidirectional:
        half = n_buckets // 2
        return buckets(-relative.abs(), half, max_distance, False) + torch.where(relative > 0, half, 0)
    away, exact = (-relative).clamp(min=0), n_buckets // 2
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (n_buckets - exact)
    wide = (exact + growth.long()).clamp(max=n_buckets - 1)
    return torch.where(away < exact, away, wide)


class RelativeBias(Position):
    """Adds one number a bucket and head to the scores; all layers that share the module share its table."""

    def __init__(self, n_heads: int, n_buckets: int = 32, max_distance: int = 128, bidirectional: bool = False) -> None:
        super().__init__()
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.table = nn.Embedding(n_buckets, n_heads)
        self._buckets: dict[torch.device, Tensor] = {}

    def bias(self, q: Tensor, k: Tensor, start: int, first: int, scale: float | None = None) -> Tensor:
        """The biases `(H, T, K)`."""
        n_queries, furthest = q.shape[-2], self.max_distance
        away = distances(n_queries, k.shape[-2], start, first, q.device).clamp(-furthest, furthest)
        found = self._bucket_of(q.device)[away + furthest]
        return by_pair(self.table(found).T, n_queries)

    def _bucket_of(self, device: torch.device) -> Tensor:
        """The buckets of -max_distance … max_distance, once a device: everything beyond is as far as that."""
        if device not in self._buckets:
            self._buckets[device] = self._all_buckets().to(device)
        return self._buckets[device]

    @torch.inference_mode(False)  # first needed by an evaluation, it must serve training too
    def _all_buckets(self) -> Tensor:
        # On the CPU wherever the model is: another device's logarithm may round a bound to its other side.
        every = torch.arange(-self.max_distance, self.max_distance + 1, device="cpu")
        return buckets(every, self.table.num_embeddings, self.max_distance, self.bidirectional)


class Config(PositionChoice):
    """Settings of the buckets."""

    needs: ClassVar[frozenset[str]] = frozenset({"bias"})
    n_buckets: Size = Field(32, ge=2, description="buckets, in both directions together")
    max_distance: Size = Field(128, le=2**20, description="from this distance on all keys are in the last bucket")

    def problems(self, shape: Shape, rotary_dim: int) -> list[SettingsError]:
        """Buckets that cannot be laid out."""
        ways = 1 if shape.causal else 2
        if self.n_buckets % ways or self.n_buckets < 2 * ways:
            message = f"keys on both sides of a query need an even number of buckets, 4 at least, not {self.n_buckets}"
            return [SettingsError(("n_buckets",), message, "write 4, 8 or 32")]
        exact = self.n_buckets // ways // 2
        if self.max_distance <= exact:
            message = f"max_distance {self.max_distance} is within the {exact} distances that have buckets of their own"
            return [SettingsError(("max_distance",), message, f"write {exact + 1} or more, or fewer buckets")]
        return []

    def build(self, shape: Shape, rotary_dim: int) -> RelativeBias:
        """The module; it looks both ways where the stack does."""
        return RelativeBias(shape.n_heads, self.n_buckets, self.max_distance, not shape.causal)

    def params(self, shape: Shape, rotary_dim: int) -> int:
        """One number a bucket and head."""
        return self.n_buckets * shape.n_heads

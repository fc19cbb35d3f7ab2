"""Attention with linear biases: scores fall with distance, one slope a head (Press et al., 2021, arXiv:2108.12409)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ablate.choice import Shape
from ablate.position import Position, PositionChoice
from ablate.position._distances import by_pair, distances


def slopes(n_heads: int) -> list[float]:
    """The released rule: 2^(-8/n), 2^(-16/n), … for n a power of two.

    Else those of the power of two below, then every other one of twice that power: 6 heads have 1/4, 1/16, 1/64,
    1/256, 1/2, 1/8.
    """
    below = 2 ** (n_heads.bit_length() - 1)
    first = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    rest = [2 ** (-4 * (i + 1) / below) for i in range(0, 2 * (n_heads - below), 2)]
    return first + rest


class Alibi(Position):
    """Adds -slope · |query position - key position| to the scores of each head."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = slopes(n_heads)

    def bias(self, q: Tensor, k: Tensor, start: int, first: int, scale: float | None = None) -> Tensor:
        """The biases `(H, T, K)`; the same for a key as far after the query, which a causal attention hides."""
        n_queries = q.shape[-2]
        away = distances(n_queries, k.shape[-2], start, first, q.device).abs()
        slope = torch.tensor(self.slopes, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        return by_pair(-slope[:, None] * away, n_queries)


class Config(PositionChoice):
    """No settings: the slopes follow from the number of heads."""

    needs: ClassVar[frozenset[str]] = frozenset({"bias"})

    def build(self, shape: Shape, rotary_dim: int) -> Alibi:
        """The module; it has no parameters."""
        return Alibi(shape.n_heads)

"""Attention with linear biases: scores fall with distance, one slope a head (Press et al., 2021, arXiv:2108.12409)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ablate.choice import Shape
from ablate.position import Position, PositionChoice


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
    """Adds -slope · (query position - key position) to the scores of each head."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = slopes(n_heads)

    def bias(self, q: Tensor, start: int, n_keys: int) -> Tensor:
        """The biases `(H, T, n_keys)`; also for keys after the query, which the mask hides in a causal model."""
        places = torch.arange(max(n_keys, start + q.shape[-2]), device=q.device)
        distance = places[start : start + q.shape[-2], None] - places[:n_keys]
        slope = torch.tensor(self.slopes, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        return -slope[:, None, None] * distance.abs()


class Config(PositionChoice):
    """No settings: the slopes follow from the number of heads."""

    needs: ClassVar[frozenset[str]] = frozenset({"bias"})

    def build(self, shape: Shape, rotary_dim: int) -> Alibi:
        """The module; it has no parameters."""
        return Alibi(shape.n_heads)

"""Transformer-XL's relative positions: scores of content with distance (Dai et al., 2019, arXiv:1901.02860).

Of the paper's four terms attention has the first, q · k. Here are the others, with R the sinusoids of a distance:
q · W R, a key's own weight u · k, and a distance's own weight v · W R. W, u and v are each layer's own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ablate.choice import Shape
from ablate.position import Position, PositionChoice
from ablate.position._distances import distances, shifted
from ablate.position._sinusoids import sinusoids


class RelativePosition(Position):
    """Adds (q + v) · W R + u · k, scaled as the scores are, to them.

    A `causal` one knows no distance to later keys, which attention must hide.
    """

    def __init__(self, d_model: int, n_heads: int, head_dim: int, causal: bool = True) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.causal = d_model, n_heads, causal
        self.project = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.key_bias = nn.Parameter(torch.zeros(n_heads, head_dim))
        self.distance_bias = nn.Parameter(torch.zeros(n_heads, head_dim))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """What `ablate.init` draws beside W, as the released code does."""
        return self.key_bias.detach(), self.distance_bias.detach()

    def bias(self, q: Tensor, k: Tensor, start: int, first: int, scale: float | None = None) -> Tensor:
        """The biases `(B, H, T, K)`."""
        n_queries, n_keys = q.shape[-2], k.shape[-2]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        away = distances(n_queries, n_keys, start, first, q.device)
        if self.causal:
            away = away[: start + n_queries - first]
        waves = sinusoids(-away, self.d_model, layout="half").to(self.project.weight.dtype)
        places = self.project(waves).unflatten(-1, (self.n_heads, -1))
        of_distance = scale * (q + self.distance_bias[:, None]) @ places.permute(1, 2, 0)
        of_pair: Tensor = shifted(of_distance, n_keys) + scale * self._of_key(k)[:, :, None]
        return of_pair

    def _of_key(self, k: Tensor) -> Tensor:
        """u · k for every query head, `(B, H, K)`."""
        grouped = self.key_bias.unflatten(0, (k.shape[1], -1))
        weights: Tensor = (k @ grouped.mT).mT.flatten(1, 2)
        return weights


class Config(PositionChoice):
    """No settings."""

    needs: ClassVar[frozenset[str]] = frozenset({"bias", "keys"})
    shared: ClassVar[bool] = False

    def build(self, shape: Shape, rotary_dim: int) -> RelativePosition:
        """The module."""
        return RelativePosition(shape.d_model, shape.n_heads, rotary_dim, shape.causal)

    def params(self, shape: Shape, rotary_dim: int) -> int:
        """W, u and v."""
        return (shape.d_model + 2) * shape.n_heads * rotary_dim

    def flops(self, shape: Shape, rotary_dim: int, tokens: int, *, discount: bool = True) -> dict[str, float]:
        """W of every distance once a sequence, each query with the distances to its keys, and u of every key."""
        width = shape.n_heads * rotary_dim
        n_distances = tokens if shape.causal else 2 * tokens - 1
        needed = (tokens + 1) / 2 if shape.causal else tokens
        return {
            "position.distances": 2.0 * shape.d_model * width * n_distances / tokens,
            "position.scores": 2.0 * width * (needed if discount else n_distances),
            "position.keys": 2.0 * width,
        }

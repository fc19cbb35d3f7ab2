"""LayerNorm as some textbooks write it: unbiased deviation, eps beside it (After Ba et al., 2016, arXiv:1607.06450).

It is no LayerNorm: with D features its outputs are smaller by √((D - 1) / D), and on activations near 0 eps, which here
stands outside the root, weighs less.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.choice import Real
from ablate.norm import NormChoice


class TextbookNorm(nn.Module):
    """(x - mean) / (deviation + eps) · w + b, `(…, D)` to `(…, D)`; a single feature has the deviation 0."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        deviation = wide.std(-1, keepdim=True, correction=min(1, x.shape[-1] - 1))
        normal = (wide - wide.mean(-1, keepdim=True)) / (deviation + self.eps)
        return (normal * self.weight + self.bias).to(x.dtype)


class Config(NormChoice):
    """Settings of the textbooks' norm."""

    eps: Real = Field(1e-6, gt=0, lt=1, description="added to the deviation, outside the root")

    def build(self, d_model: int) -> TextbookNorm:
        """The module."""
        return TextbookNorm(d_model, self.eps)

    def params(self, d_model: int) -> int:
        """Scale and shift."""
        return 2 * d_model

"""Dynamic tanh: squashes each number by itself, no statistics at all (Zhu et al., 2025, arXiv:2503.10622)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.choice import Real
from ablate.norm import NormChoice


class DynamicTanh(nn.Module):
    """w · tanh(alpha · x) + b, `(…, D)` to `(…, D)`; alpha is one learned number."""

    def __init__(self, d_model: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Squash every number of `x`."""
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class Config(NormChoice):
    """Settings of dynamic tanh."""

    alpha: Real = Field(0.5, gt=0, description="where alpha starts")

    def build(self, d_model: int) -> DynamicTanh:
        """The module."""
        return DynamicTanh(d_model, self.alpha)

    def params(self, d_model: int) -> int:
        """Scale, shift and alpha."""
        return 2 * d_model + 1

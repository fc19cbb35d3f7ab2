"""Root-mean-square normalisation: scale only, no mean taken off (Zhang and Sennrich, 2019, arXiv:1910.07467).

With `unit_offset` the weight is what the scale differs from 1 by, as in Gemma (2024, arXiv:2403.08295).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ablate.choice import Real
from ablate.norm import NormChoice


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · w, `(…, D)` to `(…, D)`; with `unit_offset` · (1 + w), where w starts at 0.

    The work is done in float32 or wider: half precision rounds 1 + w, and torch has no fused norm of mixed precision.
    """

    def __init__(self, d_model: int, eps: float = 1e-6, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.zeros(d_model) if unit_offset else torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        scale = 1 + weight if self.unit_offset else weight
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)


class Config(NormChoice):
    """Settings of root-mean-square normalisation."""

    eps: Real = Field(1e-6, gt=0, lt=1, description="added to the mean square, inside the root")
    unit_offset: bool = Field(False, description="whether the weight w, which starts at 0, is used as 1 + w")

    def build(self, d_model: int) -> RMSNorm:
        """The module."""
        return RMSNorm(d_model, self.eps, self.unit_offset)

    def params(self, d_model: int) -> int:
        """The scale."""
        return d_model

"""Root-mean-square normalisation: scale only, no mean taken off (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from ablate.choice import Real
from ablate.norm import NormChoice


class Config(NormChoice):
    """Settings of root-mean-square normalisation."""

    eps: Real = Field(1e-6, gt=0, lt=1, description="added to the mean square, inside the root")

    def build(self, d_model: int) -> nn.RMSNorm:
        """The module."""
        return nn.RMSNorm(d_model, eps=self.eps)

    def params(self, d_model: int) -> int:
        """The scale."""
        return d_model

"""Layer normalisation: mean 0, variance 1, then scale and shift (Ba et al., 2016, arXiv:1607.06450)."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from ablate.choice import Real
from ablate.norm import NormChoice


class Config(NormChoice):
    """Settings of layer normalisation."""

    eps: Real = Field(1e-5, gt=0, lt=1, description="added to the variance, inside the root")
    bias: bool = Field(True, description="whether there is a shift; without it the scale is all")

    def build(self, d_model: int) -> nn.LayerNorm:
        """The module."""
        return nn.LayerNorm(d_model, eps=self.eps, bias=self.bias)

    def params(self, d_model: int) -> int:
        """Scale and shift."""
        return d_model * (2 if self.bias else 1)

"""Root-mean-square normalisation: scale only, no mean taken off (Zhang and Sennrich, 2019, arXiv:1910.07467).

With `unit_offset` the weight is what the scale differs from 1 by, as in Gemma (2024, arXiv:2403.08295).
"""

from __future__ import annotations

from pydantic import Field

from ablate.choice import Real
from ablate.norm import NormChoice
from ablate.rms import RMSNorm


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

"""Gated feed-forward network with the Gaussian error linear unit (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ablate.feed_forward._gated import GatedChoice


class Config(GatedChoice):
    """Settings of a network gated by x·Φ(x)."""

    approximate: Literal["none", "tanh"] = Field("none", description="exact, or the approximation by tanh, as in Gemma")

    def act(self, x: Tensor) -> Tensor:
        """x·Φ(x)."""
        return F.gelu(x, approximate=self.approximate)

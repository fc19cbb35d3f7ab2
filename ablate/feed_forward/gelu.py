"""Feed-forward network with the Gaussian error linear unit (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ablate.feed_forward._dense import DenseChoice


class Config(DenseChoice):
    """Settings of a network with x·Φ(x)."""

    approximate: Literal["none", "tanh"] = Field("none", description="exact, or GPT-2's approximation by tanh")

    def act(self, x: Tensor) -> Tensor:
        """x·Φ(x)."""
        return F.gelu(x, approximate=self.approximate)

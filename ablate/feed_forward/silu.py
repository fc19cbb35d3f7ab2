"""Feed-forward network with x·σ(x), also called swish (Elfwing et al., 2017, arXiv:1702.03118)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ablate.feed_forward._dense import DenseChoice


class Config(DenseChoice):
    """Settings of a network with x·σ(x)."""

    def act(self, x: Tensor) -> Tensor:
        """x·σ(x)."""
        return F.silu(x)

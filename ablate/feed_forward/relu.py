"""Feed-forward network with ReLU (Vaswani et al., 2017, arXiv:1706.03762)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ablate.feed_forward._dense import DenseChoice


class Config(DenseChoice):
    """Settings of a network with max(0, x)."""

    def act(self, x: Tensor) -> Tensor:
        """max(0, x)."""
        return F.relu(x)

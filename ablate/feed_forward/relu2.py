"""Feed-forward network with squared ReLU, as in Primer (So et al., 2021, arXiv:2109.08668)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ablate.feed_forward._dense import DenseChoice


class Config(DenseChoice):
    """Settings of a network with max(0, x)²."""

    def act(self, x: Tensor) -> Tensor:
        """max(0, x)²."""
        return F.relu(x).square()

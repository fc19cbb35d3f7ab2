"""Feed-forward network with the logistic function (surveyed in Nwankpa et al., 2018, arXiv:1811.03378)."""

from __future__ import annotations

from torch import Tensor

from ablate.feed_forward._dense import DenseChoice


class Config(DenseChoice):
    """Settings of a network with 1 / (1 + exp(-x))."""

    def act(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x))."""
        return x.sigmoid()

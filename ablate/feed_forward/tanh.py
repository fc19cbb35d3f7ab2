"""Feed-forward network with the hyperbolic tangent (surveyed in Nwankpa et al., 2018, arXiv:1811.03378)."""

from __future__ import annotations

from torch import Tensor

from ablate.feed_forward._dense import DenseChoice


class Config(DenseChoice):
    """Settings of a network with tanh(x)."""

    def act(self, x: Tensor) -> Tensor:
        """tanh(x)."""
        return x.tanh()

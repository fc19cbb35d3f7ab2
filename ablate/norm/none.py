"""No normalisation: then the start of the weights must do its work (Zhang et al., 2019, arXiv:1901.09321)."""

from __future__ import annotations

from torch import nn

from ablate.norm import NormChoice


class Config(NormChoice):
    """No settings."""

    def build(self, d_model: int) -> nn.Identity:
        """A module without effect."""
        return nn.Identity()

    def params(self, d_model: int) -> int:
        """None."""
        return 0

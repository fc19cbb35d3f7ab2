"""Gated feed-forward network with SiLU (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ablate.feed_forward._gated import GatedChoice


class Config(GatedChoice):
    """Settings of a network gated by x·σ(x)."""

    def act(self, x: Tensor) -> Tensor:
        """x·σ(x)."""
        return F.silu(x)

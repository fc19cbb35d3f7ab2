"""The root-mean-square norm as a module: it is a choice of norm, and part of some attentions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · w, `(…, D)` to `(…, D)`; with `unit_offset` · (1 + w), where w starts at 0.

    The work is done in float32 or wider: half precision rounds 1 + w, and torch has no fused norm of mixed precision.
    """

    def __init__(self, d_model: int, eps: float = 1e-6, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.zeros(d_model) if unit_offset else torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        scale = 1 + weight if self.unit_offset else weight
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)

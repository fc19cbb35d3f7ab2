"""Feed-forward network without a function between its projections (studied in Saxe et al., 2013, arXiv:1312.6120).

Two matrices that make one product: what is left of a network when its non-linearity is taken away.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.choice import Identity, Shape
from ablate.feed_forward._dense import DenseChoice
from ablate.feed_forward._same import drawn, noise


class Config(DenseChoice):
    """Settings of a network with x itself."""

    def act(self, x: Tensor) -> Tensor:
        """Nothing done."""
        return x

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """Nothing happens between the projections."""
        yield "both projections make one matrix", lambda: self._as_one_matrix(shape)

    @torch.no_grad()
    def _as_one_matrix(self, shape: Shape) -> tuple[Tensor, Tensor]:
        module, x = drawn(self.build(shape)), noise(shape)
        matrix = module.down.weight @ module.up.weight
        bias = module.down(module.up.bias) if self.bias else None
        return module(x), F.linear(x, matrix, bias)

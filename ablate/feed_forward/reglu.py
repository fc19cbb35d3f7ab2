"""Gated feed-forward network with ReLU (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.choice import Identity, Shape
from ablate.feed_forward import relu2
from ablate.feed_forward._gated import GatedChoice
from ablate.feed_forward._same import drawn, noise


class Config(GatedChoice):
    """Settings of a network gated by max(0, x)."""

    def act(self, x: Tensor) -> Tensor:
        """max(0, x)."""
        return F.relu(x)

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """max(0, x) · x is max(0, x)²."""
        yield "a gate equal to what it gates makes it relu2", lambda: self._against_relu2(shape)

    @torch.no_grad()
    def _against_relu2(self, shape: Shape) -> tuple[Tensor, Tensor]:
        plain = drawn(relu2.Config(d_ff=self._width(shape), bias=self.bias).build(shape))
        twice = {f"gate_up.{kind}": torch.cat([up, up]) for kind, up in plain.up.state_dict().items()}
        gated = drawn(self.build(shape))
        gated.load_state_dict(twice | {f"down.{kind}": down for kind, down in plain.down.state_dict().items()})
        x = noise(shape)
        return gated(x), plain(x)

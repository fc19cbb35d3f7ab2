"""Modules with random weights and inputs to try them on, always the same: for the identities that choices promise."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from ablate.choice import Shape

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def drawn(module: M) -> M:
    """The module in evaluation mode and float64, with every parameter drawn."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.double().eval().parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module


def noise(shape: Shape) -> Tensor:
    """Inputs `(2, 5, D)` in float64."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 5, shape.d_model, generator=generator, dtype=torch.float64)

"""Modules without memory: built on the meta device, to be counted and checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with shapes but no numbers."""
    with torch.device("meta"):
        return build()


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Parameters of what `build` makes; a tensor used twice counts once."""
    return sum(parameter.numel() for parameter in on_meta(build).parameters())

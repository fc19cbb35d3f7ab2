"""Modules without memory: built on the meta device, to be counted and checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_FILLS = frozenset(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")) | {"exponential_"}


class _NothingToFill(TorchFunctionMode):
    """Leaves out the filling of tensors that hold no numbers: on the meta device it is slow, and loads a compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with shapes but no numbers."""
    with torch.device("meta"), _NothingToFill():
        return build()


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Parameters of what `build` makes; a tensor used twice counts once."""
    return sum(parameter.numel() for parameter in on_meta(build).parameters())

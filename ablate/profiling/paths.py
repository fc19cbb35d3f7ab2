"""Several ways to the same result: a module that can read its cache in more than one says so, and each is measured.

Such a module's `decode_paths` are the names of its ways, and `decode_path`, which may be set, is the one that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Way = tuple[str, ...]
"""The path that each of a model's modules with several takes, in the order of the modules."""


def ways(model: nn.Module) -> list[Way]:
    """The one that the settings choose, then each where all modules take a certain path that can."""
    modules, chosen = _offering(model), taken(model)
    names = dict.fromkeys(name for module in modules for name in module.decode_paths)
    others = (tuple(name if name in each.decode_paths else each.decode_path for each in modules) for name in names)
    return list(dict.fromkeys([chosen, *others]))


def taken(model: nn.Module) -> Way:
    """The one that the model takes now."""
    return tuple(module.decode_path for module in _offering(model))


def name_of(way: Way) -> str | None:
    """How rows name it: the paths that are taken; None where there is but one way."""
    return "+".join(sorted(set(way))) or None


@contextmanager
def taking(model: nn.Module, way: Way) -> Iterator[None]:
    """Within it the model's modules take these paths."""
    before = taken(model)
    _set(model, way)
    try:
        yield
    finally:
        _set(model, before)


def _offering(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "decode_paths", ())]


def _set(model: nn.Module, way: Way) -> None:
    for module, path in zip(_offering(model), way, strict=True):
        module.decode_path = path

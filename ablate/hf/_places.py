"""Where a checkpoint keeps the tensors of our model: tables from our names to theirs, and how one becomes the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_HOLES = {"i": r"\d+", "j": r"\d+", "e": r"\d+", "p": "weight|bias", "s": "encoder|decoder"}
"""What the holes of a name stand for: a layer, a norm, an expert, a parameter, a stack."""


def stacked(*tensors: Tensor) -> Tensor:
    """One after the other, along the rows."""
    import torch

    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


@dataclass(frozen=True)
class Place:
    """The names of tensors in the file, and what makes ours of them; an `optional` one is zero where it is missing."""

    sources: tuple[str, ...]
    make: Callable[..., Tensor] = stacked
    optional: bool = False

    def filled(self, holes: Mapping[str, str]) -> Place:
        """With numbers and words in the holes of the names."""
        return Place(tuple(name.format(**holes) for name in self.sources), self.make, self.optional)


def transposed(name: str) -> Place:
    """A matrix kept as `(in, out)`."""
    return Place((name,), lambda tensor: tensor.t())


def flat(name: str) -> Place:
    """A vector kept as a row of a matrix, which a file may leave out where it is zero."""
    return Place((name,), lambda tensor: tensor.flatten(), optional=True)


def ungrouped(name: str, groups: int, head_dim: int) -> Place:
    """Rows kept by groups of heads, in each its queries, then a key, then a value; ours are q | k | v."""

    def make(tensor: Tensor) -> Tensor:
        heads = tensor.unflatten(0, (groups, -1, head_dim))
        parts = (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])
        return stacked(*(part.flatten(0, 2) for part in parts))

    return Place((name,), make)


Places = Mapping[str, str | tuple[str, ...] | Place]
"""Our names to theirs; several of theirs are stacked."""


@dataclass(frozen=True)
class Layout:
    """A family's files.

    `places` maps our names to theirs, with holes such as `{i}`. Published files may leave the `prefix` out of every
    name; `renamed` are older words in their names. `copies` are names of a tensor that the file holds twice when it is
    tied. No logit depends on tensors whose names are `ignored` patterns, nor on those of a layer that holds the tensor
    `beside`. What is `computed` here, from its shape, must be the same in a file that holds it.
    """

    places: Places
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    beside: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)

    def place(self, name: str) -> Place:
        """Where our tensor `name` is kept. Raises KeyError where the family has no such tensor."""
        for pattern, place in self.places.items():
            if match := _pattern(pattern).fullmatch(name):
                whole = place if isinstance(place, Place) else Place((place,) if isinstance(place, str) else place)
                return whole.filled(match.groupdict())
        raise KeyError(name)

    def is_ignored(self, name: str, names: Collection[str]) -> bool:
        """Whether the tensor `name` of the file that holds `names` is one that no logit depends on."""
        layer = re.match(r".*layers\.\d+\.", name)
        if self.beside and layer and layer[0] + self.beside in names:
            return True
        return any(re.fullmatch(pattern, name.removeprefix(self.prefix)) for pattern in self.ignored)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    for hole, words in _HOLES.items():
        text = text.replace(rf"\{{{hole}\}}", f"(?P<{hole}>{words})")
    return re.compile(text)

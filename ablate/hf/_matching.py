"""Our tensors against those of a checkpoint, by names and shapes alone: all of both must find one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ablate.choice import Faults, SettingsError
from ablate.hf._fields import fault, refusal
from ablate.hf._places import Layout, Place

if TYPE_CHECKING:
    from torch import Tensor

_FEW = 4


@dataclass(frozen=True)
class Match:
    """`places` by our names, with names of the file; names of `equal` tensors; what must be as `computed` here."""

    places: Mapping[str, Place]
    equal: Mapping[str, str]
    computed: Mapping[str, Callable[..., Tensor]]


def matched(layout: Layout, ours: Iterable[str], theirs: Iterable[str]) -> Match:
    """Where each of our tensors is. Raises `Faults` that name what is missing and what is left over."""
    asked = {name: layout.place(name) for name in ours}
    named = _Names(layout, theirs, {source for place in asked.values() for source in place.sources})
    places = {name: _found(place, named) for name, place in asked.items()}
    missing = [source for place in places.values() for source in place.sources if source not in named.files]
    equal = {file: named.taken[original] for file, original in named.copies() if original in named.taken}
    computed = {file: layout.computed[name] for name, file in named.left() if name in layout.computed}
    known = {*equal, *computed}
    over = [file for name, file in named.left() if file not in known and not layout.is_ignored(name, named.files)]
    faults = [
        *_listed(missing, "config.json asks for tensors that the checkpoint does not have"),
        *_listed(over, "the checkpoint has tensors that config.json does not ask for"),
    ]
    if faults:
        raise Faults(faults)
    return Match(places, equal, computed)


def check_sizes(
    match: Match,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, tuple[int, ...]],
    packed: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises `Faults` for the first tensor that has not the numbers that `config.json` asks for. Reads none.

    `packed` says how many rows each part has of our tensors that are several projections in one: tensors that are put
    together must each be as many of the parts.
    """
    for name, place in match.places.items():
        sizes = [theirs[source] for source in place.sources]
        whole = sum(map(math.prod, sizes)) == ours[name].numel()
        if sizes and not (whole and _cut_alike([size[0] for size in sizes if size], packed.get(name, ()))):
            raise misfit(name, tuple(ours[name].shape), place, theirs)


def _cut_alike(rows: list[int], parts: tuple[int, ...]) -> bool:
    """Whether tensors of so many rows end where parts end; one alone may lie otherwise, and tells nothing."""
    return len(rows) < 2 or not parts or {*accumulate(rows)} <= {*accumulate(parts)}


def misfit(name: str, shape: tuple[int, ...], place: Place, theirs: Mapping[str, tuple[int, ...]]) -> Faults:
    """The fault of tensors that cannot be made into ours of `shape`."""
    parts = " and ".join(f"'{source}' {list(theirs[source])}" for source in place.sources)
    return refusal(f"{parts} of the checkpoint: config.json asks for {list(shape)} in '{name}'")


class _Names:
    """The file's names by those that the layout has for them, which of them are `asked` for, and which are taken."""

    def __init__(self, layout: Layout, theirs: Iterable[str], asked: Collection[str]) -> None:
        self.layout, self.asked = layout, asked
        self.files = set(theirs)
        self.by_name: dict[str, str] = {}
        self.taken: dict[str, str] = {}
        for file in self.files:
            name = file
            for old, new in layout.renamed.items():
                name = name.replace(old, new)
            if name in self.by_name:
                raise refusal(f"'{file}' and '{self.by_name[name]}' are two names of one tensor")
            self.by_name[name] = file

    def take(self, name: str) -> str | None:
        """The file's tensor that the layout calls `name`: perhaps without its prefix, or by the name of a copy."""
        copies = [each for each, of in self.layout.copies.items() if of == name and each not in self.asked]
        names = [x for each in (name, *copies) for x in (each, each.removeprefix(self.layout.prefix))]
        known = next((each for each in names if each in self.by_name), None)
        if known is not None:
            self.taken[name] = self.by_name[known]
        return self.taken.get(name)

    def left(self) -> list[tuple[str, str]]:
        """What is not taken: the layout's name, and the file's."""
        taken = set(self.taken.values())
        return [(self._long(name), file) for name, file in sorted(self.by_name.items()) if file not in taken]

    def copies(self) -> list[tuple[str, str]]:
        """What is not taken and has another name that may be: the file's name, and the layout's other one."""
        return [(file, self.layout.copies[name]) for name, file in self.left() if name in self.layout.copies]

    def _long(self, name: str) -> str:
        known = {*self.layout.copies, *self.layout.computed}
        return name if name in known or self.layout.prefix + name not in known else self.layout.prefix + name


def _found(place: Place, named: _Names) -> Place:
    """The place with the file's own names, and with the layout's for what is missing."""
    if place.optional and all(named.take(source) is None for source in place.sources):
        return replace(place, sources=())
    return replace(place, sources=tuple(named.take(source) or source for source in place.sources))


def _listed(names: list[str], what: str) -> list[SettingsError]:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    listed = ", ".join(f"'{name}'" for name in names[:_FEW])
    return [fault(f"{what}: {listed}{more}")] if names else []

"""The layers of an encoder or a decoder: which there are, and how positions enter them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ablate.choice import Shape
from ablate.position import PositionChoice
from ablate.settings.layer import LAYER_SLOTS, LayerRule, LayerSettings, Place, applies


@dataclass(frozen=True)
class StackSettings:
    """The layers of an encoder or a decoder. `usual` is a layer that no rule is for."""

    name: str
    shape: Shape
    usual: LayerSettings
    rules: list[LayerRule]

    def layer(self, index: int) -> LayerSettings:
        """What layer `index`, counted from 0, is made of."""
        own = [rule for rule in self.rules if rule.applies(index)]
        slots = {slot: given for rule in own for slot in LAYER_SLOTS if (given := getattr(rule, slot)) is not None}
        return self.usual.model_copy(update=slots) if slots else self.usual

    @property
    def layers(self) -> list[LayerSettings]:
        """All of them, from the first to the last."""
        return [self.layer(index) for index in range(self.shape.n_layers)]

    @property
    def last(self) -> LayerSettings:
        """The last one, whose block says how the stack ends."""
        return self.layer(self.shape.n_layers - 1)

    def distinct_layers(self) -> list[tuple[LayerSettings, int]]:
        """The different layers, each with how often it occurs."""
        if not self.rules:
            return [(self.usual, self.shape.n_layers)]
        merged: list[tuple[LayerSettings, int]] = []
        for index, times in _kinds(self.shape.n_layers, tuple(rule.place for rule in self.rules)):
            layer = self.layer(index)
            same = next((i for i, (known, _) in enumerate(merged) if known == layer), len(merged))
            merged[same:] = [(layer, times + (merged[same][1] if same < len(merged) else 0)), *merged[same + 1 :]]
        return merged

    def rules_by_layer(self) -> list[LayerRule]:
        """The layers that are not as usual, by their numbers: each kind of them is one rule."""
        kinds: list[tuple[dict[str, Any], list[int]]] = []
        for number, layer in enumerate(self.layers if self.rules else [], 1):
            own = {s: choice for s in LAYER_SLOTS if (choice := getattr(layer, s)) != getattr(self.usual, s)}
            same = next((numbers for slots, numbers in kinds if slots == own), None)
            if own and same is None:
                kinds.append((own, [number]))
            elif own and same is not None:
                same.append(number)
        return [LayerRule(at=numbers, **slots) for slots, numbers in kinds]

    def each_layer_once(self) -> dict[str, Any]:
        """How deep the stack is without repetitions, and the rules that make it so."""
        layers = [layer for layer, _ in self.distinct_layers()]
        slots = [{slot: getattr(layer, slot) for slot in LAYER_SLOTS} for layer in layers]
        rules = [LayerRule.model_construct(at=[index], **own) for index, own in enumerate(slots, 1)]
        return {"n_layers": len(layers), "layers": rules if self.rules else []}

    def schemes(self) -> tuple[list[Scheme], list[int]]:
        """The position modules, and which of them each layer uses.

        The first is the one that adds to the embeddings, if any does. Layers share a module unless its choice says that
        each needs one.
        """
        first = self.scheme(self.usual)
        modules, used = [first] if first.choice.embeds else [], list[int]()
        for layer in self.layers:
            scheme = first if layer is self.usual else self.scheme(layer)
            if not (scheme.choice.shared and scheme in modules):
                modules.append(scheme)
            used.append(modules.index(scheme) if scheme.choice.shared else len(modules) - 1)
        return modules, used

    def scheme(self, layer: LayerSettings) -> Scheme:
        """How positions enter the layer: as its attention looks, both ways or back alone."""
        shape = replace(self.shape, causal=layer.attention.is_causal(self.shape))
        return Scheme(layer.position, shape, layer.rotary_dim(shape))


@dataclass(frozen=True)
class Scheme:
    """A position choice in the shape that it is for, with the width of the heads that it turns or looks at."""

    choice: PositionChoice
    shape: Shape
    rotary_dim: int


@lru_cache(maxsize=64)
def _kinds(n_layers: int, places: tuple[Place, ...]) -> list[tuple[int, int]]:
    """A layer that each set of rules is for, and how many it is for: asked often, of a thousand layers too."""
    kinds = [tuple(applies(place, index) for place in places) for index in range(n_layers)]
    one = {kind: index for index, kind in enumerate(kinds)}
    return [(one[kind], times) for kind, times in Counter(kinds).items()]

"""What one layer is made of, and exceptions for some layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

from pydantic import Field, SerializeAsAny, model_validator

from ablate.attention import AttentionChoice
from ablate.block import BlockChoice
from ablate.choice import Count, Settings, SettingsError, Shape
from ablate.feed_forward import FeedForwardChoice
from ablate.norm import NormChoice
from ablate.position import PositionChoice

LAYER_SLOTS = ("attention", "cross_attention", "feed_forward", "norm", "block", "position")
"""What one layer can have of its own."""


CROSS = "cross_attention"


SLOT_OF = {place: place for place in LAYER_SLOTS} | {CROSS: "attention"}
"""The places of a layer, and the slot that each is filled from."""


Place = tuple[int | None, int | None, Collection[int]]
"""Which layers a rule is for: its `every`, `first` and `at`."""


class LayerRule(Settings):
    """An exception for some layers; of several that apply the last wins, slot by slot."""

    every: Count | None = Field(None, description="layers n, 2n, 3n, … counted from 1")
    first: Count | None = Field(None, description="the first n layers")
    at: list[Count] | None = Field(None, min_length=1, description="these layers, counted from 1")
    attention: SerializeAsAny[AttentionChoice] | None = None
    cross_attention: SerializeAsAny[AttentionChoice] | None = None
    feed_forward: SerializeAsAny[FeedForwardChoice] | None = None
    norm: SerializeAsAny[NormChoice] | None = None
    block: SerializeAsAny[BlockChoice] | None = None
    position: SerializeAsAny[PositionChoice] | None = None

    @model_validator(mode="after")
    def _says_where_and_what(self) -> Self:
        if self.every is None and self.first is None and self.at is None:
            cure = "say which layers, as in `every: 2`"
            raise SettingsError((), "a rule for layers needs 'every', 'first' or 'at'", cure)
        if all(getattr(self, slot) is None for slot in LAYER_SLOTS):
            cure = f"give one of: {', '.join(LAYER_SLOTS)}"
            raise SettingsError((), "a rule for layers needs a choice for them", cure)
        return self

    def applies(self, layer: int) -> bool:
        """Whether the rule is for layer `layer`, counted from 0."""
        return applies((self.every, self.first, self.at or ()), layer)

    @property
    def place(self) -> Place:
        """Which layers it is for, as something that can be looked up."""
        return self.every, self.first, frozenset(self.at or ())


def applies(place: Place, layer: int) -> bool:
    """Whether layer `layer`, counted from 0, is among those that a rule is for."""
    every, first, at = place
    by_step = every is not None and (layer + 1) % every == 0
    return by_step or (first is not None and layer < first) or layer + 1 in at


def without_cross(rules: Sequence[LayerRule]) -> list[LayerRule]:
    """The rules as they are for a stack that reads no other sequence; those that say nothing else are gone."""
    left = [rule.model_copy(update={CROSS: None}) for rule in rules]
    return [rule for rule in left if any(getattr(rule, slot) is not None for slot in LAYER_SLOTS)]


class LayerSettings(Settings):
    """What one layer is made of."""

    attention: SerializeAsAny[AttentionChoice]
    cross_attention: SerializeAsAny[AttentionChoice] | None = None
    feed_forward: SerializeAsAny[FeedForwardChoice]
    norm: SerializeAsAny[NormChoice]
    block: SerializeAsAny[BlockChoice]
    position: SerializeAsAny[PositionChoice]

    @property
    def n_sublayers(self) -> int:
        """Attention and feed-forward, and between them what reads the other sequence, if anything does."""
        return 2 if self.cross_attention is None else 3

    @property
    def n_norms(self) -> int:
        """Norms that the layer holds."""
        return self.block.n_norms(self.n_sublayers)

    def rotary_dim(self, shape: Shape) -> int:
        """The width of the heads that this layer's position scheme turns or looks at, 0 where it does neither."""
        return self.attention.rotary_dim(shape) if self.position.needs & {"rotate", "keys"} else 0

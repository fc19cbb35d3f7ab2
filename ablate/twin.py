"""A variant's twin: the same family and the same choices, so small that all about it can be tried in a second."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from ablate.choice import Choice, Faults, SettingsError, Shape
from ablate.data import DataChoice
from ablate.settings import (
    CROSS,
    LAYER_SLOTS,
    EncoderSettings,
    LayerRule,
    LayerSettings,
    ModelSettings,
    ProfileSettings,
    StackSettings,
    TrainSettings,
    VariantSettings,
    resolved,
)

MAX_SEQ_LEN = 16
VOCABULARY = 48
_HEAD_WIDTHS = (8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 256)
_INIT_STD = 0.2
"""Wide enough for every part of a small model to matter."""


def twin(settings: ModelSettings) -> ModelSettings:
    """The smallest model that the choices of `settings` have nothing against, with each different layer once.

    A model of several layers that are all alike has two of them. Where the number of heads allows, there are twice as
    many as must be, so that heads that share something have something to share. Raises `Faults` where nothing fits,
    those of the smallest.
    """
    faults: Faults | None = None
    for width, n_heads in product(_HEAD_WIDTHS, range(min(2, settings.n_heads), settings.n_heads + 1)):
        try:
            found = _shrunk(settings, n_heads, width * n_heads)
            return _with_twice_the_heads(settings, n_heads, width) or found
        except (Faults, SettingsError) as wrong:
            faults = faults or (wrong if isinstance(wrong, Faults) else Faults([wrong]))
    raise faults or Faults([])


def wide_twin(settings: ModelSettings) -> ModelSettings:
    """A twin of the variant's own width, for choices that need more room than they say. Raises `Faults`."""
    return _shrunk(settings, settings.n_heads, settings.d_model)


def _with_twice_the_heads(settings: ModelSettings, n_heads: int, width: int) -> ModelSettings | None:
    if 2 * n_heads > settings.n_heads:
        return None
    try:
        return _shrunk(settings, 2 * n_heads, width * 2 * n_heads)
    except (Faults, SettingsError):
        return None


def _shrunk(settings: ModelSettings, n_heads: int, d_model: int) -> ModelSettings:
    """With these numbers. Raises `Faults` or `SettingsError` where they do not go with the choices."""
    narrow = settings.d_embed not in (None, settings.d_model)
    small = settings.model_copy(
        update={
            "d_model": d_model,
            "d_embed": d_model // 2 if narrow else d_model,
            "n_heads": n_heads,
            "max_seq_len": MAX_SEQ_LEN,
            "vocab_size": VOCABULARY,
            "init": "normal",
            "init_std": _INIT_STD,
        }
    )
    if small.encoder is not None:
        small = small.model_copy(update={"encoder": small.encoder.model_copy(update={"n_heads": n_heads})})
    *encoders, main = small.stacks
    updates = _stack(main)
    if encoders:
        updates["encoder"] = EncoderSettings(n_heads=n_heads, **_stack(encoders[0]))
    whole = VariantSettings.model_construct(
        model=small.model_copy(update=updates),
        train=TrainSettings(steps=1, batch_tokens=1, seq_len=1),
        data=DataChoice(),
        profile=ProfileSettings(),
    )
    return resolved(whole).model


def _stack(stack: StackSettings) -> dict[str, Any]:
    """The settings of a stack of twins: its usual choices, and a rule for each layer that has another."""
    usual, layers = _slots(stack.usual, stack.shape), _different(stack)
    rules = []
    for index, layer in enumerate(layers, 1):
        own: dict[str, Any] = {slot: choice for slot, choice in layer.items() if choice != usual[slot]}
        rules += [LayerRule(at=[index], **own)] if own else []
    return {**usual, "n_layers": len(layers), "layers": rules}


def _different(stack: StackSettings) -> list[dict[str, Choice]]:
    """The different layers in the order in which they last occur, so that the stack ends as it did."""
    last: list[LayerSettings] = []
    for layer in reversed(stack.layers):
        last += [] if layer in last else [layer]
    found: list[dict[str, Choice]] = []
    for layer in last:
        slots = _slots(layer, stack.shape)
        found += [] if slots in found else [slots]
    return found * 2 if len(found) == 1 < stack.shape.n_layers else found[::-1]


def _slots(layer: LayerSettings, shape: Shape) -> dict[str, Choice]:
    """The twins of a layer's choices."""
    crossing = replace(shape, cross=True)
    given = {slot: choice for slot in LAYER_SLOTS if (choice := getattr(layer, slot)) is not None}
    return {slot: choice.twin(crossing if slot == CROSS else shape) for slot, choice in given.items()}

"""From plain data to typed settings, with every fault that single settings have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from pydantic import SerializeAsAny

from ablate import registry
from ablate.choice import Choice, Faults, Path, Settings, SettingsError, validated
from ablate.data import DataChoice
from ablate.settings.layer import CROSS, SLOT_OF, LayerRule
from ablate.settings.model import EncoderSettings, ModelSettings
from ablate.settings.profile import ProfileSettings
from ablate.settings.recipe import TrainSettings


class VariantSettings(Settings):
    """Everything that determines the numbers of a variant, but the seed."""

    model: ModelSettings
    train: TrainSettings
    data: SerializeAsAny[DataChoice]
    profile: ProfileSettings


def typed(tree: Mapping[str, Any]) -> VariantSettings:
    """The plain sections `model`, `train`, `data`, `profile` as typed settings. Raises `Faults` with every fault found.

    Checks each setting by itself; `resolved` checks them together.
    """
    faults: list[SettingsError] = []
    data = _collect(faults, lambda: registry.configure("data", tree["data"], ("data",)))
    model = _collect(faults, lambda: _model(tree["model"]))
    train = _collect(faults, lambda: validated(TrainSettings, tree["train"], ("train",)))
    profile = _collect(faults, lambda: validated(ProfileSettings, tree["profile"], ("profile",)))
    if faults:
        raise Faults(faults)
    return VariantSettings.model_construct(model=model, train=train, data=data, profile=profile)


def _collect(faults: list[SettingsError], make: Any) -> Any:
    try:
        return make()
    except Faults as found:
        faults.extend(found.faults)
        return None


def _model(raw: Mapping[str, Any]) -> ModelSettings:
    faults: list[SettingsError] = []
    usual = {slot: raw.get(slot) for slot in registry.SLOTS}
    ready = {**raw, **_choices(raw, usual, (), faults), **_rules(raw, raw, (), faults)}
    if isinstance(own := raw.get("encoder"), Mapping):
        ready["encoder"] = _collect(faults, lambda: _encoder(own, raw, faults))
    faulty = {fault.path[:1] for fault in faults}
    others: list[SettingsError] = []
    model = _collect(others, lambda: validated(ModelSettings, ready))
    faults += [fault for fault in others if fault.path[:1] not in faulty]
    if faults:
        raise Faults(faults)
    return cast(ModelSettings, model)


def _encoder(raw: Mapping[str, Any], usual: Mapping[str, Any], faults: list[SettingsError]) -> EncoderSettings:
    path = ("encoder",)
    for i, rule in enumerate(rules if isinstance(rules := raw.get("layers"), list) else []):
        if isinstance(rule, Mapping) and CROSS in rule:
            message = "an encoder reads no other sequence, and has no cross_attention"
            faults.append(SettingsError((*path, "layers", i, CROSS), message, "take it out"))
    own = {place: _continued(given, usual.get(place)) for place in SLOT_OF if (given := raw.get(place)) is not None}
    ready = {**raw, **_choices(raw, usual, path, faults), **_rules(raw, {**usual, **own}, path, faults)}
    return validated(EncoderSettings, ready, path)


def _rules(
    raw: Mapping[str, Any], usual: Mapping[str, Any], path: Path, faults: list[SettingsError]
) -> dict[str, list[LayerRule]]:
    if not isinstance(rules := raw.get("layers"), list):
        return {}
    places = ((*path, "layers", i) for i in range(len(rules)))
    found = [
        _collect(faults, partial(_rule, rule, usual, place, faults)) for rule, place in zip(rules, places, strict=True)
    ]
    return {"layers": [rule for rule in found if rule is not None]}


def _rule(raw: object, usual: Mapping[str, Any], path: Path, faults: list[SettingsError]) -> LayerRule:
    ready = {**raw, **_choices(raw, usual, path, faults)} if isinstance(raw, Mapping) else raw
    return validated(LayerRule, ready, path)


def _choices(
    raw: Mapping[str, Any], usual: Mapping[str, Any], path: Path, faults: list[SettingsError]
) -> dict[str, Choice]:
    """The slots of `raw`, each as its choice's settings; an empty one stands in for what is faulty, and reported.

    What is inside an exception, which has a `path`, may be left at nothing; it goes on from the `usual` choice where it
    does not name another.
    """
    ready: dict[str, Choice] = {}
    for place, slot in SLOT_OF.items():
        if place in raw and not (raw[place] is None and (path or place not in registry.SLOTS)):
            given = _continued(raw[place], usual.get(place) or usual.get(slot))
            choice = _collect(
                faults, lambda slot=slot, given=given, at=(*path, place): registry.configure(slot, given, at)
            )
            ready[place] = choice or registry.slot_base(slot)()
    return ready


def _continued(raw: Any, usual: Any) -> Any:
    """A choice that names no other one, over what the usual choice says."""
    own, base = ({"name": each} if isinstance(each, str) else each for each in (raw, usual))
    if isinstance(own, Mapping) and isinstance(base, Mapping) and own.get("name", base.get("name")) == base.get("name"):
        return _merged(base, own)
    return raw


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}

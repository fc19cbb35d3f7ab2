"""Settings checked together, with every default as a value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ablate import registry
from ablate.choice import Faults, Path, Settings, SettingsError, Shape
from ablate.settings.layer import CROSS, SLOT_OF, LayerRule, without_cross
from ablate.settings.meant import where_meant
from ablate.settings.model import EncoderSettings, ModelSettings
from ablate.settings.pairings import pairings, placed
from ablate.settings.reading import VariantSettings


def resolved(settings: VariantSettings, vocab_size: int = 1) -> VariantSettings:
    """A copy in which every default stands as a value. Raises `Faults` for what cannot work together.

    `vocab_size` is the data's: with the family's special tokens the model's own where it does not say, and the least it
    may be.
    """
    given = settings.model
    faults = [fault.below(("train",)) for fault in settings.train.faults()]
    least = vocab_size + given.n_special_tokens
    if given.vocab_size is not None and given.vocab_size < least:
        beside = f" and the {given.family}'s own {given.n_special_tokens}" if given.n_special_tokens else ""
        message = f"vocab_size {given.vocab_size} is less than the {vocab_size} tokens of the data{beside}"
        cure = f"give at least {least}, or leave it out where the file gives it"
        faults.append(SettingsError(("vocab_size",), message, cure))
    model = _resolved_model(given.model_copy(update={"vocab_size": given.vocab_size or least}), faults)
    faults += _idle_rules(model)
    if not faults:
        train = settings.train.resolve(model.max_seq_len)
        faults += [fault.below(("train",)) for fault in train.length_faults(model.max_seq_len)]
        faults += [fault.below(("profile",)) for fault in settings.profile.faults(model.max_seq_len)]
        faults += pairings(model, given)
    if faults:
        raise Faults({(fault.path, fault.message): fault for fault in faults}.values())
    return settings.model_copy(update={"model": _in_one_form(model), "train": train})


def _resolved_model(model: ModelSettings, faults: list[SettingsError]) -> ModelSettings:
    """The model with every slot of every stack as it is meant, and nothing that means nothing in its family."""
    crossed = None
    if model.family == "encoder_decoder":
        crossed = model.cross_attention or model.attention.crossing()
        crossed = crossed.model_copy(update={"causal": None})
    rules = model.layers if crossed else without_cross(model.layers)
    model = model.model_copy(update={CROSS: crossed, "layers": rules})
    shapes = {stack.name: stack.shape for stack in model.stacks}
    shape = shapes.get("decoder") or shapes["encoder"]
    updates = _resolved_slots(model, shape, (), faults)
    updates["layers"] = _resolved_rules(model.layers, shape, ("layers",), faults)
    updates["head"] = model.head.resolve(model.family)
    updates["encoder"] = _resolved_encoder(model, shapes["encoder"], faults) if crossed else None
    updates["d_embed"] = model.d_embed or model.d_model
    return where_meant(model.model_copy(update=updates), init_std=model.init == "normal")


def _in_one_form(model: ModelSettings) -> ModelSettings:
    """Rules for layers in the one form that they all have, so that equal models have equal settings."""
    *encoders, main = model.stacks
    updates: dict[str, Any] = {"layers": main.rules_by_layer()}
    if encoders and model.encoder:
        updates["encoder"] = model.encoder.model_copy(update={"layers": encoders[0].rules_by_layer()})
    return model.model_copy(update=updates)


def _resolved_encoder(model: ModelSettings, shape: Shape, faults: list[SettingsError]) -> EncoderSettings:
    own = model.encoder or EncoderSettings()
    numbers = {"n_layers": shape.n_layers, "n_heads": shape.n_heads}
    taken = {slot: getattr(own, slot) or getattr(model, slot) for slot in registry.SLOTS}
    rules, path = (own.layers, ("encoder", "layers")) if own.layers is not None else (model.layers, ("layers",))
    rules = without_cross(rules)
    whole = own.model_copy(update={**numbers, **taken})
    ready = _resolved_slots(whole, shape, ("encoder",), faults)
    return whole.model_copy(update={**ready, "layers": _resolved_rules(rules, shape, path, faults)})


def _resolved_rules(rules: list[LayerRule], shape: Shape, path: Path, faults: list[SettingsError]) -> list[LayerRule]:
    return [rule.model_copy(update=_resolved_slots(rule, shape, (*path, i), faults)) for i, rule in enumerate(rules)]


def _resolved_slots(holder: Settings, shape: Shape, path: Path, faults: list[SettingsError]) -> dict[str, Any]:
    """The choices that `holder` has, each resolved in the shape that it is for."""
    crossing = replace(shape, cross=True)
    given = {place: choice for place in SLOT_OF if (choice := getattr(holder, place, None)) is not None}
    return {
        place: _resolve(faults, choice, crossing if place == CROSS else shape, (*path, place))
        for place, choice in given.items()
    }


def _resolve(faults: list[SettingsError], choice: Any, shape: Shape, path: Path) -> Any:
    try:
        done = choice.resolve(shape)
    except SettingsError as fault:
        faults.append(fault.below(path))
        return choice
    except Faults as found:
        faults.extend(fault.below(path) for fault in found.faults)
        return choice
    if path[-1] != "position" and (problems := getattr(done, "problems", None)):
        faults.extend(placed(problem, path) for problem in problems(shape))
    return done


def _idle_rules(model: ModelSettings) -> list[SettingsError]:
    return [
        SettingsError(
            ("layers", i) if stack.rules is model.layers else ("encoder", "layers", i),
            f"the rule is for layers that are none of the {stack.shape.n_layers}"
            if rule.at
            else f"the rule is for none of the {stack.shape.n_layers} layers",
            f"take it out, or let it apply within {stack.shape.n_layers}",
        )
        for stack in model.stacks
        for i, rule in enumerate(stack.rules)
        if not any(map(rule.applies, range(stack.shape.n_layers))) or max(rule.at or [0]) > stack.shape.n_layers
    ]

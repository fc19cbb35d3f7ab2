"""From the baseline, its named variants and its axes to one plain settings tree a variant.

A tree has the sections `model`, `train`, `data` and `profile`. Changes are dotted paths: `train.lr` reaches a section,
everything else the model (`block`, `feed_forward.n_experts`). A change of a choice by the same name merges deep;
another name replaces the choice. Shorthands (a choice's bare name, one number for every dropout) are written in full
on the way, so that a change of one setting keeps the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_origin

from ablate import catalogue, presets, registry
from ablate.choice import Faults, Path, SettingsError, unknown
from ablate.settings import Dropout, ModelSettings, OptimizerSettings, TrainSettings

Tree = dict[str, Any]
PRESET = "preset"
SECTIONS = ("train", "data", "profile")
BUDGETS = frozenset({"steps", "tokens"})
_MODEL = (*ModelSettings.model_fields, PRESET)


def baseline_tree(file: Mapping[str, Any]) -> Tree:
    """The baseline over its preset over the defaults, with the other sections beside it."""
    tree: Tree = {"model": {}, "train": {}, "data": {"name": "text"}, "profile": {}}
    tree = overlay(tree, presets.settings("_default"))
    tree = overlay(tree, {section: file[section] for section in SECTIONS if section in file})
    return overlay(tree, file.get("baseline") or {})


def overlay(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    """A new tree with the changes in it: a preset first, then whole slots, then single settings. Raises `Faults`."""
    for key, value in sorted(changes.items(), key=lambda change: (change[0] != PRESET, change[0].count("."))):
        tree = (
            overlay(tree, _preset(value))
            if key == PRESET
            else _put(_freed(tree, key, value), full_path(key), value, ())
        )
    return tree


def _freed(tree: Tree, key: str, value: Any) -> Tree:
    """The tree without the length of training that a change gives in another way (`tokens` in place of `steps`)."""
    named = set(value) if key == "train" and isinstance(value, Mapping) else {key.removeprefix("train.")}
    given = named & BUDGETS if key.startswith("train") else set()
    if len(given) != 1:
        return tree
    return {**tree, "train": {k: v for k, v in tree["train"].items() if k not in BUDGETS - given}}


def _preset(name: Any) -> dict[str, Any]:
    if not isinstance(name, str) or name not in catalogue.names(catalogue.PRESETS):
        raise Faults([unknown(str(name), catalogue.names(catalogue.PRESETS), "preset", (PRESET,))])
    return presets.settings(name)


def full_path(dotted: str) -> Path:
    """The place in a tree that a dotted path means. Raises `Faults` where its first word is no setting."""
    parts = tuple(dotted.split("."))
    if len(parts) > 1 and _is_list(parts[0]):
        raise Faults([SettingsError((dotted,), f"'{dotted}': a list has no dotted path", f"give all of {parts[0]}")])
    inner = parts[0] == "train" and len(parts) > 1 and parts[1] not in TrainSettings.model_fields
    word = parts[1] if inner else parts[0]
    if parts[0] in SECTIONS and (word in SECTIONS or not list(_homes(word))):
        return parts
    if parts[0] in _MODEL:
        return ("model", *parts)
    fault = unknown(word, (*_MODEL, *SECTIONS), "setting", (dotted,))
    if homes := list(_homes(word)):
        fault.cure = f"write {' or '.join(homes)}"
    raise Faults([fault])


def _is_list(word: str) -> bool:
    field = ModelSettings.model_fields.get(word)
    return field is not None and get_origin(field.annotation) is list


def _homes(word: str) -> Iterator[str]:
    """The full paths of a setting whose section or slot was left out."""
    if word in TrainSettings.model_fields:
        yield f"train.{word}"
    elif word in OptimizerSettings.model_fields:
        yield f"train.optimizer.{word}"
    for slot in registry.SLOTS:
        if any(word in registry.config_class(slot, name).model_fields for name in registry.names(slot)):
            yield f"{slot}.{word}"


def _put(node: Any, path: Path, value: Any, above: Path) -> Any:
    """`node` with `value` merged in at `path`; `above` is where `node` itself stands."""
    if not path:
        return _merged(node, value, above)
    whole = _in_full(node, above)
    inner = whole if isinstance(whole, Mapping) else {}
    return {**inner, path[0]: _put(inner.get(str(path[0])), path[1:], value, (*above, path[0]))}


def _merged(old: Any, new: Any, path: Path) -> Any:
    old, new = _in_full(old, path), _in_full(new, path)
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    if _has_name(path) and new.get("name", old.get("name")) != old.get("name"):
        return dict(new)
    return {**old, **{key: _merged(old.get(key), value, (*path, key)) for key, value in new.items()}}


def _in_full(value: Any, path: Path) -> Any:
    """A shorthand as the mapping that it stands for."""
    if isinstance(value, str) and _has_name(path):
        return {"name": value}
    if isinstance(value, int | float) and not isinstance(value, bool) and path == ("model", "dropout"):
        return dict.fromkeys(Dropout.model_fields, value)
    return value


def _has_name(path: Path) -> bool:
    return _is_slot(path) or path == ("train", "optimizer")


def _is_slot(path: Path) -> bool:
    """Whether a choice stands at `path` of a tree."""
    return path == ("data",) or (len(path) == 2 and path[0] == "model" and path[1] in registry.SLOTS)


class Axes:
    """What varies: dotted paths, each with its values."""

    def __init__(self, vary: Mapping[str, list[Any]], design: str) -> None:
        self.values = dict(vary)
        self.design = design

    def count(self) -> int:
        """Combinations, before anything is left out."""
        sizes = [len(values) for values in self.values.values()]
        return sum(sizes) if self.design == "one_at_a_time" else math.prod(sizes) if sizes else 0

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Every combination as path -> value; `one_at_a_time` moves one axis and leaves the others at the baseline."""
        if self.design == "one_at_a_time":
            yield from ({path: value} for path, values in self.values.items() for value in values)
        elif self.values:
            points = itertools.product(*self.values.values())
            yield from (dict(zip(self.values, point, strict=True)) for point in points)

    def trees(self, baseline: Tree) -> list[Tree]:
        """The baseline with each choice and preset on an axis: every choice that a combination can have."""
        whole = [path for path in self.values if path == PRESET or _is_slot(full_path(path))]
        return [baseline, *(overlay(baseline, {path: value}) for path in whole for value in self.values[path])]


def applicable(tree: Tree, combination: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
    """The tree with the combination in it, and the part of the combination that means something there.

    A setting that the choice in its slot does not have means nothing, and is left out.
    """
    inner = {path for path in combination if _slot_around(path)}
    tree = overlay(tree, {path: value for path, value in combination.items() if path not in inner})
    meant = {path: value for path, value in combination.items() if path not in inner or _has_setting(tree, path)}
    return overlay(tree, {path: value for path, value in meant.items() if path in inner}), meant


def _slot_around(dotted: str) -> Path | None:
    """The place of the choice that the setting belongs to, None where it belongs to none."""
    path = full_path(dotted)
    return next((path[:n] for n in range(1, len(path)) if _is_slot(path[:n])), None)


def _choice(tree: Tree, slot: Path) -> str | None:
    found = get(tree, (*slot, "name"))
    return found if isinstance(found, str) else None


def _has_setting(tree: Tree, dotted: str) -> bool:
    slot = _slot_around(dotted)
    name = _choice(tree, slot) if slot else None
    return slot is not None and name is not None and full_path(dotted)[len(slot)] in _settings_of(slot, name)


def _settings_of(slot: Path, choice: str) -> set[str]:
    return set(registry.config_class(str(slot[-1]), choice, slot[-1:]).model_fields) - {"name"}


def homeless(paths: Iterable[str], trees: list[Tree]) -> Iterator[SettingsError]:
    """The paths of settings that no choice in any of the trees has."""
    for dotted in paths:
        slot = _slot_around(dotted)
        if slot is None or any(_has_setting(tree, dotted) for tree in trees):
            continue
        choices = sorted({choice for tree in trees if (choice := _choice(tree, slot))})
        known = set().union(*(_settings_of(slot, choice) for choice in choices))
        word = str(full_path(dotted)[len(slot)])
        fault = unknown(word, known, f"setting of {slot[-1]} {' or '.join(choices)}", (dotted,))
        if elsewhere := [name for name in registry.names(str(slot[-1])) if word in _settings_of(slot, name)]:
            fault.cure = f"only {' and '.join(elsewhere)} would know it"
        yield fault


def key_of(path: Path, keys: Iterable[str]) -> Path:
    """Which of the dotted keys says what stands at `path`, and the rest of the path below it; () where none does."""
    if not path:
        return ()
    whole = (*_path(str(path[0])), *path[1:])
    near = [(at, key) for key in keys for at in [_path(key)] if at[: len(whole)] == whole[: len(at)]]
    if not near:
        return ()
    at, key = max(near, key=lambda each: (len(each[0]) <= len(whole), len(each[0])))
    return (key, *whole[len(at) :])


def _path(dotted: str) -> Path:
    parts = tuple(dotted.split("."))
    return parts if parts[0] in SECTIONS else ("model", *parts)


def get(tree: Any, path: Path) -> Any:
    """The value at `path`, None where there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def label(combination: Mapping[str, Any]) -> str:
    """The name of a combination: `block=post_norm,train.warmup_steps=0`."""
    return ",".join(f"{path}={text(value)}" for path, value in combination.items())


def text(value: Any) -> str:
    """A value as a name shows it: `gqa(n_kv_heads=2)` for a mapping."""
    if isinstance(value, Mapping):
        rest = ",".join(f"{key}={text(each)}" for key, each in value.items() if key != "name")
        return f"{value['name']}({rest})" if "name" in value else f"({rest})"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)

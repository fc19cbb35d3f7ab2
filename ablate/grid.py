"""From the baseline, its named variants and its axes to one plain settings tree a variant.

A tree has the sections `model`, `train`, `data` and `profile`, and remembers the preset and the scale that its model
starts from. Changes are dotted paths: `train.lr` reaches a section, everything else the model (`block`,
`feed_forward.n_experts`, `encoder.n_layers`). A change of a choice by the same name merges deep; another name replaces
the choice. Shorthands (a choice's bare name, one number for every dropout) are written in full on the way, so that a
change of one setting keeps the others.

What changes a tree goes in this order, whatever is written first: where the model starts (`preset`, or `hf`, a folder
with a published configuration), then its `scale`, then whole slots, then single settings. A model that starts anew
keeps nothing of the one before but its sizes; in a variant, a preset without a scale is as small as the baseline's.
A `scale` that is a number is a factor of the size that all else makes, whenever it is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from ablate import catalogue, presets, registry
from ablate.choice import Choice, Faults, Path, Settings, SettingsError, unknown
from ablate.fractional import Fraction
from ablate.settings import BUDGETS, Dropout, ModelSettings, OptimizerSettings, TrainSettings, VariantSettings

Tree = dict[str, Any]
PRESET, FOLDER, SCALE = STARTS = ("preset", "hf", "scale")
FACTOR = "factor"
"""Where a tree keeps a `scale` that is a number: of whatever model all else makes."""
SECTIONS = ("train", "data", "profile")
SIZES = ("d_model", "n_layers", "n_heads", "max_seq_len", "vocab_size")
"""What stays of a model where another preset is put in its place, unless that one says it."""
_MODEL = (*ModelSettings.model_fields, *STARTS)


def baseline_tree(file: Mapping[str, Any]) -> Tree:
    """The baseline over its preset over the defaults, with the other sections beside it."""
    tree: Tree = {"model": {}, "train": {}, "data": {"name": "text"}, "profile": {}}
    tree = overlay(tree, presets.settings("_default"))
    tree = overlay(tree, {section: file[section] for section in SECTIONS if section in file})
    return overlay(tree, file.get("baseline") or {})


def overlay(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    """A new tree with the changes in it: where the model starts, then whole slots, then single settings.

    Raises `Faults`.
    """
    start = {key: changes[key] for key in STARTS if key in changes}
    if SCALE in start:
        tree = _at_factor(tree, start[SCALE])
        start = {key: value for key, value in start.items() if key != SCALE or not is_number(value)}
    tree = _started(tree, start)
    rest = [(key, value) for key, value in changes.items() if key not in STARTS]
    for key, value in sorted(rest, key=lambda change: change[0].count(".")):
        tree = _put(_freed(tree, key, value), full_path(key), value, ())
    return tree


def is_number(value: Any) -> bool:
    """Whether a scale is a factor, and no word."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_factor(tree: Tree, scale: Any) -> Tree:
    """With a number as its factor; a word is a size of the preset's own, and no factor stays beside it."""
    tree = {key: value for key, value in tree.items() if key != FACTOR}
    if not is_number(scale):
        return tree
    if not 0 < scale < math.inf:
        message = f"'{SCALE}': a factor is more than 0 (it is {scale})"
        raise Faults([SettingsError((SCALE,), message, "write a number such as 0.5 or 2")])
    return {**tree, FACTOR: float(scale)}


def _freed(tree: Tree, key: str, value: Any) -> Tree:
    """The tree without the length of training that a change gives in another way (`tokens` in place of `steps`)."""
    named = set(value) if key == "train" and isinstance(value, Mapping) else {key.removeprefix("train.")}
    given = named & set(BUDGETS) if key.startswith("train") else set()
    if len(given) != 1:
        return tree
    return {**tree, "train": {k: v for k, v in tree["train"].items() if k not in set(BUDGETS) - given}}


def _started(tree: Tree, start: Mapping[str, Any]) -> Tree:
    """The tree whose model starts anew, from a preset or a folder, and in a scale; of the two the other one stays."""
    if FOLDER in start:
        return _from_folder(tree, start)
    if PRESET in start:
        tree = {**_replaced(tree, _lineage(start[PRESET])), PRESET: start[PRESET]}
    if start and (scale := start.get(SCALE, tree.get(SCALE))) is not None:
        return _scaled(tree, scale)
    return tree


def _from_folder(tree: Tree, start: Mapping[str, Any]) -> Tree:
    from ablate import hf

    folder = start[FOLDER]
    if len(start) > 1:
        message = f"'{FOLDER}' stands in place of '{PRESET}' and '{SCALE}'"
        raise Faults([SettingsError((FOLDER,), message, "take one of them out")])
    if not isinstance(folder, str):
        raise Faults(
            [SettingsError((FOLDER,), f"the path of a folder is needed, not {folder!r}", "write it in quotes")]
        )
    try:
        settings = hf.settings(folder)
    except Faults as faults:
        raise Faults(fault.below((FOLDER,)) for fault in faults.faults) from None
    return _replaced({key: value for key, value in tree.items() if key not in STARTS}, [settings])


def _replaced(tree: Tree, settings: list[dict[str, Any]]) -> Tree:
    """The tree with a whole architecture, laid out in several steps, in place of its own, of which the sizes stay."""
    sizes = {key: tree["model"][key] for key in SIZES if key in tree["model"]}
    tree = {**tree, "model": {**presets.settings("_default"), **sizes}}
    for step in settings:
        tree = overlay(tree, step)
    return tree


def _lineage(preset: Any) -> list[dict[str, Any]]:
    if not isinstance(preset, str) or preset not in catalogue.names(catalogue.PRESETS):
        raise Faults([unknown(str(preset), catalogue.names(catalogue.PRESETS), "preset", (PRESET,))])
    return [presets.settings(each) for each in presets.lineage(preset)]


def _scaled(tree: Tree, scale: Any) -> Tree:
    """The tree at a small size of its preset, with the vocabulary of the data.

    What the scale says of a choice is for the preset's own: another one that the tree has by now stays as it is.
    """
    if (preset := tree.get(PRESET)) is None:
        message = f"a {SCALE} is that of a {PRESET}, and there is none"
        raise Faults([SettingsError((SCALE,), message, f"give a {PRESET} beside it, or take it out")])
    if scale not in (known := presets.scales(preset)):
        fault = unknown(str(scale), known, f"{SCALE} of {PRESET} {preset}", (SCALE,))
        fault.cure = f"known: {', '.join(known)}"
        raise Faults([fault])
    own = _replaced({"model": {}}, _lineage(preset))
    tree = {**tree, SCALE: scale, "model": {key: v for key, v in tree["model"].items() if key != "vocab_size"}}
    for step in presets.scaled(preset, scale):
        tree = overlay(tree, {key: value for key, value in step.items() if _same_choice(tree, own, full_path(key))})
    return tree


def full_path(dotted: str) -> Path:
    """The place in a tree that a dotted path means. Raises `Faults` where its first word is no setting."""
    parts = tuple(dotted.split("."))
    above = [".".join(parts[:n]) for n in range(1, len(parts))]
    if listed := next((path for path in above if _is_list(_path(path))), None):
        raise Faults([SettingsError((dotted,), f"'{dotted}': a list has no dotted path", f"give all of {listed}")])
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


def _homes(word: str) -> Iterator[str]:
    """The full paths of a setting whose section, slot or group was left out."""
    if word in TrainSettings.model_fields:
        yield f"train.{word}"
    elif word in OptimizerSettings.model_fields:
        yield f"train.optimizer.{word}"
    for slot in registry.SLOTS:
        if any(word in registry.config_class(slot, name).model_fields for name in registry.names(slot)):
            yield f"{slot}.{word}"
    for group in ModelSettings.model_fields:
        kind = _settings_at(("model", group))
        if kind and not issubclass(kind, Choice) and word in kind.model_fields:
            yield f"{group}.{word}"


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
    if isinstance(value, int | float) and not isinstance(value, bool) and _settings_at(path) is Dropout:
        return dict.fromkeys(Dropout.model_fields, value)
    return value


def _has_name(path: Path) -> bool:
    kind = _settings_at(path)
    return kind is not None and "name" in kind.model_fields


def _is_slot(path: Path) -> bool:
    """Whether a choice stands at `path` of a tree."""
    kind = _settings_at(path)
    return kind is not None and issubclass(kind, Choice)


def _is_list(path: Path) -> bool:
    kind = _type_at(path)
    return any(get_origin(each) is list for each in (kind, *get_args(kind)))


def _settings_at(path: Path) -> type[Settings] | None:
    """The settings that stand at `path` of a tree; of a choice's, what all choices of its slot have."""
    return _settings_in(_type_at(path))


@cache
def _type_at(path: Path) -> Any:
    kind: Any = VariantSettings
    for word in path:
        settings = _settings_in(kind)
        field = settings.model_fields.get(str(word)) if settings else None
        kind = field.annotation if field else None
    return kind


def _settings_in(kind: Any) -> type[Settings] | None:
    if isinstance(kind, type):
        return kind if issubclass(kind, Settings) else None
    inner = () if get_origin(kind) is list else get_args(kind)
    return next((found for each in inner if (found := _settings_in(each))), None)


class Axes:
    """What varies: dotted paths, each with its values; `fraction` where only a part of all combinations is meant."""

    def __init__(self, vary: Mapping[str, list[Any]], design: str, fraction: Fraction | None = None) -> None:
        self.values = dict(vary)
        self.design = design
        self.fraction = fraction

    def count(self) -> int:
        """Combinations, before anything is left out."""
        sizes = [len(values) for values in self.values.values()]
        if self.fraction:
            return self.fraction.n_runs
        return sum(sizes) if self.design == "one_at_a_time" else math.prod(sizes) if sizes else 0

    def levels(self) -> Iterator[tuple[int | None, ...]]:
        """Every combination, as the number of each axis' value; `one_at_a_time` leaves all but one at the baseline."""
        sizes = [len(values) for values in self.values.values()]
        if self.fraction:
            yield from self.fraction.runs()
        elif self.design == "one_at_a_time":
            places = ((axis, level) for axis, size in enumerate(sizes) for level in range(size))
            yield from (tuple(level if i == axis else None for i in range(len(sizes))) for axis, level in places)
        elif sizes:
            yield from itertools.product(*map(range, sizes))

    def combination(self, levels: Sequence[int | None]) -> dict[str, Any]:
        """One as path -> value, without the axes that it leaves at the baseline."""
        pairs = zip(self.values.items(), levels, strict=True)
        return {path: values[level] for (path, values), level in pairs if level is not None}

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Every combination as path -> value."""
        return map(self.combination, self.levels())

    def trees(self, baseline: Tree) -> list[Tree]:
        """The baseline with each choice and preset on an axis: every choice that a combination can have."""
        whole = [path for path in self.values if path in (PRESET, FOLDER) or _is_slot(full_path(path))]
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
    """The name of the choice at `slot`; where nothing names it, that of the model's own, which it goes on from."""
    for place in (slot, ("model", slot[-1]), ("model", _slot_of(slot))):
        if isinstance(found := get(tree, (*place, "name")), str):
            return found
    return None


def _same_choice(tree: Tree, other: Tree, place: Path) -> bool:
    return not _is_slot(place) or _choice(tree, place) == _choice(other, place)


def _slot_of(path: Path) -> str:
    """The slot that the place of a choice is filled from."""
    kind = _settings_at(path)
    return next(slot for slot in (*registry.SLOTS, *registry.SOURCES) if registry.slot_base(slot) is kind)


def _has_setting(tree: Tree, dotted: str) -> bool:
    slot = _slot_around(dotted)
    name = _choice(tree, slot) if slot else None
    return slot is not None and name is not None and full_path(dotted)[len(slot)] in _settings_of(slot, name)


def _settings_of(slot: Path, choice: str) -> set[str]:
    return set(registry.config_class(_slot_of(slot), choice, slot[1:] or slot).model_fields) - {"name"}


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
        if elsewhere := [name for name in registry.names(_slot_of(slot)) if word in _settings_of(slot, name)]:
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


def varied(combinations: Sequence[Mapping[str, Any]]) -> set[str]:
    """The paths that not all of the combinations say the same of, as a name shows it."""
    paths = {path for each in combinations for path in each}
    return {path for path in paths if len({text(each[path]) if path in each else None for each in combinations}) > 1}


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

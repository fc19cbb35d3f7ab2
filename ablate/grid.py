"""From the baseline, its named variants and its axes to one plain settings tree a variant.

A tree has the sections `model`, `train`, `data` and `profile`. Changes are dotted paths: `train.lr` reaches a section, everything else the model
(`block`, `feed_forward.n_experts`). A change of a slot by the same choice's name merges deep; another name replaces the choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ablate import catalogue, presets, registry
from ablate.choice import Faults, Path, SettingsError, unknown

Tree = dict[str, Any]
SECTIONS = ("train", "data", "profile")


def baseline_tree(file: Mapping[str, Any]) -> Tree:
    """The baseline over its preset over the defaults, with the other sections beside it."""
    sections: Tree = {section: _named(file.get(section) or {}) for section in SECTIONS}
    if not sections["data"]:
        sections["data"] = {"name": "text"}
    start = overlay({"model": {}, **sections}, presets.settings("_default"))
    return overlay(start, file.get("baseline") or {})


def overlay(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    """A new tree with the changes in it: a preset first, then whole slots, then single settings."""
    for path, value in sorted(_targets(changes), key=lambda change: (change[0][1:] != ("preset",), len(change[0]))):
        if path == ("model", "preset"):
            tree = overlay(tree, _preset(value))
        else:
            tree = _put(tree, path, value, ())
    return tree


def _targets(changes: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    for key, value in changes.items():
        parts = tuple(key.split("."))
        yield (parts if parts[0] in SECTIONS else ("model", *parts)), value


def _preset(name: Any) -> dict[str, Any]:
    if not isinstance(name, str) or name not in catalogue.names(catalogue.PRESETS):
        raise Faults([unknown(str(name), catalogue.names(catalogue.PRESETS), "preset", ("preset",))])
    return presets.settings(name)


def _put(node: Any, path: Path, value: Any, above: Path) -> Any:
    """`node` with `value` merged in at `path`; `above` is where `node` itself stands."""
    if not path:
        return _merged(node, value, is_slot(above))
    inner = node if isinstance(node, Mapping) else _named(node) if is_slot(above) else {}
    key = path[0]
    return {**inner, key: _put(inner.get(str(key)), path[1:], value, (*above, key))}


def is_slot(path: Path) -> bool:
    """Whether a choice stands at `path` of a tree."""
    return path == ("data",) or (len(path) == 2 and path[0] == "model" and path[1] in registry.SLOTS)


def _merged(old: Any, new: Any, slot: bool) -> Any:
    if slot:
        old, new = _named(old), _named(new)
        if isinstance(new, Mapping) and isinstance(old, Mapping) and new.get("name", old.get("name")) != old.get("name"):
            return dict(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value, False) for key, value in new.items()}}
    return new


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Axes:
    """What varies: dotted paths, each with its values."""

    def __init__(self, vary: Mapping[str, list[Any]], design: str) -> None:
        self.values = dict(vary)
        self.design = design

    def count(self) -> int:
        """Combinations, before anything is left out."""
        sizes = [len(values) for values in self.values.values()]
        if not sizes:
            return 0
        return sum(sizes) if self.design == "one_at_a_time" else _product(sizes)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Every combination as path -> value; `one_at_a_time` moves one axis and leaves the others at the baseline."""
        if not self.values:
            return
        if self.design == "one_at_a_time":
            yield from ({path: value} for path, values in self.values.items() for value in values)
        else:
            yield from (dict(zip(self.values, point, strict=True)) for point in itertools.product(*self.values.values()))


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def applicable(tree: Tree, combination: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
    """The tree with the combination in it, and the part of the combination that means something there.

    A setting that the choice in its slot does not have means nothing, and is left out.
    """
    whole = {path: value for path, value in combination.items() if not _inside_slot(path)}
    tree = overlay(tree, whole)
    inner = {p: v for p, v in combination.items() if _inside_slot(p) and _has_setting(tree, p)}
    return overlay(tree, inner), {path: combination[path] for path in combination if path in whole or path in inner}


def _inside_slot(path: str) -> bool:
    parts = full_path(path)
    return any(is_slot(parts[:n]) for n in range(1, len(parts)))


def _has_setting(tree: Tree, path: str) -> bool:
    parts = full_path(path)
    depth = next(n for n in range(1, len(parts)) if is_slot(parts[:n]))
    choice = get(tree, parts[:depth])
    name = choice.get("name") if isinstance(choice, Mapping) else None
    if not isinstance(name, str):
        return False
    return parts[depth] in registry.config_class(str(parts[depth - 1]), name, parts[:depth]).model_fields


def full_path(dotted: str) -> Path:
    """The place in a tree that a dotted path means."""
    parts = tuple(dotted.split("."))
    return parts if parts[0] in SECTIONS else ("model", *parts)


def get(tree: Any, path: Path) -> Any:
    """The value at `path`, None where there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def matches(tree: Tree, dotted: str, value: Any) -> bool:
    """Whether the (resolved) tree has `value` at the path; a choice's name or a part of its settings is enough."""
    path = full_path(dotted)
    found = get(tree, path)
    wanted = _named(value) if is_slot(path) else value
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return all(found.get(key) == each for key, each in wanted.items())
    return bool(found == _plain(wanted))


def _plain(value: Any) -> Any:
    """A count as the number it means, as settings hold it."""
    from ablate.choice import _whole

    return _whole(value) if isinstance(value, str) else value


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


def unknown_rules(tree: Tree, rules: list[dict[str, Any]]) -> Iterator[SettingsError]:
    """Paths in `exclude` whose setting does not exist."""
    for i, rule in enumerate(rules):
        for path in rule:
            section, *rest = full_path(path)
            if rest and rest[0] not in tree[str(section)]:
                yield unknown(str(rest[0]), tree[str(section)], "setting", ("exclude", i, path))


def never_applicable(tree: Tree, axes: Axes, others: list[Tree]) -> Iterator[SettingsError]:
    """Axes whose setting exists in no choice of the grid."""
    for path in axes.values:
        if not _inside_slot(path):
            continue
        parts = full_path(path)
        depth = next(n for n in range(1, len(parts)) if is_slot(parts[:n]))
        slot = str(parts[depth - 1])
        trees = [tree, *others, *(overlay(tree, {slot: value}) for value in axes.values.get(slot, []))]
        if not any(_has_setting(each, path) for each in trees):
            names = sorted({str(get(each, (*parts[:depth], "name"))) for each in trees})
            known = {f for n in names for f in registry.config_class(slot, n).model_fields} - {"name"}
            fault = unknown(str(parts[depth]), known, f"setting of {slot} {' or '.join(names)}", ("vary", path))
            yield fault

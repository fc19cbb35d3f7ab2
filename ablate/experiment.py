"""The experiment file: read, checked and expanded into variants and trials, before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as File
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ablate import document, grid, registry
from ablate.choice import Faults, Path, Settings, SettingsError, _whole, validated
from ablate.data import Corpus
from ablate.document import Document, FileFaults, told
from ablate.settings import VariantSettings, resolved, typed

BASELINE = "baseline"
_LATER = ("match", "tune", "claims")
_BUDGETS = (("train", "steps"), ("train", "tokens"))


def _seeds(value: object) -> object:
    """A count means the seeds 0, 1, …"""
    count = _whole(value) if isinstance(value, str | int | float) else None
    return list(range(count)) if isinstance(count, int) and 0 < count <= 1000 else value


class ExperimentFile(Settings):
    """The file's own keys; what stands below them is checked where it is used."""

    name: str = Field(pattern=r"^\w[\w.\-]{0,99}$", description="of the experiment and its folder of results")
    question: str | None = Field(None, description="what the experiment is to answer")
    baseline: dict[str, Any] = Field({}, description="the model that everything is compared with")
    variants: dict[str, dict[str, Any]] = Field({}, description="named changes to the baseline")
    vary: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field({}, description="axes: paths with values")
    design: Literal["product", "one_at_a_time"] = Field("product", description="how axes combine")
    exclude: list[dict[str, Any]] = Field([], description="combinations that are left out")
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], BeforeValidator(_seeds), Field(min_length=1)] = Field(
        [0], description="a list, or a count"
    )
    data: dict[str, Any] | str = Field("text", description="where tokens come from")
    train: dict[str, Any] = Field(description="the recipe")
    profile: dict[str, Any] = Field({}, description="what is measured beside training")


@dataclass(frozen=True)
class Variant:
    """One complete, named configuration. `changes` are its differences to the baseline, by dotted path."""

    name: str
    settings: VariantSettings
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        """Whether this is what the others are compared with."""
        return self.name == BASELINE

    @property
    def groups(self) -> list[str]:
        """The settings that it changes, from afar: slots and other settings of the model, paths of the rest."""
        return sorted({path if path.split(".")[0] in grid.SECTIONS else path.split(".")[0] for path in self.changes})

    @cached_property
    def canonical(self) -> str:
        """Everything that determines the numbers but the seed, as text."""
        return _json(self.settings.model_dump(mode="json"))


@dataclass(frozen=True)
class Invalid:
    """A combination that cannot work, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Trial:
    """One variant with one seed."""

    variant: Variant
    seed: int
    trial_id: str
    profile_id: str


@dataclass(frozen=True)
class Experiment:
    """A checked experiment: what would run, and what was left out."""

    name: str
    question: str | None
    file: str
    variants: list[Variant]
    invalid: list[Invalid]
    counts: dict[str, int]
    seeds: list[int]
    source: dict[str, Any]

    @classmethod
    def from_file(cls, path: str | File, sets: Sequence[str] = (), max_trials: int = 1000) -> Experiment:
        """Read, check and expand a file, with `key=value` settings on top. Raises `FileFaults`."""
        found = document.read(path)
        try:
            for change in sets:
                _set(found.data, change)
            return _expand(found, max_trials)
        except Faults as faults:
            raise told(found, faults) from None

    @property
    def baseline(self) -> Variant:
        """The variant that the others are compared with."""
        return self.variants[0]

    @cached_property
    def corpora(self) -> dict[str, Corpus]:
        """The tokens of each data setting in use. Raises `FileFaults` where they cannot be had."""
        found: dict[str, Corpus] = {}
        for variant in self.variants:
            key = _json(variant.settings.data.settings())
            if key not in found:
                try:
                    found[key] = variant.settings.data.corpus()
                except SettingsError as fault:
                    raise told(Document(self.file, {}, {}), Faults([fault.below(("data",))])) from None
        return found

    def corpus(self, variant: Variant) -> Corpus:
        """The tokens of a variant."""
        return self.corpora[_json(variant.settings.data.settings())]

    def plug_ins(self) -> list[str]:
        """The user's own code that the experiment names."""
        trees = (variant.settings.model_dump(mode="json") for variant in self.variants)
        return sorted({name for tree in trees for name in _foreign_names(tree)})

    def trials(self, device: str, threads: int) -> list[Trial]:
        """Every variant with every seed, seeds outermost, as they run on this kind of device."""
        return [self._trial(variant, seed, device, threads) for seed in self.seeds for variant in self.variants]

    def _trial(self, variant: Variant, seed: int, device: str, threads: int) -> Trial:
        corpus = self.corpus(variant)
        tree = variant.settings.model_dump(mode="json")
        profile = tree.pop("profile")
        own_threads = tree["train"].pop("threads")
        tree["train"].pop("max_seconds")
        tree["data"] = [corpus.sha256, corpus.vocab_size]
        sources = [registry.source_sha256(name) for name in _foreign_names(tree["model"])]
        identity = [tree, seed, device, own_threads or threads, sources]
        return Trial(variant, seed, _hash(identity), _hash(profile))


def _hash(value: Any) -> str:
    return hashlib.sha256(_json(value).encode()).hexdigest()[:16]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _foreign_names(node: Any) -> Iterator[str]:
    """Every choice of the user's own in a plain settings tree."""
    if isinstance(node, Mapping):
        name = node.get("name")
        if isinstance(name, str) and registry.is_foreign(name):
            yield name
        for value in node.values():
            yield from _foreign_names(value)
    elif isinstance(node, list):
        for value in node:
            yield from _foreign_names(value)


def _set(data: dict[str, Any], change: str) -> None:
    """Put one `key=value` of the command line into the file's data; one way to give the length replaces the other."""
    key, equals, text = change.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise FileFaults([f"--set {change}: not of the form key=value"])
    if path[0] not in ExperimentFile.model_fields and path[0] not in _LATER:
        path = ("baseline", *path)
    node: dict[str, Any] = data
    for part in path[:-1]:
        inner = node.get(part)
        node[part] = {"name": inner} if isinstance(inner, str) else dict(inner) if isinstance(inner, dict) else {}
        node = node[part]
    node[path[-1]] = document.scalar(text)
    if path in _BUDGETS:
        for other in set(_BUDGETS) - {path}:
            node.pop(other[1], None)


def _expand(found: Document, max_trials: int) -> Experiment:
    for key in _LATER:
        if key in found.data:
            raise Faults([SettingsError((key,), f"'{key}' is not built yet", "leave it out")])
    raw = {"name": File(found.file).stem, **found.data}
    file = validated(ExperimentFile, raw)
    _check_names(file)
    return _Expansion(file, found, max_trials).experiment()


def _check_names(file: ExperimentFile) -> None:
    for name in file.variants:
        if name == BASELINE or not name.strip() or not name.isprintable():
            message = f"'{name}' cannot be the name of a variant"
            raise Faults([SettingsError(("variants", name), message, "choose another name")])
    if len(set(file.seeds)) < len(file.seeds):
        raise Faults([SettingsError(("seeds",), "a seed is given twice", "give each seed once")])


class _Expansion:
    """The way from a file to its variants, counting what falls out."""

    def __init__(self, file: ExperimentFile, found: Document, max_trials: int) -> None:
        self.file, self.found, self.max_trials = file, found, max_trials
        self.axes = grid.Axes(file.vary, file.design)
        self.invalid: list[Invalid] = []
        self.excluded = self.merged = 0
        self.by_canonical: dict[str, Variant] = {}
        self.vocab_sizes: dict[str, int] = {}

    def experiment(self) -> Experiment:
        self._check_size()
        self.base_tree = self._placed((BASELINE,), lambda: grid.baseline_tree(self.found.data))
        self.baseline = self._whole(BASELINE, self.base_tree, (BASELINE,))
        self.plain_baseline = self.baseline.settings.model_dump(mode="json")
        self.by_canonical[self.baseline.canonical] = self.baseline
        named = list(self._named())
        self._check_axes([tree for _, tree in named])
        for name, tree in named:
            self._keep(self._whole(name, tree, ("variants", name)))
        raw = len(named) + self.axes.count() + self._combinations()
        variants = list(self.by_canonical.values())
        counts = {
            "raw": raw,
            "excluded": self.excluded,
            "invalid": len(self.invalid),
            "merged": self.merged,
            "planned": len(variants),
            "trials": len(variants) * len(self.file.seeds),
        }
        return Experiment(
            self.file.name,
            self.file.question,
            self.found.file,
            variants,
            self.invalid,
            counts,
            self.file.seeds,
            self.found.data,
        )

    def _check_size(self) -> None:
        if (raw := self.axes.count() + len(self.file.variants)) > self.max_trials:
            message = f"{raw} combinations are more than {self.max_trials}"
            raise Faults([SettingsError(("vary",), message, f"take values out, or give --max-trials {raw}")])

    def _named(self) -> Iterator[tuple[str, grid.Tree]]:
        for name, changes in self.file.variants.items():
            yield name, self._placed(("variants", name), lambda changes=changes: grid.overlay(self.base_tree, changes))

    def _check_axes(self, trees: list[grid.Tree]) -> None:
        for path, values in self.axes.values.items():
            for i, value in enumerate(values):
                if value is None and grid.is_slot(grid.full_path(path)):
                    where: Path = ("vary", path, i)
                    raise Faults([SettingsError(where, f"null is no {path}", "write its name, for example 'none'")])
        faults = list(grid.never_applicable(self.base_tree, self.axes, trees))
        if faults := faults + list(grid.unknown_rules(self.plain_baseline, self.file.exclude)):
            raise Faults(faults)

    def _combinations(self) -> int:
        """Keep what the axes give. Returns 1 for the baseline where no combination equals it, else 0."""
        met = False
        for combination in self.axes.combinations():
            tree, meaning = self._placed(("vary",), lambda c=combination: grid.applicable(self.base_tree, c))
            differing = {p: v for p, v in meaning.items() if not grid.matches(self.plain_baseline, p, v)}
            name = grid.label(differing) or BASELINE
            settings = self._axis_faults(tree)
            if self._is_excluded(settings):
                continue
            try:
                variant = self._variant(name, self._resolved(settings))
            except Faults as faults:
                self.invalid.append(Invalid(name, "; ".join(fault.message for fault in faults.faults)))
                continue
            if variant.canonical == self.baseline.canonical and not met:
                met = True
                continue
            self._keep(variant)
        return 0 if met else 1

    def _is_excluded(self, settings: VariantSettings) -> bool:
        tree = settings.model_dump(mode="json")
        rules = (rule for rule in self.file.exclude if rule)
        hit = any(all(grid.matches(tree, path, value) for path, value in rule.items()) for rule in rules)
        self.excluded += hit
        return hit

    def _resolved(self, settings: VariantSettings) -> VariantSettings:
        """With every default filled in, the size of the vocabulary from the data among them."""
        key = _json(settings.data.settings())
        if key not in self.vocab_sizes:
            try:
                self.vocab_sizes[key] = settings.data.corpus().vocab_size
            except SettingsError as fault:
                raise Faults([fault.below(("data",))]) from None
        return resolved(settings, self.vocab_sizes[key])

    def _keep(self, variant: Variant) -> None:
        if variant.canonical in self.by_canonical:
            self.merged += 1
        else:
            self.by_canonical[variant.canonical] = variant

    def _whole(self, name: str, tree: grid.Tree, place: Path) -> Variant:
        """A variant that must be right by itself: anything wrong refuses the file."""
        return self._placed(place, lambda: self._variant(name, self._resolved(typed(tree))))

    def _variant(self, name: str, settings: VariantSettings) -> Variant:
        if name == BASELINE:
            return Variant(name, settings)
        return Variant(name, settings, dict(differences(self.plain_baseline, settings.model_dump(mode="json"))))

    def _axis_faults(self, tree: grid.Tree) -> VariantSettings:
        """Typed settings of a combination; a value wrong by itself refuses the file, at the axis that holds it."""
        try:
            return typed(tree)
        except Faults as faults:
            raise Faults(SettingsError(self._axis_of(f.path), f.message, f.cure) for f in faults.faults) from None

    def _axis_of(self, path: Path) -> Path:
        whole = path if path and path[0] in grid.SECTIONS else ("model", *path)
        for axis in self.axes.values:
            at = grid.full_path(axis)
            if at == whole[: len(at)] or whole == at[: len(whole)]:
                return ("vary", axis)
        return ("vary",)

    def _placed(self, place: Path, make: Any) -> Any:
        """What `make` gives; its faults, told at the place in the file that they come from."""
        try:
            return make()
        except Faults as faults:
            raise Faults(SettingsError(self._place_of(place, f.path), f.message, f.cure) for f in faults.faults) from None

    def _place_of(self, place: Path, path: Path) -> Path:
        """Below the variant where it says so itself, else in the section or baseline that it comes from."""
        dotted = (*place, ".".join(map(str, path)))
        candidates = [(*place, *path), dotted]
        candidates += [path] if path and path[0] in grid.SECTIONS else [(BASELINE, *path)]
        exact = [c for c in candidates if c in self.found.marks]
        near = [c for c in candidates if len(c) > len(place) and c[: len(place) + 1] in self.found.marks]
        return (exact or near or [place if place in self.found.marks else path])[0]


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of the plain tree `new` that are not in `old`, by dotted path; a choice stands for its name."""
    if isinstance(new, Mapping):
        for key, value in new.items():
            inner = path if key == "name" and path else f"{path}.{key}".lstrip(".")
            inner = "" if (not path and key == "model") else inner
            before = old.get(key) if isinstance(old, Mapping) else None
            yield from differences(before, value, inner)
    elif new != old and not (new is None):
        yield path, new if not isinstance(new, list) else json.loads(_json(new))

"""From an experiment file to its variants: checked, expanded, and counted where they fall out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ablate import budget, experiment_file, grid
from ablate.choice import Faults, Path, SettingsError
from ablate.claims import Claim, read_all
from ablate.data import Corpus
from ablate.design import FRACTIONAL, ONE_AT_A_TIME, Axis, Cell, Design, check_fraction, fraction_of
from ablate.document import Document, printable
from ablate.experiment_file import ExperimentFile, refusal
from ablate.settings import VariantSettings, resolved, typed
from ablate.sizes import grown, sized
from ablate.variant import BASELINE, Invalid, Variant, canonical_json, differences, foreign_names

T = TypeVar("T")


@dataclass(frozen=True)
class Expanded:
    """What a file comes to. `same` are names that mean another's variant."""

    file: ExperimentFile
    claims: list[Claim]
    variants: list[Variant]
    invalid: list[Invalid]
    same: dict[str, str]
    counts: dict[str, int]
    design: Design | None


def expand(found: Document, max_trials: int) -> Expanded:
    """Check a file and expand it. Raises `Faults`."""
    return _Expansion(experiment_file.read(found), found, max_trials).expanded()


@dataclass(frozen=True)
class _Point:
    """A combination: the name by its differences to the baseline, what it says, and what it comes to.

    Points that have a `key` in common are the same. Named variants stand among them as saying nothing.
    """

    name: str
    meant: Mapping[str, Any]
    key: str
    found: Variant | Invalid


class _Expansion:
    """The way from a file to its variants, counting what falls out."""

    def __init__(self, file: ExperimentFile, found: Document, max_trials: int) -> None:
        self.file, self.found, self.max_trials = file, found, max_trials
        self.no_fraction: Faults | None = None
        self.axes = self._axes()
        self.claims = read_all(each.model_dump() for each in file.claims)
        self.invalid: list[Invalid] = []
        self.same: dict[str, str] = {}
        self.excluded = self.merged = self.equal_to_baseline = 0
        self.by_canonical: dict[str, Variant] = {}
        self.corpora: dict[str, Corpus] = {}
        self.differs: dict[tuple[str, int], bool] = {}

    def _axes(self) -> grid.Axes:
        """How they combine; where they have no such fraction, each alone, to be checked before that is told."""
        try:
            fraction = fraction_of(self.file.design, self.file.vary)
        except Faults as faults:
            self.no_fraction = faults
            return grid.Axes(self.file.vary, ONE_AT_A_TIME)
        return grid.Axes(self.file.vary, FRACTIONAL if fraction else str(self.file.design), fraction)

    def _check_fraction(self) -> None:
        """Axes that are none, and values that are wrong by themselves, are told of before their number is. Raises
        `Faults`.
        """
        if self.no_fraction:
            for combination in self.axes.combinations():
                self._point(combination)
            raise self.no_fraction

    def expanded(self) -> Expanded:
        """The whole way."""
        self._check_size()
        self.base_tree = self._placed((BASELINE,), lambda: grid.baseline_tree(self.found.data))
        self.written = self._placed((BASELINE,), lambda: sized(self.base_tree)).model_dump(mode="json")
        self.baseline = self._whole(BASELINE, self.base_tree, (BASELINE,))
        self.by_canonical[self.baseline.canonical] = self.baseline
        named = {name: self._named(name, changes) for name, changes in self.file.variants.items()}
        self._check_paths(list(named.values()))
        for name, tree in named.items():
            self._keep(self._whole(name, tree, ("variants", name)))
        self._check_fraction()
        points = [self._point(combination) for combination in self.axes.combinations()]
        self._settle([point for point in points if point])
        variants = list(self.by_canonical.values())
        design = self._design(points)
        return Expanded(self.file, self.claims, variants, self.invalid, self.same, self._counts(), design)

    def _design(self, points: Sequence[_Point | None]) -> Design | None:
        """What stands at each combination, once all have their names; None where nothing varies."""
        axes = [
            Axis(path, values, [grid.text(each) for each in values], self._reference(path, values))
            for path, values in self.file.vary.items()
        ]
        cells = [self._cell(levels, point) for levels, point in zip(self.axes.levels(), points, strict=True)]
        design = Design(self.axes.design, axes, cells, self.axes.fraction)
        check_fraction(design)
        return design if axes else None

    def _reference(self, path: str, values: Sequence[Any]) -> int:
        """The baseline's own value where it is among them, else the first, as always in a fraction."""
        if self.axes.fraction:
            return 0
        return next((i for i, value in enumerate(values) if not self._differs(path, value)), 0)

    def _cell(self, levels: tuple[int | None, ...], point: _Point | None) -> Cell:
        if point is None:
            return Cell(levels, missing="excluded")
        idle = self._idle(levels, point)
        if isinstance(point.found, Invalid):
            return Cell(levels, idle, missing="invalid")
        return Cell(levels, idle, self.by_canonical[point.key].name)

    def _idle(self, levels: tuple[int | None, ...], point: _Point) -> tuple[int, ...]:
        """Axes that mean nothing in a combination; in a run of a fraction also those whose other value is the same."""
        varied = [
            (i, path) for i, (path, level) in enumerate(zip(self.file.vary, levels, strict=True)) if level is not None
        ]
        idle = tuple(i for i, path in varied if path not in point.meant)
        return (
            idle if idle or not self.axes.fraction else tuple(i for i, _ in varied if self._is_same(levels, i, point))
        )

    def _is_same(self, levels: tuple[int | None, ...], axis: int, point: _Point) -> bool:
        other = self.axes.combination([1 - (level or 0) if i == axis else level for i, level in enumerate(levels)])
        try:
            tree = grid.applicable(self.base_tree, other)[0]
            settings = sized(tree)
            return variant_of("", tree, settings, self._corpus(settings), self.written).canonical == point.key
        except Faults:
            return False

    def _counts(self) -> dict[str, int]:
        """Raw counts the baseline only where nothing equals it; what equals it first is the baseline, not merged."""
        planned = len(self.by_canonical)
        return {
            "raw": len(self.file.variants) + self.axes.count() + (0 if self.equal_to_baseline else 1),
            "excluded": self.excluded,
            "invalid": len(self.invalid),
            "merged": self.merged,
            "planned": planned,
            "trials": planned * len(self.file.seeds),
        }

    def _check_size(self) -> None:
        if (raw := self.axes.count() + len(self.file.variants)) > self.max_trials:
            message = f"{raw} combinations are more than {self.max_trials}"
            raise refusal(("vary",), message, f"take values out, or give --max-trials {raw}")

    def _named(self, name: str, changes: dict[str, Any]) -> grid.Tree:
        return self._placed(("variants", name), lambda: grid.overlay(self.base_tree, changes))

    def _check_paths(self, named: list[grid.Tree]) -> None:
        """Axes and exclusions name settings that exist, and exclusions values that could be."""
        trees = [*self._placed(("vary",), lambda: self.axes.trees(self.base_tree)), *named]
        self._placed(("vary",), lambda: _none(grid.homeless(self.axes.values, trees)))
        for factor in filter(grid.is_number, self.axes.values.get(grid.SCALE, [])):
            alone = {grid.SCALE: factor}
            self._placed(("vary",), partial(self._sized_with, alone), alone)
        for i, rule in enumerate(self.file.exclude):
            self._placed(("exclude", i), partial(_none, grid.homeless(rule, trees)))
            self._placed(("exclude", i), partial(self._sized_with, rule))

    def _sized_with(self, changes: Mapping[str, Any]) -> VariantSettings:
        return sized(grid.applicable(self.base_tree, changes)[0])

    def _point(self, combination: Mapping[str, Any]) -> _Point | None:
        """What a combination comes to, None where it is excluded. A value wrong by itself refuses the file."""
        tree, meant = self._placed(("vary",), lambda: grid.applicable(self.base_tree, combination), combination)
        settings = self._placed(("vary",), lambda: typed(tree), combination)
        corpus = self._placed(("vary",), lambda: self._corpus(settings), combination)
        name = self._name(meant, set())
        try:
            variant = self._variant(name, tree, grown(settings, tree), corpus)
        except Faults as faults:
            invalid = Invalid(name, "; ".join(fault.message for fault in faults.faults))
            return None if self._is_excluded(tree) else _Point(name, meant, settings.model_dump_json(), invalid)
        if variant.canonical != self.baseline.canonical and self._is_excluded(tree):
            return None
        return _Point(name, meant, variant.canonical, variant)

    def _settle(self, points: list[_Point]) -> None:
        """Keep the variants, list what cannot work, each under a name of its own."""
        namesakes: dict[str, list[_Point]] = {}
        for known in self.by_canonical.values():
            namesakes[known.name] = [_Point(known.name, {}, known.canonical, known)]
        for point in points:
            namesakes.setdefault(point.name, []).append(point)
        besides = {name: _besides(group) for name, group in namesakes.items()}
        for point in points:
            told = besides[point.name][type(point.found)]
            found = replace(point.found, name=self._name(point.meant, told)) if told else point.found
            if isinstance(found, Invalid):
                self.invalid.append(found)
            else:
                self._keep(found)

    def _name(self, meant: Mapping[str, Any], told: set[str]) -> str:
        """The differences to the baseline, and what is to be told besides.

        A value can be no difference to the baseline and still matter elsewhere: where it meant nothing there.
        """
        return grid.label({p: value for p, value in meant.items() if p in told or self._differs(p, value)}) or BASELINE

    def _differs(self, path: str, value: Any) -> bool:
        key = (path, id(value))
        if key not in self.differs:
            self.differs[key] = not self._unchanged(self.base_tree, {path: value})
        return self.differs[key]

    def _is_excluded(self, tree: grid.Tree) -> bool:
        hit = any(self._unchanged(tree, _besides_start(tree, rule)) for rule in self.file.exclude)
        self.excluded += hit
        return hit

    def _unchanged(self, tree: grid.Tree, changes: Mapping[str, Any]) -> bool:
        """Whether the tree already says what the changes say, in whatever words."""
        try:
            return self._meaning(tree) == self._meaning(grid.overlay(tree, changes))
        except Faults:
            return False

    def _meaning(self, tree: grid.Tree) -> VariantSettings:
        """With every default filled in where that goes."""
        settings = sized(tree)
        try:
            return self._resolved(settings, self._corpus(settings))
        except Faults:
            return settings

    def _corpus(self, settings: VariantSettings) -> Corpus:
        key = canonical_json(settings.data.settings())
        if key not in self.corpora:
            self.corpora[key] = answered(settings.data.settings(), lambda: _corpus(settings))
        return self.corpora[key]

    def _resolved(self, settings: VariantSettings, corpus: Corpus) -> VariantSettings:
        """With every default filled in, the size of the vocabulary from the data among them."""
        return whole(settings, corpus)

    def _keep(self, variant: Variant) -> None:
        known = self.by_canonical.get(variant.canonical)
        if known is None:
            if variant.name in {each.name for each in self.by_canonical.values()}:
                place = ("variants", variant.name) if variant.name in self.file.variants else ("vary",)
                raise refusal(place, f"two different variants are called '{variant.name}'", "choose another name")
            self.by_canonical[variant.canonical] = variant
            return
        if known is self.baseline:
            self.equal_to_baseline += 1
        if known is not self.baseline or self.equal_to_baseline > 1:
            self.merged += 1
        if variant.name != known.name:
            self.same[variant.name] = known.name

    def _whole(self, name: str, tree: grid.Tree, place: Path) -> Variant:
        """A variant that must be right by itself: anything wrong refuses the file."""

        def make() -> Variant:
            settings = sized(tree)
            return self._variant(name, tree, settings, self._corpus(settings))

        return self._placed(place, make)

    def _variant(self, name: str, tree: grid.Tree, settings: VariantSettings, corpus: Corpus) -> Variant:
        """How long one trains that is still to be matched is not known: `match` checks it."""
        is_final = name == BASELINE or "match" not in self.found.data
        return variant_of(name, tree, settings, corpus, self.written, is_final=is_final)

    def _placed(self, place: Path, make: Callable[[], T], combination: Mapping[str, Any] | None = None) -> T:
        """What `make` gives; its faults, told at the place in the file that they come from."""
        try:
            return make()
        except Faults as faults:
            raise Faults(
                SettingsError(self._place_of(place, fault.path, combination), fault.message, fault.cure)
                for fault in faults.faults
            ) from None

    def _place_of(self, place: Path, path: Path, combination: Mapping[str, Any] | None) -> Path:
        """Below `place` where it says so itself, for the baseline also in the section that it comes from."""
        node: Any = self.found.data
        for part in place:
            node = node[part] if isinstance(part, int) else node.get(part, {})
        if found := grid.key_of(path, node or {}):
            key, *rest = found
            return (*place, key, *self._index(str(key), combination), *rest)
        return path if place == (BASELINE,) and path[:1] in {(section,) for section in grid.SECTIONS} else place

    def _index(self, axis: str, combination: Mapping[str, Any] | None) -> Iterator[int]:
        """Which of an axis' values the combination has."""
        if combination and axis in combination:
            yield next(i for i, value in enumerate(self.axes.values[axis]) if value is combination[axis])


def _besides(namesakes: list[_Point]) -> dict[type, set[str]]:
    """The paths that have to be told besides, so that points with one name so far have a name each.

    What cannot work takes no short name away from what can.
    """
    varied = grid.varied([point.meant for point in namesakes])
    variants = {point.key for point in namesakes if isinstance(point.found, Variant)}
    keys = {point.key for point in namesakes}
    return {Variant: varied if len(variants) > 1 else set(), Invalid: varied if len(keys) > 1 else set()}


def _besides_start(tree: grid.Tree, rule: Mapping[str, Any]) -> dict[str, Any]:
    """The rule without what it says of where the model starts, if that is so: to start again would undo other axes."""
    return {key: value for key, value in rule.items() if key not in grid.STARTS or tree.get(key) != value}


def _corpus(settings: VariantSettings) -> Corpus:
    try:
        return settings.data.corpus()
    except SettingsError as fault:
        raise Faults([fault.below(("data",))]) from None
    except MemoryError:
        message = "the data do not fit into the memory that is free"
        raise refusal(("data",), message, "give fewer tokens, or free some memory") from None


def whole(settings: VariantSettings, corpus: Corpus, *, is_final: bool = True) -> VariantSettings:
    """With every default filled in, the size of the vocabulary from the data, the length of training as steps.

    A warm-up that is longer than that is a fault only if the model `is_final`. Raises `Faults`.
    """
    plain = settings.model_dump(mode="json")
    return answered(plain, lambda: budget.settled(resolved(settings, corpus.vocab_size), is_final=is_final))


def variant_of(
    name: str,
    tree: grid.Tree,
    settings: VariantSettings,
    corpus: Corpus,
    baseline: Mapping[str, Any],
    *,
    is_final: bool = True,
) -> Variant:
    """The variant that a tree, typed as `settings`, comes to; `baseline` are the baseline's as plain data."""
    written = settings.model_dump(mode="json")
    given = settings.model_dump(mode="json", exclude_defaults=True)
    changes = dict(differences(baseline, written, given))
    return Variant(name, whole(settings, corpus, is_final=is_final), corpus, changes, tree, recipe=settings.train)


def answered(plain: Mapping[str, Any], ask: Callable[[], T]) -> T:
    """What choices answer. A user's own among them may raise whatever it likes, also what would end the program."""
    try:
        return ask()
    except (Faults, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not (names := sorted(set(foreign_names(plain)))):
            raise
        reason = printable(f"{type(error).__name__}: {error}")
        raise Faults([SettingsError((), f"{' or '.join(names)} fails in these settings: {reason}")]) from error


def _none(faults: Iterable[SettingsError]) -> None:
    """Raise the faults, if any."""
    if found := list(faults):
        raise Faults(found)

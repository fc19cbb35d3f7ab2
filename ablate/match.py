"""Equal budgets: every variant brought to the baseline's size or cost by one of its settings, a whole number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from ablate import grid
from ablate.budget import check_warmup
from ablate.choice import Choice, Faults, Path, Settings, SettingsError, validated
from ablate.cost import cache_bytes_per_token, cost
from ablate.expansion import answered, variant_of, whole
from ablate.lattice import MOST, CrookedError, Point, mismatch, nearest
from ablate.settings import CROSS, MatchSettings, VariantSettings, resolved, typed
from ablate.sizes import sized
from ablate.variant import Invalid, Matched, Variant

if TYPE_CHECKING:
    from ablate.experiment import Experiment

COLUMNS = {
    "params": "params_total",
    "params_active": "params_active",
    "flops_per_token": "flops_per_token",
    "kv_cache_bytes_per_token": "kv_cache_bytes_per_token",
}
"""The budgets, each with the metric that it is about."""

_FIRST = "match by a size of the model, such as feed_forward.d_ff or n_layers"
S = TypeVar("S", bound=Settings)


def matched(experiment: Experiment, max_trials: int) -> Experiment:
    """The experiment in which every variant has the budgets that the file's `match` asks for. Raises `Faults`.

    Of several budgets each makes a variant of its own, `gqa@params`. A named variant that cannot be matched refuses the
    file; a combination that cannot becomes invalid.
    """
    budgets = [_Budget(place, asked, experiment) for place, asked in _asked(experiment.source)]
    if not budgets:
        return experiment
    others = experiment.variants[1:]
    if (many := 1 + len(budgets) * len(others)) > max_trials:
        cure = f"take some out, or give --max-trials {many}"
        raise Faults([SettingsError(("match",), f"{many} variants are more than {max_trials}", cure)])
    found = _Found(experiment, several=len(budgets) > 1)
    for budget in budgets:
        for variant in others:
            found.add(variant, budget)
    return found.experiment([budget.facts(found.names) for budget in budgets])


def reached(budget: str, settings: VariantSettings) -> float | None:
    """What a variant with resolved settings has of a budget: parameters, FLOPs or bytes; None where it is not told."""
    model, train = settings.model, settings.train
    if budget == "kv_cache_bytes_per_token":
        return cache_bytes_per_token(model, train.precision)
    found: float | None = getattr(cost(model, train.length), COLUMNS[budget])
    return found


def before(variant: Variant, budget: str, by: str) -> Point | None:
    """What a variant has of the setting `by` and of a budget; None where it has no such number, or does not tell."""
    number, own = grid.get(variant.plain, grid.full_path(by)), _reached(budget, variant, variant.settings)
    return Point(int(number), own) if _is_whole(number) and own is not None else None


def solution(variant: Variant, now: Point, budget: str, by: str, goal: float, tolerance: float) -> Point | None:
    """The number for the setting `by` that brings a variant to the goal, as `lattice.nearest` has it; what it has `now`
    stays where that is near enough. Raises `lattice.CrookedError`.
    """
    if mismatch(now.reached, goal) <= tolerance:
        return now
    return nearest(Probe(variant, budget, by).at, now, goal, tolerance, _wholes(variant.plain))


def _wholes(settings: Any) -> Iterator[int]:
    """Every whole number of the settings: what a number has to divide is one of them."""
    if isinstance(settings, Mapping):
        for each in settings.values():
            yield from _wholes(each)
    elif _is_whole(settings) and 0 < settings <= MOST:
        yield settings


def _reached(budget: str, variant: Variant, settings: VariantSettings) -> float | None:
    """Of a variant with other settings. Raises `Faults` where its own code fails."""
    return answered(variant.plain, partial(reached, budget, settings))


def _asked(source: Mapping[str, Any]) -> Iterator[tuple[Path, MatchSettings]]:
    """The budgets of a file, each with its place. Raises `Faults`."""
    if "match" not in source:
        return
    raw, seen = source["match"], set[str]()
    if raw == []:
        raise Faults([SettingsError(("match",), "it has no budget", "write one, as in {params: 0.01, by: n_layers}")])
    places: list[tuple[Path, Any]] = [(("match",), raw)]
    if isinstance(raw, list):
        places = [(("match", i), each) for i, each in enumerate(raw)]
    for place, each in places:
        asked = validated(MatchSettings, each, place)
        if asked.budget in seen:
            message = f"{asked.budget} is matched twice"
            raise Faults([SettingsError((*place, asked.budget), message, "give each budget once")])
        seen.add(asked.budget)
        yield place, asked


class _Budget:
    """One budget of an experiment: what the baseline has of it, and how another variant gets as much."""

    def __init__(self, place: Path, asked: MatchSettings, experiment: Experiment) -> None:
        self.place = place
        self.name, self.by, self.tolerance = asked.budget, asked.by, asked.tolerance
        try:
            self.path = grid.full_path(self.by)
            _check_setting(self.by, self.path, experiment)
        except Faults as faults:
            raise Faults(self._fault(f.message, f.cure, "by") for f in faults.faults) from None
        goal = _reached(self.name, experiment.baseline, experiment.baseline.settings)
        if goal is None:
            message = f"the baseline does not tell its {self.name}"
            raise Faults([self._fault(message, "match another budget", self.name)])
        self.goal, self.baseline = goal, experiment.baseline
        self.goals = {_factor(experiment.baseline): goal}
        self.written = sized(experiment.baseline.tree).model_dump(mode="json")

    def facts(self, names: Mapping[tuple[str, str], str]) -> dict[str, Any]:
        """As `experiment.json` has it: with the variant that stands for each under this budget."""
        variants = {variant: name for (budget, variant), name in names.items() if budget == self.name}
        said = {"budget": self.name, "column": COLUMNS[self.name], "by": self.by, "tolerance": self.tolerance}
        return {**said, "goal": self.goal, "variants": variants}

    def solved(self, name: str, variant: Variant) -> Variant:
        """The variant with this budget, under its new name. Raises `Faults` where that is not to be had."""
        now, goal = self._now(name, variant), self._goal_of(variant)
        point = self._solution(name, variant, now, goal)
        is_own = self.by in variant.changes
        told = Matched(self.name, self.by, now.number, point.number, goal, point.reached, is_own)
        if point.number == now.number:
            check_warmup(variant.settings.train)
            return replace(variant, name=name, matched=told)
        tree = grid.overlay(dict(variant.tree), {self.by: point.number})
        settings = Probe(variant, self.name, self.by).written(point.number)
        return replace(variant_of(name, tree, settings, variant.corpus, self.written), matched=told)

    def _goal_of(self, variant: Variant) -> float:
        """What the baseline has of it at the variant's factor: a ladder of sizes stays one. Raises `Faults`."""
        factor = _factor(variant)
        if factor not in self.goals:
            tree = {**self.baseline.tree, grid.FACTOR: factor}
            found = _reached(self.name, self.baseline, whole(sized(tree), self.baseline.corpus))
            assert found is not None, "the baseline tells it"
            self.goals[factor] = found
        return self.goals[factor]

    def _solution(self, name: str, variant: Variant, now: Point, goal: float) -> Point:
        try:
            found = solution(variant, now, self.name, self.by, goal, self.tolerance)
        except CrookedError as error:
            message = f"the {self.name} of variant {name} goes up and down with {self.by}: {error}"
            raise Faults([self._fault(message, "match by a setting that it only grows with")]) from None
        if found is None:
            message = f"{self.by} does not change the {self.name} of variant {name}: {_amount(now.reached)}"
            raise Faults([self._fault(f"{message}, the baseline has {_amount(goal)}", "match by another setting")])
        if (off := mismatch(found.reached, goal)) > self.tolerance:
            message = f"variant {name} cannot have the baseline's {self.name} {_amount(goal)} within "
            message += f"{self.tolerance:.3g} by {self.by}: the nearest is {_amount(found.reached)} at {found.number}"
            cure = f"give {_rounded_up(off)}, or match by another setting" if off < 1 else "match by another setting"
            raise Faults([self._fault(message, cure)])
        return found

    def _now(self, name: str, variant: Variant) -> Point:
        if found := before(variant, self.name, self.by):
            return found
        if _is_whole(grid.get(variant.plain, self.path)):
            raise Faults([self._fault(f"variant {name} does not tell its {self.name}", "match another budget")])
        message = f"variant {variant.name} has no {self.by}, which is to give it the baseline's {self.name}"
        raise Faults([self._fault(message, "match by a setting that all variants have", "by")])

    def _fault(self, message: str, cure: str, key: str = "") -> SettingsError:
        return SettingsError((*self.place, key or self.name), message, cure)


def _check_setting(by: str, path: Path, experiment: Experiment) -> None:
    """What is solved for is a number of the model, and nothing that the experiment is about."""
    if path[0] != "model":
        raise Faults([SettingsError((), f"'{by}' is no setting of the model", _FIRST)])
    if homeless := list(grid.homeless([by], [dict(each.tree) for each in experiment.variants])):
        raise Faults(homeless)
    if not any(_is_whole(grid.get(variant.plain, path)) for variant in experiment.variants):
        raise Faults([SettingsError((), f"'{by}' is a whole number in no variant", _FIRST)])
    if any(grid.full_path(axis) == path for axis in experiment.source.get("vary") or {}):
        message = f"'{by}' varies: matched by it, all its values would come to the same"
        raise Faults([SettingsError((), message, "match by another setting, or take it out of vary")])


def _factor(variant: Variant) -> float:
    return float(variant.tree.get(grid.FACTOR, 1))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _amount(value: float) -> str:
    return f"{value:,.0f}"


def _rounded_up(share: float) -> str:
    """With two digits, and no less than it was."""
    digits = float(f"{share:.1e}")
    step = 10.0 ** (int(f"{share:.1e}".partition("e")[2]) - 1)
    return f"{digits if digits >= share else digits + step:.2g}"


class Probe:
    """A variant, tried with other numbers for the setting `by`."""

    def __init__(self, variant: Variant, budget: str, by: str) -> None:
        self.variant, self.budget, self.by, self.path = variant, budget, by, grid.full_path(by)
        self.sized = sized(variant.tree)
        grows = _factor(variant) != 1
        self.is_uniform = grows or not (self.sized.model.layers or self.sized.model.encoder)

    def at(self, number: int) -> float | None:
        """What it has of the budget with this number; None where the settings refuse it."""
        if self._refuses(number):
            return None
        try:
            written = self.written(number)
            settings = answered(self.variant.plain, lambda: resolved(written, self.variant.corpus.vocab_size))
        except (Faults, ValidationError):
            return None
        return _reached(self.budget, self.variant, settings)

    def _refuses(self, number: int) -> bool:
        """Whether the choice that the number is of refuses it by itself: sooner asked than of all settings."""
        slot, *rest = self.path[1:]
        choice, shape = getattr(self.sized.model, str(slot)), self.variant.settings.model.shape
        if slot in (CROSS, "position") or not (self.is_uniform and rest and isinstance(choice, Choice)):
            return False

        def refuses() -> bool:
            changed = _with(choice, tuple(rest), number).resolve(shape)
            return bool(changed.problems(shape)) if hasattr(changed, "problems") else False

        try:
            return answered(self.variant.plain, refuses)
        except (Faults, SettingsError, ValidationError):
            return True

    def written(self, number: int) -> VariantSettings:
        """As the file would have it with this number, which no factor multiplies. Exceptions for layers are read anew:
        they may go on from it.
        """
        if not self.is_uniform:
            return typed(grid.overlay(dict(self.variant.tree), {self.by: number}))
        return self.sized.model_copy(update={"model": _with(self.sized.model, self.path[1:], number)})


def _with(settings: S, path: Path, number: int) -> S:
    """A copy with the number in its place, checked as if it stood in a file. Raises `ValidationError`."""
    key, rest = str(path[0]), path[1:]
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    values[key] = _with(values[key], rest, number) if rest else number
    return type(settings).model_validate(values)


class _Found:
    """The variants of an experiment as they come out of their budgets: equal ones once, impossible ones told."""

    def __init__(self, experiment: Experiment, *, several: bool) -> None:
        self.before, self.several = experiment, several
        self.by_canonical = {experiment.baseline.canonical: experiment.baseline}
        self.invalid, self.merged = list(experiment.invalid), 0
        self.same: dict[str, str] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.faults: list[SettingsError] = []

    def add(self, variant: Variant, budget: _Budget) -> None:
        """A variant under a budget."""
        name = self._name(variant.name, budget.name)
        try:
            solved = budget.solved(name, variant)
        except Faults as faults:
            if self.before.is_named(variant.name):
                self.faults += faults.faults
            else:
                self.invalid.append(Invalid(name, "; ".join(fault.message for fault in faults.faults)))
            return
        known = self.by_canonical.setdefault(solved.canonical, solved)
        self.names[budget.name, variant.name] = known.name
        if known is not solved:
            self.merged += 1
            self.same[name] = known.name

    def experiment(self, facts: Sequence[dict[str, Any]]) -> Experiment:
        """The experiment with these variants. Raises `Faults` where a named one cannot be."""
        if self.faults:
            raise Faults(self.faults)
        variants, counts = list(self.by_canonical.values()), dict(self.before.counts)
        counts |= {"invalid": len(self.invalid), "merged": counts["merged"] + self.merged, "planned": len(variants)}
        counts["raw"] = sum(counts[word] for word in ("excluded", "invalid", "merged", "planned"))
        counts["trials"] = len(variants) * len(self.before.seeds)
        return replace(
            self.before,
            variants=variants,
            invalid=self.invalid,
            same=self._same_before() | self.same,
            counts=counts,
            match=list(facts),
        )

    def _name(self, name: str, budget: str) -> str:
        return f"{name}@{budget}" if self.several else name

    def _same_before(self) -> dict[str, str]:
        """Names that meant another's variant before mean what has become of that, under each of the budgets."""
        budgets = list(dict.fromkeys(budget for budget, _ in self.names))
        found = {}
        for name, other in self.before.same.items():
            if other == self.before.baseline.name:
                found[name] = other
            for budget in budgets:
                if now := self.names.get((budget, other)):
                    found[self._name(name, budget)] = now
        return found

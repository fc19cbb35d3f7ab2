"""What `tune` searches for each variant: settings of the recipe, the points that are tried, and which of them is best.

A point is a value for each setting. All variants are tried at as many points, so that none has more luck than another:
where the best of one lies at the edge of the grid, the grid grows for all of them, once. A search is a pure function of
the losses that are known: asked again with the same losses it gives the same points, which is all that resuming takes.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ablate import budget, grid
from ablate.choice import Count, Faults, Path, Real, Settings, SettingsError, Whole, as_whole, unknown, validated
from ablate.settings import BUDGETS, OF_NO_NUMBER, OptimizerSettings, TrainSettings, resolved
from ablate.variant import Variant

TUNE = "tune"
FIRST_SEED = 10_000
"""From here on tuning has seeds of its own, unless the file gives some: beyond any count of the experiment's."""

N_SEEDS = 2
EDGE = 0.05
"""A best within this share of a range's width from its end is at its edge."""

UNFAIR: Mapping[str, str] = {
    **dict.fromkeys(BUDGETS, "a longer training has the lower loss"),
    **dict.fromkeys(OF_NO_NUMBER, "it determines no number"),
    **dict.fromkeys(("data_seed", "init_seed"), "the best seed is the luckiest"),
    **dict.fromkeys(("seq_len", "eval_tokens", "eval_every"), "it decides what the loss is measured on"),
    **dict.fromkeys(("threads", "compile", "deterministic"), "it is about how fast, not how well, is trained"),
}
"""Settings of the recipe that are never tuned, and why."""

Point = dict[str, Any]
Known = Callable[[str, Point], float | None]
"""The mean loss of a variant at a point: infinite where a training diverged, NaN where one came to nothing, None where
one is not finished.
"""


def _seeds(value: object) -> object:
    if isinstance(value, list) and value:
        return value
    count = as_whole(value)
    if not isinstance(count, int) or not 0 < count <= 1000:
        raise ValueError("a list of seeds is needed, or a count from 1 to 1000")
    return list(range(FIRST_SEED, FIRST_SEED + count))


class TuneSettings(Settings):
    """How the settings named beside are searched: `train.lr: [3e-4, 1e-3, 3e-3]`, or for a sampler of random numbers a
    range, `train.lr: {low: 1e-4, high: 1e-2}`. Every variant is tried at as many points.
    """

    seeds: Annotated[list[Annotated[Whole, Field(ge=0, lt=2**31)]], BeforeValidator(_seeds)] = Field(
        list(range(FIRST_SEED, FIRST_SEED + N_SEEDS)),
        description="that each point is trained with, none of the experiment's own; a list, or a count",
    )
    sampler: Literal["grid", "random", "tpe"] = Field(
        "grid", description="all combinations of the values, or by Optuna points at random or by TPE"
    )
    trials: Count | None = Field(None, description="points of each variant that a sampler draws; not for a grid")


class RangeSettings(Settings):
    """Numbers from `low` to `high`."""

    low: Real
    high: Real
    log: bool | None = Field(None, description="on a logarithmic scale; so it is above 0 unless given")


@dataclass(frozen=True)
class Listed:
    """Values that are tried."""

    values: tuple[Any, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether the values have an order, and so edges."""
        return all(isinstance(each, int | float) and not isinstance(each, bool) for each in self.values)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values at the edges."""
        return (min(self.values), max(self.values)) if self.is_numeric else ()

    @property
    def outermost(self) -> tuple[Any, ...]:
        """The values, and those past the ends."""
        return (*self.values, *map(self.beyond, self.ends))

    def beyond(self, end: Any) -> Any:
        """The next value past an end: in equal steps where the values are in such, or not all above 0, else by the
        ratio of the last two. Rounded to two significant digits, or to a whole number.
        """
        ordered = sorted(self.values, reverse=end == min(self.values))
        last, before = ordered[-1], ordered[-2]
        steps = [b - a for a, b in itertools.pairwise(ordered)]
        is_even = len(steps) > 1 and all(math.isclose(step, steps[0], rel_tol=1e-6) for step in steps)
        further = last + (last - before) if is_even or min(self.values) <= 0 else last * last / before
        whole = all(isinstance(each, int) for each in self.values)
        return round(further) if whole else float(f"{further:.2g}")

    def at_edge(self, value: Any) -> bool:
        """Whether a value has no neighbour on one side."""
        return value in self.ends


@dataclass(frozen=True)
class Range:
    """Numbers that are drawn from."""

    low: float
    high: float
    log: bool
    whole: bool

    @property
    def outermost(self) -> tuple[Any, ...]:
        """Both ends."""
        return tuple(int(each) if self.whole else each for each in (self.low, self.high))

    def at_edge(self, value: Any) -> bool:
        """Whether a value is near an end."""
        low, high, at = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return not EDGE <= (at - low) / (high - low) <= 1 - EDGE


@dataclass(frozen=True)
class Search:
    """Which settings, by which sampler, and with which seeds."""

    axes: Mapping[str, Listed | Range]
    sampler: str
    trials: int | None
    seeds: list[int]

    @property
    def first(self) -> list[Point]:
        """The points of a grid before it grows; of a sampler that is not known before it has drawn them."""
        return product({path: axis.values for path, axis in self.axes.items() if isinstance(axis, Listed)})

    @property
    def n_points(self) -> int:
        """Points of each variant, before a grid grows."""
        return self.trials or len(self.first)

    def settings(self) -> dict[str, Any]:
        """As plain data, for people and machines."""
        return {
            path: (sorted if axis.is_numeric else list)(axis.values)
            if isinstance(axis, Listed)
            else {"low": axis.low, "high": axis.high, "log": axis.log}
            for path, axis in self.axes.items()
        }

    def points(
        self, names: Sequence[str], known: Known, possible: Callable[[Point], bool]
    ) -> tuple[dict[str, list[Point]], Search]:
        """The points of each variant as far as they are decided by now, and the search as it has grown."""
        if self.sampler != "grid":
            return {name: _drawn(self, name, known) for name in names}, self
        grown = self._grown(names, known, possible)
        more = [point for point in grown.first if point not in self.first]
        return {name: [*self.first, *more] for name in names}, grown

    def _grown(self, names: Sequence[str], known: Known, possible: Callable[[Point], bool]) -> Search:
        """The grid with a value more at each edge where the best of some variant lies, where there can be one."""
        losses = {name: [known(name, point) for point in self.first] for name in names}
        if any(loss is None for each in losses.values() for loss in each):
            return self
        best = [self.first[i] for each in losses.values() if (i := best_of(each)) is not None]
        values = {path: axis.values for path, axis in self.axes.items() if isinstance(axis, Listed)}
        for path, axis in self.axes.items():
            ends = axis.ends if isinstance(axis, Listed) else ()
            for end in (end for end in ends if any(point[path] == end for point in best)):
                new = axis.beyond(end) if isinstance(axis, Listed) else end
                if new not in values[path] and all(map(possible, product({**values, path: (new,)}))):
                    values[path] = (*values[path], new)
        return replace(self, axes={path: Listed(each) for path, each in values.items()})

    def outermost(self, paths: Sequence[str]) -> list[Point]:
        """All values that these settings may come to have: of a grid also those that it may grow to, of a range its
        ends.
        """
        axes = {path: self.axes[path] for path in paths if path in self.axes}
        return product({path: axis.outermost for path, axis in axes.items()}) if axes else []

    def edges(self, point: Point) -> list[str]:
        """The settings whose value in a point lies at the edge of what was tried."""
        return [path for path, axis in self.axes.items() if axis.at_edge(point[path])]


def product(values: Mapping[str, Sequence[Any]]) -> list[Point]:
    """All combinations."""
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def best_of(losses: Sequence[float | None]) -> int | None:
    """The place of the lowest finite loss, the first of equal ones; None where there is none."""
    finite = [i for i, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    return min(finite, key=lambda i: losses[i] or 0.0) if finite else None


def mean_loss(losses: Sequence[float | None]) -> float | None:
    """Of several seeds what `Known` gives: one that diverged is worse than all that did not."""
    if any(loss is None for loss in losses):
        return None
    values = [loss for loss in losses if loss is not None]
    if any(map(math.isnan, values)):
        return math.nan
    return statistics.fmean(values)


# --- Points of a sampler ----------------------------------------------------------------------------------------------


def _drawn(search: Search, name: str, known: Known) -> list[Point]:
    """What Optuna asks for when it is told the losses in their order, up to the first that is not finished.

    Akiba et al. 2019, arXiv 1907.10902; TPE: Bergstra et al. 2011 (NeurIPS). The sampler's own seed is fixed, and the
    same for all variants: at random all are tried at the same points.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    random = search.sampler == "random"
    kinds = (optuna.samplers.TPESampler, optuna.samplers.RandomSampler)
    study = optuna.create_study(sampler=kinds[random](seed=0))
    spaces = {path: _distribution(axis) for path, axis in search.axes.items()}
    points: list[Point] = []
    for _ in range(search.trials or 0):
        trial = study.ask(spaces)
        points.append(dict(trial.params))
        loss = known(name, points[-1])
        if loss is None and not random:
            break
        failed = loss is None or math.isnan(loss)
        study.tell(trial, state=optuna.trial.TrialState.FAIL) if failed else study.tell(trial, loss)
    return points


def _distribution(axis: Listed | Range) -> Any:
    from optuna import distributions

    if isinstance(axis, Listed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that a database could not keep: nothing is kept there
            return distributions.CategoricalDistribution(axis.values)
    if axis.whole:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


# --- A variant at a point ---------------------------------------------------------------------------------------------


def at(variant: Variant, point: Point) -> Variant:
    """The variant with the recipe of a point: the same that the file would give if it said so. Raises `Faults`."""
    train = _recipe(variant, point)
    written = variant.settings.model_copy(update={"train": train})
    whole = budget.settled(resolved(written, variant.corpus.vocab_size))
    return replace(variant, settings=variant.settings.model_copy(update={"train": whole.train}))


def for_tuning(variant: Variant, point: Point) -> Variant:
    """The same on the training split alone, and with nothing measured beside. Raises `Faults`."""
    tried = at(variant, point)
    bare = tried.settings.model_copy(update={"profile": type(tried.settings.profile)()})
    return replace(
        tried,
        name=f"{variant.name} [{grid.label(point)}]",
        settings=bare,
        corpus=variant.corpus.for_tuning(),
        changes={**variant.changes, **point},
        is_for_tuning=True,
    )


def _recipe(variant: Variant, point: Point) -> TrainSettings:
    written = (variant.recipe or variant.settings.train).model_dump(mode="json")
    tree = grid.overlay({"model": {}, "train": written, "data": {}, "profile": {}}, point)
    return validated(TrainSettings, tree["train"], ("train",))


# --- From the file ----------------------------------------------------------------------------------------------------


def read(raw: object, variants: Sequence[Variant], seeds: Sequence[int], vary: Mapping[str, Any], most: int) -> Search:
    """The search that a file's `tune` asks for. Raises `Faults`, with places below it.

    Every point must be possible for every variant: as many points for each is what makes the search fair.
    """
    if not isinstance(raw, Mapping):
        raise _refusal((), f"settings to search are needed here, not {raw!r}", "for example `train.lr: [3e-4, 1e-3]`")
    own = validated(TuneSettings, {key: value for key, value in raw.items() if key in TuneSettings.model_fields})
    paths = [key for key in raw if key not in TuneSettings.model_fields]
    if faults := [fault for path in paths for fault in _path_faults(path, vary, variants)]:
        raise Faults(faults)
    if not paths:
        raise _refusal((), "'tune' names no setting to search", "for example `train.lr: [3e-4, 1e-3, 3e-3]`")
    _check_sampler(own, raw)
    axes = {path: _axis(path, raw[path], own.sampler, variants[0]) for path in paths}
    search = Search(axes, own.sampler, own.trials, _own_seeds(own, raw, seeds))
    if (number := search.n_points * len(variants)) > most:
        message = f"{number} points to tune at are more than {most}"
        raise _refusal((paths[0],), message, f"take values out, or give --max-trials {number}")
    _check_points(search, variants)
    return search


def _refusal(path: Path, message: str, cure: str) -> Faults:
    return Faults([SettingsError(path, message, cure)])


def _path_faults(path: str, vary: Mapping[str, Any], variants: Sequence[Variant]) -> Iterator[SettingsError]:
    section, _, word = path.partition(".")
    first = word.partition(".")[0]
    if section != "train" or first not in TrainSettings.model_fields:
        yield _unknown_path(path, section, first)
        return
    if first in UNFAIR:
        yield SettingsError((path,), f"'{path}' is not tuned: {UNFAIR[first]}", "take it out")
    if first == "batch_tokens" and any((each.recipe or each.settings.train).steps is not None for each in variants):
        message = f"'{path}' is not tuned where 'steps' says how long: a larger batch would train on more tokens"
        yield SettingsError((path,), message, "give train.tokens")
    if any(_overlap(path, axis) for axis in vary):
        yield SettingsError((path,), f"'{path}' is tuned and varied", "take it out of one of the two")
    for variant in variants:
        if not variant.is_baseline and any(_overlap(path, changed) for changed in variant.changes):
            message = f"'{path}' is tuned, and variant {variant.name} sets it"
            yield SettingsError((path,), message, "take it out of one of the two")
            return


def _unknown_path(path: str, section: str, first: str) -> SettingsError:
    if section in TrainSettings.model_fields:
        return SettingsError((path,), f"'{path}' is a setting of train", f"write train.{path}")
    if section == "train" and not first:
        return SettingsError((path,), "'train' is no setting to search", "write its settings as `train.lr: [...]`")
    known = [
        *TuneSettings.model_fields,
        *(f"train.{each}" for each in TrainSettings.model_fields if each not in UNFAIR),
    ]
    fault = unknown(
        path, [*known, *(f"train.optimizer.{each}" for each in OptimizerSettings.model_fields)], "", (path,)
    )
    fault.message = f"'{path}' is no setting of the recipe, which is what is tuned"
    return fault


def _overlap(one: str, other: str) -> bool:
    """Whether one of two dotted paths is the other, or stands below it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _check_sampler(own: TuneSettings, raw: Mapping[str, Any]) -> None:
    if own.sampler == "grid":
        if own.trials is not None:
            raise _refusal(("trials",), "a grid tries all its values", "take 'trials' out, or give `sampler: random`")
        return
    if own.trials is None:
        raise _refusal(("sampler",), f"sampler {own.sampler} draws as many points as 'trials' says", "add `trials: 12`")
    if importlib.util.find_spec("optuna") is None:
        cure = "pip install 'ablate[tune]', or take the grid: leave 'sampler' out"
        raise _refusal(("sampler",), f"sampler {own.sampler} needs optuna, which is not installed", cure)


def _own_seeds(own: TuneSettings, raw: Mapping[str, Any], taken: Sequence[int]) -> list[int]:
    """Seeds that no final number comes from: those of a count keep out of their way, those of a list must."""
    if not isinstance(raw.get("seeds"), list):
        free = (seed for seed in itertools.count(FIRST_SEED) if seed not in taken)
        return list(itertools.islice(free, len(own.seeds)))
    if len(set(own.seeds)) < len(own.seeds):
        raise _refusal(("seeds",), "a seed is given twice", "give each seed once")
    if common := sorted(set(own.seeds) & set(taken)):
        message = f"seed {common[0]} is one of the experiment's own: what is chosen on a seed flatters it there"
        raise _refusal(("seeds",), message, f"give others, or leave it out for {FIRST_SEED}, {FIRST_SEED + 1}")
    return own.seeds


def _axis(path: str, raw: object, sampler: str, baseline: Variant) -> Listed | Range:
    if isinstance(raw, Mapping):
        return _range(path, raw, sampler, baseline)
    if not isinstance(raw, list) or len(raw) < 2:
        raise _refusal((path,), f"'{path}': a list of at least two values is needed", "for example [3e-4, 1e-3, 3e-3]")
    values = []
    for i, value in enumerate(raw):
        values.append(_checked((path, i), baseline, path, value))
        if values[-1] in values[:-1]:
            raise _refusal((path, i), f"'{path}': a value is given twice", "give each value once")
    return Listed(tuple(values))


def _range(path: str, raw: Mapping[str, Any], sampler: str, baseline: Variant) -> Range:
    if sampler == "grid":
        cure = "give a list of values, or `sampler: random` with `trials`"
        raise _refusal((path,), f"'{path}': a grid has no range", cure)
    try:
        given = validated(RangeSettings, raw)
    except Faults as faults:
        raise Faults(fault.below((path,)) for fault in faults.faults) from None
    log = given.low > 0 if given.log is None else given.log
    if not given.low < given.high or (log and given.low <= 0):
        message = f"'{path}': no range from {given.low:g} to {given.high:g}" + " on a logarithmic scale" * log
        raise _refusal((path,), message, "give a low below the high" + ", above 0" * log)
    ends = [_checked((path, end), baseline, path, getattr(given, end)) for end in ("low", "high")]
    return Range(given.low, given.high, log, all(isinstance(end, int) for end in ends))


def _checked(place: Path, baseline: Variant, path: str, value: Any) -> Any:
    """The value as the recipe reads it (`8k` is 8000). Raises `Faults` at its place."""
    try:
        node: Any = _recipe(baseline, {path: value}).model_dump(mode="json")
    except Faults as faults:
        raise Faults(SettingsError(place, fault.message, fault.cure) for fault in faults.faults) from None
    for word in path.split(".")[1:]:
        node = node[word]
    return value if isinstance(node, dict) else node


def _check_points(search: Search, variants: Sequence[Variant]) -> None:
    ends = {p: a.values if isinstance(a, Listed) else (a.low, a.high) for p, a in search.axes.items()}
    for variant in variants:
        seen: dict[str, Point] = {}
        for point in product(ends):
            try:
                canonical = at(variant, point).canonical
            except Faults as faults:
                message = f"variant {variant.name} with {grid.label(point)}: {faults.faults[0].message}"
                raise _refusal(
                    (next(iter(point)),), message, "every variant must be able to have every value"
                ) from None
            if (same := seen.setdefault(canonical, point)) is not point:
                message = f"variant {variant.name}: {grid.label(same)} and {grid.label(point)} train alike"
                cure = "tune what means something beside all else that the file says"
                raise _refusal((next(iter(point)),), message, cure)

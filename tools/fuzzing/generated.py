"""Experiment files that Hypothesis makes up: right words, mostly with right kinds of values, in all combinations."""

from __future__ import annotations

from random import Random
from typing import Any

import hypothesis
from hypothesis import strategies as st

from ablate import catalogue, registry
from ablate.experiment_file import ExperimentFile
from fuzzing.case import Case
from fuzzing.corpus import TINY
from fuzzing.settings import Setting, every_setting
from fuzzing.writing import written

_Files = st.SearchStrategy[dict[str, Any]]
_ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _value(setting: Setting) -> st.SearchStrategy[Any]:
    """What a setting takes by its schema, now and then something else."""
    ways = [way for kind in setting.kinds for way in _of_kind(kind)]
    return st.integers(0, 19).flatmap(lambda n: _ANYTHING if n == 0 or not ways else st.one_of(ways))


def _of_kind(kind: Any) -> list[st.SearchStrategy[Any]]:
    allowed = [*kind.get("enum", []), *([kind["const"]] if "const" in kind else [])]
    low = kind.get("minimum", kind.get("exclusiveMinimum", 0))
    high = kind.get("maximum", kind.get("exclusiveMaximum", 2**20))
    ways: dict[str, st.SearchStrategy[Any]] = {
        "integer": st.integers(low, max(low, min(high, 2**20))) | st.sampled_from([1, 2, 4, 8, 16]),
        "number": st.floats(low, max(low, min(high, 1e6))),
        "string": st.text(max_size=20),
        "boolean": st.booleans(),
        "null": st.none(),
        "array": st.lists(st.integers(0, 64) | st.floats(0, 1), max_size=3),
    }
    return [st.sampled_from(allowed)] if allowed else [ways[kind["type"]]] if kind.get("type") in ways else []


@st.composite
def _section(draw: st.DrawFn, *place: str) -> dict[str, Any]:
    """Some of the settings that stand directly below a place."""
    own = [s for s in every_setting() if s.place[:-1] == place and not s.beside]
    chosen = draw(st.lists(st.sampled_from(own), max_size=4, unique_by=lambda s: s.place))
    return {setting.place[-1]: draw(_value(setting)) for setting in chosen}


@st.composite
def _choice(draw: st.DrawFn, slot: str) -> Any:
    name = draw(st.sampled_from(registry.names(slot)))
    own = [s for s in every_setting() if name in s.beside.values() and slot in s.place and s.place[-2] == slot]
    chosen = draw(st.lists(st.sampled_from(own), max_size=3, unique_by=lambda s: s.place)) if own else []
    return {"name": name, **{s.place[-1]: draw(_value(s)) for s in chosen}} if chosen else name


def _slots(most: int) -> _Files:
    slots = list(registry.SLOTS)
    some = st.lists(st.sampled_from(slots), max_size=most, unique=True)
    return some.flatmap(lambda chosen: st.fixed_dictionaries({slot: _choice(slot) for slot in chosen}))


@st.composite
def _changes(draw: st.DrawFn) -> dict[str, Any]:
    """What a variant says: whole slots, and dotted paths to single settings."""
    found = draw(_slots(2))
    for setting in draw(st.lists(st.sampled_from(every_setting()), max_size=2)):
        place = setting.place[1:] if setting.place[0] == "baseline" else setting.place
        found[".".join(place)] = draw(_value(setting))
    return found


@st.composite
def _files(draw: st.DrawFn) -> dict[str, Any]:
    start = draw(st.sampled_from([{}, {}, {"preset": draw(st.sampled_from(catalogue.names(catalogue.PRESETS)))}]))
    baseline = {**start, **TINY["baseline"], **draw(_section("baseline")), **draw(_slots(4))}
    axes = draw(st.lists(_changes(), max_size=2))
    optional = {
        "variants": st.dictionaries(st.text(max_size=12), _changes(), max_size=3),
        "vary": st.just({path: [value] for each in axes for path, value in each.items()}),
        "exclude": st.lists(_changes(), max_size=2),
        "design": st.sampled_from(["product", "one_at_a_time"]),
        "seeds": st.integers(0, 3) | st.lists(st.integers(0, 9), max_size=3),
        "data": _choice("data"),
        "profile": _section("profile"),
        "question": st.text(max_size=40),
        draw(st.sampled_from(list(ExperimentFile.model_fields))): _ANYTHING,
    }
    chosen = draw(st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True))
    train = {**TINY["train"], **draw(_section("train"))}
    return {**TINY, "baseline": baseline, "train": train, **{key: draw(optional[key]) for key in chosen}}


def made_up(seed: int, count: int) -> list[Case]:
    """So many files, the same ones for the same seed."""
    found: list[dict[str, Any]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(_files())
    def collect(file: dict[str, Any]) -> None:
        found.append(file)

    collect()
    rng = Random(seed)
    texts = (written(file, rng).encode("utf-8", "surrogatepass") for file in found[:count])
    return [Case("made up by Hypothesis", text) for text in texts]

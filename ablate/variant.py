"""What an experiment is made of: variants, and trials, each with the identity that its numbers are stored under."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ablate import grid, registry
from ablate.choice import Path
from ablate.data import Corpus
from ablate.settings import ADDED, OF_NO_NUMBER, TrainSettings, VariantSettings

BASELINE = "baseline"


@dataclass(frozen=True)
class Matched:
    """How a variant was brought to the baseline's budget: which setting was what, is what, and what that comes to."""

    budget: str
    by: str
    before: int
    after: int
    goal: float
    reached: float
    is_own: bool
    """Whether the setting tells it from the baseline besides, as the file has it."""

    @property
    def mismatch(self) -> float:
        """What remains, in shares of the goal."""
        return self.reached / self.goal - 1 if self.goal else 0.0

    def facts(self) -> dict[str, Any]:
        """As `plan --json` and `experiment.json` give it."""
        return {**asdict(self), "mismatch": self.mismatch}


@dataclass(frozen=True)
class Variant:
    """One complete, named configuration. `changes` are its differences to the baseline, by dotted path.

    `tree` is what the file says of it, before any default.
    `recipe` is that of the file before defaults stand in it as values, where it comes from a file. One that
    `is_for_tuning` is tried to choose settings, on a corpus of its own.
    """

    name: str
    settings: VariantSettings
    corpus: Corpus
    changes: dict[str, Any] = field(default_factory=dict)
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    matched: Matched | None = None
    recipe: TrainSettings | None = None
    is_for_tuning: bool = False

    @property
    def is_baseline(self) -> bool:
        """Whether this is what the others are compared with."""
        return self.name == BASELINE

    @property
    def groups(self) -> list[str]:
        """The settings that it changes, from afar: slots and other settings of the model, paths of the rest.

        What was changed only for the sake of an equal budget is none of them.
        """
        paths = self.changes.keys() - ({self.matched.by} if self.matched and not self.matched.is_own else set())
        return sorted({path if path.split(".")[0] in grid.SECTIONS else path.split(".")[0] for path in paths})

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The settings as plain data."""
        return self.settings.model_dump(mode="json")

    @property
    def identity(self) -> dict[str, Any]:
        """Everything in the settings that determines what is trained: of the data its bytes, of `profile` nothing."""
        given = {key: each for key, each in self.plain["train"].items() if not (key in ADDED and each is None)}
        train = {key: value for key, value in given.items() if key not in OF_NO_NUMBER}
        return {"model": self.plain["model"], "train": train, "data": [self.corpus.sha256, self.corpus.vocab_size]}

    @cached_property
    def canonical(self) -> str:
        """The identity as text: two variants with the same one are the same."""
        return canonical_json(self.identity)


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
    sources: dict[str, str | None]
    """The files of the user's own code, each with its hash: part of the id."""


def trial_of(variant: Variant, seed: int, device: str, threads: int) -> Trial:
    """A variant with a seed, under the hash of everything that determines its numbers."""
    return trials_of(variant, [seed], device, threads)[0]


def trials_of(variant: Variant, seeds: Sequence[int], device: str, threads: int) -> list[Trial]:
    """The same for many seeds, in which all the rest is looked at once."""
    identity = variant.identity
    own_threads = identity["train"].pop("threads")
    own_code = list(foreign_names(identity["model"]))
    sources = [registry.source_sha256(name) for name in own_code]
    files = {str(file): registry.file_sha256(file) for name in own_code for file in registry.source_files(name)}
    profile = _hash({key: value for key, value in variant.plain["profile"].items() if key != "repeats"})
    before, after = canonical_json(identity), canonical_json([device, own_threads or threads, sources])
    ids = [_hash_of(f"[{before},{seed},{after.removeprefix('[')}") for seed in seeds]
    return [Trial(variant, seed, each, profile, files) for seed, each in zip(seeds, ids, strict=True)]


def timing_id(members: Sequence[str], cells: Any) -> str:
    """The identity of timings that are compared: who is timed, in which order, and what is timed beside training."""
    return _hash([list(members), cells])


def _hash(value: Any) -> str:
    return _hash_of(canonical_json(value))


def _hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical_json(value: Any) -> str:
    """Strict JSON in which the order of keys says nothing."""
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def foreign_names(node: Any) -> Iterator[str]:
    """Every choice of the user's own in a plain settings tree."""
    if isinstance(node, Mapping):
        name = node.get("name")
        if isinstance(name, str) and registry.is_foreign(name):
            yield name
        for value in node.values():
            yield from foreign_names(value)
    elif isinstance(node, list):
        for value in node:
            yield from foreign_names(value)


def of_own_code(variants: Sequence[Variant]) -> list[list[Variant]]:
    """The variants whose model is made of the user's own code, those of one model together."""
    return alike([variant for variant in variants if any(foreign_names(variant.plain["model"]))])


def alike(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Those that have the same model together."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(canonical_json(variant.plain["model"]), []).append(variant)
    return list(groups.values())


_COUNT = re.compile(r"[\d.]+\s*[kMB]?")
_FREE = ("question", "path", "hf")
_SAID = (("name",), ("claims",), ("match",))


def own_code(node: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """What may name the user's own code in a file as it is written, before anything is known of it, and where."""
    if isinstance(node, str) and registry.is_foreign(node) and not _COUNT.fullmatch(node) and path[:1] not in _SAID:
        yield path, node
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if str(key).rpartition(".")[2] not in _FREE:
            yield from own_code(value, (*path, key))


def differences(old: Any, new: Any, given: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of the plain tree `new` that are not in `old`, by dotted path; a choice stands for its name.

    What has no counterpart in `old` is told only where it is `given`, which is `new` without what are mere defaults.
    """
    if isinstance(new, Mapping):
        for key, value in new.items():
            inner = path if key == "name" and path else f"{path}.{key}".lstrip(".")
            inner = "" if (not path and key == "model") else inner
            known = isinstance(old, Mapping) and key in old
            if known or (isinstance(given, Mapping) and key in given):
                own = given.get(key) if isinstance(given, Mapping) else None
                yield from differences(old[key] if known else None, value, own, inner)
    elif new != old:
        yield path, given if isinstance(new, list) and given is not None else new

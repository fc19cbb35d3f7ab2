"""The experiment: a file read, checked and expanded into variants and trials, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any

from ablate import document, match, search
from ablate.choice import Faults, unknown
from ablate.claims import Claim, named
from ablate.data import Corpus
from ablate.design import Design
from ablate.document import Document, FileFaults, Mark, printable, told
from ablate.expansion import Expanded, expand
from ablate.experiment_file import ExperimentFile
from ablate.search import Search
from ablate.settings import BUDGETS
from ablate.variant import BASELINE, Invalid, Trial, Variant, foreign_names, trials_of

_BUDGETS = tuple(("train", name) for name in BUDGETS)


@dataclass(frozen=True)
class Experiment:
    """A checked experiment: what would run, and what was left out. `same` are names that mean another's variant."""

    name: str
    question: str | None
    found: Document
    variants: list[Variant]
    invalid: list[Invalid]
    same: dict[str, str]
    counts: dict[str, int]
    seeds: list[int]
    design: Design | None
    claims: list[Claim] = field(default_factory=list)
    match: list[dict[str, Any]] = field(default_factory=list)
    """The budgets that variants were brought to, as `experiment.json` has them."""
    search: Search | None = None

    @classmethod
    def from_file(cls, path: str | File, sets: Sequence[str] = (), max_trials: int = 1000) -> Experiment:
        """Read, check and expand a file, with `key=value` settings on top. Raises `FileFaults`."""
        return cls.of(read(path, sets), max_trials)

    @classmethod
    def of(cls, found: Document, max_trials: int = 1000) -> Experiment:
        """Check and expand what a file says. Raises `FileFaults`."""
        try:
            expanded = expand(found, max_trials)
            whole = match.matched(cls._of(found, expanded), max_trials)
            return replace(whole, search=_search(whole, expanded.file, max_trials))
        except Faults as faults:
            raise told(found, faults) from None

    @classmethod
    def _of(cls, found: Document, expanded: Expanded) -> Experiment:
        file = expanded.file
        return cls(
            name=file.name,
            question=file.question,
            found=found,
            variants=expanded.variants,
            invalid=expanded.invalid,
            same=expanded.same,
            counts=expanded.counts,
            seeds=file.seeds,
            design=expanded.design,
            claims=expanded.claims,
        )

    @property
    def file(self) -> str:
        """The path of the file."""
        return self.found.file

    @property
    def source(self) -> dict[str, Any]:
        """What the file says, with the command line's settings in it."""
        return self.found.data

    @property
    def baseline(self) -> Variant:
        """The variant that the others are compared with."""
        return self.variants[0]

    def corpus(self, variant: Variant) -> Corpus:
        """The tokens of a variant."""
        return variant.corpus

    def is_named(self, variant: str) -> bool:
        """Whether the file gives the variant its name, as it does not to combinations of axes."""
        given = self.source.get("variants", {})
        several = len(self.match) > 1  # then a name has its budget behind it
        return variant == BASELINE or variant in given or (several and variant.rpartition("@")[0] in given)

    def without(self, reasons: Mapping[str, str]) -> Experiment:
        """The experiment in which some combinations are invalid, by their names."""
        variants = [variant for variant in self.variants if variant.name not in reasons]
        invalid = [*self.invalid, *(Invalid(name, reason) for name, reason in reasons.items())]
        sizes = {"invalid": len(invalid), "planned": len(variants), "trials": len(variants) * len(self.seeds)}
        return replace(self, variants=variants, invalid=invalid, counts={**self.counts, **sizes})

    def design_facts(self) -> dict[str, Any] | None:
        """How axes combine and which variant stands where, as plain data; None where nothing varies."""
        return self.design.facts(self._standing()) if self.design else None

    def _standing(self) -> dict[str, str]:
        """The variants by the names that combinations had before they were brought to a budget. Of several budgets
        each has its own: there the name stays, and `match` says which variants those are.
        """
        there = {variant.name for variant in self.variants}
        found = {name: name for name in there}
        for budget in self.match:
            solved = {name: now for name, now in budget["variants"].items() if now in there}
            found |= solved if len(self.match) == 1 else {name: name for name in solved}
        return found

    def with_claims(self) -> Experiment:
        """The experiment, whose variants are final now, with its claims about them. Raises `FileFaults`."""
        names = [*(each.name for each in self.variants), *(each.name for each in self.invalid)]
        try:
            return replace(self, claims=named(self.claims, names, self.same))
        except Faults as faults:
            raise told(self.found, faults) from None

    def plug_ins(self) -> list[str]:
        """The user's own code that the experiment names."""
        return sorted({name for variant in self.variants for name in foreign_names(variant.plain)})

    def trials(self, device: str, threads: int) -> list[Trial]:
        """Every variant with every seed, seeds outermost, as they run on this kind of device."""
        by_variant = [trials_of(variant, self.seeds, device, threads) for variant in self.variants]
        return [trial for one_seed in zip(*by_variant, strict=True) for trial in one_seed]


def _search(whole: Experiment, file: ExperimentFile, max_trials: int) -> Search | None:
    """What the file says of tuning, held against all that is tuned."""
    if search.TUNE not in file.model_fields_set:
        return None
    try:
        return search.read(file.tune, whole.variants, file.seeds, file.vary, max_trials)
    except Faults as faults:
        raise Faults(fault.below((search.TUNE,)) for fault in faults.faults) from None


def read(path: str | File, sets: Sequence[str] = ()) -> Document:
    """A file with the `key=value` settings of a command line in it, as it is written. Raises `FileFaults`."""
    found = document.read(path)
    try:
        for change in sets:
            _set(found, change)
    except Faults as faults:
        raise told(found, faults) from None
    return found


def _set(found: Document, change: str) -> None:
    """Put one `key=value` of the command line into the file's data; one way to give the length replaces the other."""
    said = f"--set {change}"
    key, equals, text = change.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise FileFaults([f"{printable(said)}: not of the form key=value\n  for example --set train.steps=100"])
    try:
        value = document.scalar(text)
    except ValueError as error:
        raise FileFaults([f"{printable(said)}: {error}\n  write it as in the file, and quote what is text"]) from None
    path = _place_of_key(path)
    if path[0] == "variants" and len(path) > 1 and path[1] not in (known := found.data.get("variants") or {}):
        fault = unknown(path[1], known, "variant", ())
        raise FileFaults([f"{printable(said)}: {printable(fault.message)}\n  {printable(fault.cure)}"])
    *above, last = path
    node: dict[str, Any] = found.data
    for part in above:
        inner = node.get(part)
        is_choice = isinstance(inner, str) and part != "design"
        node[part] = {"name": inner} if is_choice else dict(inner) if isinstance(inner, dict) else {}
        node = node[part]
    node[last] = value
    for other in _BUDGETS if path in _BUDGETS else ():
        if other != path:
            node.pop(other[-1], None)
    for place in [place for place in found.marks if place[: len(path)] == path]:
        del found.marks[place]
    found.marks[path] = Mark(0, 0, said)


def _place_of_key(path: tuple[str, ...]) -> tuple[str, ...]:
    """Where a dotted key of the command line stands in a file: a bare setting in the baseline; changes stay dotted."""
    if path[0] not in ExperimentFile.model_fields:
        path = (BASELINE, *path)
    depth = {BASELINE: 1, "vary": 1, search.TUNE: 1, "variants": 2}.get(path[0], len(path))
    return (*path[:depth], ".".join(path[depth:])) if len(path) > depth else path

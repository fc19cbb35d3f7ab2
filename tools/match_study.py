"""Is every budget met by every setting that can meet it, and how soon? Pairs of models over 200 shapes, solved.

Usage: python tools/match_study.py [--pairs 4] [--tolerance 0.01] [--out reports/match.md]

A pair is a baseline and a variant, each with an attention and a feed-forward network from the catalogue; of choices
that cost the same one stands for all. Every whole number in the variant's settings is solved for, under each budget, in
200 shapes. There are too many pairs for an hour: `--pairs` of them are taken for each budget and setting, evenly
spread over all, other ones each time. Every tenth answer is held against the 32 numbers on each side of it: none may be
nearer where it is refused, and none on a coarser grain near enough where it is solved. Writes a report with the machine
and the commit; exit status 1 where an answer is wrong, or 200 shapes took 2 s of CPU time or more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from ablate import catalogue, grid, machine, match
from ablate.lattice import GRAINS, CrookedError, Point, mismatch
from ablate.settings import resolved, typed
from ablate.variant import Variant

Model = tuple[str, str]
LIMIT = 2.0
NEIGHBOURS, EACH = 32, 10
VOCABULARIES = (1000, 32_000, 50_257, 128_256)


def shapes() -> list[dict[str, int]]:
    """200 of them, from small to the size of a large model, with odd numbers of heads among them."""
    sizes = itertools.product((1, 2, 3, 4, 6, 8, 12, 16, 20, 32), (16, 32, 64, 80, 128), (1, 6, 24, 61))
    return [
        {"d_model": heads * width, "n_heads": heads, "n_layers": layers, "vocab_size": VOCABULARIES[place % 4]}
        for place, (heads, width, layers) in enumerate(sizes)
    ]


SHAPES = shapes()


@cache
def variant(model: Model, place: int) -> Variant:
    """A model in one of the shapes, trained at 64 tokens, with places that cost nothing."""
    slots = {"attention": model[0], "feed_forward": model[1], "position": "none"}
    train = {"steps": 1, "batch_tokens": 64, "seq_len": 64}
    file = {"baseline": {**SHAPES[place], "max_seq_len": 1024, **slots}, "train": train, "data": {"name": "cycle"}}
    tree = grid.baseline_tree(file)
    written = typed(tree)
    corpus = written.data.corpus()
    return Variant("variant", resolved(written, corpus.vocab_size), corpus, {}, tree)


def models() -> list[Model]:
    """All that the catalogue has, but of those that cost the same the first."""
    every = itertools.product(catalogue.names("attention"), catalogue.names("feed_forward"))
    found: dict[Any, Model] = {}
    for model in every:
        price = [match.reached(budget, variant(model, i).settings) for budget in match.COLUMNS for i in (22, 150, 199)]
        found.setdefault(tuple(price), model)
    return list(found.values())


def wholes(node: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted paths of all whole numbers in plain settings."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from wholes(value, f"{above}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{above}{key}"


def settings_of(model: Model) -> list[str]:
    """What can be solved for."""
    return list(wholes(variant(model, 0).plain["model"]))


def spread(every: Sequence[Any], n: int, shift: int) -> list[Any]:
    """So many of them, as far from one another as can be."""
    n = min(n, len(every))
    return [every[(shift * 17 + place * len(every) // n) % len(every)] for place in range(n)]


@dataclass
class Cell:
    """One budget by one setting."""

    budget: str
    by: str
    tolerance: float
    seconds: list[float] = field(default_factory=list)
    worst: float = 0.0
    met: int = 0
    refused: int = 0
    without_effect: int = 0
    crooked: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)

    def solve(self, one: Model, other: Model) -> None:
        """The variant `other` brought to the baseline `one`, in all shapes."""
        spent = 0.0
        for place in range(len(SHAPES)):
            baseline, own = variant(one, place), variant(other, place)
            goal = match.reached(self.budget, baseline.settings)
            if goal is None:
                return
            start = time.process_time()
            found = self._answer(own, goal)
            spent += time.process_time() - start
            if found is not None and place % EACH == len(self.seconds) % EACH:
                self._check(own, goal, found, f"{self.by} for the {self.budget} of {one} by {other} in {SHAPES[place]}")
        self.seconds.append(spent)

    def _answer(self, own: Variant, goal: float) -> Point | None:
        before = match.before(own, self.budget, self.by)
        if before is None:
            return None
        try:
            found = match.solution(own, before, self.budget, self.by, goal, self.tolerance)
        except CrookedError:
            self.crooked += 1
            return None
        if found is None:
            self.without_effect += 1
            return None
        off = mismatch(found.reached, goal)
        if off <= self.tolerance:
            self.met, self.worst = self.met + 1, max(self.worst, off)
        else:
            self.refused += 1
        return found

    def _check(self, own: Variant, goal: float, found: Point, what: str) -> None:
        """Hold an answer against all numbers that are next to it."""
        self.checked += 1
        off, probe = mismatch(found.reached, goal), match.Probe(own, self.budget, self.by)
        beside = range(max(1, found.number - NEIGHBOURS), found.number + NEIGHBOURS + 1)
        offs = {number: mismatch(value, goal) for number in beside if (value := probe.at(number)) is not None}
        if off > self.tolerance:
            better = [number for number, other in offs.items() if other < off]
        elif (before := match.before(own, self.budget, self.by)) and before.number == found.number:
            better = []
        else:
            fine = [number for number, other in offs.items() if other <= self.tolerance]
            better = [number for number in fine if grain(number) > grain(found.number)]
            better += [number for number in fine if grain(number) == grain(found.number) and offs[number] < off]
        if better:
            self.wrong.append(f"{what}: {found.number}, where {better[0]} is better")

    def row(self) -> str:
        """Of the table."""
        counts = [self.met, self.refused, self.without_effect, self.crooked, self.checked, len(self.wrong)]
        worst = f"{100 * self.worst:.2f} %" if self.met else ""
        times = [f"{statistics.median(self.seconds):.2f}", f"{max(self.seconds):.2f}"]
        return f"| {' | '.join([self.budget, f'`{self.by}`', *map(str, counts), worst, *times])} |"


def grain(number: int) -> int:
    """The coarsest that the number is a multiple of."""
    return next(each for each in GRAINS if number % each == 0)


def cells(every: Sequence[Model], pairs: int, tolerance: float) -> Iterator[Cell]:
    """All budgets by all settings, solved."""
    settings = list(dict.fromkeys(by for model in every for by in settings_of(model)))
    for shift, (budget, by) in enumerate(itertools.product(match.COLUMNS, settings)):
        cell = Cell(budget, by, tolerance)
        can = [pair for pair in itertools.permutations(every, 2) if by in settings_of(pair[1])]
        for one, other in spread(can, pairs, shift):
            cell.solve(one, other)
        if cell.seconds:
            yield cell


def where() -> str:
    """The machine and the commit."""
    software = machine.software()
    dirty = " (dirty)" if software["git_dirty"] else ""
    found = f"{machine.processor()}, {os.cpu_count()} CPUs; Python {software['python']}; "
    return f"{found}commit {software['git_commit']}{dirty}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def page(found: Sequence[Cell], every: Sequence[Model], pairs: int, place: str) -> str:
    """The report."""
    times = [each for cell in found for each in cell.seconds]
    names = ("met", "refused", "without_effect", "crooked", "checked")
    met, refused, idle, crooked, checked = (sum(getattr(cell, name) for cell in found) for name in names)
    head = (
        "| budget | by | met | refused | no effect | up and down | checked | wrong | worst mismatch | s | s at most |"
    )
    wrong = [f"- {each}" for cell in found for each in cell.wrong]
    lines = [
        "# Equal budgets over 200 shapes",
        f"{place}. Written by `python tools/match_study.py --pairs {pairs}`.",
        f"{len(every)} models that differ in cost ({', '.join(' with '.join(each) for each in every)}), and "
        f"{len(every) * (len(every) - 1)} pairs of them, of which {pairs} for each budget and setting, evenly "
        f"spread: {len(times)} times 200 shapes. Of {met + refused + idle + crooked} answers {met} meet "
        f"{100 * found[0].tolerance:g} %, and {refused} are refused with the nearest value; of {checked} that were "
        f"held against all numbers near them {len(wrong)} are wrong. 200 shapes take "
        f"{statistics.median(times):.2f} s of CPU time (median) and {max(times):.2f} s at most.",
        "\n".join([head, "|:---|:---|" + "---:|" * 9, *(cell.row() for cell in found)]),
        "`no effect`: the setting does not change the budget, or has no other value. `up and down`: no setting to "
        "match by, and refused as such. `s`: CPU time for 200 shapes of one pair, median and worst.",
        "\n".join(wrong) or "Nothing is wrong.",
    ]
    return "\n\n".join(lines) + "\n"


def main(pairs: int, tolerance: float, out: Path) -> int:
    """Solve, write the report as it goes on, and say whether all was right and soon enough."""
    place, every, found = where(), models(), list[Cell]()
    for cell in cells(every, pairs, tolerance):
        found.append(cell)
        print(cell.row(), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(found, every, pairs, place), encoding="utf-8")
    return 1 if any(cell.wrong or max(cell.seconds) >= LIMIT for cell in found) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=Path("reports/match.md"))
    asked = parser.parse_args()
    sys.exit(main(asked.pairs, asked.tolerance, asked.out))

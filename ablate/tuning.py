"""Where the search for settings stands, beside what is stored: its trials, what they came to, what is chosen of it.

Nothing is noted down on the way. The rows of the tuning trials say which points are next and which is best, so that a
run that goes on, another run in the same folder, `plan` and `status` all see the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ablate import grid, search
from ablate.batches import check_corpus
from ablate.choice import Faults, SettingsError
from ablate.experiment import Experiment
from ablate.results import Store
from ablate.search import Point, Search, best_of, mean_loss
from ablate.tasks import Task, tasks
from ablate.variant import Trial, Variant, trials_of

FINE = ("ok", "diverged")
"""Outcomes of a tuning trial that say all there is to know: a setting at which training diverges is one to avoid."""


@dataclass(frozen=True)
class Candidate:
    """A variant at a point, with a trial for each seed."""

    variant: Variant
    point: Point
    trials: list[Trial]
    losses: list[float | None]
    is_added: bool

    @property
    def loss(self) -> float | None:
        """The mean over the seeds, as `search.Known` gives it."""
        return mean_loss(self.losses)

    def document(self) -> dict[str, Any]:
        """As `experiment.json` gives it."""
        ids = {str(trial.seed): trial.trial_id for trial in self.trials}
        return {"point": self.point, "is_added": self.is_added, "trials": ids}


@dataclass(frozen=True)
class Tuning:
    """The search of one experiment as it stands; `search` is the one that the file asks for, as far as it has grown."""

    experiment: Experiment
    search: Search
    candidates: Mapping[str, list[Candidate]]
    store: Store

    @cached_property
    def trials(self) -> list[Trial]:
        """Those of all points that are decided by now: point after point, so that a run that is cut short has tried
        all variants at as many as it could.
        """
        found = [candidate for candidates in self.candidates.values() for candidate in candidates]
        order = {id(c): i for candidates in self.candidates.values() for i, c in enumerate(candidates)}
        return [trial for each in sorted(found, key=lambda c: order[id(c)]) for trial in each.trials]

    @cached_property
    def is_over(self) -> bool:
        """Whether all points are decided and all their trials have ended."""
        known = all(c.loss is not None for candidates in self.candidates.values() for c in candidates)
        return known and all(len(each) >= self.search.n_points for each in self.candidates.values())

    @cached_property
    def chosen(self) -> dict[str, Candidate]:
        """The best of each variant, once the search is over; nothing of one that had no finite loss at any point."""
        if not self.is_over:
            return {}
        best = {name: best_of([c.loss for c in candidates]) for name, candidates in self.candidates.items()}
        return {name: self.candidates[name][place] for name, place in best.items() if place is not None}

    def outcomes(self) -> Counter[str]:
        """The stored trials by outcome, at this moment."""
        return Counter(row["status"] for trial in self.trials if (row := self.store.trial(trial.trial_id)))

    def told(self) -> Counter[str]:
        """The same, with those that never began as `not run`: also of points that are still to be decided."""
        found = self.outcomes()
        if missing := self._planned() - found.total():
            found["not run"] = missing
        return found

    def left(self, *, retry_failed: bool) -> list[Task]:
        """What is to be done of the points that are decided by now; a sampler may have drawn one of them twice."""
        trials = {trial.trial_id: trial for trial in self.trials}
        return tasks(list(trials.values()), self.store, retry_failed=retry_failed, only="train")

    def tried(self) -> Experiment:
        """The experiment of the search: the variants at their points."""
        variants = [each.variant for candidates in self.candidates.values() for each in candidates]
        return replace(self.experiment, variants=variants, seeds=self.search.seeds, search=None)

    def tuned(self) -> Experiment:
        """The experiment with what was chosen; a variant of which nothing was keeps what the file says."""
        chosen = self.chosen
        variants = [
            search.at(variant, chosen[variant.name].point) if variant.name in chosen else variant
            for variant in self.experiment.variants
        ]
        return replace(self.experiment, variants=variants)

    def opening(self, to_run: int) -> str:
        """What is about to be done, in a line."""
        points = max(map(len, self.candidates.values()))
        size = f"{len(self.candidates)} x {points} x {len(self.search.seeds)} = {len(self.trials)}"
        what = f"{self.experiment.name}: tuning {', '.join(self.search.axes)}"
        return f"{what}: variants x points x seeds = {size} trials so far, {to_run} to run"

    def choices(self) -> list[str]:
        """What was chosen, in a line for each variant."""
        return [f"chosen for {name}: {self._choice(name)}" for name in self.candidates]

    def _choice(self, name: str) -> str:
        if (found := self.chosen.get(name)) is None:
            return "nothing, as no trial had a finite loss: what the file says stands"
        edges = self.search.edges(found.point)
        edge = f", at the edge of what was tried: {', '.join(edges)}" if edges else ""
        return f"{grid.label(found.point)} (mean validation loss {found.loss:.4f}{edge})"

    def added_to(self, document: dict[str, Any]) -> dict[str, Any]:
        """The content of `experiment.json` with the search in it. As long as that is not over, the trials that it
        leads to are not known.
        """
        variants = document["variants"]
        if not self.is_over:
            variants = [{**each, "trials": {}} for each in variants]
        counts = {**document["counts"], "tuning_trials": self._planned()}
        return {**document, "counts": counts, "variants": variants, "tuning": self.document()}

    def document(self) -> dict[str, Any]:
        """What `experiment.json` says of it."""
        corpus = next(iter(self.candidates.values()))[0].variant.corpus
        return {
            "settings": self.search.settings(),
            "sampler": self.search.sampler,
            "seeds": self.search.seeds,
            "is_over": self.is_over,
            "data": {"train_tokens": len(corpus.train), "validation_tokens": len(corpus.validation)},
            "variants": {name: self._document_of(name) for name in self.candidates},
        }

    def _document_of(self, name: str) -> dict[str, Any]:
        candidates, chosen = self.candidates[name], self.chosen.get(name)
        found: dict[str, Any] = {"points": [each.document() for each in candidates], "chosen": None, "edges": []}
        if chosen is not None:
            found |= {"chosen": candidates.index(chosen), "edges": self.search.edges(chosen.point)}
        return found

    def facts(self) -> dict[str, Any]:
        """As `plan --json` and `status --json` give it."""
        outcomes = self.outcomes()
        return {
            "settings": self.search.settings(),
            "sampler": self.search.sampler,
            "seeds": self.search.seeds,
            "points_each": max(self.search.n_points, *map(len, self.candidates.values())),
            "most_points_each": self._most_points(),
            "trials": self._planned(),
            "tokens": self._tokens(),
            "outcomes": dict(outcomes),
            "not_run": self.told()["not run"],
            "left": self._planned() - len(self.trials) + len(self.left(retry_failed=False)),
            "is_over": self.is_over,
            "chosen": {name: each.point for name, each in self.chosen.items()},
            "at_edge": {name: self.search.edges(each.point) for name, each in self.chosen.items()},
        }

    def _planned(self) -> int:
        """Trials, as far as they are decided by now, or known to come."""
        points = sum(max(self.search.n_points, len(each)) for each in self.candidates.values())
        return points * len(self.search.seeds)

    def _tokens(self) -> int | None:
        """What all of them are trained on together, as the file says it; None where their seconds are counted."""
        recipes = {variant.name: variant.settings.train for variant in self.experiment.variants}
        points = {name: max(self.search.n_points, len(each)) for name, each in self.candidates.items()}
        if any(recipe.planned_steps is None for recipe in recipes.values()):
            return None
        each = {name: recipe.n_steps * recipe.batch_tokens for name, recipe in recipes.items()}
        return sum(each[name] * points[name] for name in points) * len(self.search.seeds)

    def _most_points(self) -> int:
        """Of each variant, where a grid grows at every edge."""
        begun: Search | None = self.experiment.search
        if begun is None or begun.sampler != "grid" or self.is_over:
            return max(map(len, self.candidates.values()))
        axes = [axis for axis in begun.axes.values() if isinstance(axis, search.Listed)]
        return math.prod(len(axis.values) + len(axis.ends) for axis in axes)


def tuning(experiment: Experiment, store: Store, device: str, threads: int) -> Tuning | None:
    """The search as it stands; None where the file asks for none."""
    begun = experiment.search
    if begun is None:
        return None
    desk = _Desk(experiment, store, begun, device, threads)
    names = [variant.name for variant in experiment.variants]
    points, grown = begun.points(names, desk.known, desk.possible)
    candidates = {name: [desk.candidate(name, point) for point in each] for name, each in points.items()}
    return Tuning(experiment, grown, candidates, store)


class _Desk:
    """What is asked of the store while points are decided, each thing once."""

    def __init__(self, experiment: Experiment, store: Store, begun: Search, device: str, threads: int) -> None:
        self.experiment, self.store, self.search, self.device, self.threads = experiment, store, begun, device, threads
        self.variants = {variant.name: variant for variant in experiment.variants}
        self.looked_at: dict[tuple[str, str], Candidate] = {}

    def candidate(self, name: str, point: Point) -> Candidate:
        key = (name, grid.label(point))
        if key not in self.looked_at:
            variant = search.for_tuning(self.variants[name], point)
            trials = trials_of(variant, self.search.seeds, self.device, self.threads)
            losses = [self._loss(trial) for trial in trials]
            is_added = self.search.sampler == "grid" and point not in self.search.first
            self.looked_at[key] = Candidate(variant, point, trials, losses, is_added)
        return self.looked_at[key]

    def known(self, name: str, point: Point) -> float | None:
        return self.candidate(name, point).loss

    def _loss(self, trial: Trial) -> float | None:
        """None of a trial that is to be run, or to go on: as `left` sees it without being asked to retry."""
        if tasks([trial], self.store, retry_failed=False, only="train"):
            return None
        row = self.store.trial(trial.trial_id)
        if row is None or row["status"] not in FINE:
            return math.nan
        return row["val_loss"] if row["status"] == "ok" else math.inf

    def possible(self, point: Point) -> bool:
        """Whether all variants can be tried at it."""
        try:
            for variant in self.variants.values():
                tried = search.for_tuning(variant, point)
                check_corpus(tried.corpus, tried.settings.train)
        except (Faults, SettingsError):
            return False
        return True

"""The rows of a trial: what is known of it without running it, what it said, and what stays of an earlier time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from ablate import machine
from ablate.capacity import Capacity
from ablate.child import Child
from ablate.experiment import Experiment
from ablate.job import Past
from ablate.machine import Resources
from ablate.plan import VariantPlan
from ablate.results import Store
from ablate.schema import AA, CONDITIONS, PROFILED
from ablate.tables import Columns
from ablate.tasks import Task


@dataclass(frozen=True)
class Rows:
    """The rows of one experiment's trials on one machine."""

    experiment: Experiment
    plans: Mapping[str, VariantPlan]
    store: Store
    resources: Resources
    software: dict[str, Any] = field(default_factory=machine.software)

    def threads(self, task: Task) -> int:
        """With how many threads it runs."""
        return task.trial.variant.settings.train.threads or self.resources.threads

    def known(self, task: Task, started: datetime, noise: Mapping[str, float]) -> dict[str, Any]:
        """What is known of a trial without having run it; `noise` is what timing shows of equal things here."""
        trial, plan = task.trial, self.plans[task.trial.variant.name]
        settings = trial.variant.settings
        before = task.kept
        if "profile" in task.phases:
            before = {name: value for name, value in before.items() if name not in PROFILED}
        if task.is_new:
            before = {name: value for name, value in before.items() if name not in AA}
        profile_id = trial.profile_id if "profile" in task.phases else before.get("profile_id")
        return {
            **noise,
            **before,
            **self.software,
            "experiment": self.experiment.name,
            "variant": trial.variant.name,
            "trial_id": trial.trial_id,
            "profile_id": profile_id,
            "seed": trial.seed,
            "is_baseline": trial.variant.is_baseline,
            "is_for_tuning": trial.variant.is_for_tuning,
            "config": json.dumps(settings.model_dump(mode="json"), allow_nan=False),
            "changes": json.dumps(trial.variant.changes, allow_nan=False),
            "attempts": task.attempt,
            "started_at": task.before.get("started_at") or started,
            "log": self.store.log_path(trial.trial_id).relative_to(self.store.folder).as_posix(),
            "params_total": plan.cost.params_total,
            "params_active": plan.cost.params_active,
            "params_embedding": plan.cost.params_embedding,
            "flops_per_token": plan.cost.flops_per_token,
            "kv_cache_bytes_per_token": plan.kv_cache_bytes_per_token,
            "device": self.resources.device,
            "threads": self.threads(task),
            "precision": settings.train.precision,
            "corpus_sha256": self.experiment.corpus(trial.variant).sha256,
        }

    def ended(self, task: Task, known: dict[str, Any], running: Child, capacity: Capacity) -> dict[str, Any]:
        """What is known of a trial that has ended, and what it said."""
        ran = _together(_staying(task, known.get("kernels")), running.columns.get("kernels"))
        row = known | _since(running.past) | running.columns | capacity.columns | {"kernels": ran}
        return row | _conditions(task, row)

    def curves(self, task: Task, running: Child) -> Columns:
        """The curves that it told of, or those that are stored and stay."""
        if task.kept and not running.curves:
            return _columns(self.store.curves(task.trial.trial_id))
        return running.curves

    def profiles(self, task: Task, running: Child, capacity: Capacity) -> Columns:
        """What was measured now, after what is stored and stays: of a new profile that is what training measured."""
        new = _joined(running.profiles, capacity.rows)
        if not task.kept:
            return new
        stored = self.store.profiles(task.trial.trial_id).drop(columns="trial_id")
        of_training = stored["phase"] == "train"
        kept = stored[of_training if "profile" in task.phases else ~of_training].astype(object)
        return _joined(_columns(kept.where(kept.notna(), None)), new)


def _since(past: Past | None) -> dict[str, Any]:
    """The attempts that a training was made in, and their beginning. Rows know less: not every attempt leaves one."""
    if past is None:
        return {}
    return {"attempts": past.attempts, "started_at": datetime.fromtimestamp(past.began, UTC)}


def _conditions(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    """Under what the profile was measured, and training: a new profile says nothing of the training before it."""
    if "profile" not in task.phases:
        return {}
    of_training = {name: task.kept[name] for name in CONDITIONS} if task.kept else {}
    seen = json.loads(row.get("profile_conditions") or "{}")
    return {"profile_conditions": json.dumps(seen | {name: row.get(name) for name in CONDITIONS}), **of_training}


_STEPS = ("train", "optimizer")
"""Of what ran by phase that which ran in training steps; the rest did in the profile."""


def _staying(task: Task, kernels: str | None) -> str | None:
    """What ran by phase, without what is measured anew."""
    ran = json.loads(kernels or "{}").items()
    return json.dumps({phase: names for phase, names in ran if (phase in _STEPS) == ("profile" in task.phases)})


def _together(*kernels: str | None) -> str | None:
    """What ran by phase, of several such columns."""
    found = {phase: names for each in kernels if each for phase, names in json.loads(each).items()}
    return json.dumps(found) if found else None


def _columns(frame: pd.DataFrame) -> Columns:
    return {str(name): list(values) for name, values in frame.items()}


def _joined(first: Columns, second: Columns) -> Columns:
    """The rows of both; what one has no column for is null there."""
    sizes = [max(map(len, each.values()), default=0) for each in (first, second)]
    return {
        name: [
            value for each, size in zip((first, second), sizes, strict=True) for value in each.get(name, [None] * size)
        ]
        for name in dict.fromkeys([*first, *second])
    }

"""What the report judges: the planned variants, the rows stored for each, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import pandas as pd

from ablate.interleaved import Rounds
from ablate.metrics import LOSSES, METRICS, Metric, Timing
from ablate.results import Results, is_only_profiled
from ablate.stats import (
    MOST_HIDDEN,
    Difference,
    Summary,
    corrected,
    finite,
    paired_difference,
    summarize,
    values_by_seed,
    visible_by_interval,
)

NOT_FINISHED = "not finished"
ONLY_PROFILED = "only profiled"

ALONE = 1.05
"""Trials at once up to which a trial counts as alone: at its ends another one may have been starting or ending."""

Row = Mapping[str, Any]


def shown_outcome(status: str) -> str:
    """The outcome's word as tables show it."""
    return {"oom": "OOM"}.get(status, status)


def outcome_of(row: Row) -> str:
    """How a trial ended, as tables show it; `ok` is that of one that was trained."""
    return ONLY_PROFILED if is_only_profiled(row) else shown_outcome(str(row.get("status")))


def without_training(variants: Sequence[Variant]) -> bool:
    """Whether what there is of them was only profiled, so that there is no loss to speak of."""
    rows = [row for variant in variants for row in variant.rows]
    return bool(rows) and all(map(is_only_profiled, rows))


@dataclass(frozen=True)
class Variant:
    """One variant: what was planned and what is stored."""

    name: str
    is_baseline: bool
    groups: tuple[str, ...]
    changes: Mapping[str, Any]
    trials: Mapping[str, str]  # seed -> trial id, as planned
    facts: Mapping[str, Any]  # its entry in experiment.json
    rows: Sequence[Row]
    vouched: frozenset[Timing]  # timings of its trials that an A/A check stands behind, and found nothing
    contrasts: Mapping[str, Difference] = field(default_factory=dict)  # column -> minus the baseline, after Holm

    @cached_property
    def outcomes(self) -> Counter[str]:
        """Trials by outcome, those not finished among them."""
        counts = Counter(map(outcome_of, self.rows))
        if self.unfinished:
            counts[NOT_FINISHED] = len(self.unfinished)
        return counts

    @cached_property
    def unfinished(self) -> list[str]:
        """Planned seeds without a row."""
        stored = {row.get("trial_id") for row in self.rows}
        return [seed for seed, trial_id in self.trials.items() if trial_id not in stored]

    @property
    def planned(self) -> int:
        """How many trials it should have."""
        return len(self.rows) + len(self.unfinished)

    @property
    def task(self) -> str:
        """What the model is taught, as the plan has it; nothing where that is not known."""
        return str(self.facts.get("task") or "")

    @property
    def seeds(self) -> int:
        """The seeds that stand behind a loss, or of a variant that was only profiled, behind what was measured."""
        return self.outcomes[ONLY_PROFILED] if without_training([self]) else self.summary("val_loss").n

    @property
    def competes(self) -> bool:
        """Whether any of its trials ended `ok`."""
        return any(row.get("status") == "ok" for row in self.rows)

    @cached_property
    def extents(self) -> frozenset[bool]:
        """Of what competes, whether it was only profiled: of one that was not measured the same, both."""
        return frozenset(is_only_profiled(row) for row in self.rows if row.get("status") == "ok")

    def is_withheld(self, metric: Metric) -> bool:
        """Whether it is a timing of trials that nothing vouches for, so that no verdict on it is given."""
        return metric.timing is not None and metric.timing not in self.vouched

    def by_seed(self, column: str) -> dict[int, float]:
        """The values of `column` that compete, by seed."""
        return values_by_seed(self.rows, column)

    def summary(self, column: str) -> Summary:
        """Mean and sd over the seeds that compete."""
        return summarize(self.by_seed(column).values())

    def exact(self, column: str) -> float | None:
        """The value that all its rows, or else the plan, agree on."""
        stored = [finite(row.get(column)) for row in self.rows]
        known = {each for each in (*stored, finite(self.facts.get(column))) if each is not None}
        return known.pop() if len(known) == 1 else None

    def against(self, other: Variant, metric: Metric) -> Difference:
        """This variant minus the other, paired by seed; if one of them is the baseline, after Holm over all variants.

        Losses of different tasks do not compare, nor does what few steps measured with what all of training did.
        """
        if other.is_baseline and metric.column in self.contrasts:
            return self.contrasts[metric.column]
        if self.is_baseline and metric.column in other.contrasts:
            return other.contrasts[metric.column].reversed()
        if metric.column in LOSSES:
            if self.task != other.task:
                return Difference(None, None, None, 0, "another task")
        elif len(self.extents | other.extents) > 1:
            return Difference(None, None, None, 0, "trained against only profiled")
        return paired_difference(self.by_seed(metric.column), other.by_seed(metric.column), metric.direction)


@dataclass(frozen=True)
class Evidence:
    """All that a report is made of."""

    results: Results
    variants: Sequence[Variant]  # the baseline first
    loss_curves: Mapping[str, Sequence[tuple[float, float | None]]]  # trial id -> (tokens, validation loss)
    profiles: Mapping[str, Sequence[Row]]  # trial id -> its profile, without the single values of a series
    rounds: Rounds
    why_no_plots: str = ""  # where there are to be none

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The document that describes the experiment; empty where there is none."""
        return self.results.experiment

    @property
    def command(self) -> str | None:
        """What runs it again: of what was only profiled no more than that."""
        told: str | None = self.experiment.get("command") or None
        return f"{told} --only profile" if told and without_training(self.variants) else told

    @cached_property
    def baseline(self) -> Variant | None:
        """The baseline, where the experiment still has one."""
        return next((variant for variant in self.variants if variant.is_baseline), None)

    @cached_property
    def rows(self) -> list[tuple[Variant, Row]]:
        """Every stored trial with its variant."""
        return [(variant, row) for variant in self.variants for row in variant.rows]

    @cached_property
    def outcomes(self) -> Counter[str]:
        """All trials by outcome."""
        return sum((variant.outcomes for variant in self.variants), Counter())

    def range_of(self, column: str) -> tuple[float, float] | None:
        """The lowest and the highest value of a column among the trials that ended `ok`."""
        ended_ok = [finite(row.get(column)) for _, row in self.rows if row.get("status") == "ok"]
        known = [value for value in ended_ok if value is not None]
        return (min(known), max(known)) if known else None

    @property
    def planned(self) -> int:
        """How many trials there should be."""
        return sum(variant.planned for variant in self.variants)

    @property
    def unfinished(self) -> int:
        """How many of them have no row."""
        return self.outcomes[NOT_FINISHED]


def evidence_of(results: Results, why_no_plots: str = "") -> Evidence:
    """The stored frames and the plan brought together."""
    rows: dict[str, list[Row]] = {}
    for row in records(results.trials):
        rows.setdefault(str(row.get("variant")), []).append(row)
    entries = results.experiment.get("variants") or _entries_of(rows)
    rounds = Rounds.latest(records(results.repeats))
    variants = [_variant(entry, rows.get(str(entry["name"]), []), rounds) for entry in entries]
    variants.sort(key=lambda variant: not variant.is_baseline)
    variants = contrasted(variants)
    profiles: dict[str, list[Row]] = {}
    for row in records(results.profiles[results.profiles["sample"].isna()]):
        profiles.setdefault(str(row["trial_id"]), []).append(row)
    return Evidence(results, variants, _loss_curves(results.curves), profiles, rounds, why_no_plots)


def contrasted(variants: Sequence[Variant]) -> list[Variant]:
    """The variants with what each measured number differs from the baseline's, as one of all that are compared."""
    baseline = next((variant for variant in variants if variant.is_baseline), None)
    if baseline is None:
        return list(variants)
    others = [variant for variant in variants if not variant.is_baseline]
    columns = {metric.column: _contrasts(others, baseline, metric) for metric in METRICS.values() if metric.noisy}
    return [
        replace(each, contrasts={column: found[each.name] for column, found in columns.items() if each.name in found})
        for each in variants
    ]


def _contrasts(others: Sequence[Variant], baseline: Variant, metric: Metric) -> dict[str, Difference]:
    """After Holm, in which one that is still to come counts too: what is declared now is not taken back for it."""
    if not baseline.by_seed(metric.column):
        return {}
    found = {each.name: each.against(baseline, metric) for each in others}
    pending = [each for each in others if found[each.name].p is None and _may_come(each, baseline, found[each.name])]
    return corrected(found, len(pending))


def _may_come(variant: Variant, baseline: Variant, difference: Difference) -> bool:
    unlike = difference.verdict in ("another task", "trained against only profiled")
    return not unlike and bool({*variant.unfinished, *baseline.unfinished} & variant.trials.keys())


def profiles_of(variants: Sequence[Variant]) -> dict[str, list[str]]:
    """The variants that were profiled in one way, for each way that `profile` has asked for; one, where all is well."""
    found: dict[str, dict[str, None]] = {}
    for variant in variants:
        for row in variant.rows:
            if row.get("status") == "ok" and row.get("profile_id") is not None:
                found.setdefault(str(row["profile_id"]), {})[variant.name] = None
    return {profile_id: list(names) for profile_id, names in found.items()}


def _loss_curves(curves: pd.DataFrame) -> dict[str, list[tuple[float, float | None]]]:
    if curves.empty:
        return {}
    found: dict[str, list[tuple[float, float | None]]] = {}
    for row in records(curves[(curves["split"] == "val") & (curves["metric"] == "loss")]):
        if row["tokens"] is not None:
            found.setdefault(str(row["trial_id"]), []).append((row["tokens"], finite(row["value"])))
    return {trial_id: sorted(points, key=lambda point: point[0]) for trial_id, points in found.items()}


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame as plain Python; what is missing is None."""
    names = [str(name) for name in frame.columns]
    columns = [[_plain_value(value) for value in frame[name]] for name in frame.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _plain_value(value: Any) -> Any:
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def _entries_of(rows: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """A plan made up from the rows, for results whose experiment.json is lost: nothing is known to be missing."""
    return [{"name": name, "is_baseline": bool(group[0].get("is_baseline"))} for name, group in rows.items()]


def _variant(entry: Mapping[str, Any], rows: Sequence[Row], rounds: Rounds) -> Variant:
    return Variant(
        name=str(entry["name"]),
        is_baseline=bool(entry.get("is_baseline")),
        groups=tuple(entry.get("groups") or ()),
        changes=entry.get("changes") or {},
        trials=entry.get("trials") or {},
        facts=entry,
        rows=sorted(rows, key=_seed_of),
        vouched=_vouched(rows, rounds),
    )


def _vouched(rows: Sequence[Row], rounds: Rounds) -> frozenset[Timing]:
    """Training, by the A/A check of the machine. Repeats check their own times, which no trial has, and judge alone."""
    return frozenset[Timing](["step"] if not rounds.rows and aa_of_machine(rows) == "equal" else [])


def aa_of_machine(rows: Sequence[Row]) -> Literal["equal", "differs", "coarse", "unknown"]:
    """What `doctor --aa` found of this machine before the trials that ended well, if each was alone on it."""
    found = [_aa(row) for row in rows if row.get("status") == "ok"]
    known = [bounds for bounds in found if bounds is not None]
    if not known or len(known) < len(found):
        return "unknown"
    if not all(low <= 1 <= high for low, high in known):
        return "differs"
    return "coarse" if any(visible_by_interval(low, high) > MOST_HIDDEN for low, high in known) else "equal"


def _aa(row: Row) -> tuple[float, float] | None:
    low, high, company = (
        finite(row.get(name)) for name in ("aa_step_ratio_low", "aa_step_ratio_high", "trials_at_once")
    )
    if low is None or high is None or low <= 0 or company is None or company > ALONE:
        return None
    return low, high


def _seed_of(row: Row) -> int:
    seed = row.get("seed")
    return -1 if seed is None else int(seed)

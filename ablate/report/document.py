"""`report.json`: for machines, all that the report says, in one document whose order is always the same.

`sections` has every section with its sentences and tables as they are shown, whoever made it: nothing that people read
is missing. Before it stand the figures in full precision, one entry a part. A part adds its own by one line in `PARTS`:
a name and a function from the evidence to plain data, dataclasses or None; None, and what is empty, gets no entry.

Values are in the stored units: seconds, bytes, shares (`metrics` has the unit that tables show, and what they divide
by). What was not measured or is not finite is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ablate.metrics import METRICS
from ablate.report import appendix, budgets, claims, effects, ladder, pareto, scaling, timing, tuning
from ablate.report.comparison import LOSS, best, comparisons
from ablate.report.evidence import Evidence, Row, Variant, outcome_of
from ablate.report.markup import read
from ablate.stats import summarize

SCHEMA = 1
"""Of the document. A name that is removed or means something else raises it; new names do not."""

SAID_OF_THE_EXPERIMENT = ("question", "command", "seeds", "counts", "train", "data", "machine")
OF_A_TRIAL = ("seed", "trial_id", "status", "phase", "reason", "log", "attempts", "steps", "diverged_step")


def written(evidence: Evidence, sections: Sequence[str]) -> bytes:
    """The document of the evidence and of the sections that were made of it, in UTF-8."""
    parts = {name: plain(part(evidence)) for name, part in PARTS.items()}
    document = {
        "schema": SCHEMA,
        **{name: told for name, told in parts.items() if told not in (None, {}, [])},
        "sections": [plain(read(text)) for text in sections],
    }
    return (json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False) + "\n").encode("utf-8")


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: dataclasses as objects, sets in order, what is not finite as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return [plain(each) for each in sorted(value)]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    # A name may hold half of a character, which UTF-8 has no bytes for.
    return str(value).encode("utf-8", "replace").decode("utf-8")


# --- The parts --------------------------------------------------------------------------------------------------------


def experiment(evidence: Evidence) -> dict[str, Any]:
    """What was asked, of what, and how far it is."""
    document = evidence.experiment
    known = {**document, "command": evidence.command}
    told = {name: known[name] for name in SAID_OF_THE_EXPERIMENT if known.get(name) is not None}
    return {
        "name": document.get("name") or evidence.results.folder.name,
        **told,
        "planned": evidence.planned,
        "outcomes": dict(sorted(evidence.outcomes.items())),
        "skipped": evidence.results.skipped,
    }


def metrics(evidence: Evidence) -> dict[str, Any]:
    """What the columns mean that variants have."""
    return {
        name: {
            **{"label": metric.label, "unit": metric.unit, "shown_divided_by": metric.scale},
            **{"better": metric.direction, "exact": not metric.noisy},
        }
        for name, metric in METRICS.items()
        if any(_is_known(each, name) for each in evidence.variants)
    }


def variants(evidence: Evidence) -> list[dict[str, Any]]:
    """Each with its figures and their differences to the baseline."""
    return [_variant(each, evidence.baseline) for each in evidence.variants]


def _variant(variant: Variant, baseline: Variant | None) -> dict[str, Any]:
    return {
        "name": variant.name,
        "is_baseline": variant.is_baseline,
        "changes": variant.changes,
        "notes": variant.facts.get("notes") or [],
        "planned": variant.planned,
        "outcomes": dict(sorted(variant.outcomes.items())),
        "values": {name: _value(variant, name) for name in METRICS if _is_known(variant, name)},
        "to_baseline": {} if baseline is None or variant.is_baseline else _differences(variant, baseline),
    }


def _is_known(variant: Variant, column: str) -> bool:
    return variant.exact(column) is not None or bool(variant.by_seed(column))


def _value(variant: Variant, column: str) -> dict[str, Any]:
    """Of what is exact the one value, else mean and sample sd over the seeds that compete, and theirs."""
    if not METRICS[column].noisy and (exact := variant.exact(column)) is not None:
        return {"exact": exact}
    by_seed = variant.by_seed(column)
    return {**plain(summarize(by_seed.values())), "by_seed": by_seed}


def _differences(variant: Variant, baseline: Variant) -> dict[str, Any]:
    """Of what was measured of both; a timing that nothing vouches for has no verdict."""
    found = {}
    for name, metric in METRICS.items():
        if metric.noisy and variant.by_seed(name) and baseline.by_seed(name):
            difference = variant.against(baseline, metric)
            found[name] = plain(difference)
            if metric is LOSS:  # the others have no table of contrasts
                reckoned = {"effect": difference.effect, "visible": difference.visible}
                found[name] |= {**reckoned, "further_seeds": difference.further_seeds()}
            if any(each.is_withheld(metric) for each in (variant, baseline)):
                found[name]["verdict"] = timing.WITHHELD
    return found


def compared(evidence: Evidence) -> list[dict[str, Any]]:
    """Who stands side by side, who is best at what, and who is on which front of loss and price."""
    return [
        {
            "title": each.title,
            "variants": [variant.name for variant in each.variants],
            "best": {name: won for name, metric in METRICS.items() if (won := best(each.variants, metric))},
            "fronts": {panel.metric.column: panel.front for panel in pareto.panels(each)},
        }
        for each in comparisons(evidence)
    ]


def trials(evidence: Evidence) -> list[dict[str, Any]]:
    """Every planned trial: how it ended, or that it did not."""
    return [
        line
        for variant in evidence.variants
        for line in (
            *(_trial(variant, row) for row in variant.rows),
            *(
                {"variant": variant.name, "seed": int(seed), "trial_id": variant.trials[seed], "status": None}
                for seed in variant.unfinished
            ),
        )
    ]


def _trial(variant: Variant, row: Row) -> dict[str, Any]:
    told = {name: row.get(name) for name in OF_A_TRIAL}
    measured = {name: row[name] for name in METRICS if row.get(name) is not None}
    return {"variant": variant.name, **told, "outcome": outcome_of(row), "values": measured}


def invalid(evidence: Evidence) -> Any:
    """What the plan refused, and why."""
    return evidence.experiment.get("invalid")


PARTS: dict[str, Callable[[Evidence], Any]] = {
    "experiment": experiment,
    "metrics": metrics,
    "variants": variants,
    "claims": claims.data,
    "comparisons": compared,
    "matched": budgets.data,
    "tuning": tuning.data,
    "effects": effects.data,
    "ladder": ladder.data,
    "speed_interleaved": timing.data,
    "scaling": scaling.data,
    "profiles": appendix.data,
    "trials": trials,
    "invalid": invalid,
}

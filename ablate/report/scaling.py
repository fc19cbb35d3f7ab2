"""How time and memory grow with the length of a sequence: the exponents of power laws, and the points behind them."""

from __future__ import annotations

import statistics
from typing import Any

from ablate.metrics import METRICS
from ablate.report import executed
from ablate.report.appendix import phase_table, profile_rows
from ablate.report.evidence import Evidence, Variant
from ablate.report.text import NOT_MEASURED, escape, table
from ablate.stats import PowerLaw, finite, power_law

PHASE = "lengths"
GROWING = [METRICS[name] for name in ("inference_seconds_p50", "training_pass_seconds_p50", "training_pass_bytes_p50")]
BENT = "§"

INTRO = """Time and memory of one sequence as length to the power of e. Each cell has e, fitted to the medians at all
lengths (least squares of logarithms), in brackets its 95 % t interval, then e between the two longest lengths alone.
Passes are of the model as it is written (eager), also where training steps are compiled. Forward and backward are with
the loss of training and without the optimizer; their memory is the most that they hold beyond weights and gradients."""

NOT_STRAIGHT = (
    f"{BENT} No power law: between the two longest lengths it grows otherwise than over all. What does not depend on "
    "the length flattens the short ones; measure longer ones before you quote an exponent."
)


def section(evidence: Evidence) -> str:
    """Exponents and points of every variant; empty where no lengths were measured."""
    measured = [each for each in evidence.variants if any(True for _ in profile_rows(evidence, each, PHASE))]
    if not measured:
        return ""
    rows = [[escape(each.name), _kernels(each), *_exponents(evidence, each)] for each in measured]
    headers = ["variant", "attention kernel in training", *(escape(metric.label) for metric in GROWING), "lengths"]
    notes = [NOT_STRAIGHT] if any(BENT in cell for row in rows for cell in row[2:]) else []
    parts = ["## Scaling with sequence length", INTRO, table(headers, rows), *notes, phase_table(evidence, PHASE)]
    return "\n\n".join(parts)


def data(evidence: Evidence) -> list[dict[str, Any]]:
    """The same for machines: the points of each variant and metric, and the power law through them."""
    series = [(each, metric, points(evidence, each, metric.column)) for each in evidence.variants for metric in GROWING]
    return [
        {"variant": each.name, "metric": metric.column, "by_length": at, "law": power_law(at.keys(), at.values())}
        for each, metric, at in series
        if at
    ]


def points(evidence: Evidence, variant: Variant, column: str) -> dict[int, float]:
    """The value at each length: the median over the trials that ended ok."""
    found: dict[int, list[float]] = {}
    for row in profile_rows(evidence, variant, PHASE):
        value = finite(row["value"])
        if row["metric"] == column and value is not None:
            found.setdefault(int(row["context"]), []).append(value)
    return {length: statistics.median(values) for length, values in sorted(found.items())}


def _exponents(evidence: Evidence, variant: Variant) -> list[str]:
    series = [points(evidence, variant, metric.column) for metric in GROWING]
    laws = [power_law(each.keys(), each.values()) for each in series]
    return [*(_cell(law) for law in laws), str(max(map(len, series)))]


def _cell(law: PowerLaw | None) -> str:
    if law is None:
        return NOT_MEASURED
    interval = "" if law.low is None or law.high is None else f" [{law.low:.2f}, {law.high:.2f}]"
    return f"{law.exponent:.2f}{interval}; {law.local:.2f}{'' if law.is_straight else f' {BENT}'}"


def _kernels(variant: Variant) -> str:
    ended = (row for row in variant.rows if row.get("status") == "ok")
    names = (words for row in ended if (words := executed.training_kernels(row)) is not None)
    return escape(" / ".join(sorted(set(names))) or NOT_MEASURED)

"""What really ran, in words: kernels and ways taken, by phase, the optimizer's form, and what the compiler did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ablate.report.evidence import Evidence, Row
from ablate.report.text import NOT_MEASURED, count_of, escape, list_of

_OPTIMIZER = "optimizer"


def lines(rows: Sequence[Row]) -> str:
    """All of it for the trials of one variant, one fact a line; where they differ, all that there is."""
    facts: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, words in _facts(row):
            facts.setdefault(name, {})[words] = None
    return "<br>".join(f"{name}: {escape(' / '.join(sorted(words)))}" for name, words in facts.items()) or NOT_MEASURED


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    yield from _by_phase(row, paths=True)
    if words := optimizer(row):
        yield _OPTIMIZER, words
    if words := compilation(row):
        again = row.get("recompiles")
        yield "compiled", f"{words}, {count_of(again, 'recompile')}" if again else words


def attention_kernels(row: Row) -> str | None:
    """The fused attention kernels that ran in each phase, or that there was none."""
    return "; ".join(f"{phase}: {words}" for phase, words in _by_phase(row)) or None


def training_kernels(row: Row) -> str | None:
    """Those that ran in training alone."""
    return dict(_by_phase(row)).get("train")


def _by_phase(row: Row, *, paths: bool = False) -> Iterator[tuple[str, str]]:
    """With `paths` also which of several ways to their result modules took."""
    for phase, names in sorted(_kernels(row).items(), reverse=True):
        if phase != _OPTIMIZER:
            fused = [name for name in names if "attention" in name and "backward" not in name]
            words = [name.removeprefix("_scaled_dot_product_") for name in fused] or ["unfused"]
            yield phase, ", ".join([*words, *(name for name in names if paths and name.startswith("path "))])


def optimizer(row: Row) -> str | None:
    """In which form the optimizer's step ran: fused, over all weights at once, or one after the other."""
    names = _kernels(row).get(_OPTIMIZER)
    if names is None:
        return None
    if fused := [name.strip("_") for name in names if "fused" in name]:
        return ", ".join(fused)
    # Counting its steps alone is no more than one such operator.
    return "foreach" if sum("foreach" in name for name in names) > 1 else "for each weight"


def compilation(row: Row) -> str | None:
    """Whether training steps were compiled, and where Python stood between the parts; None where nobody says."""
    if row.get("compiled") is None:
        return None
    if not row["compiled"]:
        return f"no: {fault}" if (fault := row.get("compile_fault")) else "no"
    return f"yes, {count_of(breaks, 'graph break')}" if (breaks := row.get("graph_breaks")) else "yes"


def _kernels(row: Row) -> dict[str, list[str]]:
    return dict(json.loads(row["kernels"])) if row.get("kernels") else {}


def faults(evidence: Evidence) -> Iterator[str]:
    """Trials that should have run compiled and did not, or not all of the time."""
    owners: dict[tuple[bool, str], dict[str, None]] = {}
    for variant, row in evidence.rows:
        if fault := row.get("compile_fault"):
            owners.setdefault((bool(row.get("compiled")), str(fault)), {})[variant.name] = None
    for (compiled, fault), names in owners.items():
        what = "Times are not of compiled steps alone" if compiled else "What was to be compiled ran as it is written"
        yield f"{what}, compare with care: {list_of(list(names))} ({escape(fault)})."

"""Which variant stands at each combination of a design: under every budget that variants were brought to its own."""

from __future__ import annotations

from collections.abc import Mapping

from ablate.report.evidence import Evidence, Variant


def by_budget(evidence: Evidence) -> list[tuple[str, Mapping[str, Variant]]]:
    """The budgets, and by the name that a combination has in the design its variant under them.

    Budgets under which all variants are the same stand together. One without a name where not several are asked for.
    """
    known = {each.name: each for each in evidence.variants}
    budgets = evidence.experiment.get("match") or []
    if len(budgets) < 2:
        return [("", known)]
    base = {each.name: each for each in evidence.variants if each.is_baseline}
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for budget in budgets:
        found.setdefault(tuple(sorted(budget["variants"].items())), []).append(str(budget["budget"]))
    return [
        (" and ".join(names), {**base, **{name: known[now] for name, now in stands if now in known}})
        for stands, names in found.items()
    ]

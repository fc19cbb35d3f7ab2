"""The plots of a comparison, and how large a sequence's cache grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ablate.report import effects, ladder
from ablate.report.comparison import Comparison, comparisons
from ablate.report.curves import loss_plot, paid_plot
from ablate.report.drawing import (
    Look,
    Plot,
    Points,
    add_legend,
    binary_ticks,
    dropped_note,
    grey_note,
    looks_of,
    new_figure,
    svg_of,
)
from ablate.report.evidence import Evidence, Variant, without_training
from ablate.report.hover import name_line
from ablate.report.pareto import pareto_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_MARKERS = 8  # on one curve of cache sizes


def plots_of(evidence: Evidence) -> list[tuple[int, str, list[Plot]]]:
    """A number, a title and the plots of each comparison; before several, what all variants cost, with the number 0."""
    found = comparisons(evidence)
    groups = [(place, each.title, _of_comparison(each, evidence)) for place, each in enumerate(found, start=1)]
    if len(found) > 1 and not without_training(evidence.variants):
        whole = Comparison("all variants", evidence.baseline, evidence.variants)
        groups.insert(0, (0, whole.title, [pareto_plot(whole, evidence, looks_of(whole))]))
    of_axes = [("Effects of the axes", effects.plots(evidence)), ("Ladder of sizes", ladder.plots(evidence))]
    shown = [(title, plots) for title, plots in of_axes if plots]
    return [*groups, *((place, *each) for place, each in enumerate(shown, start=len(found) + 1))]


def _of_comparison(comparison: Comparison, evidence: Evidence) -> list[Plot]:
    looks = looks_of(comparison)
    of_loss = [] if without_training(comparison.variants) else [loss_plot, paid_plot, pareto_plot]
    return [*(plot(comparison, evidence, looks) for plot in of_loss), cache_plot(comparison, looks)]


# --- Cache by length --------------------------------------------------------------------------------------------------


def cache_plot(comparison: Comparison, looks: Mapping[str, Look]) -> Plot:
    """KV cache bytes by context length, on two logarithmic axes."""
    title = "KV cache by context length"
    curves = {each.name: _cache_points(each) for each in comparison.variants}
    curves = {name: points for name, points in curves.items() if points}
    if len(curves) > 1 and len({tuple(points) for points in curves.values()}) == 1:
        return Plot("cache", title, f"{title}: the same for all variants of this comparison.", None)
    kept = {name: [point for point in points if min(point) > 0] for name, points in curves.items()}
    dropped = sum(map(len, curves.values())) - sum(map(len, kept.values()))
    if not any(kept.values()):
        return Plot("cache", title, f"{title}: no data above zero." if dropped else f"{title}: no data.", None)
    caption = (
        "KV cache of one sequence by context length (computed; both axes logarithmic)."
        + grey_note(looks)
        + dropped_note(dropped, "at zero", "at zero")
    )
    return Plot("cache", title, caption, svg_of(lambda: _draw_cache(kept, looks)))


def _cache_points(variant: Variant) -> list[tuple[float, float]]:
    pairs = variant.facts.get("kv_cache_bytes_by_tokens") or []
    return [(float(tokens), float(size)) for tokens, size in pairs if size is not None]


def _draw_cache(curves: Mapping[str, Points], looks: Mapping[str, Look]) -> Figure:
    figure, (axes,) = new_figure(1)
    for name, points in curves.items():
        if points:
            tokens, sizes = zip(*points, strict=True)
            look = looks[name]
            style: dict[str, Any] = {"color": look.colour, "zorder": look.order, "markersize": 4}
            every = math.ceil(len(points) / MOST_MARKERS)
            (line,) = axes.plot(tokens, sizes, look.line, marker=look.marker, markevery=every, **style)
            name_line(line, name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("KV cache ↓ (bytes)")
    for axis in (axes.xaxis, axes.yaxis):
        binary_ticks(axis)
    add_legend(figure, {name: looks[name] for name, points in curves.items() if points})
    return figure

"""Loss against each price that a variant has, and the front of those that nothing beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.metrics import METRICS, Metric
from ablate.report.comparison import CACHE, LOSS, Comparison
from ablate.report.drawing import (
    Look,
    Plot,
    add_legend,
    binary_ticks,
    decimal_ticks,
    engineering,
    grey_note,
    new_figure,
    svg_of,
)
from ablate.report.evidence import Evidence
from ablate.report.hover import leave_out, name_line
from ablate.report.text import list_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_RANGE = 5  # from this ratio on, an axis is logarithmic
FRONT_COLOUR = "#6e6e6e"

MEMORY = [METRICS[name] for name in ("peak_allocated_bytes", "peak_live_bytes", "peak_rss_bytes")]
"""The first that was measured is the memory of a comparison: a device's allocator, or else what stands for it."""

PRICES = [
    CACHE,
    *(METRICS[name] for name in ("train_tokens_per_second", "params_total", "params_active", "flops_per_token")),
]


@dataclass(frozen=True)
class Point:
    """A variant's price and loss, with their sample standard deviations where they were measured."""

    price: float
    price_sd: float
    loss: float
    loss_sd: float


@dataclass(frozen=True)
class Panel:
    """One price: where each variant stands, and who is on the front, from the lowest price figure to the highest."""

    metric: Metric
    points: Mapping[str, Point]
    front: Sequence[str]


def panels(comparison: Comparison) -> list[Panel]:
    """One for each price in which two variants with a loss differ."""
    found = [(metric, _points(comparison, metric)) for metric in _prices(comparison)]
    kept = [(metric, points) for metric, points in found if len({each.price for each in points.values()}) > 1]
    return [Panel(metric, points, front(points, metric)) for metric, points in _without_twins(kept)]


def _prices(comparison: Comparison) -> list[Metric]:
    memory = next((each for each in MEMORY if len(_points(comparison, each)) > 1), None)
    return [*PRICES[:2], *([memory] if memory else []), *PRICES[2:]]


def _without_twins(found: Sequence[tuple[Metric, Mapping[str, Point]]]) -> list[tuple[Metric, Mapping[str, Point]]]:
    """Of a dense model all parameters are active: one panel says it."""
    return [
        (metric, points)
        for metric, points in found
        if metric.column != "params_active" or all(points != other for each, other in found if each != metric)
    ]


def _points(comparison: Comparison, metric: Metric) -> dict[str, Point]:
    """Of variants that are taught the same; what only some of one's trials measured alike is no price of it."""
    alike = [each for each in comparison.variants if each.task == comparison.variants[0].task]
    points = {}
    for each in alike:
        loss, measured = each.summary(LOSS.column), each.summary(metric.column)
        exact = None if metric.noisy else each.exact(metric.column)
        price = measured.mean if exact is None else exact
        if loss.mean is not None and price is not None and len(each.extents) == 1:
            sd = 0.0 if exact is not None else (measured.sd or 0.0) / metric.scale
            points[each.name] = Point(price / metric.scale, sd, loss.mean, loss.sd or 0.0)
    return points


def front(points: Mapping[str, Point], metric: Metric) -> list[str]:
    """Whom no other beats in price and loss at once, by their means; who shares both shares the front."""
    sign = -1 if metric.direction == "higher" else 1
    places = {name: (sign * each.price, each.loss) for name, each in points.items()}
    best = [
        name
        for name, (price, loss) in places.items()
        if not any(p <= price and other <= loss and (p, other) != (price, loss) for p, other in places.values())
    ]
    return sorted(best, key=lambda name: (points[name].price, -sign * points[name].loss))


# --- The picture ------------------------------------------------------------------------------------------------------


def pareto_plot(comparison: Comparison, _: Evidence, looks: Mapping[str, Look]) -> Plot:
    """Validation loss against what it costs; a price that is the same for all has no panel."""
    found, title = panels(comparison), "Loss against cost"
    if not found:
        same = (
            f"{title}: no data, as no two variants with a loss differ in KV cache, speed, memory, parameters or FLOPs."
        )
        return Plot("pareto", title, same, None)
    caption = (
        "Validation loss against cost: means, bars ± sample sd over seeds. Lower is better; "
        + _towards([panel.metric for panel in found])
        + " Line: the front, on which no other variant is better in both, by the means alone; what bars overlap may "
        "change places." + grey_note(looks)
    )
    on_front = "\n".join(f"- {panel.metric.label}: {list_of(panel.front)}" for panel in found)
    svg = svg_of(lambda: _draw(found, looks))
    return Plot("pareto", title, f"{caption}\n\nOn the front of validation loss and of\n\n{on_front}", svg)


def _towards(metrics: Sequence[Metric]) -> str:
    right = [metric.label for metric in metrics if metric.direction == "higher"]
    left = [metric.label for metric in metrics if metric.direction == "lower"]
    sides = [
        f"{side} is cheaper for {' and '.join(names)}" for side, names in (("right", right), ("left", left)) if names
    ]
    return "; ".join(sides) + "."


def _draw(found: Sequence[Panel], looks: Mapping[str, Look]) -> Figure:
    figure, all_axes = new_figure(len(found))
    for axes, panel in zip(all_axes, found, strict=True):
        _draw_front(axes, panel)
        for name, point in panel.points.items():
            _draw_point(axes, name, point, looks[name])
        axes.set_xlabel(panel.metric.heading)
        _scale_x(axes, panel.metric, [point.price for point in panel.points.values()])
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel("validation loss ↓ (nats/token)")
    drawn = {name for panel in found for name in panel.points}
    add_legend(figure, {name: look for name, look in looks.items() if name in drawn}, lines=False)
    return figure


def _draw_front(axes: Axes, panel: Panel) -> None:
    """As steps: between two variants nobody has shown that there is anything better than the worse of both."""
    places = [panel.points[name] for name in panel.front]
    xs, ys = [each.price for each in places], [each.loss for each in places]
    where: Any = "pre" if panel.metric.direction == "higher" else "post"
    (line,) = axes.step(xs, ys, where=where, color=FRONT_COLOUR, linewidth=1.2, zorder=2.5)
    leave_out(line)


def _draw_point(axes: Axes, name: str, point: Point, look: Look) -> None:
    bars: dict[str, Any] = {}
    if look.named:
        bars = {"xerr": point.price_sd or None, "yerr": point.loss_sd or None}
    style: dict[str, Any] = {"color": look.colour, "zorder": look.order}
    drawn = axes.errorbar([point.price], [point.loss], fmt=look.marker, elinewidth=1, **bars, **style)
    name_line(drawn[0], name)


def _scale_x(axes: Axes, metric: Metric, values: Sequence[float]) -> None:
    # A price of zero (a state of fixed size) is a result: such an axis stays linear rather than lose the point.
    if min(values) <= 0 or max(values) / min(values) < WIDE_RANGE:
        engineering(axes.xaxis)
    elif metric.unit.startswith("bytes"):
        axes.set_xscale("log", base=2)
        binary_ticks(axes.xaxis)
    else:
        axes.set_xscale("log")
        decimal_ticks(axes.xaxis)

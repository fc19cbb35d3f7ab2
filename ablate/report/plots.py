"""The plots of a comparison, as SVG that is the same bytes for the same numbers."""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ablate.metrics import METRICS, Metric
from ablate.report.comparison import CACHE, LOSS, Comparison
from ablate.report.evidence import Evidence, Variant, without_training
from ablate.report.text import count_of, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

COST_AXES = [METRICS["train_tokens_per_second"], METRICS["flops_per_token"], CACHE]
PALETTE = (
    *("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd"),
    *("#17becf", "#e377c2", "#8c564b", "#bcbd22", "#5254a3"),
)
BASELINE_COLOUR = "#000000"
OTHERS_COLOUR = "#c4c4c4"
MARKERS = "ovs^Dp<>P*"
LONGEST_NAME = 36
FEWEST_POINTS = 3  # of the second half of a run
MOST_MARKERS = 8  # on one curve of cache sizes
FEW = 6  # so many bands can overlap and still be told apart
WIDE_RANGE = 5  # from this ratio on, an axis is logarithmic


@dataclass(frozen=True)
class Plot:
    """One picture and what is said below it; `svg` is None where there is nothing to draw."""

    slug: str
    title: str
    caption: str
    svg: bytes | None


@dataclass(frozen=True)
class Look:
    """How one variant is drawn, the same in every plot of a comparison."""

    colour: str
    marker: str
    named: bool  # in the legend by its name

    @property
    def order(self) -> float:
        """Named variants lie over the others."""
        return 3 if self.named else 2


def can_draw() -> bool:
    """Whether matplotlib is there. Everything else in a report does without."""
    return importlib.util.find_spec("matplotlib") is not None


def plots_of(comparison: Comparison, evidence: Evidence) -> list[Plot]:
    """All plots of one comparison."""
    looks = looks_of(comparison)
    of_loss = [] if without_training(comparison.variants) else [loss_plot, trade_plot]
    return [*(plot(comparison, evidence, looks) for plot in of_loss), cache_plot(comparison, looks)]


def looks_of(comparison: Comparison) -> dict[str, Look]:
    """Colours for the baseline and the variants of lowest loss; beyond what eyes can tell apart, grey."""
    others = [each for each in comparison.variants if not each.is_baseline]
    if len(others) > len(PALETTE):
        lowest = {each.name for each in sorted(others, key=_mean_loss)[: len(PALETTE)]}
        named = [each for each in others if each.name in lowest]
    else:
        named = others
    looks = {each.name: Look(OTHERS_COLOUR, ".", False) for each in others}
    for place, each in enumerate(named):
        looks[each.name] = Look(PALETTE[place], MARKERS[place], True)
    if comparison.baseline is not None:
        looks[comparison.baseline.name] = Look(BASELINE_COLOUR, "X", True)
    return looks


def _mean_loss(variant: Variant) -> float:
    mean = variant.summary(LOSS.column).mean
    return float("inf") if mean is None else mean


# --- Loss by tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """A variant's validation loss over the seeds that ended `ok`, and the single curves of those that did not."""

    tokens: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    failed: list[Points]


def loss_plot(comparison: Comparison, evidence: Evidence, looks: Mapping[str, Look]) -> Plot:
    """The whole run, and where it has points enough its second half, large, to tell the variants apart."""
    bands = {each.name: _band(each, evidence) for each in comparison.variants}
    bands = {name: band for name, band in bands.items() if band.tokens or band.failed}
    caption = (
        "Validation loss by training tokens: mean over the seeds that ended ok, "
        "band from the lowest to the highest seed."
        + _grey_note(looks)
        + (" Dotted: single trials that did not end ok." if any(band.failed for band in bands.values()) else "")
        + _dropped_note(_not_finite(comparison, evidence), "that is not finite", "that are not finite")
    )
    if not bands:
        return Plot("loss", "Validation loss", "Validation loss by training tokens: no data.", None)
    return Plot("loss", "Validation loss", caption, _svg(lambda: _draw_loss(bands, looks)))


def _band(variant: Variant, evidence: Evidence) -> Band:
    curves: list[dict[float, float]] = []
    failed: list[Points] = []
    for row in variant.rows:
        points = evidence.loss_curves.get(str(row["trial_id"]), [])
        known = [(tokens, value) for tokens, value in points if value is not None]
        if row.get("status") == "ok" and known:
            curves.append(dict(known))
        elif known:
            failed.append(known)
    tokens = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    values = [[curve[each] for curve in curves] for each in tokens]
    mean = [sum(each) / len(each) for each in values]
    return Band(tokens, mean, [min(each) for each in values], [max(each) for each in values], failed)


def _not_finite(comparison: Comparison, evidence: Evidence) -> int:
    ids = [str(row["trial_id"]) for each in comparison.variants for row in each.rows]
    return sum(value is None for trial_id in ids for _, value in evidence.loss_curves.get(trial_id, []))


def _draw_loss(bands: Mapping[str, Band], looks: Mapping[str, Look]) -> Figure:
    settled = [band for band in bands.values() if band.tokens]
    end = max((band.tokens[-1] for band in settled), default=0.0)
    figure, panels = _figure(2 if _has_second_half(settled, end) else 1)
    for axes in panels:
        for name, band in bands.items():
            _draw_band(axes, band, looks[name], 0.18 if len(bands) <= FEW else 0.07)
        axes.set_xlabel("training tokens")
        _engineering(axes.xaxis)
    panels[0].set_ylabel("validation loss (nats/token)")
    for axes, start, title in zip(panels, (0, end / 2), ("whole run", "second half"), strict=False):
        axes.set_title(title)
        if settled:
            _limit(axes, settled, start, end)
    _legend(figure, {name: looks[name] for name in bands}, marked=False)
    return figure


def _has_second_half(bands: Sequence[Band], end: float) -> bool:
    """Whether it is a curve, and not the whole run once more."""
    late = [[tokens for tokens in band.tokens if tokens >= end / 2] for band in bands]
    return any(FEWEST_POINTS <= len(part) < len(band.tokens) for part, band in zip(late, bands, strict=True))


def _draw_band(axes: Axes, band: Band, look: Look, alpha: float) -> None:
    marker = look.marker if len(band.tokens) <= 2 else ""
    if band.tokens:
        style: dict[str, Any] = {"color": look.colour, "zorder": look.order}
        axes.plot(band.tokens, band.mean, linewidth=1.6, marker=marker, **style)
        if look.named:
            axes.fill_between(band.tokens, band.low, band.high, alpha=alpha, linewidth=0, **style)
    for points in band.failed:
        tokens, losses = zip(*points, strict=True)
        axes.plot(tokens, losses, ":", color=look.colour, linewidth=1.4, zorder=look.order)
        axes.plot(tokens[-1:], losses[-1:], "x", color=look.colour, zorder=look.order)


def _limit(axes: Axes, bands: Sequence[Band], start: float, end: float) -> None:
    """Fits the axes to what ended well, so that a diverging curve leaves the picture instead of flattening it."""
    inside = [
        bound
        for band in bands
        for tokens, low, high in zip(band.tokens, band.low, band.high, strict=True)
        if start <= tokens <= end
        for bound in (low, high)
    ]
    margin = 0.05 * (max(inside) - min(inside)) or 0.05
    axes.set_ylim(min(inside) - margin, max(inside) + margin)
    if end > start:
        axes.set_xlim(start - 0.02 * (end - start), end + 0.02 * (end - start))


# --- Loss against cost ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TradePoint:
    """A variant's cost and loss, with their sample standard deviations where they were measured."""

    cost: float
    cost_sd: float
    loss: float
    loss_sd: float


def trade_plot(comparison: Comparison, _: Evidence, looks: Mapping[str, Look]) -> Plot:
    """Validation loss against what it costs; a cost that is the same for all has no panel."""
    panels = [(metric, _trade_points(comparison, metric)) for metric in COST_AXES]
    panels = [(metric, points) for metric, points in panels if len({each.cost for each in points.values()}) > 1]
    if not panels:
        same = "Loss against cost: no data, as no two variants with a loss differ in speed, FLOPs or KV cache."
        return Plot("trade", "Loss against cost", same, None)
    caption = "Validation loss against cost: means, bars ± sample sd over seeds. Lower is better; " + _towards(
        [metric for metric, _ in panels]
    )
    svg = _svg(lambda: _draw_trade(panels, looks))
    return Plot("trade", "Loss against cost", caption + _grey_note(looks), svg)


def _towards(metrics: Sequence[Metric]) -> str:
    right = [metric.label for metric in metrics if metric.direction == "higher"]
    left = [metric.label for metric in metrics if metric.direction == "lower"]
    sides = [f"{side} is cheaper for {', '.join(names)}" for side, names in (("right", right), ("left", left)) if names]
    return "; ".join(sides) + "."


def _trade_points(comparison: Comparison, metric: Metric) -> dict[str, TradePoint]:
    points = {}
    for each in comparison.variants:
        loss = each.summary(LOSS.column)
        measured = each.summary(metric.column)
        cost = measured.mean if metric.noisy else each.exact(metric.column)
        if loss.mean is not None and cost is not None:
            points[each.name] = TradePoint(cost, measured.sd or 0.0, loss.mean, loss.sd or 0.0)
    return points


def _draw_trade(panels: Sequence[tuple[Metric, Mapping[str, TradePoint]]], looks: Mapping[str, Look]) -> Figure:
    figure, all_axes = _figure(len(panels))
    for axes, (metric, points) in zip(all_axes, panels, strict=True):
        for name, point in points.items():
            _draw_point(axes, point, looks[name])
        axes.set_xlabel(metric.heading)
        _scale_x(axes, metric, [point.cost for point in points.values()])
    all_axes[0].set_ylabel("validation loss ↓ (nats/token)")
    drawn = {name for _, points in panels for name in points}
    _legend(figure, {name: look for name, look in looks.items() if name in drawn}, line="")
    return figure


def _draw_point(axes: Axes, point: TradePoint, look: Look) -> None:
    bars: dict[str, Any] = {}
    if look.named:
        bars = {"xerr": point.cost_sd or None, "yerr": point.loss_sd or None}
    style: dict[str, Any] = {"color": look.colour, "zorder": look.order}
    axes.errorbar([point.cost], [point.loss], fmt=look.marker, elinewidth=1, **bars, **style)


def _scale_x(axes: Axes, metric: Metric, values: Sequence[float]) -> None:
    # A cost of zero (a state of fixed size) is a result: such an axis stays linear rather than lose the point.
    if min(values) <= 0 or max(values) / min(values) < WIDE_RANGE:
        _engineering(axes.xaxis)
    elif metric.unit.startswith("bytes"):
        axes.set_xscale("log", base=2)
        _binary_ticks(axes.xaxis)
    else:
        axes.set_xscale("log")
        _decimal_ticks(axes.xaxis)


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
        + _grey_note(looks)
        + _dropped_note(dropped, "at zero", "at zero")
    )
    return Plot("cache", title, caption, _svg(lambda: _draw_cache(kept, looks)))


def _cache_points(variant: Variant) -> list[tuple[float, float]]:
    pairs = variant.facts.get("kv_cache_bytes_by_tokens") or []
    return [(float(tokens), float(size)) for tokens, size in pairs if size is not None]


def _draw_cache(curves: Mapping[str, Points], looks: Mapping[str, Look]) -> Figure:
    figure, (axes,) = _figure(1)
    for name, points in curves.items():
        if points:
            tokens, sizes = zip(*points, strict=True)
            look = looks[name]
            style: dict[str, Any] = {"color": look.colour, "zorder": look.order, "markersize": 4}
            axes.plot(tokens, sizes, marker=look.marker, markevery=math.ceil(len(points) / MOST_MARKERS), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("KV cache ↓ (bytes)")
    for axis in (axes.xaxis, axes.yaxis):
        _binary_ticks(axis)
    _legend(figure, {name: looks[name] for name, points in curves.items() if points})
    return figure


# --- What all plots share ---------------------------------------------------------------------------------------------


@contextmanager
def _house_style() -> Iterator[None]:
    """Matplotlib's own defaults, whatever the user's are, and nothing in the file that changes from run to run."""
    import matplotlib

    # A name in a script that the measuring font lacks is drawn by the reader's own font.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": "ablate",
                "svg.fonttype": "none",
                "font.size": 9,
                "axes.titlesize": 9,
                "axes.grid": True,
                "grid.color": "#e6e6e6",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
            }
        )
        yield


def _svg(draw: Callable[[], Figure]) -> bytes:
    with _house_style():
        buffer = io.BytesIO()
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * panels + 3.4, 3.4), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _legend(figure: Figure, looks: Mapping[str, Look], line: Literal["-", ""] = "-", marked: bool = True) -> None:
    """Outside the axes, so that it covers nothing; all unnamed variants share one entry."""
    from matplotlib.lines import Line2D

    named = [(_short(name), look) for name, look in looks.items() if look.named]
    unnamed = [look for look in looks.values() if not look.named]
    entries = sorted(named, key=lambda entry: entry[1].colour != BASELINE_COLOUR)
    if unnamed:
        entries.append((count_of(len(unnamed), "other variant"), unnamed[0]))
    handles = [
        Line2D([], [], color=look.colour, linestyle=line, marker=look.marker if marked else "") for _, look in entries
    ]
    legend = figure.legend(handles, ["."] * len(handles), loc="outside right upper", frameon=False)
    for text, (label, _) in zip(legend.get_texts(), entries, strict=True):
        # Set afterwards and as plain text: a name may begin with an underscore or hold a dollar sign.
        text.set_parse_math(False)
        text.set_text(label)


def _short(name: str) -> str:
    text = plain(name)
    half = LONGEST_NAME // 2  # names of combinations differ at their ends
    return text if len(text) <= LONGEST_NAME else f"{text[:half]}…{text[-half + 1 :]}"


def _engineering(axis: Axis) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(EngFormatter(sep=" "))


def _decimal_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as numbers in full, not as powers."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
    axis.set_major_formatter(EngFormatter(sep=" "))
    axis.set_minor_locator(NullLocator())


def _binary_ticks(axis: Axis) -> None:
    """The same for an axis in powers of two."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: _binary(value)))
    axis.set_minor_locator(NullLocator())


def _binary(value: float) -> str:
    for unit in ("", " Ki", " Mi", " Gi", " Ti"):
        if abs(value) < 1024:
            return f"{value:g}{unit}"
        value /= 1024
    return f"{value:g} Pi"


def _grey_note(looks: Mapping[str, Look]) -> str:
    unnamed = sum(not look.named for look in looks.values())
    if not unnamed:
        return ""
    return f" Coloured: the baseline and the {len(PALETTE)} variants of lowest loss; grey: {unnamed} others."


def _dropped_note(count: int, one: str, many: str) -> str:
    return f" Not drawn: {count_of(count, 'point')} {one if count == 1 else many}." if count else ""

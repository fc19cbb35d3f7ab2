"""Validation loss as training goes on: by tokens, and by what they cost in FLOPs and in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.metrics import METRICS
from ablate.report.comparison import Comparison
from ablate.report.drawing import (
    Look,
    Plot,
    Points,
    add_legend,
    dropped_note,
    engineering,
    grey_note,
    new_figure,
    svg_of,
)
from ablate.report.evidence import Evidence, Variant
from ablate.report.hover import leave_out, name_line
from ablate.stats import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_POINTS = 3  # of the second half of a run
FEW = 6  # so many bands can overlap and still be told apart
TRAINING = 3  # passes: a training step takes three times the FLOPs of a forward pass
SPEED = METRICS["train_tokens_per_second"]
NO_CHECK = " No A/A check stands behind the speeds of these trials: seconds give no verdict."
LOSS_LABEL = "validation loss ↓ (nats/token)"


@dataclass(frozen=True)
class Band:
    """A variant's validation loss over the seeds that ended `ok`, and the single curves of those that did not."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    failed: list[Points]

    def by(self, price: float) -> Band:
        """The same by what its tokens cost at this price each; who did not end well has no known price."""
        return replace(self, x=[price * each for each in self.x], failed=[])


# --- By tokens --------------------------------------------------------------------------------------------------------


def loss_plot(comparison: Comparison, evidence: Evidence, looks: Mapping[str, Look]) -> Plot:
    """The whole run, and where it has points enough its second half, large, to tell the variants apart."""
    bands = _bands(comparison, evidence)
    caption = (
        "Validation loss by training tokens: mean over the seeds that ended ok, "
        "band from the lowest to the highest seed."
        + grey_note(looks)
        + (" Dotted: single trials that did not end ok." if any(band.failed for band in bands.values()) else "")
        + dropped_note(_not_finite(comparison, evidence), "that is not finite", "that are not finite")
    )
    if not bands:
        return Plot("loss", "Validation loss", "Validation loss by training tokens: no data.", None)
    return Plot("loss", "Validation loss", caption, svg_of(lambda: _draw_loss(bands, looks)))


def _bands(comparison: Comparison, evidence: Evidence) -> dict[str, Band]:
    bands = {each.name: _band(each, evidence) for each in comparison.variants}
    return {name: band for name, band in bands.items() if band.x or band.failed}


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
    settled = [band for band in bands.values() if band.x]
    end = max((band.x[-1] for band in settled), default=0.0)
    figure, panels = new_figure(2 if _has_second_half(settled) else 1)
    for axes, start, title in zip(panels, (0.0, end / 2), ("whole run", "second half"), strict=False):
        _draw_bands(axes, bands, looks)
        axes.set_xlabel("training tokens")
        axes.set_title(title)
        if settled:
            _limit(axes, settled, start, end)
    panels[0].set_ylabel(LOSS_LABEL)
    add_legend(figure, {name: looks[name] for name in bands}, marked=False)
    return figure


def _has_second_half(bands: Sequence[Band]) -> bool:
    """Whether it is a curve, and not the whole run once more."""
    end = max((band.x[-1] for band in bands), default=0.0)
    late = [[x for x in band.x if x >= end / 2] for band in bands]
    return any(FEWEST_POINTS <= len(part) < len(band.x) for part, band in zip(late, bands, strict=True))


# --- By FLOPs and by seconds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """What a variant's training token costs, by variant, and what the axis is called."""

    label: str
    words: str
    of: Mapping[str, float]


def paid_plot(comparison: Comparison, evidence: Evidence, looks: Mapping[str, Look]) -> Plot:
    """The same loss by what was paid for it; a price that is the same for all has no panel: it is as by tokens."""
    title = "Validation loss by what was paid"
    bands = {name: band for name, band in _bands(comparison, evidence).items() if band.x}
    prices = [price for price in _prices(comparison) if len({price.of[name] for name in price.of if name in bands}) > 1]
    if not prices:
        words = "no data, as no two variants with a curve differ in FLOPs or speed" if bands else "no data"
        return Plot("paid", title, f"{title}: {words}.", None)
    caption = (
        f"The same validation loss by {' and by '.join(price.words for price in prices)}; "
        "the beginning of the runs is left out where they have points enough."
        + (NO_CHECK if any(each.is_withheld(SPEED) for each in comparison.variants) else "")
        + grey_note(looks)
    )
    return Plot("paid", title, caption, svg_of(lambda: _draw_paid(bands, prices, looks)))


def _prices(comparison: Comparison) -> Iterator[Price]:
    flops = {each.name: each.exact("flops_per_token") for each in comparison.variants}
    words = "training FLOPs (three times those of a forward pass)"
    yield Price("training FLOPs", words, {name: TRAINING * each for name, each in flops.items() if each})
    seconds = {each.name: _seconds_per_token(each) for each in comparison.variants if True not in each.extents}
    words = "seconds of training (at the mean speed of its trials; without evaluation and compilation)"
    yield Price("training time (s)", words, {name: each for name, each in seconds.items() if each})


def _seconds_per_token(variant: Variant) -> float | None:
    return summarize(1 / speed for speed in variant.by_seed(SPEED.column).values() if speed > 0).mean


def _draw_paid(bands: Mapping[str, Band], prices: Sequence[Price], looks: Mapping[str, Look]) -> Figure:
    figure, panels = new_figure(len(prices))
    for axes, price in zip(panels, prices, strict=True):
        paid = {name: bands[name].by(each) for name, each in price.of.items() if name in bands}
        _draw_bands(axes, paid, looks)
        axes.set_xlabel(price.label)
        late = _has_second_half(list(paid.values()))
        # From where the first of them has half of its run behind it.
        start = min(band.x[-1] for band in paid.values()) / 2 if late else 0.0
        _limit(axes, list(paid.values()), start, max(band.x[-1] for band in paid.values()))
    panels[0].set_ylabel(LOSS_LABEL)
    add_legend(figure, {name: looks[name] for name in bands}, marked=False)
    return figure


# --- What both draw ---------------------------------------------------------------------------------------------------


def _draw_bands(axes: Axes, bands: Mapping[str, Band], looks: Mapping[str, Look]) -> None:
    for name, band in bands.items():
        _draw_band(axes, name, band, looks[name], 0.18 if len(bands) <= FEW else 0.07)
    engineering(axes.xaxis)


def _draw_band(axes: Axes, name: str, band: Band, look: Look, alpha: float) -> None:
    style: dict[str, Any] = {"color": look.colour, "zorder": look.order}
    if band.x:
        marker = look.marker if len(band.x) <= 2 else ""
        width = 1.6 if look.named else 0.7
        (line,) = axes.plot(band.x, band.mean, look.line, linewidth=width, marker=marker, **style)
        name_line(line, name)
        if look.named:
            axes.fill_between(band.x, band.low, band.high, alpha=alpha, linewidth=0, **style)
    for points in band.failed:
        tokens, losses = zip(*points, strict=True)
        (line,) = axes.plot(tokens, losses, ":", linewidth=1.4, **style)
        name_line(line, f"{name} (did not end ok)")
        leave_out(*axes.plot(tokens[-1:], losses[-1:], "x", **style))


def _limit(axes: Axes, bands: Sequence[Band], start: float, end: float) -> None:
    """Fits the axes to what ended well, so that a diverging curve leaves the picture instead of flattening it."""
    inside = [
        bound
        for band in bands
        for x, low, high in zip(band.x, band.low, band.high, strict=True)
        if start <= x <= end
        for bound in (low, high)
    ]
    margin = 0.05 * (max(inside) - min(inside)) or 0.05
    axes.set_ylim(min(inside) - margin, max(inside) + margin)
    if end > start:
        axes.set_xlim(start - 0.02 * (end - start), end + 0.02 * (end - start))

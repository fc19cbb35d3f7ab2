"""The plots: colours that all eyes tell apart, fronts, what was paid, and what a point says under the pointer."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from test_report import Row, curve, entry, results, trial

from ablate.metrics import METRICS
from ablate.report.comparison import Comparison, comparisons
from ablate.report.curves import paid_plot
from ablate.report.drawing import BASELINE_COLOUR, MARKERS, PALETTE, looks_of, svg_of
from ablate.report.evidence import evidence_of
from ablate.report.hover import MOST_OF_A_LINE, MOST_SPOTS, leave_out, name_line
from ablate.report.pareto import Point, front, panels, pareto_plot
from ablate.report.plots import plots_of

# --- Colours ----------------------------------------------------------------------------------------------------------

SEEN_BY = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopes": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopes": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopes": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""What becomes of linear RGB (Machado, Oliveira and Fernandes 2009, IEEE TVCG 15(6), severity 1)."""

XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def times(matrix: Any, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, eyes: Any) -> list[float]:
    """CIE L*a*b* of what such eyes see."""
    srgb = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in srgb]
    seen = [min(1.0, max(0.0, each)) for each in times(eyes, linear)]
    x, y, z = (
        each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116
        for each in (part / white for part, white in zip(times(XYZ, seen), WHITE, strict=True))
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("eyes", SEEN_BY)
def test_all_eyes_tell_the_colours_apart(eyes: str) -> None:
    places = {colour: lab(colour, SEEN_BY[eyes]) for colour in (BASELINE_COLOUR, *PALETTE)}
    least = min(math.dist(places[one], places[other]) for one, other in itertools.combinations(places, 2))
    assert least > 14, "about 2 is just seen side by side; the red and green of many palettes are 7 apart"


def test_no_two_variants_look_alike_without_colours() -> None:
    assert len(MARKERS) == len(set(MARKERS)) == len(PALETTE)


# --- Fronts -----------------------------------------------------------------------------------------------------------

FIGURE = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(FIGURE, FIGURE), min_size=1, max_size=9), st.sampled_from(["lower", "higher"]))
def test_on_the_front_is_whom_nobody_beats(places: list[tuple[float, float]], direction: str) -> None:
    metric = METRICS["params_total"] if direction == "lower" else METRICS["train_tokens_per_second"]
    points = {f"v{n}": Point(price, 0.0, loss, 0.0) for n, (price, loss) in enumerate(places)}

    def beats(one: Point, other: Point) -> bool:
        cheaper = one.price <= other.price if direction == "lower" else one.price >= other.price
        same = (one.price, one.loss) == (other.price, other.loss)
        return cheaper and one.loss <= other.loss and not same

    found = front(points, metric)
    assert set(found) == {n for n, each in points.items() if not any(beats(other, each) for other in points.values())}
    prices = [points[name].price for name in found]
    assert prices == sorted(prices)


def compared(rows: list[Row], variants: list[Row] | None = None, **more: Any) -> tuple[Comparison, Any]:
    evidence = evidence_of(results(rows, variants, **more))
    return comparisons(evidence)[0], evidence


def test_each_price_that_differs_has_a_panel_in_its_unit() -> None:
    rows = [
        trial("baseline", 0, 2.5, peak_rss_bytes=2 * 2**20, train_tokens_per_second=10.0),
        trial("a", 0, 2.4, peak_rss_bytes=3 * 2**20, train_tokens_per_second=20.0, kv_cache_bytes_per_token=128),
        trial("b", 0, None, status="oom", params_total=5, kv_cache_bytes_per_token=1),
    ]
    comparison, _ = compared(rows)
    found = {panel.metric.column: panel for panel in panels(comparison)}
    assert list(found) == ["kv_cache_bytes_per_token", "train_tokens_per_second", "peak_rss_bytes"]
    assert {name: each.price for name, each in found["peak_rss_bytes"].points.items()} == {"baseline": 2.0, "a": 3.0}
    assert found["peak_rss_bytes"].front == ["baseline", "a"]
    assert found["train_tokens_per_second"].front == ["a"]


def test_the_memory_of_a_device_goes_before_that_of_the_process() -> None:
    rows = [trial(name, 0, 2.5, peak_rss_bytes=n, peak_allocated_bytes=n) for n, name in enumerate(("baseline", "a"))]
    assert [panel.metric.column for panel in panels(compared(rows)[0])] == ["peak_allocated_bytes"]


def test_another_task_is_on_no_front() -> None:
    rows = [trial(name, 0, 2.5 - n, params_total=9 - n) for n, name in enumerate(("baseline", "a", "other"))]
    variants = [entry(each["variant"], range(1), task="x" if each["variant"] == "other" else "") for each in rows]
    (total, *_) = panels(compared(rows, variants)[0])
    assert set(total.points) == {"baseline", "a"}


def test_where_no_price_differs_the_report_says_so() -> None:
    comparison, evidence = compared([trial(name, 0, 2.5) for name in ("baseline", "a")])
    plot = pareto_plot(comparison, evidence, looks_of(comparison))
    assert plot.svg is None
    assert "no two variants with a loss differ in KV cache, speed, memory, parameters or FLOPs" in plot.caption


def test_several_comparisons_have_one_front_of_all_before_them() -> None:
    rows = [trial(name, 0, 2.5 + n / 10, params_total=9 + n) for n, name in enumerate(("baseline", "a", "b"))]
    variants = [entry("baseline", range(1)), entry("a", range(1)), entry("b", range(1), ("block",))]
    evidence = evidence_of(results(rows, variants))
    assert [(place, title) for place, title, _ in plots_of(evidence)] == [
        (0, "all variants"),
        (1, "attention"),
        (2, "block"),
    ]


# --- What was paid ----------------------------------------------------------------------------------------------------


def spots(svg: bytes) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [str(each[0].text) for each in root.iter("{http://www.w3.org/2000/svg}circle")]


def test_loss_stands_by_flops_and_by_seconds() -> None:
    rows = [
        trial("baseline", 0, 2.5, flops_per_token=100.0, train_tokens_per_second=50.0),
        trial("a", 0, 2.5, flops_per_token=200.0, train_tokens_per_second=100.0),
    ]
    curves = [each for row in rows for each in curve(row["trial_id"], [3.0, 2.5])]
    comparison, evidence = compared(rows, curves=curves)
    plot = paid_plot(comparison, evidence, looks_of(comparison))
    assert plot.svg is not None
    told = spots(plot.svg)
    assert "baseline\ntraining FLOPs: 300,000\nvalidation loss ↓ (nats/token): 2.5000" in told
    assert "a\ntraining FLOPs: 600,000\nvalidation loss ↓ (nats/token): 2.5000" in told
    assert "baseline\ntraining time (s): 20.000\nvalidation loss ↓ (nats/token): 2.5000" in told
    assert "a\ntraining time (s): 10.000\nvalidation loss ↓ (nats/token): 2.5000" in told


def test_a_price_that_is_the_same_for_all_has_no_panel() -> None:
    rows = [trial(name, 0, 2.5) for name in ("baseline", "a")]
    comparison, evidence = compared(rows, curves=[each for row in rows for each in curve(row["trial_id"], [3.0, 2.5])])
    plot = paid_plot(comparison, evidence, looks_of(comparison))
    assert plot.svg is None
    assert "differ in FLOPs or speed" in plot.caption


# --- Under the pointer ------------------------------------------------------------------------------------------------


def drawn(lines: int = 1, points: int = 3, **style: Any) -> bytes:
    def draw() -> Figure:
        figure = Figure()
        axes = figure.add_subplot()
        for n in range(lines):
            name_line(axes.plot(range(points), [n] * points, **style)[0], f"_v {n} <&>")
        leave_out(*axes.plot([0], [0]))
        axes.set(xlabel="x", ylabel="y")
        return figure

    return svg_of(draw)


def test_each_point_says_whose_it_is_and_its_values() -> None:
    assert spots(drawn()) == [f"_v 0 <&>\nx: {x}\ny: 0" for x in ("0", "1.0000", "2.0000")]


def test_a_spot_lies_where_its_point_is_drawn() -> None:
    svg = drawn(marker="o").decode()
    places = [tuple(map(float, each)) for each in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]
    marks = [tuple(map(float, each)) for each in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', svg)]
    assert len(places) == 3
    for x, y in places:
        assert min(math.hypot(x - mark_x, y - mark_y) for mark_x, mark_y in marks) < 0.1


def test_points_outside_of_the_axes_say_nothing() -> None:
    def draw() -> Figure:
        figure = Figure()
        axes = figure.add_subplot()
        axes.plot([0, 1, 2, math.nan], [0, 1, 2, 3])
        axes.set_xlim(0.5, 1.5)
        return figure

    assert len(spots(svg_of(draw))) == 1


@pytest.mark.parametrize(("lines", "points"), [(1, 500), (200, 50)])
def test_many_points_stay_a_file_that_opens(lines: int, points: int) -> None:
    found = spots(drawn(lines, points))
    assert len(found) <= min(lines * MOST_OF_A_LINE, MOST_SPOTS)
    last = [each for each in found if re.search(rf"(?m)^x: {points - 1}\.0+$", each)]
    assert len(last) == lines, "the last point is the result"


def test_the_pointer_s_part_is_the_same_bytes() -> None:
    assert drawn(3, 30) == drawn(3, 30)


def test_the_plots_are_not_written_by_pyplot() -> None:
    home = Path(__file__).parents[1] / "ablate"
    assert not [path for path in home.rglob("*.py") if "pyplot" in path.read_text(encoding="utf-8")]

"""What a plot says under the pointer: a spot for each point that is drawn, in the SVG itself, so it needs no script.

Every line of every plot has its spots by itself; one that stands for a variant gets its name by `name_line`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ablate.report.text import plain, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MOST_SPOTS = 1500  # in one plot, so that a file with many curves stays a file that opens
MOST_OF_A_LINE = 40
RADIUS = 5
EDGE = 0.5  # dots: what is drawn on the frame is seen
POINTS_PER_INCH = 72  # the unit of matplotlib's SVG

_NAMED = "ablate "
_SILENT = "_silent"


def name_line(line: Line2D, name: str) -> None:
    """Says whose line it is. The name stands in no legend: a legend would leave out one that begins with `_`."""
    line.set_label(_NAMED + name)


def leave_out(line: Line2D) -> None:
    """Says that a line is of points that others have told."""
    line.set_label(_SILENT)


def with_spots(svg: bytes, figure: Figure) -> bytes:
    """The SVG of `figure` with its spots above all that is drawn; the same spots for the same numbers."""
    spots = "".join(_spots(figure))
    if not spots:
        return svg
    head, end, tail = svg.rpartition(b"</svg>")
    return head + f'<g class="spots" fill="none" pointer-events="all">{spots}</g>\n'.encode() + end + tail


def _spots(figure: Figure) -> Iterator[str]:
    lines = [(axes, line) for axes in figure.axes for line in axes.lines if line.get_label() != _SILENT]
    most = max(1, min(MOST_OF_A_LINE, MOST_SPOTS // max(1, len(lines))))
    for axes, line in lines:
        labels = (axes.get_xlabel(), axes.get_ylabel() or _shared_label(axes))
        for x, y, *place in _chosen(_seen(axes, line), most):
            yield _spot(figure, place, _told(line, labels, (x, y)))


def _shared_label(axes: Axes) -> str:
    """Panels of one row have the label of its first."""
    spec = axes.get_subplotspec()
    row = spec.rowspan.start if spec is not None else 0
    beside = (each for each in axes.figure.axes if (own := each.get_subplotspec()) and own.rowspan.start == row)
    return next((label for each in beside if (label := each.get_ylabel())), "")


def _seen(axes: Axes, line: Line2D) -> list[list[float]]:
    """x, y and the place (in dots) of each point that lies inside the axes."""
    import numpy as np

    points = np.asarray(line.get_xydata(), dtype=float)
    points = points[np.isfinite(points).all(axis=1)]
    places = axes.transData.transform(points)
    low, high = axes.bbox.get_points()
    inside = ((low - EDGE <= places) & (places <= high + EDGE)).all(axis=1)
    found: list[list[float]] = np.hstack([points, places])[inside].tolist()
    return found


def _chosen(points: Sequence[list[float]], most: int) -> Sequence[list[float]]:
    """At most so many, evenly, the last among them: it is the result."""
    return points[:: -math.ceil(len(points) / most)][::-1] if points else points


def _told(line: Line2D, labels: tuple[str, str], point: tuple[float, float]) -> str:
    label = str(line.get_label())
    own = label.removeprefix(_NAMED) if label.startswith(_NAMED) else "" if label.startswith("_") else label
    values = [f"{name}: {significant(value, 5)}" for name, value in zip(labels, point, strict=True)]
    return "\n".join(part for part in (plain(own), *map(plain, values)) if part)


def _spot(figure: Figure, place: Sequence[float], told: str) -> str:
    x, y = (each * POINTS_PER_INCH / figure.dpi for each in place)
    height = float(figure.get_figheight()) * POINTS_PER_INCH
    return f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="{RADIUS}"><title>{escape(told)}</title></circle>'

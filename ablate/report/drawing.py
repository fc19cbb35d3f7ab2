"""What all plots share: colours that colour-blind eyes tell apart, axes, legends, and SVG that is the same bytes.

A part of the report that draws its own makes a `Plot` by `svg(lambda: figure)`: spots to hover over come with it.
"""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ablate.report.comparison import LOSS, Comparison
from ablate.report.evidence import Variant
from ablate.report.hover import with_spots
from ablate.report.text import count_of, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

PALETTE = (
    *("#332288", "#cc6677", "#88ccee", "#117733", "#ddcc77"),
    *("#882255", "#44aa99", "#999933", "#aa4499"),
)
"""Tol's muted scheme (Tol 2021, SRON/EPS/TN/09-002): told apart with each kind of colour blindness."""

BASELINE_COLOUR = "#000000"
OTHERS_COLOUR = "#cccccc"
MARKERS = "ovs^Dp<>P"
FEW_COLOURS = 5  # further lines are dashed besides
LONGEST_NAME = 36
MOST_IN_A_ROW = 3  # panels

LineStyle = Literal["-", "--", ""]


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
    line: LineStyle
    named: bool  # in the legend by its name

    @property
    def order(self) -> float:
        """Named variants lie over the others."""
        return 3 if self.named else 2


def can_draw() -> bool:
    """Whether matplotlib is there. Everything else in a report does without."""
    return importlib.util.find_spec("matplotlib") is not None


def looks_of(comparison: Comparison) -> dict[str, Look]:
    """Colours for the baseline and the variants of lowest loss; beyond what eyes can tell apart, grey."""
    others = [each for each in comparison.variants if not each.is_baseline]
    if len(others) > len(PALETTE):
        lowest = {each.name for each in sorted(others, key=_mean_loss)[: len(PALETTE)]}
        named = [each for each in others if each.name in lowest]
    else:
        named = others
    looks = {each.name: Look(OTHERS_COLOUR, ".", "-", False) for each in others}
    for place, each in enumerate(named):
        looks[each.name] = Look(PALETTE[place], MARKERS[place], "-" if place < FEW_COLOURS else "--", True)
    if comparison.baseline is not None:
        looks[comparison.baseline.name] = Look(BASELINE_COLOUR, "X", "-", True)
    return looks


def _mean_loss(variant: Variant) -> float:
    mean = variant.summary(LOSS.column).mean
    return float("inf") if mean is None else mean


# --- Figures ----------------------------------------------------------------------------------------------------------


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


def svg_of(draw: Callable[[], Figure]) -> bytes:
    """What `draw` draws, with its spots to hover over."""
    with _house_style():
        buffer = io.BytesIO()
        figure = draw()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return with_spots(buffer.getvalue(), figure)


def new_figure(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many axes, at most three in a row, and room for a legend on the right."""
    from matplotlib.figure import Figure

    columns = min(panels, MOST_IN_A_ROW)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(3.1 * columns + 3.4, 3.2 * rows + 0.2), layout="constrained", facecolor="white")
    return figure, [figure.add_subplot(rows, columns, place) for place in range(1, panels + 1)]


def add_legend(figure: Figure, looks: Mapping[str, Look], *, lines: bool = True, marked: bool = True) -> None:
    """Outside the axes, so that it covers nothing; all unnamed variants share one entry."""
    from matplotlib.lines import Line2D

    named = [(short(name), look) for name, look in looks.items() if look.named]
    unnamed = [look for look in looks.values() if not look.named]
    entries = sorted(named, key=lambda entry: entry[1].colour != BASELINE_COLOUR)
    if unnamed:
        entries.append((count_of(len(unnamed), "other variant"), unnamed[0]))
    styles = [(look.colour, look.line if lines else "", look.marker if marked else "") for _, look in entries]
    handles = [Line2D([], [], color=colour, linestyle=line, marker=marker) for colour, line, marker in styles]
    legend = figure.legend(handles, ["."] * len(handles), loc="outside right upper", frameon=False, handlelength=2.6)
    for text, (label, _) in zip(legend.get_texts(), entries, strict=True):
        # Set afterwards and as plain text: a name may begin with an underscore or hold a dollar sign.
        text.set_parse_math(False)
        text.set_text(label)


def short(name: str) -> str:
    """Of a long name both ends."""
    text = plain(name)
    half = LONGEST_NAME // 2  # names of combinations differ at their ends
    return text if len(text) <= LONGEST_NAME else f"{text[:half]}…{text[-half + 1 :]}"


def engineering(axis: Axis) -> None:
    """Ticks of a linear axis, thousands and more as `1.5 M`."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    large = EngFormatter(sep=" ")
    axis.set_major_locator(MaxNLocator(5))
    # Below one it would say `500 m`, which a time could be.
    axis.set_major_formatter(FuncFormatter(lambda value, _: large(value) if abs(value) >= 1000 else f"{value:g}"))


def decimal_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as numbers in full, not as powers."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
    axis.set_major_formatter(EngFormatter(sep=" "))
    axis.set_minor_locator(NullLocator())


def binary_ticks(axis: Axis) -> None:
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


def grey_note(looks: Mapping[str, Look]) -> str:
    """Says in a caption which variants have a colour, where not all have."""
    unnamed = sum(not look.named for look in looks.values())
    if not unnamed:
        return ""
    return f" Coloured: the baseline and the {len(PALETTE)} variants of lowest loss; grey: {unnamed} others."


def dropped_note(count: int, one: str, many: str) -> str:
    """Says in a caption how many points are not drawn."""
    return f" Not drawn: {count_of(count, 'point')} {one if count == 1 else many}." if count else ""

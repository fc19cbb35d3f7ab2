"""How names, numbers and tables become Markdown that reads the same in every GFM parser."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ablate.metrics import Metric
from ablate.stats import Difference, Ratio, Summary, finite

NOT_MEASURED = "n/a"
DOES_NOT_APPLY = "—"

LEAST_P = 1e-4
"""A smaller p value is shown as below this."""

# The last two are no characters at all, which XML, and with it a plot, cannot hold.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufffe\uffff\s]+")
# What begins an address becomes a link by itself, and nobody has said where it leads.
_ADDRESS = re.compile(r"(?<=[A-Za-z]):(?=//)|(?<=www)\.", re.IGNORECASE)
# Within a word GFM takes an underscore as it is, so `post_norm` stays greppable in the file.
_SPECIAL = re.compile(r"[&<>\\|`*\[\]~$#]|(?<![^\W_])_|_(?![^\W_])")
# Parsers disagree on what a backslash before an escaped pipe means; an entity leaves no question.
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\\": "&#92;"}


def plain(value: object) -> str:
    """`value` on one line, without control characters, lone surrogates and what turns the direction of writing."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(" ", text).strip()


def escape(value: object) -> str:
    """`value` as Markdown text that shows exactly that, in a table cell or outside one."""
    text = _SPECIAL.sub(lambda match: _ENTITIES.get(match.group(), "\\" + match.group()), plain(value))
    return _ADDRESS.sub(lambda match: f"&#{ord(match.group())};", text)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GFM table of cells that are Markdown already; the first column is text, the rest align right."""
    return _tabulate(headers, rows, ["left"] + ["right"] * (len(headers) - 1))


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GFM table whose columns are all text."""
    return _tabulate(headers, rows, ["left"] * len(headers))


def _tabulate(headers: Sequence[str], rows: Sequence[Sequence[str]], alignment: list[str]) -> str:
    import tabulate

    if any(len(row) != len(headers) for row in rows):
        raise ValueError("a row has another number of cells than the header")
    if not rows:
        return ""
    return tabulate.tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True, colalign=alignment)


def list_of(names: Sequence[str], most: int = 12) -> str:
    """The names, escaped, at most so many of them; the rest counted."""
    shown = ", ".join(escape(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def count_of(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# --- Numbers ----------------------------------------------------------------------------------------------------------


def number(value: Any, metric: Metric) -> str:
    """One value in the metric's unit."""
    if isinstance(value, float) and math.isinf(value):
        return "not finite"
    known = finite(value)
    if known is None:
        return NOT_MEASURED
    shown = known / metric.scale if metric.scale != 1 else known
    return _fixed(shown, _places(shown, metric))


def mean_and_sd(summary: Summary, metric: Metric) -> str:
    """`2.3456 ± 0.0021`; a single seed has no ±."""
    if summary.mean is None:
        return NOT_MEASURED
    mean = summary.mean / metric.scale
    places = _places(mean, metric)
    if summary.sd is None:
        return _fixed(mean, places)
    return f"{_fixed(mean, places)} ± {_fixed(summary.sd / metric.scale, places)}"


def interval(difference: Difference, metric: Metric) -> str:
    """`+0.0120 [-0.0030, +0.0270]`, with one digit more than the metric has where that shows a bound's side of zero."""
    if difference.mean is None:
        return NOT_MEASURED
    bounds = [each / metric.scale for each in (difference.low, difference.high) if each is not None]
    mean = difference.mean / metric.scale
    places = max(_places(mean, metric), *(_visible(each) for each in (mean, *bounds)))
    if metric.decimals is not None:
        places = min(places, metric.decimals + 1)
    # Rounded first, and no zero below zero: what is too small to be seen is +0.
    shown = [_fixed(round(float(each), places) + 0.0, places, sign="+") for each in (mean, *bounds)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]" if bounds else shown[0]


def significant(value: float, digits: int = 4) -> str:
    """A number without a metric: whole ones whole, others with so many significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not finite"
    return _fixed(value, _significant_places(value, digits))


def ratio(value: float | None) -> str:
    """`×0.25`."""
    return NOT_MEASURED if value is None else f"×{significant(float(value), 3)}"


def relative(value: float) -> str:
    """A ratio as a difference from equality: `+4.2 %`."""
    return f"{_percent(value, 1)} %"


def relative_interval(measured: Ratio) -> str:
    """`+4.2 % [+1.1, +7.4]`, with more digits where only they show a bound's side of equality."""
    if measured.mean is None:
        return NOT_MEASURED
    bounds = [each for each in (measured.low, measured.high) if each is not None]
    places = max([1, *(min(4, _visible(100 * (each - 1))) for each in bounds if each != 1)])
    shown = [_percent(each, places) for each in (measured.mean, *bounds)]
    return f"{shown[0]} % [{shown[1]}, {shown[2]}]" if bounds else f"{shown[0]} %"


def p_value(p: float | None) -> str:
    """`0.0123`, or a bound where it is tiny."""
    if p is None:
        return NOT_MEASURED
    return f"below {LEAST_P:.4f}" if p < LEAST_P else f"{p:.4f}"


def _percent(value: float, places: int) -> str:
    return _fixed(round(100 * (value - 1), places) + 0.0, places, sign="+")


def _places(value: float, metric: Metric) -> int:
    if isinstance(value, int):
        return 0
    if metric.decimals is None:
        return _significant_places(value, 4)
    if metric.decimals == 0:
        return 0 if float(value).is_integer() else 1
    return max(metric.decimals, _significant_places(value, 3))


def _visible(value: float) -> int:
    return _significant_places(value, 1)


def _significant_places(value: float, digits: int) -> int:
    if value == 0:
        return 0
    return min(12, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def _fixed(value: float, places: int, sign: str = "") -> str:
    if isinstance(value, float) and (abs(value) >= 1e15 or 0 < abs(value) < 1e-9):
        return f"{value:{sign}.3e}"
    return f"{value:{sign},.{places}f}"

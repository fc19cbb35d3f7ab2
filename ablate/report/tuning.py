"""What was searched for each variant: what is chosen, what that took, and how much the loss depends on the settings."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ablate.report.comparison import Comparison
from ablate.report.drawing import Look, add_legend, dropped_note, grey_note, looks_of, new_figure, svg_of
from ablate.report.evidence import Evidence, Row, Variant, records, shown_outcome
from ablate.report.hover import leave_out, name_line
from ablate.report.pareto import WIDE_RANGE
from ablate.report.text import DOES_NOT_APPLY, NOT_MEASURED, count_of, escape, list_of, significant, table
from ablate.stats import finite

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PLOTS = "plots"
MOST_COLUMNS = 12  # of points in one table
EDGE = "(edge)"

EXPLANATION = """Loss: on the tokens held out for tuning, mean over the tuning seeds (± sample standard deviation); a
setting at which a training diverges is worse than all others. Sensitivity: how much is lost on average over the values
that were tried, against the best of them, where no loss counts for more than that of knowing nothing, ln(vocabulary)
(Wortsman et al. 2023, arXiv 2309.14322); of several settings the others are at their best for each value. FLOPs are
three times those of the forward passes."""


@dataclass(frozen=True)
class Tried:
    """A point, with the rows of its trials; `planned` are as many as there should be."""

    point: Mapping[str, Any]
    rows: Sequence[Row]
    planned: int

    @cached_property
    def losses(self) -> list[float]:
        """Of the trials that ended, infinite where one diverged."""
        ended = [math.inf if row["status"] == "diverged" else finite(row.get("val_loss")) for row in self._ended]
        return [loss for loss in ended if loss is not None]

    @property
    def _ended(self) -> list[Row]:
        return [row for row in self.rows if row["status"] in ("ok", "diverged")]

    @property
    def loss(self) -> float | None:
        """The mean, where all trials came to one."""
        return statistics.fmean(self.losses) if len(self.losses) == self.planned else None

    @property
    def is_finite(self) -> bool:
        """Whether it has a mean that can be the best."""
        return self.loss is not None and math.isfinite(self.loss)

    def cell(self) -> str:
        """The loss, or how the trials ended that have none."""
        if self.is_finite:
            spread = f" ± {statistics.stdev(self.losses):.4f}" if len(self.losses) > 1 else ""
            return f"{statistics.fmean(self.losses):.4f}{spread}"
        counts = Counter(shown_outcome(str(row["status"])) for row in self.rows if row["status"] != "ok")
        missing = ["not finished"] if len(self.rows) < self.planned else []
        return ", ".join([*map(escape, sorted(counts)), *missing]) or NOT_MEASURED


@dataclass(frozen=True)
class Searched:
    """A variant with the points that it was tried at."""

    variant: Variant
    points: Sequence[Tried]
    chosen: Tried | None
    edges: Sequence[str]

    @property
    def rows(self) -> list[Row]:
        """All its tuning trials, each once, also where a sampler has drawn its point again."""
        return list({row["trial_id"]: row for point in self.points for row in point.rows}.values())

    @property
    def ceiling(self) -> float:
        """The loss of a model that knows nothing."""
        size = finite((self.variant.facts.get("config") or {}).get("vocab_size"))
        return math.log(size) if size and size > 1 else math.inf

    def by_value(self, path: str) -> dict[Any, float]:
        """The loss at each value of a setting, with the others at their best; infinite where all diverged."""
        found: dict[Any, float] = {}
        for each in self.points:
            if each.loss is not None:
                value = each.point[path]
                found[value] = min(each.loss, found.get(value, math.inf))
        return found

    def sensitivity(self, path: str) -> float | None:
        """Mean of the losses over the values, none beyond the ceiling, minus the lowest: in the loss's unit."""
        if any(each.loss is None for each in self.points):
            return None
        losses = [min(loss, self.ceiling) for loss in self.by_value(path).values()]
        known = losses and all(map(math.isfinite, losses))
        return statistics.fmean(losses) - min(losses) if known else None


def searched(evidence: Evidence) -> list[Searched]:
    """Each variant's search, in the order of the report; empty where nothing was tuned."""
    tuning = _tuning(evidence)
    rows: dict[str, Row] = {str(row["trial_id"]): row for row in records(evidence.results.tuning)}
    found = []
    for variant in evidence.variants:
        each = tuning.get("variants", {}).get(variant.name)
        if each is None:
            continue
        points = [_tried(point, rows) for point in each["points"]]
        chosen = points[each["chosen"]] if each.get("chosen") is not None else None
        found.append(Searched(variant, points, chosen, each.get("edges") or ()))
    return found


def _tried(point: Mapping[str, Any], rows: Mapping[str, Row]) -> Tried:
    ids = point["trials"].values()
    return Tried(point["point"], [rows[each] for each in ids if each in rows], len(ids))


def _tuning(evidence: Evidence) -> Mapping[str, Any]:
    return evidence.experiment.get("tuning") or {}


def settings(evidence: Evidence) -> list[str]:
    """The paths of the settings that are tuned."""
    return list(_tuning(evidence).get("settings", {}))


def is_under_way(evidence: Evidence) -> bool:
    """Whether the search is not over, so that it is not known which trials it leads to."""
    return bool(_tuning(evidence)) and not _tuning(evidence).get("is_over")


def progress(evidence: Evidence) -> str:
    """How far the search is, in a sentence; empty where it is over, or there is none."""
    if not is_under_way(evidence):
        return ""
    planned = (evidence.experiment.get("counts") or {}).get("tuning_trials") or 0
    ended = sum(row["status"] != "interrupted" for each in searched(evidence) for row in each.rows)
    return (
        f"Settings are still being tuned: {ended:,} of {count_of(int(planned), 'tuning trial')} "
        f"{'has' if ended == 1 else 'have'} ended. The trials themselves come after that."
    )


def cautions(evidence: Evidence) -> Iterator[str]:
    """Choices that a wider search might change, and variants without one."""
    found = searched(evidence)
    for path in settings(evidence):
        if names := [each.variant.name for each in found if path in each.edges]:
            yield (
                f"The best {escape(path)} of {list_of(names)} lies at the edge of what was tried: "
                "a value beyond may suit better."
            )
    if not is_under_way(evidence) and (names := [each.variant.name for each in found if each.chosen is None]):
        yield f"No tuning trial had a finite loss, so that the file's own settings stand: {list_of(names)}."
    failed = {each.variant.name: None for each in found for row in each.rows if row["status"] not in ("ok", "diverged")}
    if failed and not is_under_way(evidence):
        yield f"Not all tuning trials came to a loss, and points without one cannot be chosen: {list_of(list(failed))}."


# --- The section ------------------------------------------------------------------------------------------------------


def section(evidence: Evidence, files: dict[str, bytes]) -> str:
    """Choices, their price, all losses, and a plot for each setting; empty where nothing was tuned."""
    found = searched(evidence)
    if not found:
        return ""
    plots = [_plot(found, path, evidence) for path in settings(evidence)] if not evidence.why_no_plots else []
    parts = ["## Tuning", _intro(evidence, found), _choices(evidence, found), _losses(found), EXPLANATION]
    for place, (path, caption, svg) in enumerate((plot for plot in plots if plot), start=1):
        name = f"{place}-tuning.svg"
        files[name] = svg
        parts.append(f"![Loss by {escape(path)}]({PLOTS}/{name})\n\n{caption}")
    return "\n\n".join(part for part in parts if part)


def _intro(evidence: Evidence, found: Sequence[Searched]) -> str:
    tuning = _tuning(evidence)
    what = "; ".join(f"{escape(path)}: {_values(values)}" for path, values in tuning["settings"].items())
    seeds, data = ", ".join(escape(seed) for seed in tuning["seeds"]), tuning.get("data") or {}
    rows = [row for each in found for row in each.rows]
    counts = Counter(shown_outcome(str(row["status"])) for row in rows)
    outcomes = ", ".join(f"{number:,} {escape(word)}" for word, number in sorted(counts.items())) or "none ended yet"
    where = f"{data.get('train_tokens', 0):,} tokens to train on, {data.get('validation_tokens', 0):,} held out"
    return (
        f"Searched for each variant ({escape(tuning['sampler'])}): {what}. Each point is trained with the seeds "
        f"{seeds} on the training split alone ({where}): the validation split and the seeds of all other tables have "
        f"no part in it. Tuning trials: {outcomes}. {_share(evidence, rows)}{progress(evidence)}"
    ).rstrip()


def _values(values: Any) -> str:
    if isinstance(values, Mapping):
        scale = " (logarithmic)" if values.get("log") else ""
        return f"{_value(values['low'])} to {_value(values['high'])}{scale}"
    return ", ".join(map(_value, values))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return escape(value)


def _share(evidence: Evidence, rows: Sequence[Row]) -> str:
    """What it took, by what the trials themselves have taken by now."""
    own, others = _flops(rows), _flops([row for _, row in evidence.rows])
    return f"They took {own / others:.2g} times the FLOPs of the trials themselves. " if own and others else ""


def _choices(evidence: Evidence, found: Sequence[Searched]) -> str:
    paths = settings(evidence)
    numeric = [path for path in paths if _has_sensitivity(evidence, path)]
    headers = [
        "variant",
        *(f"chosen {escape(path)}" for path in paths),
        "loss at it (nats/token)",
        *(f"sensitivity to {escape(path)} ↓ (nats/token)" for path in numeric),
        *("points", "trials", "tokens", "FLOPs", "seconds"),
    ]
    return table(headers, [_choice(each, paths, numeric) for each in found])


def data(evidence: Evidence) -> list[dict[str, Any]]:
    """The same for machines; an infinite loss, of a training that diverged, is null there."""
    paths = [path for path in settings(evidence) if _has_sensitivity(evidence, path)]
    return [
        {
            "variant": each.variant.name,
            "chosen": None if each.chosen is None else each.chosen.point,
            "edges": each.edges,
            "sensitivity": {path: each.sensitivity(path) for path in paths},
            "points": [
                {"point": p.point, "losses": p.losses, "mean": p.loss, "trials": p.planned} for p in each.points
            ],
            **_price(each.rows),
        }
        for each in searched(evidence)
    ]


def _price(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """What trials took."""
    return {
        "trials": len(rows),
        "tokens": sum(int(row["tokens"]) for row in rows if row.get("tokens") is not None),
        "flops": _flops(rows) or None,
        "seconds": sum(value for row in rows if (value := finite(row.get("wall_seconds"))) is not None),
    }


def _choice(each: Searched, paths: Sequence[str], numeric: Sequence[str]) -> list[str]:
    chosen = [
        DOES_NOT_APPLY if each.chosen is None else _value(each.chosen.point[path]) + f" {EDGE}" * (path in each.edges)
        for path in paths
    ]
    felt = [each.sensitivity(path) for path in numeric]
    price = _price(each.rows)
    return [
        escape(each.variant.name),
        *chosen,
        DOES_NOT_APPLY if each.chosen is None else each.chosen.cell(),
        *(NOT_MEASURED if value is None else f"{value:.4f}" for value in felt),
        f"{len(each.points)}",
        f"{price['trials']:,}",
        f"{price['tokens']:,}",
        f"{price['flops']:.3g}" if price["flops"] else NOT_MEASURED,
        significant(float(price["seconds"] or 0), 3),
    ]


def _flops(rows: Sequence[Row]) -> float:
    known = ((finite(row.get("flops_per_token")), finite(row.get("tokens"))) for row in rows)
    return sum((3 * price * tokens for price, tokens in known if price is not None and tokens is not None), 0.0)


def _has_sensitivity(evidence: Evidence, path: str) -> bool:
    """Whether the loss was tried over numbers that do not depend on the losses, as those of TPE do."""
    tuning = _tuning(evidence)
    values = tuning["settings"][path]
    numbers = isinstance(values, Mapping) or all(isinstance(each, int | float) for each in values)
    return numbers and tuning["sampler"] != "tpe"


def _losses(found: Sequence[Searched]) -> str:
    """All losses, where the variants were tried at the same points, and so few that a table has room for them."""
    points = [each.point for each in found[0].points]
    alike = all([point.point for point in each.points] == points for each in found)
    if not alike or len(points) > MOST_COLUMNS:
        return ""
    order = sorted(range(len(points)), key=lambda i: [_rank(value) for value in points[i].values()])
    headers = [", ".join(f"{escape(path)} {_value(value)}" for path, value in points[i].items()) for i in order]
    rows = [[escape(each.variant.name), *(each.points[i].cell() for i in order)] for each in found]
    return table(["variant", *headers], rows)


def _rank(value: Any) -> tuple[float, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (float(value), "") if is_number else (math.inf, str(value))


# --- The plot ---------------------------------------------------------------------------------------------------------


def _plot(found: Sequence[Searched], path: str, evidence: Evidence) -> tuple[str, str, bytes] | None:
    """Loss by one setting, a line a variant; None where the setting has no numbers, or no loss is known."""
    lines = {each.variant.name: each.by_value(path) for each in found}
    lines = {name: line for name, line in lines.items() if all(_rank(value)[0] < math.inf for value in line)}
    points = {name: sorted((x, y) for x, y in line.items() if math.isfinite(y)) for name, line in lines.items()}
    points = {name: each for name, each in points.items() if each}
    if not points:
        return None
    looks = looks_of(Comparison("tuning", evidence.baseline, evidence.variants))
    chosen = {each.variant.name: each.chosen.point[path] for each in found if each.chosen is not None}
    ceiling = max(each.ceiling for each in found)
    is_drawn = _tuning(evidence)["sampler"] != "grid"
    dropped = sum(not math.isfinite(y) for line in lines.values() for y in line.values())
    caption = (
        f"Loss on the tokens held out for tuning by {escape(path)}, mean over the tuning seeds; ringed: the chosen one."
        + (" Other settings are at their best for each value." if len(settings(evidence)) > 1 and not is_drawn else "")
        + grey_note(looks)
        + dropped_note(dropped, "at which a training diverged", "at which a training diverged")
    )
    return path, caption, svg_of(lambda: _draw(points, path, looks, chosen, ceiling, "" if is_drawn else "-"))


def _draw(
    points: Mapping[str, Sequence[tuple[float, float]]],
    path: str,
    looks: Mapping[str, Look],
    chosen: Mapping[str, float],
    ceiling: float,
    line: str,
) -> Figure:
    figure, (axes,) = new_figure(1)
    for name, each in points.items():
        look, (xs, ys) = looks[name], zip(*each, strict=True)
        style: dict[str, Any] = {"color": look.colour, "zorder": look.order}
        (drawn,) = axes.plot(xs, ys, line, marker=look.marker, markersize=4, linewidth=1.4, **style)
        name_line(drawn, name)
        best = chosen.get(name)
        if best is not None and best in xs and look.named:
            ring: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "linestyle": ""}
            (circle,) = axes.plot([best], [dict(each)[best]], marker="o", **ring, **style)
            leave_out(circle)
    everywhere = [x for each in points.values() for x, _ in each]
    if min(everywhere) > 0 and max(everywhere) > WIDE_RANGE * min(everywhere):
        axes.set_xscale("log")
        _ticks(axes.xaxis)
    heights = [y for each in points.values() for _, y in each]
    top = min(max(heights), max(ceiling, min(heights)))  # a loss far above that of knowing nothing would flatten all
    margin = 0.05 * (top - min(heights)) or 0.05
    axes.set_ylim(min(heights) - margin, top + margin)
    axes.set_xlabel(path)
    axes.set_ylabel("loss at tuning ↓ (nats/token)")
    add_legend(figure, {name: looks[name] for name in points}, lines=bool(line))
    return figure


def _ticks(axis: Axis) -> None:
    """Numbers as the file has them, `0.003`: a learning rate of 3 m would be read as metres."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 3), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())

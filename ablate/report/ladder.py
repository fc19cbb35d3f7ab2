"""How each variant's loss falls with size, and whether the better one stays the better one at every size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ablate.laws import LEAST_FOR_FLOOR, Law, Order, law, order
from ablate.metrics import metric_of
from ablate.report.comparison import LOSS
from ablate.report.contrasts import what_would_decide, what_would_decide_first
from ablate.report.drawing import (
    BASELINE_COLOUR,
    FEW_COLOURS,
    MARKERS,
    OTHERS_COLOUR,
    PALETTE,
    Look,
    Plot,
    add_legend,
    decimal_ticks,
    new_figure,
    svg_of,
)
from ablate.report.evidence import Evidence, Variant
from ablate.report.hover import leave_out, name_line
from ablate.report.placed import by_budget
from ablate.report.text import DOES_NOT_APPLY, NOT_MEASURED, count_of, escape, interval, list_of, mean_and_sd, table
from ablate.stats import Difference, corrected, finite, paired_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALE = "scale"
PASSES = 3
"""Forward passes that a training step costs, forward and backward together."""

BENT = "§"
_EXPONENT = metric_of("exponent")

INTRO = """Loss as size to the power of e, fitted to each seed's losses at all sizes (least squares of logarithms);
in brackets the 95 % t interval over seeds, which says nothing of sizes beyond these. Parameters are all that there are;
training FLOPs are three forward passes of all training tokens."""

NOT_STRAIGHT = (
    f"{BENT} No power law: between the two largest sizes the exponent is clearly another than over all. Do not go "
    "beyond these sizes by it."
)


@dataclass(frozen=True)
class Ladder:
    """One form at several sizes: the variant at each factor, the smallest first; `missing` counts those without."""

    name: str
    rungs: Mapping[float, Variant]
    missing: Mapping[str, int]

    @cached_property
    def losses(self) -> dict[float, dict[int, float]]:
        """By factor and seed, where there is any."""
        return {factor: found for factor, each in self.rungs.items() if (found := each.by_seed(LOSS.column))}

    @cached_property
    def seeds(self) -> list[int]:
        """Those that every size with a loss has one with."""
        return sorted(set.intersection(*map(set, self.losses.values()))) if self.losses else []

    def law(self, size: Size) -> Law | None:
        """Over `size`; None where fewer than two sizes differ in it, or one does not know it."""
        found = {seed: self._points(size, seed) for seed in self.seeds}
        if any(len(points) < len(self.losses) for points in found.values()):
            return None
        return law(found)

    def _points(self, size: Size, seed: int) -> list[tuple[float, float]]:
        pairs = ((size.of(self.rungs[factor], seed), at[seed]) for factor, at in self.losses.items())
        return sorted((x, loss) for x, loss in pairs if x)


@dataclass(frozen=True)
class Size:
    """What a loss is bought with: its name, and a function from a variant and a seed to a number."""

    name: str
    of: Callable[[Variant, int], float | None]


def _parameters(variant: Variant, _: int) -> float | None:
    return variant.exact("params_total")


def _tokens(variant: Variant, seed: int) -> float | None:
    return next((finite(row.get("tokens")) for row in variant.rows if row.get("seed") == seed), None)


def _flops(variant: Variant, seed: int) -> float | None:
    tokens, price = _tokens(variant, seed), variant.exact("flops_per_token")
    return None if tokens is None or price is None else PASSES * price * tokens


SIZES = (Size("parameters", _parameters), Size("training FLOPs", _flops), Size("training tokens", _tokens))


def found(evidence: Evidence) -> list[Ladder]:
    """One for each combination of the other axes; none where `scale` is no axis of several numbers."""
    design = evidence.experiment.get("design") or {}
    axes = design.get("axes", [])
    at = next((i for i, axis in enumerate(axes) if axis["path"] == SCALE and _is_ladder(axis)), None)
    if at is None:
        return []
    groups: dict[tuple[int | None, ...], list[Mapping[str, Any]]] = {}
    for cell in design["cells"]:
        if cell["levels"][at] is not None:
            groups.setdefault((*cell["levels"][:at], None, *cell["levels"][at + 1 :]), []).append(cell)
    ladders: dict[tuple[str, ...], Ladder] = {}
    for (budget, variants), (levels, cells) in itertools.product(by_budget(evidence), groups.items()):
        one = _ladder(levels, cells, axes, at, variants, budget)
        ladders.setdefault(tuple(each.name for each in one.rungs.values()), one)  # the same variants are one ladder
    return list(ladders.values())


def _is_ladder(axis: Mapping[str, Any]) -> bool:
    numbers = [each for each in axis["values"] if isinstance(each, int | float) and not isinstance(each, bool)]
    return len(set(numbers)) > 1 and len(numbers) == len(axis["values"])


def _ladder(
    levels: tuple[int | None, ...],
    cells: Sequence[Mapping[str, Any]],
    axes: Sequence[Mapping[str, Any]],
    at: int,
    variants: Mapping[str, Variant],
    budget: str,
) -> Ladder:
    rungs: dict[float, Variant] = {}
    missing: dict[str, int] = {}
    for cell in cells:
        if (variant := variants.get(cell["variant"])) is None:
            why = cell["missing"] or "unknown"
            missing[why] = missing.get(why, 0) + 1
        else:
            rungs[float(axes[at]["values"][cell["levels"][at]])] = variant
    told = [
        f"{axis['path']}={axis['levels'][level]}"
        for axis, level in zip(axes, levels, strict=True)
        if level is not None and level != axis["reference"]
    ]
    name = ",".join(told) + f"@{budget}" * bool(budget) if told else "baseline"
    return Ladder(name, dict(sorted(rungs.items())), missing)


# --- Words ------------------------------------------------------------------------------------------------------------


def section(evidence: Evidence) -> str:
    """Losses, exponents and the order at every size; empty without a ladder that has a loss."""
    ladders = [each for each in found(evidence) if each.losses]
    if not ladders:
        return ""
    parts = ["## Ladder of sizes", INTRO, _exponents(ladders), *_marks(ladders), _losses(ladders), *_order(ladders)]
    return "\n\n".join(parts)


def _exponents(ladders: Sequence[Ladder]) -> str:
    gains = _gains(ladders)
    headers = ["variant", *(f"e by {size.name}" for size in SIZES), "e by parameters, minus the first's"]
    headers += ["floor; e above it, by parameters", "sizes", "seeds"]
    rows = [
        [
            escape(each.name),
            *(_exponent(each, size) for size in SIZES),
            _gain(gains.get(each.name)),
            _floor(each),
            _sizes(each),
            str(len(each.seeds)),
        ]
        for each in ladders
    ]
    return table(headers, rows)


def _exponent(ladder: Ladder, size: Size) -> str:
    if len(ladder.losses) > 1 and len(_xs(ladder, size)) == 1:
        return DOES_NOT_APPLY
    if (found := ladder.law(size)) is None:
        return NOT_MEASURED
    return _with_interval(found.exponent) + (f" {BENT}" if _is_bent(found) else "")


def _xs(ladder: Ladder, size: Size) -> set[float | None]:
    return {size.of(ladder.rungs[factor], seed) for factor in ladder.losses for seed in ladder.seeds}


def _is_bent(found: Law) -> bool:
    return found.rungs > 2 and found.bend.is_clear


def _with_interval(found: Difference, places: int = 3) -> str:
    interval = "" if found.low is None or found.high is None else f" [{found.low:.{places}f}, {found.high:.{places}f}]"
    return f"{found.mean:.{places}f}{interval}"


def _gains(ladders: Sequence[Ladder]) -> dict[str, Difference]:
    """Exponents by parameters less that of the first ladder, paired by seed, after Holm over them."""
    laws = {each.name: found for each in ladders if (found := each.law(SIZES[0])) is not None}
    first = laws.get(ladders[0].name)
    others = {name: each for name, each in laws.items() if name != ladders[0].name}
    if first is None:
        return {}
    return corrected(
        {name: paired_difference(each.exponents, first.exponents, LOSS.direction) for name, each in others.items()}
    )


def _gain(found: Difference | None) -> str:
    """A steeper fall gains with size."""
    if found is None or found.mean is None:
        return DOES_NOT_APPLY
    words = {"better": "gains with size", "worse": "loses with size"}
    said = words.get(found.verdict, found.verdict) + what_would_decide(found)
    return f"{interval(found, _EXPONENT)} {said}"


def _floor(ladder: Ladder) -> str:
    found = ladder.law(SIZES[0])
    if found is None or len(ladder.losses) < LEAST_FOR_FLOOR:
        return DOES_NOT_APPLY
    if found.floor is None or found.above is None:
        return "not determined"
    return f"{_with_interval(found.floor)}; {_with_interval(found.above)}"


def _sizes(ladder: Ladder) -> str:
    """`3`, or `2 of 4 (1 invalid, 1 no result)`."""
    lost = dict(ladder.missing)
    if without := len(ladder.rungs) - len(ladder.losses):
        lost["no result"] = without
    if not lost:
        return str(len(ladder.losses))
    why = ", ".join(f"{number} {escape(reason)}" for reason, number in sorted(lost.items()))
    return f"{len(ladder.losses)} of {len(ladder.losses) + sum(lost.values())} ({why})"


def _marks(ladders: Sequence[Ladder]) -> Iterator[str]:
    laws = [found for each in ladders for size in SIZES if (found := each.law(size)) is not None]
    if any(map(_is_bent, laws)):
        yield NOT_STRAIGHT
    if all(len(each.losses) < LEAST_FOR_FLOOR for each in ladders):
        yield f"A floor, below which no size gets, is sought from {LEAST_FOR_FLOOR} sizes on."


def _losses(ladders: Sequence[Ladder]) -> str:
    factors = sorted({factor for each in ladders for factor in each.rungs})
    headers = ["variant", *(f"{LOSS.label} at scale {factor:g}" for factor in factors)]
    return table(headers, [[escape(each.name), *(_loss(each, factor) for factor in factors)] for each in ladders])


def _loss(ladder: Ladder, factor: float) -> str:
    if factor not in ladder.rungs:
        return DOES_NOT_APPLY
    return mean_and_sd(ladder.rungs[factor].summary(LOSS.column), LOSS)


def _order(ladders: Sequence[Ladder]) -> Iterator[str]:
    told = order_of(ladders)
    if told is None:
        return
    head, rest = in_words(told)
    yield f"**{head}**{rest}"
    if told.by_rung and len(next(iter(told.by_rung.values()))) < len(ladders):
        yield "Variants that have no loss at one of these sizes have no place in the order."


def in_words(told: Order) -> tuple[str, str]:
    """Whether the order holds, and what speaks for it: that means keep their places is no finding where all of them
    lie inside the noise.
    """
    sizes = count_of(len(told.by_rung), "size")
    clear = f"{told.told:,} of {count_of(told.tested, 'difference')} between two variants at a size"
    sure = f"clear after Holm: {clear}."
    names = list_of(list(next(iter(told.by_rung.values()), ())))
    if told.clear:
        return "The order does not hold", f" across {sizes}: {_pairs(told.clear)} clearly change places; {sure}"
    if told.changed:
        changed = f"means change places inside the noise ({_pairs(told.changed)})"
        return "Whether the order holds is not clear", f": across {sizes} {changed}; {sure}"
    if not told.told:
        return "No clear order", f": by mean loss it is the same at all {sizes} ({names}), which may be noise; {sure}"
    holds = "The order holds" if told.told == told.tested else "The order holds as far as can be told"
    return holds, f": by mean loss it is the same at all {sizes} ({names}); {sure}"


def sentence(evidence: Evidence) -> str:
    """The ladder for the summary: how the loss falls, who gains with size, and whether the order holds."""
    ladders = [each for each in found(evidence) if each.losses]
    if not ladders:
        return ""
    parts = [_fall(ladders[0]), _gains_in_words(ladders)]
    if (told := order_of(ladders)) is not None:
        head, rest = in_words(told)
        parts.append((head[0].lower() + head[1:] + rest).removesuffix("."))
    said = "; ".join(part for part in parts if part)
    return f"**Ladder of sizes**: {said}." if said else ""


def _fall(first: Ladder) -> str:
    fitted = first.law(SIZES[0])
    if fitted is None:
        return f"{escape(first.name)} has losses at fewer than two sizes: no slope"
    bent = " (no power law: do not go beyond these sizes by it)" if _is_bent(fitted) else ""
    sizes, exponent = count_of(fitted.rungs, "size"), _with_interval(fitted.exponent)
    seeds = f" over {count_of(len(first.seeds), 'seed')}"
    return f"over {sizes} the loss of {escape(first.name)} goes with parameters to the power of {exponent}{seeds}{bent}"


def _gains_in_words(ladders: Sequence[Ladder]) -> str:
    gains = _gains(ladders)
    known = {name: each for name, each in gains.items() if each.p is not None}
    if not known:
        return ""
    words = (("better", "gaining with size"), ("worse", "losing with size"))
    told = [
        f"clearly {word}: {list_of(names)}"
        for verdict, word in words
        if (names := [name for name, each in known.items() if each.verdict == verdict])
    ]
    decided = what_would_decide_first(known.values())
    return "; ".join(told) or f"no variant clearly gains or loses on it with size{decided}"


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{escape(one)} and {escape(other)}" for one, other in pairs[:12])


def order_of(ladders: Sequence[Ladder]) -> Order | None:
    """Of the ladders that have a loss at every size that any has; None where no two have."""
    factors = sorted({factor for each in ladders for factor in each.losses})
    whole = [each for each in ladders if len(each.losses) == len(factors)]
    if len(whole) < 2 or len(factors) < 2:
        return None
    return order({factor: {each.name: each.losses[factor] for each in whole} for factor in factors})


def data(evidence: Evidence) -> dict[str, Any] | None:
    """The same for machines."""
    ladders = [each for each in found(evidence) if each.losses]
    if not ladders:
        return None
    laws = {each.name: {size.name: each.law(size) for size in SIZES} for each in ladders}
    return {
        "variants": {
            each.name: {
                "rungs": {f"{factor:g}": variant.name for factor, variant in each.rungs.items()},
                "exponents": {name: found.exponent for name, found in laws[each.name].items() if found},
                "bent": {name: _is_bent(found) for name, found in laws[each.name].items() if found},
            }
            for each in ladders
        },
        "order": order_of(ladders),
    }


# --- Plot -------------------------------------------------------------------------------------------------------------


def plots(evidence: Evidence) -> list[Plot]:
    """Loss against each size, with the fitted lines; none without a ladder."""
    ladders = [each for each in found(evidence) if each.losses]
    panels = [(size, [each for each in ladders if each.law(size)]) for size in SIZES]
    panels = [(size, each) for size, each in panels if each]
    if not panels:
        return []
    drawn = {each.name for _, ladders in panels for each in ladders}
    looks = {name: look for name, look in _looks(ladders).items() if name in drawn}
    caption = (
        "Validation loss by size, both axes logarithmic: each point is a seed's, lines are the fitted power laws. "
        f"Lower is better.{_grey_note(looks)}{_without_line([each.name for each in ladders if each.name not in drawn])}"
    )
    return [Plot("ladder", "Loss by size", caption, svg_of(lambda: _draw(panels, looks)))]


def _grey_note(looks: Mapping[str, Look]) -> str:
    if not (unnamed := sum(not look.named for look in looks.values())):
        return ""
    lowest = f"the {len(PALETTE)} of lowest loss at their largest size"
    return f" Coloured: the first variant and {lowest}; grey: {count_of(unnamed, 'other')}."


def _without_line(names: Sequence[str]) -> str:
    return f" Not drawn, with losses at fewer than two sizes: {list_of(names)}." if names else ""


def _looks(ladders: Sequence[Ladder]) -> dict[str, Look]:
    """Colours as far as eyes tell them apart, for those of lowest loss; all others are grey, behind them."""
    first, *others = ladders
    lowest = {each.name for each in sorted(others, key=_last_loss)[: len(PALETTE)]}
    looks = {each.name: Look(OTHERS_COLOUR, ".", "-", False) for each in others}
    for place, each in enumerate(each for each in others if each.name in lowest):
        looks[each.name] = Look(PALETTE[place], MARKERS[place], "-" if place < FEW_COLOURS else "--", True)
    return {first.name: Look(BASELINE_COLOUR, "X", "-", True), **looks}


def _last_loss(ladder: Ladder) -> float:
    at = ladder.losses[max(ladder.losses)]
    return sum(at.values()) / len(at)


def _draw(panels: Sequence[tuple[Size, Sequence[Ladder]]], looks: Mapping[str, Look]) -> Figure:
    figure, all_axes = new_figure(len(panels))
    for axes, (size, ladders) in zip(all_axes, panels, strict=True):
        for each in ladders:
            _draw_ladder(axes, each, size, looks[each.name])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(size.name)
        decimal_ticks(axes.xaxis)
        decimal_ticks(axes.yaxis)
    all_axes[0].set_ylabel("validation loss ↓ (nats/token)")
    add_legend(figure, looks)
    return figure


def _draw_ladder(axes: Axes, ladder: Ladder, size: Size, look: Look) -> None:
    fitted = ladder.law(size)
    assert fitted is not None, "only ladders with a law are drawn"
    points = [point for each in fitted.points.values() for point in each]
    xs, losses = zip(*points, strict=True)
    (dots,) = axes.plot(xs, losses, look.marker, color=look.colour, markersize=4, zorder=look.order)
    name_line(dots, ladder.name)
    ends = [min(xs), max(xs)]
    between = [ends[0] * (ends[1] / ends[0]) ** (step / 20) for step in range(21)]
    (line,) = axes.plot(between, [fitted.loss(x) for x in between], look.line, color=look.colour, linewidth=1.2)
    leave_out(line)

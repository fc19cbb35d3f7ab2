"""What each axis does to the loss over all others, and which two axes need each other: effects of a design."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ablate.effects import Effect, effects
from ablate.fractional import in_words
from ablate.report.comparison import LOSS, UNEQUAL, has_other_budget
from ablate.report.contrasts import further_seeds, what_would_decide_first
from ablate.report.drawing import (
    FEW_COLOURS,
    MARKERS,
    PALETTE,
    Look,
    Plot,
    add_legend,
    new_figure,
    short,
    svg_of,
)
from ablate.report.evidence import Evidence, Variant
from ablate.report.hover import name_line
from ablate.report.placed import by_budget
from ablate.report.text import count_of, escape, interval, list_of, p_value, plain, table
from ablate.stats import Difference, corrected, paired_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 60
SCALE = "scale"
MOST_PANELS = 6
MOST_TOLD = 4  # in the summary

MAIN, INTERACTION = 1, 2
"""Axes of an effect."""

INTRO = """A main effect is the mean loss with one value minus that with another, over all combinations of the other
axes, for each seed; the interval is over seeds (95 %, t). An interaction is by how much the first axis' effect changes
where the second has its other value. The paired t test decides after Holm over all {count} of this table."""

IN_A_FRACTION = """Each row is an estimate of a sum: what stands behind + or - is not told apart from what stands before
it. Interactions of three and more axes are taken to be nothing."""


@dataclass(frozen=True)
class Effects:
    """The effects at one budget (without a name where nothing is matched to several)."""

    design: Mapping[str, Any]
    budget: str
    variants: Mapping[str, Variant]
    """By the name that a combination has in the design."""

    @cached_property
    def estimates(self) -> list[tuple[Effect, Difference]]:
        """Each effect with its interval and verdict; after Holm, those that may still come among them."""
        values = {name: each.by_seed(LOSS.column) for name, each in self.variants.items()}
        found = effects(self.design, values)
        told = {place: _difference(each) for place, each in enumerate(found)}
        unfinished = any(each.unfinished for each in self.variants.values())
        pending = sum(each.p is None for each in told.values()) if unfinished else 0
        return list(zip(found, corrected(told, pending).values(), strict=True))

    @property
    def tasks(self) -> set[str]:
        """What the variants are taught: losses of different tasks do not compare."""
        return {each.task for each in self.variants.values()}


def _difference(effect: Effect) -> Difference:
    direction = LOSS.direction if len(effect.axes) == MAIN else None
    return paired_difference(effect.by_seed, dict.fromkeys(effect.by_seed, 0.0), direction)


def found(evidence: Evidence) -> list[Effects]:
    """One for each budget; none where there are not several axes, or they do not combine."""
    design = evidence.experiment.get("design")
    if not design or design["combine"] == "one_at_a_time":
        return []
    if sum(len(axis["levels"]) > 1 for axis in design["axes"]) < 2:
        return []
    names = dict.fromkeys(cell["variant"] for cell in design["cells"] if cell["variant"])
    return [
        Effects(design, budget, {name: variants[name] for name in names if name in variants})
        for budget, variants in by_budget(evidence)
    ]


def section(evidence: Evidence) -> str:
    """A table of all effects, with what was left out of each and why; empty where axes do not combine."""
    parts = [_part(each) for each in found(evidence) if any(map(_has_loss, each.variants.values()))]
    return "\n\n".join(["## Effects of the axes", *parts]) if parts else ""


def sentences(evidence: Evidence) -> Iterator[str]:
    """The effects for the summary, in a sentence for each budget: which are clear, and that the others are not."""
    for told in found(evidence):
        if any(map(_has_loss, told.variants.values())) and len(told.tasks) == 1 and told.estimates:
            where = f" at equal {escape(told.budget)}" if told.budget else ""
            yield f"**Effects of the axes**{where}: {_in_short(told)}{_budgets(told, evidence.baseline)}."


def _budgets(told: Effects, baseline: Variant | None) -> str:
    if baseline is None or not any(has_other_budget(each, baseline) for each in told.variants.values()):
        return ""
    return f"; the variants are of unequal budgets ({UNEQUAL})"


def _in_short(told: Effects) -> str:
    if "aliases" in told.design and (lost := told.estimates[0][0].lost):
        return f"none can be told without every run of the fraction ({_reasons(lost)})"
    estimates = [each for each in told.estimates if not _is_of_size(each[0], told.design)]
    known = [each for each in estimates if each[1].p is not None]
    if not known:
        return "no verdict (that takes two seeds that all have)"
    clear = sorted((each for each in known if each[1].is_clear), key=lambda each: -abs(each[1].mean or 0.0))
    axes = told.design["axes"]
    parts = [
        f"{name_of(effect, axes)} {interval(of, LOSS)} ({verdict(effect, of)})" for effect, of in clear[:MOST_TOLD]
    ]
    if more := len(clear) - len(parts):
        parts.append(f"{more:,} more")
    unclear = [effect for effect, of in known if not of.is_clear]
    if unclear:
        main, both = ([each for each in unclear if len(each.axes) == size] for size in (MAIN, INTERACTION))
        counts = [count_of(len(main), "main effect")] * bool(main) + [count_of(len(both), "interaction")] * bool(both)
        decided = what_would_decide_first(of for _, of in known)
        parts.append(f"no clear difference in {' and '.join(counts)}{decided}")
    if untold := len(estimates) - len(known):
        parts.append(f"{count_of(untold, 'effect')} not told")
    fraction = " (of the fraction: each a sum with its aliases)" if "aliases" in told.design else ""
    return f"{LOSS.label} after Holm{fraction}: " + "; ".join(parts)


def _is_of_size(effect: Effect, design: Mapping[str, Any]) -> bool:
    """What a larger model gains is no question; how it gains is for the ladder to tell."""
    return len(effect.axes) == MAIN and design["axes"][effect.axes[0]]["path"] == SCALE


def data(evidence: Evidence) -> list[dict[str, Any]]:
    """The same for machines; a budget is None where variants are not matched to several."""
    return [
        {
            "budget": told.budget or None,
            "axes": [told.design["axes"][axis]["path"] for axis in effect.axes],
            "levels": list(effect.levels),
            "aliases": [{"sign": sign, "axes": list(axes)} for sign, axes in effect.aliases],
            "by_seed": effect.by_seed,
            "averaged": effect.averaged,
            "combinations": effect.combinations,
            "lost": effect.lost,
            "difference": difference,
        }
        for told in found(evidence)
        for effect, difference in told.estimates
    ]


def _has_loss(variant: Variant) -> bool:
    return bool(variant.by_seed(LOSS.column))


def _part(told: Effects) -> str:
    title = [f"### At equal {escape(told.budget)}"] if told.budget else []
    plan = ["  \n".join(map(escape, in_words(told.design)))] if "aliases" in told.design else []
    if len(told.tasks) > 1:
        return "\n\n".join([*title, *plan, f"The axes change the task ({list_of(sorted(told.tasks))}): no effects."])
    if "aliases" in told.design and (lost := told.estimates[0][0].lost):
        why = f"{_reasons(lost)}: no effect can be told without every run of the fraction."
        return "\n\n".join([*title, *plan, why])
    return "\n\n".join([*title, *plan, *_tables(told)])


def _tables(told: Effects) -> Iterator[str]:
    tested = sum(each.p is not None for _, each in told.estimates)
    text = INTRO.format(count=count_of(max((each.contrasts for _, each in told.estimates), default=tested), "effect"))
    yield f"{text} {IN_A_FRACTION}" if "aliases" in told.design else text
    shown = _shown(told.estimates)
    headers = ["effect", f"{LOSS.label}, 95 % interval ({LOSS.unit})", "p after Holm", "verdict"]
    headers += ["further seeds to decide", "averaged over", "seeds"]
    yield table(headers, [_row(effect, difference, told.design["axes"]) for effect, difference in shown])
    if left := len(told.estimates) - len(shown):
        yield f"{count_of(left, 'interaction')} of larger p left out."
    yield from _notes(told)


def _shown(estimates: Sequence[tuple[Effect, Difference]]) -> list[tuple[Effect, Difference]]:
    """All, or of very many interactions those of the smallest p, in their order."""
    room = MOST_ROWS - sum(len(effect.axes) == MAIN for effect, _ in estimates)
    interactions = [each for each in estimates if len(each[0].axes) == INTERACTION]
    ranked = sorted(range(len(interactions)), key=lambda place: _rank(interactions[place][1]))
    kept = {id(interactions[place]) for place in ranked[: max(0, room)]}
    return [each for each in estimates if len(each[0].axes) == MAIN or id(each) in kept]


def _rank(difference: Difference) -> float:
    return 2.0 if difference.p is None else difference.p


def _row(effect: Effect, difference: Difference, axes: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        name_of(effect, axes),
        interval(difference, LOSS),
        p_value(difference.adjusted),
        verdict(effect, difference),
        further_seeds(difference),
        _averaged(effect),
        str(difference.n),
    ]


def name_of(effect: Effect, axes: Sequence[Mapping[str, Any]]) -> str:
    """`block: post_norm minus pre_norm`, or `block=post_norm × n_layers=2`, and the aliases; as Markdown."""
    paths = [str(axes[axis]["path"]) for axis in effect.axes]
    labels = [str(axes[axis]["levels"][level]) for axis, level in zip(effect.axes, effect.levels, strict=True)]
    own = " × ".join(f"{path}={label}" for path, label in zip(paths, labels, strict=True))
    if len(effect.axes) == MAIN:
        axis = axes[effect.axes[0]]
        own = f"{paths[0]}: {labels[0]} minus {axis['levels'][axis['reference']]}"
    aliases = (
        f"{'+' if sign > 0 else '-'} {' × '.join(str(axes[axis]['path']) for axis in names)}"
        for sign, names in effect.aliases
    )
    return escape(" ".join([own, *aliases]))


def verdict(effect: Effect, difference: Difference) -> str:
    """The difference's own, in words of interactions where it is one; of a sum it is not known whose."""
    if difference.mean is None and not effect.averaged:
        return "not told"
    if len(effect.axes) == MAIN or difference.p is None:
        return difference.verdict
    if difference.is_clear:
        return "one of these interacts" if effect.aliases else "they interact"
    return difference.verdict.replace("difference", "interaction")


def _averaged(effect: Effect) -> str:
    """`4`, or `3 of 4 (1 invalid)`."""
    if not effect.lost:
        return str(effect.averaged)
    return f"{effect.averaged} of {effect.combinations} ({_reasons(effect.lost)})"


def _reasons(lost: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {escape(why)}" for why, number in lost.items())


def _notes(told: Effects) -> Iterator[str]:
    if any(effect.lost for effect, _ in told.estimates):
        yield (
            "What is left out of a mean is left out for all seeds: such a row tells of fewer combinations of the other "
            "axes than a row without. *The same variant*: there the value makes no difference to what is trained."
        )
    seeds = {seed for each in told.variants.values() for seed in each.by_seed(LOSS.column)}
    if any(effect.averaged and difference.n < len(seeds) for effect, difference in told.estimates):
        yield f"A seed counts where every variant of a row has a loss with it; {count_of(len(seeds), 'seed')} have one."


# --- Plot -------------------------------------------------------------------------------------------------------------


def plots(evidence: Evidence) -> list[Plot]:
    """How the loss by one axis' value depends on another's: the pairs of axes whose interaction has the smallest p."""
    return [
        Plot("interactions", _title(told), _caption(told, pairs), svg_of(partial(_draw, told, pairs)))
        for told in found(evidence)
        if len(told.tasks) == 1 and (pairs := _pairs(told))
    ]


def _title(told: Effects) -> str:
    return f"Interactions at equal {told.budget}" if told.budget else "Interactions of two axes"


def _caption(told: Effects, pairs: Sequence[tuple[int, int]]) -> str:
    mixed = " In a fraction an interaction is not told apart from its aliases." if "aliases" in told.design else ""
    return (
        "Mean validation loss by the value of one axis, a line for each value of another (numbered in the title), over "
        "the combinations that every point of a panel has and the seeds that all have: lines that are not parallel "
        f"interact.{mixed} {count_of(len(pairs), 'pair')} of axes, those of the smallest p first, on one scale. "
        f"{_clear_pairs(told, pairs)}"
    )


def _clear_pairs(told: Effects, pairs: Sequence[tuple[int, int]]) -> str:
    """Lines cross by noise as well."""
    axes = told.design["axes"]
    clear = dict.fromkeys(effect.axes for effect, found in told.estimates if found.is_clear)
    names = [f"{axes[one]['path']} × {axes[other]['path']}" for one, other in pairs if (one, other) in clear]
    if not names:
        return "No interaction is clear after Holm: lines that cross may be noise."
    others = "; elsewhere lines that cross may be noise" if len(names) < len(pairs) else ""
    return f"Clear after Holm: {list_of(names)}{others}."


def _pairs(told: Effects) -> list[tuple[int, int]]:
    ranked: dict[tuple[int, int], float] = {}
    for effect, difference in told.estimates:
        if len(effect.axes) == INTERACTION and difference.mean is not None:
            pair = (effect.axes[0], effect.axes[1])
            ranked[pair] = min(_rank(difference), ranked.get(pair, 3.0))
    drawn = [pair for pair in ranked if means(told, pair)]
    return sorted(drawn, key=lambda pair: (ranked[pair], pair))[:MOST_PANELS]


def means(told: Effects, pair: tuple[int, int]) -> dict[tuple[int, int], float]:
    """By the levels of two axes, the mean over the others' combinations and the seeds that all points have."""
    strata: dict[tuple[int, ...], dict[tuple[int, int], Mapping[int, float]]] = {}
    for cell in told.design["cells"]:
        levels = cell["levels"]
        others = () if "aliases" in told.design else tuple(each for i, each in enumerate(levels) if i not in pair)
        if (variant := told.variants.get(cell["variant"])) and (values := variant.by_seed(LOSS.column)):
            place = (levels[pair[0]], levels[pair[1]])
            strata.setdefault((*others, *_run(told, levels, pair)), {})[place] = values
    points = {place for each in strata.values() for place in each}
    full = [each for each in strata.values() if each.keys() == points]
    seeds = set.intersection(*(set(values) for each in full for values in each.values())) if full else set()
    return {
        place: statistics.fmean(each[place][seed] for each in full for seed in seeds)
        for place in (full[0] if seeds else ())
    }


def _run(told: Effects, levels: Sequence[int], pair: tuple[int, int]) -> tuple[int, ...]:
    """In a fraction the runs of each point are counted: every point has as many, of other combinations."""
    if "aliases" not in told.design:
        return ()
    alike = [c["levels"] for c in told.design["cells"] if all(c["levels"][axis] == levels[axis] for axis in pair)]
    return (alike.index(list(levels)),)


def _draw(told: Effects, pairs: Sequence[tuple[int, int]]) -> Figure:
    figure, panels = new_figure(len(pairs))
    most = max(len(told.design["axes"][second]["levels"]) for _, second in pairs)
    looks = {
        f"line {place + 1}": Look(PALETTE[place], MARKERS[place], "-" if place < FEW_COLOURS else "--", True)
        for place in range(min(most, len(PALETTE)))
    }
    for axes, pair in zip(panels, pairs, strict=True):
        _draw_pair(axes, told, pair, list(looks.values()))
    heights = [axes.get_ylim() for axes in panels]  # one scale for all: each on its own would blow its noise up
    for axes in panels:
        axes.set_ylim(min(low for low, _ in heights), max(high for _, high in heights))
    panels[0].set_ylabel("validation loss ↓ (nats/token)")
    add_legend(figure, looks)
    return figure


def _draw_pair(axes: Axes, told: Effects, pair: tuple[int, int], looks: Sequence[Look]) -> None:
    first, second = (told.design["axes"][axis] for axis in pair)
    known = means(told, pair)
    for level, look in enumerate(looks[: len(second["levels"])]):
        places = [place for place in range(len(first["levels"])) if (place, level) in known]
        losses = [known[place, level] for place in places]
        (line,) = axes.plot(places, losses, look.line, marker=look.marker, color=look.colour, linewidth=1.6)
        name_line(line, f"{second['path']}={second['levels'][level]}")
    labels = [short(each) for each in first["levels"]]
    axes.set_xticks(range(len(labels)), labels=labels, parse_math=False)
    axes.set_xlabel(plain(first["path"]), parse_math=False)
    values = ", ".join(f"{place} {short(each)}" for place, each in enumerate(second["levels"], start=1))
    axes.set_title(f"{plain(second['path'])}: {values}", parse_math=False)

"""What was made equal, at what price, and whether the order of variants depends on which budget that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ablate.metrics import METRICS
from ablate.report.comparison import LOSS
from ablate.report.evidence import Evidence, Variant
from ablate.report.text import NOT_MEASURED, count_of, escape, interval, list_of, number, table, text_table
from ablate.stats import Difference, finite

MOST_FLIPS = 24
TIMED = (
    "Trials train for seconds, not for steps: how many steps those are differs between trials, and a loss stands for "
    "what this machine did in its time."
)


def section(evidence: Evidence) -> str:
    """What `match` changed, where the order flips between its budgets, and how long variants trained; "" without."""
    parts = [*_matching(evidence), *_lengths(evidence)]
    return "\n\n".join(["## Budgets", *parts]) if parts else ""


def data(evidence: Evidence) -> list[dict[str, Any]]:
    """What `match` changed, for machines."""
    return [{"variant": each.name, **found} for each in evidence.variants if (found := each.facts.get("matched"))]


# --- Equal budgets ----------------------------------------------------------------------------------------------------


def _matching(evidence: Evidence) -> Iterator[str]:
    matches = evidence.experiment.get("match") or []
    rows = [_row(each) for each in evidence.variants if each.facts.get("matched")]
    if not rows:
        return
    asked = ", ".join(
        f"{escape(each['budget'])} {number(each['goal'], METRICS[each['column']])} by {escape(each['by'])}, within "
        f"{100 * float(each['tolerance']):.3g} %"
        for each in matches
    )
    goals = {(each["budget"], each["goal"]) for variant in evidence.variants if (each := variant.facts.get("matched"))}
    sizes = " (that of another scale to the baseline's at that scale)" if len(goals) > len(matches) else ""
    yield f"Every variant was brought to the baseline's {asked}{sizes}. A number that was near enough stayed."
    headers = ["variant", "budget", "setting", "it was", "it is", "of the baseline's budget"]
    yield text_table(headers, rows)
    if len(matches) > 1:
        yield "\n".join(_flips(evidence, matches))


def _row(variant: Variant) -> list[str]:
    found = variant.facts["matched"]
    share = f"{100 * found['mismatch']:+.2f} %"
    before, after = (f"{found[word]:,}" for word in ("before", "after"))
    return [*(escape(each) for each in (variant.name, found["budget"], found["by"])), before, after, share]


# --- Where the order flips --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flip:
    """Two variants whose mean losses stand one way under a budget and the other way under another."""

    names: tuple[str, str]
    budgets: tuple[str, str]
    differences: tuple[Difference, Difference]

    @property
    def is_clear(self) -> bool:
        """Whether each difference is."""
        return all(each.is_clear for each in self.differences)

    def sentence(self) -> str:
        """Both differences, and what they are worth."""
        first, second = map(escape, self.names)
        told = " and ".join(
            f"{interval(each, LOSS)} at equal {escape(budget)} ({each.verdict})"
            for each, budget in zip(self.differences, self.budgets, strict=True)
        )
        worth = "**the order flips**" if self.is_clear else "the order of the means flips, within the noise"
        return f"- {first} minus {second}: {told}: {worth}."


def _flips(evidence: Evidence, matches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One sentence a flip, clear ones first; or that there is none."""
    found = sorted(_all_flips(evidence, matches), key=lambda flip: not flip.is_clear)
    budgets = list_of([str(each["budget"]) for each in matches])
    if not found:
        yield f"No two variants change places in {LOSS.label} between the budgets {budgets}, as far as trials are done."
        return
    clear = sum(flip.is_clear for flip in found)
    yield (
        f"{count_of(len(found), 'pair')} of variants {'changes' if len(found) == 1 else 'change'} places in "
        f"{LOSS.label} between the budgets {budgets}, {clear or 'none'} of them beyond the noise:\n"
    )
    yield from (flip.sentence() for flip in found[:MOST_FLIPS])
    if len(found) > MOST_FLIPS:
        yield f"- and {count_of(len(found) - MOST_FLIPS, 'more pair')}."


def _all_flips(evidence: Evidence, matches: Sequence[Mapping[str, Any]]) -> Iterator[_Flip]:
    """Every pair once, under the first two budgets between which it changes places."""
    known = {variant.name: variant for variant in evidence.variants}
    names = dict.fromkeys(name for each in matches for name in each["variants"])
    places = {str(each["budget"]): {n: known.get(each["variants"].get(n, "")) for n in names} for each in matches}
    if evidence.baseline is not None:
        for own in places.values():
            own[evidence.baseline.name] = evidence.baseline
    everyone = dict.fromkeys(name for own in places.values() for name in own)
    means = {budget: {name: _mean(each) for name, each in own.items()} for budget, own in places.items()}
    for pair in combinations(everyone, 2):
        for budgets in combinations(places, 2):
            if _changes(pair, [means[budget] for budget in budgets]):
                yield _Flip(pair, budgets, tuple(_difference(pair, places[budget]) for budget in budgets))  # type: ignore[arg-type]
                break


def _mean(variant: Variant | None) -> float | None:
    return variant.summary(LOSS.column).mean if variant else None


def _changes(pair: tuple[str, str], means: Sequence[Mapping[str, float | None]]) -> bool:
    signs = []
    for own in means:
        one, other = own[pair[0]], own[pair[1]]
        if one is None or other is None:
            return False
        signs.append((one > other) - (one < other))
    return signs[0] * signs[1] < 0


def _difference(pair: tuple[str, str], own: Mapping[str, Variant | None]) -> Difference:
    one, other = own[pair[0]], own[pair[1]]
    assert one is not None
    assert other is not None
    return one.against(other, LOSS)


# --- How long variants trained ----------------------------------------------------------------------------------------


def _lengths(evidence: Evidence) -> Iterator[str]:
    """Where it is not the same number of steps for all."""
    planned = {each.facts.get("steps") for each in evidence.variants if "steps" in each.facts}
    is_timed = None in planned
    if len(planned) < 2 and not is_timed:
        return
    headers = ["variant", "steps", "training tokens", "training FLOPs"]
    yield table(headers, [_length(each) for each in evidence.variants])
    if is_timed:
        yield TIMED


def _length(variant: Variant) -> list[str]:
    """As planned; of trials that train for seconds as they ended."""
    cells = [variant.facts.get(name) for name in ("steps", "train_tokens", "train_flops")]
    if variant.facts.get("steps") is None:
        forward = finite(variant.facts.get("flops_per_token"))
        tokens = _range(variant, "tokens")
        flops = None if forward is None or tokens is None else [3 * forward * each for each in tokens]
        return [escape(variant.name), *(_shown(each) for each in (_range(variant, "steps"), tokens, flops))]
    return [escape(variant.name), *(_shown(None if each is None else [each]) for each in cells)]


def _range(variant: Variant, column: str) -> list[float] | None:
    """The lowest and the highest value among trials that ended well."""
    values = list(variant.by_seed(column).values())
    return [min(values), max(values)] if values else None


def _shown(values: Sequence[float] | None) -> str:
    if values is None:
        return NOT_MEASURED
    return " to ".join(dict.fromkeys(f"{each:,.0f}" if each < 1e9 else f"{each:.3e}" for each in values))

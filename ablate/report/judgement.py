"""Claims judged by what is stored: supported, refuted, or inconclusive and why.

What is measured is reckoned seed by seed, over the seeds that all named variants have, and judged by the 95 % t
interval of left minus right. A time is reckoned round by round, and only where its A/A check stands. What is exact is
compared as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ablate.choice import SettingsError
from ablate.claims import Claim, Figure, Sign, read
from ablate.interleaved import Rounds
from ablate.metrics import LOSSES, METRICS, TIMED, Timing
from ablate.report.evidence import Evidence, Variant, profiles_of
from ablate.report.reckoning import (
    Estimate,
    Unclear,
    Value,
    Values,
    estimate,
    further_needed,
    leaves,
    negative,
    reckoned,
    size,
    total,
)
from ablate.report.text import count_of, list_of, relative
from ablate.schema import PROFILED
from ablate.stats import MOST_REPEATS, finite

Word = Literal["supported", "refuted", "inconclusive"]
WORDS: tuple[Word, ...] = get_args(Word)

EQUAL = 1e-9
"""Sides are equal within so much of their largest summand: less is rounding."""


@dataclass(frozen=True)
class Judgement:
    """What is said of a claim. `n` seeds or rounds (`paired_by`) stand behind it, none where all is exact.

    `further` are the seeds or rounds that would decide with a probability of 90 % if all else stays as seen: None where
    that is not known or more than 1000.
    """

    text: str
    says: str | None
    source: str | None
    verdict: Word
    why: str = ""
    left: float | None = None
    right: float | None = None
    difference: Estimate | None = None
    n: int = 0
    paired_by: Literal["seed", "round", ""] = ""
    further: int | None = None

    def document(self) -> dict[str, Any]:
        """For machines."""
        known = self.difference
        return {
            "claim": self.text,
            "verdict": self.verdict,
            "why": self.why,
            "left": finite(self.left),
            "right": finite(self.right),
            "difference": finite(known.value) if known else None,
            "low": finite(known.low) if known else None,
            "high": finite(known.high) if known else None,
            "n": self.n,
            "paired_by": self.paired_by or None,
            "further": self.further,
            "says": self.says,
            "source": self.source,
        }


def judgements(evidence: Evidence) -> list[Judgement]:
    """Every claim of the experiment, in its order."""
    return [_judged(entry, evidence) for entry in evidence.experiment.get("claims") or []]


def _judged(entry: Mapping[str, Any], evidence: Evidence) -> Judgement:
    beside = (str(entry["claim"]), entry.get("says"), entry.get("source"))
    try:
        claim = read(entry)
        return _judgement(claim, evidence, beside)
    except SettingsError as fault:  # of another version, or changed by hand
        return Judgement(*beside, "inconclusive", f"it cannot be read: {fault.message}")
    except Unclear as why:
        return Judgement(*beside, "inconclusive", str(why))


# --- What is given ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """The values of figures by seed or round; exact ones are alone. `missing` says what is not there and should be,
    `hidden` what relative difference of a time may have gone unseen.
    """

    exact: Mapping[Figure, float]
    measured: Mapping[Figure, Mapping[int, float]]
    paired_by: Literal["seed", "round", ""]
    missing: Sequence[str]
    hidden: Mapping[Figure, float] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """The seeds or rounds that all have."""
        return sorted(set.intersection(*map(set, self.measured.values()))) if self.measured else []

    @property
    def values(self) -> dict[Figure, Values]:
        """Each figure's, in the order of `numbers`; what is exact is the same for all."""
        measured = {each: tuple(found[number] for number in self.numbers) for each, found in self.measured.items()}
        return measured | {each: (value,) * (len(self.numbers) or 1) for each, value in self.exact.items()}


def _given(claim: Claim, evidence: Evidence) -> _Given:
    variants = {each: _variant(each.variant, evidence) for each in claim.figures}
    measured = {each: variant for each, variant in variants.items() if METRICS[each.metric].noisy}
    exact = {each: _exact(each, variant) for each, variant in variants.items() if each not in measured}
    if any(METRICS[each.metric].timing for each in measured) and evidence.rounds.rows:
        return _by_round(exact, list(measured), evidence)
    _check_alike(variants)
    for each, variant in measured.items():
        if variant.is_withheld(METRICS[each.metric]):
            raise Unclear(f"no A/A check stands behind {each.metric}{_where_to_look(each)}")
    values = {each: variant.by_seed(each.metric) for each, variant in measured.items()}
    missing = list(dict.fromkeys(why for each, variant in measured.items() for why in _missing(each, variant)))
    return _Given(exact, values, "seed" if values else "", missing)


def _variant(name: str, evidence: Evidence) -> Variant:
    for each in evidence.variants:
        if each.name == name:
            return each
    for refused in evidence.experiment.get("invalid") or []:
        if refused["variant"] == name:
            raise Unclear(f"{name} is invalid: {refused['reason']}")
    raise Unclear(f"{name} is none of the stored variants: run again")


def _exact(figure: Figure, variant: Variant) -> float:
    _check_limit(figure, variant)
    value = variant.exact(figure.metric)
    if value is not None:
        return float(value)
    if len(set(variant.by_seed(figure.metric).values())) > 1:
        raise Unclear(f"{figure} differs between trials")
    raise Unclear(f"{figure} is not known ({_how_it_ended(variant)})")


def _check_limit(figure: Figure, variant: Variant) -> None:
    """A search that something else than memory ended found less than there is."""
    limits = {row.get(f"{figure.metric}_limit") for row in variant.rows if row.get(figure.metric) is not None}
    if f"{figure.metric}_limit" in PROFILED and limits - {"memory"}:
        raise Unclear(f"{figure} is a lower bound: its search ended before memory did")


def _check_alike(variants: Mapping[Figure, Variant]) -> None:
    """Losses of one task compare, and figures that were measured in one way."""
    losses = [variant for each, variant in variants.items() if each.metric in LOSSES]
    if len(tasks := {variant.task for variant in losses}) > 1:
        raise Unclear(f"losses of different tasks do not compare: {list_of(sorted(tasks))}")
    others = [v for each, v in variants.items() if METRICS[each.metric].noisy and each.metric not in LOSSES]
    if len({extent for variant in others for extent in variant.extents}) > 1:
        raise Unclear("some trials were trained, and others only profiled")
    if any(each.metric in PROFILED for each in variants) and len(profiles_of(list(variants.values()))) > 1:
        raise Unclear("its variants were profiled in different ways")


def _missing(figure: Figure, variant: Variant) -> Iterator[str]:
    """What stands in the place of values that were planned."""
    absent = {int(seed) for seed in variant.trials} - set(variant.by_seed(figure.metric))
    if not absent and variant.by_seed(figure.metric):
        return
    if set(variant.outcomes) == {"ok"}:
        seeds = ", ".join(map(str, sorted(absent)))
        yield f"{figure} was not measured with {'seed' if len(absent) == 1 else 'seeds'} {seeds}"
    else:
        yield f"{figure.variant}: {_how_it_ended(variant)}"


def _how_it_ended(variant: Variant) -> str:
    return ", ".join(f"{n} {word}" for word, n in sorted(variant.outcomes.items())) or "not run"


# --- Times ------------------------------------------------------------------------------------------------------------

_TIMED_BY = {metric: kind for kind, metric in TIMED.items()}


def _where_to_look(figure: Figure) -> str:
    kind = METRICS[figure.metric].timing
    if kind in TIMED:
        return f": interleaved repeats (profile: {{repeats: 10}}) time {TIMED[kind]}"
    return ", and interleaved repeats do not time it"


def _by_round(exact: Mapping[Figure, float], timed: Sequence[Figure], evidence: Evidence) -> _Given:
    """Times as the interleaved repeats have them."""
    rounds = evidence.rounds
    for each in timed:
        if each.metric not in _TIMED_BY:
            if METRICS[each.metric].timing:
                raise Unclear(f"no A/A check stands behind {each.metric} of trials{_where_to_look(each)}")
            raise Unclear(f"{each.metric} has values by seed, and times have them by round: write two claims")
        if each.variant not in rounds.members:
            raise Unclear(f"{each.variant} was not timed")
    hidden = {each: _hidden(rounds, _TIMED_BY[each.metric]) for each in timed}
    values = {each: rounds.values(_TIMED_BY[each.metric], each.variant) for each in timed}
    return _Given(exact, values, "round", list(_missing_rounds(values, evidence)), hidden)


def _hidden(rounds: Rounds, kind: Timing) -> float:
    """The relative difference that the A/A check would have missed, where that is too much to pass it over."""
    check = rounds.against_itself(kind)
    if check.is_clear:
        raise Unclear(f"the A/A check of {kind} times shows a difference of the baseline from itself")
    if check.visible is None:
        raise Unclear(f"the A/A check of {kind} times has no interval")
    return check.visible if check.is_coarse else 0.0


def _within_hidden(claim: Claim, given: _Given) -> str:
    """Why there is no verdict where it would be another one if a time were longer or shorter by what is hidden."""
    verdicts = set()
    for figure, most in given.hidden.items():
        for factor in (1 + most, 1 / (1 + most)):
            values = given.values
            shifted = tuple(factor * each for each in values[figure])
            verdicts.add(compared(claim, {**values, figure: shifted}, exact=False).verdict)
    if len(verdicts) < 2:
        return ""
    return f"the A/A check is too coarse: it sees only {relative(1 + max(given.hidden.values()))}"


def _missing_rounds(values: Mapping[Figure, Mapping[int, float]], evidence: Evidence) -> Iterator[str]:
    planned = (evidence.experiment.get("profile") or {}).get("repeats") or 0
    for figure, found in values.items():
        if len(found) < (of := max(planned, len(evidence.rounds.numbers))):
            yield f"{figure} has {len(found)} of {count_of(of, 'round')}"


# --- Judging ----------------------------------------------------------------------------------------------------------


def _judgement(claim: Claim, evidence: Evidence, beside: tuple[str, str | None, str | None]) -> Judgement:
    """Raises `Unclear` where there is nothing to reckon with."""
    given = _given(claim, evidence)
    n, missing = len(given.numbers), "; ".join(given.missing)
    if given.measured and not n:
        raise Unclear(missing or f"no {given.paired_by} that all named variants have")
    found = compared(claim, given.values, exact=not n)
    without = missing or _within_hidden(claim, given)
    verdict: Word = "inconclusive" if without else found.verdict
    further = further_needed(found.value, n) if verdict == "inconclusive" and not without else None
    why = without or _why(verdict, claim.sign, n, further, given.paired_by)
    return Judgement(*beside, verdict, why, found.left, found.right, found.difference, n, given.paired_by, further)


@dataclass(frozen=True)
class Compared:
    """The sides of a claim and left minus right, whose values by seed or round are kept."""

    value: Value
    left: float
    right: float
    difference: Estimate
    verdict: Word


def compared(claim: Claim, values: Mapping[Figure, Values], *, exact: bool) -> Compared:
    """What the figures' values make of a claim; `exact` ones have no interval. Raises `Unclear`."""
    sides = [reckoned(side, values) for side in (claim.left, claim.right)]
    value = total(sides[0], negative(sides[1]))
    _check_finite(*sides, value)
    left, right = (estimate(each, exact=True).value for each in sides)
    found, largest = estimate(value, exact=exact), max(size(side, values) for side in (claim.left, claim.right))
    return Compared(value, left, right, found, _verdict(claim.sign, found, EQUAL * largest))


def _check_finite(*values: Value) -> None:
    if not all(math.isfinite(each) for value in values for leaf in leaves(value) for each in leaf):
        raise Unclear("it comes to no finite number")


def _verdict(sign: Sign, found: Estimate, slack: float) -> Word:
    if found.low is None or found.high is None:
        return "inconclusive"
    low, high = (found.low, found.high) if sign in ("<", "<=", "==") else (-found.high, -found.low)
    if sign == "==":
        holds, fails = -slack <= low and high <= slack, high < -slack or low > slack
    elif "=" in sign:
        holds, fails = high <= slack, low > slack
    else:
        holds, fails = high < -slack, low >= -slack
    return "supported" if holds else "refuted" if fails else "inconclusive"


def _why(verdict: Word, sign: Sign, n: int, further: int | None, paired_by: str) -> str:
    if verdict != "inconclusive":
        return ""
    if n == 1:
        return f"a single {paired_by} has no interval"
    if further is None:
        more = f"more than {MOST_REPEATS:,} {paired_by}s would be needed to decide"
    else:
        more = f"about {count_of(further, f'further {paired_by}')} would decide"
    equal = "; that measured values are equal cannot be shown: write abs(a - b) < margin" if sign == "==" else ""
    return f"the interval holds zero; {more}{equal}"

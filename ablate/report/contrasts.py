"""Every contrast with the baseline: how large, how sure after all of them were looked at, and what would decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ablate.report.comparison import LOSS, outcome_text
from ablate.report.evidence import Evidence, Variant
from ablate.report.text import DOES_NOT_APPLY, NOT_MEASURED, count_of, escape, interval, p_value, significant, table
from ablate.stats import ALPHA, LEAST_RESAMPLED, MOST_REPEATS, POWER, Difference, resampled_interval

CHANCE = f"{POWER * 100:.0f} % probability"
LEVEL = f"{ALPHA * 100:.0f} %"

Column = Callable[[Variant, Difference], str]


def section(evidence: Evidence) -> str:
    """One table of all contrasts on the validation loss; empty where no two seeds give one."""
    baseline = evidence.baseline
    others = [each for each in evidence.variants if not each.is_baseline]
    told = [(each, each.against(baseline, LOSS)) for each in others] if baseline else []
    tested = [difference for _, difference in told if difference.p is not None]
    if baseline is None or not tested:
        return ""
    columns = list(_columns(told, baseline))
    rows = [[column(variant, difference) for _, column in columns] for variant, difference in told]
    return "\n\n".join(["## Contrasts", " ".join(_told(tested)), table([name for name, _ in columns], rows)])


def _told(tested: Sequence[Difference]) -> Iterator[str]:
    """What the columns are, and what decides."""
    total = tested[0].contrasts
    yield f"{LOSS.label[0].upper()}{LOSS.label[1:]} ({LOSS.unit}), variant minus baseline, paired by seed."
    if total > 1:
        pending = f", {total - len(tested)} of them still to come" if total > len(tested) else ""
        yield (
            f"The paired t test decides after Holm over {total} contrasts{pending}: where nothing differs, at most "
            f"{LEVEL} of experiments declare any difference at all. Intervals are of each contrast alone."
        )
    else:
        yield "The paired t test decides."
    judged = f" and judged at {LEVEL} / {total}" if total > 1 else ""
    yield (
        r"Effect size: Hedges' g\_z, the mean in standard deviations of paired differences, corrected for few seeds. "
        f"Seen from: the true difference that so many seeds find with {CHANCE}, as noisy as these{judged}. "
        "Further seeds: how many more find a true difference as large as the mean with that probability, where the "
        "noise is at the upper bound of what these seeds tell."
    )
    if any(difference.n >= LEAST_RESAMPLED for difference in tested):
        yield f"Bootstrap: BCa, from {LEAST_RESAMPLED} seeds on; it stands beside and decides nothing."


def _columns(told: Sequence[tuple[Variant, Difference]], baseline: Variant) -> Iterator[tuple[str, Column]]:
    yield "variant", lambda variant, _: escape(variant.name)
    yield "minus baseline, 95 % interval", lambda _, difference: interval(difference, LOSS)
    if any(difference.n >= LEAST_RESAMPLED for _, difference in told):
        yield "bootstrap, 95 %", lambda variant, difference: _resampled(variant, baseline, difference)
    yield "p after Holm", lambda _, difference: p_value(difference.adjusted)
    yield "verdict", _verdict
    yield r"effect size g\_z", lambda _, difference: _effect(difference)
    yield f"seen with {CHANCE} from", lambda _, difference: _visible(difference)
    yield "further seeds to decide", lambda _, difference: further_seeds(difference)
    yield "seeds", lambda _, difference: str(difference.n)


def _resampled(variant: Variant, baseline: Variant, difference: Difference) -> str:
    own, theirs = variant.by_seed(LOSS.column), baseline.by_seed(LOSS.column)
    found = resampled_interval([own[seed] - theirs[seed] for seed in own if seed in theirs])
    if found is None or difference.mean is None:
        return DOES_NOT_APPLY
    return interval(replace(difference, low=found[0], high=found[1]), LOSS).partition(" ")[2]


def _verdict(variant: Variant, difference: Difference) -> str:
    if difference.mean is not None or difference.verdict == "another task":
        return difference.verdict
    if not variant.competes:
        return outcome_text(variant)
    return difference.verdict if variant.by_seed(LOSS.column) else "no finite loss"


def _effect(difference: Difference) -> str:
    return NOT_MEASURED if difference.effect is None else f"{difference.effect:+.2f}"


def _visible(difference: Difference) -> str:
    return NOT_MEASURED if difference.visible is None else significant(round(difference.visible, 9), 2)


def further_seeds(difference: Difference) -> str:
    """How many more seeds would decide, as a cell."""
    if difference.p is None:
        return NOT_MEASURED
    if difference.is_clear or difference.is_same:
        return DOES_NOT_APPLY
    return _many(difference.further_seeds())


def _many(found: int | None) -> str:
    return f"over {MOST_REPEATS:,}" if found is None else f"{found:,}"


def what_would_decide(difference: Difference) -> str:
    """What a sentence adds to a verdict that is none; empty where there is one, or no noise is known."""
    if difference.p is None or difference.is_clear:
        return ""
    if difference.is_same:
        return " (equal with every seed)"
    return f" ({_in_words(difference.further_seeds())} would decide)"


def what_would_decide_first(differences: Iterable[Difference]) -> str:
    """The same of several that are told together: what would decide the one that takes the fewest seeds."""
    unclear = [each for each in differences if each.p is not None and not each.is_clear and not each.is_same]
    if len(unclear) < 2:
        return "".join(map(what_would_decide, unclear))
    found = [needed for each in unclear if (needed := each.further_seeds()) is not None]
    return f" ({_in_words(min(found, default=None))} would decide the first of them)"


def _in_words(found: int | None) -> str:
    return f"{_many(None)} further seeds" if found is None else count_of(found, "further seed")

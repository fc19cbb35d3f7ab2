"""The claims and what became of them: a table, after the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ablate.metrics import metric_of
from ablate.report.evidence import Evidence
from ablate.report.judgement import WORDS, Judgement, judgements
from ablate.report.text import DOES_NOT_APPLY, count_of, escape, interval, text_table
from ablate.stats import POWER, Difference

_DIFFERENCE = metric_of("left - right")
_MOST_WHOLE = 2**53


def data(evidence: Evidence) -> list[dict[str, Any]]:
    """The same for machines."""
    return [each.document() for each in judgements(evidence)]


def section(evidence: Evidence) -> str:
    """How many are supported, each with its figures, and how they were judged; empty where nothing is claimed."""
    found = judgements(evidence)
    if not found:
        return ""
    parts = ["## Claims", f"{counted(found)}.", _table(found), "\n".join(_reasons(found)), " ".join(_notes(found))]
    return "\n\n".join(part for part in parts if part)


def counted(found: Sequence[Judgement]) -> str:
    """`3 claims: 2 supported, 1 refuted`."""
    counts = Counter(each.verdict for each in found)
    said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    return f"{count_of(len(found), 'claim')}: {said}"


def _table(found: Sequence[Judgement]) -> str:
    columns: list[tuple[str, Callable[[Judgement], str]]] = [
        ("claim", lambda each: escape(each.text)),
        ("verdict", lambda each: each.verdict),
        ("left", lambda each: _shown(each.left)),
        ("right", lambda each: _shown(each.right)),
        ("left - right, 95 % interval", _difference),
        ("n", lambda each: count_of(each.n, each.paired_by) if each.paired_by else DOES_NOT_APPLY),
        ("a text says", lambda each: escape(each.says or DOES_NOT_APPLY)),
        ("where", lambda each: escape(each.source or DOES_NOT_APPLY)),
    ]
    lines = [[cell(each) for _, cell in columns] for each in found]
    needed = [i for i in range(len(columns)) if i < 6 or any(line[i] != DOES_NOT_APPLY for line in lines)]
    return text_table([columns[i][0] for i in needed], [[line[i] for i in needed] for line in lines])


def _shown(value: float | None) -> str:
    """Whole numbers whole, others with five significant digits."""
    if value is None:
        return DOES_NOT_APPLY
    if value.is_integer() and abs(value) < _MOST_WHOLE:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1e4 <= abs(value) < _MOST_WHOLE else f"{value:.5g}"


def _difference(each: Judgement) -> str:
    known = each.difference
    if known is None:
        return DOES_NOT_APPLY
    if not each.paired_by:
        return f"{_shown(known.value)}, exact"
    return interval(Difference(known.value, known.low, known.high, each.n, "different"), _DIFFERENCE)


def _reasons(found: Sequence[Judgement]) -> Iterator[str]:
    """Why there is no verdict where there is none."""
    for each in found:
        if each.why:
            yield f"- {escape(each.text)}: {escape(each.why)}"


def _notes(found: Sequence[Judgement]) -> Iterator[str]:
    """How they were judged, as far as it concerns any of them."""
    measured = [each for each in found if each.paired_by]
    if any(not each.paired_by and each.difference for each in found):
        yield "What is exact is compared as it is."
    if measured:
        yield (
            "What is measured is reckoned seed by seed, times round by round, and judged by the 95 % t interval of "
            "left minus right; where seeds or rounds are missing there is no verdict."
        )
    if len(measured) > 1:
        yield (
            f"The intervals are not corrected for their number: of {len(measured)} claims about "
            f"{len(measured) * 0.05:.2g} would be decided by chance alone, were all at the edge of the truth."
        )
    if any(each.further for each in found):
        yield (
            f"Further seeds or rounds: with so many the claim is decided with a probability of {POWER * 100:.0f} %, if "
            "the difference is as large as it looks now, and the noise at the upper end of what it may be."
        )

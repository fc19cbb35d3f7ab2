"""Speed as interleaved repeats tell it: first whether the baseline equals itself, then what each variant takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from ablate.interleaved import Rounds
from ablate.metrics import METRICS, TIMED, Timing
from ablate.report.evidence import Evidence
from ablate.report.text import (
    DOES_NOT_APPLY,
    NOT_MEASURED,
    count_of,
    escape,
    list_of,
    number,
    p_value,
    relative,
    relative_interval,
    table,
)
from ablate.stats import COARSEST, POWER, Ratio, finite, rounds_to_decide

WITHHELD = "withheld"
CHANCE = f"{POWER * 100:.0f} % probability"
TOO_COARSE = "**That is too coarse**: only times whose whole interval lies beyond it have a verdict."


def section(evidence: Evidence) -> str:
    """The A/A check, then a table of variants and timings; empty where nothing was repeated."""
    rounds = evidence.rounds
    if not rounds.rows:
        return ""
    parts = [
        "## Speed, interleaved",
        " ".join(_told(rounds, evidence)),
        "\n".join(f"- {line}" for line in _checks(rounds)),
        _table(rounds),
        " ".join(_notes(rounds)),
        "\n".join(_failures(rounds)),
    ]
    return "\n\n".join(part for part in parts if part)


def data(evidence: Evidence) -> dict[str, Any] | None:
    """The same for machines: ratios of seconds to the baseline's, by timing and variant; None without repeats."""
    rounds = evidence.rounds
    if not rounds.rows:
        return None
    return {
        "rounds": len(rounds.numbers),
        "baseline": rounds.baseline,
        "baseline_again": {kind: rounds.against_itself(kind) for kind in rounds.timings},
        "variants": [
            {
                **{"variant": name, "timing": kind, "seconds_by_round": rounds.values(kind, name)},
                **{"ratio": rounds.against_baseline(kind, name), "said": rounds.verdict(kind, name)},
            }
            for kind in rounds.timings
            for name in rounds.members
            if name != rounds.baseline
        ],
    }


def _told(rounds: Rounds, evidence: Evidence) -> Iterator[str]:
    """The order, the place and the time."""
    order = list_of([*rounds.members, f"{rounds.baseline} again"])
    planned = (evidence.experiment.get("profile") or {}).get("repeats") or 0
    done = len(rounds.numbers)
    of = f" of {planned} (the rest is still to come)" if planned > done else ""
    yield f"Order: {order}; {count_of(done, 'round')}{of}, every member in a fresh process, one at a time."
    yield f"{_place(rounds)}; {_time(rounds)}."
    loads = [load for row in rounds.rows if (load := finite(row["other_load_cores"])) is not None]
    if loads:
        yield f"Other programs kept {min(loads):.1f} to {max(loads):.1f} cores busy meanwhile."


def _place(rounds: Rounds) -> str:
    def seen(column: str) -> list[str]:
        return list(dict.fromkeys(escape(row[column]) for row in rounds.rows if row[column] is not None))

    threads = seen("threads")
    parts = [*seen("device"), *seen("device_name")]
    parts += [f"{' or '.join(threads)} {'thread' if threads == ['1'] else 'threads'}"] if threads else []
    parts += [f"torch {each}" for each in seen("torch")]
    return "Measured on " + ", ".join(parts)


def _time(rounds: Rounds) -> str:
    moments = sorted(str(row["started_at"])[:16] for row in rounds.rows if row["started_at"] is not None)
    return f"{moments[0]} to {moments[-1]} UTC" if moments else "at an unknown time"


def _checks(rounds: Rounds) -> Iterator[str]:
    for kind in rounds.timings:
        check = rounds.against_itself(kind)
        yield f"A/A, {kind}: {_self(check)}"


def _self(check: Ratio) -> str:
    if check.mean is None:
        return f"the baseline was not timed twice in any round: verdicts are {WITHHELD}."
    said = f"the baseline again took {relative_interval(check)} over {count_of(check.n, 'round')}"
    if check.holds_equality:
        equal = f"{said}: no difference from itself; one of {visible(check)} would have been seen with {CHANCE}."
        return f"{equal} {TOO_COARSE}" if check.is_coarse else equal
    if not check.is_clear:
        return f"{said}: one round has no interval, so that verdicts are {WITHHELD}."
    return f"{said}: **it differs from itself**, so that verdicts are {WITHHELD}: they would find what is not there."


def _table(rounds: Rounds) -> str:
    headers = ["variant", "timing", "median (ms)", "time against the baseline, 95 % interval", "verdict", "n"]
    headers += [f"seen with {CHANCE} from", "by ranks, p after Holm"]
    rows = [_line(rounds, kind, name) for kind in rounds.timings for name in rounds.members]
    return table(headers, rows)


def _line(rounds: Rounds, kind: Timing, name: str) -> list[str]:
    own = rounds.values(kind, name)
    median = number(statistics.median(own.values()), METRICS[TIMED[kind]]) if own else NOT_MEASURED
    if name == rounds.baseline:
        return [escape(name), kind, median, DOES_NOT_APPLY, DOES_NOT_APPLY, str(len(own)), *[DOES_NOT_APPLY] * 2]
    ratio = rounds.against_baseline(kind, name)
    verdict = rounds.verdict(kind, name)
    ranks = _by_ranks(rounds, kind, name)
    return [escape(name), kind, median, relative_interval(ratio), verdict, str(ratio.n), visible(ratio), ranks]


def _by_ranks(rounds: Rounds, kind: Timing, name: str) -> str:
    """What the ranks of the times say, with p, or how many rounds they need to say anything."""
    found = rounds.by_rank(kind, name)
    if found is None:
        return NOT_MEASURED
    if found.verdict == "too few rounds":
        return f"{found.verdict}: {rounds_to_decide(found.contrasts)} needed"
    said = WITHHELD if rounds.verdict(kind, name) == WITHHELD else found.verdict
    return f"{said}, {p_value(found.adjusted)}"


def visible(measured: Ratio) -> str:
    """The smallest slowdown that so many rounds find; beyond tenfold nothing is said by a number."""
    found = measured.visible
    if found is None:
        return NOT_MEASURED
    return relative(1 + found) if found <= COARSEST else f"over {relative(1 + COARSEST)}"


def _notes(rounds: Rounds) -> Iterator[str]:
    contrasts = len(rounds.contrasts)
    if contrasts > 1:
        yield (
            f"Verdicts are corrected for their number (Holm over {contrasts} contrasts), intervals are not: about "
            f"{contrasts * 0.05:.2g} of them would exclude equality by chance alone, and so would one of 20 A/A checks."
        )
    if contrasts:
        yield (
            "The t test of log ratios, paired by round, decides: it sees through a machine that is slower in some "
            "rounds. By ranks: the Mann-Whitney test of the same times, which knows nothing of rounds and assumes no "
            f"distribution; {rounds_to_decide(contrasts)} rounds are the fewest with which it can find anything here."
        )


def _failures(rounds: Rounds) -> Iterator[str]:
    for row in rounds.rows:
        if row["status"] != "ok":
            name = f"{row['variant']} again" if row["is_partner"] else row["variant"]
            why = f"{row['status']}: {row['reason'] or 'no reason is known'}"
            yield f"- Not timed in round {int(row['round']) + 1}: {escape(name)}, {escape(why)}"

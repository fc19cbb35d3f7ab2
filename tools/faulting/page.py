"""The table: of each fault what happened, and what was kept."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version

from ablate import machine
from ablate.asked import many
from faulting.bench import EVERY, STEPS, Ended, Seen
from faulting.catalogue import Fault

_WORDS = 110


@dataclass
class Row:
    """What came of a fault so far; `skipped` are the reasons for which it could not be injected."""

    fault: Fault
    seen: list[Seen] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def bad(self) -> list[Seen]:
        """The cases that were not as they should be."""
        return [each for each in self.seen if each.lost or each.wrong]

    def cells(self) -> list[str]:
        """Those of the table."""
        statuses = Counter("none" if each.status is None else str(each.status) for each in self.seen)
        held = Counter(each.held for each in self.seen)
        words = Counter(each.word for each in self.seen if each.word)
        reasons = "; ".join(dict.fromkeys(self.skipped))
        return [
            self.fault.name,
            self.fault.told,
            str(len(self.seen)),
            _counted(statuses) or "–",
            _short(words.most_common(1)[0][0]) if words else "–",
            _counted(held) or "–",
            self._verdict(reasons),
        ]

    def _verdict(self, reasons: str) -> str:
        lost, wrong = (sum(bool(getattr(each, name)) for each in self.seen) for name in ("lost", "wrong"))
        parts = [f"**lost: {lost}**"] * bool(lost) + [f"**otherwise than expected: {wrong}**"] * bool(wrong)
        parts += ["kept"] * bool(self.seen and not self.bad) + [f"not injected: {reasons}"] * bool(reasons)
        return "; ".join(parts)


HEAD = ("fault", "what is done", "moments", "exit status", "last words (most frequent)", "then stored", "in the end")


def page(rows: Sequence[Row], undisturbed: Ended | None, left: int) -> str:
    """The report."""
    seen = [each for row in rows for each in row.seen]
    bad = sum(len(row.bad) for row in rows)
    seconds = "" if undisturbed is None else f" ({undisturbed.seconds:.0f} s undisturbed)"
    lines = [
        "# Faults, one at a time",
        f"{_where()}. Written by `python tools/faults.py`.",
        f"A tiny experiment{seconds} is run by the command line with one fault in it. Then the same command is given "
        "again without the fault (`--retry-failed` where a trial has failed; then `sync` where MLflow is in use), and "
        "the store must equal that of an undisturbed run in every column except times, speeds, memory and attempts, "
        "and in every point of the curves; nothing may be left over, no process outlive its run, no output hold a "
        "traceback, and a report be possible at any moment. Where a trial is interrupted or the parent killed, at most "
        f"{EVERY} of {STEPS} training steps may be done twice.",
        f"**{len(seen) - bad} of {many(len(seen), 'moment')} of {many(len(rows), 'fault')}: nothing lost, and all as "
        "expected.**" + (f" Still to come: {many(left, 'fault')}." if left else ""),
        "\n".join(_table(rows)),
        "## What was lost, or otherwise than expected",
        "\n".join(_found(rows)) or "Nothing.",
    ]
    return "\n\n".join(lines) + "\n"


def _where() -> str:
    software = machine.software()
    dirty = " (dirty)" if software["git_dirty"] else ""
    where = f"{machine.processor()}, {os.cpu_count()} CPUs, {platform.system()}; torch {software['torch']}, MLflow "
    where += f"{version('mlflow')}, Python {software['python']}; commit {software['git_commit']}{dirty}; "
    return where + f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [list(HEAD), [":---"] * len(HEAD), *(row.cells() for row in rows)]
    return [f"| {' | '.join(_cell(each) for each in line)} |" for line in lines]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _found(rows: Iterable[Row]) -> list[str]:
    return [
        f"- {row.fault.name}, {_cell(each.moment)}: {_cell(_short('; '.join([*each.wrong, *each.lost]), 400))}"
        for row in rows
        for each in row.bad
    ]


def _counted(found: Counter[str]) -> str:
    """`0: 20, 1: 3`; without numbers where there is one thing only."""
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{each} ({n} x)" for each, n in found.most_common())


def _short(text: str, most: int = _WORDS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"

"""Interleaved repeats, seen from the parent: round after round each variant is timed again, in a fresh process, alone.

The order is that of the experiment, with the baseline once more at the end of each round: A B C A, A B C A. What drifts
meets all alike, and the baseline timed against itself tells what is called a difference where there is none (A/A).
A round counts when all of it is there, because its members are compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ablate import child
from ablate.child import Child
from ablate.experiment import Experiment
from ablate.interleaved import Rounds
from ablate.job import TimingJob
from ablate.machine import Resources
from ablate.metrics import TIMED
from ablate.results import Store
from ablate.schema import REPEATS
from ablate.settings import ProfileSettings
from ablate.tables import Columns
from ablate.variant import Variant, timing_id, trial_of

PARTNER_SEEDS = 1_000_000
"""In round r a member has seed r, and the baseline, when it is timed once more, so much more: no seed is ever shared,
however many rounds are added.
"""

Row = dict[str, Any]


class Watcher(Protocol):
    """Who is told which member of which round is timed now, and what a round gave."""

    def time(self, number: int, total: int, label: str) -> None: ...  # noqa: D102
    def timed(self, number: int, total: int, note: str) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Member:
    """Who is timed in each round. Its id is that of the trial with seed 0, whether or not there is one."""

    variant: Variant
    variant_id: str
    is_partner: bool = False

    @property
    def label(self) -> str:
        """The variant's name."""
        return f"{self.variant.name} again" if self.is_partner else self.variant.name

    def seed(self, number: int) -> int:
        """Its seed in a round."""
        return number + (PARTNER_SEEDS if self.is_partner else 0)


@dataclass(frozen=True)
class Contrast:
    """What is compared: the members in their order, the baseline first and last, and what is timed of each. A process
    may take `memory_bytes`, or all that is available.
    """

    members: tuple[Member, ...]
    cells: dict[str, list[int]]
    device: str
    threads: int
    memory_bytes: int | None = None

    @property
    def timing_id(self) -> str:
        """The identity that the rounds are stored under. How many there are has no part in it."""
        return timing_id([member.variant_id for member in self.members], self.cells)

    def document(self) -> dict[str, Any]:
        """What `experiment.json` says of it."""
        names = {member.variant_id: member.variant.name for member in self.members}
        return {"timing_id": self.timing_id, "members": names}

    def round(
        self, number: int, log: Path, stopped: Callable[[], bool], told: Callable[[str], None]
    ) -> list[Row] | None:
        """One round: rows of figures, and of members that have none. None where it was `stopped` before its end."""
        rows: list[Row] = []
        for position, member in enumerate(self.members):
            if stopped():
                return None
            told(member.label)
            place = number * len(self.members) + position + 1
            known = {**dict.fromkeys(REPEATS.names), "timing_id": self.timing_id, "round": number}
            known |= {"variant_id": member.variant_id, "variant": member.variant.name, "is_partner": member.is_partner}
            known |= {"place": place, "seed": member.seed(number), "started_at": datetime.now(UTC)}
            ended = self._timed(member, number, log, stopped)
            if ended is None:
                return None
            rows += [known | row for row in ended]
        return rows

    def _timed(self, member: Member, number: int, log: Path, stopped: Callable[[], bool]) -> list[Row] | None:
        threads = member.variant.settings.train.threads or self.threads
        job = TimingJob(
            member.variant.plain, member.seed(number), self.device, threads, self.cells, str(log), self.memory_bytes
        )
        with child.environment(threads):
            running = Child(child.context(self.device), job)
        status, phase, reason = child.attend(running, stopped)
        if stopped():
            return None
        values, samples = (running.columns.pop(name, {}) for name in ("values", "samples"))
        known = {"status": status, "device": self.device, "threads": threads, **running.columns}
        if status != "ok":
            return [known | {"reason": ": ".join(filter(None, (phase, reason)))}]
        return [known | {"metric": each, "value": values[each], "samples": samples.get(each)} for each in values]


def contrast(variants: Sequence[Variant], device: str, threads: int, memory_bytes: int | None = None) -> Contrast:
    """The baseline, which comes first, the others, and the baseline again."""
    known = [Member(variant, trial_of(variant, 0, device, threads).trial_id) for variant in variants]
    again = Member(known[0].variant, known[0].variant_id, is_partner=True)
    return Contrast((*known, again), _cells(variants[0].settings.profile), device, threads, memory_bytes)


def of_experiment(experiment: Experiment, store: Store, resources: Resources) -> Contrast | None:
    """The variants that have a trial that ended `ok`; None where none are to be timed, or the baseline is not there."""
    if experiment.baseline.settings.profile.repeats is None:
        return None
    done = [
        variant
        for variant in experiment.variants
        if any(_is_ok(store, variant, seed, resources) for seed in experiment.seeds)
    ]
    if experiment.baseline not in done:
        return None
    return contrast(done, resources.device, resources.threads, resources.memory_bytes)


def _is_ok(store: Store, variant: Variant, seed: int, resources: Resources) -> bool:
    row = store.trial(trial_of(variant, seed, resources.device, resources.threads).trial_id)
    return row is not None and row["status"] == "ok"


def _cells(profile: ProfileSettings) -> dict[str, list[int]]:
    """The first cell of each phase that the file profiles; of decoding the first that has a further token to time."""
    cells = {}
    if profile.prefill:
        cells["prefill"] = [profile.prefill.batch[0], profile.prefill.tokens[0]]
    if profile.decode and (timed := profile.decode.timed_cell):
        cells["decode"] = list(timed)
    return cells


def carry_out(
    what: Contrast,
    numbers: Sequence[int],
    log: Path,
    stopped: Callable[[], bool],
    watcher: Watcher,
) -> Iterator[tuple[int, list[Row]]]:
    """The rounds of these numbers, each as it is whole, until they are done or `stopped`."""
    for done, number in enumerate(numbers, 1):
        rows = what.round(number, log, stopped, partial(watcher.time, done, len(numbers)))
        if rows is None:
            return
        watcher.timed(done, len(numbers), note(rows))
        yield number, rows


def left(what: Contrast, store: Store, repeats: int, *, retry_failed: bool) -> list[int]:
    """The numbers of the rounds that are still to be done: new and torn ones, and those of another device or torch than
    the last; failed ones if asked for.
    """
    stored = Rounds.latest(store.rounds(what.timing_id))
    failed = {row["round"] for row in stored.rows if row["status"] != "ok"}
    done = set(stored.numbers) - (failed if retry_failed else set())
    return [number for number in range(repeats) if number not in done]


def note(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a person wants to know of a round that has just ended: everybody's step, or how it failed."""
    parts = []
    for row in rows:
        name = f"{row['variant']} again" if row["is_partner"] else row["variant"]
        if row["status"] != "ok":
            parts.append(f"{name} {row['status']}: {row['reason']}")
        elif row["metric"] == TIMED["step"]:
            parts.append(f"{name} {row['value'] * 1e3:,.4g} ms")
    return "  ".join(parts)


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns."""
    return {name: [row[name] for row in rows] for name in REPEATS.names}

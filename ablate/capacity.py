"""The largest batch and the largest sequence whose training step fits: sought from outside, each try a fresh child.

Nothing is recovered from within: a process that ran out of memory ends, and the next one starts clean. On a CPU all
tries, of all variants, may take the same memory, so that their order says nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from ablate import child, cost, machine
from ablate.child import Child
from ablate.documents import NOTES, read_json
from ablate.job import CapacityJob
from ablate.plan import VariantPlan
from ablate.sealed import write_sealed
from ablate.tables import Columns
from ablate.variant import trial_of

_log = logging.getLogger(__name__)

LIMIT_SECONDS = 20.0
"""For the step of a try, and as long again for what comes before it."""

MOST = {"largest_batch": 2**16, "largest_length": 2**20}
"""Nothing larger is tried."""

KEPT_BACK = 0.1
"""The share of the available memory that is left to everything else."""

GIVEN_UP = 0.05
"""The share of an earlier limit by which what may be taken now can be less: half of what is kept back."""

FINEST = 8
"""A search ends when it has the answer to one part in so many."""

Answer = Literal["fits", "memory", "time"]

Size = Callable[[int], tuple[int, int]]
"""Sequences and length of the step that a number stands for."""


# --- The search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Largest:
    """The largest value that fits, 0 if not even 1 does, and what keeps it from being larger."""

    value: int
    limit: Literal["memory", "time", "most"]


def largest(answer: Callable[[int], Answer], start: int, most: int) -> Largest:
    """The largest value up to `most` that fits, exact where small, else to one part in `FINEST`: of values that do not
    fit the least that was met is no further away.

    It goes from `start` in steps that double until it has met both, and then halves what is between them. What takes
    too long ends the search with what did fit.
    """
    low, high = 0, most + 1
    limit: Literal["memory", "time", "most"] = "most"
    value, step = max(1, min(start, most)), max(1, start // FINEST)
    while not _is_found(low, high, limit):
        if (said := answer(value)) == "fits":
            low = value
        else:
            high, limit = value, said
        value = _next(low, high, step, most)
        step *= 2
    return Largest(low, limit)


def _next(low: int, high: int, step: int, most: int) -> int:
    if high > most:
        return min(most, low + step)
    return (low + high) // 2 if low else max(1, high - step)


def _is_found(low: int, high: int, limit: str) -> bool:
    near_enough = 1 if limit == "most" else max(1, low // FINEST)
    return high - low <= near_enough or (low > 0 and limit == "time")


# --- The tries --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capacity:
    """What was found of a variant, for the rows of its trials and for `profiles`, and what could not be, with why."""

    columns: dict[str, Any] = field(default_factory=dict)
    rows: Columns = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)


class NoAnswerError(Exception):
    """Why a try said neither that it fits nor that it does not."""


@dataclass(frozen=True)
class Try:
    """A step of some size, as a child told of it; what it took is None where it did not end well."""

    answer: Answer
    seconds: float | None
    taken_bytes: int | None
    limit_bytes: int | None


def available(device: str, at_most: int | None = None) -> int | None:
    """Bytes that each try may take, never more than `at_most`; None where that is for the device to say."""
    if device == "cuda":
        return at_most
    left = int((1 - KEPT_BACK) * machine.available_bytes())
    return left if at_most is None else min(left, at_most)


class Notes:
    """The tries of an experiment in a file, written as each ends: a search that was cut short goes on where it was.

    They hold for one device, one torch, and memory that is still there: the same limit for all variants. Else, and
    where the file makes no sense, there are none. What is available is never twice the same, so that a little less
    (`GIVEN_UP`) is there still.
    """

    def __init__(self, path: Path, device: str, torch: str, available_bytes: int | None) -> None:
        self.path = path
        told = self._read()
        limit, is_here = told.get("memory_bytes"), (told.get("device"), told.get("torch")) == (device, torch)
        if limit is None or available_bytes is None:
            is_here = is_here and limit == available_bytes
        else:
            is_here = is_here and (1 - GIVEN_UP) * limit <= available_bytes
        self.memory_bytes: int | None = limit if is_here else available_bytes
        self._under = {"device": device, "torch": torch, "memory_bytes": self.memory_bytes}
        self._tries: dict[str, list[list[Any]]] = told["tries"] if is_here else {}

    def known(self, variant_id: str) -> dict[tuple[int, int], Try]:
        """What came of the variant's steps, by sequences and length."""
        return {(sequences, length): Try(*told) for sequences, length, *told in self._tries.get(variant_id, [])}

    def add(self, variant_id: str, sequences: int, length: int, found: Try) -> None:
        """Keep one more, at once."""
        told = [sequences, length, found.answer, found.seconds, found.taken_bytes, found.limit_bytes]
        if found.answer == "time":  # another time may be calmer
            return
        self._tries.setdefault(variant_id, []).append(told)
        try:
            write_sealed(self.path, {**self._under, "tries": self._tries})
        except OSError as error:
            # What is lost is only that a search which is cut short begins again.
            _log.warning("%s cannot be written: %s", self.path.name, error.strerror or error)

    def _read(self) -> dict[str, Any]:
        try:
            told = read_json(self.path, NOTES, {"": list(NOTES)})
        except (OSError, TypeError, ValueError):
            return {}
        tries = [each for of_variant in told["tries"].values() for each in of_variant]
        return told if all(len(each) == 6 and each[2] in get_args(Answer) for each in tries) else {}


def measure(
    plan: VariantPlan,
    device: str,
    threads: int,
    notes: Notes,
    log: str,
    stopped: Callable[[], bool] = lambda: False,
    trying: Callable[[str], None] = lambda size: None,
) -> Capacity:
    """Seek both for a variant, until found or `stopped`; each size is told before it is tried."""
    tries = Tries(plan, device, threads, notes, log, stopped, trying)
    length = plan.variant.settings.train.length
    searches: list[tuple[str, Size, int]] = [
        ("largest_batch", lambda n: (n, length), 1),
        ("largest_length", lambda n: (1, n), length),
    ]
    columns, lacking = dict[str, Any](), dict[str, str]()
    for name, size, small in searches:
        try:
            start = tries.guess(size, small, MOST[name])
            found = largest(partial(tries.answer, size), start, MOST[name])
            columns |= {name: found.value, f"{name}_limit": found.limit}
        except NoAnswerError as why:
            lacking[name] = str(why)
    return Capacity(columns, tries.rows(), lacking)


class Tries:
    """Those of one variant, by sequences and length; none is done twice."""

    def __init__(
        self,
        plan: VariantPlan,
        device: str,
        threads: int,
        notes: Notes,
        log: str,
        stopped: Callable[[], bool],
        trying: Callable[[str], None],
    ) -> None:
        self.plan, self.device, self.threads, self.notes = plan, device, threads, notes
        self.log, self.stopped, self.trying = log, stopped, trying
        self.variant_id = trial_of(plan.variant, 0, device, threads).trial_id
        self.done = notes.known(self.variant_id)

    def answer(self, size: Size, n: int) -> Answer:
        """Whether the step of `n` fits. Raises `NoAnswerError`."""
        return self.at(*size(n)).answer

    def at(self, sequences: int, length: int) -> Try:
        """What came of such a step. Raises `NoAnswerError`."""
        size = (sequences, length)
        if size not in self.done:
            self.trying(f"{sequences:,} x {length:,} tokens")
            self.done[size] = self._try(sequences, length)
            self.notes.add(self.variant_id, sequences, length, self.done[size])
        return self.done[size]

    def guess(self, size: Size, small: int, most: int) -> int:
        """Where to begin: on the line through a small step and one of a quarter of what the formula promises."""
        first = self.at(*size(small))
        if first.taken_bytes is None or first.limit_bytes is None:
            return max(1, small // 2)
        promised = (first.limit_bytes - self._reckoned(*size(0))) // self._reckoned_each(size)
        further = min(most, max(2 * small, promised // 4))
        second = self.at(*size(further))
        if second.taken_bytes is None or second.seconds is None:
            return max(small, further // 2)
        each = (second.taken_bytes - first.taken_bytes) / (further - small)
        in_memory = further + (first.limit_bytes - second.taken_bytes) / max(1.0, each)
        in_time = further * LIMIT_SECONDS / max(1e-9, second.seconds)
        return min(most, max(further, int(min(in_memory, in_time) * (1 - 0.5 / FINEST))))

    def rows(self) -> Columns:
        """Rows of `profiles`."""
        found = [
            {"phase": "capacity", "batch": sequences, "context": length, "metric": metric, "value": value}
            for (sequences, length), each in self.done.items()
            for metric, value in _values(each).items()
            if value is not None
        ]
        return {name: [row[name] for row in found] for name in found[0]} if found else {}

    def _reckoned_each(self, size: Size) -> int:
        return max(1, self._reckoned(*size(1)) - self._reckoned(*size(0)))

    def _reckoned(self, sequences: int, length: int) -> int:
        """Bytes of such a step by the formula."""
        return cost.training_bytes(self.plan.variant.settings.model, self.plan.cost.params_total, sequences, length)

    def _try(self, sequences: int, length: int) -> Try:
        settings = self.plan.variant.plain
        job = CapacityJob(
            settings, self.device, self.threads, sequences, length, self.notes.memory_bytes, self.log, LIMIT_SECONDS
        )
        with child.environment(self.threads):
            running = Child(child.context(self.device), job)
        status, _, reason = child.attend(running, self.stopped, anew="step")
        told = running.columns
        if self.stopped():
            raise NoAnswerError("the run was ended before")
        if status not in ("ok", "oom", "timeout"):
            raise NoAnswerError(f"a step of {sequences} x {length} tokens: {reason or status}")
        limit = told.get("limit_bytes")
        if status == "ok" and limit is None:
            raise NoAnswerError("memory cannot be limited on this system")
        answers: dict[str, Answer] = {"ok": "fits", "oom": "memory", "timeout": "time"}
        return Try(answers[status], told.get("step_seconds"), told.get("step_memory_bytes"), limit)


def _values(each: Try) -> dict[str, float | None]:
    return {
        "fits": float(each.answer == "fits"),
        "step_seconds": each.seconds,
        "step_memory_bytes": each.taken_bytes,
        "memory_limit_bytes": each.limit_bytes,
    }

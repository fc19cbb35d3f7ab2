"""Variants at their gates, seen from the parent: each in a child of its own, so that no plug-in harms anything else."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path

from ablate import child, machine
from ablate.child import Child
from ablate.choice import Faults, SettingsError
from ablate.document import Document, FileFaults, told
from ablate.job import BuildJob, GateJob, Verdict
from ablate.variant import Variant, alike, own_code

LIMIT_SECONDS = 120.0
"""After this a variant is taken to hang. A tiny twin passes everything in a second or two."""

MEMORY_BYTES = 2**32
"""What a variant may take at its gates. Twins need some megabytes."""

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Checked:
    """A variant that was at its gates, and what they said of it."""

    variant: Variant
    verdicts: list[Verdict]
    began: datetime
    log: Path

    @property
    def fault(self) -> str | None:
        """Why it may not be trained; None if nothing speaks against it."""
        return "; ".join(f"{v.gate}: {v.detail}" for v in self.verdicts if v.result == "failed") or None


def check(
    logs: dict[str, Path], variants: Sequence[Variant], workers: int, stopped: Callable[[], bool]
) -> Iterator[Checked]:
    """Lead the variants through their gates, `workers` at a time; each as it is done, until all are or it is `stopped`.

    Whatever the trials run on, this is done on the CPU: what a variant is does not depend on the device. Variants of
    one model, which differ in how they are trained, go together. What a variant prints goes to the file that `logs` has
    for its name; of several to that of the first.
    """
    start, each = child.context("cpu"), min(MEMORY_BYTES, machine.available_bytes() // workers)
    waiting, running = list(reversed(alike(variants))), list[_AtGates]()
    try:
        while (waiting or running) and not stopped():
            while waiting and len(running) < workers:
                group = waiting.pop()
                log = logs[group[0].name]
                job = GateJob(group[0].plain, str(log), LIMIT_SECONDS, each)
                running.append(_AtGates(group, log, datetime.now(UTC), _Errand(start, job)))
            wait([each for one in running for each in one.errand.child.waitables()], _POLL_SECONDS)
            for one in [one for one in running if one.errand.is_done()]:
                running.remove(one)
                yield from one.checked()
    finally:
        for one in running:
            one.errand.end()


def rehearse(found: Document, sets: Sequence[str], max_trials: int) -> dict[int, str]:
    """Have children read a file that names code of the user's own, and build its variants without memory, as the parent
    will: how those that end or hold up one do, by the number of their kind.

    What merely raises is left for the parent to find, but for what is wrong with the file: raises `FileFaults`, also
    where reading it ends or holds up the child. The children are interpreters of their own, not forked from the server
    that trials come from.
    """
    first, fatal = 0, dict[int, str]()
    while True:
        job = BuildJob(found.file, tuple(sets), max_trials, first, os.devnull, LIMIT_SECONDS)
        errand = _Errand(multiprocessing.get_context("spawn"), job)
        try:
            while not errand.is_done():
                wait(errand.child.waitables(), _POLL_SECONDS)
        finally:
            fault, reached = errand.end(), errand.child.phase
        if faults := errand.child.columns.get("faults"):
            raise FileFaults(faults)
        if fault is None:
            return fatal
        if not reached.isdigit():
            raise _unreadable(found, fault)
        first = int(reached) + 1
        fatal[int(reached)] = fault


def _unreadable(found: Document, fault: str) -> FileFaults:
    """What a file that cannot be read to its end is told with: it is not known which code did it, if it names some."""
    places = {name: path for path, name in own_code(found.data)}
    message = f"{' or '.join(places)} cannot be loaded: {fault}"
    cure = "the fault is in that code: it ends the program, or goes on without end"
    return told(found, Faults([SettingsError(next(iter(places.values())), message, cure)]))


class _Errand:
    """A child about something that a plug-in may hold up or end."""

    def __init__(self, start: BaseContext, job: GateJob | BuildJob) -> None:
        with child.environment(threads=1):
            self.child = Child(start, job)

    def is_done(self) -> bool:
        """Whether nothing more is to come."""
        ended = not self.child.process.is_alive()
        for kind, content in self.child.listen():
            if (kind, content) == ("phase", "read"):
                self.child.began = time.monotonic()  # what it took to start says nothing of the code
        return ended or self.child.outcome is not None or self.child.overdue()

    def end(self) -> str | None:
        """What ended it before it had said everything; None where it had."""
        if self.child.process.is_alive():
            self.child.stop(self.child.outcome or ("timeout", None, f"still at it after {LIMIT_SECONDS:g} s"))
        status, _, reason = self.child.end()
        return None if status == "ok" else reason or status


@dataclass(frozen=True)
class _AtGates:
    """Variants of one model that are at their gates now."""

    variants: list[Variant]
    log: Path
    began: datetime
    errand: _Errand

    def checked(self) -> list[Checked]:
        """What was said; what ended it before it had said everything speaks against it."""
        fault, said = self.errand.end(), self.errand.child
        verdicts = [*said.verdicts, *([] if fault is None else [Verdict(said.phase, "failed", fault)])]
        return [Checked(variant, verdicts, self.began, self.log) for variant in self.variants]

"""Variants at their gates, seen from the parent: each in a child of its own, so that no plug-in harms anything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import wait
from pathlib import Path

from ablate import child
from ablate.child import Child
from ablate.job import GateJob, Verdict
from ablate.machine import Resources
from ablate.variant import Variant, canonical_json

LIMIT_SECONDS = 120.0
"""After this a variant is taken to hang. A tiny twin passes everything in a second or two."""

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
    logs: dict[str, Path], variants: Sequence[Variant], resources: Resources, stopped: Callable[[], bool]
) -> Iterator[Checked]:
    """Lead the variants through their gates, a few at a time; each as it is done, until all are or it is `stopped`.

    Variants of one model, which differ in how they are trained, go together. What a variant prints goes to the file
    that `logs` has for its name; of several to that of the first.
    """
    alike: dict[str, list[Variant]] = defaultdict(list)
    for variant in variants:
        alike[canonical_json(variant.plain["model"])].append(variant)
    waiting, running = list(reversed(alike.values())), list[_Running]()
    try:
        while (waiting or running) and not stopped():
            while waiting and len(running) < resources.workers:
                group = waiting.pop()
                running.append(_Running(group, logs[group[0].name], resources))
            wait([each for one in running for each in one.child.waitables()], _POLL_SECONDS)
            for one in [one for one in running if one.is_done()]:
                running.remove(one)
                yield from one.end()
    finally:
        for one in running:
            one.end()


class _Running:
    """Variants of one model at their gates now."""

    def __init__(self, variants: list[Variant], log: Path, resources: Resources) -> None:
        self.variants, self.log, self.began = variants, log, datetime.now(UTC)
        job = GateJob(variants[0].plain, resources.device, str(log), LIMIT_SECONDS)
        with child.environment(threads=1):
            self.child = Child(child.context(resources.device), job)

    def is_done(self) -> bool:
        """Whether nothing more is to come."""
        ended = not self.child.process.is_alive()
        for _ in self.child.listen():
            pass
        return ended or self.child.outcome is not None or self.child.overdue()

    def end(self) -> list[Checked]:
        """What was said; what ended it before it had said everything speaks against it."""
        verdicts, phase = self.child.verdicts, self.child.phase
        if self.child.process.is_alive():
            hangs = ("timeout", phase, f"still at it after {LIMIT_SECONDS:g} s")
            self.child.stop(self.child.outcome or hangs)
        status, _, reason = self.child.end()
        if status != "ok":
            verdicts.append(Verdict(phase, "failed", reason or status))
        return [Checked(variant, verdicts, self.began, self.log) for variant in self.variants]

"""Children that hang, take memory without end, or end at once; and a clock that jumps."""

from __future__ import annotations

from collections.abc import Iterable

from faulting.bench import Bench, Case
from faulting.catalogue import MOMENTS, STEP, at, fault
from faulting.signals import SHORT

_HOURS = 3600.0


@fault
def a_child_hangs(bench: Bench) -> Iterable[Case]:
    """As a plug-in does that waits for nothing: it is ended; `--retry-failed` does it again."""
    for name in ("gates", "training"):
        given = {**at(MOMENTS[name], hang=True), "set": SHORT}
        yield Case(name, (1,), given, again=("--retry-failed",), steps_again=None)


@fault
def a_child_takes_memory(bench: Bench) -> Iterable[Case]:
    """As a plug-in does that never frees any: it is ended as `oom` before the machine is, by `--memory`."""
    for name in ("training", "profile", "timing"):
        given = at(MOMENTS[name], allocate=True)
        yield Case(name, (1,), given, arguments=("--memory", "1.5G"), again=("--retry-failed",), steps_again=None)


@fault
def the_clock_jumps(bench: Bench) -> Iterable[Case]:
    """The time of day of all processes, by hours, while a trial is trained: no figure is of that clock."""
    for hours in (5, -5, 24 * 365):
        yield Case(f"{hours:+} hours", given=at(STEP, clock=hours * _HOURS))

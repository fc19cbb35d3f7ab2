"""The faults by name, each a function that gives its cases; its docstring says what is done, and what is expected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from faulting.bench import Bench, Case

Cases = Callable[[Bench], Iterable[Case]]
T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    cases: Cases

    @property
    def told(self) -> str:
        """What is done, and what is expected."""
        return inspect.cleandoc(self.cases.__doc__ or "")


FAULTS: dict[str, Fault] = {}


def fault(cases: Cases) -> Cases:
    """Puts a function into the catalogue, under its name with blanks."""
    name = cases.__name__.replace("_", " ")
    FAULTS[name] = Fault(name, cases)
    return cases


def some(found: Sequence[T], every: int, first: int = 0) -> list[T]:
    """Each so manieth."""
    return list(found[first % max(1, min(every, len(found))) :: every])


def moment(kind: str, operation: str, role: str = "", nth: int = 1) -> dict[str, Any]:
    """When a process of this kind does so, with this, for the nth time; a role is a regular expression."""
    return {"kind": kind, "operation": operation, "role": role, "nth": nth}


def at(when: Mapping[str, Any], **act: Any) -> dict[str, Any]:
    """What the trap is told: when, and what then."""
    return {"moment": when, "act": act}


def literally(name: str) -> str:
    """A role that is this one."""
    return re.escape(name)


STEP = moment("Job", "step", nth=7)
"""In the middle of the baseline's training."""

MOMENTS = {
    "gates": moment("GateJob", "say", "verdict"),
    "training": STEP,
    "last step": moment("Job", "step", nth=12),
    "second trial": moment("parent", "replace", ".*/trials/.*"),
    "profile": moment("Job", "say", "phase profile"),
    "curves stored": moment("parent", "replace", ".*/curves/.*"),
    "timing": moment("TimingJob", "say", ".*"),
    "report": moment("parent", "open", ".*report.md"),
}

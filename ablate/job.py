"""What passes between the parent and its children: the work that is given, as plain data, and what gates answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Job:
    """A trial as plain data.

    `settings` is the resolved tree of settings, `phases` holds "train", "profile" or both, `log` is the file that
    everything printed goes to.
    """

    settings: dict[str, Any]
    seed: int
    device: str
    threads: int
    phases: tuple[str, ...]
    log: str

    @property
    def limit(self) -> float | None:
        """Seconds after which it is ended."""
        seconds: float | None = self.settings["train"]["max_seconds"]
        return seconds


@dataclass(frozen=True)
class GateJob:
    """A variant that has to pass its gates, as plain data: the same as of a trial, and `limit` in seconds."""

    settings: dict[str, Any]
    log: str
    limit: float


@dataclass(frozen=True)
class BuildJob:
    """Variants that are to be built without memory, as plain data; `limit` in seconds is for all of them."""

    settings: list[dict[str, Any]]
    log: str
    limit: float


@dataclass(frozen=True)
class Verdict:
    """What a gate says of a variant: a figure or a sentence, or why it has nothing to say."""

    gate: str
    result: Literal["passed", "failed", "not applicable"]
    detail: str

"""What the parent gives to a trial's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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

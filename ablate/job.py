"""What passes between the parent and its children: the work that is given, as plain data, and what gates answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Peaks:
    """What a device did at best when it was calibrated: FLOPs a second of bare matrix products by precision, and bytes
    a second of a copy, read and written. What is not known is not in it, or None.
    """

    matmul_flops: dict[str, float] = field(default_factory=dict)
    copy_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Job:
    """A trial as plain data.

    `settings` is the resolved tree of settings, `phases` holds "train", "profile" or both, `log` is the file that
    everything printed goes to. `alone` says whether no other trial runs beside it. It may take `memory_bytes`, or all
    that is available. `corpus_sha256` and `sources` (by file) are the hashes of what it was planned with, where it is
    to be held to that.

    One `for_tuning` is trained, and evaluated, on the training split alone.

    In the folder `checkpoints`, which has the trial's id for its name, stands what it goes on from; where that is ""
    none are kept. It is the `attempt` of that number, and what one before `first_attempt` has left does not count.
    """

    settings: dict[str, Any]
    seed: int
    device: str
    threads: int
    phases: tuple[str, ...]
    log: str
    peaks: Peaks = Peaks()
    alone: bool = True
    memory_bytes: int | None = None
    corpus_sha256: str | None = None
    sources: dict[str, str | None] = field(default_factory=dict)
    checkpoints: str = ""
    attempt: int = 1
    first_attempt: int = 1
    for_tuning: bool = False

    @property
    def limit(self) -> float | None:
        """Seconds after which it is ended."""
        seconds: float | None = self.settings["train"]["max_seconds"]
        return seconds


@dataclass(frozen=True)
class TimingJob:
    """A variant that is to be timed, as plain data: of `cells` those that are named are timed beside training.

    `prefill` has batch and tokens, `decode` batch, context and new tokens.
    """

    settings: dict[str, Any]
    seed: int
    device: str
    threads: int
    cells: dict[str, list[int]]
    log: str
    memory_bytes: int | None = None

    @property
    def limit(self) -> float | None:
        """Seconds after which it is ended: those of a trial."""
        seconds: float | None = self.settings["train"]["max_seconds"]
        return seconds


@dataclass(frozen=True)
class GateJob:
    """A variant that has to pass its gates, as plain data: the same as of a trial, and `limit` in seconds."""

    settings: dict[str, Any]
    log: str
    limit: float
    memory_bytes: int | None = None


@dataclass(frozen=True)
class BuildJob:
    """An experiment's file that is to be read, with the command line's `sets`, and those of its variants that are made
    of the user's own code to be built without memory, from the kind `first` on; `limit` in seconds is for all of it.
    """

    file: str
    sets: tuple[str, ...]
    max_trials: int
    first: int
    log: str
    limit: float


@dataclass(frozen=True)
class CalibrationJob:
    """A device to be calibrated with so many CPU threads, `anew` also where that is stored; `limit` in seconds."""

    device: str
    threads: int
    anew: bool
    log: str
    limit: float


@dataclass(frozen=True)
class CapacityJob:
    """A training step of `sequences` of `length` tokens, to see whether it fits, as plain data.

    It may take `memory_bytes`, or all that is available; `limit` in seconds is for the step, and for what comes before.
    """

    settings: dict[str, Any]
    device: str
    threads: int
    sequences: int
    length: int
    memory_bytes: int | None
    log: str
    limit: float


@dataclass(frozen=True)
class Past:
    """What lies behind a checkpoint: steps; when the first attempt began, by `time.time`; the seconds of all attempts,
    and how many these are, the one that wrote it among them.
    """

    steps: int
    began: float
    seconds: float
    attempts: int


@dataclass(frozen=True)
class Verdict:
    """What a gate says of a variant: a figure or a sentence, or why it has nothing to say."""

    gate: str
    result: Literal["passed", "failed", "not applicable"]
    detail: str

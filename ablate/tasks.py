"""What is left to do of an experiment, beside what is stored of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ablate.results import Store, is_trained
from ablate.variant import Trial

PHASES = ("train", "profile")
"""What a trial consists of. A profile without training has a phase `steps` in its place: a few steps, measured."""


@dataclass(frozen=True)
class Task:
    """A trial that has to run, or the part of one that is missing beside what is stored."""

    trial: Trial
    stored: dict[str, Any] | None
    phases: tuple[str, ...]

    @property
    def is_new(self) -> bool:
        """Whether nothing has been trained, or measured in a step, that this could be beside."""
        return self.phases != ("profile",)

    @property
    def kept(self) -> dict[str, Any]:
        """The stored row where it stays, but for what is done now; else nothing."""
        if self.stored is None or len(self.phases) > 1:
            return {}
        return {} if self.is_new and self.stored["status"] != "ok" else self.stored


def tasks(trials: list[Trial], store: Store, *, retry_failed: bool, only: str | None = None) -> list[Task]:
    """What is left to do: new and interrupted trials, what finished ones lack, failed ones if asked for.

    With `only`, one of `PHASES`, nothing else is done.
    """
    found = []
    for trial in trials:
        stored = store.trial(trial.trial_id)
        status = stored["status"] if stored else None
        if status in (None, "interrupted", "ok") or retry_failed:
            done = _done(trial, stored) if stored else ()
            if phases := _phases(done, only):
                found.append(Task(trial, stored, phases))
    return found


def _done(trial: Trial, stored: dict[str, Any]) -> tuple[str, ...]:
    """What the row holds of the trial. Of one that is not `ok` that is its training, where its profile went wrong."""
    is_ok = stored["status"] == "ok"
    holds = {
        "train": is_trained(stored) and (is_ok or stored["phase"] == "profile"),
        "profile": is_ok and stored["profile_id"] == trial.profile_id,
    }
    return tuple(phase for phase in PHASES if holds[phase])


def _phases(done: tuple[str, ...], only: str | None) -> tuple[str, ...]:
    missing = tuple(phase for phase in PHASES if phase not in done and only in (None, phase))
    return ("steps", "profile") if missing == ("profile",) and "train" not in done else missing

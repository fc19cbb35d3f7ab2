"""What is left to do of an experiment, beside what is stored of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ablate.results import Store, is_trained
from ablate.variant import Trial

PHASES = ("train", "profile")
"""What a trial consists of. A profile without training has a phase `steps` in its place: a few steps, measured."""


ANEW = ("diverged", "gate_failed", "incomplete", "decode_mismatch")
"""Outcomes that are the variant's own: a trial with one of them is not gone on with."""


def is_final(row: Mapping[str, Any]) -> bool:
    """Whether there is no training left to go on with."""
    return row["status"] in ANEW or (row["status"] == "ok" and is_trained(row))


@dataclass(frozen=True)
class Task:
    """A trial that has to run, or the part of one that is missing beside what is stored."""

    trial: Trial
    stored: dict[str, Any] | None
    phases: tuple[str, ...]

    @property
    def attempt(self) -> int:
        """Its number, as far as the row knows."""
        return 1 + ((self.stored or {}).get("attempts") or 0)

    @property
    def first_attempt(self) -> int:
        """That of the first attempt whose training this one may go on with."""
        return self.attempt if self.stored and self.stored["status"] in ANEW else 1

    @property
    def before(self) -> dict[str, Any]:
        """The stored row where this attempt goes on with that one's work, done or begun; else nothing."""
        begun = self.stored is not None and self.stored["status"] not in (*ANEW, "ok")
        return self.stored if begun and self.stored else self.kept

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
            done = _done(trial, stored) if stored and store.is_whole(trial.trial_id) else ()
            if phases := _phases(done, only):
                found.append(Task(trial, stored, phases))
    return found


def tidy(trials: list[Trial], store: Store) -> None:
    """Remove what a run that was killed has left of trials that are done."""
    for trial in trials:
        if trial.variant.settings.train.keep_checkpoints or not store.are_checkpoints_left(trial.trial_id):
            continue
        if (row := store.trial(trial.trial_id)) is not None and is_final(row):
            store.drop_checkpoints(trial.trial_id)


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

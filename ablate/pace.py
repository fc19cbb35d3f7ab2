"""How far a training is: by its steps, or where the recipe counts seconds, by those that it has trained."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ablate.settings import TrainSettings

if TYPE_CHECKING:
    from ablate.train import Trained


class Pace:
    """How far a `run` is, in which the seconds are kept: a training that is gone on with counts on.

    A step's seconds are all from its beginning until its measures are read; evaluations and checkpoints are none of
    them.
    """

    def __init__(self, recipe: TrainSettings, run: Trained) -> None:
        self.recipe, self.run = recipe, run
        self.is_timed = recipe.seconds is not None
        self._begun = self._before = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._begun, self._before = time.perf_counter(), self.run.seconds

    def end(self, step: int) -> None:
        """A step has ended."""
        if self.is_timed:
            self.run.seconds += time.perf_counter() - self._begun
            if step <= self.recipe.warmup_steps:
                self.run.warm_seconds = self.run.seconds

    @property
    def share(self) -> float | None:
        """How much of the time after the warm-up has passed; None where steps are counted."""
        if self.recipe.seconds is None:
            return None
        warm = self.run.warm_seconds
        return (self.run.seconds - warm) / max(self.recipe.seconds - warm, 1e-9)

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows a step that is not the last: every so many, or after each tenth of the time."""
        if self.recipe.eval_every is None and self.recipe.seconds is not None:
            return self._tenths(self._before) < self._tenths(self.run.seconds)
        return step % (self.recipe.eval_every or self.recipe.n_steps) == 0

    def is_over(self, step: int) -> bool:
        """Whether this was the last step: of all, or the first that ended past the time."""
        if self.recipe.seconds is None:
            return step == self.recipe.n_steps
        return self.run.seconds >= self.recipe.seconds

    def _tenths(self, seconds: float) -> int:
        return int(10 * seconds / (self.recipe.seconds or 1.0))

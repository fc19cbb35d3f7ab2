"""A training run, watched from outside: its speed, memory and energy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ablate import pulse
from ablate.profiling import memory
from ablate.profiling.clock import (
    FEWEST,
    StepTimer,
    clock_for,
    percentiles,
    series,
    speeds,
    warmup_steps,
    windows,
)
from ablate.profiling.compilation import Compilation
from ablate.profiling.energy import EnergyMeter
from ablate.profiling.surroundings import Surroundings
from ablate.settings import TrainSettings

READ_EVERY_SECONDS = 60.0
"""A counter of energy may start anew every quarter of an hour, and must be read before."""

Points = Callable[[int, int, str, dict[str, float]], None]
"""Takes points of the curves: step, tokens so far, split, values by metric."""


class Watch:
    """What `train` calls an observer. Evaluations are in none of the figures but their own.

    Tokens are those of the text that a step goes through, whatever part of them enters the loss: all that an encoder
    reads, masked or not, and the source and target of an encoder-decoder. `begin` is when the trial was asked for, by
    `time.perf_counter`. Without a `meter` energy is unknown.
    """

    def __init__(
        self,
        recipe: TrainSettings,
        device: torch.device,
        begin: float,
        phase: Callable[[str], None],
        points: Points,
        meter: EnergyMeter | None = None,
    ) -> None:
        self.recipe, self.device, self.begin, self.phase, self.points = recipe, device, begin, phase, points
        self.go_on(0)
        self.startup_seconds: float | None = None
        self.eval_seconds = 0.0
        self.surroundings = Surroundings(device)
        self.compilation = Compilation()
        self._meter = meter
        self._joules: float | None = None
        self._read_at = 0.0
        self._facts: dict[str, float] = {}

    def go_on(self, done: int) -> None:
        """So many steps were made before, by another process: all that is measured is of those to come."""
        planned = self.recipe.planned_steps
        self.warmup = FEWEST if planned is None else warmup_steps(planned - done)
        self.first = done + self.warmup + 1
        self.timer = StepTimer(self.warmup, clock_for(self.device), self._warm)
        self.part = self.timer.part

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the work of one step."""
        if self.startup_seconds is None:
            self.startup_seconds = time.perf_counter() - self.begin
        with self.timer.step():
            yield
        self.surroundings.sample()
        pulse.beat()
        if self._joules is not None and time.monotonic() - self._read_at > READ_EVERY_SECONDS:
            self._energy()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around one evaluation; it reads its result, so it has ended when it returns."""
        self.phase("evaluate")
        with self.pause():
            begin = time.perf_counter()
            yield
            self.eval_seconds += time.perf_counter() - begin
        self.phase("train")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is no part of training: its time and its energy are in none of the figures."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps that are still in its queue are not of it
        with self.timer.pause():
            before = self._energy()
            yield
            if self._joules is not None:
                after = self._energy()
                self._joules = None if before is None or after is None else self._joules + after - before

    def record(self, step: int, split: str, values: dict[str, float]) -> None:
        """Points of the curves."""
        self.points(step, step * self.recipe.batch_tokens, split, values)

    def columns(self) -> dict[str, Any]:
        """Everything measured, for the trial's row. To be asked before anything else runs on the device."""
        seconds, whole = self.timer.seconds(), self.timer.whole_seconds()
        steps = seconds.pop("step", [])
        self._facts = memory.allocator_facts(self.device)
        columns = {
            "startup_seconds": self.startup_seconds,
            "eval_seconds": self.eval_seconds,
            **self.compilation.columns(self.recipe.compile),
            **self._energy_columns(len(steps), sum(whole)),
            **speeds(steps, whole, self.recipe.batch_tokens),
            **memory.peaks(self.device, self.surroundings.used_bytes),
            **self.surroundings.columns(),
        }
        for part, each in seconds.items():
            columns |= percentiles(f"{part}_seconds", each)
        return columns

    def rows(self) -> list[dict[str, Any]]:
        """Rows of `profiles`: the median of each series with its spread, the series itself, and the allocator's facts.

        Steps and their parts have the number of the step, windows their own.
        """
        seconds = self.timer.seconds()
        found = [row for part, each in seconds.items() for row in series(f"{part}_seconds", each, self.first)]
        if whole := self.timer.whole_seconds():
            found += series("window_tokens_per_second", windows(whole, self.recipe.batch_tokens))
        return [*found, *({"metric": name, "value": value} for name, value in self._facts.items())]

    def _warm(self) -> None:
        """From here on steps count."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._joules = self._energy()
        self.surroundings.begin()
        self.compilation.warm()

    def _energy(self) -> float | None:
        self._read_at = time.monotonic()
        return self._meter.joules() if self._meter else None

    def _energy_columns(self, steps: int, seconds: float) -> dict[str, Any]:
        now = self._energy()
        used = 0.0 if self._joules is None or now is None else now - self._joules
        # Of a moment a counter that is seldom renewed tells nothing, and one that stands still counts nothing.
        if self._meter is None or steps == 0 or self._meter.too_short(seconds) or used <= 0:
            return {"energy_joules_per_token": None, "energy_source": None}
        per_token = used / (steps * self.recipe.batch_tokens)
        return {"energy_joules_per_token": per_token, "energy_source": self._meter.source}

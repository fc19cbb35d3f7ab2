"""Time, by a clock that fits the device: on a GPU events in its queue, since calls return before the work is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SETTLE_AT = 256
"""Steps whose marks are kept before they are turned into seconds."""

WINDOW_STEPS = 10
"""A window over which a speed is taken has at least so many steps, where there are so many."""

FEWEST = 3
"""Steps before the timed ones; no more are left out where nobody knows how many steps there will be."""

_BETWEEN = "between"

MOST_SAMPLES = 10_000
"""Of a longer series only every second, third, … value is kept."""


@dataclass(frozen=True)
class Clock:
    """`mark()` notes this moment of the device; `seconds(a, b)` between two marks waits until both have passed."""

    mark: Callable[[], Any]
    seconds: Callable[[Any, Any], float]


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return Clock(_event, _between) if device.type == "cuda" else Clock(time.perf_counter, lambda a, b: b - a)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def warmup_steps(steps: int) -> int:
    """Steps before the timed ones: a tenth of the run, at least 3 and at most 10, and never all of it."""
    return min(steps - 1, max(FEWEST, min(steps // 10, 10)))


class StepTimer:
    """Seconds of each step after the first `warmup` ones, and of its parts; and apart from these what lies between.

    Nothing waits for the device: a step's marks are read when it is long over.
    """

    def __init__(self, warmup: int, clock: Clock, warm: Callable[[], None] = lambda: None) -> None:
        self.clock, self._left, self._warm = clock, warmup, warm
        self._seconds: list[dict[str, float]] = []
        self._pending: list[list[tuple[str, Any, Any]]] = []
        self._spans: list[tuple[str, Any, Any]] = []
        self._gap: list[tuple[str, Any, Any]] = []
        self._open: Any = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step; calls `warm` once before the first that is timed."""
        if self._left == 0:
            self._warm()
        self._spans = []
        with self.part("step"):
            yield
        if self._left <= 0:
            self._keep()
        self._left -= 1
        if len(self._pending) >= SETTLE_AT:
            self._settle()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is no part of training, although it lies between steps."""
        if self._open is None:
            yield
            return
        self._gap.append((_BETWEEN, self._open, self.clock.mark()))
        yield
        self._open = self.clock.mark()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part of a step, which may have several of the same name. Nothing waits: the device is only asked."""
        if self._left > 0:
            yield
            return
        first = self.clock.mark()
        yield
        self._spans.append((name, first, self.clock.mark()))

    def seconds(self) -> dict[str, list[float]]:
        """Of every timed step and of its parts, by name; a part that a step does not have took no time of it."""
        self._settle()
        names = dict.fromkeys(name for step in self._seconds for name in step if name != _BETWEEN)
        return {name: [step.get(name, 0.0) for step in self._seconds] for name in names}

    def whole_seconds(self) -> list[float]:
        """Of every timed step from the end of the one before, pauses left out; of the first from its own beginning."""
        self._settle()
        return [step["step"] + step.get(_BETWEEN, 0.0) for step in self._seconds]

    def _keep(self) -> None:
        _, first, last = self._spans[-1]
        if self._open is not None:
            self._gap.append((_BETWEEN, self._open, first))
        self._pending.append([*self._spans, *self._gap])
        self._gap, self._open = [], last

    def _settle(self) -> None:
        for spans in self._pending:
            step: dict[str, float] = {}
            for name, first, last in spans:
                step[name] = step.get(name, 0.0) + self.clock.seconds(first, last)
            self._seconds.append(step)
        self._pending.clear()


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> float | None:
    """From the 10th to the 90th percentile; None for a single value, which has no spread."""
    return percentile(values, 90) - percentile(values, 10) if len(values) > 1 else None


def percentiles(metric: str, values: Sequence[float]) -> dict[str, float]:
    """The columns `…_p10`, `…_p50` and `…_p90` of a metric."""
    return {f"{metric}_p{percent}": percentile(values, percent) for percent in (10, 50, 90)}


def speeds(seconds: Sequence[float], whole: Sequence[float], tokens: int) -> dict[str, float]:
    """Columns for steps of `tokens` tokens each, which take so many `seconds`, and `whole` with what lies between.

    Speeds are of the latter: all tokens by all seconds, and percentiles over steps and windows.
    """
    if not seconds:
        return {}
    return {
        "train_tokens_per_second": tokens * len(whole) / sum(whole),
        **percentiles("train_tokens_per_second", [tokens / each for each in whole]),
        **percentiles("window_tokens_per_second", windows(whole, tokens)),
        **percentiles("step_seconds", seconds),
    }


def windows(seconds: Sequence[float], tokens: int) -> list[float]:
    """Tokens a second over windows of steps on end, all nearly equally long: all tokens by all seconds of each."""
    cut = np.array_split(np.asarray(seconds), max(1, len(seconds) // WINDOW_STEPS))
    return [tokens * len(window) / float(window.sum()) for window in cut if len(window)]


def series(metric: str, values: Sequence[float], first: int = 1) -> list[dict[str, Any]]:
    """Rows of `profiles`: the median with its spread, and every single value, numbered from `first`."""
    middle = {"metric": f"{metric}_p50", "value": percentile(values, 50), "spread": spread(values)}
    return [middle, *samples(metric, values, first)]


def samples(metric: str, values: Sequence[float], first: int = 1) -> list[dict[str, Any]]:
    """Rows of `profiles` with every single value, numbered from `first`; of very many an even selection."""
    every = -(-len(values) // MOST_SAMPLES) or 1
    return [
        {"metric": metric, "value": value, "spread": None, "sample": first + place}
        for place, value in list(enumerate(values))[::every]
    ]

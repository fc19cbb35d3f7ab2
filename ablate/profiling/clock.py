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
    return min(steps - 1, max(3, min(steps // 10, 10)))


class StepTimer:
    """Seconds of each step after the first `warmup` ones. What happens between the steps is not in them."""

    def __init__(self, warmup: int, clock: Clock, warm: Callable[[], None] = lambda: None) -> None:
        self.clock, self._left, self._warm = clock, warmup, warm
        self._seconds: list[float] = []
        self._pending: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step; calls `warm` once before the first that is timed."""
        if self._left == 0:
            self._warm()
        start = self.clock.mark()
        yield
        if self._left <= 0:
            self._pending.append((start, self.clock.mark()))
        self._left -= 1
        if len(self._pending) >= SETTLE_AT:
            self._settle()

    def seconds(self) -> list[float]:
        """All timed steps."""
        self._settle()
        return list(self._seconds)

    def _settle(self) -> None:
        self._seconds += [self.clock.seconds(first, last) for first, last in self._pending]
        self._pending.clear()


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> float | None:
    """From the 10th to the 90th percentile; None for a single value, which has no spread."""
    return percentile(values, 90) - percentile(values, 10) if len(values) > 1 else None


def speeds(seconds: Sequence[float], tokens: int) -> dict[str, float]:
    """Columns for steps of `tokens` tokens each: all tokens by all seconds, and percentiles over steps."""
    if not seconds:
        return {}
    rates = [tokens / each for each in seconds]
    columns = {"train_tokens_per_second": tokens * len(seconds) / sum(seconds)}
    for percent in (10, 50, 90):
        columns[f"train_tokens_per_second_p{percent}"] = percentile(rates, percent)
        columns[f"step_seconds_p{percent}"] = percentile(seconds, percent)
    return columns

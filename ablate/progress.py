"""What a person sees of a run: a live line for each running trial, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ablate.terminal import visible

_PLAIN_EVERY_SECONDS = 10.0


@dataclass
class Running:
    """How far a trial is. Speed is over the time since its first step, evaluations included."""

    label: str
    steps: int | None  # None where nobody knows before
    phase: str = "setup"
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    began: tuple[float, int] | None = None
    said: float = field(default_factory=lambda: time.monotonic())

    def learn(self, curve: Mapping[str, Sequence[Any]]) -> None:
        """Take in points of the training curve."""
        for step, tokens, split, metric, value in zip(
            *(curve[key] for key in ("step", "tokens", "split", "metric", "value")), strict=True
        ):
            if split == "train" and metric == "loss":
                self.step, self.tokens, self.loss = step, tokens, value
        if self.began is None and self.step:
            self.began = (time.monotonic(), self.tokens)

    def tokens_per_second(self) -> float | None:
        """None until there is something to divide."""
        if self.began is None or self.tokens <= self.began[1]:
            return None
        return (self.tokens - self.began[1]) / max(1e-9, time.monotonic() - self.began[0])

    def line(self) -> str:
        """The state in a line."""
        parts = [self.label]
        if self.step:
            parts.append(f"step {self.step}/{self.steps}" if self.steps else f"step {self.step}")
        if self.phase != "train" or not self.step:
            parts.append(self.phase)
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if speed := self.tokens_per_second():
            parts.append(f"{speed:,.0f} tokens/s")
            if self.phase == "train" and self.step and self.steps:
                left = (self.steps - self.step) * (self.tokens / self.step) / speed
                parts.append(f"{left:.0f} s left")
        return "  ".join(parts)


class Progress:
    """Shows trials done and left, and what runs now."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done = console, total, 0
        self.running: dict[str, Running] = {}
        self.gates = (0, 0)
        self.alone = ""
        self.began = time.monotonic()
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def check(self, done: int, total: int) -> None:
        """So many of the variants have been at their gates."""
        self.gates = (done, total)
        if not self.live and total and not done:
            self._say(f"gates   {total} {'variant' if total == 1 else 'variants'}")
        self._refresh()

    def aside(self, what: str) -> None:
        """Something is done while no trial runs; nothing where it has ended."""
        self.alone = what
        if not self.live and what:
            self._say(what)
        self._refresh()

    def start(self, trial_id: str, label: str, steps: int | None) -> None:
        """A trial begins."""
        self.running[trial_id] = Running(label, steps)
        if not self.live:
            self._say(f"start   {label}")

    def phase(self, trial_id: str, phase: str) -> None:
        """A trial enters a phase."""
        self.running[trial_id].phase = phase
        self._refresh()

    def learn(self, trial_id: str, curve: Mapping[str, Sequence[Any]]) -> None:
        """A trial sent points of its curve."""
        running = self.running[trial_id]
        running.learn(curve)
        if not self.live and time.monotonic() - running.said > _PLAIN_EVERY_SECONDS:
            running.said = time.monotonic()
            self._say(f"        {running.line()}")
        self._refresh()

    def finish(self, trial_id: str, status: str, note: str) -> None:
        """A trial ended."""
        running = self.running.pop(trial_id)
        self.done += 1
        self._say(f"{status:<7} {running.label}  {note}  [{self.done}/{self.total}]")
        self._refresh()

    def leave(self, trial_id: str, note: str) -> None:
        """A trial is another run's now."""
        self._say(f"left    {self.running.pop(trial_id).label}  {note}")
        self._refresh()

    def elsewhere(self, label: str, status: str, note: str) -> None:
        """A trial was to be run, and has ended in another run."""
        self.done += 1
        self._say(f"{status:<7} {label}  {note}  (another run)  [{self.done}/{self.total}]")
        self._refresh()

    def time(self, number: int, total: int, label: str) -> None:
        """A variant is timed again, in the round of that number."""
        self.alone = f"round {number} of {total}: {label}"
        self._refresh()

    def timed(self, number: int, total: int, note: str) -> None:
        """A round ended."""
        self.alone = ""
        self._say(f"round   {number} of {total}  {note}")
        self._refresh()

    def _say(self, line: str) -> None:
        self.console.print(Text(visible(line)), soft_wrap=True)

    def _refresh(self) -> None:
        if self.live:
            self.live.update(Group(*(Text(visible(line), no_wrap=True, overflow="ellipsis") for line in self._lines())))

    def _lines(self) -> list[str]:
        if self.gates[0] < self.gates[1]:
            return ["gates: {} of {} variants".format(*self.gates)]
        if self.alone:
            return [self.alone]
        elapsed = time.monotonic() - self.began
        left = f", about {elapsed / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        head = f"{self.done} of {self.total} trials done, {self.total - self.done} to go{left}"
        return [head, *(f"  {running.line()}" for running in self.running.values())]

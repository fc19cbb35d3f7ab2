"""What a person sees of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ablate import progress
from ablate.progress import Progress, Running


def curve(*steps: int, tokens: int = 32, loss: float = 2.5) -> dict[str, list[object]]:
    """Points as a trial sends them: a loss and a learning rate a step."""
    points = [(step, step * tokens, "train", metric, loss) for step in steps for metric in ("lr", "loss")]
    return dict(zip(("step", "tokens", "split", "metric", "value"), map(list, zip(*points, strict=True)), strict=True))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_tells_step_loss_speed_and_time_left(clock: list[float]) -> None:
    running = Running("gqa seed 0", steps=100)
    assert running.line() == "gqa seed 0  setup"
    running.phase = "train"
    running.learn(curve(1))
    assert running.line() == "gqa seed 0  step 1/100  loss 2.500"
    clock[0] += 2.0
    running.learn(curve(2, 3, 11))
    assert running.line() == "gqa seed 0  step 11/100  loss 2.500  160 tokens/s  18 s left"
    running.phase = "evaluate"
    assert running.line() == "gqa seed 0  step 11/100  evaluate  loss 2.500  160 tokens/s"


def test_plain_lines_where_there_is_no_terminal(clock: list[float]) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False), total=2) as shown:
        shown.start("a", "baseline seed 0", 10)
        shown.phase("a", "train")
        shown.learn("a", curve(1))
        clock[0] += 60
        shown.learn("a", curve(5))
        shown.finish("a", "ok", "val_loss 2.1")
    assert out.getvalue().splitlines() == [
        "start   baseline seed 0",
        "        baseline seed 0  step 5/10  loss 2.500  2 tokens/s  75 s left",
        "ok      baseline seed 0  val_loss 2.1  [1/2]",
    ]


def test_a_live_display_counts_trials_done_and_left() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=100), total=3) as shown:
        shown.start("a", "baseline seed 0", 10)
        shown.learn("a", curve(4))
        shown.finish("a", "oom", "too large")
    assert "1 of 3 trials done, 2 to go" in out.getvalue()
    assert "oom     baseline seed 0  too large  [1/3]" in out.getvalue()


def test_gates_are_counted_before_the_trials() -> None:
    shown = io.StringIO()
    with Progress(Console(file=shown), total=3) as seen:
        for done in range(3):
            seen.check(done, total=2)
        assert shown.getvalue() == "gates   2 variants\n"
        seen.check(0, total=0)
        seen.check(0, total=1)
    assert shown.getvalue() == "gates   2 variants\ngates   1 variant\n"


def test_a_terminal_shows_how_many_are_through_their_gates() -> None:
    seen = Progress(Console(file=io.StringIO(), force_terminal=True), total=3)
    seen.check(1, total=2)
    assert seen._lines() == ["gates: 1 of 2 variants"]
    seen.check(2, total=2)
    assert seen._lines() == ["0 of 3 trials done, 3 to go"]

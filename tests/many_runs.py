"""A process that runs of `ablate` with fake jobs are forked from, so that many cost one import.

It reads a line of JSON for each: where, the arguments, and how the fakes behave; and answers with the process's number.
Asked to `wait` for one, it answers with the exit status. A fake job takes its time and leaves a line in `did`, and a
file in `at_it` while it is at work, which must not be there when another begins with the same. The job that comes after
as many as `stuck_after` says has no end.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas  # noqa: F401
import torch  # noqa: F401

from ablate import calibration, capacity, child, gatekeeper, host, lease, plan, report, rounds, runner, sweep  # noqa: F401
from ablate.capacity import Try
from ablate.cli import main
from ablate.gatekeeper import Checked
from ablate.job import TimingJob, Verdict

Ending = tuple[str, str | None, str | None]
SPEC: dict[str, Any] = {}


class FakeChild:
    """Works for a while, and ends well or as the variant's width says."""

    limit, phase, sentinel, past = None, "train", 0, None

    def __init__(self, start: Any, job: Any) -> None:
        self.job, self.process, self.began = job, self, time.monotonic()
        self.what = Path(job.log).stem + (f"-{job.seed}" if isinstance(job, TimingJob) else "")
        place = "timing" if isinstance(job, TimingJob) else self.what
        SPEC["begun"] = SPEC.get("begun", 0) + 1
        is_stuck = SPEC["begun"] > SPEC.get("stuck_after", math.inf)
        self.seconds = math.inf if is_stuck else SPEC.get("seconds", 0.05)
        self.at_it = begin(place)
        self.columns: dict[str, Any] = {"steps": 4, "train_loss": float(os.getpid())}
        if getattr(job, "for_tuning", False):
            self.columns["val_loss"] = abs(math.log10(job.settings["train"]["lr"]))
        if isinstance(job, TimingJob):
            self.columns = {"values": {"step_seconds_p50": 0.01}, "samples": {"step_seconds_p50": 100}, "torch": "2"}
        self.curves: dict[str, list[Any]] = defaultdict(list)
        self.profiles: dict[str, list[Any]] = defaultdict(list)
        fails = job.settings["model"]["d_model"] == SPEC.get("fails")
        self.outcome: Ending = ("diverged", "train", "step 1") if fails else ("ok", None, None)

    def is_alive(self) -> bool:
        return time.monotonic() - self.began < self.seconds

    def waitables(self) -> list[Any]:
        return []

    def listen(self) -> list[Any]:
        return []

    def too_late(self) -> str | None:
        return None

    def stop(self, outcome: Ending) -> None:
        self.outcome = outcome

    def kill(self) -> None:
        pass

    def ask_to_stop(self) -> None:
        self.phase = "profile"  # in which nothing is waited for

    def interrupt(self, reason: str) -> None:
        self.outcome = ("interrupted", "train", reason)

    def end(self) -> Ending:
        while isinstance(self.job, TimingJob) and self.is_alive():
            time.sleep(0.01)
        self.at_it.unlink(missing_ok=True)
        if self.outcome[0] != "interrupted":
            note(self.what)
        return self.outcome


def begin(what: str) -> Path:
    """Nobody who lives, and is not stopped for long, may be at the same."""
    path = Path("at_it", what)
    if path.exists() and not SPEC.get("overlap"):
        pid = int(path.read_text(encoding="utf-8"))
        assert host.started(pid) in (None, "ended"), f"{what} is being done by {pid}"
    path.write_text(str(os.getpid()), encoding="utf-8")
    return path


def note(what: str) -> None:
    with Path("did").open("a", encoding="utf-8") as file:
        file.write(f"{what}\n")


def check(logs: Any, variants: Any, *_: Any) -> Iterator[Checked]:
    for variant in variants:
        is_bad = variant.settings.model.d_model == SPEC.get("refused")
        said = [Verdict("builds", "failed", "it does not")] if is_bad else []
        yield Checked(variant, said, datetime.now(UTC), logs[variant.name])


def attempt(self: Any, sequences: int, length: int) -> Try:
    at_it = begin("capacity")
    time.sleep(0.01)
    note(f"capacity {self.variant_id} {sequences} x {length}")
    at_it.unlink()
    return Try("fits" if sequences * length <= 4000 else "memory", 1e-3, 100 * sequences * length, 400_000)


def run(spec: dict[str, Any]) -> int:
    SPEC.update(spec)
    os.chdir(spec["folder"])
    out = os.open(spec["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    runner.Child = rounds.Child = FakeChild  # type: ignore[misc,assignment]
    runner._POLL_SECONDS, runner._LOOK_SECONDS = 0.02, 0.05
    child.warm_up = lambda *_: None  # type: ignore[assignment]
    child.attend = lambda running, stopped: running.end()  # type: ignore[assignment]
    calibration.calibrate = lambda *_, **__: ({}, "a fake has no device")  # type: ignore[assignment]
    gatekeeper.check = check
    capacity.Tries._try = attempt  # type: ignore[method-assign]
    capacity.available = lambda *_: 10**9  # what is free just now differs
    sweep._mirror = lambda *_, **__: None  # type: ignore[assignment]
    report.can_draw = lambda: False  # it takes longer than all the rest
    lease.DEAD_AFTER = spec.get("dead_after", 3600.0)
    try:
        main(spec["arguments"])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def serve() -> None:
    """Until there is nothing more to read."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            try:
                code = run(asked)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 70
            sys.stdout.flush()
            os._exit(code)
        print(answer, flush=True)


if __name__ == "__main__":
    serve()

"""Check everything that only a GPU can show, in at most some minutes, and write a report. Needs neither nox nor MLflow.

Usage: python tools/gpu_check.py [--device cuda|cpu] [--carried FOLDER] [--out FOLDER] [--seconds 480] [--quick]

Packages that are missing here are taken from the folder that `tools/carry.py` filled elsewhere. Each stage is a process
of its own with a limit of its own. The report lists every check; exit status 1 where one failed. On the CPU all that
can run there runs, `--quick` at a tiny size.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO

from gpu_checks import carried
from gpu_checks.ledger import OUT_OF_TIME, Finding, Setup, Stage, complete, from_lines, to_line
from gpu_checks.page import cleaner, machine, page

LEAST_SECONDS = 15.0
"""No stage begins with less time than this."""

ON_A_CPU = 4.0
"""A stage may take so many times as long there: its limit is meant for a GPU."""


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--carried", type=Path, default=Path(carried.FOLDER), metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("reports/gpu"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps")
    parser.add_argument("--stages", default="gpu_checks.stages", metavar="MODULE", help="where STAGES are listed")
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # the rest: for a stage's own process
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """Run all stages, or as one stage's own process that stage."""
    wanted = arguments(given)
    if wanted.stage is None:
        return whole(wanted, time.time() + wanted.seconds)
    stages: list[Stage] = importlib.import_module(wanted.stages).STAGES
    stage = next(each for each in stages if each.name == wanted.stage)
    setup = Setup(wanted.device, wanted.quick, wanted.work, wanted.out, time.time() + wanted.seconds)
    with (wanted.work / f"{stage.name}.findings").open("a", encoding="utf-8", buffering=1) as file:
        for finding in stage.run(setup):
            file.write(to_line(finding))
    return 0


def whole(wanted: argparse.Namespace, deadline: float) -> int:
    """Every stage one after the other; the report is written anew after each."""
    taken = carried.missing(wanted.carried)
    lead_to(carried.ROOT, *taken)
    signal.signal(signal.SIGTERM, _leave)
    why_not = None if wanted.device == "cpu" or cuda_is_there() else "no CUDA device here"
    stages: list[Stage] = importlib.import_module(wanted.stages).STAGES
    findings = [each for stage in stages for each in stage.all("not run", "the script was stopped")]
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        setup = Setup(wanted.device, wanted.quick, Path(folder), wanted.out.resolve(), deadline)
        setup.reports.mkdir(parents=True, exist_ok=True)
        clean = cleaner(setup.work)
        for stage in stages:
            print(f"{stage.name} …", flush=True)
            begin = time.time()
            found = list(stage.all("skipped", why_not)) if why_not else in_its_process(stage, setup, wanted.stages)
            findings = [next((new for new in found if new.key == old.key), old) for old in findings]
            print(
                "".join(f"  {each.word:8} {each.check}: {clean(each.figure)}\n" for each in found), end="", flush=True
            )
            seconds[stage.name] = time.time() - begin
            text = page(stages, findings, seconds, surroundings(setup, taken, wanted.carried), clean)
            (setup.reports / "report.md").write_text(text, encoding="utf-8")
    failed = sum(each.word == "failed" for each in findings)
    print(f"{len(findings)} checks, {failed} failed: {wanted.out / 'report.md'}")
    return 1 if failed else 0


def lead_to(*folders: Path) -> None:
    """Let this process and its children import from these folders, before any others."""
    places = [str(folder) for folder in folders]
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])


def cuda_is_there() -> bool:
    """Asked in another process: this one never touches a GPU."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def in_its_process(stage: Stage, setup: Setup, module: str) -> list[Finding]:
    """What comes of a stage in a process of its own, which is ended with all its children when its time is over."""
    limit = stage.seconds * (ON_A_CPU if setup.device == "cpu" else 1.0)
    seconds = min(limit, setup.seconds_left())
    if seconds < min(limit, LEAST_SECONDS):
        return complete(stage, [], "not run", OUT_OF_TIME)
    command = [sys.executable, __file__, "--stages", module, "--stage", stage.name, "--device", setup.device]
    command += ["--work", str(setup.work), "--out", str(setup.reports), "--seconds", str(seconds - 2.0)]
    log, file = setup.work / f"{stage.name}.log", setup.work / f"{stage.name}.findings"
    with log.open("w", encoding="utf-8") as printed:
        status = ended(command + ["--quick"] * setup.quick, seconds, printed)
    found = from_lines(file.read_text(encoding="utf-8")) if file.exists() else []
    if status is None:
        return complete(stage, found, "not run", OUT_OF_TIME)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return complete(stage, found, "failed", f"the stage ended with exit status {status}: {' '.join(last)}")


def ended(command: Sequence[str], seconds: float, printed: IO[str]) -> int | None:
    """The exit status; None where it took more than so many seconds."""
    running = subprocess.Popen(command, stdout=printed, stderr=printed, start_new_session=True)
    try:
        return running.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def surroundings(setup: Setup, taken: Sequence[Path], folder: Path) -> dict[str, str]:
    """What the report says of the machine and the code."""
    return {
        "commit": carried.commit(folder),
        "day": datetime.now(UTC).strftime("%Y-%m-%d"),
        **machine(setup.read("machine.json")),
        "Python": platform.python_version(),
        "size": "quick" if setup.quick else "full",
        "packages taken along": ", ".join(each.name for each in taken) or "none",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

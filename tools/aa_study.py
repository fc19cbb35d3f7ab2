"""Does the A/A check hold what it promises on this machine? Two questions, each by many real runs.

Usage: python tools/aa_study.py [--checks 20] [--rounds 6] [--planted 5] [--out reports/aa]

The first: how often does the baseline, timed against itself with other seeds, stay inside its own 95 % interval. The
second: is a slowdown of 5 %, planted by a choice that waits, found with as many rounds as the check recommends, and how
often. Both through the command line, as anybody would. Writes a report with the machine and the commit; exit status 1
where fewer than 17 of 20 checks stay inside, or the planted slowdown is missed in most experiments.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ablate
from ablate import machine
from ablate.interleaved import Rounds, Said
from ablate.stats import Ratio

STEP = "step_seconds_p50"
SLOWER = 0.05
LEAST_INSIDE = 17 / 20

BASE = """\
name: {name}
baseline: {{d_model: 128, n_layers: 2, n_heads: 4, max_seq_len: 128, feed_forward: {{name: {waits}, seconds: 0.0}}}}
train: {{steps: 5, batch_tokens: 2048, eval_every: 5, eval_tokens: 256, threads: {threads}}}
profile: {{repeats: {repeats}}}
"""
PLANTED = "variants: {{slow: {{feed_forward: {{seconds: {seconds!r}}}}}}}\n"

WAITS = '''"""The usual feed-forward network, which waits in training: a planted slowdown."""

import time

from pydantic import Field

from ablate.choice import Real
from ablate.feed_forward import relu


class Config(relu.Config):
    """How long each pass in training waits."""

    seconds: Real = Field(0.0, ge=0, description="of waiting")

    def build(self, shape):
        network = super().build(shape)
        network.register_forward_hook(lambda *_: _wait(self.seconds) if network.training else None)
        return network


def _wait(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
'''


@dataclass(frozen=True)
class Study:
    """Where the runs are, and with how many threads they run."""

    folder: Path
    threads: int

    def file(self, name: str, repeats: int, seconds: float | None = None) -> str:
        """An experiment file: the baseline, and beside it, where asked for, one that waits so long in each layer."""
        waits = self.folder / "waits.py"
        waits.write_text(WAITS, encoding="utf-8")
        text = BASE.format(name=name, waits=waits, threads=self.threads, repeats=repeats)
        text += "" if seconds is None else PLANTED.format(seconds=seconds)
        file = self.folder / f"{name}.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    def check(self, rounds: int) -> dict[str, Any]:
        """One A/A check: its figures of the training step."""
        said = self._ablate("doctor", "--aa", self.file("check", 1), "--repeats", str(rounds), "--json")
        return dict(json.loads(said)["figures"][STEP])

    def timed(self, name: str, repeats: int, seconds: float | None = None) -> Rounds:
        """The rounds of an experiment."""
        places = ["--results", str(self.folder / "results"), "--reports", str(self.folder / "reports")]
        file = self.file(name, repeats, seconds)
        self._ablate("run", file, "--device", "cpu", "--workers", "1", "--only", "profile", *places)
        frame = ablate.load(self.folder / "results" / name).repeats
        return Rounds([{str(key): value for key, value in row.items()} for row in frame.to_dict("records")])

    def _ablate(self, *arguments: str) -> str:
        environment = {**os.environ, "ABLATE_CACHE": str(self.folder / "cache"), "MLFLOW_TRACKING_URI": "file:off"}
        command = [sys.executable, "-m", "ablate", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
        return done.stdout


@dataclass(frozen=True)
class Findings:
    """What was found so far: the figures of each check, and what is said of each planted slowdown."""

    rounds: int
    checks: list[dict[str, Any]] = field(default_factory=list)
    step: float = math.nan
    repeats: int = 0
    slow: list[tuple[Ratio, Said]] = field(default_factory=list)

    @property
    def inside(self) -> int:
        """Checks whose interval holds equality."""
        return sum(bool(each["inside"]) for each in self.checks)

    @property
    def caught(self) -> int:
        """Planted slowdowns that were found."""
        return sum(said == "slower" for _, said in self.slow)

    def page(self) -> str:
        """The report."""
        software = machine.software()
        dirty = " (dirty)" if software["git_dirty"] else ""
        where = f"{machine.processor()}, {os.cpu_count()} CPUs, 1 thread; torch {software['torch']}, Python "
        where += f"{software['python']}; commit {software['git_commit']}{dirty}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        command = f"`python -m ablate doctor --aa FILE --repeats {self.rounds}`"
        slow = [(*_interval(each.mean, each.low, each.high), said) for each, said in self.slow]
        lines = [
            "# The A/A check, checked",
            f"{where}. Written by `python tools/aa_study.py`.",
            f"## The baseline against itself: {self.inside} of {len(self.checks)} inside",
            f"{len(self.checks)} times {command}, a training step of {self.step * 1e3:.1f} ms.",
            _table("check", [_aa(each) for each in self.checks], "rounds to see 5 %"),
            f"## A planted slowdown of 5 %: found in {self.caught} of {len(slow)} experiments",
            f"Each with {self.repeats} rounds, the median of what the checks above recommend.",
            _table("experiment", slow, "verdict"),
        ]
        return "\n\n".join(lines) + "\n"


def main(checks: int, rounds: int, planted: int, out: Path) -> int:
    """Carry out both parts, write the report as they go on, and say whether what is promised holds."""
    with TemporaryDirectory() as folder:
        study = Study(Path(folder), threads=1)
        found = Findings(rounds, [study.check(rounds) for _ in range(checks)])
        step = statistics.median(study.timed("first", 3).values("step", "baseline").values())
        needed = statistics.median(each["repeats_needed"] or math.inf for each in found.checks)
        found = replace(found, step=step, repeats=0 if math.isinf(needed) else math.ceil(needed))
        _write(found, out)
        for n in range(planted if found.repeats else 0):  # where it is too noisy, no number of rounds would do
            timed = study.timed(f"planted-{n}", found.repeats, SLOWER * step / 2)  # a half in each of two layers
            found.slow.append((timed.against_baseline("step", "slow"), timed.verdict("step", "slow")))
            _write(found, out)
    return 0 if found.inside >= LEAST_INSIDE * checks and found.caught > planted / 2 else 1


def _write(found: Findings, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(found.page(), encoding="utf-8")


def _aa(each: Mapping[str, Any]) -> tuple[str, str, str]:
    interval = _interval(each["ratio"], each["ratio_low"], each["ratio_high"])
    return (interval[0], interval[1] + ("" if each["inside"] else " (outside)"), str(each["repeats_needed"] or "n/a"))


def _interval(mean: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    known = [math.nan if each is None else 100 * (each - 1) for each in (mean, low, high)]
    return f"{known[0]:+.2f} %", f"[{known[1]:+.2f}, {known[2]:+.2f}]"


def _table(first: str, rows: Sequence[tuple[str, str, str]], last: str) -> str:
    head = [f"| {first} | difference | 95 % interval | {last} |", "|---:|---:|:---|:---|"]
    return "\n".join([*head, *(f"| {n} | {' | '.join(row)} |" for n, row in enumerate(rows, 1))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--planted", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("reports/aa"))
    asked = parser.parse_args()
    sys.exit(main(asked.checks, asked.rounds, asked.planted, asked.out))

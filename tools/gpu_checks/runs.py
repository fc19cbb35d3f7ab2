"""Experiments run as a person would, by the command line, and read as one would, by `ablate.load`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

import ablate
from ablate.results import Results
from ablate.tables import ResultsError
from gpu_checks.ledger import OUT_OF_TIME, Failed, Late, Setup, Skipped

ROOT = Path(__file__).resolve().parent.parent.parent

TO_STOP_SECONDS = 10.0
"""A run is asked to stop so long before its stage is ended: what is done by then is stored."""

LOG_LINES = 15


@dataclass(frozen=True)
class Said:
    """How a command ended; `late` where it was stopped."""

    status: int
    out: str
    err: str
    late: bool


def command(setup: Setup, *arguments: str) -> Said:
    """`python -m ablate …`, stopped where the stage's time runs out."""
    environment = {
        "ABLATE_CACHE": str(setup.work / "cache"),
        **os.environ,
        # Refused with a warning: the mirror would take time and shows nothing here.
        "MLFLOW_TRACKING_URI": "file:off",
    }
    running = subprocess.Popen(
        [sys.executable, "-m", "ablate", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = running.communicate(timeout=max(1.0, setup.seconds_left() - TO_STOP_SECONDS))
        return Said(running.returncode, out, err, late=False)
    except subprocess.TimeoutExpired:
        running.terminate()
        out, err = running.communicate()
        return Said(running.returncode, out, err, late=True)


@dataclass(frozen=True)
class Ran:
    """An experiment that ran, as far as it came."""

    setup: Setup
    said: Said
    results: Results
    chosen: tuple[str, ...] = ()

    def of(self, *names: str) -> Ran:
        """The same with these variants alone."""
        return replace(self, chosen=names)

    @cached_property
    def names(self) -> list[str]:
        """Of the variants that were planned, or those chosen."""
        if self.chosen:
            return list(self.chosen)
        plan = json.loads((self.results.folder / "experiment.json").read_text(encoding="utf-8"))
        return [each["name"] for each in plan["variants"]]

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row a variant, all of them ended as they should."""
        for name in self.names:
            self.row(name)
        return self.results.trials.set_index("variant").loc[self.names]

    def stored(self, variant: str) -> pd.Series[Any]:
        """The row of a variant, however it ended."""
        found = self.results.trials[self.results.trials["variant"] == variant]
        if len(found) == 0 or (self.said.late and found.iloc[0]["status"] == "interrupted"):
            raise Late(OUT_OF_TIME) if self.said.late else Failed(f"{variant} has no row", self.said.err)
        return found.iloc[0]

    def row(self, variant: str) -> pd.Series[Any]:
        """The row of a variant that ended as it should."""
        row = self.stored(variant)
        if row["status"] != "ok":
            raise Failed(f"{variant}: {row['status']} in {row['phase']}: {row['reason']}", self.log(row))
        return row

    def log(self, row: pd.Series[Any]) -> str:
        """The end of what a trial printed."""
        try:
            lines = (self.results.folder / str(row["log"])).read_text(encoding="utf-8").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_LINES:])

    def profile(self, variant: str, metric: str) -> float | None:
        """A figure of a variant's profile; None where it is not in it."""
        rows = self.results.profiles[self.results.profiles["trial_id"] == self.row(variant)["trial_id"]]
        values = rows["value"][rows["metric"] == metric]
        return float(values.iloc[0]) if len(values) else None

    def every(self, *columns: str) -> pd.DataFrame:
        """These columns of all variants. Raises where one is null."""
        lacking = [name for name in columns if name not in self.trials or self.trials[name].isna().any()]
        if lacking:
            raise Failed(f"null: {', '.join(lacking)}")
        return self.trials[list(columns)]


def run(setup: Setup, name: str, file: str, sets: Mapping[str, object], *, keep: bool = False) -> Ran:
    """The experiment in `file` with settings changed; its report is kept where asked for."""
    results, reports = setup.work / name, setup.reports if keep else setup.work / "reports"
    places = ["--results", str(results), "--reports", str(reports)]
    changes = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    said = command(setup, "run", file, "--device", setup.device, "--workers", "1", *places, *changes)
    if said.status == 2 and "unknown setting" in said.err:
        raise Skipped(f"not built: {said.err.splitlines()[0]}")
    try:
        return Ran(setup, said, ablate.load(results / Path(file).stem))
    except ResultsError:
        if said.late:
            raise Late(OUT_OF_TIME) from None
        raise Failed(f"exit status {said.status}", said.err) from None


def earlier(setup: Setup, name: str, file: str) -> Ran:
    """What an earlier stage ran."""
    try:
        return Ran(setup, Said(0, "", "", late=True), ablate.load(setup.work / name / Path(file).stem))
    except ResultsError:
        raise Skipped(f"there is no {name} to compare with") from None

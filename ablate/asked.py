"""What a command line asks for, and what that is: an experiment, checked whole, or what is stored of one."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate import document
from ablate.choice import Faults, SettingsError
from ablate.document import printable
from ablate.inside import folder_of
from ablate.mlflow_view import LOCAL_URL, comparison_links
from ablate.results import Results, Store, load
from ablate.tables import ResultsError

if TYPE_CHECKING:
    from ablate.experiment import Experiment
    from ablate.machine import Resources
    from ablate.plan import VariantPlan
    from ablate.report.judgement import Judgement

_TAKEN = re.compile(r"mlflow\.db.*|mlartifacts|.*\.(db|lock)", re.IGNORECASE)


@dataclass(frozen=True)
class Wanted:
    """What a command line asks for, with the defaults of `run`."""

    file: str
    results: Path = Path("results")
    reports: Path = Path("reports")
    sets: tuple[str, ...] = ()
    device: str = "auto"
    workers: int | None = None
    memory: int | None = None
    max_trials: int = 1000
    retry_failed: bool = False
    fail_fast: bool = False
    only: str | None = None
    check_claims: bool = False

    def command(self) -> str:
        """The command that runs this again, as one would type it."""
        here = os.path.relpath(self.file) if Path(self.file).resolve().is_relative_to(Path.cwd()) else None
        parts = ["python", "-m", "ablate", "run", here or Path(self.file).name]  # where a home is, is nobody's business
        for change in self.sets:
            parts += ["--set", change]
        return shlex.join(parts)

    def syncing(self) -> str:
        """The command that brings MLflow up to date with it."""
        return syncing(self.file, self.results, self.reports)


def syncing(target: str, results: Path, reports: Path) -> str:
    """The command that brings MLflow up to date with an experiment."""
    parts = ["python", "-m", "ablate", "sync", target]
    for option, folder in (("--results", results), ("--reports", reports)):
        parts += [option, str(folder)] if folder != Path(option.removeprefix("--")) else []
    return shlex.join(parts)


@contextmanager
def aside() -> Iterator[None]:
    """What a user's own code prints is no result: it goes to standard error."""
    with redirect_stdout(sys.stderr):
        yield


@aside()
def read(wanted: Wanted) -> Experiment:
    """The experiment, every variant checked; in a child first where code of the user's own is part of it.

    Raises `FileFaults`.
    """
    from ablate import experiment, gatekeeper, plan, registry
    from ablate.variant import of_own_code, own_code

    found = experiment.read(wanted.file, wanted.sets)
    _check_free(found, document.experiment_name(found))
    named = sorted({name for _, name in own_code(found.data)})
    for name in named:
        registry.announce(name)
    fatal = gatekeeper.rehearse(found, wanted.sets, wanted.max_trials) if named else {}
    whole = experiment.Experiment.of(found, wanted.max_trials)
    own = of_own_code(whole.variants)
    fatal_of = {variant.name: fault for kind, fault in fatal.items() for variant in own[kind]}
    return plan.checked(whole, fatal_of).with_claims()


def report(results: Results, reports: Path, *, in_haste: bool = False) -> Path:
    """Write the report from what is stored, without plots in haste. Returns the path of `report.md`."""
    from ablate.report import write_report

    mirrored = Store(results.folder).compared()
    links = comparison_links(LOCAL_URL, mirrored) if mirrored and mirrored["runs"] else {}
    folder = folder_of(reports, results.folder.resolve().name, "plots")
    return write_report(results, folder, links, in_haste=in_haste)


def judged(results: Results) -> list[Judgement]:
    """What becomes of the experiment's claims by what is stored."""
    from ablate.report.evidence import evidence_of
    from ablate.report.judgement import judgements

    return judgements(evidence_of(results)) if results.experiment.get("claims") else []


def check_claimed(claims: Sequence[Any], where: str) -> None:
    """There is something to check. Raises `FileFaults`."""
    if not claims:
        message = f"{printable(where)}: --check-claims, and there are no claims"
        raise document.FileFaults([f"{message}\n  write `claims` in the file, or leave --check-claims out"])


def other_claims(target: str, found: Results) -> str | None:
    """What to know where a file's claims are no longer those that it was run with."""
    before = (found.experiment.get("resolved") or {}).get("claims") or []
    if Path(target).is_dir() or (document.read(target).data.get("claims") or []) == before:
        return None
    message = f"{printable(target)}: its claims have changed since the last run, and are not judged here"
    return f"{message}\n  run it again: what is stored is not trained anew"


def stored(target: str, results: Path) -> Results:
    """The results of an experiment file, or of a folder of results. Raises `FileFaults`."""
    folder = Path(target) if Path(target).is_dir() else results / name_of(target)
    try:
        return load(folder)
    except ResultsError as error:
        raise document.FileFaults([f"{error}\n  {NO_RESULTS}"]) from None


NO_RESULTS = "run the experiment first, or give its folder of results"


def name_of(file: str) -> str:
    """An experiment's name, read from its file without checking the rest. Raises `FileFaults`."""
    found = document.read(file)
    name = document.experiment_name(found)
    _check_free(found, name)
    return name


def _check_free(found: document.Document, name: str) -> None:
    """Beside the experiments' folders stands what MLflow keeps, and locks."""
    if _TAKEN.fullmatch(name):
        fault = SettingsError(
            ("name",), f"'{name}' is kept for what stands beside it in results", "choose another name"
        )
        raise document.told(found, Faults([fault]))


def resources_for(wanted: Wanted, experiment: Experiment, plans: Sequence[VariantPlan]) -> Resources:
    """What of the machine the trials have, those of tuning too."""
    from ablate import machine, plan

    return machine.share(wanted.device, wanted.workers, plan.most_bytes(experiment, plans), wanted.memory)


def of_other_threads(experiment: Experiment, store: Store, resources: Resources) -> str | None:
    """What to know where nothing is stored of the trials that are asked for, but of the same with other threads: bits
    depend on their number, so that they are other trials.
    """
    from ablate.machine import available_threads

    device = resources.device
    if experiment.search or any(store.trial(each.trial_id) for each in experiment.trials(device, resources.threads)):
        return None
    for threads in range(1, available_threads() + 1):
        if stored := sum(store.trial(each.trial_id) is not None for each in experiment.trials(device, threads)):
            theirs, own = many(threads, "thread"), many(resources.threads, "thread")
            use = f"another --workers, or --set train.threads={threads}, goes on with them"
            return f"{many(stored, 'trial')} with {theirs} each stored, none with {own} as now: {use}"
    return None


def many(number: int, word: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"

"""What `run` does: everything that an experiment asks for, stored, mirrored and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ablate import document
from ablate.asked import Wanted, check_claimed, judged, many, of_other_threads, read, report, resources_for
from ablate.files import FULL, check_room
from ablate.inside import folder_of
from ablate.results import CHECKPOINTS, Store, places, told, tuning_places
from ablate.schema import SCHEMAS
from ablate.shelf import COMPACTED
from ablate.tables import ResultsError
from ablate.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console

    from ablate.experiment import Experiment
    from ablate.machine import Resources
    from ablate.mirror import Mirror
    from ablate.plan import VariantPlan
    from ablate.progress import Progress
    from ablate.report.judgement import Judgement
    from ablate.runner import Run
    from ablate.tasks import Task
    from ablate.tuning import Tuning
    from ablate.variant import Trial

_PARTS = (*SCHEMAS, "logs", CHECKPOINTS, "leases")
_REPORT_LEASE = ".report"


@dataclass(frozen=True)
class Ran:
    """How a run ended: outcomes counted, what was there before, where the report is, the exit status, what could not be
    stored, with the reasons, what became of the claims, and the outcomes of tuning.
    """

    outcomes: Counter[str]
    started: int
    skipped: int
    report: Path | None
    status: int
    lost: tuple[str, ...] = ()
    claims: tuple[Judgement, ...] = ()
    tuning: Counter[str] = field(default_factory=Counter)


def run(wanted: Wanted, console: Console) -> Ran:
    """Plan, train, profile, record, report. Raises `FileFaults` before anything runs if the input is wrong."""
    from ablate import plan
    from ablate.interruption import signals
    from ablate.mlflow_address import check_address

    check_address()
    experiment = read(wanted)
    if wanted.check_claims:
        check_claimed(experiment.claims, experiment.file)
    plans = plan.plan(experiment, timed=False)
    resources = resources_for(wanted, experiment, plans)
    plan.check_device(experiment, resources.device)
    _check_chosen(wanted, experiment, resources)
    _check_writable(wanted, experiment.name)
    with signals() as received:
        ran = _Sweep(wanted, experiment, plans, resources, received).run(console)
    return replace(ran, status=128 + received[0]) if received else ran


def _check_chosen(wanted: Wanted, experiment: Experiment, resources: Resources) -> None:
    """A profile alone is of the trials that tuning leads to."""
    from ablate.tuning import tuning

    store = Store(wanted.results / experiment.name)
    search = tuning(experiment, store, resources.device, resources.threads) if wanted.only == "profile" else None
    if search and not search.is_over:
        message = f"{wanted.file}: tuning is not over, so that it is not known which trials are to be profiled"
        raise document.FileFaults([f"{message}\n  run it with --only train first, or without --only"])


class _Sweep:
    """One run of an experiment, from what is stored of it to the report."""

    def __init__(
        self,
        wanted: Wanted,
        experiment: Experiment,
        plans: list[VariantPlan],
        resources: Resources,
        received: list[int],
    ) -> None:
        from ablate.lease import Leases
        from ablate.runner import Seen

        self.wanted, self.experiment, self.plans, self.resources = wanted, experiment, plans, resources
        self.written, self.received, self.is_stopped = experiment, received, False
        self.store = Store(wanted.results / experiment.name, create=True)
        self.trials = experiment.trials(resources.device, resources.threads)
        self.leases = Leases(self.store.folder / "leases")
        self.mirror: Mirror | None = None
        self.claims: tuple[Judgement, ...] = ()
        self.lost: list[str] = []
        self.seen = Seen()
        self.names = _names_of_trials(self.store)

    def run(self, console: Console) -> Ran:
        from ablate.runner import present

        with ExitStack() as held:
            search = self._tune(console, held)
            if search and search.is_over:
                self._take(search)
            if self.is_stopped or (search and not search.is_over):
                with present(self.leases, self.received):
                    self._note()
                started, is_complete = 0, False
            else:
                started, is_complete = self._try(console, held, search)
            written, fault = self._report()
        return self._ran(search, started, is_complete, written, (*self.lost, *fault))

    def _ran(
        self, search: Tuning | None, started: int, is_complete: bool, written: Path | None, lost: tuple[str, ...]
    ) -> Ran:
        from ablate.tuning import FINE

        total, tried = self.experiment.counts["trials"], search.told() if search else Counter[str]()
        is_known = search is None or search.is_over
        outcomes = _outcomes(_statuses(self.store, self.trials) if is_known else Counter(), total)
        failed = set(outcomes) - {"ok"} or set(tried) - set(FINE) or self.experiment.invalid or lost or not is_complete
        if self.wanted.check_claims:
            failed = failed or any(each.verdict != "supported" for each in self.claims)
        return Ran(outcomes, started, total - started, written, 1 if failed else 0, lost, self.claims, tried)

    def _tune(self, console: Console, held: ExitStack) -> Tuning | None:
        """Search settings for each variant, as far as that goes; None where the file asks for none.

        What was tried says what is to be tried next, until nothing is, or something keeps that from being done.
        """
        again = self.wanted.retry_failed
        while (search := self._search()) is not None:
            if self.wanted.only == "profile":
                return search
            queue = search.left(retry_failed=again)
            if not queue and search.is_over:
                return search
            if not queue:
                continue  # what was left when the search was looked at, another run has done meanwhile
            failed = self._search_on(search, queue, again, console, held)
            again = False
            self.is_stopped = failed and self.wanted.fail_fast
            if self.received or self.is_stopped or _were_in_vain(queue, search.left(retry_failed=False)):
                return self._search()
        return None

    def _search(self) -> Tuning | None:
        from ablate.tuning import tuning

        return tuning(self.written, self.store, self.resources.device, self.resources.threads)

    def _search_on(self, search: Tuning, queue: list[Task], again: bool, console: Console, held: ExitStack) -> bool:
        """Try what is next. Returns whether something failed; that a training diverged is no failure of a search."""
        from ablate import plan
        from ablate.progress import Progress
        from ablate.tuning import FINE

        self._make_ready(search.trials, queue)
        tried, progress = search.tried(), Progress(console, len(queue))
        running = self._begin(
            progress, tried, plan.plan(tried, timed=False), retry_failed=again, only="train", fine=FINE
        )
        self._say(console, [search.opening(len(queue)), *_done_again(self.store, search.trials)])
        self._open_mirror(held, new=True)
        with progress:
            running.carry_out(queue, self.received)
        self.lost += running.keeper.lost()
        return running.failed

    def _take(self, search: Tuning) -> None:
        """Go on with what was chosen."""
        from ablate import plan

        self.experiment = search.tuned()
        self.plans = plan.plan(self.experiment, timed=False)
        self.trials = self.experiment.trials(self.resources.device, self.resources.threads)

    def _try(self, console: Console, held: ExitStack, search: Tuning | None) -> tuple[int, bool]:
        """Run the trials themselves. Returns how many were to be run, and whether nothing of the rounds failed."""
        from ablate.progress import Progress
        from ablate.tasks import tasks

        again, only = self.wanted.retry_failed, self.wanted.only
        queue = tasks(self.trials, self.store, retry_failed=again, only=only)
        self._make_ready(self.trials, queue)
        progress = Progress(console, len(queue))
        running = self._begin(progress, self.experiment, self.plans, retry_failed=again, only=only)
        rounds_left = len(running.rounds_left())
        outcomes = _statuses(self.store, self.trials)
        opening = _opening(self.experiment, len(queue), outcomes, rounds_left, only=only if again else None)
        said = search.choices() if search else []
        others = of_other_threads(self.experiment, self.store, self.resources)
        self._say(console, [*said, opening, *([others] if others else []), *_done_again(self.store, self.trials)])
        self._mirror_chosen(queue)
        self._open_mirror(held, new=bool(queue or rounds_left))
        with progress:
            running.carry_out(queue, self.received)
        self.lost += running.keeper.lost()
        return len(queue), not running.failed_rounds()

    def _say(self, console: Console, lines: Sequence[str]) -> None:
        for line in lines:
            console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    def _open_mirror(self, held: ExitStack, *, new: bool) -> None:
        if self.mirror is None:
            behind = _names_of_trials(self.store) != self.names
            self.mirror = _mirror(self.wanted, self.store, lambda: bool(self.received), new=new, behind=behind)
            held.enter_context(self.mirror or nullcontext())

    def _mirror_chosen(self, queue: list[Task]) -> None:
        """A mirror that was opened while settings were tuned took what is stored of the trials that this led to for
        no part of the experiment.
        """
        if self.mirror:
            to_run = {task.trial.trial_id for task in queue}
            for trial_id in [each.trial_id for each in self.trials if each.trial_id not in to_run]:
                self.mirror.mirror(trial_id)

    def _make_ready(self, trials: list[Trial], queue: list[Task]) -> None:
        """Tidy up what older runs left. Raises `FileFaults` where what is to be done could not be stored."""
        from ablate.tasks import tidy

        tidy(trials, self.store)
        _check_places(self.store, [task.trial for task in queue])
        self.store.remove_leftovers()
        self.leases.tidy()

    def _begin(
        self,
        progress: Progress,
        experiment: Experiment,
        plans: list[VariantPlan],
        *,
        retry_failed: bool,
        only: str | None,
        fine: Sequence[str] = ("ok",),
    ) -> Run:
        """Store what the experiment is now, and get ready to carry out trials of `experiment`, which may be those of
        its search.
        """
        from ablate.runner import Run, present

        with present(self.leases, self.received):
            self._note()
            return Run(
                experiment,
                plans,
                self.store,
                self.resources,
                progress,
                lambda trial_id: self.mirror.mirror(trial_id) if self.mirror else None,
                fail_fast=self.wanted.fail_fast,
                retry_failed=retry_failed,
                repeated=only != "train",
                only=only,
                fine=fine,
                seen=self.seen,
            )

    def _note(self) -> None:
        """Store what the experiment is now, by what is stored at this moment: another run may have ended its search."""
        from ablate import machine, plan, rounds

        search, experiment, plans = self._search(), self.experiment, self.plans
        if search and search.is_over:
            experiment = search.tuned()
            plans = plan.plan(experiment, timed=False)
        document = plan.document(experiment, plans, machine.facts(self.resources), self.wanted.command())
        if timed := rounds.of_experiment(experiment, self.store, self.resources):
            document["timing"] = timed.document()
        self.store.write_experiment(search.added_to(document) if search else document)

    def _report(self) -> tuple[Path | None, list[str]]:
        """Judge the claims, and write the report while no other run does. Returns where it is, and why it is not."""
        from ablate.lease import Leases

        if self.mirror and self.received:
            self.mirror.hurry()
        folder = self.wanted.reports / self.experiment.name
        try:
            with Leases(folder).wait(_REPORT_LEASE, stopped=lambda: bool(self.received)) or nullcontext():
                results = self.store.load()
                self.claims = tuple(judged(results))
                written = report(results, folder.parent, in_haste=bool(self.received))
            if self.mirror:
                self.mirror.attach(folder)
        except OSError as error:
            return None, [f"the report: {error.strerror or error}"]
        return written, []


def _check_writable(wanted: Wanted, name: str) -> None:
    """What cannot be written must not be noticed after hours of training."""
    folder_of(wanted.results, name, *_PARTS)
    folder_of(wanted.reports, name, "plots")
    store, report = Store(wanted.results / name), wanted.reports / name
    for folder in (*store.folders(), wanted.results):
        _check_room(folder, 0, "--results")
    for folder in (report, report / "plots"):
        _check_room(folder, _REPORT_BYTES, "--reports")


_REPORT_BYTES, _TRIAL_BYTES = 2**18, 2**16
"""What a report with its plots takes at least, and a trial's three files with its run in MLflow's database."""


def _check_room(folder: Path, size: int, option: str) -> None:
    try:
        check_room(folder, size)
    except OSError as error:
        reason = error.strerror or str(error)
        cure = f"free some space, or give another {option}" if error.errno in FULL else f"give another {option}"
        raise document.FileFaults([f"{folder}: no folder that can be written: {reason}\n  {cure}"]) from None


def _check_places(store: Store, trials: Sequence[Trial]) -> None:
    """There is room for what will be stored, and nothing stands there that a file cannot replace."""
    _check_room(store.folder, _TRIAL_BYTES * len(trials), "--results")
    paths = [shelf.path(trial.trial_id) for shelf in store.shelves.values() for trial in trials]
    for path in [*paths, *(store.log_path(trial.trial_id) for trial in trials), store.folder / "experiment.json"]:
        if path.is_dir() and not path.is_symlink():
            raise document.FileFaults([f"{path}: a folder where a file will be written\n  move it away"])


def _done_again(store: Store, trials: Sequence[Trial]) -> list[str]:
    """Which files cannot be read, so that what they held is done again."""
    ids, lines = {trial.trial_id for trial in trials}, []
    for kind in SCHEMAS:
        for name, fault in store.look(kind).faults.items():
            if kind == "repeats" or Path(name).stem in ids or name in ("", COMPACTED):
                lines.append(f"{told(kind, name, fault)}; what it held is done again where it is missing")
    return lines


def _were_in_vain(queue: Sequence[Task], left: Sequence[Task]) -> bool:
    """Whether something is left that was just to be done. What is left beside it another run has begun anew, and given
    up, while this one was at work.
    """
    return not {task.trial.trial_id for task in queue}.isdisjoint(task.trial.trial_id for task in left)


def _statuses(store: Store, trials: Sequence[Trial]) -> Counter[str]:
    return Counter(row["status"] for trial in trials if (row := store.trial(trial.trial_id)))


def _names_of_trials(store: Store) -> dict[str, str]:
    """What each trial id is called now; those of tuning have their names for good."""
    try:
        experiment = store.experiment()
    except ResultsError:
        return {}
    named = {trial_id: variant["name"] for trial_id, (_, _, variant) in places(experiment).items()}
    return {**dict.fromkeys(tuning_places(experiment), ""), **named}


def _mirror(wanted: Wanted, store: Store, stopped: Callable[[], bool], *, new: bool, behind: bool) -> Mirror | None:
    """The mirror, brought up to date where an earlier run left it behind; None where it has nothing to learn."""
    from ablate.mirror import Mirror

    mirrored = (store.mlflow() or {}).get("attempts", {})
    rows = ((trial_id, store.trial(trial_id)) for trial_id in _names_of_trials(store))
    behind = behind or any(row and mirrored.get(trial_id) != row["attempts"] for trial_id, row in rows)
    if not new and not behind:
        return None
    return Mirror(wanted.results, store, wanted.syncing(), behind=behind, stopped=stopped)


def _opening(
    experiment: Experiment, to_run: int, statuses: Counter[str], rounds_left: int, only: str | None = None
) -> str:
    planned, seeds, total = experiment.counts["planned"], len(experiment.seeds), experiment.counts["trials"]
    size = " ".join([many(planned, "variant"), "x", many(seeds, "seed"), "=", many(total, "trial")])
    failed = {status: number for status, number in sorted(statuses.items()) if status != "ok"}
    rounds = (experiment.baseline.settings.profile.repeats if to_run else rounds_left) or 0
    then = f", and {many(rounds, 'round')} of timing to run" if rounds else ""
    if to_run == 0:
        said = ", ".join(f"{number} {status}" for status, number in failed.items())
        them = "it" if sum(failed.values()) == 1 else "them"
        how = f"the rest than --only {only} is left of {them}" if only else f"--retry-failed runs {them} again"
        again = f" ({said}; {how})" if failed else ""
        return f"{experiment.name}: {size}, all of them stored: nothing to train{again}{then}"
    stored = f", {total - to_run} of them stored" if to_run < total else ""
    return f"{experiment.name}: {size}{stored}, {to_run} to run{then.removesuffix(' to run')}"


def _outcomes(outcomes: Counter[str], planned: int) -> Counter[str]:
    if missing := planned - outcomes.total():
        outcomes["not run"] = missing
    return outcomes

"""THE FLOW: trials -> gates -> isolated processes -> rows. What is stored is skipped, what ends is stored at once."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol

import psutil

from ablate import calibration, capacity, child, gatekeeper, rounds
from ablate.capacity import Capacity
from ablate.child import Child
from ablate.experiment import Experiment
from ablate.gatekeeper import Checked
from ablate.job import Job, Peaks
from ablate.machine import Resources
from ablate.plan import VariantPlan
from ablate.results import Store
from ablate.rounds import Contrast
from ablate.rows import Rows
from ablate.tables import Columns
from ablate.tasks import Task, is_final
from ablate.variant import Trial

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
GRACE_SECONDS = 4.0
"""For trainings to be kept where they are, when the run is to end; all of that has to be over in 10 s."""

_GRACE_POLL_SECONDS = 0.1
_CAN_STOP = ("train", "evaluate")
_RUNNING = "running.json"
_CAPACITY = "capacity.json"


class Watcher(rounds.Watcher, Protocol):
    """Who is told what happens (see `ablate.progress`)."""

    def check(self, done: int, total: int) -> None: ...  # noqa: D102
    def aside(self, what: str) -> None: ...  # noqa: D102
    def start(self, trial_id: str, label: str, steps: int) -> None: ...  # noqa: D102
    def phase(self, trial_id: str, phase: str) -> None: ...  # noqa: D102
    def learn(self, trial_id: str, curve: Any) -> None: ...  # noqa: D102
    def finish(self, trial_id: str, status: str, note: str) -> None: ...  # noqa: D102


class Run:
    """Carries out tasks, a few at a time, and stores each as it ends."""

    def __init__(
        self,
        experiment: Experiment,
        plans: list[VariantPlan],
        store: Store,
        resources: Resources,
        watcher: Watcher,
        stored: Callable[[str], None],
        *,
        fail_fast: bool = False,
        retry_failed: bool = False,
        repeated: bool = True,
    ) -> None:
        self.experiment, self.store, self.resources, self.watcher = experiment, store, resources, watcher
        self.fail_fast, self.retry_failed, self.failed = fail_fast, retry_failed, False
        self.repeated = repeated
        self.plans = {plan.variant.name: plan for plan in plans}
        self.rows = Rows(experiment, self.plans, store, resources)
        self.stored = stored
        self.peaks: dict[int, Peaks] = {}
        self.aa: dict[int, dict[str, float]] = {}
        self.capacities: dict[str, Capacity] = {}
        self.running: dict[str, tuple[Task, Child, datetime]] = {}
        self.company: dict[str, float] = {}
        self.changed = time.monotonic()

    def carry_out(self, queue: list[Task], received: list[int]) -> None:
        """Run all tasks, then the rounds that are left of the repeats.

        When a signal is `received`, all that runs is stopped and stored.
        """
        if queue or self.rounds_left():
            with child.environment(self.resources.threads):
                child.warm_up(child.context(self.resources.device))
        with self._announced():
            waiting = list(reversed(self._through_gates(queue, received)))
            self._calibrate(waiting, received)
            self._seek_capacities(waiting, received)
            while (waiting or self.running) and not received:
                while waiting and len(self.running) < self.resources.workers:
                    self._begin(waiting.pop())
                if self._wait(received) and self.fail_fast:
                    waiting.clear()
            if not (received or (self.failed and self.fail_fast)):
                self._repeat(received)
            if received:
                self._interrupt(received[0])

    def _through_gates(self, queue: list[Task], received: list[int]) -> list[Task]:
        """The tasks that may run. Those whose variant is not what it says are rows after this.

        All gates come before the first trial: no trial shares the machine with one while it is measured.
        """
        new: dict[str, list[Task]] = defaultdict(list)
        for task in queue:
            if task.is_new:
                new[task.trial.variant.name].append(task)
        logs = {name: self.store.log_path(tasks[0].trial.trial_id) for name, tasks in new.items()}
        variants = [tasks[0].trial.variant for tasks in new.values()]
        refused: set[str] = set()

        def stopped() -> bool:
            return bool(received or (refused and self.fail_fast))

        self.watcher.check(0, len(variants))
        found = gatekeeper.check(logs, variants, self.resources.workers, stopped)
        for done, checked in enumerate(found, 1):
            self.watcher.check(done, len(variants))
            if received:
                break  # what failed may have been ended by the same signal
            if fault := checked.fault:
                refused.add(checked.variant.name)
                for task in new[checked.variant.name]:
                    self._refuse(task, checked, fault)
        if refused and self.fail_fast:
            return []
        return [task for task in queue if not (task.is_new and task.trial.variant.name in refused)]

    def _calibrate(self, queue: list[Task], received: list[int]) -> None:
        """Learn what the device can do with each number of threads, while no trial disturbs it. Without, it is null."""
        lacking: dict[str, str] = {}
        for threads in sorted({self.rows.threads(task) for task in queue}):
            if received:
                return
            known, why = calibration.calibrate(self.resources.device, threads, stopped=lambda: bool(received))
            self.peaks[threads] = calibration.peaks_of(known)
            # It was alone on the machine, and says nothing of trials that share it.
            self.aa[threads] = calibration.aa_columns(known) if self.resources.workers == 1 else {}
            lacking |= calibration.lacking(known) if why is None else dict.fromkeys(calibration.HELD_AGAINST, why)
        if queue and self.resources.workers > 1:
            lacking["energy_joules_per_token"] = "trials that run at once share it: --workers 1"
        if lacking:
            told = "; ".join(f"{column} ({why})" for column, why in sorted(lacking.items()))
            _log.warning("not measured here: %s", told)

    def _seek_capacities(self, queue: list[Task], received: list[int]) -> None:
        """Learn the largest steps that fit, of each variant once, while nothing else takes memory."""
        first: dict[str, Task] = {}
        for task in reversed(queue):
            if "profile" in task.phases and task.trial.variant.settings.profile.max_batch:
                first.setdefault(task.trial.variant.name, task)
        if not first:
            return
        notes = capacity.Notes(
            self.store.folder / _CAPACITY,
            self.resources.device,
            self.rows.software["torch"],
            capacity.available(self.resources.device),
        )
        for name, task in first.items():
            if received:
                break
            log, threads = str(self.store.log_path(task.trial.trial_id)), self.rows.threads(task)
            found = capacity.measure(
                self.plans[name],
                self.resources.device,
                threads,
                notes,
                log,
                lambda: bool(received),
                partial(self._try, name),
            )
            self.capacities[name] = found
            for column, why in found.lacking.items():
                _log.warning("not measured of %s: %s (%s)", name, column, why)
        self.watcher.aside("")

    def _try(self, name: str, size: str) -> None:
        self.watcher.aside(f"does a step fit: {name}, {size}")

    def _known(self, task: Task, started: datetime) -> dict[str, Any]:
        return self.rows.known(task, started, self.aa.get(self.rows.threads(task), {}))

    def rounds_left(self) -> list[int]:
        """The rounds that are left of the repeats, as far as trials have ended well by now."""
        return self._left(self._contrast(), retry_failed=self.retry_failed)

    def _contrast(self) -> Contrast | None:
        found = rounds.of_experiment(self.experiment, self.store, self.resources)
        self.store.note_timing(found.document() if found else None)
        return found

    def _left(self, found: Contrast | None, *, retry_failed: bool) -> list[int]:
        repeats = self.experiment.baseline.settings.profile.repeats
        if found is None or repeats is None or not self.repeated:
            return []
        return rounds.left(found, self.store, repeats, retry_failed=retry_failed)

    def _repeat(self, received: list[int]) -> None:
        """Time the variants again, round after round, one at a time, now that nothing else runs.

        The second time is for older rounds, which turn out then not to be of this device or torch.
        """
        found = self._contrast()
        if found is None:
            return
        log = self.store.log_path(found.timing_id)
        for retry_failed in (self.retry_failed, False):
            left = self._left(found, retry_failed=retry_failed)
            for number, rows in rounds.carry_out(found, left, log, lambda: bool(received), self):
                self.store.write_round(found.timing_id, number, rounds.columns(rows))
                if self.fail_fast and any(row["status"] != "ok" for row in rows):
                    return

    def time(self, number: int, total: int, label: str) -> None:
        """A variant is timed now, in one of the rounds: told to the watcher, and to `status`."""
        self.watcher.time(number, total, label)
        self._announce(f"{label}, timed in round {number} of {total}")

    def timed(self, number: int, total: int, note: str) -> None:
        """A round ended."""
        self.watcher.timed(number, total, note)

    def _refuse(self, task: Task, checked: Checked, fault: str) -> None:
        """Store a trial that does not run."""
        self.failed = True
        trial_id = task.trial.trial_id
        self.watcher.start(trial_id, _label(task.trial), task.trial.variant.settings.train.n_steps)
        log = checked.log.relative_to(self.store.folder).as_posix()
        ended = {"status": "gate_failed", "phase": "gates", "reason": fault, "log": log}
        self._store(self._known(task, checked.began) | ended, {}, {})

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """What runs stands in a file for `status` to read, as long as something runs."""
        try:
            yield
        finally:
            for _, running, _ in self.running.values():  # there are some where a second signal came
                running.kill()
            (self.store.folder / _RUNNING).unlink(missing_ok=True)

    def _announce(self, *more: str) -> None:
        labels = [*(_label(task.trial) for task, _, _ in self.running.values()), *more]
        text = json.dumps({"pid": os.getpid(), "trials": labels})
        (self.store.folder / _RUNNING).write_text(text, encoding="utf-8")

    def _begin(self, task: Task) -> None:
        trial = task.trial
        settings = trial.variant.settings
        job = Job(
            settings=settings.model_dump(mode="json"),
            seed=trial.seed,
            device=self.resources.device,
            threads=self.rows.threads(task),
            phases=task.phases,
            log=str(self.store.log_path(trial.trial_id)),
            peaks=self.peaks.get(self.rows.threads(task), Peaks()),
            alone=self.resources.workers == 1,
            checkpoints=str(self.store.checkpoints_path(trial.trial_id)) if "train" in task.phases else "",
            attempt=task.attempt,
            first_attempt=task.first_attempt,
        )
        self.watcher.start(trial.trial_id, _label(trial), settings.train.n_steps)
        with child.environment(job.threads):
            started = Child(child.context(self.resources.device), job)
        self._count_company()
        self.running[trial.trial_id] = (task, started, datetime.now(UTC))
        self._announce()

    def _count_company(self) -> None:
        """Charge each running trial with the number that ran since the last change: its speed depends on it."""
        now = time.monotonic()
        for trial_id in self.running:
            self.company[trial_id] = self.company.get(trial_id, 0.0) + (now - self.changed) * len(self.running)
        self.changed = now

    def _wait(self, received: list[int]) -> bool:
        """Listen until something ends or a moment has passed. Returns whether a trial ended that is not `ok`."""
        wait([each for _, running, _ in self.running.values() for each in running.waitables()], _POLL_SECONDS)
        failed = False
        if received:
            return failed  # what has ended may have ended by the same signal
        for trial_id, (_, running, _) in list(self.running.items()):
            ended = not running.process.is_alive()
            self._pass_on(trial_id, running)
            if ended or running.overdue():
                if not ended:
                    running.stop(("timeout", running.phase, f"still running after {running.limit:g} s"))
                failed |= self._finish(trial_id) != "ok"
        return failed

    def _pass_on(self, trial_id: str, running: Child) -> None:
        for kind, content in running.listen():
            if kind == "phase":
                self.watcher.phase(trial_id, content)
            else:
                self.watcher.learn(trial_id, content)

    def _finish(self, trial_id: str) -> str:
        self._count_company()
        task, running, started = self.running.pop(trial_id)
        status, phase, reason = running.end()
        wall, company = time.monotonic() - running.began, self.company.pop(trial_id, 0.0)
        before = task.before.get("wall_seconds") or 0.0
        before = max(before, running.past.seconds) if running.past else before
        times = {"wall_seconds": before + wall, "trials_at_once": max(1.0, company / wall) if wall else 1.0}
        found = self.capacities.get(task.trial.variant.name, Capacity()) if "profile" in task.phases else Capacity()
        row = self.rows.ended(task, self._known(task, started) | times, running, found)
        row |= {"status": status, "phase": phase, "reason": reason}
        self._store(row, self.rows.curves(task, running), self.rows.profiles(task, running, found))
        if is_final(row) and not task.trial.variant.settings.train.keep_checkpoints:
            self.store.drop_checkpoints(trial_id)
        self.failed |= status != "ok"
        return status

    def _store(self, row: dict[str, Any], curves: Columns, profiles: Columns) -> None:
        self.store.write_trial(row, curves, profiles)
        self._announce()
        self.stored(row["trial_id"])
        self.watcher.finish(row["trial_id"], row["status"], _note(row))

    def _interrupt(self, number: int) -> None:
        """End all that runs, trainings where they can be gone on with."""
        reason = f"the run got {signal.Signals(number).name}"
        deadline = time.monotonic() + GRACE_SECONDS
        for _, running, _ in self.running.values():
            running.ask_to_stop()
        while self.running:
            wait([each for _, running, _ in self.running.values() for each in running.waitables()], _GRACE_POLL_SECONDS)
            for trial_id, (_, running, _) in list(self.running.items()):
                ended = not running.process.is_alive()
                self._pass_on(trial_id, running)
                if ended or running.phase not in _CAN_STOP or time.monotonic() > deadline:
                    running.interrupt(reason)
                    self._finish(trial_id)


def running_now(store: Store) -> list[str]:
    """The trials that a living run works on."""
    try:
        said = json.loads((store.folder / _RUNNING).read_text(encoding="utf-8"))
        return list(said["trials"]) if psutil.pid_exists(said["pid"]) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _label(trial: Trial) -> str:
    return f"{trial.variant.name} seed {trial.seed}"


def _note(row: dict[str, Any]) -> str:
    """What a person wants to know of a trial that has just ended."""
    if row["status"] != "ok":
        return f"{row['reason'] or ''} (log: {row['log']})"
    parts = []
    if (loss := row.get("val_loss")) is not None:
        parts.append(f"val_loss {loss:.4f}")
    if (speed := row.get("train_tokens_per_second")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    return "  ".join([*parts, f"{row['wall_seconds']:.0f} s"])

"""THE FLOW: trials -> gates -> isolated processes -> rows. What is stored is skipped, what ends is stored at once."""

from __future__ import annotations

import logging
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol

from ablate import calibration, capacity, child, gatekeeper, lease, rounds
from ablate.capacity import Capacity
from ablate.child import Child
from ablate.experiment import Experiment
from ablate.gatekeeper import Checked
from ablate.job import Job, Peaks
from ablate.keeping import Keeper
from ablate.lease import Lease, Leases
from ablate.machine import Resources
from ablate.plan import VariantPlan
from ablate.results import Store, places
from ablate.rounds import Contrast
from ablate.rows import Rows
from ablate.tables import Columns, ResultsError
from ablate.tasks import Task, is_final, tasks
from ablate.variant import Trial, Variant, canonical_json

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LOOK_SECONDS = 5.0
GRACE_SECONDS = 4.0
"""For trainings to be kept where they are, when the run is to end; all of that has to be over in 10 s."""

_GRACE_POLL_SECONDS = 0.1
_CAN_STOP = ("train", "evaluate")
_CAPACITY = "capacity.json"
_CAPACITY_LEASE, _ROUNDS_LEASE = "capacity", "rounds"
_LOST = "lost"


class Watcher(rounds.Watcher, Protocol):
    """Who is told what happens (see `ablate.progress`)."""

    def check(self, done: int, total: int) -> None: ...  # noqa: D102
    def aside(self, what: str) -> None: ...  # noqa: D102
    def start(self, trial_id: str, label: str, steps: int | None) -> None: ...  # noqa: D102
    def phase(self, trial_id: str, phase: str) -> None: ...  # noqa: D102
    def learn(self, trial_id: str, curve: Any) -> None: ...  # noqa: D102
    def finish(self, trial_id: str, status: str, note: str) -> None: ...  # noqa: D102
    def leave(self, trial_id: str, note: str) -> None: ...  # noqa: D102
    def elsewhere(self, label: str, status: str, note: str) -> None: ...  # noqa: D102


@dataclass
class Seen:
    """What one command does, or says, once, however many runs it is made of: models that `passed` their gates, and
    whether it is told what cannot be measured here.
    """

    passed: set[str] = field(default_factory=set)
    is_told: bool = False


class Run:
    """Carries out tasks, a few at a time, and stores each as it ends. Other runs may do the same in the same folder:
    each does and stores only what it holds the lease on. Outcomes that are `fine` are no failures.
    """

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
        only: str | None = None,
        fine: Sequence[str] = ("ok",),
        seen: Seen | None = None,
    ) -> None:
        self.experiment, self.store, self.resources, self.watcher = experiment, store, resources, watcher
        self.fail_fast, self.retry_failed, self.failed = fail_fast, retry_failed, False
        self.repeated, self.only, self.fine = repeated, only, fine
        self.seen = seen or Seen()
        self.plans = {plan.variant.name: plan for plan in plans}
        self.rows = Rows(experiment, self.plans, store, resources)
        self.keeper = Keeper(store.folder)
        self.stored = stored
        self.peaks: dict[int, Peaks] = {}
        self.aa: dict[int, dict[str, float]] = {}
        self.capacities: dict[str, Capacity] = {}
        self.running: dict[str, tuple[Task, Child, datetime]] = {}
        self.leases = Leases(store.folder / "leases")
        self.held: dict[str, Lease] = {}
        self.refused: dict[str, tuple[Checked, str]] = {}
        self.put_off: list[Task] = []
        self.others, self.looked, self.waits_for = 0, -_LOOK_SECONDS, ""
        self.meant = _meaning(store)
        self.company: dict[str, float] = {}
        self.changed = time.monotonic()

    def carry_out(self, queue: list[Task], received: list[int]) -> None:
        """Run all tasks, then the rounds that are left of the repeats.

        When a signal is `received`, all that runs is stopped and stored.
        """
        if queue or self.rounds_left():
            with child.environment(self.resources.threads):
                child.warm_up(child.context(self.resources.device), lambda: bool(received))
        waiting = list(reversed(self._through_gates(queue, received)))
        self._calibrate(waiting, received)
        self._seek_capacities(waiting, received)
        try:
            self._run(waiting, received)
            if not (received or (self.failed and self.fail_fast)) and self.keeper.settle(lambda: bool(received)):
                self._repeat(received)
            if received:
                self._interrupt(received[0])
        except BaseException:  # a second signal among them, which ends all at once
            for _, running, _ in self.running.values():
                running.kill()
            raise
        self.keeper.last_try()

    def _run(self, waiting: list[Task], received: list[int]) -> None:
        """Run them, a few at a time, until a signal is received; what runs then goes on to run."""
        while (waiting or self.running or self.put_off) and not received:
            if self.keeper.goes_on:
                self._begin_some(waiting)
            ended_badly = self._wait(received) or self.failed
            self.keeper.again()
            if (ended_badly and self.fail_fast) or self.keeper.gave_up:
                waiting.clear()
                self.put_off.clear()
        self._tell_of_others("")

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
        variants = [variant for variant in variants if _model(variant) not in self.seen.passed]
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
                self.failed = True
                for task in new[checked.variant.name]:
                    self.refused[task.trial.trial_id] = (checked, fault)
                    self._begin(task)
            else:
                self.seen.passed.add(_model(checked.variant))
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
        if lacking and not self.seen.is_told:
            self.seen.is_told = True
            told = "; ".join(f"{column} ({why})" for column, why in sorted(lacking.items()))
            _log.warning("not measured here: %s", told)

    def _seek_capacities(self, queue: list[Task], received: list[int]) -> None:
        """Learn the largest steps that fit, of each variant once, while nothing else takes memory."""
        first: dict[str, Task] = {}
        for task in reversed(queue):
            if "profile" in task.phases and task.trial.variant.settings.profile.max_batch:
                first.setdefault(task.trial.variant.name, task)
        held = self._await(_CAPACITY_LEASE, "the largest step that fits", received) if first else None
        if held is None:
            return
        with held:
            self._seek(first, held, received)
        self.watcher.aside("")

    def _seek(self, first: Mapping[str, Task], held: Lease, received: list[int]) -> None:
        notes = capacity.Notes(
            self.store.folder / _CAPACITY,
            self.resources.device,
            self.rows.software["torch"],
            capacity.available(
                self.resources.device, self.resources.memory_bytes if self.resources.is_memory_given else None
            ),
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
                lambda: bool(received) or held.lost,
                partial(self._try, name),
            )
            self.capacities[name] = found
            for column, why in found.lacking.items():
                _log.warning("not measured of %s: %s (%s)", name, column, why)

    def _try(self, name: str, size: str) -> None:
        self.watcher.aside(f"does a step fit: {name}, {size}")

    def _known(self, task: Task, started: datetime) -> dict[str, Any]:
        return self.rows.known(task, started, self.aa.get(self.rows.threads(task), {}))

    def rounds_left(self) -> list[int]:
        """The rounds that are left of the repeats, as far as trials have ended well by now."""
        return self._left(self._contrast(), retry_failed=self.retry_failed)

    def failed_rounds(self) -> bool:
        """Whether a round did not end well of those that this run's variants are compared by."""
        found = rounds.of_experiment(self.experiment, self.store, self.resources)
        stored = self.store.rounds(found.timing_id) if found else []
        return any(row["status"] != "ok" for row in stored)

    def _contrast(self, received: Sequence[int] = ()) -> Contrast | None:
        if self.experiment.baseline.is_for_tuning:
            return None  # which variants are timed is not for their search to say
        found = rounds.of_experiment(self.experiment, self.store, self.resources)
        noted = found.document() if found else None
        with present(self.leases, received):
            # Another run's file may have other variants by now; which rounds those are compared by is for it to say.
            if self.meant is not None and _meaning(self.store) == self.meant:
                self.keeper.put("which variants are timed", lambda: self.store.note_timing(noted))
        return found

    def _left(self, found: Contrast | None, *, retry_failed: bool) -> list[int]:
        repeats = self.experiment.baseline.settings.profile.repeats
        if found is None or repeats is None or not self.repeated:
            return []
        return rounds.left(found, self.store, repeats, retry_failed=retry_failed)

    def _repeat(self, received: list[int]) -> None:
        """Time the variants again, round after round, one at a time, now that nothing else of this run runs."""
        found = self._contrast(received)
        if found is None or not self._left(found, retry_failed=self.retry_failed):
            return
        before = self.store.rounds(found.timing_id)
        while held := self._await(_ROUNDS_LEASE, "rounds of timing", received):
            with held:
                # What failed meanwhile, in another run, is not what was asked to be done again.
                again = self.retry_failed and self.store.rounds(found.timing_id) == before
                self._do_rounds(found, held, again, received)
            if not held.lost:
                return

    def _do_rounds(self, found: Contrast, held: Lease, again: bool, received: list[int]) -> None:
        """The second time is for older rounds, which turn out then not to be of this device or torch."""
        log = self.store.log_path(found.timing_id)
        for retry_failed in (again, False):
            left = self._left(found, retry_failed=retry_failed)
            stopped = partial(_is_over, received, held)
            for number, rows in rounds.carry_out(found, left, log, stopped, self.watcher):
                if not held.renew():
                    return
                write = partial(self.store.write_round, found.timing_id, number, rounds.columns(rows))
                if not self.keeper.put(f"round {number + 1} of timing", write):
                    self.keeper.settle(lambda: bool(received))
                if not self.keeper.goes_on:
                    return
                if self.fail_fast and any(row["status"] != "ok" for row in rows):
                    return

    def _await(self, name: str, what: str, received: list[int]) -> Lease | None:
        """The lease on something that only one run does at a time; None where a signal came before."""

        held = (
            None
            if received
            else self.leases.wait(
                name, what, lambda: bool(received), lambda holder: self._tell_of_others(f"{what} ({holder})")
            )
        )
        self._tell_of_others("")
        return held

    def _refuse(self, task: Task, checked: Checked, fault: str) -> None:
        """Store a trial that does not run."""
        trial_id = task.trial.trial_id
        self.watcher.start(trial_id, _label(task.trial), task.trial.variant.settings.train.planned_steps)
        log = checked.log.relative_to(self.store.folder).as_posix()
        ended = {"status": "gate_failed", "phase": "gates", "reason": fault, "log": log}
        self._store(self._known(task, checked.began) | ended, {}, {})

    def _begin_some(self, waiting: list[Task]) -> None:
        """Begin as many as there are workers for; those that others held before once nothing else is left."""
        while waiting and len(self.running) < self.resources.workers:
            self._begin(waiting.pop())
        if not waiting:
            put_off, self.put_off = self.put_off, []
            for task in put_off:
                if len(self.running) < self.resources.workers:
                    self._begin(task)
                else:
                    self.put_off.append(task)
        self._tell_of_others("; ".join(map(self._held_by, self.put_off)) if not self.running else "")

    def _held_by(self, task: Task) -> str:
        return f"{_label(task.trial)} ({self.leases.holder(task.trial.trial_id)})"

    def _tell_of_others(self, what: str) -> None:
        if what != self.waits_for:
            self.waits_for = what
            self.watcher.aside(f"waiting for another run: {what}" if what else "")

    def _begin(self, task: Task) -> None:
        """Begin a trial, or put it off where another run has it, or take note of what another has stored of it."""
        held = self.leases.take(task.trial.trial_id, _label(task.trial))
        if held is None:
            self.put_off.append(task)
        elif (left := self._left_of(task)) is None:
            held.release()
        elif refused := self.refused.get(task.trial.trial_id):
            with held:
                self._refuse(left, *refused)
        else:
            self.held[task.trial.trial_id] = held
            self._start(left)

    def _left_of(self, task: Task) -> Task | None:
        """What is left of it beside what is stored by now. What failed in another run meanwhile is not run again."""
        stored, before = self.store.trial(task.trial.trial_id), task.stored
        is_new = stored is not None and (before is None or stored["attempts"] != before["attempts"])
        found = tasks([task.trial], self.store, retry_failed=self.retry_failed and not is_new, only=self.only)
        if not found and stored:
            self.failed |= stored["status"] not in self.fine
            self.watcher.elsewhere(_label(task.trial), stored["status"], _note(stored))
        return found[0] if found else None

    def _start(self, task: Task) -> None:
        trial = task.trial
        settings = trial.variant.settings
        self._look_around()
        job = Job(
            settings=settings.model_dump(mode="json"),
            seed=trial.seed,
            device=self.resources.device,
            threads=self.rows.threads(task),
            phases=task.phases,
            log=str(self.store.log_path(trial.trial_id)),
            peaks=self.peaks.get(self.rows.threads(task), Peaks()),
            alone=self.resources.workers == 1 and self.others == 0,
            memory_bytes=self.resources.memory_bytes,
            corpus_sha256=trial.variant.corpus.sha256,
            sources=trial.sources,
            checkpoints=str(self.store.checkpoints_path(trial.trial_id)) if "train" in task.phases else "",
            attempt=task.attempt,
            first_attempt=task.first_attempt,
            for_tuning=trial.variant.is_for_tuning,
        )
        self.watcher.start(trial.trial_id, _label(trial), settings.train.planned_steps)
        with child.environment(job.threads):
            started = Child(child.context(self.resources.device), job)
        self._count_company()
        self.running[trial.trial_id] = (task, started, datetime.now(UTC))

    def _look_around(self) -> None:
        """See now and then how much other runs do on this machine."""
        if time.monotonic() - self.looked >= _LOOK_SECONDS:
            self._count_company()
            self.others, self.looked = lease.others_here(self.store.folder.parent), time.monotonic()

    def _count_company(self) -> None:
        """Charge each running trial with the number that ran since the last change: its speed depends on it."""
        now, number = time.monotonic(), len(self.running) + self.others
        for trial_id in self.running:
            self.company[trial_id] = self.company.get(trial_id, 0.0) + (now - self.changed) * number
        self.changed = now

    def _wait(self, received: list[int]) -> bool:
        """Listen until something ends or a moment has passed. Returns whether a trial ended that is not `ok`."""
        wait([each for _, running, _ in self.running.values() for each in running.waitables()], _POLL_SECONDS)
        self._look_around()
        failed = False
        if received:
            return failed  # what has ended may have ended by the same signal
        for trial_id, (_, running, _) in list(self.running.items()):
            ended = not running.process.is_alive()
            self._pass_on(trial_id, running)
            if ended or (late := running.too_late()) or self.held[trial_id].lost:
                if not ended:
                    running.stop(("timeout", running.phase, late or "another run took it over"))
                failed |= self._finish(trial_id) not in (*self.fine, _LOST)
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
        held = self.held.pop(trial_id)
        if not held.renew():
            return self._lose(task)
        wall, company = time.monotonic() - running.began, self.company.pop(trial_id, 0.0)
        before = task.before.get("wall_seconds") or 0.0
        before = max(before, running.past.seconds) if running.past else before
        times = {"wall_seconds": before + wall, "trials_at_once": max(1.0, company / wall) if wall else 1.0}
        found = self.capacities.get(task.trial.variant.name, Capacity()) if "profile" in task.phases else Capacity()
        row = self.rows.ended(task, self._known(task, started) | times, running, found)
        row |= {"status": status, "phase": phase, "reason": reason}
        with held:
            is_stored = self._store(row, self.rows.curves(task, running), self.rows.profiles(task, running, found))
            if is_stored and is_final(row) and not task.trial.variant.settings.train.keep_checkpoints:
                self.store.drop_checkpoints(trial_id)
        self.failed |= status not in self.fine
        return status

    def _lose(self, task: Task) -> str:
        """Nothing is stored of a trial that another run has taken over, while this one did not move."""
        self.company.pop(task.trial.trial_id, None)
        self.put_off.append(task)
        self.watcher.leave(task.trial.trial_id, "another run has taken it over, while this one stood still")
        return _LOST

    def _store(self, row: dict[str, Any], curves: Columns, profiles: Columns) -> bool:
        """Whether it is stored by now."""
        write = partial(self._write, row, curves, profiles)
        is_stored = self.keeper.put(f"{row['variant']} seed {row['seed']}", write)
        self.watcher.finish(row["trial_id"], row["status"], _note(row))
        return is_stored

    def _write(self, row: dict[str, Any], curves: Columns, profiles: Columns) -> None:
        self.store.write_trial(row, curves, profiles)
        try:
            self.stored(row["trial_id"])
        except OSError as error:
            _log.warning("not told on, python -m ablate sync FILE does it: %s", error.strerror or error)

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
    """What living runs work on; of those on other machines only they know whether they live."""
    return [
        holder.what if holder.is_here() else f"{holder.what} ({holder}, unless that has ended)"
        for holder in lease.living(store.folder / "leases")
    ]


@contextmanager
def present(leases: Leases, received: Sequence[int]) -> Iterator[None]:
    """While nobody else changes what the experiment is now; a signal ends the waiting for that."""
    with leases.wait("experiment", stopped=lambda: bool(received)) or nullcontext():
        yield


def _meaning(store: Store) -> Any:
    """What the experiment is now, as far as rounds of timing depend on it; None where nothing readable says it."""
    try:
        document = store.experiment()
    except ResultsError:
        return None
    return {each: place[2]["name"] for each, place in places(document).items()}, document.get("profile")


def _model(variant: Variant) -> str:
    return canonical_json(variant.plain["model"])


def _is_over(received: list[int], held: Lease) -> bool:
    return bool(received) or held.lost


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

"""One trial from start to finish, inside its own process: train, measure, and tell the parent on the way.

The process belongs to the trial alone and ends with it: nothing needs to be freed, and nothing of it reaches the next.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

from ablate import cost, registry
from ablate.batches import Batches, HeldOut
from ablate.child import NO_MEMORY
from ablate.data import Corpus
from ablate.gates import leak
from ablate.job import Job, Past
from ablate.model import Transformer, build
from ablate.objectives import Batch, Objective, objective_of
from ablate.profiling import compilation, decode, device, flops, kernels, live, memory, utilisation
from ablate.profiling.energy import EnergyMeter
from ablate.profiling.phase import ProfilePhase, held_out_tokens, required_columns
from ablate.profiling.watch import Watch
from ablate.resume import Checkpointer
from ablate.settings import TrainSettings, VariantSettings, typed
from ablate.train import Learner, Trained, bits_per_byte, device_of, exercise, pieces, state_of, train

# The server that trials are forked from imports this module once, so that no trial waits for an import: every choice,
# and torch._dynamo, which torch's optimizers load at their first use.
for _slot in (*registry.SLOTS, *registry.SOURCES):
    for _name in registry.names(_slot):
        registry.config_class(_slot, _name)

SEND_EVERY = 0.2
"""Seconds between two messages with points of the curves."""

MOST_STEPS = 20
"""Training steps that are measured where nothing is trained, those for warm-up among them."""

GATE_TOKENS = 32
"""Tokens of the sequences on which a variant is asked whether it sees the future."""

REASON_LENGTH = 300
"""Characters of a reason; all of it is in the log."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, and why if not well."""

    status: str
    reason: str = ""


def main(job: Job, connection: Connection, stopped: threading.Event) -> None:
    """Do `job` in this process and tell the parent over `connection`; the outcome is the last message.

    `stopped` says whether the parent wants a training to end where it can be gone on with.
    """
    begin = time.perf_counter()
    gc.freeze()  # what was imported stays; the collector need not walk it in the middle of a measurement
    torch.set_num_threads(job.threads)
    memory.confine(torch.device(job.device), job.memory_bytes)
    with contextlib.suppress(ConnectionError):
        perform(job, Reporter(connection), begin, stopped)


def perform(job: Job, reporter: Reporter, begin: float, stopped: threading.Event | None = None) -> None:
    """Do `job` and report, whatever happens. All of `main` but what is about the process."""
    try:
        outcome = Trial(job, reporter, begin, stopped or threading.Event()).run()
    except BaseException as error:  # a user's own choice may leave in any way
        traceback.print_exc()
        outcome = classify(error)
    reporter.outcome(outcome)


def classify(error: BaseException) -> Outcome:
    """The outcome of a trial that raised: out of memory, or a crash, with type and message."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be read)"
    short = isinstance(error, RuntimeError) and any(sign in text for sign in NO_MEMORY)
    status = "oom" if short or isinstance(error, MemoryError) else "crashed"
    return Outcome(status, f"{type(error).__name__}: {text}"[:REASON_LENGTH])


class Trial:
    """What the phases of one trial share."""

    def __init__(self, job: Job, reporter: Reporter, begin: float, stopped: threading.Event) -> None:
        self.job, self.reporter, self.begin = job, reporter, begin
        self.checkpointer = Checkpointer(
            job.checkpoints,
            every=job.settings["train"]["checkpoint_every"],
            attempt=job.attempt,
            first_attempt=job.first_attempt,
            began=begin,
            stopped=stopped.is_set,
            told=self._goes_on,
        )
        self.stopped = stopped
        self.watch: Watch | None = None
        self.device = torch.device(job.device)
        self.meter: EnergyMeter | None = None
        self.settings: VariantSettings
        self.objective: Objective
        self.columns: dict[str, Any] = {}
        self.profiles: list[dict[str, Any]] = []  # of the training
        self.problems: list[str] = []

    def run(self) -> Outcome:
        """All phases of the job, until one ends it."""
        self.reporter.phase("setup")
        memory.reset_peak_rss()
        self.settings = decode.feasible(typed(self.job.settings))
        make_deterministic(self.settings.train)
        self.meter = EnergyMeter(self.device) if self.job.alone else None
        corpus = self.settings.data.corpus()
        corpus = corpus.for_tuning() if self.job.for_tuning else corpus
        if changed := self._changed(corpus):
            return Outcome("crashed", f"{changed} changed after it was planned: run again, which plans anew")
        self.objective = objective_of(self.settings.model, corpus.vocab_size)
        model = build(self.settings.model, self.settings.train.seed_of_weights(self.job.seed)).to(self.device)
        self._tell(device.facts(self.device, self.settings.train.precision))
        phases = self._phases_left(model)
        if phases == self.job.phases != ("profile",):
            seen = held_out_tokens(corpus, 2, min(GATE_TOKENS, self.settings.train.length), self.device)
            if wrong := leak(model, seen):
                return Outcome("gate_failed", wrong)
        work = {"train": self._train, "steps": self._steps, "profile": self._profile}
        for phase in phases:
            self.reporter.phase(phase)
            try:
                early = work[phase](model, corpus)
            except Exception as error:
                early = self._not_compiled(error)
            if early is not None:
                return early
            # Nothing is profiled beside a training that cannot stand: what fails in the profile leaves a good one.
            if problems := [*self._missing(phase), *self.problems]:
                return Outcome("incomplete", "; ".join(problems))
            if phase == "train":
                self._keep(model)
        return Outcome("ok")

    def _changed(self, corpus: Corpus) -> str | None:
        """What is no longer as it was when the trial got its id, which would be that of other numbers."""
        if self.job.corpus_sha256 not in (None, corpus.sha256):
            return "the data"
        return next((f for f, known in self.job.sources.items() if registry.file_sha256(Path(f)) != known), None)

    def _phases_left(self, model: Transformer) -> tuple[str, ...]:
        """Those of the job, without a training that an earlier attempt has done: all that it told is told again."""
        if "train" not in self.job.phases or (told := self.checkpointer.finished(model, self._points)) is None:
            return self.job.phases
        self._tell(told["columns"])
        self.reporter.profiles(told["profiles"])
        return tuple(phase for phase in self.job.phases if phase != "train")

    def _keep(self, model: Transformer) -> None:
        """A training that is done is not done again, whatever happens in the profile."""
        recipe = self.settings.train
        if "profile" in self.job.phases or recipe.keep_checkpoints:
            told = {"columns": self.columns, "profiles": self.profiles}
            self.checkpointer.finish(self.columns["steps"], model, told)

    def _points(self, step: int, split: str, values: dict[str, float]) -> None:
        self.reporter.points(step, step * self.settings.train.batch_tokens, split, values)

    def _goes_on(self, past: Past) -> None:
        """A training goes on after so many steps: what was measured of those is not known, what reading took is not
        of it.
        """
        self.reporter.past(past)
        memory.reset_peak_rss()
        if self.watch is not None:
            self.watch.go_on(past.steps)

    def _train(self, model: Transformer, corpus: Corpus) -> Outcome | None:
        recipe = self.settings.train
        batches = Batches.of(corpus, recipe, self.job.seed, self.objective)
        held_out = HeldOut.of(corpus, recipe, self.objective)
        watch, called = self._watch(recipe), called_for(model, batches, recipe)
        self.watch = watch
        with heeding(signal.SIGTERM, self.stopped):
            trained = train(model, batches, held_out, recipe, self.job.seed, watch, called, self.checkpointer)
        if trained.stopped:
            self._tell({"steps": trained.steps, "tokens": trained.steps * recipe.batch_tokens})
            return Outcome("interrupted", f"stopped at step {trained.steps}")
        self._tell({**training_columns(trained, batches, held_out, recipe), **watch.columns()})
        if trained.diverged_step is not None:
            last = trained.last_finite_loss
            return Outcome("diverged", f"not finite at step {trained.diverged_step}; the last finite loss was {last}")
        self._after_steps(model, watch, batches, held_out, called)
        return None

    def _steps(self, model: Transformer, corpus: Corpus) -> Outcome | None:
        """The first steps of the recipe, for their times and memory alone: the weights stay as they were drawn."""
        recipe = self.settings.train
        few = recipe.lasting(min(recipe.n_steps, MOST_STEPS))
        batches = Batches.of(corpus, recipe, self.job.seed, self.objective)
        watch, called = self._watch(few), called_for(model, batches, recipe)
        learner = exercise(model, batches, few, self.job.seed, watch, called)
        dtype, _ = state_of(learner.optimizer)
        del learner  # the memory's split has one of its own
        self._tell({"optimizer_state_dtype": dtype, "deterministic": recipe.deterministic, **watch.columns()})
        self._after_steps(model, watch, batches, HeldOut.of(corpus, recipe, self.objective), called)
        return None

    def _watch(self, recipe: TrainSettings) -> Watch:
        return Watch(recipe, self.device, self.begin, self.reporter.phase, self.reporter.points, self.meter)

    def _not_compiled(self, error: Exception) -> Outcome:
        """The outcome where compiling failed; anything else is raised again."""
        if (fault := compilation.failure(error)) is None or classify(error).status == "oom":
            raise error
        traceback.print_exception(error)
        self._tell({"compiled": False, "compile_fault": fault})
        return Outcome("crashed", fault)

    def _after_steps(
        self, model: Transformer, watch: Watch, batches: Batches, held_out: HeldOut, called: nn.Module | None
    ) -> None:
        """What ran in steps that were watched, and what they cost in FLOPs and memory."""
        recipe = self.settings.train
        inputs, _ = next(pieces(batches.batch(1), recipe.accumulate, self.device))
        self._ran(train=kernels.training_kernels(model, inputs, recipe.precision, called))
        self._count(model, held_out)
        self._training_profile([*watch.rows(), *self._device_facts()])
        self._tell(self._memory_split(model, batches.batch(1)))
        self.problems += memory.implausible(self.columns)

    def _memory_split(self, model: Transformer, batch: Batch) -> dict[str, int]:
        """Of two more steps, at a learning rate of 0: the weights stay what they are."""
        with live.aside(model):
            learner = Learner.of(model, self.settings.train)
            with kernels.optimizer_kernels(learner.optimizer) as ran:
                found = live.training_split(model, lambda part: learner.update(batch, 0.0, part))
            self._ran(optimizer=sorted(ran))
            return found | {"optimizer_state_bytes": state_of(learner.optimizer)[1]}

    def _profile(self, model: Transformer, corpus: Corpus) -> Outcome | None:
        told = (self._tell, self.reporter.profiles, self._ran)
        given = (self.settings, corpus, self.objective, self.device, self.job.peaks, self.meter)
        wrong, problems = ProfilePhase(*given, *told).run(model)
        self.problems += problems
        return Outcome("decode_mismatch", wrong) if wrong else None

    def _tell(self, columns: dict[str, Any]) -> None:
        self.columns |= columns
        self.reporter.columns(columns)

    def _ran(self, **names: list[str]) -> None:
        """What ran in a phase, beside what is known of others."""
        known = json.loads(self.columns.get("kernels", "{}"))
        self._tell({"kernels": json.dumps(known | names)})

    def _count(self, model: Transformer, held_out: HeldOut) -> None:
        """FLOPs by the formula and as counted over one sequence, and what share of the peaks they are."""
        recipe, length = self.settings.train, self.settings.train.length
        inputs, _ = next(pieces(next(held_out.batches(1)), 1, self.device))
        counted = flops.counted(model, inputs, length, recipe.precision)
        whole = cost.cost(self.settings.model, length, discount=False).flops_per_token
        self.problems += [wrong] if (wrong := counted.disagreement(whole)) else []
        forward = cost.cost(self.settings.model, length).flops_per_token
        needed = None if forward is None else 3 * forward
        shares = utilisation.columns(
            self.columns.get("train_tokens_per_second"),
            needed,
            counted.training,
            self.job.peaks.matmul_flops.get(recipe.precision),
            device.datasheet_flops(self.device, recipe.precision),
        )
        self._tell(
            {
                "flops_per_token_counted": counted.forward,
                "train_flops_per_token": needed,
                "train_flops_per_token_counted": counted.training,
                **shares,
            }
        )

    def _device_facts(self) -> list[dict[str, Any]]:
        peak = device.datasheet_flops(self.device, self.settings.train.precision)
        return [{"metric": "peak_flops_per_second", "value": peak}] if peak else []

    def _training_profile(self, rows: list[dict[str, Any]]) -> None:
        recipe = self.settings.train
        cell = {"phase": "train", "batch": recipe.batch_tokens // recipe.length, "context": recipe.length}
        self.profiles = [cell | row for row in rows]
        self.reporter.profiles(self.profiles)

    def _missing(self, phase: str) -> list[str]:
        """What the phase must have measured and did not, or is not finite."""
        values = {name: self.columns.get(name) for name in required(self.settings, phase, self.device)}
        return [
            f"{name} is missing" if value is None else f"{name} is {value}"
            for name, value in values.items()
            if value is None or not math.isfinite(value)
        ]


@contextmanager
def heeding(number: signal.Signals, stopped: threading.Event) -> Iterator[None]:
    """Within it the signal asks for the same as the parent may: one that is sent to all of a run's processes, as
    service managers do, then costs no work.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: stopped.set())
    try:
        yield
    finally:
        signal.signal(number, before)


def make_deterministic(recipe: TrainSettings) -> None:
    """Where the file asks for it, what is computed in this process is the same every time, or raises."""
    if recipe.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)


def called_for(model: Transformer, batches: Batches, recipe: TrainSettings) -> nn.Module | None:
    """What steps call for the model, where the file asks for it to be compiled."""
    if not recipe.compile:
        return None
    inputs, _ = next(pieces(batches.batch(1), recipe.accumulate, device_of(model)))
    compiled: nn.Module = compilation.compiled(model, inputs, recipe.precision)
    return compiled


def required(settings: VariantSettings, phase: str, where: torch.device) -> list[str]:
    """The columns without which a phase is not complete, and a trial not `ok`."""
    names = ["train_loss", "val_loss", "best_val_loss"] if phase == "train" else []
    if phase in ("train", "steps"):
        names += ["train_tokens_per_second", "step_seconds_p50"]
        names += ["peak_allocated_bytes", "peak_reserved_bytes"] if where.type == "cuda" else []
        names += ["peak_rss_bytes"] if where.type == "cpu" and sys.platform == "linux" else []
        names += ["peak_live_bytes", "parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes"]
    if phase == "profile":
        names += required_columns(settings.profile)
    return names


def training_columns(trained: Trained, batches: Batches, held_out: HeldOut, recipe: TrainSettings) -> dict[str, Any]:
    """What came of a training run, also of one that diverged."""
    val_loss = trained.val_losses[-1] if trained.val_losses else None
    bits = {} if val_loss is None else bits_per_byte(val_loss, held_out.bytes_per_token)
    return {
        "steps": trained.steps,
        "tokens": trained.steps * recipe.batch_tokens,
        "corpus_passes": batches.passes(trained.steps),
        "diverged_step": trained.diverged_step,
        "train_loss": trained.train_loss,
        "val_loss": val_loss,
        "best_val_loss": min(trained.val_losses, default=None),
        "val_bits_per_byte": bits.get("bits_per_byte"),
        "batch_order_hash": trained.batch_order_hash,
        "optimizer_state_dtype": trained.optimizer_state_dtype,
        "module_metrics": json.dumps(trained.module_metrics),
        "deterministic": recipe.deterministic,
    }


# --- What the parent hears --------------------------------------------------------------------------------------------


class Reporter:
    """Messages to the parent. Points of the curves are gathered and sent a few times a second."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.current = "setup"
        self._points: list[tuple[int, int, str, str, float]] = []
        self._sent = -math.inf

    def phase(self, name: str) -> None:
        """A phase begins."""
        self.current = name
        self.connection.send(("phase", name))

    def columns(self, values: dict[str, Any]) -> None:
        """Values for the trial's row. What they say is done must not lack its last points, if this process ends now."""
        self.flush()
        self.connection.send(("columns", values))

    def past(self, past: Past) -> None:
        """What lies before this attempt."""
        self.connection.send(("past", past))

    def profiles(self, rows: list[dict[str, Any]]) -> None:
        """Rows of the profile."""
        names = ("phase", "batch", "context", "new_tokens", "path", "metric", "value", "spread", "sample")
        if rows:
            self.connection.send(("profiles", {name: [row.get(name) for row in rows] for name in names}))

    def points(self, step: int, tokens: int, split: str, values: dict[str, float]) -> None:
        """Points of the curves, soon."""
        self._points += [(step, tokens, split, metric, value) for metric, value in values.items()]
        if time.monotonic() - self._sent >= SEND_EVERY:
            self.flush()

    def flush(self) -> None:
        """Send the points gathered so far."""
        if self._points:
            names = ("step", "tokens", "split", "metric", "value")
            columns = (list(column) for column in zip(*self._points, strict=True))
            self.connection.send(("curve", dict(zip(names, columns, strict=True))))
        self._points = []
        self._sent = time.monotonic()

    def outcome(self, outcome: Outcome) -> None:
        """The last message."""
        self.flush()
        self.connection.send(("outcome", outcome.status, self.current, outcome.reason))

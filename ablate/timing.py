"""A variant timed alone, inside a process of its own: a few real training steps, then its first prompt and decoding.

What is timed is what a trial does, with a model of the same kind on batches of the same corpus. Nothing is kept.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch

from ablate.batches import Batches
from ablate.data import Corpus
from ablate.job import TimingJob
from ablate.model import Transformer, build
from ablate.objectives import objective_of
from ablate.profiling import compilation, decode, memory
from ablate.profiling.clock import Clock, StepTimer, clock_for
from ablate.profiling.device import device_name
from ablate.profiling.surroundings import Surroundings
from ablate.settings import VariantSettings, typed
from ablate.train import Learner, device_of, generator_seed, on_device, pieces, schedule
from ablate.trial import Outcome, Reporter, classify

WARM_UP_STEPS = 3
STEPS = 10
"""Steps from one look at the clock to the next, and the fewest that are timed."""

STEP_SECONDS = 1.0
GENERATIONS = 5
"""The fewest prompts that are read, or continued, after one as a warm-up."""

GENERATION_SECONDS = 0.5


def main(job: TimingJob, connection: Connection) -> None:
    """Do `job` in this process and tell the parent over `connection`; the outcome is the last message."""
    gc.freeze()
    torch.set_num_threads(job.threads)
    if job.device == "cpu":
        memory.limit_to_available()
    with contextlib.suppress(ConnectionError):
        perform(job, Reporter(connection))


def perform(job: TimingJob, reporter: Reporter) -> None:
    """Do `job` and report, whatever happens. All of `main` but what is about the process."""
    try:
        _time(job, reporter)
        outcome = Outcome("ok")
    except BaseException as error:  # a user's own choice may leave in any way
        traceback.print_exc()
        outcome = classify(error)
    reporter.outcome(outcome)


def _time(job: TimingJob, reporter: Reporter) -> None:
    memory.reset_peak_rss()
    settings, device = decode.feasible(typed(job.settings)), torch.device(job.device)
    if settings.train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    corpus, clock, around = settings.data.corpus(), clock_for(device), Surroundings(device)
    model = build(settings.model, job.seed).to(device)
    around.begin()
    reporter.phase("train")
    steps = training_steps(model, settings, corpus, job.seed, clock)
    values = {"step_seconds_p50": median(steps)}
    peaks = memory.peaks(device)
    values |= {name: float(peak) for name in MEMORY if (peak := peaks.get(name)) is not None}
    reporter.phase("profile")
    values |= generations(model, settings, corpus, job.cells, clock)
    told = {"device_name": device_name(device), "torch": torch.__version__}
    reporter.columns({"values": values, "other_load_cores": around.columns()["other_load_cores"], **told})


MEMORY = ("peak_rss_bytes", "peak_allocated_bytes")


def training_steps(
    model: Transformer, settings: VariantSettings, corpus: Corpus, seed: int, clock: Clock
) -> list[float]:
    """Seconds of training steps after a few that warm up: at least `STEPS`, and so many as take `STEP_SECONDS`."""
    recipe = settings.train
    batches = Batches.of(corpus, recipe, seed, objective_of(settings.model, corpus.vocab_size))
    inputs, _ = next(pieces(batches.batch(1), recipe.accumulate, device_of(model)))
    called = compilation.compiled(model, inputs, recipe.precision) if recipe.compile else None
    learner, rate = Learner.of(model, recipe, called), schedule(recipe, settings.model.d_model)
    torch.manual_seed(generator_seed(seed, "dropout"))
    model.train()
    timer, step = StepTimer(WARM_UP_STEPS, clock), 0
    seconds: list[float] = []
    while sum(seconds) < STEP_SECONDS:
        for _ in range(STEPS if seconds else STEPS + WARM_UP_STEPS):
            step += 1
            with timer.step():
                learner.update(batches.batch(step), rate(min(step, recipe.n_steps)))
        seconds = timer.seconds()["step"]
    return seconds


def generations(
    model: Transformer, settings: VariantSettings, corpus: Corpus, cells: dict[str, list[int]], clock: Clock
) -> dict[str, float]:
    """Median seconds of reading a prompt, and of a further token, in the cells that are named."""
    timed = model if settings.train.precision == "fp32" else decode.copy_as(model, torch.bfloat16)
    timed.eval()
    found: dict[str, float] = {}
    if "prefill" in cells:
        batch, tokens = cells["prefill"]
        prompt = _prompt(corpus, batch, tokens, model)
        runs = _again_and_again(lambda: decode.generate(timed, prompt, 0, clock))
        found["prefill_seconds_p50"] = median(run.prefill_seconds for run in runs)
    if "decode" in cells and settings.profile.decode:
        batch, context, new_tokens = cells["decode"]
        prompt = _prompt(corpus, batch, context, model)
        runs = _again_and_again(lambda: decode.generate(timed, prompt, new_tokens, clock))
        if further := [run.seconds_per_token for run in runs if run.seconds_per_token is not None]:
            found["decode_seconds_per_token_p50"] = median(further)
    return found


def _prompt(corpus: Corpus, batch: int, tokens: int, model: Transformer) -> torch.Tensor:
    held_out = np.resize(corpus.validation, (batch, tokens)).astype(np.int64)
    return on_device(held_out, next(model.parameters()).device)


def _again_and_again(generate: Callable[[], Any]) -> list[decode.Generation]:
    generate()
    begin, runs = time.perf_counter(), list[decode.Generation]()
    while len(runs) < GENERATIONS or time.perf_counter() - begin < GENERATION_SECONDS:
        runs.append(generate())
    return runs

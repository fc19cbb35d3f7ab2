"""A variant timed alone, inside a process of its own: a few real training steps, then its first prompt and decoding.

What is timed is what a trial does, with a model of the same kind on batches of the same corpus. Nothing is kept.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from ablate.batches import Batches
from ablate.data import Corpus
from ablate.job import TimingJob
from ablate.model import Transformer, build
from ablate.objectives import objective_of
from ablate.profiling import decode, memory
from ablate.profiling.clock import Clock, StepTimer, clock_for
from ablate.profiling.compilation import Compilation
from ablate.profiling.device import device_name, gpu_uuid
from ablate.profiling.phase import DECODE_SECONDS, held_out_tokens
from ablate.profiling.surroundings import Surroundings
from ablate.pulse import beat
from ablate.settings import VariantSettings, typed
from ablate.train import Learner, device_of, generator_seed, schedule
from ablate.trial import Outcome, Reporter, called_for, classify, make_deterministic

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
    memory.confine(torch.device(job.device), job.memory_bytes)
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
    settings, device = decode.feasible(typed(job.settings)), torch.device(job.device)
    make_deterministic(settings.train)
    where = {"device_name": device_name(device), "gpu_uuid": gpu_uuid(device), "torch": torch.__version__}
    reporter.columns(where)
    corpus, clock, around = settings.data.corpus(), clock_for(device), Surroundings(device)
    model = build(settings.model, settings.train.seed_of_weights(job.seed)).to(device)
    reporter.phase("train")
    steps, compiled = training_steps(model, settings, corpus, job.seed, clock, around)
    reporter.columns({name: value for name, value in compiled.items() if name in COMPILED})
    reporter.phase("profile")
    seconds = {"step_seconds_p50": steps, **generations(model, settings, corpus, job.cells, clock)}
    reporter.columns({name: value for name, value in around.columns().items() if name in SURROUNDINGS})
    values = {metric: median(each) for metric, each in seconds.items()}
    reporter.columns({"values": values, "samples": {metric: len(each) for metric, each in seconds.items()}})


COMPILED = ("compiled", "compile_fault")
SURROUNDINGS = ("other_load_cores", "device_clock_mhz_p50", "throttle_reasons")


def training_steps(
    model: Transformer, settings: VariantSettings, corpus: Corpus, seed: int, clock: Clock, around: Surroundings
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of training steps after a few that warm up: at least `STEPS`, and so many as take `STEP_SECONDS`. Beside
    them what the compiler did.
    """
    recipe, compilation = settings.train, Compilation()

    def warm() -> None:
        around.begin()
        compilation.warm()

    batches = Batches.of(corpus, recipe, seed, objective_of(settings.model, corpus.vocab_size))
    called = called_for(model, batches, recipe)
    learner, rate = Learner.of(model, recipe, called), schedule(recipe, settings.model.d_model)
    torch.manual_seed(generator_seed(seed, "dropout"))
    model.train()
    timer, step = StepTimer(WARM_UP_STEPS, clock, warm), 0
    seconds: list[float] = []
    while sum(seconds) < STEP_SECONDS:
        for _ in range(STEPS if seconds else STEPS + WARM_UP_STEPS):
            step += 1
            with timer.step():
                learner.update(batches.batch(step), rate(min(step, recipe.n_steps)))
            around.sample()
            beat()
        seconds = timer.seconds()["step"]
    return seconds, compilation.columns(recipe.compile)


def generations(
    model: Transformer, settings: VariantSettings, corpus: Corpus, cells: dict[str, list[int]], clock: Clock
) -> dict[str, list[float]]:
    """Seconds of reading a prompt, and of a further token, in the cells that are named."""
    timed, device = decode.as_served(model, settings.train.precision), device_of(model)
    found: dict[str, list[float]] = {}
    if "prefill" in cells:
        batch, tokens = cells["prefill"]
        prompt = held_out_tokens(corpus, batch, tokens, device)
        runs = _again_and_again(lambda: decode.generate(timed, prompt, 0, clock))
        found["prefill_seconds_p50"] = [run.prefill_seconds for run in runs]
    if "decode" in cells and settings.profile.decode:
        batch, context, new_tokens = cells["decode"]
        prompt = held_out_tokens(corpus, batch, context, device)
        runs = _again_and_again(lambda: decode.generate(timed, prompt, new_tokens, clock))
        if further := [run.seconds_per_token for run in runs if run.seconds_per_token is not None]:
            found[DECODE_SECONDS] = further
    return found


def _again_and_again(generate: Callable[[], Any]) -> list[decode.Generation]:
    generate()
    begin, runs = time.perf_counter(), list[decode.Generation]()
    while len(runs) < GENERATIONS or time.perf_counter() - begin < GENERATION_SECONDS:
        runs.append(generate())
    return runs

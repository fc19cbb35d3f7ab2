"""One training step of some size, to see whether it fits: a process of its own, which ends with it."""

from __future__ import annotations

import contextlib
import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch

from ablate.batches import Batches
from ablate.data import Corpus
from ablate.job import CapacityJob
from ablate.model import build
from ablate.objectives import Batch, objective_of
from ablate.profiling import memory
from ablate.profiling.clock import clock_for
from ablate.settings import VariantSettings, typed
from ablate.train import Learner
from ablate.trial import Outcome, Reporter, classify


def main(job: CapacityJob, connection: Connection) -> None:
    """Do `job` in this process and tell the parent over `connection`; the outcome is the last message."""
    torch.set_num_threads(job.threads)
    memory.reset_peak_rss()
    reporter = Reporter(connection)
    with contextlib.suppress(ConnectionError):
        try:
            outcome = attempt(job, reporter)
        except BaseException as error:  # a user's own choice may leave in any way
            traceback.print_exc()
            outcome = classify(error)
        reporter.outcome(outcome)


def attempt(job: CapacityJob, reporter: Reporter) -> Outcome:
    """Limit the memory, build what the step needs, and do it. What it took is told."""
    device, settings = torch.device(job.device), sized(typed(job.settings), job.sequences, job.length)
    reporter.columns({"limit_bytes": memory.limit(device, job.memory_bytes)})
    before = memory.taken_bytes(device)
    model = build(settings.model).to(device)
    learner, batch = Learner.of(model, settings.train), random_batch(settings)
    make_state(learner)
    reporter.phase("step")
    clock = clock_for(device)
    begin = clock.mark()
    learner.update(batch, 0.0)
    seconds = clock.seconds(begin, clock.mark())
    reporter.columns({"step_seconds": seconds, "step_memory_bytes": memory.taken_bytes(device) - before})
    return Outcome("ok")


def sized(settings: VariantSettings, sequences: int, length: int) -> VariantSettings:
    """A copy whose step is of so many sequences in one piece, and whose model takes them however long they are."""
    update = {"seq_len": length, "batch_tokens": sequences * length, "accumulate": 1}
    model = settings.model.model_copy(update={"max_seq_len": max(length, settings.model.max_seq_len)})
    return settings.model_copy(update={"model": model, "train": settings.train.model_copy(update=update)})


def random_batch(settings: VariantSettings) -> Batch:
    """A batch of the recipe, of random tokens: what they say takes no memory."""
    recipe, vocab_size = settings.train, settings.model.shape.vocab_size - settings.model.n_special_tokens
    tokens = np.random.default_rng(0).integers(vocab_size, size=recipe.batch_tokens + 2 * recipe.length)
    corpus = Corpus(tokens, tokens, vocab_size, "", None, "")
    return Batches.of(corpus, recipe, 0, objective_of(settings.model, vocab_size)).batch(1)


def make_state(learner: Learner) -> None:
    """Have the optimizer make its state, as every step but the first finds it."""
    for parameter in learner.parameters:
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)

"""How time and memory grow with the length of a sequence: one sequence of each length, forward, and forward and back.

A forward pass is one in inference, as prefill has it. A training pass is forward and backward with the loss of training
and its auxiliary ones, but without the optimizer, whose work does not depend on the length. Its memory is the most that
it holds at once beyond what is there before: weights and gradients are. On a GPU that is what tensors take by the
allocator, elsewhere the bytes of live tensors, in a pass of its own, since counting them takes time.

Of an encoder-decoder a sequence's first half is the source and the rest the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ablate.model import Transformer
from ablate.objectives import Batch
from ablate.profiling.clock import Clock, series
from ablate.profiling.live import LiveBytes, aside
from ablate.pulse import beat
from ablate.settings import TrainSettings
from ablate.train import Learner, cross_entropy, device_of, forward, pieces

Sequences = Callable[[int], Batch]
"""One sequence of so many tokens, the same at every call."""


@dataclass(frozen=True)
class Round:
    """What one sequence took in one round."""

    inference_seconds: float
    training_pass_seconds: float
    training_pass_bytes: int


def profile(
    model: Transformer,
    reader: Transformer,
    recipe: TrainSettings,
    lengths: list[int],
    rounds: int,
    sequences: Sequences,
    clock: Clock,
) -> Iterator[dict[str, Any]]:
    """Rows of `profiles` for each length, by training passes of `model` and inference with `reader`, which may be it.

    A round goes through all lengths, so that what slows the machine for a while slows all of them; the first round is
    a warm-up. Gradients, buffers and random numbers stay as they were.
    """
    learner = Learner.of(model, recipe)
    with aside(model):
        found = [
            {length: _round(learner, reader, sequences(length), clock) for length in lengths} for _ in range(rounds + 1)
        ][1:]
    for length, metric in product(found[0], ("inference_seconds", "training_pass_seconds", "training_pass_bytes")):
        for row in series(metric, [getattr(each[length], metric) for each in found]):
            yield {"phase": "lengths", "batch": 1, "context": length} | row


def _round(learner: Learner, reader: Transformer, batch: Batch, clock: Clock) -> Round:
    beat()
    model = learner.model
    inputs, targets = next(pieces(batch, 1, device_of(model)))
    training_pass = partial(_training_pass, learner, inputs, targets, max(1, batch.n_targets))
    inference = _inference(reader, inputs, clock)
    model.train()
    model.zero_grad(set_to_none=True)
    begin = clock.mark()
    training_pass()
    training = clock.seconds(begin, clock.mark())
    return Round(inference, training, peak_bytes(model, training_pass))


@torch.inference_mode()
def _inference(reader: Transformer, inputs: dict[str, Tensor], clock: Clock) -> float:
    reader.eval()
    begin = clock.mark()
    reader(**inputs)
    return clock.seconds(begin, clock.mark())


def _training_pass(learner: Learner, inputs: dict[str, Tensor], targets: Tensor, n_targets: int) -> None:
    logits = forward(learner.model, inputs, learner.recipe.precision)
    objective, _ = cross_entropy(logits, targets, learner.recipe.label_smoothing)
    sum(learner.auxiliary_losses().values(), objective / n_targets).backward()


def peak_bytes(model: torch.nn.Module, work: Callable[[], Any]) -> int:
    """The most bytes that tensors hold at once in `work`, beyond the model's weights, gradients and buffers."""
    device = device_of(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with LiveBytes([*model.parameters(), *model.buffers(), *gradients]) as live:
        held: int = live.now
        work()
        peak: int = live.peak
    return peak - held

"""What each step sees, and what an evaluation: a pure function of the corpus, the objective, the seed and the step.

A pass cuts the training tokens into windows whose inputs do not overlap, so that no token is predicted twice in it, and
goes through them in an order of its own. Each pass starts its first window elsewhere: what stood at a window's edge in
one pass stands inside one in the next. What an objective draws at random belongs to the window, not to the batch: it is
new in each pass, and the same in every evaluation of every trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ablate.choice import SettingsError
from ablate.data import Corpus
from ablate.objectives import Batch, Draw, Objective
from ablate.settings import TrainSettings

# Spawn keys keep these streams of random numbers apart from each other, and from those of data made from a seed.
ORDER, DRAWN, DRAWN_HELD_OUT = (1,), (2,), (3,)


@dataclass(frozen=True)
class Batches:
    """The training batches of one seed. Nothing but what stands here has a say in them."""

    tokens: np.ndarray
    seq_len: int
    sequences: int
    seed: int
    objective: Objective

    @classmethod
    def of(cls, corpus: Corpus, recipe: TrainSettings, seed: int, objective: Objective) -> Batches:
        """The batches of a resolved recipe, in the order of its own seed where it has one.

        Raises `SettingsError` where the corpus is too small for a batch.
        """
        check_corpus(corpus, recipe)
        seed = seed if recipe.data_seed is None else recipe.data_seed
        return cls(corpus.train, recipe.length, recipe.batch_tokens // recipe.length, seed, objective)

    @property
    def windows_per_pass(self) -> int:
        """Windows that fit wherever the first one starts; at least those of one step."""
        return max(self.sequences, len(self.tokens) // self.seq_len - 1)

    def passes(self, steps: int) -> float:
        """How often so many steps go through the training tokens."""
        return steps * self.sequences / self.windows_per_pass

    def batch(self, step: int) -> Batch:
        """The batch of a step, which is counted from 1."""
        first = (step - 1) * self.sequences
        return self.objective.batch(self.windows(step), _draws(self.seed, DRAWN, first, self.sequences))

    def windows(self, step: int) -> np.ndarray:
        """The `(sequences, seq_len + 1)` tokens that a step's batch is made of."""
        first = (step - 1) * self.sequences
        starts = np.array([self._start(place) for place in range(first, first + self.sequences)])
        return _gather(self.tokens, starts, self.seq_len)

    def _start(self, place: int) -> int:
        """Where the window at `place`, counted over all passes, starts."""
        number, index = divmod(place, self.windows_per_pass)
        offsets = min(self.seq_len, len(self.tokens) - self.windows_per_pass * self.seq_len)
        offset, order = _pass(self.seed, number, self.windows_per_pass, offsets)
        return offset + int(order[index]) * self.seq_len


@dataclass(frozen=True)
class HeldOut:
    """What an evaluation reads: whole windows, evenly spread over the validation split, the same every time."""

    tokens: np.ndarray
    seq_len: int
    starts: np.ndarray
    objective: Objective
    bytes_per_token: float | None = None
    """None too where not every token is told, so that there is no loss per byte."""

    @classmethod
    def of(cls, corpus: Corpus, recipe: TrainSettings, objective: Objective) -> HeldOut:
        """At most `eval_tokens` tokens, but at least one window; what is left over at the end makes no window."""
        length = recipe.length
        available = (len(corpus.validation) - 1) // length
        wanted = available if recipe.eval_tokens is None else max(1, recipe.eval_tokens // length)
        count = min(available, wanted)
        starts = np.arange(count) * available // max(1, count) * length
        per_byte = corpus.bytes_per_token if objective.tells_every_token else None
        return cls(corpus.validation, length, starts, objective, per_byte)

    def batches(self, sequences: int) -> Iterator[Batch]:
        """All windows, at most `sequences` of them at once."""
        for first in range(0, len(self.starts), sequences):
            windows = _gather(self.tokens, self.starts[first : first + sequences], self.seq_len)
            yield self.objective.batch(windows, _draws(0, DRAWN_HELD_OUT, first, len(windows)))


def check_corpus(corpus: Corpus, recipe: TrainSettings) -> None:
    """Raises `SettingsError` where a corpus is too small for one step or one evaluation of a resolved recipe."""
    needed = recipe.batch_tokens + 1
    if (n := len(corpus.train)) < needed:
        message = f"corpus has {n} tokens, one step needs {needed}"
        raise SettingsError(("train", "batch_tokens"), message, "shrink batch_tokens or take more data")
    needed = recipe.length + 1
    if (n := len(corpus.validation)) < needed:
        message = f"corpus has {n} tokens for validation, one sequence needs {needed}"
        raise SettingsError(("train", "seq_len"), message, "shorten seq_len or take more data")


@lru_cache(maxsize=4)
def _pass(seed: int, number: int, windows: int, offsets: int) -> tuple[int, np.ndarray]:
    """A pass's offset and order, from raw PCG64 output, which numpy promises never to change."""
    raw = np.random.PCG64(np.random.SeedSequence((seed, number), spawn_key=ORDER)).random_raw(windows + 1)
    return int(raw[0] % np.uint64(offsets)), raw[1:].argsort(kind="stable")


def _draws(seed: int, stream: tuple[int, ...], first: int, windows: int) -> Draw:
    """Random numbers of the windows at `first`, `first` + 1, …, each of which has a stretch of the stream."""

    def draw(n: int) -> np.ndarray:
        numbers = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream)).advance(first * n)
        return numbers.random_raw(windows * n).reshape(windows, n)

    return draw


def _gather(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)

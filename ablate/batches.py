"""Which tokens each step sees, and which an evaluation: a pure function of the corpus, the seed and the step.

A pass cuts the training tokens into windows whose inputs do not overlap, so that no token is predicted twice in it, and
goes through them in an order of its own. Each pass starts its first window elsewhere: what stood at a window's edge in
one pass stands inside one in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ablate.choice import SettingsError
from ablate.data import Corpus
from ablate.settings import TrainSettings


@dataclass(frozen=True)
class Batches:
    """The training batches of one seed. Nothing but the data, `seq_len`, `sequences` and the seed has a say in them."""

    tokens: np.ndarray
    seq_len: int
    sequences: int
    seed: int

    @classmethod
    def of(cls, corpus: Corpus, recipe: TrainSettings, seed: int) -> Batches:
        """The batches of a resolved recipe. Raises `SettingsError` where the corpus is too small for one."""
        check_corpus(corpus, recipe)
        return cls(corpus.train, recipe.length, recipe.batch_tokens // recipe.length, seed)

    @property
    def windows_per_pass(self) -> int:
        """Windows that fit wherever the first one starts; at least those of one step."""
        return max(self.sequences, len(self.tokens) // self.seq_len - 1)

    def windows(self, step: int) -> np.ndarray:
        """The `(sequences, seq_len + 1)` tokens of a step, which is counted from 1."""
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
    bytes_per_token: float | None = None

    @classmethod
    def of(cls, corpus: Corpus, recipe: TrainSettings) -> HeldOut:
        """At most `eval_tokens` tokens, but at least one window; what is left over at the end makes no window."""
        length = recipe.length
        available = (len(corpus.validation) - 1) // length
        wanted = available if recipe.eval_tokens is None else max(1, recipe.eval_tokens // length)
        count = min(available, wanted)
        starts = np.arange(count) * available // max(1, count) * length
        return cls(corpus.validation, length, starts, corpus.bytes_per_token)

    @property
    def n_tokens(self) -> int:
        """Tokens predicted in one evaluation."""
        return len(self.starts) * self.seq_len

    def chunks(self, sequences: int) -> Iterator[np.ndarray]:
        """All windows, at most `sequences` of them at once."""
        for first in range(0, len(self.starts), sequences):
            yield _gather(self.tokens, self.starts[first : first + sequences], self.seq_len)


def shifted(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets `(B, T)`. This is the one shift there is: the target of a token is the token after it."""
    return windows[:, :-1], windows[:, 1:]


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


def corpus_passes(corpus: Corpus, recipe: TrainSettings) -> float:
    """How often a whole run of a resolved recipe goes through the training tokens."""
    batches = Batches.of(corpus, recipe, seed=0)
    return recipe.n_steps * batches.sequences / batches.windows_per_pass


@lru_cache(maxsize=4)
def _pass(seed: int, number: int, windows: int, offsets: int) -> tuple[int, np.ndarray]:
    """A pass's offset and order, from raw PCG64 output, which numpy promises never to change."""
    # The spawn key keeps this stream apart from those of data that is itself made from a seed.
    raw = np.random.PCG64(np.random.SeedSequence((seed, number), spawn_key=(1,))).random_raw(windows + 1)
    return int(raw[0] % np.uint64(offsets)), raw[1:].argsort(kind="stable")


def _gather(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)

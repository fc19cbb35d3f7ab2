"""Random tokens, all equally likely: the check that nothing leaks.

No model can predict them, so over enough validation tokens no loss below ln(`vocab_size`) nats is honest, and a
uniform guess reaches exactly that. A validation loss well below it means that a position sees the token it is to
predict: a mask with a hole, labels that are not shifted. A training loss below it on few tokens is only memory.

The tokens are made from raw PCG64 output by integer arithmetic, which numpy promises to keep; its distributions it
may change. `seed` belongs to the data and has nothing to do with the seeds of trials.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from pydantic import Field

from ablate.choice import Whole
from ablate.data import Corpus, DataChoice, fingerprint


class Config(DataChoice):
    """Independent, uniform tokens."""

    vocab_size: Whole = Field(default=256, ge=2, le=2**20, description="how many different tokens")
    train_tokens: Whole = Field(default=1_000_000, ge=2, le=10**8, description="tokens to train on")
    validation_tokens: Whole = Field(default=100_000, ge=2, le=10**8, description="tokens held out")
    seed: Whole = Field(default=0, ge=0, description="of the tokens, not of a trial")

    def corpus(self) -> Corpus:
        """Both splits, from independent streams: the length of one does not change the other."""
        return _corpus(self.vocab_size, self.train_tokens, self.validation_tokens, self.seed)


@functools.lru_cache(maxsize=4)
def _corpus(vocab_size: int, train_tokens: int, validation_tokens: int, seed: int) -> Corpus:
    train = _uniform(vocab_size, train_tokens, (seed, 0))
    validation = _uniform(vocab_size, validation_tokens, (seed, 1))
    return Corpus(
        train=train,
        validation=validation,
        vocab_size=vocab_size,
        sha256=fingerprint({"vocab_size": vocab_size}, train, validation),
        bytes_per_token=None,
        description=(
            f"random tokens (seed {seed}), {train_tokens:,} to train on, {validation_tokens:,} held out; "
            f"no honest loss is below ln({vocab_size}) = {math.log(vocab_size):.4f}"
        ),
    )


def _uniform(vocab_size: int, count: int, entropy: tuple[int, int]) -> np.ndarray:
    raw = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    high_bits = raw >> np.uint64(32)
    tokens = high_bits * np.uint64(vocab_size) >> np.uint64(32)
    return tokens.astype(np.min_scalar_type(vocab_size - 1))

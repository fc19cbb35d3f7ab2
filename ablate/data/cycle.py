"""A cycle: 0, 1, ..., period - 1, 0, 1, ...: the check that a model learns and generates at all.

Each token determines the next, so a working model's loss falls to about 0 within some hundred steps; one whose loss
stays near ln(`period`) does not see its input. The loss alone cannot show that labels are shifted twice, since the
token after next is just as determined. Generating shows it: continued greedily from k, a right model gives
k + 1, k + 2, ...; one trained on labels shifted twice gives k + 2, k + 4, ... (mod `period`, hence at least 3), one
trained on labels not shifted gives k, k, .... `random_tokens` is the other half: it shows what leaks.

Validation goes on where training stops. It holds nothing new, so it says nothing about generalisation.
"""

from __future__ import annotations

import functools

import numpy as np
from pydantic import Field

from ablate.choice import Whole
from ablate.data import Corpus, DataChoice, fingerprint


class Config(DataChoice):
    """The numbers below `period`, over and over."""

    period: Whole = Field(default=16, ge=3, le=2**20, description="length of the cycle, and the vocabulary's size")
    train_tokens: Whole = Field(default=100_000, ge=2, le=10**8, description="tokens to train on")
    validation_tokens: Whole = Field(default=10_000, ge=2, le=10**8, description="tokens after those")

    def corpus(self) -> Corpus:
        """One run through the cycle, cut in two."""
        return _corpus(self.period, self.train_tokens, self.validation_tokens)


@functools.lru_cache(maxsize=4)
def _corpus(period: int, train_tokens: int, validation_tokens: int) -> Corpus:
    tokens = np.arange(train_tokens + validation_tokens) % period
    train, validation = np.split(tokens.astype(np.min_scalar_type(period - 1)), [train_tokens])
    return Corpus(
        train=train,
        validation=validation,
        vocab_size=period,
        sha256=fingerprint({"vocab_size": period}, train, validation),
        bytes_per_token=None,
        description=f"a cycle of {period} tokens, {train_tokens:,} to train on, then {validation_tokens:,} to validate",
    )

"""The `data` slot: where tokens come from. One file a source; each gives a `Corpus`, already split.

A source never sees a model and never imports torch: it reads, tokenises and splits, the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ablate.choice import Choice


@dataclass(frozen=True)
class Corpus:
    """Tokens of both splits, and what identifies them.

    `train` is `(N,)`, `validation` `(M,)`, of an unsigned integer type; both become read-only here, since sources
    hand out the same arrays again. `sha256` covers everything that determines the tokens and their split.
    `bytes_per_token` is that of the validation split, None where tokens are not text.
    """

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    sha256: str
    bytes_per_token: float | None
    description: str

    def __post_init__(self) -> None:
        self.train.setflags(write=False)
        self.validation.setflags(write=False)

    def for_tuning(self) -> Corpus:
        """What settings are chosen on: the training split alone, whose last tokens are held out in place of the
        validation split, as many as that has, but at most a fifth. No final number is of what a setting was chosen on.
        """
        held_out = min(len(self.validation), len(self.train) // 5)
        cut = len(self.train) - held_out
        origin = json.dumps({"for_tuning": self.sha256, "held_out": held_out}, sort_keys=True)
        return Corpus(
            train=self.train[:cut],
            validation=self.train[cut:],
            vocab_size=self.vocab_size,
            sha256=hashlib.sha256(origin.encode()).hexdigest(),
            bytes_per_token=None,
            description=f"for tuning, of the training split alone the last {held_out:,} tokens held out",
        )


class DataChoice(Choice):
    """Settings of one source of tokens."""

    def corpus(self) -> Corpus:
        """Read, tokenise and split. Raises `SettingsError` where the data cannot be used."""
        raise NotImplementedError(f"data '{self.name}' has no corpus()")


def fingerprint(origin: dict[str, Any], train: np.ndarray, validation: np.ndarray) -> str:
    """SHA-256 of both splits and of `origin` (JSON), the same on every machine and in every process."""
    digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode())
    for tokens in (train, validation):
        digest.update(f"\n{tokens.size} tokens of {tokens.itemsize} bytes\n".encode())
        digest.update(np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


Base = DataChoice

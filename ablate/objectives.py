"""What a family of models is taught with a window of text: its objective, as named inputs and targets.

A decoder tells each next token. An encoder fills in tokens that it is not shown (the masked language model of BERT:
Devlin et al., 2018, arXiv:1810.04805). An encoder-decoder reads the first half of a window and tells the second, being
given all that comes before each token (teacher forcing, Williams and Zipser, 1989; the target shifted right behind a
start token as in Vaswani et al., 2017, arXiv:1706.03762). Losses of different objectives do not compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from ablate.settings import ModelSettings

IGNORED = -100
"""A target of this value is not a token that enters the loss."""

Draw = Callable[[int], np.ndarray]
"""`draw(n)` gives each window `n` random 64-bit numbers `(B, n)` of its own, the same at every call."""


@dataclass(frozen=True)
class Batch:
    """Token ids `(B, …)` by the names of the model's arguments, and the token to tell at each place of its output."""

    inputs: dict[str, np.ndarray]
    targets: np.ndarray

    @property
    def n_targets(self) -> int:
        """Tokens that enter the loss."""
        return int((self.targets != IGNORED).sum())

    @property
    def arrays(self) -> list[np.ndarray]:
        """All that the model sees, then all that it is to tell."""
        return [*self.inputs.values(), self.targets]


class Objective(Protocol):
    """What makes batches of windows `(B, T + 1)`, of which `T` tokens count as processed."""

    tells_every_token: ClassVar[bool]
    """Whether every token of a text is told once over all its windows, so that a loss per byte has a meaning."""

    def batch(self, windows: np.ndarray, draw: Draw) -> Batch:
        """The windows as the model gets them."""


def special_token(model: ModelSettings) -> int:
    """The id that an encoder masks with, and an encoder-decoder starts with: the last of the vocabulary."""
    return model.shape.vocab_size - 1


def objective_of(model: ModelSettings, n_tokens: int) -> Objective:
    """The objective of a model's family, over text of `n_tokens` different tokens."""
    if model.family == "encoder":
        return MaskedTokens(special_token(model), n_tokens)
    return SecondHalf(special_token(model)) if model.family == "encoder_decoder" else NextToken()


def task_of(model: ModelSettings) -> str:
    """What a model is taught, in words: losses compare between models of one task alone."""
    if model.family == "encoder":
        return "masked tokens"
    told = "next tokens" if model.family == "decoder" else "a second half from the first"
    return told if model.is_causal else f"{told}, which it sees"


def shifted(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets `(B, T)`. This is the one shift there is: the target of a token is the token after it."""
    return tokens[:, :-1], tokens[:, 1:]


class NextToken:
    """Each token but the first, from those before it."""

    tells_every_token: ClassVar[bool] = True

    def batch(self, windows: np.ndarray, draw: Draw) -> Batch:
        """Inputs `(B, T)`; every place has a target."""
        inputs, targets = shifted(windows)
        return Batch({"input_ids": inputs}, targets)


CHOSEN = 0.15
"""The share of a window's tokens that are to be told, rounded to whole tokens, at least one."""


@dataclass(frozen=True)
class MaskedTokens:
    """A few tokens of each window, from all others: 80 % of them masked, 10 % replaced by any token, 10 % left."""

    mask: int
    n_tokens: int

    tells_every_token: ClassVar[bool] = False

    def batch(self, windows: np.ndarray, draw: Draw) -> Batch:
        """Inputs `(B, T)`, with a target at the chosen places alone."""
        text = windows[:, :-1]
        order, fate, other = draw(3 * text.shape[1]).reshape(len(text), 3, -1).swapaxes(0, 1)
        rank = order.argsort(axis=1, kind="stable").argsort(axis=1)
        chosen = rank < max(1, round(CHOSEN * text.shape[1]))
        tenth, any_token = fate % np.uint64(10), (other % np.uint64(self.n_tokens)).astype(text.dtype)
        shown = np.where(chosen & (tenth == 8), any_token, text)
        shown[chosen & (tenth < 8)] = self.mask
        return Batch({"input_ids": shown}, np.where(chosen, text, IGNORED))


@dataclass(frozen=True)
class SecondHalf:
    """The second half of each window, from the first and from what comes before in the second."""

    start: int

    tells_every_token: ClassVar[bool] = False

    def batch(self, windows: np.ndarray, draw: Draw) -> Batch:
        """The source `(B, T // 2)` and the decoder's inputs, the rest shifted right; every place there has a target."""
        source, rest = np.split(windows[:, :-1], [(windows.shape[1] - 1) // 2], axis=1)
        written, targets = shifted(np.pad(rest, ((0, 0), (1, 0)), constant_values=self.start))
        return Batch({"input_ids": source, "decoder_input_ids": written}, targets)

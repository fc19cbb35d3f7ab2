"""What is measured beside training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated

from pydantic import BeforeValidator, Field

from ablate.choice import Count, Settings, SettingsError


class PrefillSettings(Settings):
    """Reading a prompt: every batch with every length."""

    batch: list[Count] = Field([1], min_length=1, description="sequences at once")
    tokens: list[Count] = Field(min_length=1, description="tokens of a prompt")


def _listed(value: object) -> object:
    """A single number stands for a list of one."""
    return value if isinstance(value, list) else [value]


class DecodeSettings(Settings):
    """Writing token by token: every batch with every context and every number of new tokens."""

    batch: list[Count] = Field([1], min_length=1, description="sequences at once")
    context: list[Count] = Field(min_length=1, description="tokens in the cache before the first new one")
    new_tokens: Annotated[list[Count], BeforeValidator(_listed)] = Field(
        [32], min_length=1, description="tokens written; a number or several"
    )

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """Every batch, context and number of new tokens that is measured."""
        return list(product(self.batch, self.context, self.new_tokens))

    @property
    def timed_cell(self) -> tuple[int, int, int] | None:
        """The first that has a further token to time, which is what is told of decoding outside of the profile."""
        return next((cell for cell in self.cells if cell[2] > 1), None)


class ProfileSettings(Settings):
    """What is measured beside training."""

    prefill: PrefillSettings | None = None
    decode: DecodeSettings | None = None
    lengths: list[Annotated[Count, Field(ge=2)]] = Field(
        [], description="sequence lengths over which the growth of time and memory is measured; 2 or more"
    )
    rounds: Count = Field(3, description="times that each cell is measured, after one warm-up")
    repeats: Count | None = Field(
        None,
        description="rounds in which every variant is timed again in a fresh process, one after the other, the "
        "baseline first and last",
    )
    max_batch: bool = Field(False, description="whether the largest batch and sequence are sought that training fits")

    def faults(self, max_seq_len: int) -> list[SettingsError]:
        """Lengths beyond what the model can take, too few to see a growth, and what would be measured twice."""
        found = [*self._doubled()]
        for tokens in self.prefill.tokens if self.prefill else []:
            if tokens > max_seq_len:
                message = f"prefill of {tokens} tokens is more than max_seq_len {max_seq_len}"
                cure = "raise max_seq_len or shorten the prompt"
                found.append(SettingsError(("prefill", "tokens"), message, cure))
        for _, context, new_tokens in self.decode.cells if self.decode else []:
            if (total := context + new_tokens) > max_seq_len:
                message = f"context + new_tokens is {total}, more than max_seq_len {max_seq_len}"
                cure = f"raise max_seq_len, or lower context {context} or new_tokens {new_tokens}"
                found.append(SettingsError(("decode", "context"), message, cure))
        return [*found, *self._length_faults(max_seq_len)]

    def _doubled(self) -> Iterator[SettingsError]:
        """A cell that is there twice would pass for one of twice as many trials."""
        for part, cells in (("prefill", self.prefill), ("decode", self.decode)):
            for name, values in cells or ():
                if again := next((each for place, each in enumerate(values) if each in values[:place]), None):
                    yield SettingsError((part, name), f"{part}.{name} has {again} twice", "give each number once")

    def _length_faults(self, max_seq_len: int) -> Iterator[SettingsError]:
        for place, length in enumerate(self.lengths):
            if length > max_seq_len:
                message = f"a length of {length} tokens is more than max_seq_len {max_seq_len}"
                yield SettingsError(("lengths", place), message, "raise max_seq_len or take the length out")
        if len(set(self.lengths)) == 1:
            message = f"one length, {self.lengths[0]}, shows no growth"
            yield SettingsError(("lengths",), message, "give at least two different lengths, or none")

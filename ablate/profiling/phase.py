"""The phase of a trial that profiles: all that the file asks for under `profile`, one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ablate.batches import HeldOut
from ablate.data import Corpus
from ablate.job import Peaks
from ablate.model import Transformer
from ablate.objectives import Batch, Objective
from ablate.profiling import decode, kernels, lengths
from ablate.profiling.clock import Clock, clock_for
from ablate.profiling.energy import EnergyMeter, decode_joules_per_token
from ablate.profiling.surroundings import Surroundings
from ablate.settings import DecodeSettings, ProfileSettings, VariantSettings
from ablate.train import on_device

DECODE_SECONDS = "decode_seconds_per_token_p50"


def held_out_tokens(corpus: Corpus, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Held-out token ids `(batch, tokens)` on the device."""
    return on_device(np.resize(corpus.validation, (batch, tokens)).astype(np.int64), device)


@dataclass(frozen=True)
class ProfilePhase:
    """What is measured with, and who is told: `tell` takes columns of `trials`, `keep` rows of `profiles`.

    `ran` takes the names of kernels by phase.
    """

    settings: VariantSettings
    corpus: Corpus
    objective: Objective
    device: torch.device
    peaks: Peaks
    meter: EnergyMeter | None
    tell: Callable[[dict[str, Any]], None]
    keep: Callable[[list[dict[str, Any]]], None]
    ran: Callable[..., None]

    def run(self, model: Transformer) -> tuple[str | None, list[str]]:
        """Measure and tell. What is wrong with the cache, so that nothing is measured, and what else is wrong."""
        asked, precision, clock = self.settings.profile, self.settings.train.precision, clock_for(self.device)
        wrong = decode.cache_mismatch(model, asked.decode, self._prompts) if asked.decode else None
        if wrong:
            return wrong, []
        around = Surroundings(self.device)
        around.begin()
        problems = self._measure(model, asked, precision, clock, around.sample)
        around.sample()
        self.tell({"profile_conditions": json.dumps(around.columns())})
        return None, problems

    def _measure(
        self,
        model: Transformer,
        asked: ProfileSettings,
        precision: str,
        clock: Clock,
        between: Callable[[], None],
    ) -> list[str]:
        """Measure and tell; what is wrong. `between` is called where nothing is measured."""
        timed = decode.as_served(model, precision)
        found = decode.profile(timed, asked, precision, self._prompts, clock, self.peaks.copy_bytes_per_second)
        self.keep(found.rows)
        self.tell(found.columns)
        between()
        if asked.prefill:
            first = self._prompts(asked.prefill.batch[0], asked.prefill.tokens[0])
            self.ran(prefill=kernels.prefill_kernels(timed, first))
        if asked.decode:
            first = self._prompts(asked.decode.batch[0], asked.decode.context[0])
            self.ran(decode=kernels.decoding_kernels(timed, first))
            joules = self._decode_energy(timed, asked.decode, clock)
            self.tell({"decode_energy_joules_per_token": joules})
        if asked.lengths:
            recipe = self.settings.train
            self.keep([*lengths.profile(model, timed, recipe, asked.lengths, asked.rounds, self._sequence, clock)])
        return found.problems

    def _prompts(self, batch: int, tokens: int) -> torch.Tensor:
        return held_out_tokens(self.corpus, batch, tokens, self.device)

    def _sequence(self, tokens: int) -> Batch:
        """A held-out window of so many tokens, which goes round where there are fewer."""
        window = np.resize(self.corpus.validation, tokens + 1)
        return next(HeldOut(window, tokens, np.zeros(1, np.int64), self.objective).batches(1))

    def _decode_energy(self, model: Transformer, asked: DecodeSettings, clock: Clock) -> float | None:
        """In the cell whose times stand beside it."""
        if self.meter is None:
            return None
        batch, context, new_tokens = asked.timed_cell or asked.cells[0]
        return decode_joules_per_token(model, self._prompts(batch, context), new_tokens, self.meter, clock)


def required_columns(settings: ProfileSettings) -> list[str]:
    """The columns without which a profile is not complete."""
    names = ["prefill_tokens_per_second", "prefill_seconds_p50"] if settings.prefill else []
    if settings.decode:
        names += ["kv_cache_bytes_measured", "kv_cache_bytes_allocated", "kv_cache_bytes_held"]
        names += ["time_to_first_token_seconds_p50"]
        names += ["decode_tokens_per_second", DECODE_SECONDS] if settings.decode.timed_cell else []
    return names

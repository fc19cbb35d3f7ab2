"""How rotary frequencies are slowed down for sequences longer than a model was trained on.

The rules are those that published models were made with, to the last rounding of a bound.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ablate.choice import Real, Settings, SettingsError, Size

_MEANT: dict[str, dict[str, float | None]] = {
    "linear": {},
    "ntk": {},
    "yarn": {"original_max_seq_len": None, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
    "llama3": {"original_max_seq_len": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""The settings that a rule has beside its factor, with their defaults."""


class RopeScaling(Settings):
    """One rule; settings that it does not have are null, whatever is written."""

    kind: Literal["linear", "ntk", "yarn", "llama3"] = Field(description="the rule")
    factor: Real = Field(ge=1, description="how much longer sequences become")
    original_max_seq_len: Size | None = Field(None, description="yarn, llama3: the length trained on")
    beta_fast: Real | None = Field(None, gt=0, description="yarn: pairs with more turns in it keep theirs; 32")
    beta_slow: Real | None = Field(None, gt=0, description="yarn: pairs with fewer are slowed by the whole factor; 1")
    attention_factor: Real | None = Field(
        None, gt=0, description="yarn: multiplies what is turned; 0.1 ln(factor) + 1 unless given"
    )
    low_freq_factor: Real | None = Field(
        None, gt=0, description="llama3: pairs with fewer turns are slowed by the whole factor; 1"
    )
    high_freq_factor: Real | None = Field(None, gt=0, description="llama3: pairs with more turns keep theirs; 4")

    @model_validator(mode="after")
    def _is_a_rule(self) -> Self:
        """Equal rules are written alike; what one does not have must be right all the same."""
        meant = _MEANT[self.kind]
        for name in {name for settings in _MEANT.values() for name in settings}:
            given = getattr(self, name) if name in meant else None
            self.__dict__[name] = meant.get(name) if given is None else given
        if "original_max_seq_len" in _MEANT[self.kind] and self.original_max_seq_len is None:
            raise SettingsError((), f"scaling {self.kind} needs original_max_seq_len", "give the length trained on")
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            below, above = getattr(self, low), getattr(self, high)
            if below is not None and above is not None and below >= above:
                raise SettingsError((), f"{low} {below:g} must be less than {high} {above:g}", f"lower {low}")
        return self

    def numbers(self, *names: str) -> list[float]:
        """Settings that the rule has."""
        return [float(getattr(self, name)) for name in names]

    @property
    def amplitude(self) -> float:
        """What turned queries and keys are multiplied with."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0


def frequencies(dim: int, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians that each of `dim` / 2 pairs turns by from one position to the next, in float64."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    if scaling is not None and scaling.kind == "ntk":
        base, scaling = base * scaling.factor ** (dim / (dim - 2)), None
    plain: Tensor = base**-pairs
    if scaling is None:
        return plain
    slowed = plain / scaling.factor
    if scaling.kind == "linear":
        return slowed
    share = _yarn_share(dim, base, scaling) if scaling.kind == "yarn" else _llama3_share(plain, scaling)
    return share * plain + (1 - share) * slowed


def _yarn_share(dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """How much of its frequency each pair keeps: all, none, or by its number in between (Peng et al., 2023,
    arXiv:2309.00071)."""
    trained, beta_fast, beta_slow = scaling.numbers("original_max_seq_len", "beta_fast", "beta_slow")

    def pair_of(turns: float) -> float:
        """The pair, not a whole number, that makes so many turns in the length trained on."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_of(beta_fast)), 0)
    last = min(math.ceil(pair_of(beta_slow)), dim - 1)
    width = last - first or 1
    numbers = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    return 1 - ((numbers - first) / width).clamp(0, 1)


def _llama3_share(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """The same by the turns that a pair makes in the length trained on (Grattafiori et al., 2024, arXiv:2407.21783)."""
    trained, low, high = scaling.numbers("original_max_seq_len", "low_freq_factor", "high_freq_factor")
    turns = trained * plain / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)

"""What `match` says: which budget every variant gets, how nearly, and by which setting."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ablate.choice import Rate, Settings, SettingsError


class MatchSettings(Settings):
    """A budget, with the largest relative mismatch that may remain, and the setting that is solved for."""

    params: Rate | None = Field(None, description="all parameters")
    params_active: Rate | None = Field(None, description="parameters that a token meets")
    flops_per_token: Rate | None = Field(None, description="FLOPs of a token's forward pass at the training length")
    kv_cache_bytes_per_token: Rate | None = Field(None, description="bytes that a cache grows by with a token")
    by: str = Field(description="the setting of the model that is solved for, a whole number")

    @property
    def budget(self) -> str:
        """Which of them it is."""
        return next(name for name in TARGETS if getattr(self, name) is not None)

    @property
    def tolerance(self) -> float:
        """The largest relative mismatch."""
        return float(getattr(self, self.budget))

    @model_validator(mode="after")
    def _says_one_budget(self) -> Self:
        if sum(getattr(self, name) is not None for name in TARGETS) != 1:
            cure = "write a list, with one budget in each of its mappings, for several"
            raise SettingsError((), f"exactly one of {', '.join(TARGETS)} is to be matched", cure)
        return self


TARGETS = tuple(name for name in MatchSettings.model_fields if name != "by")

"""Settings of what is made of several networks of the slot: what moe and soft_mixture share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

from pydantic import Field

from ablate import registry
from ablate.choice import Problem, SettingsError, Shape, Size
from ablate.feed_forward import FeedForwardChoice


class MixtureChoice(FeedForwardChoice):
    """Settings that the members share."""

    mixes: ClassVar[bool] = True
    grows: ClassVar[tuple[str, ...]] = ("d_ff",)

    n_experts: Size = Field(8, le=2**13, description="number of experts that a router weighs")
    expert: str = Field("swiglu", description="the feed_forward choice that an expert is")
    d_ff: Size | None = Field(None, description="width of one expert; that choice's own default unless given")

    def resolve(self, shape: Shape) -> Self:
        """The experts' width as a number."""
        return self.model_copy(update={"d_ff": getattr(self.one_expert(shape), "d_ff", self.d_ff)})

    def problems(self, shape: Shape) -> Sequence[Problem]:
        """Experts that cannot be."""
        expert = self.one_expert(shape)
        if expert.mixes:
            message = f"expert '{self.expert}' is itself made of experts"
            return [SettingsError((), message, "choose a network that is not")]
        return expert.problems(shape)

    def one_expert(self, shape: Shape, times: int = 1) -> FeedForwardChoice:
        """One expert's own settings; `times` as wide."""
        raw: dict[str, Any] = {"name": self.expert} | ({} if self.d_ff is None else {"d_ff": self.d_ff})
        expert = cast(FeedForwardChoice, registry.configure("feed_forward", raw, ("expert",))).resolve(shape)
        return expert if times == 1 else expert.model_copy(update={"d_ff": times * getattr(expert, "d_ff", 0)})

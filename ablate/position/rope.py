"""Rotary embedding: queries and keys turned by their position (Su et al., 2021, arXiv:2104.09864).

The layout says what is a pair: dimensions i and i + d/2 (`half`: GPT-NeoX, and LLaMA in its released form), or 2i and
2i + 1 (`interleaved`: the paper, GPT-J, DeepSeek-V2). A fraction below 1 leaves the last dimensions of a head as they
are (GPT-J, GPT-NeoX, Phi-2).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ablate.choice import Real, SettingsError, Shape
from ablate.position import Position, PositionChoice
from ablate.position._rope_scaling import RopeScaling as RopeScaling
from ablate.position._rope_scaling import frequencies

Layout = Literal["half", "interleaved"]


class Rotary(Position):
    """Rotates pair i of `dim` / 2 pairs by position · base^(-2i/dim), so that scores depend on distances alone.

    What a head has beyond its first `dim` dimensions stays as it is.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, layout: Layout = "half", scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.dim, self.base, self.layout, self.scaling = dim, base, layout, scaling
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Turn `x` `(B, H, T, d)`, d >= dim; in float32 at least, whatever the dtype of `x`."""
        cos, sin = self._turns(start, start + x.shape[-2], x.device, torch.promote_types(x.dtype, torch.float32))
        inner, outer = x[..., : self.dim].to(cos.dtype), x[..., self.dim :]
        one, other = inner.chunk(2, dim=-1) if self.layout == "half" else inner.unflatten(-1, (-1, 2)).unbind(-1)
        pair = (one * cos - other * sin, other * cos + one * sin)
        turned = torch.cat(pair, dim=-1) if self.layout == "half" else torch.stack(pair, dim=-1).flatten(-2)
        return torch.cat([turned.to(x.dtype), outer], dim=-1) if outer.shape[-1] else turned.to(x.dtype)

    def _turns(self, start: int, end: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines `(T, dim / 2)`, from a table that grows with the sequence."""
        place = (device, dtype)
        if place not in self._tables or len(self._tables[place][0]) < end:
            self._tables[place] = self._table(2 * end, device, dtype)
        cos, sin = self._tables[place]
        return cos[start:end], sin[start:end]

    @torch.inference_mode(False)  # a table first needed by an evaluation must serve training too
    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, dtype=torch.float64, device="cpu")
        angles = positions[:, None] * frequencies(self.dim, self.base, self.scaling)
        amplitude = self.scaling.amplitude if self.scaling else 1.0
        return (amplitude * angles.cos()).to(device, dtype), (amplitude * angles.sin()).to(device, dtype)


class Config(PositionChoice):
    """Settings of the rotation."""

    needs: ClassVar[frozenset[str]] = frozenset({"rotate"})
    base: Real = Field(10000.0, gt=1, description="the slowest pair turns once in 2π times this")
    fraction: Real = Field(1.0, gt=0, le=1, description="part of a head that is turned, from its first dimension on")
    layout: Layout = Field("half", description="what is a pair: i and i + d/2, or 2i and 2i + 1")
    scaling: RopeScaling | None = Field(None, description="for sequences longer than trained on: {kind, factor, …}")

    def problems(self, shape: Shape, rotary_dim: int) -> list[SettingsError]:
        """Pairs need an even width."""
        width = self.width(rotary_dim)
        at = () if self.fraction == 1 else ("fraction",)
        cure = "give the attention an even width of heads, or change d_model or n_heads"
        if width % 2:
            return [SettingsError(at, f"the rotated width of a head is {width}, which is odd", cure)]
        if not width:
            return [SettingsError(at, f"nothing is rotated of heads of width {rotary_dim}", "raise fraction")]
        if width == 2 and self.scaling and self.scaling.kind == "ntk":
            message = "scaling ntk spreads a factor over the pairs after the first, and there is only one pair"
            return [SettingsError(("scaling",), message, "take another kind")]
        return []

    def width(self, rotary_dim: int) -> int:
        """Dimensions of a head that are turned."""
        return int(rotary_dim * self.fraction)

    def build(self, shape: Shape, rotary_dim: int) -> Rotary:
        """The module; it has no parameters."""
        return Rotary(self.width(rotary_dim), self.base, self.layout, self.scaling)

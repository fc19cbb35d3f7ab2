"""Rotary embedding: queries and keys turned by their position (Su et al., 2021, arXiv:2104.09864).

Dimension i is paired with i + d/2 (the half-split layout of GPT-NeoX and LLaMA in its released form).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ablate.choice import Real, SettingsError, Shape
from ablate.position import Position, PositionChoice


class Rotary(Position):
    """Rotates pair i of `dim` / 2 pairs by position · base^(-2i/dim), so that scores depend on distances alone."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Turn `x` `(B, H, T, dim)`; in float32 at least, whatever the dtype of `x`."""
        cos, sin = self._turns(start, start + x.shape[-2], x.device, torch.promote_types(x.dtype, torch.float32))
        low, high = x.to(cos.dtype).chunk(2, dim=-1)
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        return turned.to(x.dtype)

    def _turns(self, start: int, end: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines `(T, dim / 2)`, from a table that grows with the sequence."""
        place = (device, dtype)
        if place not in self._tables or len(self._tables[place][0]) < end:
            self._tables[place] = self._table(2 * end, device, dtype)
        cos, sin = self._tables[place]
        return cos[start:end], sin[start:end]

    @torch.inference_mode(False)  # a table first needed by an evaluation must serve training too
    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pairs = torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
        angles = torch.arange(length, dtype=torch.float64)[:, None] * self.base**-pairs
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class Config(PositionChoice):
    """Settings of the rotation."""

    needs: ClassVar[frozenset[str]] = frozenset({"rotate"})
    base: Real = Field(10000.0, gt=1, description="the slowest pair turns once in 2π times this")

    def problems(self, shape: Shape, rotary_dim: int) -> list[SettingsError]:
        """Pairs need an even width."""
        message = f"the rotated width of a head is {rotary_dim}, which is odd"
        cure = "give the attention an even width of heads, or change d_model or n_heads"
        return [SettingsError((), message, cure)] if rotary_dim % 2 else []

    def build(self, shape: Shape, rotary_dim: int) -> Rotary:
        """The module; it has no parameters."""
        return Rotary(rotary_dim, self.base)

"""A learned vector a position, added to the embedding (Gehring et al., 2017, arXiv:1705.03122; GPT-2 and BERT).

OPT's first position is row 2 of its table (`offset: 2`), as is RoBERTa's, which counts only tokens that are not padding
(`padding_id: 1`). That count needs every token before: a cache does not hold their ids, so that only a stack that reads
its sequence as a whole may have a `padding_id`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.choice import SettingsError, Shape, Whole
from ablate.position import Position, PositionChoice


class Learned(Position):
    """Adds row `offset` + p of a table at position p < `max_seq_len`; a later position does not exist.

    With a `padding_id`, p is the number of other tokens before a token, and this one itself gets row `offset` - 1.
    """

    def __init__(self, max_seq_len: int, d_model: int, offset: int = 0, padding_id: int | None = None) -> None:
        super().__init__()
        self.max_seq_len, self.offset, self.padding_id = max_seq_len, offset, padding_id
        self.table = nn.Embedding(max_seq_len + offset, d_model)

    def embed(self, x: Tensor, start: int, ids: Tensor) -> Tensor:
        """`(B, T, D)` plus a row a token. Raises ValueError past the end of the table, or where it cannot count."""
        if (end := start + x.shape[1]) > self.max_seq_len:
            raise ValueError(f"{end} positions are asked of a table of {self.max_seq_len}")
        if self.padding_id is None:
            return x + self.table.weight[self.offset + start : self.offset + end]
        if start:
            raise ValueError("positions that count tokens which are not padding need all tokens at once")
        real = ids != self.padding_id
        rows: Tensor = self.table(torch.where(real, real.cumsum(-1), 0) + self.offset - 1)
        return x + rows


class Config(PositionChoice):
    """Settings of the table."""

    embeds: ClassVar[bool] = True
    offset: Whole = Field(0, ge=0, le=2**24, description="rows of the table before that of the first position")
    padding_id: Whole | None = Field(
        None, ge=0, description="token that positions do not count, and that has row `offset` - 1; encoders only"
    )

    def problems(self, shape: Shape, rotary_dim: int) -> list[SettingsError]:
        """Tokens that cannot be counted, or have no row."""
        if self.padding_id is None:
            return []
        found = []
        if shape.causal:
            message = "positions that count tokens which are not padding need all tokens at once, and a decoder has not"
            found.append(SettingsError(("padding_id",), message, "leave padding_id out"))
        if self.padding_id >= shape.vocab_size:
            message = f"padding_id {self.padding_id} is none of {shape.vocab_size} tokens"
            found.append(SettingsError(("padding_id",), message, f"at most {shape.vocab_size - 1}"))
        if self.offset < 1:
            message = "padding has the row before the first position's, and there is none with offset 0"
            found.append(SettingsError(("offset",), message, "give an offset of 1 or more, as padding_id + 1"))
        return found

    def build(self, shape: Shape, rotary_dim: int) -> Learned:
        """The module."""
        return Learned(shape.max_seq_len, shape.d_model, self.offset, self.padding_id)

    def params(self, shape: Shape, rotary_dim: int) -> int:
        """The table."""
        return (shape.max_seq_len + self.offset) * shape.d_model

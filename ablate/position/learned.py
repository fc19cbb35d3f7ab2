"""A learned vector a position, added to the embedding (Gehring et al., 2017, arXiv:1705.03122; GPT-2 and BERT)."""

from __future__ import annotations

from torch import Tensor, nn

from ablate.choice import Shape
from ablate.position import Position, PositionChoice


class Learned(Position):
    """Adds row p of a table of `max_seq_len` rows at position p; a later position does not exist."""

    def __init__(self, max_seq_len: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_seq_len, d_model)

    def embed(self, x: Tensor, start: int) -> Tensor:
        """`(B, T, D)` plus the rows `(T, D)`. Raises ValueError past the end of the table."""
        if (end := start + x.shape[1]) > self.table.num_embeddings:
            raise ValueError(f"{end} positions are asked of a table of {self.table.num_embeddings}")
        return x + self.table.weight[start:end]


class Config(PositionChoice):
    """No settings: the table has max_seq_len rows."""

    def build(self, shape: Shape, rotary_dim: int) -> Learned:
        """The module."""
        return Learned(shape.max_seq_len, shape.d_model)

    def params(self, shape: Shape) -> int:
        """The table."""
        return shape.max_seq_len * shape.d_model

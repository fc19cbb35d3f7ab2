"""Parallel: all sublayers read the same input and are summed (GPT-J; PaLM, 2022, arXiv:2204.02311)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ablate.block import Block, BlockChoice, Function
from ablate.choice import Shape


class Parallel(Block):
    """x + Σ f(norm(x)) over the sublayers f, with one norm for all of them or one for each."""

    def forward(self, x: Tensor, norms: Sequence[Function], sublayers: Sequence[Function]) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        inputs = [norm(x) for norm in norms]
        if len(inputs) == 1:
            inputs *= len(sublayers)
        for read, sublayer in zip(inputs, sublayers, strict=True):
            x = x + self.dropout(sublayer(read))
        return x


class Config(BlockChoice):
    """Settings of the parallel block. The stack ends in a final norm."""

    final_norm: ClassVar[bool] = True
    shared_norm: bool = Field(True, description="one norm for all sublayers (GPT-J, PaLM); else one for each (NeoX)")

    def n_norms(self, n_sublayers: int) -> int:
        """One, or one a sublayer."""
        return 1 if self.shared_norm else n_sublayers

    def build(self, shape: Shape) -> Parallel:
        """The module."""
        return Parallel(shape.residual_dropout)

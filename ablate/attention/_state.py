"""The cache of a mixer whose past is a state of fixed size, however many tokens it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class State:
    """Tensors of one layer, 0 before the first token, that are replaced as tokens come: the sum of `length` of them."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.length = 0

    def replace(self, tensors: Sequence[Tensor], tokens: int) -> None:
        """Take the state behind `tokens` further tokens."""
        for kept, new in zip(self.tensors, tensors, strict=True):
            kept.copy_(new.detach())
        self.length += tokens

    def written_bytes(self) -> int:
        """Bytes of the state, read off the live tensors: all of it holds from the start."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def allocated_bytes(self) -> int:
        """Bytes held: the same."""
        return self.written_bytes()

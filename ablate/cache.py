"""A cache of past tokens: allocated once, written in place, read up to the live length."""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """Buffers of one layer, each `(B, …, tokens, width)`, of which the first `length` tokens are written."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.buffers = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.length = 0

    def append(self, *entries: Tensor) -> list[Tensor]:
        """Write the entries `(B, …, T, width)` of new tokens; views of everything written so far."""
        end = self.length + entries[0].shape[-2]
        if end > (room := self.buffers[0].shape[-2]):
            raise ValueError(f"the cache has room for {room} tokens, not for {end}")
        for buffer, entry in zip(self.buffers, entries, strict=True):
            buffer[..., self.length : end, :] = entry
        self.length = end
        return self.views()

    def views(self) -> list[Tensor]:
        """The written part of each buffer."""
        return [buffer[..., : self.length, :] for buffer in self.buffers]

    def written_bytes(self) -> int:
        """Bytes of the entries written, read off the live tensors."""
        return sum(view.numel() * view.element_size() for view in self.views())

    def allocated_bytes(self) -> int:
        """Bytes held, written or not."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

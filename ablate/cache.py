"""A cache of past tokens: allocated once, written in place, read up to the live length."""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """Buffers of one layer, each `(B, …, tokens, width)`, of which the last tokens seen are kept.

    There are `length` tokens so far. Without a `window` all of them are kept; with one the last `window` are, in order,
    and no more room than that is taken.
    """

    def __init__(
        self, *shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device, window: int | None = None
    ) -> None:
        rooms = [(*shape[:-2], min(window or shape[-2], shape[-2]), shape[-1]) for shape in shapes]
        self.buffers = [torch.empty(shape, dtype=dtype, device=device) for shape in rooms]
        self.tokens, self.window = shapes[0][-2], window
        self.length = self.kept = 0

    def append(self, *entries: Tensor) -> list[Tensor]:
        """Take in the entries `(B, …, T, width)` of new tokens; everything that they may need, themselves included.

        That is a view of what was written, or with a window what was kept and the new ones. It ends with the last new
        token. Raises ValueError where there is no room.
        """
        new = entries[0].shape[-2]
        if self.length + new > self.tokens:
            raise ValueError(f"the cache has room for {self.tokens} tokens, not for {self.length + new}")
        self.length += new
        if self.kept + new <= self.buffers[0].shape[-2]:
            self._write(self.kept, entries)
            return self.views()
        room = self.buffers[0].shape[-2]
        seen = [view[..., max(0, self.kept - room + 1) :, :] for view in self.views()]
        whole = [torch.cat(pair, dim=-2) for pair in zip(seen, entries, strict=True)]
        self._write(0, [each[..., -room:, :] for each in whole])
        return whole

    def _write(self, place: int, entries: list[Tensor] | tuple[Tensor, ...]) -> None:
        end = place + entries[0].shape[-2]
        for buffer, entry in zip(self.buffers, entries, strict=True):
            buffer[..., place:end, :] = entry
        self.kept = end

    def views(self) -> list[Tensor]:
        """The written part of each buffer: the last tokens kept."""
        return [buffer[..., : self.kept, :] for buffer in self.buffers]

    def written_bytes(self) -> int:
        """Bytes of the entries written, read off the live tensors."""
        return sum(view.numel() * view.element_size() for view in self.views())

    def allocated_bytes(self) -> int:
        """Bytes held, written or not."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

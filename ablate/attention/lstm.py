"""LSTM in attention's place (Hochreiter and Schmidhuber, 1997; as in Zaremba et al., 2014, arXiv:1409.2329).

Long short-term memory with the usual cell: input, forget and output gates, no peepholes; the forget gate starts open.
An output projection ends it, as it ends every attention: the cell alone cannot say more than ±1.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ablate.attention import AttentionChoice
from ablate.attention._state import State
from ablate.choice import SettingsError, Shape
from ablate.position import Position


class LSTM(nn.Module):
    """One recurrent layer of width D and its output projection, `(B, T, D)` to `(B, T, D)`. Padding is skipped."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)
        self.out = nn.Linear(d_model, d_model, bias=False)
        _, _, of_input, of_output = self.lstm.all_weights[0]
        with torch.no_grad():
            of_output.zero_()
            of_input.zero_()[d_model : 2 * d_model] += 1

    def forward(
        self,
        x: Tensor,
        position: Position,
        start: int,
        mask: Tensor | None = None,
        cache: State | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Read the tokens of `x` from left to right; see `ablate.attention` for the arguments."""
        before = cache or self.new_cache(len(x), 0, x.dtype, x.device)
        dtype = self._dtype(x)
        state = tuple(tensor.to(dtype) for tensor in before.tensors)
        if mask is None:
            y, state = self.lstm(x.to(dtype), state)
        else:
            y, state = self._skipping(x.to(dtype), mask[:, -x.shape[1] :], state)
        if cache is not None:
            cache.replace(state, x.shape[1])
        out: Tensor = self.out(y)
        return out

    def _skipping(self, x: Tensor, real: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Real tokens are moved to the front and back again; padding gives 0, a row of nothing else keeps its state."""
        order = (~real).long().argsort(dim=1, stable=True)[..., None].expand_as(x)
        lengths = real.sum(1)
        packed = pack_padded_sequence(
            x.gather(1, order), lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        run, after = self.lstm(packed, state)
        y, _ = pad_packed_sequence(run, batch_first=True, total_length=x.shape[1])
        y = torch.zeros_like(y).scatter(1, order, y) * real[..., None]
        some = (lengths > 0)[:, None]
        return y, tuple(torch.where(some, new, old) for new, old in zip(after, state, strict=True))

    def _dtype(self, x: Tensor) -> torch.dtype:
        """The weights', or autocast's: on the CPU the fused kernel is not cast by it as a whole."""
        kind = x.device.type
        lowered = torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if lowered else self.out.weight.dtype

    def matrices(self) -> list[Tensor]:
        """What initialisation draws: the two matrices of each gate."""
        return [gate for weight in self.lstm.all_weights[0][:2] for gate in weight.detach().chunk(4)]

    def value_path(self) -> list[Tensor]:
        """The weights that values go through, `(rows, columns)` each: into the cell, and out of the layer."""
        return [self.matrices()[2], self.out.weight.detach()]

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> State:
        """The output and the cell before the first token."""
        shape = (1, batch, self.out.in_features)
        return State(shape, shape, dtype=dtype, device=device)


class Config(AttentionChoice):
    """No settings but `causal`, which it always is: it reads from left to right, and no position is needed."""

    offers: ClassVar[frozenset[str]] = frozenset()

    def problems(self, shape: Shape) -> list[SettingsError]:
        """Dropout of attention weights, which it does not have."""
        message = f"attention {self.name} has no attention weights that dropout could drop"
        return [SettingsError((), message, "set dropout.attention to 0")] if shape.attention_dropout else []

    def rotary_dim(self, shape: Shape) -> int:
        """There is nothing to rotate."""
        return 0

    def build(self, shape: Shape) -> LSTM:
        """The module."""
        return LSTM(shape.d_model)

    def params(self, shape: Shape) -> int:
        """Four gates, each with two matrices and torch's two biases, and the output projection."""
        return 9 * shape.d_model**2 + 8 * shape.d_model

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True, source_tokens: int = 0) -> dict[str, float]:
        """Every matrix once a token."""
        square = 2.0 * shape.d_model**2
        return {"attention.recurrence": 8 * square, "attention.projections": square}

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """The output and the cell, however many tokens."""
        return 2 * shape.d_model

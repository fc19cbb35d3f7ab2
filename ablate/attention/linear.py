"""Linear attention: softmax gives way to a product of features, elu + 1 (Katharopoulos et al., 2020, arXiv:2006.16236).

Sums over keys can then be taken once: what a query needs of the past is Σ φ(k) vᵀ and Σ φ(k), a state of fixed size.
Training runs chunk by chunk: scores within a chunk, the state for all chunks before it. Rotary positions turn the
features in the numerator alone, which keeps the denominator positive (RoFormer, Su et al., 2021, arXiv:2104.09864).
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ablate.attention import AttentionChoice, even_head_dim, share_of_heads, visible_keys
from ablate.attention._state import State
from ablate.choice import Real, SettingsError, Shape, Size
from ablate.linear import PackedLinear
from ablate.position import Position

CHUNK = 64


class LinearAttention(nn.Module):
    """Σ φ(q)·φ(k) v / (Σ φ(q)·φ(k) + eps) with φ = elu + 1, `(B, T, D)` to `(B, T, D)`.

    The sums run over the tokens up to the query's own, over all where it is not `causal`, and over those of the other
    sequence in a `cross` module. A query that sees no token gets 0.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int,
        bias: bool | Literal["qkv"] = False,
        causal: bool = True,
        *,
        cross: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, head_dim
        self.causal, self.cross, self.eps = causal, cross, eps
        width = n_heads * head_dim
        if cross:
            self.q = nn.Linear(d_model, width, bias=bool(bias))
            self.kv = PackedLinear(d_model, (width, width), bool(bias))
        else:
            self.qkv = PackedLinear(d_model, (width, width, width), bool(bias))
        self.out = nn.Linear(width, d_model, bias=bias is True)

    def forward(
        self,
        x: Tensor,
        position: Position,
        start: int,
        mask: Tensor | None = None,
        cache: State | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of `x`; see `ablate.attention` for the arguments."""
        q, k, v = map(self._heads, self._projected(x, cache, memory))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if mask is not None:
            k = k * mask[:, None, mask.shape[1] - k.shape[2] :, None]
        past, total = self._sums(q, cache)
        visible = k.cumsum(2, dtype=past.dtype) if self.causal else k.sum(2, keepdim=True, dtype=past.dtype)
        totals = total[:, :, None] + visible
        turned = position.rotate(q, start), position.rotate(k, 0 if self.cross else start)
        mixed, state = (self._chunked if self.causal else self._at_once)(*turned, v, past)
        if cache is not None:
            cache.replace((state, totals[:, :, -1]), k.shape[2])
        y = mixed / ((q * totals).sum(-1, keepdim=True) + self.eps)
        out: Tensor = self.out(y.to(x.dtype).transpose(1, 2).flatten(2))
        return out

    def _projected(self, x: Tensor, cache: State | None, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, and the keys and values that are not in the cache yet: none of a memory that is."""
        if not self.cross:
            return self.qkv.split(x)
        source = x[:, :0] if cache is not None and cache.length else memory
        assert source is not None, "the other sequence is needed until it is in the cache"
        return self.q(x), *self.kv.split(source)

    def _heads(self, part: Tensor) -> Tensor:
        heads: Tensor = part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)
        return heads

    def _sums(self, q: Tensor, cache: State | None) -> tuple[Tensor, ...]:
        """The state before these tokens, wide enough to add up many."""
        before = cache or self.new_cache(len(q), 0, q.dtype, q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        return tuple(tensor.to(wide) for tensor in before.tensors)

    def _chunked(self, q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of values `(B, H, T, d)` up to each query, and the state `(B, H, d, d)` behind the last."""
        tokens = q.shape[2]
        size = min(CHUNK, tokens)
        q, k, v = (F.pad(each, (0, 0, 0, -tokens % size)).unflatten(2, (-1, size)) for each in (q, k, v))
        products = (k.transpose(-1, -2) @ v).to(past.dtype)
        states = torch.cat([past[:, :, None], products], dim=2).cumsum(2)
        within = (q @ k.transpose(-1, -2)).tril() @ v
        mixed = within + q @ states[:, :, :-1].to(q.dtype)
        return mixed.flatten(2, 3)[:, :, :tokens], states[:, :, -1]

    def _at_once(self, q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """The same where every query sees every key."""
        state = past + k.transpose(-1, -2) @ v
        return q @ state.to(q.dtype), state

    def value_path(self) -> list[Tensor]:
        """The weights that values go through, `(rows, columns)` each."""
        packed = self.kv if self.cross else self.qkv
        return [packed.weight.detach().split(packed.parts)[-1], self.out.weight.detach()]

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> State:
        """The sums over no token: as large as those over many."""
        shape = (batch, self.n_heads, self.head_dim)
        return State((*shape, self.head_dim), shape, dtype=dtype, device=device)


class Config(AttentionChoice):
    """Settings of linear attention."""

    offers: ClassVar[frozenset[str]] = frozenset({"rotate", "bidirectional", "cross"})

    head_dim: Size | None = Field(None, description="width of a head; d_model / n_heads unless given")
    bias: bool | Literal["qkv"] = Field(False, description="bias in all projections, or with `qkv` in all but the last")
    eps: Real = Field(1e-6, gt=0, lt=1, description="added to the denominator")

    def resolve(self, shape: Shape) -> Self:
        """The width of a head as a number."""
        return self if self.head_dim else self.with_defaults(head_dim=even_head_dim(shape))

    def problems(self, shape: Shape) -> list[SettingsError]:
        """Dropout of attention weights, which it never computes."""
        message = f"attention {self.name} has no attention weights that dropout could drop"
        return [SettingsError((), message, "set dropout.attention to 0")] if shape.attention_dropout else []

    def rotary_dim(self, shape: Shape) -> int:
        """All of a head."""
        return self.head_dim or even_head_dim(shape)

    def build(self, shape: Shape) -> LinearAttention:
        """The module."""
        return LinearAttention(
            shape.d_model,
            shape.n_heads,
            self.rotary_dim(shape),
            bias=self.bias,
            causal=self.is_causal(shape),
            cross=shape.cross,
            eps=self.eps,
        )

    def params(self, shape: Shape) -> int:
        """Projections of q, k, v and of the output."""
        width = shape.n_heads * self.rotary_dim(shape)
        biases = (3 * width if self.bias else 0) + (shape.d_model if self.bias is True else 0)
        return 4 * width * shape.d_model + biases

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True, source_tokens: int = 0) -> dict[str, float]:
        """Projections, the state written and read, and where later tokens are hidden the products within chunks."""
        width = shape.n_heads * self.rotary_dim(shape)
        known = source_tokens / tokens if shape.cross else 1.0
        terms = {
            "attention.projections": 4.0 * shape.d_model * width * (1 + known),
            "attention.state": 2.0 * width * self.rotary_dim(shape) * (1 + known),
        }
        if not self.is_causal(shape):
            return terms
        size = min(CHUNK, tokens)
        padded = 1.0 if discount else math.ceil(tokens / size) * size / tokens
        keys = visible_keys(tokens, True, chunk=size) if discount else size * padded
        within = dict.fromkeys(("attention.scores", "attention.values"), 2.0 * width * keys)
        return {**terms, "attention.state": padded * terms["attention.state"], **within}

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """The state: a matrix and a vector for each head, however many tokens."""
        width = self.rotary_dim(shape)
        return shape.n_heads * (width + 1) * width

    def cache_elements_per_device(self, shape: Shape, tokens: int, devices: int) -> int | None:
        """The state of the device's own heads."""
        return share_of_heads(self.cache_elements(shape, tokens), shape.n_heads, shape.n_heads, devices)

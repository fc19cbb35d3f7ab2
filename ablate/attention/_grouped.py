"""Query heads over any number of key/value heads: what MHA, GQA and MQA share. Each of them is a file of its own."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.attention import AttentionChoice, even_head_dim, visible_keys
from ablate.attention._scores import attend
from ablate.cache import Cache
from ablate.choice import Shape, Size
from ablate.linear import PackedLinear
from ablate.position import Position


class GroupedQueryAttention(nn.Module):
    """Attention of `n_heads` query heads over `n_kv_heads` key/value heads, `(B, T, D)` to `(B, T, D)`.

    Query head h uses key/value head h // (n_heads // n_kv_heads): heads are repeated (0, 0, 1, 1), never tiled.
    With n_kv_heads = n_heads this is multi-head attention, with 1 multi-query attention.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.dropout, self.causal = dropout, causal
        self.qkv = PackedLinear(d_model, tuple(h * head_dim for h in (n_heads, n_kv_heads, n_kv_heads)), bias)
        self.out = nn.Linear(n_heads * head_dim, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        position: Position,
        start: int,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Mix the tokens of `x`; see `ablate.attention` for the arguments."""
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for part in self.qkv.split(x))
        q, k = position.rotate(q, start), position.rotate(k, start)
        if cache is not None:
            k, v = cache.append(k, v)
        bias = position.bias(q, start, k.shape[-2])
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, causal=self.causal, bias=bias, mask=mask, dropout=dropout)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, -1))
        return out

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """Room for keys and values of `tokens` tokens."""
        shape = (batch, self.n_kv_heads, tokens, self.head_dim)
        return Cache(shape, shape, dtype=dtype, device=device)


class GroupedChoice(AttentionChoice):
    """Settings that the members share; each says how many key/value heads it has."""

    head_dim: Size | None = Field(None, description="width of a head; d_model / n_heads unless given")
    bias: bool = Field(False, description="bias in the q, k, v and output projections")

    def kv_heads(self, shape: Shape) -> int:
        """Number of key/value heads."""
        raise NotImplementedError

    def resolve(self, shape: Shape) -> Self:
        """The width of a head as a number."""
        return self if self.head_dim else self.with_defaults(head_dim=even_head_dim(shape))

    def rotary_dim(self, shape: Shape) -> int:
        """All of a head."""
        return self.head_dim or even_head_dim(shape)

    def build(self, shape: Shape) -> GroupedQueryAttention:
        """The module."""
        return GroupedQueryAttention(
            shape.d_model,
            shape.n_heads,
            self.kv_heads(shape),
            self.rotary_dim(shape),
            bias=self.bias,
            dropout=shape.attention_dropout,
            causal=shape.causal,
        )

    def params(self, shape: Shape) -> int:
        """Projections of q, k, v and of the output."""
        width = self.rotary_dim(shape)
        packed = (shape.n_heads + 2 * self.kv_heads(shape)) * width
        biases = packed + shape.d_model if self.bias else 0
        return (packed + shape.n_heads * width) * shape.d_model + biases

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True) -> dict[str, float]:
        """Projections, scores and weighted values."""
        width = self.rotary_dim(shape)
        keys = visible_keys(tokens, shape.causal and discount)
        projections = (2 * shape.n_heads + 2 * self.kv_heads(shape)) * width
        return {
            "attention.projections": 2.0 * shape.d_model * projections,
            "attention.scores": 2.0 * shape.n_heads * width * keys,
            "attention.values": 2.0 * shape.n_heads * width * keys,
        }

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """A key and a value for each key/value head and token."""
        return 2 * self.kv_heads(shape) * self.rotary_dim(shape) * tokens

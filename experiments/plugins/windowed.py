"""Attention in which a token sees itself and `window - 1` tokens before it: an example of a choice of one's own.

The cache keeps everything; what a window could save there is left out, to keep the example short.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ablate.attention import AttentionChoice, Cache
from ablate.choice import Count, Shape


class WindowedAttention(nn.Module):
    """`(B, T, D)` to `(B, T, D)`; see `ablate.attention` for what a module is called with."""

    def __init__(self, d_model: int, n_heads: int, window: int) -> None:
        super().__init__()
        self.n_heads, self.window = n_heads, window
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x: Tensor, position: Any, start: int, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = position.rotate(q, start), position.rotate(k, start)
        if cache is not None:
            k, v = cache.append(k, v)
        keys = torch.arange(k.shape[-2], device=x.device)
        distance = keys[start : start + x.shape[1], None] - keys
        seen = (distance >= 0) & (distance < self.window)
        if mask is not None:
            seen = seen & mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Cache:
        shape = (batch, self.n_heads, tokens, self.q.out_features // self.n_heads)
        return Cache(shape, shape, dtype=dtype, device=device)


class Config(AttentionChoice):
    """Settings. Without `flops` and `cache_elements` the report would say n/a; parameters are counted anyway."""

    offers = frozenset({"rotate"})
    window: Count = Field(32, description="tokens that a token sees, itself included")

    def build(self, shape: Shape) -> WindowedAttention:
        return WindowedAttention(shape.d_model, shape.n_heads, self.window)

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True) -> dict[str, float]:
        seen = sum(min(t + 1, self.window) for t in range(tokens)) / tokens if discount else tokens
        return {"attention.projections": 8.0 * shape.d_model**2, "attention.scores": 4.0 * shape.d_model * seen}

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        return 2 * shape.d_model * tokens

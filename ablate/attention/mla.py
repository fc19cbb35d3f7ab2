"""Multi-head latent attention: keys and values from one small latent (DeepSeek-V2, 2024, arXiv:2405.04434).

What is cached for a token is its latent (`kv_lora_rank` numbers) and one key part that carries the position and is
shared by all heads (`qk_rope_head_dim` numbers): no factor two, no factor n_heads. Decoding either expands the latent
to keys and values of every head, or absorbs the up-projections into query and output and attends in the latent space
itself.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.attention import AttentionChoice, even_head_dim, visible_keys
from ablate.attention._scores import attend
from ablate.cache import Cache
from ablate.choice import Shape, Size
from ablate.linear import PackedLinear
from ablate.position import Position


class LatentAttention(nn.Module):
    """Attention over keys and values that are expanded from a latent, `(B, T, D)` to `(B, T, D)`."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        decode: str = "absorbed",
        dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.n_heads, self.rank, self.decode = n_heads, kv_lora_rank, decode
        self.nope, self.rope, self.v_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.dropout, self.causal = dropout, causal
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        q_width = n_heads * (qk_nope_head_dim + qk_rope_head_dim)
        self.compress = PackedLinear(d_model, (q_lora_rank or q_width, kv_lora_rank, qk_rope_head_dim))
        self.q_norm = nn.RMSNorm(q_lora_rank, eps=1e-6) if q_lora_rank else nn.Identity()
        self.q_up = nn.Linear(q_lora_rank, q_width, bias=False) if q_lora_rank else nn.Identity()
        self.kv_norm = nn.RMSNorm(kv_lora_rank, eps=1e-6)
        self.kv_up = nn.Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.out = nn.Linear(n_heads * v_head_dim, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        position: Position,
        start: int,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Mix the tokens of `x`; see `ablate.attention` for the arguments."""
        q, latent, k_rope = self.compress.split(x)
        q = self.q_up(self.q_norm(q)).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        q_rope = position.rotate(q[..., self.nope :], start)
        k_rope = position.rotate(k_rope[:, None], start)
        entries = torch.cat([self.kv_norm(latent)[:, None], k_rope], dim=-1)
        first = cache is None or cache.length == 0
        if cache is not None:
            (entries,) = cache.append(entries)
        q = torch.cat([q[..., : self.nope], q_rope], dim=-1)
        bias = position.bias(q, start, entries.shape[-2])
        attention = self._expanded if first or self.decode == "expanded" else self._absorbed
        y = attention(q, entries, bias, mask)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _expanded(self, q: Tensor, entries: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        """Keys and values of every head from the latent; `(B, H, T, v_head_dim)`."""
        latent, k_rope = entries.split([self.rank, self.rope], dim=-1)
        kv = self.kv_up(latent[:, 0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, self.n_heads, -1, -1)], dim=-1)
        return self._attend(q, k, v, bias, mask)

    def _absorbed(self, q: Tensor, entries: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        """The same in the latent space: the cache is read as it lies, as one key/value head for all."""
        up_k, up_v = self.kv_up.weight.view(self.n_heads, -1, self.rank).split([self.nope, self.v_dim], dim=1)
        q_latent = torch.einsum("bhtn,hnr->bhtr", q[..., : self.nope], up_k)
        q = torch.cat([q_latent, q[..., self.nope :]], dim=-1)
        mixed = self._attend(q, entries, entries, bias, mask)[..., : self.rank]
        return torch.einsum("bhtr,hvr->bhtv", mixed, up_v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, causal=self.causal, bias=bias, mask=mask, dropout=dropout, scale=self.scale)

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """Room for the latents and rotated key parts of `tokens` tokens."""
        return Cache((batch, 1, tokens, self.rank + self.rope), dtype=dtype, device=device)


class Config(AttentionChoice):
    """Settings of latent attention. Unless given, widths follow DeepSeek-V2's proportions to d_model / n_heads."""

    rotary_setting: ClassVar[str] = "qk_rope_head_dim"
    kv_lora_rank: Size | None = Field(None, description="width of the latent; 4 head widths unless given")
    q_lora_rank: Size | None = Field(None, description="width of the queries' latent; none unless given")
    qk_nope_head_dim: Size | None = Field(None, description="part of q and k without position; a head's width")
    qk_rope_head_dim: Size | None = Field(None, description="part of q and k with position; half a head's width, even")
    v_head_dim: Size | None = Field(None, description="width of a value; a head's width unless given")
    decode: Literal["absorbed", "expanded"] = Field("absorbed", description="how a cached latent is read")

    def resolve(self, shape: Shape) -> Self:
        """All widths as numbers."""
        widths = (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        if None not in widths:
            return self
        head = even_head_dim(shape)
        return self.with_defaults(
            kv_lora_rank=4 * head, qk_nope_head_dim=head, qk_rope_head_dim=2 * max(1, head // 4), v_head_dim=head
        )

    def rotary_dim(self, shape: Shape) -> int:
        """The decoupled part alone."""
        return self._widths(shape)[2]

    def build(self, shape: Shape) -> LatentAttention:
        """The module."""
        rank, nope, rope, v_dim = self._widths(shape)
        return LatentAttention(
            shape.d_model,
            shape.n_heads,
            rank,
            nope,
            rope,
            v_dim,
            q_lora_rank=self.q_lora_rank,
            decode=self.decode,
            dropout=shape.attention_dropout,
            causal=shape.causal,
        )

    def params(self, shape: Shape) -> int:
        """Projections down and up, and the norms of the latents."""
        return self._matrix_elements(shape) + self._widths(shape)[0] + (self.q_lora_rank or 0)

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True) -> dict[str, float]:
        """Every projection once a token, scores over both parts of the keys, and values."""
        _, nope, rope, v_dim = self._widths(shape)
        keys = visible_keys(tokens, shape.causal and discount)
        return {
            "attention.projections": 2.0 * self._matrix_elements(shape),
            "attention.scores": 2.0 * shape.n_heads * (nope + rope) * keys,
            "attention.values": 2.0 * shape.n_heads * v_dim * keys,
        }

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """One latent and one rotated key part a token."""
        rank, _, rope, _ = self._widths(shape)
        return (rank + rope) * tokens

    def _matrix_elements(self, shape: Shape) -> int:
        rank, nope, rope, v_dim = self._widths(shape)
        q_width = shape.n_heads * (nope + rope)
        q = shape.d_model * (self.q_lora_rank or q_width) + (self.q_lora_rank or 0) * q_width
        kv = shape.d_model * (rank + rope) + rank * shape.n_heads * (nope + v_dim)
        return q + kv + shape.n_heads * v_dim * shape.d_model

    def _widths(self, shape: Shape) -> tuple[int, int, int, int]:
        done = self.resolve(shape)
        widths = (done.kv_lora_rank, done.qk_nope_head_dim, done.qk_rope_head_dim, done.v_head_dim)
        rank, nope, rope, v_dim = (width or 0 for width in widths)
        return rank, nope, rope, v_dim

"""Multi-head latent attention: keys and values from one small latent (DeepSeek-V2, 2024, arXiv:2405.04434).

What is cached for a token is its latent (`kv_lora_rank` numbers) and one key part that carries the position and is
shared by all heads (`qk_rope_head_dim` numbers): no factor two, no factor n_heads. Decoding either expands the latent
to keys and values of every head, or absorbs the up-projections into query and output and attends in the latent space
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.attention import AttentionChoice, even_head_dim, visible_keys
from ablate.attention._grouped import Kernel, kernel_faults, kernel_on_cpu, kernel_problem
from ablate.attention._same import outputs
from ablate.attention._scores import Scoring, attend
from ablate.cache import Cache
from ablate.choice import Identity, Real, SettingsError, Shape, Size
from ablate.linear import PackedLinear
from ablate.position import Position
from ablate.rms import RMSNorm


class LatentAttention(nn.Module):
    """Attention over keys and values that are expanded from a latent, `(B, T, D)` to `(B, T, D)`."""

    decode_paths: ClassVar[tuple[str, ...]] = ("absorbed", "expanded")

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
        *,
        cross: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        kernel: Kernel = "sdpa",
    ) -> None:
        super().__init__()
        self.n_heads, self.rank, self.decode_path = n_heads, kv_lora_rank, decode
        self.path = ""
        self.nope, self.rope, self.v_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.dropout, self.cross = dropout, cross
        width = qk_nope_head_dim + qk_rope_head_dim
        self.scoring = Scoring(causal, scale=scale or width**-0.5, softcap=softcap, kernel=kernel)
        first = q_lora_rank or n_heads * width
        if cross:
            self.compress_q = nn.Linear(d_model, first, bias=False)
            self.compress_kv = PackedLinear(d_model, (kv_lora_rank, qk_rope_head_dim))
        else:
            self.compress = PackedLinear(d_model, (first, kv_lora_rank, qk_rope_head_dim))
        self.q_norm = RMSNorm(q_lora_rank) if q_lora_rank else nn.Identity()
        self.q_up = nn.Linear(q_lora_rank, n_heads * width, bias=False) if q_lora_rank else nn.Identity()
        self.kv_norm = RMSNorm(kv_lora_rank)
        self.kv_up = nn.Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.out = nn.Linear(n_heads * v_head_dim, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        position: Position,
        start: int,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of `x`; see `ablate.attention` for the arguments."""
        first = cache is None or cache.length == 0
        if self.cross:
            q, entries = self.compress_q(x), self._remembered(position, cache, memory)
        else:
            q, latent, k_rope = self.compress.split(x)
            entries = self._entries(latent, k_rope, position, start)
            if cache is not None:
                (entries,) = cache.append(entries)
        q = self.q_up(self.q_norm(q)).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        q = torch.cat([q[..., : self.nope], position.rotate(q[..., self.nope :], start)], dim=-1)
        bias = position.bias(q, entries, start, 0, self.scoring.scale)
        way = "expanded" if first else self.decode_path
        self.path = "+".join(filter(None, [way, self.scoring.path]))
        attention = self._expanded if way == "expanded" else self._absorbed
        y = attention(q, entries, start, bias, mask)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _remembered(self, position: Position, cache: Cache | None, memory: Tensor | None) -> Tensor:
        """The entries of the other sequence, from the cache if they are there."""
        if cache is not None and cache.length:
            return cache.views()[0]
        assert memory is not None, "the other sequence is needed until it is in the cache"
        latent, k_rope = self.compress_kv.split(memory)
        entries = self._entries(latent, k_rope, position, 0)
        return entries if cache is None else cache.append(entries)[0]

    def _entries(self, latent: Tensor, k_rope: Tensor, position: Position, start: int) -> Tensor:
        """What is cached of a token: `(B, 1, T, kv_lora_rank + qk_rope_head_dim)`."""
        return torch.cat([self.kv_norm(latent)[:, None], position.rotate(k_rope[:, None], start)], dim=-1)

    def _expanded(self, q: Tensor, entries: Tensor, start: int, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        """Keys and values of every head from the latent; `(B, H, T, v_head_dim)`."""
        latent, k_rope = entries.split([self.rank, self.rope], dim=-1)
        kv = self.kv_up(latent[:, 0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, self.n_heads, -1, -1)], dim=-1)
        return self._attend(q, k, v, start, bias, mask)

    def _absorbed(self, q: Tensor, entries: Tensor, start: int, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        """The same in the latent space: the cache is read as it lies, as one key/value head for all."""
        up_k, up_v = self.kv_up.weight.view(self.n_heads, -1, self.rank).split([self.nope, self.v_dim], dim=1)
        q_latent = torch.einsum("bhtn,hnr->bhtr", q[..., : self.nope], up_k)
        q = torch.cat([q_latent, q[..., self.nope :]], dim=-1)
        mixed = self._attend(q, entries, entries, start, bias, mask)[..., : self.rank]
        return torch.einsum("bhtr,hvr->bhtv", mixed, up_v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, start: int, bias: Tensor | None, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, self.scoring, start=start, bias=bias, mask=mask, dropout=dropout)

    def value_path(self) -> list[Tensor]:
        """The weights that values go through, `(rows, columns)` each."""
        up = self.kv_up.weight.detach().view(self.n_heads, -1, self.rank)
        return [up[:, self.nope :], self.out.weight.detach()]

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """Room for the latents and rotated key parts of `tokens` tokens."""
        return Cache((batch, 1, tokens, self.rank + self.rope), dtype=dtype, device=device)


class Config(AttentionChoice):
    """Settings of latent attention. Unless given, widths follow DeepSeek-V2's proportions to d_model / n_heads."""

    offers: ClassVar[frozenset[str]] = frozenset({"rotate", "bias", "bidirectional", "cross"})
    rotary_setting: ClassVar[str] = "qk_rope_head_dim"
    # The latent of keys and values is measured in head widths, which a model keeps at any size.
    grows: ClassVar[tuple[str, ...]] = ("q_lora_rank",)

    kv_lora_rank: Size | None = Field(None, description="width of the latent; 4 head widths unless given")
    q_lora_rank: Size | None = Field(None, description="width of the queries' latent; none unless given")
    qk_nope_head_dim: Size | None = Field(None, description="part of q and k without position; a head's width")
    qk_rope_head_dim: Size | None = Field(None, description="part of q and k with position; half a head's width, even")
    v_head_dim: Size | None = Field(None, description="width of a value; a head's width unless given")
    decode: Literal["absorbed", "expanded"] = Field("absorbed", description="how a cached latent is read")
    scale: Real | None = Field(None, gt=0, description="of the scores; 1/√(width of q) unless given")
    softcap: Real | None = Field(None, gt=0, description="scores are bounded by softcap · tanh(score / softcap)")
    kernel: Kernel | None = Field(None, description="what computes it; sdpa, or math with a softcap, unless given")

    def resolve(self, shape: Shape) -> Self:
        """All widths as numbers, the scale and the kernel as they are meant."""
        done = self.with_defaults(kernel="math" if self.softcap else "sdpa")
        if None in (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim):
            head = even_head_dim(shape)
            done = done.with_defaults(
                kv_lora_rank=4 * head, qk_nope_head_dim=head, qk_rope_head_dim=2 * max(1, head // 4), v_head_dim=head
            )
        width = (done.qk_nope_head_dim or 0) + (done.qk_rope_head_dim or 0)
        return done.model_copy(update={"scale": None}) if done.scale == width**-0.5 else done

    def twin(self, shape: Shape) -> Self:
        """Small latents; the kernel as it is where a CPU can train with it."""
        small = {"q_lora_rank": 12} if self.q_lora_rank else {}
        return super().twin(shape).model_copy(update={"kernel": kernel_on_cpu(self.kernel), **small})

    def device_problem(self, device: str) -> str | None:
        """A kernel that only reads on a CPU."""
        return kernel_problem(self.kernel, device)

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """The two ways of reading the cache."""
        absorbed, expanded = (self.model_copy(update={"decode": way}) for way in ("absorbed", "expanded"))
        alone = replace(shape, cross=False)
        yield "absorbed it is what it is expanded", lambda: outputs(absorbed, expanded, alone, cached=True)

    def problems(self, shape: Shape) -> list[SettingsError]:
        """What its kernel cannot do."""
        return kernel_faults(self.kernel, self.softcap, shape)

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
            causal=self.is_causal(shape),
            cross=shape.cross,
            scale=self.scale,
            softcap=self.softcap,
            kernel=self.resolve(shape).kernel or "sdpa",
        )

    def params(self, shape: Shape) -> int:
        """Projections down and up, and the norms of the latents."""
        return sum(self._matrix_elements(shape)) + self._widths(shape)[0] + (self.q_lora_rank or 0)

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True, source_tokens: int = 0) -> dict[str, float]:
        """Every projection once a token, scores over both parts of the keys, and values."""
        _, nope, rope, v_dim = self._widths(shape)
        keys = visible_keys(tokens, self.is_causal(shape) and discount)
        own = 1.0
        if shape.cross:
            keys, own = float(source_tokens), source_tokens / tokens
        q, kv = self._matrix_elements(shape)
        return {
            "attention.projections": 2.0 * (q + own * kv),
            "attention.scores": 2.0 * shape.n_heads * (nope + rope) * keys,
            "attention.values": 2.0 * shape.n_heads * v_dim * keys,
        }

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """One latent and one rotated key part a token."""
        rank, _, rope, _ = self._widths(shape)
        return (rank + rope) * tokens

    def cache_elements_per_device(self, shape: Shape, tokens: int, devices: int) -> int | None:
        """All of it: every head reads the same latent."""
        return None if shape.n_heads % devices else self.cache_elements(shape, tokens)

    def _matrix_elements(self, shape: Shape) -> tuple[int, int]:
        """Of the matrices that queries and outputs go through, and of those of keys and values."""
        rank, nope, rope, v_dim = self._widths(shape)
        q_width = shape.n_heads * (nope + rope)
        q = shape.d_model * (self.q_lora_rank or q_width) + (self.q_lora_rank or 0) * q_width
        kv = shape.d_model * (rank + rope) + rank * shape.n_heads * (nope + v_dim)
        return q + shape.n_heads * v_dim * shape.d_model, kv

    def _widths(self, shape: Shape) -> tuple[int, int, int, int]:
        done = self.resolve(shape)
        widths = (done.kv_lora_rank, done.qk_nope_head_dim, done.qk_rope_head_dim, done.v_head_dim)
        rank, nope, rope, v_dim = (width or 0 for width in widths)
        return rank, nope, rope, v_dim

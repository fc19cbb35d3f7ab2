"""Query heads over any number of key/value heads: what MHA, GQA and MQA share. Each of them is a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.attention import AttentionChoice, even_head_dim, share_of_heads, visible_keys
from ablate.attention._same import outputs
from ablate.attention._scores import Scoring, attend
from ablate.cache import Cache
from ablate.choice import Identity, Positive, Real, SettingsError, Shape, Size
from ablate.linear import PackedLinear
from ablate.position import Position
from ablate.rms import RMSNorm

Kernel = Literal["sdpa", "math", "flex"]
QKNorm = Literal["none", "head", "projection", "l2"]


class GroupedQueryAttention(nn.Module):
    """Attention of `n_heads` query heads over `n_kv_heads` key/value heads, `(B, T, D)` to `(B, T, D)`.

    Query head h uses key/value head h // (n_heads // n_kv_heads): heads are repeated (0, 0, 1, 1), never tiled.
    With n_kv_heads = n_heads this is multi-head attention, with 1 multi-query attention. The projections are those of
    one matrix; a `cross` module has one for queries and one for the keys and values of the other sequence.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        bias: bool | Literal["qkv"] = False,
        dropout: float = 0.0,
        causal: bool = True,
        *,
        cross: bool = False,
        qk_norm: QKNorm = "none",
        qk_norm_eps: float = 1e-6,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        kernel: Kernel = "sdpa",
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.dropout, self.cross = dropout, cross
        self.scoring = Scoring(causal, window, chunk, scale, softcap, kernel)
        self.path = self.scoring.path
        widths = tuple(heads * head_dim for heads in (n_heads, n_kv_heads, n_kv_heads))
        if cross:
            self.q = nn.Linear(d_model, widths[0], bias=bool(bias))
            self.kv = PackedLinear(d_model, widths[1:], bool(bias))
        else:
            self.qkv = PackedLinear(d_model, widths, bool(bias))
        self.out = nn.Linear(n_heads * head_dim, d_model, bias=bias is True)
        self.qk_norm, self.eps = qk_norm, qk_norm_eps
        if qk_norm in ("head", "projection"):
            q_width, k_width = widths[:2] if qk_norm == "projection" else (head_dim, head_dim)
            self.q_norm, self.k_norm = (RMSNorm(width, qk_norm_eps) for width in (q_width, k_width))

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
        if self.cross:
            q, k, v = self._crossed(x, position, start, cache, memory)
        else:
            q, k, v = (self._heads(part, norm) for part, norm in zip(self.qkv.split(x), ("q", "k", ""), strict=True))
            q, k = self._unit(position.rotate(q, start)), self._unit(position.rotate(k, start))
            if cache is not None:
                k, v = cache.append(k, v)
        first = 0 if self.cross else start + x.shape[1] - k.shape[-2]
        bias = position.bias(q, k, start, first, self.scoring.scale)
        if mask is not None:
            mask = mask[:, first : first + k.shape[-2]]
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, self.scoring, start=start, first=first, bias=bias, mask=mask, dropout=dropout)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _crossed(
        self, x: Tensor, position: Position, start: int, cache: Cache | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `x`, keys and values of the memory, or what the cache holds of them."""
        q = self._unit(position.rotate(self._heads(self.q(x), "q"), start))
        if cache is not None and cache.length:
            k, v = cache.views()
            return q, k, v
        assert memory is not None, "the other sequence is needed until it is in the cache"
        k, v = (self._heads(part, norm) for part, norm in zip(self.kv.split(memory), ("k", ""), strict=True))
        k = self._unit(position.rotate(k, 0))
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def _heads(self, part: Tensor, norm: str) -> Tensor:
        """`(B, T, H·d)` to `(B, H, T, d)`, normalised before or after the cut where it is a query or a key."""
        scaled: RMSNorm | None = None
        if norm and self.qk_norm in ("head", "projection"):
            scaled = self.q_norm if norm == "q" else self.k_norm
        if scaled is not None and self.qk_norm == "projection":
            part = scaled(part)
        heads: Tensor = part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return scaled(heads) if scaled is not None and self.qk_norm == "head" else heads

    def _unit(self, heads: Tensor) -> Tensor:
        """Heads of mean square 1, where they are normalised after their rotation."""
        return nn.functional.rms_norm(heads, (self.head_dim,), eps=self.eps) if self.qk_norm == "l2" else heads

    def value_path(self) -> list[Tensor]:
        """The weights that values go through, `(rows, columns)` each."""
        packed = self.kv if self.cross else self.qkv
        return [packed.weight.detach().split(packed.parts)[-1], self.out.weight.detach()]

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """Room for keys and values of `tokens` tokens, or of as many as can ever be seen again."""
        shape = (batch, self.n_kv_heads, tokens, self.head_dim)
        return Cache(shape, shape, dtype=dtype, device=device, window=_reach(self.scoring.window, self.scoring.chunk))


class GroupedChoice(AttentionChoice):
    """Settings that the members share; each says how many key/value heads it has."""

    offers: ClassVar[frozenset[str]] = frozenset({"rotate", "bias", "keys", "bidirectional", "cross"})

    head_dim: Size | None = Field(None, description="width of a head; d_model / n_heads unless given")
    bias: bool | Literal["qkv"] = Field(False, description="bias in all projections, or with `qkv` in all but the last")
    qk_norm: QKNorm = Field(
        "none", description="RMS norm of queries and keys: of each head, of the whole projection, or l2 after rotation"
    )
    qk_norm_eps: Real | None = Field(None, gt=0, lt=1, description="of that norm; 1e-6 unless given")
    scale: Positive | Literal["none"] | None = Field(None, description="of the scores; 1/√head_dim unless given")
    softcap: Real | None = Field(None, gt=0, description="scores are bounded by softcap · tanh(score / softcap)")
    window: Size | None = Field(None, description="a token sees itself and so many less one before it")
    chunk: Size | None = Field(None, description="a token sees only its own block of so many tokens")
    kernel: Kernel | None = Field(None, description="what computes it; sdpa, or math with a softcap, unless given")

    def kv_heads(self, shape: Shape) -> int:
        """Number of key/value heads."""
        raise NotImplementedError

    def crossing(self) -> Self:
        """The same without window and chunk: the other sequence has no distance to this one."""
        return super().crossing().model_copy(update={"window": None, "chunk": None})

    def resolve(self, shape: Shape) -> Self:
        """The width of a head and all else as it is meant: what has no effect in this shape is left out."""
        width = self.head_dim or even_head_dim(shape)
        eps = None if self.qk_norm == "none" else self.qk_norm_eps or 1e-6
        scale = {width**-0.5: None, 1.0: "none"}.get(self.scale, self.scale) if width > 1 else self.scale
        kernel = self.kernel or ("math" if self.softcap else "sdpa")
        chunk = self.chunk if (self.chunk or shape.max_seq_len) < shape.max_seq_len else None
        window = self.window if (self.window or shape.max_seq_len) < (chunk or shape.max_seq_len) else None
        meant = {"head_dim": width, "qk_norm_eps": eps, "scale": scale, "kernel": kernel}
        return self.model_copy(update={**meant, "window": window, "chunk": chunk})

    def twin(self, shape: Shape) -> Self:
        """Narrow heads, windows and chunks of a few tokens; the kernel as it is where a CPU can train with it."""
        near = {key: min(size, small) for key, small in (("window", 3), ("chunk", 5)) if (size := getattr(self, key))}
        return super().twin(shape).model_copy(update={"kernel": kernel_on_cpu(self.kernel), **near})

    def device_problem(self, device: str) -> str | None:
        """A kernel that only reads on a CPU."""
        return kernel_problem(self.kernel, device)

    def problems(self, shape: Shape) -> list[SettingsError]:
        """What its kernel cannot do, and what has no meaning between two sequences."""
        cure = "take it out: the other sequence has no distance to this one"
        apart = [key for key in ("window", "chunk") if shape.cross and getattr(self, key)]
        found = [SettingsError((key,), f"cross attention has no {key}", cure) for key in apart]
        return [*found, *kernel_faults(self.kernel, self.softcap, shape)]

    def rotary_dim(self, shape: Shape) -> int:
        """All of a head."""
        return self.head_dim or even_head_dim(shape)

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """GQA covers them all; a choice that builds a module of its own promises nothing."""
        from ablate.attention import gqa  # which needs this file first

        if shape.cross or type(self).build is not GroupedChoice.build:
            return
        same = {name: getattr(self, name) for name in GroupedChoice.model_fields if name != "name"}
        grouped = gqa.Config(**same, n_kv_heads=self.kv_heads(shape))
        yield "gqa with as many key/value heads is the same", lambda: outputs(self, grouped, shape)

    def build(self, shape: Shape) -> GroupedQueryAttention:
        """The module."""
        done = self.resolve(shape)
        return GroupedQueryAttention(
            shape.d_model,
            shape.n_heads,
            self.kv_heads(shape),
            self.rotary_dim(shape),
            bias=self.bias,
            dropout=shape.attention_dropout,
            causal=self.is_causal(shape),
            cross=shape.cross,
            qk_norm=self.qk_norm,
            qk_norm_eps=done.qk_norm_eps or 0.0,
            scale=1.0 if self.scale == "none" else self.scale,
            softcap=self.softcap,
            window=self.window,
            chunk=self.chunk,
            kernel=done.kernel or "sdpa",
        )

    def params(self, shape: Shape) -> int:
        """Projections of q, k, v and of the output, and the norms of q and k."""
        width = self.rotary_dim(shape)
        q, kv = shape.n_heads * width, self.kv_heads(shape) * width
        biases = (q + 2 * kv if self.bias else 0) + (shape.d_model if self.bias is True else 0)
        norms = {"head": 2 * width, "projection": q + kv}.get(self.qk_norm, 0)
        return 2 * (q + kv) * shape.d_model + biases + norms

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True, source_tokens: int = 0) -> dict[str, float]:
        """Projections, scores and weighted values."""
        width = self.rotary_dim(shape)
        q, kv = shape.n_heads * width, self.kv_heads(shape) * width
        keys = self._keys(shape, tokens, discount)
        own = 1.0
        if shape.cross:
            keys, own = float(source_tokens), source_tokens / tokens
        return {
            "attention.projections": 4.0 * shape.d_model * (q + own * kv),
            "attention.scores": 2.0 * q * keys,
            "attention.values": 2.0 * q * keys,
        }

    def _keys(self, shape: Shape, tokens: int, discount: bool) -> float:
        if not discount:
            return float(tokens)
        return visible_keys(tokens, self.is_causal(shape), self.window, self.chunk)

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """A key and a value for each key/value head and token, as far back as one can be seen again."""
        kept = min(tokens, _reach(self.window, self.chunk) or tokens)
        return 2 * self.kv_heads(shape) * self.rotary_dim(shape) * kept

    def cache_elements_per_device(self, shape: Shape, tokens: int, devices: int) -> int | None:
        """Those of the key/value heads that the device's query heads read."""
        return share_of_heads(self.cache_elements(shape, tokens), shape.n_heads, self.kv_heads(shape), devices)


def kernel_faults(kernel: Kernel | None, softcap: float | None, shape: Shape) -> list[SettingsError]:
    """What a kernel cannot do of what is asked of it."""
    if softcap and kernel == "sdpa":
        return [SettingsError(("kernel",), "kernel 'sdpa' has no softcap", "choose math or flex")]
    if shape.attention_dropout and kernel == "flex":
        return [SettingsError(("kernel",), "kernel 'flex' has no dropout of attention weights", "choose sdpa or math")]
    return []


def kernel_problem(kernel: Kernel | None, device: str) -> str | None:
    """Why nothing can be trained with a kernel on a device."""
    return "kernel 'flex' cannot train on a CPU: choose sdpa or math" if (kernel, device) == ("flex", "cpu") else None


def kernel_on_cpu(kernel: Kernel | None) -> Kernel | None:
    """The kernel, or where it cannot train there the definition that it computes."""
    return kernel if kernel_problem(kernel, "cpu") is None else "math"


def _reach(window: int | None, chunk: int | None) -> int | None:
    """Tokens that can matter to one of them, itself included; None where there is no bound."""
    return min((each for each in (window, chunk) if each is not None), default=None)

"""Scaled dot-product attention with what a position scheme, padding, a window and a cache add to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_suits_kernels = True
_flexible = True


@contextmanager
def as_defined() -> Iterator[None]:
    """Within it a counter sees the architecture's own products and nothing more: values keep their width too."""
    global _suits_kernels
    before, _suits_kernels = _suits_kernels, False
    try:
        with written_out():
            yield
    finally:
        _suits_kernels = before


@contextmanager
def written_out() -> Iterator[None]:
    """Within it the flexible kernel, whose products no counter sees, is written out."""
    global _flexible
    before, _flexible = _flexible, False
    try:
        yield
    finally:
        _flexible = before


@dataclass(frozen=True)
class Scoring:
    """How queries and keys become weights.

    A query sees no key after it if `causal`, none that is `window` or more away, none of another block of `chunk`.
    Scores are multiplied by `scale`, 1/√d unless given, then bounded by softcap · tanh(score / softcap).
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    kernel: Literal["sdpa", "math", "flex"] = "sdpa"

    @property
    def path(self) -> str:
        """What a module says of it: a compiled kernel is no operator that could be seen to run."""
        return "flex" if self.kernel == "flex" else ""

    def allowed(self, start: int, n_queries: int, first: int, n_keys: int, device: torch.device) -> Tensor | None:
        """`(Tq, Tk)`, True where the query at start … may see the key at first …; None where every one sees all."""
        last_query, last_key = start + n_queries - 1, first + n_keys - 1
        hides = self.causal and last_key > start
        reach = max(last_query - first, last_key - start)
        window = self.window if self.window is not None and reach >= self.window else None
        chunk = self.chunk
        if chunk is not None and min(start, first) // chunk == max(last_query, last_key) // chunk:
            chunk = None
        if not hides and window is None and chunk is None:
            return None
        queries = torch.arange(start, start + n_queries, device=device)[:, None]
        keys = torch.arange(first, first + n_keys, device=device)
        seen = keys <= queries if self.causal else torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
        if window is not None:
            seen = seen & ((queries - keys).abs() < window)
        if chunk is not None:
            seen = seen & (queries // chunk == keys // chunk)
        return seen

    def is_plain(self, start: int, n_queries: int, first: int, n_keys: int) -> bool:
        """Whether it is the lower triangle over the same tokens and nothing else, which kernels know by themselves."""
        same = self.causal and (start, n_queries) == (first, n_keys) and n_queries > 1
        return (
            same
            and (self.window or n_keys) >= n_keys
            and (self.chunk is None or start % self.chunk + n_keys <= self.chunk)
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    *,
    start: int | None = None,
    first: int = 0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of queries `(B, H, Tq, d)` to keys `(B, Hk, Tk, d)` and values `(B, Hk, Tk, e)`: `(B, H, Tq, e)`.

    Head h reads key head h // (H // Hk). The first key stands at `first`, the first query at `start`; unless given, so
    that the last query stands at the last key. `bias` `(H, Tq, Tk)` or `(B, H, Tq, Tk)` is added to the scaled and
    bounded scores. `mask` `(B, Tk)` is True where a key is real; a query that sees no key gets zeros, never NaN.
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    start = first + n_keys - n_queries if start is None else start
    scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    triangle = bias is None and mask is None and scoring.is_plain(start, n_queries, first, n_keys)
    if triangle and scoring.kernel == "sdpa":
        return _fused(q, k, v, None, dropout, scale, is_causal=True)
    seen = scoring.allowed(start, n_queries, first, n_keys, q.device)
    if mask is not None:
        keys = mask[:, None, None, :]
        seen = keys if seen is None else seen & keys
    if scoring.kernel == "sdpa":
        return _fused(q, k, v, _additive(bias, seen, q.dtype), dropout, scale)
    computed = _flex if scoring.kernel == "flex" and _flexible else _plain
    return computed(q, k, v, bias, seen, scale, scoring.softcap, dropout)


def _additive(bias: Tensor | None, seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What stands where: True or a bias where a query may look, False or -inf where not."""
    if bias is None:
        return seen
    bias = bias.to(dtype) if bias.dim() == 4 else bias.to(dtype)[None]
    return bias if seen is None else bias.masked_fill(~seen, float("-inf"))


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float, is_causal: bool = False
) -> Tensor:
    """torch's own. Values narrower than keys are padded with zeros and cut back: fused kernels take only one width."""
    width, missing = v.shape[-1], k.shape[-1] - v.shape[-1]
    if missing > 0 and _suits_kernels:
        v = F.pad(v, (0, missing))
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed[..., :width]


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    seen: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """The definition, written out: every score is held, the softmax is of float32 at least."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) if group > 1 else each for each in (k, v))
    scores = (q * scale @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if seen is not None:
        weights = weights.masked_fill(~seen, 0.0)
    return F.dropout(weights.to(v.dtype), dropout) @ v


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    seen: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """torch's flex attention, compiled on a GPU. Raises RuntimeError where it does not run: in training on a CPU."""
    trains = torch.is_grad_enabled() and q.requires_grad
    if dropout or (trains and q.device.type == "cpu"):
        what = "drop attention weights" if dropout else "train on the CPU"
        raise RuntimeError(f"kernel 'flex' cannot {what}: choose kernel 'sdpa' or 'math' there")

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        value = value if softcap is None else softcap * torch.tanh(value / softcap)
        if bias is not None:
            value = value + (bias[b, h, i, j] if bias.dim() == 4 else bias[h, i, j])
        if seen is None:
            return value
        visible = seen[b, 0, i, j] if seen.shape[0] > 1 else seen[0, 0, i, j]
        return torch.where(visible, value, -float("inf"))

    if seen is not None:
        seen = seen.expand(seen.shape[0] if seen.dim() == 4 else 1, 1, q.shape[-2], k.shape[-2])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on a CPU there is no gain
        flex = _flex_attention(compiled=q.is_cuda)
        mixed: Tensor = flex(q, k, v, score_mod=score, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return mixed


@cache
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast(Callable[..., Any], torch.compile(flex_attention) if compiled else flex_attention)

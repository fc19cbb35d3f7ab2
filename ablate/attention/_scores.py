"""Scaled dot-product attention with what a position scheme, padding and a cache add to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_pads = True


@contextmanager
def as_defined() -> Iterator[None]:
    """Within it values keep their width, so that a counter sees the architecture's own products and nothing more."""
    global _pads
    before, _pads = _pads, False
    try:
        yield
    finally:
        _pads = before


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention of queries `(B, H, Tq, d)` to keys `(B, Hk, Tk, d)` and values `(B, Hk, Tk, e)`: `(B, H, Tq, e)`.

    Head h reads key head h // (H // Hk). The last query stands at the last key. `bias` `(H, Tq, Tk)` is added to the
    scaled scores. `mask` `(B, Tk)` is True where a key is real; a query that sees no key gets zeros, never NaN.

    Values narrower than keys are padded with zeros and cut back: fused kernels take only one width, and the unfused
    path costs far more than the zeros.
    """
    width, missing = v.shape[-1], k.shape[-1] - v.shape[-1]
    if missing > 0 and _pads:
        v = F.pad(v, (0, missing))
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    hides = causal and n_queries > 1
    plain = bias is None and mask is None and (not hides or n_queries == n_keys)
    allowed = None if plain else _allowed(n_queries, n_keys, hides, bias, mask, q)
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=plain and hides,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed[..., :width]


def _allowed(
    n_queries: int, n_keys: int, hides: bool, bias: Tensor | None, mask: Tensor | None, like: Tensor
) -> Tensor | None:
    """What stands where: True or a bias where a query may look, False or -inf where not."""
    seen = None
    if hides:
        seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=like.device).tril(n_keys - n_queries)
    if mask is not None:
        keys = mask[:, None, None, :]
        seen = keys if seen is None else seen & keys
    if bias is None or seen is None:
        return seen if bias is None else bias.to(like.dtype)[None]
    return bias.to(like.dtype).masked_fill(~seen, float("-inf"))

"""Scaled dot-product attention with what a position scheme, padding and a cache add to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    hides = causal and n_queries > 1
    plain = bias is None and mask is None and (not hides or n_queries == n_keys)
    allowed = None if plain else _allowed(n_queries, n_keys, hides, bias, mask, q)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=plain and hides,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


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

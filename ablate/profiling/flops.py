"""FLOPs as a counter sees them, to hold `ablate.cost` against. It knows nothing of causality and counts every key."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ablate.attention._scores import as_defined

aten = torch.ops.aten


def count_flops(work: Callable[[], Any]) -> int:
    """FLOPs of the matrix products in `work`, backward ones included, attention on the CPU, grouped products and
    recurrent layers too.

    torch's own counter takes those for nothing. Zeros that only suit a kernel are left out of the work.
    """
    with as_defined(), FlopCounterMode(display=False, custom_mapping=_MISSING) as counter:
        work()
    return int(counter.get_total_flops())


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores and weighted values. Query heads decide, however few key/value heads they share."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[-2] * (width + v[-1]))


def _attention_backward(grad_out: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores again, then gradients of scores, values, queries and keys: five products for the two of forward."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[-2] * (3 * width + 2 * v[-1]))


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Each row meets one matrix of the group; `(N, K) x (E, K, M)`, or `(K, N) x (N, M)` cut in groups along N."""
    rows, inner = a[-2], a[-1]
    return int(2 * rows * inner * b[-1] * (a[0] if len(a) == 3 else 1))


def _recurrent(x: Any, weights: Any, passes: int = 1) -> int:
    """Each matrix of a recurrent layer once for every token of `x` `(…, D)`; backward passes are two such."""
    return int(2 * passes * prod(x[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2))


_MISSING = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped,
    aten.mkldnn_rnn_layer: lambda x, *args, **_: _recurrent(x, args[:2]),
    aten.mkldnn_rnn_layer_backward: lambda x, *args, **_: _recurrent(x, args[:2], passes=2),
    aten._cudnn_rnn: lambda x, weights, *_, **__: _recurrent(x, weights),
    aten._cudnn_rnn_backward: lambda x, weights, *_, **__: _recurrent(x, weights, passes=2),
}

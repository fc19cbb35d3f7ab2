"""FLOPs as a counter sees them, to hold `ablate.cost` against: those of the matrix products that were executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ablate.attention._scores import as_defined, written_out
from ablate.model import Transformer
from ablate.profiling.kernels import training_pass

aten = torch.ops.aten


AGREES_WITHIN = 0.01
"""Largest deviation of counted FLOPs from those that the formula gives, as a fraction of these."""


def count_flops(work: Callable[[], Any], *, every_key: bool = True) -> int:
    """FLOPs of the matrix products in `work`, backward ones included, attention on the CPU, grouped products and
    recurrent layers too, which torch's own counter takes for nothing.

    With `every_key` they are those of the architecture without its causality: a query pays for all keys, and zeros that
    only suit a kernel are left out. Without it they are those that are executed: fused kernels that are told of
    causality look at (T + 1) / 2 keys on average, and whatever hides keys by a mask computes them all. A flexible
    kernel is among these; what it computes again on the way back is not counted.
    """
    with as_defined() if every_key else written_out():
        formulas = _MISSING if every_key else _MISSING | _SKIPPING
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            work()
    return int(counter.get_total_flops())


@dataclass(frozen=True)
class Counted:
    """FLOPs a token of executed operators.

    `forward` is one pass in evaluation mode, every key counted. `training` is a forward and a backward pass in training
    mode as the hardware does them: with what is computed twice, without the keys that a kernel skips.
    """

    forward: float
    training: float

    def disagreement(self, promised: float | None) -> str | None:
        """How `forward` differs from the undiscounted sum of the formula; None where it does not, or nobody says."""
        if promised is None or abs(self.forward - promised) <= AGREES_WITHIN * promised:
            return None
        return f"{self.forward:,.0f} FLOPs a token are counted, {promised:,.0f} are promised (every key counted)"


def counted(model: Transformer, inputs: dict[str, torch.Tensor], tokens: int, precision: str) -> Counted:
    """FLOPs a token of a batch of `tokens` tokens. Gradients, buffers, random numbers stay as they were."""
    was_training = model.training
    model.eval()
    with torch.no_grad():  # in inference mode operators arrive whole, before a kernel is chosen for them
        forward = count_flops(lambda: model(**inputs))
    model.train(was_training)
    training = training_pass(model, inputs, precision, lambda work: count_flops(work, every_key=False))
    return Counted(forward / tokens, training / tokens)


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


# --- Kernels that skip what causality hides ---------------------------------------------------------------------------


def _skipping(operator: Any, formula: Callable[..., int]) -> Callable[..., int]:
    """The formula, with the keys that `operator` looks at where its arguments say that it is causal."""
    names = [argument.name for argument in operator.default._schema.arguments]
    causal, query, key = (names.index(name) for name in ("is_causal", "query", "key"))

    def flops(*args: Any, **kwargs: Any) -> int:
        everything: int = formula(*args, **kwargs)
        told = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
        queries, keys = args[query][-2], args[key][-2]
        if not told or queries != keys:
            return everything
        return int(everything * (keys + 1) // (2 * keys))

    return flops


_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

_SKIPPING = {
    operator: _skipping(operator, formula)
    for name in _FUSED
    for ending, formula in (("", _attention), ("_backward", _attention_backward))
    if (operator := getattr(aten, name + ending, None)) is not None
}

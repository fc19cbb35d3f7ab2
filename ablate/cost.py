"""What a variant costs, reckoned from its settings alone: parameters, FLOPs, KV cache, memory. Nothing is built.

FLOPs are those of matrix products, a multiply-add counted as two; looking up an embedding costs none, the output head
counts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ablate.settings import LayerSettings, ModelSettings

BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Cost:
    """Parameters of a variant and the FLOPs of a token's forward pass, by term; None where a choice does not say."""

    params_total: int
    params_active: int
    params_embedding: int
    params_head: int
    flops: dict[str, float] | None

    @property
    def params_non_embedding(self) -> int:
        """Without tables of tokens and positions and without an untied head."""
        return self.params_total - self.params_embedding - self.params_head

    @property
    def flops_per_token(self) -> float | None:
        """Sum of all terms."""
        return None if self.flops is None else sum(self.flops.values())


def cost(settings: ModelSettings, tokens: int, *, discount: bool = True) -> Cost:
    """The cost at sequences of `tokens` tokens. Without `discount` a query pays for every key, as counters have it."""
    total = active = 0
    for layer, times in settings.distinct_layers():
        shape = settings.shape
        norms = layer.block.n_norms(2) * layer.norm.params(shape.d_model)
        shared = layer.attention.params(shape) + norms
        total += times * (shared + layer.feed_forward.params(shape))
        active += times * (shared + layer.feed_forward.params_active(shape))
    last = settings.layer(settings.n_layers - 1)
    final = last.norm.params(settings.d_model) if last.block.final_norm else 0
    table = settings.shape.vocab_size * settings.d_model
    embedding = table + settings.position.params(settings.shape)
    head = 0 if settings.tie_embeddings else table
    return Cost(
        params_total=total + final + embedding + head,
        params_active=active + final + embedding + head,
        params_embedding=embedding,
        params_head=head,
        flops=_flops(settings, tokens, discount),
    )


def stages(settings: ModelSettings, tokens: int) -> list[dict[str, Any]]:
    """The way of a token through the model: output shape, parameters, FLOPs and cached numbers of each stage."""
    shape = settings.shape
    table = shape.vocab_size * shape.d_model
    stream = f"(B, T, {shape.d_model})"
    found = [_stage("embedding", 1, stream, table, table, 0.0)]
    if positions := settings.position.params(shape):
        found.append(_stage(f"position {settings.position.name}", 1, stream, positions, positions, 0.0))
    for layer, times in settings.distinct_layers():
        found += [each | {"times": times} for each in _layer_stages(layer, settings, tokens, stream)]
    last = settings.layer(shape.n_layers - 1)
    if last.block.final_norm:
        final = last.norm.params(shape.d_model)
        found.append(_stage(f"final {last.norm.name}", 1, stream, final, final, 0.0))
    head = 0 if settings.tie_embeddings else table
    return [*found, _stage("head", 1, f"(B, T, {shape.vocab_size})", head, head, 2.0 * table)]


def _layer_stages(layer: LayerSettings, settings: ModelSettings, tokens: int, stream: str) -> list[dict[str, Any]]:
    shape, attention, feed_forward = settings.shape, layer.attention, layer.feed_forward
    norms = layer.block.n_norms(2) * layer.norm.params(shape.d_model)
    mixing, each = attention.flops(shape, tokens), feed_forward.flops(shape)
    own, used = feed_forward.params(shape), feed_forward.params_active(shape)
    cached = attention.cache_elements(shape, 1)
    return [
        _stage(f"{layer.block.name} with {layer.norm.name}", 1, stream, norms, norms, 0.0),
        _stage(attention.name, 1, stream, attention.params(shape), attention.params(shape), _sum(mixing), cached),
        _stage(feed_forward.name, 1, stream, own, used, _sum(each)),
    ]


def _sum(terms: dict[str, float] | None) -> float | None:
    return None if terms is None else sum(terms.values())


def _stage(
    stage: str, times: int, output: str, params: int, active: int, flops: float | None, cache: int | None = 0
) -> dict[str, Any]:
    costs = {"params": params, "params_active": active, "flops": flops, "cache": cache}
    return {"stage": stage, "times": times, "output": output, **costs}


def _flops(settings: ModelSettings, tokens: int, discount: bool) -> dict[str, float] | None:
    shape = settings.shape
    terms: dict[str, float] = defaultdict(float)
    for layer, times in settings.distinct_layers():
        attention = layer.attention.flops(shape, tokens, discount=discount)
        feed_forward = layer.feed_forward.flops(shape)
        if attention is None or feed_forward is None:
            return None
        for name, flops in {**attention, **feed_forward}.items():
            terms[name] += times * flops
    terms["head"] = 2.0 * shape.d_model * shape.vocab_size
    return dict(terms)


def cache_bytes(settings: ModelSettings, batch: int, tokens: int, precision: str) -> int | None:
    """Bytes that `batch` sequences of `tokens` tokens keep, all layers; None where a choice does not say."""
    elements = [
        (layer.attention.cache_elements(settings.shape, tokens), times) for layer, times in settings.distinct_layers()
    ]
    if any(each is None for each, _ in elements):
        return None
    return batch * BYTES[precision] * sum((each or 0) * times for each, times in elements)


def cache_bytes_per_token(settings: ModelSettings, precision: str) -> int | None:
    """The slope of `cache_bytes` at full length; 0 for a state of fixed size."""
    full = cache_bytes(settings, 1, settings.max_seq_len, precision)
    before = cache_bytes(settings, 1, settings.max_seq_len - 1, precision)
    return None if full is None or before is None else full - before


def training_bytes(settings: ModelSettings, params_total: int, sequences: int, tokens: int) -> int:
    """A rough prediction of training's memory: weights, gradients and Adam's state in float32, and what backward keeps.

    Of activations some 16 d_model numbers a layer and token are reckoned, the feed-forward's share by its parameters,
    and three copies of the logits.
    """
    shape = settings.shape
    kept = sum(
        times * (16 * shape.d_model + 2 * layer.feed_forward.params_active(shape) // shape.d_model)
        for layer, times in settings.distinct_layers()
    )
    return 4 * (4 * params_total + sequences * tokens * (kept + 3 * shape.vocab_size))

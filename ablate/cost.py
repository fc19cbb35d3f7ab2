"""What a variant costs, reckoned from its settings alone: parameters, FLOPs, KV cache, memory. Nothing is built.

FLOPs are those of matrix products, a multiply-add counted as two; looking up an embedding costs none, the output head
counts. Of an encoder-decoder a sequence's first half is the source and the rest the target, and its FLOPs are shared
among the tokens of both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.choice import Shape
from ablate.settings import LayerSettings, ModelSettings, StackSettings

if TYPE_CHECKING:
    from ablate.attention import AttentionChoice

BYTES = {"fp32": 4, "bf16": 2}

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Numbers of devices for which the share of each is told."""

ENDLESS = 2**60
"""Tokens; what a cache does not weigh then it never does."""


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
        """Without tables of tokens, types and positions and without an untied head."""
        return self.params_total - self.params_embedding - self.params_head

    @property
    def flops_per_token(self) -> float | None:
        """Sum of all terms."""
        return None if self.flops is None else sum(self.flops.values())


def cost(settings: ModelSettings, tokens: int, *, discount: bool = True) -> Cost:
    """The cost at sequences of `tokens` tokens. Without `discount` a query pays for every key, as counters have it."""
    found = stages(settings, tokens, discount=discount)
    return Cost(
        params_total=sum(stage["params"] * stage["times"] for stage in found),
        params_active=sum(stage["params_active"] * stage["times"] for stage in found),
        params_embedding=sum(stage["params"] for stage in found if stage["kind"] == "embedding"),
        params_head=sum(stage["params"] for stage in found if stage["kind"] == "head"),
        flops=_terms(found),
    )


def _terms(found: list[dict[str, Any]]) -> dict[str, float] | None:
    """FLOPs of all stages by term; None where one does not say."""
    terms: dict[str, float] = defaultdict(float)
    for stage in found:
        if stage["terms"] is None:
            return None
        for name, flops in stage["terms"].items():
            terms[name] += stage["times"] * flops
    return dict(terms)


# --- Stage by stage ---------------------------------------------------------------------------------------------------


def lengths(settings: ModelSettings, tokens: int) -> dict[str, int]:
    """Tokens that each stack sees of a sequence of `tokens` tokens."""
    if settings.family != "encoder_decoder":
        return {settings.family: tokens}
    return {"encoder": tokens // 2, "decoder": tokens - tokens // 2}


def stages(settings: ModelSettings, tokens: int, *, discount: bool = True) -> list[dict[str, Any]]:
    """The way of a sequence through the model: each stage's output shape, parameters, FLOPs a token and cached numbers.

    `kind` is "embedding" and "head" for what is not counted as the model's body. A stage that occurs several times is
    told once, with its `times`; `flops` and `cache` are those of one.
    """
    seen = lengths(settings, tokens)
    found = list(_embedding_stages(settings))
    stacks = settings.stacks
    for stack in stacks:
        share = seen[stack.name] / tokens
        for stage in _stack_stages(stack, settings, seen, discount):
            terms = stage["terms"]
            scaled = None if terms is None else {name: share * flops for name, flops in terms.items()}
            found.append(stage | {"terms": scaled})
    found += _head_stages(settings, stacks[-1], seen[stacks[-1].name] / tokens)
    return [stage | {"flops": None if stage["terms"] is None else sum(stage["terms"].values())} for stage in found]


def _embedding_stages(settings: ModelSettings) -> Iterator[dict[str, Any]]:
    width, stream = settings.d_embed or settings.d_model, f"(B, T, {settings.d_model})"
    yield _stage("embedding", f"(B, T, {width})", (settings.vocab_size or 0) * width, {}, kind="embedding")
    if width != settings.d_model:
        table = width * settings.d_model
        yield _stage("embedding projection", stream, table, {"embedding": 2.0 * table})
    if settings.n_token_types:
        yield _stage("token types", stream, settings.n_token_types * settings.d_model, {}, kind="embedding")


def _stack_stages(
    stack: StackSettings, settings: ModelSettings, seen: dict[str, int], discount: bool
) -> Iterator[dict[str, Any]]:
    stream = f"(B, {'S' if _is_source(stack, settings) else 'T'}, {settings.d_model})"
    before = f"{stack.name} " if settings.family == "encoder_decoder" else ""
    for scheme in stack.schemes()[0]:
        if params := scheme.choice.params(scheme.shape, scheme.rotary_dim):
            kind = "embedding" if scheme.choice.embeds else "body"
            yield _stage(f"{before}position {scheme.choice.name}", stream, params, {}, kind=kind)
    norm = stack.usual.norm
    if settings.embed_norm:
        yield _stage(f"{before}embedding {norm.name}", stream, norm.params(settings.d_model), {})
    for layer, times in stack.distinct_layers():
        for stage in _layer_stages(layer, stack, seen, stream, discount):
            yield stage | {"stage": before + stage["stage"], "times": times}
    if stack.last.block.final_norm:
        yield _stage(f"{before}final {stack.last.norm.name}", stream, stack.last.norm.params(settings.d_model), {})


def _is_source(stack: StackSettings, settings: ModelSettings) -> bool:
    return stack.name == "encoder" and settings.family == "encoder_decoder"


def _layer_stages(
    layer: LayerSettings, stack: StackSettings, seen: dict[str, int], stream: str, discount: bool
) -> Iterator[dict[str, Any]]:
    shape, attention, feed_forward = stack.shape, layer.attention, layer.feed_forward
    tokens = max(1, seen[stack.name])
    norms = layer.n_norms * layer.norm.params(shape.d_model)
    yield _stage(f"{layer.block.name} with {layer.norm.name}", stream, norms, {})
    terms = attention.flops(shape, tokens, discount=discount)
    scheme = stack.scheme(layer)
    placed = scheme.choice.flops(scheme.shape, scheme.rotary_dim, tokens, discount=discount)
    terms = None if terms is None else terms | placed
    kept = _kept_of_a_token(attention, shape) if stack.name == "decoder" and attention.is_causal(shape) else 0
    yield _stage(attention.name, stream, attention.params(shape), terms, cache=kept)
    if layer.cross_attention is not None:
        crossed, crossing = layer.cross_attention, replace(shape, cross=True)
        terms = crossed.flops(crossing, tokens, discount=discount, source_tokens=seen["encoder"])
        kept = _kept_of_a_token(crossed, crossing)
        yield _stage(f"cross {crossed.name}", stream, crossed.params(crossing), terms, cache=kept)
    active = feed_forward.params_active(shape)
    yield _stage(feed_forward.name, stream, feed_forward.params(shape), feed_forward.flops(shape), active=active)


def _kept_of_a_token(attention: AttentionChoice, shape: Shape) -> int | None:
    """Numbers that a layer's cache grows by with a token, before any window is full."""
    one, none = attention.cache_elements(shape, 1), attention.cache_elements(shape, 0)
    return None if one is None or none is None else one - none


def _head_stages(settings: ModelSettings, last: StackSettings, share: float) -> Iterator[dict[str, Any]]:
    shape, head, width = last.shape, settings.head, settings.d_embed or settings.d_model
    stream = f"(B, T, {shape.d_model})"
    if head.transform:
        norm = last.usual.norm.params(shape.d_model)
        square = shape.d_model**2
        yield _stage("head transform", stream, square + shape.d_model + norm, {"head": share * 2.0 * square})
    if width != shape.d_model:
        terms = {"head": share * 2.0 * width * shape.d_model}
        yield _stage("head projection", f"(B, T, {width})", width * shape.d_model, terms)
    table, logits = width * shape.vocab_size, f"(B, T, {shape.vocab_size})"
    own = 0 if settings.tie_embeddings else table
    yield _stage("head", logits, own, {"head": share * 2.0 * table}, kind="head")
    if head.bias is True:
        yield _stage("head bias", logits, shape.vocab_size, {})


def _stage(
    stage: str,
    output: str,
    params: int,
    terms: dict[str, float] | None,
    *,
    active: int | None = None,
    cache: int | None = 0,
    kind: str = "body",
) -> dict[str, Any]:
    used = params if active is None else active
    costs = {"params": params, "params_active": used, "terms": terms, "cache": cache}
    return {"stage": stage, "kind": kind, "times": 1, "output": output, **costs}


# --- Memory -----------------------------------------------------------------------------------------------------------


def cache_elements(settings: ModelSettings, tokens: int, source_tokens: int = 0, devices: int = 1) -> int | None:
    """Numbers that one sequence of `tokens` tokens keeps, all layers, and what is kept of `source_tokens` of another.

    Of several `devices` that share the heads, those on the fullest. 0 where nothing is decoded token by token; None
    where a choice does not say, or cannot be shared so.
    """
    stack = settings.stacks[-1]
    if stack.name == "encoder" or not settings.is_causal:
        return 0
    total = 0
    for layer, times in stack.distinct_layers():
        crossed, crossing = layer.cross_attention, replace(stack.shape, cross=True)
        own = _kept(layer.attention, stack.shape, tokens, devices)
        other = 0 if crossed is None else _kept(crossed, crossing, source_tokens, devices)
        if own is None or other is None:
            return None
        total += times * (own + other)
    return total


def _kept(attention: AttentionChoice, shape: Shape, tokens: int, devices: int) -> int | None:
    if devices == 1:
        return attention.cache_elements(shape, tokens)
    return attention.cache_elements_per_device(shape, tokens, devices)


def cache_bytes(
    settings: ModelSettings, batch: int, tokens: int, precision: str, source_tokens: int = 0, devices: int = 1
) -> int | None:
    """Bytes of `cache_elements` for `batch` sequences."""
    elements = cache_elements(settings, tokens, source_tokens, devices)
    return None if elements is None else batch * BYTES[precision] * elements


def cache_bytes_per_token(settings: ModelSettings, precision: str) -> int | None:
    """The slope of `cache_bytes` at full length; 0 for a state of fixed size, and for windows once they are full."""
    full = cache_bytes(settings, 1, settings.max_seq_len, precision)
    before = cache_bytes(settings, 1, settings.max_seq_len - 1, precision)
    return None if full is None or before is None else full - before


def cache_bytes_by_devices(settings: ModelSettings, precision: str) -> dict[int, int | None]:
    """Bytes of a full-length sequence's cache on each of 1, 2, 4, 8 devices under tensor parallelism.

    An encoder-decoder's has a source of that length too.
    """
    return {devices: _both(settings, settings.max_seq_len, precision, devices) for devices in TENSOR_PARALLEL}


def tokens_that_weigh_as_much(settings: ModelSettings, params_total: int, precision: str) -> int | None:
    """The length from which on one sequence's cache takes as many bytes as the weights, however long the model reads.

    An encoder-decoder's source is as long. None where it never does, since the cache stops growing, or where a choice
    does not say.
    """

    def is_enough(tokens: int) -> bool:
        return (_both(settings, tokens, precision) or 0) >= params_total * BYTES[precision]

    return bisect_left(range(1, ENDLESS + 1), True, key=is_enough) + 1 if is_enough(ENDLESS) else None


def _both(settings: ModelSettings, tokens: int, precision: str, devices: int = 1) -> int | None:
    """Of one sequence of so many tokens, with a source of as many where there is one."""
    source = tokens if len(settings.stacks) > 1 else 0
    return cache_bytes(settings, 1, tokens, precision, source, devices)


def training_bytes(settings: ModelSettings, params_total: int, sequences: int, tokens: int) -> int:
    """A rough prediction of training's memory: weights, gradients and Adam's state in float32, and what backward keeps.

    Of activations some 16 d_model numbers a layer and token are reckoned, the feed-forward's share by its parameters,
    and three copies of the logits.
    """
    kept = sum(
        times * (16 * stack.shape.d_model + 2 * layer.feed_forward.params_active(stack.shape) // stack.shape.d_model)
        for stack in settings.stacks
        for layer, times in stack.distinct_layers()
    )
    return 4 * (4 * params_total + sequences * tokens * (kept + 3 * settings.shape.vocab_size))

"""What stands in a score, query by query and key by key: scale, softcap, bias, hiding, and the norms before them.

The head's own softcap and scale and DeepNorm's numbers are held here against their formulas, as built models have them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from references import rms_norm, rotated, tiny
from torch import Tensor, nn

import ablate
from ablate import registry
from ablate.attention import AttentionChoice, Scoring, attend, visible_keys
from ablate.choice import Shape
from ablate.init import initialise
from ablate.linear import PackedLinear
from ablate.model import Layer, Stack
from ablate.position import Position
from ablate.position.rope import Rotary

SHAPE = Shape(d_model=16, n_layers=2, n_heads=4, max_seq_len=16, vocab_size=32)
TOKENS, SOURCE_TOKENS, EPS = 7, 5, 0.1


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    causal: bool = True,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    start: int = 0,
    first: int = 0,
) -> Tensor:
    """Queries `(B, H, T, d)` at `start` … over keys `(B, Hk, K, d)` at `first` …; zeros where nothing is seen."""
    group, out = q.shape[1] // k.shape[1], torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    queries, keys, values = q.tolist(), k.tolist(), v.tolist()
    added = None if bias is None else bias.expand(*q.shape[:-1], k.shape[2]).tolist()
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        weights = {}
        for s in range(k.shape[2]):
            if not sees(start + t, first + s, causal, window, chunk) or (mask is not None and not mask[b, s]):
                continue
            score = scale * sum(x * y for x, y in zip(queries[b][h][t], keys[b][h // group][s], strict=True))
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if added is not None:
                score += added[b][h][t][s]
            weights[s] = math.exp(score)
        if weights:
            sums = (sum(weights[s] * values[b][h // group][s][e] for s in weights) for e in range(v.shape[-1]))
            out[b, h, t] = torch.tensor(list(sums), dtype=torch.float64) / sum(weights.values())
    return out


def sees(query: int, key: int, causal: bool, window: int | None, chunk: int | None) -> bool:
    """Whether a token sees another, by their places."""
    if causal and key > query:
        return False
    if window is not None and abs(query - key) > window - 1:
        return False
    return chunk is None or query // chunk == key // chunk


CASES: dict[str, dict[str, Any]] = {
    "plain": {"n_kv_heads": 4},
    "gqa": {},
    "both_ways": {"causal": False},
    "window": {"window": 3},
    "window_both_ways": {"window": 3, "causal": False},
    "chunk": {"chunk": 3},
    "chunk_both_ways": {"chunk": 3, "causal": False},
    "scale": {"scale": 0.7},
    "scale_1": {"scale": 1.0},
    "bias": {"bias": (2, 4)},
    "padding": {"mask": True},
    "padding_bias": {"mask": True, "bias": (4,), "scale": 0.2},
    "softcap": {"softcap": 1.5},
    "softcap_bias": {"softcap": 1.5, "scale": 1.0, "bias": (4,)},
    "all": {"softcap": 1.5, "scale": 0.7, "bias": (2, 4), "mask": True, "window": 4, "chunk": 5, "causal": False},
}
PLACES = {"alone": (0, 7, 0, 7), "cached": (5, 3, 2, 6), "one_query": (6, 1, 1, 6), "amid_the_keys": (3, 3, 1, 8)}
"""Place of the first query, queries, place of the first key, keys."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["sdpa", "math", "flex"])
def test_every_kernel_is_the_loop_over_queries_and_keys(kernel: Any, case: str, place: str) -> None:
    given, (start, n_queries, first, n_keys) = dict(CASES[case]), PLACES[place]
    if kernel == "sdpa" and "softcap" in given:
        pytest.skip("torch's own fused kernels bound no scores, and the settings refuse it")
    heads, masked, biased = given.pop("n_kv_heads", 2), given.pop("mask", False), given.pop("bias", None)
    q, k, v = noise(2, 4, n_queries, 8), noise(2, heads, n_keys, 8, seed=2), noise(2, heads, n_keys, 6, seed=3)
    bias = None if biased is None else noise(*biased, n_queries, n_keys, seed=4)
    mask = torch.tensor([[False, False, *[True] * (n_keys - 2)], [*[True] * (n_keys - 3), *[False] * 3]])
    rules: dict[str, Any] = {"start": start, "first": first, "bias": bias, "mask": mask if masked else None}
    expected = reference(q, k, v, **{"scale": 8**-0.5} | given, **rules)
    with torch.compiler.set_stance("force_eager"):  # flex traces every new call, which takes longer than computing it
        found = attend(q, k, v, Scoring(kernel=kernel, **given), **rules)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_visible_keys_are_those_counted(causal: bool) -> None:
    sizes = (None, 1, 2, 3, 5, 20)
    for tokens, window, chunk in itertools.product((1, 2, 6, 9), sizes, sizes):
        seen = [sees(query, key, causal, window, chunk) for query in range(tokens) for key in range(tokens)]
        assert visible_keys(tokens, causal, window, chunk) == pytest.approx(sum(seen) / tokens), (tokens, window, chunk)


class Louder(Rotary):
    """A rotation that also stretches, as YaRN's does: what is normalised after it differs from what is before it."""

    def rotate(self, x: Tensor, start: int) -> Tensor:
        return 1.5 * super().rotate(x, start)


Turn = Callable[[Tensor], Tensor]


def turned(heads: Tensor) -> Tensor:
    return torch.stack([1.5 * rotated(head) for head in heads.flatten(0, 1)]).view_as(heads)


def untouched(heads: Tensor) -> Tensor:
    return heads


def built(cross: bool = False, **settings: Any) -> Any:
    """The module of an attention's settings, everything in it drawn, the weights of its norms as well."""
    choice = cast(AttentionChoice, registry.configure("attention", settings))
    module = choice.build(replace(SHAPE, cross=cross))
    initialise(module, "normal", 0.4, seed=0)
    for i, (name, weight) in enumerate(module.named_parameters()):
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 2.0, generator=torch.Generator().manual_seed(i))
    return module.double()


def in_heads(x: Tensor, width: int) -> Tensor:
    return torch.stack(x.split(width, dim=-1), dim=1)


def joined(heads: Tensor) -> Tensor:
    return torch.cat(heads.unbind(1), dim=-1)


def grouped(module: Any, qk_norm: str, x: Tensor, memory: Tensor, turn: Turn, **rules: Any) -> Tensor:
    """Grouped attention of `x` `(B, T, D)` over `memory` `(B, S, D)`: project, normalise, cut, normalise, turn, …"""
    if module.cross:
        w_q, (w_k, w_v) = module.q.weight, module.kv.weight.split(module.kv.parts)
    else:
        w_q, w_k, w_v = module.qkv.weight.split(module.qkv.parts)
    q, k, v = x @ w_q.T, memory @ w_k.T, memory @ w_v.T
    if qk_norm == "projection":
        q, k = rms_norm(q, module.q_norm.weight, EPS), rms_norm(k, module.k_norm.weight, EPS)
    q, k, v = (in_heads(each, 6) for each in (q, k, v))
    if qk_norm == "head":
        q, k = rms_norm(q, module.q_norm.weight, EPS), rms_norm(k, module.k_norm.weight, EPS)
    q, k = turn(q), turn(k)
    if qk_norm == "l2":
        q, k = rms_norm(q, torch.ones(6), EPS), rms_norm(k, torch.ones(6), EPS)
    out = reference(q, k, v, **{"scale": 6**-0.5} | rules)
    return joined(out) @ cast(Tensor, module.out.weight).T


def latent(module: Any, x: Tensor, memory: Tensor, turn: Turn, **rules: Any) -> Tensor:
    """Latent attention of `x` `(B, T, D)` over `memory` `(B, S, D)`, every key and value expanded."""
    if module.cross:
        w_q, (w_latent, w_rope) = module.compress_q.weight, module.compress_kv.weight.split(module.compress_kv.parts)
    else:
        w_q, w_latent, w_rope = module.compress.weight.split(module.compress.parts)
    q = rms_norm(x @ w_q.T, module.q_norm.weight, 1e-6) @ module.q_up.weight.T
    q_nope, q_rope = in_heads(q, 6 + 4).split([6, 4], dim=-1)
    kv = rms_norm(memory @ w_latent.T, module.kv_norm.weight, 1e-6) @ module.kv_up.weight.T
    k_nope, v = in_heads(kv, 6 + 5).split([6, 5], dim=-1)
    k_rope = turn((memory @ w_rope.T)[:, None]).expand(-1, 4, -1, -1)
    q, k = torch.cat([q_nope, turn(q_rope)], dim=-1), torch.cat([k_nope, k_rope], dim=-1)
    out = reference(q, k, v, **{"scale": 10**-0.5} | rules)
    return joined(out) @ cast(Tensor, module.out.weight).T


def whole_and_decoded(module: Any, x: Tensor, position: Position, mask: Tensor | None, memory: Any) -> list[Tensor]:
    """What the module makes of `x` at once, and piece by piece with a cache, which reads `memory` at its first call."""
    cache = module.new_cache(2, TOKENS, torch.float64, x.device)
    pieces = x.split((3, 2, 1, 1), dim=1)
    steps = [
        module(piece, position, start, mask, cache, None if start else memory)
        for piece, start in zip(pieces, (0, 3, 5, 6), strict=True)
    ]
    return [module(x, position, 0, mask, None, memory), torch.cat(steps, dim=1)]


GROUPED: list[dict[str, Any]] = [
    {"qk_norm": "head", "qk_norm_eps": EPS},
    {"qk_norm": "projection", "qk_norm_eps": EPS},
    {"qk_norm": "l2", "qk_norm_eps": EPS},
    {"window": 3},
    {"window": 3, "causal": False},
    {"chunk": 3},
    {"softcap": 1.5},
    {"softcap": 1.5, "scale": "none", "window": 2},
    {"scale": 0.3, "kernel": "math"},
    {"scale": "none"},
]
LATENT: list[dict[str, Any]] = [
    {"softcap": 1.5, "decode": "expanded"},
    {"softcap": 1.5, "scale": 0.9, "decode": "absorbed"},
    {"scale": 0.9, "kernel": "sdpa"},
]
WIDTHS: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def rules_of(settings: dict[str, Any]) -> dict[str, Any]:
    rules: dict[str, Any] = {
        key: settings[key] for key in ("softcap", "window", "chunk", "causal", "scale") if key in settings
    }
    return rules | {"scale": 1.0} if settings.get("scale") == "none" else rules


@pytest.mark.parametrize("settings", GROUPED, ids=str)
@torch.no_grad()
def test_grouped_attention_is_the_loop(settings: dict[str, Any]) -> None:
    module, x = built(name="gqa", n_kv_heads=2, head_dim=6, **settings), noise(2, TOKENS, 16)
    expected = grouped(module, settings.get("qk_norm", "none"), x, x, turned, **rules_of(settings))
    whole, decoded = whole_and_decoded(module, x, Louder(6), None, None)
    torch.testing.assert_close(whole, expected, atol=1e-12, rtol=0)
    if settings.get("causal", True):
        torch.testing.assert_close(decoded, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("settings", LATENT, ids=str)
@torch.no_grad()
def test_latent_attention_is_the_loop(settings: dict[str, Any]) -> None:
    module, x = built(name="mla", **WIDTHS, **settings), noise(2, TOKENS, 16)
    expected = latent(module, x, x, turned, **rules_of(settings))
    for found in whole_and_decoded(module, x, Louder(4), None, None):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


CROSS: list[dict[str, Any]] = [
    {},
    {"qk_norm": "head", "qk_norm_eps": EPS},
    {"qk_norm": "projection", "qk_norm_eps": EPS},
    {"qk_norm": "l2", "qk_norm_eps": EPS, "scale": 0.3},
    {"softcap": 1.5},
]
MASK = torch.tensor([[True] * 5, [False, True, True, True, False]])


@pytest.mark.parametrize("settings", CROSS, ids=str)
@torch.no_grad()
def test_grouped_cross_attention_is_the_loop(settings: dict[str, Any]) -> None:
    module = built(cross=True, name="gqa", n_kv_heads=2, head_dim=6, **settings)
    x, memory = noise(2, TOKENS, 16), noise(2, SOURCE_TOKENS, 16, seed=2)
    rules = {"causal": False, "mask": MASK} | rules_of(settings)
    expected = grouped(module, settings.get("qk_norm", "none"), x, memory, untouched, **rules)
    for found in whole_and_decoded(module, x, Position(), MASK, memory):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("settings", LATENT, ids=str)
@torch.no_grad()
def test_latent_cross_attention_is_the_loop(settings: dict[str, Any]) -> None:
    module = built(cross=True, name="mla", **WIDTHS, **settings)
    x, memory = noise(2, TOKENS, 16), noise(2, SOURCE_TOKENS, 16, seed=2)
    expected = latent(module, x, memory, untouched, causal=False, mask=MASK, **rules_of(settings))
    for found in whole_and_decoded(module, x, Position(), MASK, memory):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
@torch.no_grad()
def test_the_head_scales_before_its_product_and_bounds_after_its_bias(softcap: float | None, scale: bool) -> None:
    settings = tiny(head={"softcap": softcap, "scale": scale, "bias": True}, vocab_size=6)
    head, x = ablate.build(settings).head.double(), 3 * noise(4, 32)
    head.output.bias.copy_(noise(len(head.output.bias), seed=2))
    logits = head(x)
    for t, i in itertools.product(range(4), range(logits.shape[1])):
        expected = float(x[t] @ head.output.weight[i]) * (32**-0.5 if scale else 1.0) + float(head.output.bias[i])
        expected = softcap * math.tanh(expected / softcap) if softcap else expected
        assert float(logits[t, i]) == pytest.approx(expected, abs=1e-12)


STD = 0.05
DEEP: dict[str, dict[str, Any]] = {
    "mha": {"attention": "mha", "n_layers": 3},
    "mla": {"attention": {"name": "mla", "q_lora_rank": 32}, "n_layers": 3, "feed_forward": "swiglu"},
    "encoder": {"family": "encoder", "n_layers": 3},
    "as_deep": {"family": "encoder_decoder", "n_layers": 2},
    "deeper_encoder": {"family": "encoder_decoder", "n_layers": 2, "encoder": {"n_layers": 5}},
    "mla_crossed": {"family": "encoder_decoder", "n_layers": 1, "encoder": {"n_layers": 3}, "attention": "mla"},
}


def deep(case: str) -> Iterator[tuple[Layer, float, float]]:
    """Layers of a model as it is built, with the paper's alpha and beta (its table of section 3)."""
    common = {"d_model": 64, "n_heads": 4, "max_seq_len": 8, "vocab_size": 16, "init_std": STD, "block": "deep_norm"}
    model = ablate.build({"position": "rope", "feed_forward": "relu", "norm": "layer_norm", **common, **DEEP[case]})
    stacks = {name: list(stack.layers) for name, stack in model.named_children() if isinstance(stack, Stack)}
    n, m = len(stacks.get("encoder", [])), len(stacks.get("decoder", []))
    gains = dict.fromkeys(stacks, ((2 * (n + m)) ** (1 / 4), (8 * (n + m)) ** (-1 / 4)))  # one of n and m is 0
    if n and m:
        gains["encoder"] = (0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16))
        gains["decoder"] = ((3 * m) ** (1 / 4), (12 * m) ** (-1 / 4))
    for name, layers in stacks.items():
        yield from ((cast(Layer, layer), *gains[name]) for layer in layers)


@pytest.mark.parametrize("case", DEEP)
@torch.no_grad()
def test_deep_norm_multiplies_what_is_kept_by_the_papers_alpha(case: str) -> None:
    x = noise(1, 2, 64)
    for layer, alpha, _ in deep(case):
        norms: Sequence[Turn] = [untouched] * len(layer.norms)
        kept = layer.block(x, norms, [torch.zeros_like] * len(norms))
        torch.testing.assert_close(kept, alpha ** len(norms) * x)
        added = layer.block(x, norms[:1], [torch.ones_like])
        torch.testing.assert_close(added, alpha * x + 1)


@pytest.mark.parametrize("case", DEEP)
def test_deep_norm_draws_the_value_path_by_the_papers_beta(case: str) -> None:
    for layer, _, beta in deep(case):
        drawn = list(matrices(layer))
        assert sum(on_the_value_path for _, on_the_value_path, _ in drawn) >= 4
        for name, on_the_value_path, matrix in drawn:
            assert float(matrix.std()) == pytest.approx(STD * (beta if on_the_value_path else 1.0), rel=0.06), name


def matrices(layer: Layer) -> Iterator[tuple[str, bool, Tensor]]:
    """Every matrix of a layer: its name, whether values go through it, and its weights."""
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module.weight.detach()
        if name.endswith(".kv_up"):
            keys, values = weight.unflatten(0, (4, -1)).chunk(2, dim=1)
            yield from ((f"{name}, keys", False, keys), (f"{name}, values", True, values))
        elif isinstance(module, PackedLinear) and name.endswith((".qkv", ".kv")):
            *others, values = weight.split(module.parts)
            yield from ((f"{name}, part {i}", False, part) for i, part in enumerate(others))
            yield f"{name}, values", True, values
        else:
            yield name, name.startswith("feed_forward") or name.endswith(".out"), weight

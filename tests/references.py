"""What the fast code is held against: a tiny model to vary, and slow float64 references that loop over everything."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ablate import grid, registry
from ablate.choice import Choice, Faults
from ablate.feed_forward._balance import balance, choices
from ablate.model import ModelCache, Transformer
from ablate.settings import ModelSettings, VariantSettings, resolved, typed

torch.set_num_threads(1)  # on tensors this small a second thread only costs

TOKENS = 10
FAMILIES = ("decoder", "encoder", "encoder_decoder")


def tiny(**changes: Any) -> ModelSettings:
    """A small model with every default filled in; weights wide enough for every part to matter."""
    model: dict[str, Any] = {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 16,
        "vocab_size": 48,
        "attention": "mha",
        "position": "rope",
        "feed_forward": "relu",
        "norm": "rms_norm",
        "block": "pre_norm",
        "init_std": 0.2,
    }
    train = {"steps": 1, "batch_tokens": 16, "seq_len": 1}
    tree = {"model": model | changes, "data": {"name": "cycle"}, "train": train, "profile": {}}
    return resolved(typed(tree)).model


SMALL: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 32,
    "vocab_size": 32,
    "attention": "mha",
    "position": "rope",
    "feed_forward": "gelu",
    "norm": "layer_norm",
    "block": "pre_norm",
}
"""A model to be measured, as a file has it."""


def to_measure(model: dict[str, Any] | None = None, **profile: Any) -> VariantSettings:
    """A variant whose profile asks for that."""
    train = {"steps": 20, "batch_tokens": 64, "eval_every": 10}
    data = {"name": "random_tokens", "vocab_size": 32}
    return resolved(typed({"model": SMALL | (model or {}), "train": train, "data": data, "profile": profile}))


class Parent:
    """Takes messages as the runner does."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def send(self, message: tuple[Any, ...]) -> None:
        self.messages.append(message)

    def of(self, kind: str) -> list[Any]:
        return [message[1] for message in self.messages if message[0] == kind]

    @property
    def columns(self) -> dict[str, Any]:
        return {name: value for columns in self.of("columns") for name, value in columns.items()}

    @property
    def outcome(self) -> tuple[str, str, str]:
        assert [message[0] for message in self.messages].count("outcome") == 1
        assert self.messages[-1][0] == "outcome"
        return self.messages[-1][1:]

    def table(self, kind: str) -> list[dict[str, Any]]:
        return [
            dict(zip(message, row, strict=True))
            for message in self.of(kind)
            for row in zip(*message.values(), strict=True)
        ]


CHOICES = [(slot, name) for slot in registry.SLOTS for name in registry.names(slot)]
SETTINGS: list[dict[str, Any]] = [
    {"attention": {"name": "gqa", "window": 4}},
    {"attention": {"name": "mha", "window": 3}, "position": "alibi"},
    {"attention": {"name": "mqa", "window": 5}, "position": "transformer_xl"},
    {
        "attention": {"name": "mha", "chunk": 4},
        "layers": [{"every": 2, "position": "none", "attention": {"chunk": None}}],
    },
    {"attention": {"name": "gqa", "qk_norm": "head", "bias": "qkv"}},
    {"attention": {"name": "gqa", "qk_norm": "projection", "bias": True}},
    {"attention": {"name": "mha", "qk_norm": "l2"}},
    {"attention": {"name": "mha", "scale": "none", "softcap": 5.0}},
    {"attention": {"name": "mha", "kernel": "math"}, "position": "t5"},
    {"attention": {"name": "mha", "causal": False}, "position": "transformer_xl"},
    {"attention": {"name": "mla", "q_lora_rank": 12, "scale": 0.1, "softcap": 5.0}},
    {"attention": {"name": "mla", "decode": "expanded"}},
    {"position": {"name": "rope", "fraction": 0.5, "layout": "interleaved"}},
    {"position": {"name": "learned", "offset": 2}},
    {"norm": {"name": "layer_norm", "bias": False}},
    {"norm": {"name": "rms_norm", "unit_offset": True}},
    {"block": {"name": "parallel", "shared_norm": False}},
    {"feed_forward": {"name": "moe", "n_shared_experts": 2, "score": "sigmoid", "balance": "bias"}},
    {"feed_forward": {"name": "moe", "n_expert_groups": 4, "top_groups": 2}},
    {"d_embed": 16},
    {"embed_norm": True, "embed_scale": True, "n_token_types": 2},
    {"head": {"transform": True, "softcap": 3.0, "scale": True}},
    {"head": {"bias": "fixed"}},
]
"""Settings that make another function of a choice, or of the model around it."""


def _slots() -> Iterator[dict[str, Any]]:
    for attention in registry.names("attention"):
        yield from ({"attention": attention, "position": position} for position in registry.names("position"))
    for slot in ("feed_forward", "norm", "block"):
        yield from ({slot: name} for name in registry.names(slot))
    yield from SETTINGS


def reasons(variant: dict[str, Any]) -> list[str]:
    """Why a variant is refused; nothing where it is not."""
    try:
        tiny(**variant)
    except Faults as found:
        return [fault.message for fault in found.faults]
    return []


ALL = [{"family": family, **slots} for family in FAMILIES for slots in _slots()]
REFUSED = [variant for variant in ALL if reasons(variant)]
VARIANTS = [variant for variant in ALL if variant not in REFUSED]


def spell(variant: dict[str, Any]) -> str:
    """A variant as a test's name."""
    return "-".join(grid.text(value) for value in variant.values())


def facts(variant: dict[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """What the variant's attention offers, and what its position and its family need of it."""
    settings = {
        slot: registry.config_class(slot, variant.get(slot, usual))
        for slot, usual in (("attention", "mha"), ("position", "rope"))
    }
    also = {"decoder": set(), "encoder": {"bidirectional"}, "encoder_decoder": {"bidirectional", "cross"}}
    needs = settings["position"].needs | also[variant["family"]]  # type: ignore[attr-defined]
    return settings["attention"].offers, frozenset(needs)  # type: ignore[attr-defined]


def call(model: Transformer, ids: Tensor, **more: Any) -> Tensor:
    """Logits of the ids `(B, T)`; an encoder-decoder's of them as its target, with the same as its source, reversed."""
    both = (ids.flip(1), ids) if model.settings.family == "encoder_decoder" else (ids,)
    logits: Tensor = model(*both, **more)
    return logits


def decoded(model: Transformer, ids: Tensor, pieces: tuple[int, ...]) -> tuple[Tensor, ModelCache]:
    """The same through a cache, piece by piece."""
    cache = model.new_cache(len(ids), ids.shape[1] + 3, ids.shape[1])
    first, *rest = ids.split(pieces, dim=1)
    if model.settings.family == "encoder_decoder":
        logits = [model(ids.flip(1), first, cache=cache), *(model(None, piece, cache=cache) for piece in rest)]
    else:
        logits = [model(piece, cache=cache) for piece in (first, *rest)]
    return torch.cat(logits, dim=1), cache


def default(slot: str, name: str) -> Choice:
    """The choice as it is when nothing but its name is given."""
    return registry.configure(slot, name)


Turn = Callable[[Tensor], Tensor]


def attention_of_one_head(q: Tensor, k: Tensor, v: Tensor, scale: float, slope: float = 0.0) -> Tensor:
    """Causal attention of `(T, d)`, query by query and key by key."""
    out = torch.zeros(len(q), v.shape[-1], dtype=torch.float64)
    for t in range(len(q)):
        scores = [scale * float(q[t] @ k[s]) - slope * (t - s) for s in range(t + 1)]
        total = sum(math.exp(score) for score in scores)
        for s, score in enumerate(scores):
            out[t] += math.exp(score) / total * v[s]
    return out


def grouped_attention(module: Any, x: Tensor, turn: Turn, slopes: list[float]) -> Tensor:
    """Queries' head h with key/value head h // (heads a group), for one sequence `(T, D)`."""
    w_q, w_k, w_v = module.qkv.weight.detach().split(module.qkv.parts)
    width, group = module.head_dim, module.n_heads // module.n_kv_heads
    heads = []
    for h in range(module.n_heads):
        own, shared = slice(h * width, (h + 1) * width), slice(h // group * width, (h // group + 1) * width)
        q, k, v = turn(x @ w_q[own].T), turn(x @ w_k[shared].T), x @ w_v[shared].T
        heads.append(attention_of_one_head(q, k, v, width**-0.5, slopes[h]))
    return torch.cat(heads, -1) @ module.out.weight.detach().T


def latent_attention(module: Any, x: Tensor, turn: Turn, slopes: list[float]) -> Tensor:
    """DeepSeek-V2's equations 9-19 as they are printed, for one sequence `(T, D)`."""
    w_q, w_latent, w_k_rope = module.compress.weight.detach().split(module.compress.parts)
    queries = x @ w_q.T
    if isinstance(module.q_up, nn.Linear):
        queries = rms_norm(queries, module.q_norm.weight.detach(), 1e-6) @ module.q_up.weight.detach().T
    latent = rms_norm(x @ w_latent.T, module.kv_norm.weight.detach(), 1e-6)
    k_rope = turn(x @ w_k_rope.T)
    q_width, kv_width = module.nope + module.rope, module.nope + module.v_dim
    heads = []
    for h in range(module.n_heads):
        q = queries[:, h * q_width : (h + 1) * q_width]
        q = torch.cat([q[:, : module.nope], turn(q[:, module.nope :])], -1)
        up = module.kv_up.weight.detach()[h * kv_width : (h + 1) * kv_width]
        k = torch.cat([latent @ up[: module.nope].T, k_rope], -1)
        heads.append(attention_of_one_head(q, k, latent @ up[module.nope :].T, q_width**-0.5, slopes[h]))
    return torch.cat(heads, -1) @ module.out.weight.detach().T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, base: float = 10000.0, start: int = 0) -> Tensor:
    """`(T, d)`: the pair (i, i + d/2) as one complex number, turned by position · base^(-2i/d)."""
    out, half = torch.empty_like(x), x.shape[-1] // 2
    for t in range(len(x)):
        for i in range(half):
            turned = complex(x[t, i], x[t, i + half]) * cmath.rect(1, (start + t) * base ** (-2 * i / (2 * half)))
            out[t, i], out[t, i + half] = turned.real, turned.imag
    return out


def alibi_slopes(n_heads: int) -> list[float]:
    """The recursion released with the paper."""

    def power_of_two(n: int) -> list[float]:
        first = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [first * first**i for i in range(n)]

    if math.log2(n_heads).is_integer():
        return power_of_two(n_heads)
    closest = 2 ** math.floor(math.log2(n_heads))
    return power_of_two(closest) + alibi_slopes(2 * closest)[0::2][: n_heads - closest]


def pooled_balance(logits: Tensor, top_k: int, real: Tensor | None = None) -> Tensor:
    """HuggingFace's Mixtral form of router logits `(layers, B, T, E)`: K when balanced, E when collapsed on K experts.

    Fractions and probabilities are pooled over layers before they are multiplied, which is not the mean of the layers'
    losses. `real` is `(B, T)`.
    """
    pooled, n_layers = logits.flatten(0, -2), len(logits)
    selected = choices(pooled.topk(top_k).indices, pooled.shape[-1])
    counted = None if real is None else real.flatten().repeat(n_layers)
    return top_k * balance(pooled.softmax(-1), selected, counted)

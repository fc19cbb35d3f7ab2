"""Feed-forward networks against slow references, number by number."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from references import tiny
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ablate import registry
from ablate.choice import Shape
from ablate.feed_forward import FeedForwardChoice, value_path
from ablate.feed_forward._routing import router_logits
from ablate.init import initialise
from ablate.model import build

SHAPE = Shape(d_model=12, n_layers=2, n_heads=2, max_seq_len=16, vocab_size=32)
NAMES = registry.names("feed_forward")
Function = Callable[[float], float]


def erf_gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def tanh_gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


DENSE: dict[str, tuple[dict[str, Any], Function]] = {
    "relu": ({"name": "relu"}, lambda x: max(0.0, x)),
    "gelu": ({"name": "gelu"}, erf_gelu),
    "gelu-tanh": ({"name": "gelu", "approximate": "tanh"}, tanh_gelu),
    "linear": ({"name": "linear"}, lambda x: x),
    "sigmoid": ({"name": "sigmoid"}, lambda x: 1 / (1 + math.exp(-x))),
    "tanh": ({"name": "tanh"}, math.tanh),
    "relu2": ({"name": "relu2"}, lambda x: max(0.0, x) ** 2),
    "silu": ({"name": "silu"}, lambda x: x / (1 + math.exp(-x))),
}
GATED: dict[str, tuple[dict[str, Any], Function]] = {
    "swiglu": ({"name": "swiglu"}, lambda x: x / (1 + math.exp(-x))),
    "geglu": ({"name": "geglu"}, erf_gelu),
    "geglu-tanh": ({"name": "geglu", "approximate": "tanh"}, tanh_gelu),
    "reglu": ({"name": "reglu"}, lambda x: max(0.0, x)),
}
MIXED: dict[str, dict[str, Any]] = {
    "soft_mixture": {"name": "soft_mixture", "n_experts": 3, "d_ff": 10},
    "soft_mixture-gelu": {"name": "soft_mixture", "n_experts": 5, "expert": "gelu"},
    "moe": {"name": "moe", "n_experts": 4, "top_k": 3, "d_ff": 10},
    "moe-shared": {"name": "moe", "n_experts": 4, "top_k": 1, "n_shared_experts": 3, "expert": "gelu", "d_ff": 6},
    "moe-bias": {"name": "moe", "n_experts": 6, "balance": "bias", "score": "sigmoid", "n_shared_experts": 1},
}
ALL = [
    *({**settings, **extra} for settings, _ in (DENSE | GATED).values() for extra in ({}, {"d_ff": 10, "bias": True})),
    *({**settings, "bias": False} for settings, _ in DENSE.values()),
    *MIXED.values(),
]
every_setting = pytest.mark.parametrize("settings", ALL, ids=lambda s: "-".join(map(str, s.values())))


def choice(settings: Any) -> FeedForwardChoice:
    return cast(FeedForwardChoice, registry.configure("feed_forward", settings)).resolve(SHAPE)


def built(settings: Any) -> nn.Module:
    """In float64, with biases that matter."""
    module = choice(settings).build(SHAPE).double()
    initialise(module, "normal", 0.5, seed=0)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(1))
    return module


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def matrix(layer: Any, x: list[float], rows: slice = slice(None)) -> list[float]:
    """W x + b, number by number."""
    weight, bias = layer.weight[rows].tolist(), [0.0] * len(layer.weight[rows])
    bias = bias if layer.bias is None else layer.bias[rows].tolist()
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("key", DENSE)
@torch.no_grad()
def test_a_plain_network_by_the_number(key: str, bias: bool) -> None:
    settings, act = DENSE[key]
    module, x = built({**settings, "d_ff": 10, "bias": bias}), noise(2, 3, 12)
    expected = [matrix(module.down, [act(h) for h in matrix(module.up, token)]) for token in x.flatten(0, 1).tolist()]
    torch.testing.assert_close(module(x).flatten(0, 1), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(module(x), module(x, torch.zeros(2, 3, dtype=torch.bool)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("key", GATED)
@torch.no_grad()
def test_a_gated_network_by_the_number(key: str, bias: bool) -> None:
    settings, act = GATED[key]
    module, x = built({**settings, "d_ff": 10, "bias": bias}), noise(2, 3, 12)
    expected = []
    for token in x.flatten(0, 1).tolist():
        gates, ups = (matrix(module.gate_up, token, rows) for rows in (slice(0, 10), slice(10, 20)))
        expected.append(matrix(module.down, [act(gate) * up for gate, up in zip(gates, ups, strict=True)]))
    torch.testing.assert_close(module(x).flatten(0, 1), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("key", ["soft_mixture", "soft_mixture-gelu"])
@torch.no_grad()
def test_the_dense_mixture_is_the_loop_over_all_experts(key: str) -> None:
    module, x = built(MIXED[key]), noise(2, 3, 12)
    for b, t in ((0, 0), (0, 2), (1, 1)):
        logits = matrix(module.router, x[b, t].tolist())
        total = sum(map(math.exp, logits))
        parts = [math.exp(logit) / total * e(x[b, t]) for logit, e in zip(logits, module.experts, strict=True)]
        torch.testing.assert_close(module(x)[b, t], sum(parts), atol=1e-12, rtol=0)


def test_every_expert_of_the_dense_mixture_gets_gradient_from_one_token() -> None:
    module = built(MIXED["soft_mixture"])
    module(noise(1, 1, 12)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_router_logits_are_float32_at_least_whatever_the_autocast(dtype: str, kept: str) -> None:
    x, router = (
        noise(2, 64, 12).to(getattr(torch, dtype)),
        built(MIXED["soft_mixture"]).to(getattr(torch, dtype)).router,
    )
    exact = x.double() @ router.weight.double().T
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(router, x)
    assert logits.dtype == getattr(torch, kept)
    torch.testing.assert_close(logits.double(), exact, atol=1e-5 if kept == "float32" else 1e-12, rtol=0)


def test_the_dense_mixture_says_its_input_s_precision() -> None:
    module, x = built(MIXED["soft_mixture"]).float(), noise(2, 5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.bfloat16()).dtype == torch.bfloat16
    assert module.double()(x).dtype == torch.float64


# --- What values go through -------------------------------------------------------------------------------------------


@every_setting
def test_values_go_through_every_matrix_but_the_router(settings: dict[str, Any]) -> None:
    module = built(settings)
    told = {weight.data_ptr() for weight in value_path(module)}
    matrices = {p.data_ptr(): name for name, p in module.named_parameters() if p.ndim == 2}
    assert set(matrices) - told == {place for place, name in matrices.items() if name == "router.weight"}
    assert told <= set(matrices)
    assert len(value_path(module)) == len(told)


def test_a_network_that_does_not_say_has_values_in_every_linear_map() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    assert [weight.shape for weight in value_path(network)] == [(4, 3), (3, 4)]


@pytest.mark.parametrize("settings", ["relu", "soft_mixture", {"name": "moe", "n_shared_experts": 1}], ids=str)
def test_deep_norm_softens_the_experts_and_not_the_router(settings: Any) -> None:
    plain, soft = (
        build(tiny(block=block, feed_forward=settings, norm="layer_norm")) for block in ("post_norm", "deep_norm")
    )
    beta = (8 * 2) ** -0.25
    drawn, gained = (dict(model.decoder.layers[1].feed_forward.named_parameters()) for model in (plain, soft))
    for name, weight in drawn.items():
        kept = name == "router.weight" or name.endswith("bias")
        assert torch.equal(gained[name], weight if kept else weight * beta), name


# --- Names, widths, costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ("gelu", ["down.bias", "down.weight", "up.bias", "up.weight"]),
        ("swiglu", ["down.weight", "gate_up.weight"]),
        ({"name": "geglu", "bias": True}, ["down.bias", "down.weight", "gate_up.bias", "gate_up.weight"]),
        (
            {"name": "soft_mixture", "n_experts": 1, "expert": "reglu"},
            ["experts.0.down.weight", "experts.0.gate_up.weight", "router.weight"],
        ),
        (
            {"name": "moe", "n_experts": 2, "top_k": 1, "n_shared_experts": 2, "balance": "bias"},
            [
                *(f"experts.{e}.{name}.weight" for e in (0, 1) for name in ("down", "gate_up")),
                *("router.weight", "selection_bias", "shared.down.weight", "shared.gate_up.weight"),
            ],
        ),
    ],
)
def test_names_in_the_state_dict(settings: Any, names: list[str]) -> None:
    assert sorted(choice(settings).build(SHAPE).state_dict()) == names


@pytest.mark.parametrize("name", NAMES)
def test_widths_unless_given(name: str) -> None:
    width = 4 * 12 if name in {settings["name"] for settings, _ in DENSE.values()} else 32  # 8/3 · 12, to 8
    assert choice(name).d_ff == width  # type: ignore[attr-defined]


def test_shared_experts_are_one_network_so_many_times_as_wide() -> None:
    module = choice({"name": "moe", "n_shared_experts": 3, "d_ff": 5}).build(SHAPE)
    assert module.shared.down.weight.shape == (12, 15)
    assert module.experts[0].down.weight.shape == (12, 5)


@every_setting
def test_promised_parameters_are_those_of_the_module(settings: dict[str, Any]) -> None:
    found = choice(settings)
    assert found.params(SHAPE) == sum(p.numel() for p in found.build(SHAPE).parameters())
    as_given = cast(FeedForwardChoice, registry.configure("feed_forward", settings))  # nothing filled in
    assert as_given.params(SHAPE) == found.params(SHAPE)
    assert as_given.flops(SHAPE) == found.flops(SHAPE)


@every_setting
def test_promised_active_parameters_are_those_that_one_token_moves(settings: dict[str, Any]) -> None:
    module = built({**settings, "renormalize": False} if settings["name"] == "moe" else settings).train()
    module(noise(1, 1, 12)).sum().backward()
    moved = sum(p.numel() for p in module.parameters() if p.grad is not None and p.grad.any())
    assert choice(settings).params_active(SHAPE) == moved


@every_setting
def test_promised_flops_are_those_counted(settings: dict[str, Any]) -> None:
    module, counter = built(settings).eval(), FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module(noise(2, 7, 12))
    promised = choice(settings).flops(SHAPE)
    assert promised is not None
    assert counter.get_total_flops() == 14 * sum(promised.values())


@pytest.mark.parametrize(
    ("settings", "params", "flops"),
    [
        ({"name": "linear", "d_ff": 5}, 2 * 60 + 17, {"feed_forward": 240}),
        ({"name": "geglu", "d_ff": 5}, 180, {"feed_forward": 360}),
        ({"name": "reglu", "d_ff": 5, "bias": True}, 180 + 22, {"feed_forward": 360}),
        # a router 12·3 and three experts, all met
        ({"name": "soft_mixture", "n_experts": 3, "d_ff": 5}, 36 + 540, {"router": 72, "feed_forward": 3 * 360}),
    ],
    ids=["linear", "geglu", "reglu", "soft_mixture"],
)
def test_costs_by_hand(settings: dict[str, Any], params: int, flops: dict[str, float]) -> None:
    found = choice(settings)
    assert found.params(SHAPE) == found.params_active(SHAPE) == params
    assert found.flops(SHAPE) == flops


# --- Settings ---------------------------------------------------------------------------------------------------------


@every_setting
def test_resolved_settings_are_final_and_survive_a_round_trip(settings: dict[str, Any]) -> None:
    found = choice(settings)
    assert found.resolve(SHAPE) == found
    assert registry.configure("feed_forward", json.loads(json.dumps(found.settings()))) == found
    assert list(found.problems(SHAPE)) == []


@every_setting
def test_identities_hold(settings: dict[str, Any]) -> None:
    for sentence, both in choice(settings).twin(SHAPE).identities(SHAPE):
        one, other = both()
        assert one.dtype == other.dtype == torch.float64
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0, msg=sentence)


def test_who_promises_what() -> None:
    promised = {name: len(list(choice(name).identities(SHAPE))) for name in NAMES}
    assert {name: n for name, n in promised.items() if n} == {"linear": 1, "reglu": 1, "moe": 4, "soft_mixture": 2}


@pytest.mark.parametrize("name", NAMES)
def test_the_twin_of_a_large_one_is_small(name: str) -> None:
    wide = Shape(d_model=8192, n_layers=80, n_heads=64, max_seq_len=4096, vocab_size=100_000)
    large = cast(FeedForwardChoice, registry.configure("feed_forward", name)).resolve(wide)
    small = large.twin(SHAPE)
    assert small.params(SHAPE) < 20_000 < large.params(wide)
    assert small.settings() | {"d_ff": 0, "n_experts": 0} == large.settings() | {"d_ff": 0, "n_experts": 0}


@pytest.mark.parametrize("expert", ["moe", "soft_mixture"])
@pytest.mark.parametrize("name", ["moe", "soft_mixture"])
def test_a_mixture_of_mixtures_is_refused(name: str, expert: str) -> None:
    (fault,) = choice({"name": name, "expert": expert}).problems(SHAPE)
    assert str(fault) == f"expert '{expert}' is itself made of experts"

"""Position schemes against slow float64 references and numbers of released code."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from references import alibi_slopes, rotated, tiny
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ablate import registry
from ablate.choice import Faults, Shape
from ablate.init import initialise
from ablate.model import build
from ablate.position import Position, PositionChoice
from ablate.position._sinusoids import sinusoids
from ablate.position.alibi import Alibi, slopes
from ablate.position.learned import Learned
from ablate.position.rope import Layout, RopeScaling, Rotary
from ablate.position.sinusoidal import Sinusoidal
from ablate.position.t5 import RelativeBias, buckets
from ablate.position.transformer_xl import RelativePosition

SHAPE = Shape(d_model=24, n_layers=2, n_heads=6, max_seq_len=16, vocab_size=11)
WIDTH = 8
YARN = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 40, "beta_fast": 4.0, "beta_slow": 0.5}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 100}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"kind": "linear", "factor": 4.0},
    {"kind": "ntk", "factor": 4.0},
    YARN,
    YARN | {"attention_factor": 1.5},
    YARN | {"beta_fast": 32.0},  # the ramp would begin before the first pair
    YARN | {"beta_slow": 0.001},  # it would end after the last
    YARN | {"original_max_seq_len": 6, "beta_slow": 1.0},  # it has no width
    LLAMA3,
    LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 6.0},
]
SETTINGS: list[dict[str, Any]] = [{"name": name} for name in registry.names("position")] + [
    {"name": "sinusoidal", "layout": "half", "base": 50.0},
    {"name": "learned", "offset": 2},
    *({"name": "rope", "scaling": scaling} for scaling in SCALINGS if scaling),
    {"name": "rope", "fraction": 0.5, "layout": "interleaved", "scaling": YARN},
    {"name": "t5", "n_buckets": 8, "max_distance": 6},
]
every_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def choice(**settings: Any) -> PositionChoice:
    made = registry.configure("position", settings)
    assert isinstance(made, PositionChoice)
    return made


def scaling(raw: dict[str, Any] | None) -> RopeScaling | None:
    return RopeScaling(**raw) if raw else None


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: Position) -> Position:
    """The module in float64, none of its numbers zero."""
    module = module.double()
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(noise(*parameter.shape, seed=i))
    return module


# --- What every scheme keeps ------------------------------------------------------------------------------------------


@both_ways
@every_setting
@torch.no_grad()
def test_pieces_equal_the_whole_sequence(settings: dict[str, Any], causal: bool) -> None:
    made = choice(**settings)
    module = drawn(made.build(replace(SHAPE, causal=causal), WIDTH))
    x, ids = noise(2, 9, 24), torch.arange(9).expand(2, 9)
    q, k = noise(2, 6, 9, WIDTH, seed=2), noise(2, 3, 9, WIDTH, seed=3)
    embedded, turned, bias = module.embed(x, 0, ids), module.rotate(q, 0), module.bias(q, k, 0, 0)
    for start, end, first in ((0, 4, 0), (4, 9, 0), (4, 5, 0), (6, 9, 2), (8, 9, 8)):
        piece = module.embed(x[:, start:end], start, ids[:, start:end])
        torch.testing.assert_close(piece, embedded[:, start:end], atol=1e-12, rtol=0)
        torch.testing.assert_close(
            module.rotate(q[:, :, start:end], start), turned[:, :, start:end], atol=1e-12, rtol=0
        )
        found = module.bias(q[:, :, start:end], k[:, :, first:end], start, first)
        if bias is None or found is None:
            assert found is bias
            continue
        hidden = torch.ones(end - start, end - first, dtype=torch.bool).triu(1 + start - first) & causal
        expected = bias[..., start:end, first:end].masked_fill(hidden, 0)
        torch.testing.assert_close(found.masked_fill(hidden, 0), expected, atol=1e-12, rtol=0)


@both_ways
@every_setting
def test_the_facts_say_what_a_module_does(settings: dict[str, Any], causal: bool) -> None:
    made = choice(**settings)
    module = drawn(made.build(replace(SHAPE, causal=causal), WIDTH))
    q, k, x = noise(1, 6, 5, WIDTH), noise(1, 3, 5, WIDTH, seed=2), noise(1, 5, 24)
    assert made.embeds == (module.embed(x, 0, torch.arange(5)[None]) is not x)
    assert ("rotate" in made.needs) == (module.rotate(q, 0) is not q)
    bias, other = module.bias(q, k, 0, 0), module.bias(q, k.flip(-1), 0, 0)
    assert ("bias" in made.needs) == (bias is not None)
    assert ("keys" in made.needs) == (bias is not None and not torch.equal(bias, other))


@both_ways
@every_setting
def test_promised_parameters_are_the_modules(settings: dict[str, Any], causal: bool) -> None:
    made, shape = choice(**settings), replace(SHAPE, causal=causal)
    module = made.build(shape, WIDTH)
    assert made.params(shape, WIDTH) == sum(p.numel() for p in module.parameters())


@both_ways
@every_setting
@pytest.mark.parametrize("tokens", [1, 7])
def test_promised_flops_are_the_counted_ones(settings: dict[str, Any], causal: bool, tokens: int) -> None:
    made, shape = choice(**settings), replace(SHAPE, causal=causal)
    module = made.build(shape, WIDTH)
    counter = FlopCounterMode(display=False)
    with counter:
        module.bias(torch.ones(1, 6, tokens, WIDTH), torch.ones(1, 3, tokens, WIDTH), 0, 0)
    promised = made.flops(shape, WIDTH, tokens, discount=False)
    assert counter.get_total_flops() == pytest.approx(tokens * sum(promised.values()), rel=1e-12)
    assert sum(made.flops(shape, WIDTH, tokens).values()) <= sum(promised.values())


@every_setting
def test_bf16_is_near(settings: dict[str, Any]) -> None:
    made = choice(**settings)
    wide, narrow = (drawn(made.build(SHAPE, WIDTH)).to(dtype) for dtype in (torch.float32, torch.bfloat16))
    x, q, k = noise(1, 5, 24), noise(1, 6, 5, WIDTH), noise(1, 3, 5, WIDTH, seed=2)

    def values(module: Position, dtype: torch.dtype) -> list[Tensor]:
        bias = module.bias(q.to(dtype), k.to(dtype), 0, 0)
        found = [module.embed(x.to(dtype), 0, torch.arange(5)[None]), module.rotate(q.to(dtype), 0)]
        assert all(each.dtype == dtype for each in found)
        return found if bias is None else [*found, bias.tril()]

    for near, exact in zip(values(narrow, torch.bfloat16), values(wide, torch.float32), strict=True):
        assert (near.float() - exact).norm() < 0.02 * exact.norm()


@every_setting
def test_what_an_evaluation_needed_first_serves_training(settings: dict[str, Any]) -> None:
    module = choice(**settings).build(SHAPE, WIDTH)
    x, q, k = torch.ones(1, 5, 24), torch.ones(1, 6, 5, WIDTH), torch.ones(1, 3, 5, WIDTH)
    with torch.inference_mode():
        _all_hooks(module, x, q, k)
    _all_hooks(module, x.requires_grad_(), q.requires_grad_(), k).backward()  # type: ignore[no-untyped-call]
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()] == []


def _all_hooks(module: Position, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    bias = module.bias(q, k, 0, 0)
    total = module.embed(x, 0, torch.arange(5)[None]).square().sum() + module.rotate(q, 0).square().sum()
    return total if bias is None else total + bias.square().sum()


@every_setting
def test_canonical_settings_are_read_back_as_they_are(settings: dict[str, Any]) -> None:
    made = choice(**settings)
    assert choice(**made.settings()) == made


# --- Sinusoids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d_model", "start", "base"), [(8, 0, 10000.0), (7, 0, 10000.0), (1, 3, 9.0), (8, 11, 50.0)])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoids_are_the_papers_formula(d_model: int, start: int, base: float, layout: Any) -> None:
    module = Sinusoidal(d_model, base, layout)
    added = module.embed(torch.zeros(1, 5, d_model, dtype=torch.float64), start, torch.zeros(1, 5))[0]
    sines = (d_model + 1) // 2
    for t, i in product(range(5), range(d_model)):
        pair, wave = divmod(i, 2) if layout == "interleaved" else (i % sines, i // sines)
        angle = (start + t) / base ** (2 * pair / d_model)
        assert added[t, i].item() == pytest.approx([math.sin, math.cos][wave](angle), abs=1e-12)


def test_sinusoids_stay_exact_far_out() -> None:
    wave = sinusoids(torch.tensor([100_000]), 4).float()
    assert wave[0, 0].item() == pytest.approx(math.sin(100_000), abs=1e-6)


@pytest.mark.parametrize("step", [1, 5, -3, 40])
def test_the_wave_some_steps_on_is_linear_in_the_wave(step: int) -> None:
    waves = sinusoids(torch.arange(100), 6, 100.0)
    turn = torch.zeros(6, 6, dtype=torch.float64)
    for pair in range(3):
        angle = step / 100 ** (2 * pair / 6)
        block = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        turn[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = torch.tensor(block, dtype=torch.float64)
    torch.testing.assert_close(waves[10:50] @ turn.T, waves[10 + step : 50 + step], atol=1e-12, rtol=0)


# --- Rotary embedding -------------------------------------------------------------------------------------------------


def slow_frequencies(dim: int, base: float, rule: dict[str, Any] | None) -> list[float]:
    """Pair by pair, as the rules are printed; yarn's with its bounds rounded outwards."""
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if rule is None:
        return plain
    factor = rule["factor"]
    if rule["kind"] == "ntk":
        return [(base * factor ** (dim / (dim - 2))) ** (-2 * i / dim) for i in range(dim // 2)]
    if rule["kind"] == "linear":
        return [each / factor for each in plain]
    turns = [rule["original_max_seq_len"] * each / (2 * math.pi) for each in plain]
    if rule["kind"] == "llama3":
        low, high = rule.get("low_freq_factor", 1.0), rule.get("high_freq_factor", 4.0)
        shares = [0.0 if each < low else 1.0 if each > high else (each - low) / (high - low) for each in turns]
    else:

        def pair_with(turns: float) -> float:
            return dim / 2 * math.log(rule["original_max_seq_len"] / (2 * math.pi * turns), base)

        first = max(0, math.floor(pair_with(rule.get("beta_fast", 32))))
        last = min(dim - 1, math.ceil(pair_with(rule.get("beta_slow", 1))))
        shares = [1 - min(1.0, max(0.0, (i - first) / (last - first or 0.001))) for i in range(dim // 2)]
    return [share * f + (1 - share) * f / factor for share, f in zip(shares, plain, strict=True)]


def slow_amplitude(rule: dict[str, Any] | None) -> float:
    if rule is None or rule["kind"] != "yarn":
        return 1.0
    return float(rule.get("attention_factor", 0.1 * math.log(rule["factor"]) + 1))


def slow_rotation(x: Tensor, turns: list[float], layout: str, start: int, amplitude: float) -> Tensor:
    """`(T, d)`: each pair as one complex number; dimensions beyond the pairs stay."""
    out, half = x.clone(), len(turns)
    for t, i in product(range(len(x)), range(half)):
        one, other = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        turned = complex(x[t, one], x[t, other]) * cmath.rect(amplitude, (start + t) * turns[i])
        out[t, one], out[t, other] = turned.real, turned.imag
    return out


@pytest.mark.parametrize(("start", "width", "base"), [(0, 8, 10000.0), (9, 8, 100.0), (3, 12, 500000.0), (5, 20, 30.0)])
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("rule", SCALINGS, ids=str)
def test_rope_turns_pairs(rule: dict[str, Any] | None, layout: Any, start: int, width: int, base: float) -> None:
    x = noise(1, 1, 6, 20)
    turned = Rotary(width, base, layout, scaling(rule)).rotate(x, start)
    expected = slow_rotation(x[0, 0], slow_frequencies(width, base, rule), layout, start, slow_amplitude(rule))
    torch.testing.assert_close(turned[0, 0], expected, atol=1e-12, rtol=0)
    assert torch.equal(turned[..., width:], x[..., width:])


def test_the_slow_references_agree() -> None:
    x, turns = noise(6, 8), slow_frequencies(8, 10000.0, None)
    torch.testing.assert_close(slow_rotation(x, turns, "half", 3, 1.0), rotated(x, start=3), atol=1e-12, rtol=0)


def test_the_scaled_frequencies_differ_from_each_other_in_these_tests() -> None:
    found = [[*slow_frequencies(20, 30.0, rule), slow_amplitude(rule)] for rule in SCALINGS]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-3


@pytest.mark.parametrize(
    ("rule", "dim", "base", "amplitude", "turns"),
    [
        (
            {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8192},
            *(128, 500000.0, 1.0),
            {0: 1.0, 16: 0.037606031, 32: 0.00052484602, 40: 3.4281024e-05, 63: 3.0689259e-07},
        ),
        (
            {"kind": "llama3", "factor": 32.0, "original_max_seq_len": 8192},
            *(64, 500000.0, 1.0),
            {0: 1.0, 10: 0.016560441, 16: 0.00042955671, 20: 8.5702559e-06, 31: 9.4183065e-08},
        ),
        (
            {"kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "attention_factor": 1.0},
            *(64, 10000.0, 1.0),
            {0: 1.0, 10: 0.056234129, 16: 0.0055000004, 20: 0.00079056941, 31: 3.3338035e-06},
        ),
        (
            {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 32768},
            *(128, 1000000.0, 1.138629436111989),
            {0: 1.0, 21: 0.010746079, 32: 0.00060294115, 40: 4.4456985e-05, 63: 3.1023444e-07},
        ),
        (
            {"kind": "linear", "factor": 4.0},
            *(128, 10000.0, 1.0),
            {0: 0.25, 16: 0.025, 32: 0.0024999999, 63: 2.8869548e-05},
        ),
    ],
    ids=["Llama-3.1-8B", "Llama-3.2-1B", "DeepSeek-V3", "Qwen2.5", "linear"],
)
def test_scaled_frequencies_are_those_of_released_models(
    rule: dict[str, Any], dim: int, base: float, amplitude: float, turns: dict[int, float]
) -> None:
    rope = Rotary(dim, base, "interleaved", scaling(rule))
    second = rope.rotate(torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(dim // 2).expand(1, 1, 2, dim), 0)[
        0, 0, 1
    ]
    found = {pair: cmath.polar(complex(second[2 * pair], second[2 * pair + 1])) for pair in turns}
    assert {pair: angle for pair, (_, angle) in found.items()} == pytest.approx(turns, rel=3e-6)
    assert [size for size, _ in found.values()] == pytest.approx([amplitude] * len(turns), rel=1e-12)


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("rule", SCALINGS, ids=str)
def test_rope_scores_depend_on_the_distance_alone(rule: dict[str, Any] | None, width: int, layout: Any) -> None:
    rope, (q, k) = Rotary(width, layout=layout, scaling=scaling(rule)), noise(2, 1, 1, 1, 8)

    def score(query_at: int, key_at: int) -> float:
        return float((rope.rotate(q, query_at) * rope.rotate(k, key_at)).sum())

    assert score(5, 2) == pytest.approx(score(1005, 1002), abs=1e-10)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_rope_in_float32_is_accurate_at_position_100_000() -> None:
    x = noise(1, 1, 2, 64)
    near = Rotary(64).rotate(x.float(), 100_000)
    torch.testing.assert_close(near[0, 0].double(), rotated(x[0, 0].float().double(), start=100_000), atol=1e-6, rtol=0)


def test_rope_turns_in_float32_what_comes_in_bf16() -> None:
    x = noise(1, 1, 4, 8).bfloat16()
    turned = Rotary(8).rotate(x, 1000)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, Rotary(8).rotate(x.float(), 1000).bfloat16())


def test_equal_rules_are_written_alike() -> None:
    plain = choice(name="rope", scaling={"kind": "yarn", "factor": 2, "original_max_seq_len": 64})
    spelled = {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 64, "beta_fast": 32, "beta_slow": 1}
    assert choice(name="rope", scaling=spelled | {"low_freq_factor": 3}) == plain
    assert plain.settings()["scaling"]["beta_fast"] == 32.0
    assert choice(name="rope", scaling=spelled | {"kind": "ntk"}).settings()["scaling"]["original_max_seq_len"] is None


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"kind": "yarn", "factor": 2}, "needs original_max_seq_len"),
        ({"kind": "llama3", "factor": 2, "original_max_seq_len": None}, "needs original_max_seq_len"),
        ({"kind": "linear"}, "'factor' is missing"),
        ({"kind": "linear", "factor": 0.5}, "must be at least 1"),
        ({"kind": "dynamic", "factor": 2}, "must be 'linear'"),
        ({"kind": "linear", "factor": 2, "beta": 1}, "unknown setting 'beta'"),
        (YARN | {"beta_slow": 4}, "beta_slow 4 must be less than beta_fast 4"),
        (LLAMA3 | {"low_freq_factor": 4}, "low_freq_factor 4 must be less than high_freq_factor 4"),
        (7, "settings are needed here"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule: Any, reason: str) -> None:
    with pytest.raises(Faults, match=reason) as caught:
        choice(name="rope", scaling=rule)
    assert all(fault.path[0] == "scaling" for fault in caught.value.faults)


# --- ALiBi ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_heads", "expected"),
    [
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        *((n_heads, alibi_slopes(n_heads)) for n_heads in (3, 5, 7, 12, 16, 40, 112)),
    ],
)
def test_alibi_slopes_follow_the_released_rule(n_heads: int, expected: list[float]) -> None:
    assert slopes(n_heads) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_heads", [2, 12])
@pytest.mark.parametrize(("start", "first", "n_keys"), [(0, 0, 3), (2, 0, 5), (7, 4, 6), (1, 3, 4)])
def test_alibi_falls_with_distance_on_both_sides(n_heads: int, start: int, first: int, n_keys: int) -> None:
    q, k = torch.zeros(1, n_heads, 3, 4, dtype=torch.float64), torch.zeros(1, 1, n_keys, 4, dtype=torch.float64)
    bias = Alibi(n_heads).bias(q, k, start, first)
    assert bias.shape == (n_heads, 3, n_keys)
    for h, t, s in product(range(n_heads), range(3), range(n_keys)):
        expected = -alibi_slopes(n_heads)[h] * abs(start + t - first - s)
        assert bias[h, t, s].item() == pytest.approx(expected, rel=1e-12)


# --- T5 ---------------------------------------------------------------------------------------------------------------

FIRST_OF_EACH_BUCKET = {
    (32, 128, False): [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113],
    (32, 128, True): [*range(9), 12, 16, 23, 32, 46, 64, 91],
    (8, 16, False): [0, 1, 2, 3, 4, 6, 8, 12],
    (8, 16, True): [0, 1, 2, 6],
    (20, 320, False): [*range(11), 15, 20, 29, 40, 57, 80, 114, 160, 227],
    (64, 256, False): [
        *(*range(33), 35, 37, 39, 42, 45, 48, 51, 54, 58, 62, 66, 70, 75, 80, 85, 91, 97, 104, 110, 118, 126, 134),
        *(143, 153, 163, 174, 185, 198, 211, 225, 240),
    ],
    (128, 1000, True): [
        *(*range(33), 36, 40, 45, 50, 55, 62, 68, 76, 85, 94, 105, 117, 130, 145, 161, 179, 200, 222, 248, 276, 307),
        *(342, 380, 423, 471, 525, 585, 651, 725, 807, 899),
    ],
}
"""The least distance to an earlier key of each bucket, by transformers 5.24: buckets, max_distance, bidirectional.

In float64 the bucket of 20 with (20, 320) would begin at 21."""


@pytest.mark.parametrize(("n_buckets", "max_distance", "bidirectional"), FIRST_OF_EACH_BUCKET)
def test_t5s_buckets_begin_where_they_do_in_released_code(
    n_buckets: int, max_distance: int, bidirectional: bool
) -> None:
    firsts = FIRST_OF_EACH_BUCKET[n_buckets, max_distance, bidirectional]
    expected = [n for n, (begin, end) in enumerate(pairwise([*firsts, 4097])) for _ in range(begin, end)]
    earlier = buckets(-torch.arange(4097), n_buckets, max_distance, bidirectional)
    later = buckets(torch.arange(4097), n_buckets, max_distance, bidirectional)
    assert earlier.tolist() == expected
    half = n_buckets // 2
    assert later.tolist() == ([0] + [half + n for n in expected[1:]] if bidirectional else [0] * 4097)


LAYOUTS = [
    (n_buckets, max_distance, bidirectional)
    for n_buckets, max_distance, bidirectional in product(
        (4, 8, 12, 32, 64, 320), (6, 16, 20, 100, 128, 129, 1024), (True, False)
    )
    if max_distance > n_buckets // (4 if bidirectional else 2)
]


@pytest.mark.parametrize(("n_buckets", "max_distance", "bidirectional"), LAYOUTS)
def test_t5s_buckets_are_the_released_formula(n_buckets: int, max_distance: int, bidirectional: bool) -> None:
    relative = torch.arange(-4096, 4097)
    side = n_buckets // (2 if bidirectional else 1)
    exact = side // 2
    away = relative.abs() if bidirectional else (-relative).clamp(min=0)
    ratio = torch.log(away.float() / exact) / math.log(max_distance / exact) * (side - exact)
    wide = torch.minimum(exact + ratio.clamp(min=0).to(torch.long), torch.tensor(side - 1))
    expected = torch.where(away < exact, away, wide)
    expected = expected + torch.where(relative > 0, side if bidirectional else 0, 0)
    assert torch.equal(buckets(relative, n_buckets, max_distance, bidirectional), expected)
    module = RelativeBias(1, n_buckets, max_distance, bidirectional).double()
    module.table.weight.data[:, 0] = torch.arange(n_buckets)
    reach = torch.zeros(1, 1, 4097, 2)
    assert torch.equal(module.bias(reach[:, :, :1], reach, 4096, 0)[0, 0], expected[:4097].double())
    assert torch.equal(module.bias(reach[:, :, :1], reach, 0, 0)[0, 0], expected[4096:].double())


ORACLE = Path(__file__).parents[2] / "shared/oracles/logits/t5/io.npz"


@pytest.mark.skipif(not ORACLE.exists(), reason="the stored values of T5 are not here")
@pytest.mark.parametrize(("array", "bidirectional"), [("rel_buckets_encoder", True), ("rel_buckets_decoder", False)])
def test_t5s_buckets_are_those_stored(array: str, bidirectional: bool) -> None:
    with np.load(ORACLE) as stored:
        expected = torch.from_numpy(stored[array])
    module = RelativeBias(1, 8, 16, bidirectional)
    module.table.weight.data[:, 0] = torch.arange(8)
    found = module.bias(torch.zeros(1, 1, 17, 2), torch.zeros(1, 1, 17, 2), 0, 0)
    assert torch.equal(found[0].long(), expected)


def test_t5_adds_the_number_of_each_pairs_bucket() -> None:
    module = RelativeBias(3, 8, 16, bidirectional=True)
    bias = module.bias(torch.zeros(1, 3, 2, 4), torch.zeros(1, 1, 4, 4), 5, 3)
    for h, t, s in product(range(3), range(2), range(4)):
        bucket = {-3: 2, -2: 2, -1: 1, 0: 0, 1: 5, 2: 6}[(3 + s) - (5 + t)]
        assert bias[h, t, s] == module.table.weight[bucket, h]


# --- Transformer-XL ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def slow_transformer_xl(module: RelativePosition, q: Tensor, k: Tensor, start: int, first: int) -> Tensor:
    """`(H, T, d)` and `(Hk, K, d)` to `(H, T, K)`: all terms of the paper but the first, pair by pair."""
    n_heads, tokens, width = q.shape
    out = torch.zeros(n_heads, tokens, k.shape[1], dtype=torch.float64)
    for h, t, s in product(range(n_heads), range(tokens), range(k.shape[1])):
        away, half = (start + t) - (first + s), module.d_model // 2
        angles = [away / 10000 ** (2 * i / module.d_model) for i in range(half)]
        wave = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
        place = module.project.weight[h * width : (h + 1) * width] @ wave
        key = k[h // (n_heads // len(k)), s]
        terms = q[h, t] @ place + module.key_bias[h] @ key + module.distance_bias[h] @ place
        out[h, t, s] = terms / width**0.5
    return out


@both_ways
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("start", "tokens", "first"), [(0, 5, 0), (4, 1, 0), (3, 3, 0), (5, 2, 3), (4, 1, 4)])
def test_transformer_xl_is_the_papers_formula(start: int, tokens: int, first: int, kv_heads: int, causal: bool) -> None:
    module = RelativePosition(10, 4, 6, causal)
    drawn(module)
    n_keys = start + tokens - first
    q, k = noise(2, 4, tokens, 6), noise(2, kv_heads, n_keys, 6, seed=2)
    found = module.bias(q, k, start, first)
    expected = torch.stack([slow_transformer_xl(module, *pair, start, first) for pair in zip(q, k, strict=True)])
    later = torch.ones(tokens, n_keys, dtype=torch.bool).triu(1 + start - first)
    hidden = later & causal
    torch.testing.assert_close(found.masked_fill(hidden, 0), expected.masked_fill(hidden, 0), atol=1e-12, rtol=0)


def test_transformer_xls_own_weights_are_drawn_like_its_matrix() -> None:
    module = RelativePosition(32, 8, 16)
    initialise(module, "normal", 0.5, seed=0)
    for parameter in module.parameters():
        assert parameter.std().item() == pytest.approx(0.5, rel=0.2)
    assert not torch.equal(module.key_bias, module.distance_bias)


def test_transformer_xl_charges_a_causal_query_for_the_keys_it_sees() -> None:
    made, bidirectional = choice(name="transformer_xl"), replace(SHAPE, causal=False)
    causal, both = made.flops(SHAPE, WIDTH, 9), made.flops(bidirectional, WIDTH, 9)
    assert causal == {"position.distances": 2 * 24 * 48, "position.scores": 2 * 48 * 5, "position.keys": 2 * 48}
    assert both["position.scores"] == 2 * 48 * 9
    assert both["position.distances"] == pytest.approx(2 * 24 * 48 * 17 / 9)


# --- Learned ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_adds_the_row_of_each_position(offset: int) -> None:
    learned, x = Learned(6, 4, offset), torch.zeros(2, 3, 4)
    assert learned.table.weight.shape == (6 + offset, 4)
    added = learned.embed(x, 3, torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(added, learned.table.weight[3 + offset : 6 + offset].expand(2, 3, 4))


def test_learned_counts_what_is_not_padding() -> None:
    ids = torch.tensor([[5, 6, 1, 7, 1, 1], [1, 1, 2, 3, 1, 9]])
    learned = Learned(6, 1, offset=2, padding_id=1)
    learned.table.weight.data[:, 0] = torch.arange(8)
    rows = learned.embed(torch.zeros(2, 6, 1), 0, ids)[..., 0]
    assert rows.tolist() == [[2, 3, 1, 4, 1, 1], [1, 1, 2, 3, 1, 4]]  # as transformers 5.24 numbers RoBERTa's
    with pytest.raises(ValueError, match="all tokens at once"):
        learned.embed(torch.zeros(2, 1, 1), 3, ids[:, :1])


@pytest.mark.parametrize("settings", [{}, {"offset": 2}, {"offset": 2, "padding_id": 1}])
def test_learned_ends_with_its_table(settings: dict[str, int]) -> None:
    learned, ids = Learned(8, 4, **settings), torch.zeros(1, 9, dtype=torch.long)
    learned.embed(torch.zeros(1, 8, 4), 0, ids[:, :8])
    with pytest.raises(ValueError, match="9 positions are asked of a table of 8"):
        learned.embed(torch.zeros(1, 9, 4), 0, ids)
    with pytest.raises(ValueError, match="9 positions are asked of a table of 8"):
        learned.embed(torch.zeros(1, 1, 4), 8, ids[:, :1])


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "causal", "width", "reasons"),
    [
        ({"name": "learned", "padding_id": 1, "offset": 2}, False, 8, []),
        ({"name": "learned", "padding_id": 1, "offset": 2}, True, 8, ["need all tokens at once"]),
        ({"name": "learned", "padding_id": 11, "offset": 2}, False, 8, ["padding_id 11 is none of 11 tokens"]),
        ({"name": "learned", "padding_id": 0}, False, 8, ["none with offset 0"]),
        ({"name": "rope"}, True, 7, ["is 7, which is odd"]),
        ({"name": "rope", "fraction": 0.4}, True, 8, ["is 3, which is odd"]),
        ({"name": "rope", "fraction": 0.4}, True, 80, []),
        ({"name": "rope", "fraction": 0.1}, True, 8, ["nothing is rotated of heads of width 8"]),
        ({"name": "rope", "scaling": {"kind": "ntk", "factor": 2}}, True, 2, ["only one pair"]),
        ({"name": "rope", "scaling": {"kind": "ntk", "factor": 2}}, True, 4, []),
        ({"name": "t5", "n_buckets": 31}, True, 8, []),
        ({"name": "t5", "n_buckets": 31}, False, 8, ["even number of buckets"]),
        ({"name": "t5", "n_buckets": 2}, True, 8, []),
        ({"name": "t5", "n_buckets": 2}, False, 8, ["4 at least"]),
        ({"name": "t5", "max_distance": 16}, True, 8, ["within the 16 distances"]),
        ({"name": "t5", "max_distance": 17}, True, 8, []),
        ({"name": "t5", "max_distance": 8}, False, 8, ["within the 8 distances"]),
        ({"name": "t5", "max_distance": 9}, False, 8, []),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    settings: dict[str, Any], causal: bool, width: int, reasons: Sequence[str]
) -> None:
    made = choice(**settings)
    shape = replace(SHAPE, causal=causal)
    found = list(made.problems(shape, width))
    assert len(found) == len(reasons)
    for problem, reason in zip(found, reasons, strict=True):
        assert reason in str(problem)
        assert "\n" not in str(problem)
        assert set(getattr(problem, "path", ())) <= set(type(made).model_fields)
    if not found:
        _all_hooks(
            made.build(shape, width), torch.ones(1, 5, 24), torch.ones(1, 6, 5, width), torch.ones(1, 3, 5, width)
        )


# --- In the model -----------------------------------------------------------------------------------------------------


def tables(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if ".table." in name]


@pytest.mark.parametrize("position", ["learned", "t5"])
def test_layers_share_one_table(position: str) -> None:
    assert tables(build(tiny(position=position))) == ["decoder.positions.0.table.weight"]


def test_layers_of_different_rotary_width_share_one_learned_table() -> None:
    model = build(tiny(position="learned", layers=[{"every": 2, "attention": "mla"}]))
    assert tables(model) == ["decoder.positions.0.table.weight"]


def test_layers_of_different_rotary_width_turn_each_their_own() -> None:
    model = build(tiny(position="rope", layers=[{"every": 2, "attention": "mla"}]))
    assert sorted(module.dim for module in model.modules() if isinstance(module, Rotary)) == [4, 8]
    model(torch.arange(6)[None])


def test_each_layer_has_transformer_xls_positions_of_its_own() -> None:
    model = build(tiny(position="transformer_xl"))
    assert len([module for module in model.modules() if isinstance(module, RelativePosition)]) == 2
    model(torch.arange(6)[None])

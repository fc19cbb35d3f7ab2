"""Each norm against its formula, number by number in float64; batch normalisation also with padding and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ablate import registry
from ablate.norm import NormChoice

NAMES = registry.names("norm")
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()


def choice(name: str, **settings: Any) -> NormChoice:
    found = registry.configure("norm", {"name": name, **settings})
    assert isinstance(found, NormChoice)
    return found


def module(name: str, d_model: int = 6, **settings: Any) -> Any:
    """In float64, its parameters away from where they start."""
    built = choice(name, **settings).build(d_model).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return built


def numbers(*shape: int, spread: float = 3.0, around: float = 2.0) -> Tensor:
    return around + spread * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def layer_norm(x: list[float], eps: float, w: Any, b: Any) -> list[float]:
    mean = sum(x) / len(x)
    root = math.sqrt(sum((each - mean) ** 2 for each in x) / len(x) + eps)
    return [(each - mean) / root * w[i] + b[i] for i, each in enumerate(x)]


def rms_norm(x: list[float], eps: float, w: Any) -> list[float]:
    root = math.sqrt(sum(each**2 for each in x) / len(x) + eps)
    return [each / root * w[i] for i, each in enumerate(x)]


def textbook_norm(x: list[float], eps: float, w: Any, b: Any) -> list[float]:
    mean = sum(x) / len(x)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in x) / max(1, len(x) - 1))
    return [(each - mean) / (deviation + eps) * w[i] + b[i] for i, each in enumerate(x)]


Row = Callable[[list[float], Any], list[float]]
ROWS: dict[str, tuple[dict[str, Any], Row]] = {
    "layer_norm": ({"eps": 0.1}, lambda x, m: layer_norm(x, 0.1, m.weight, m.bias)),
    "layer_norm scale only": ({"eps": 0.1, "bias": False}, lambda x, m: layer_norm(x, 0.1, m.weight, [0.0] * len(x))),
    "rms_norm": ({"eps": 0.1}, lambda x, m: rms_norm(x, 0.1, m.weight)),
    "rms_norm offset": ({"eps": 0.1, "unit_offset": True}, lambda x, m: rms_norm(x, 0.1, 1 + m.weight)),
    "textbook_norm": ({"eps": 0.1}, lambda x, m: textbook_norm(x, 0.1, m.weight, m.bias)),
    "dynamic_tanh": (
        {"alpha": 0.7},
        lambda x, m: [m.weight[i] * math.tanh(m.alpha * each) + m.bias[i] for i, each in enumerate(x)],
    ),
    "none": ({}, lambda x, _: x),
}


@pytest.mark.parametrize("case", ROWS)
@torch.no_grad()
def test_a_token_is_normalised_as_the_formula_says(case: str) -> None:
    settings, formula = ROWS[case]
    norm, x = module(case.split()[0], **settings), numbers(2, 3, 6)
    expected = torch.tensor([[formula(token.tolist(), norm) for token in row] for row in x], dtype=torch.float64)
    torch.testing.assert_close(norm(x), expected, atol=1e-13, rtol=1e-13)


def test_every_norm_is_held_against_a_formula() -> None:
    assert {case.split()[0] for case in ROWS} | {"batch_norm"} == set(NAMES)


STARTS = {
    "layer_norm": {},
    "rms_norm": {},
    "rms_norm offset": {"unit_offset": True},
    "textbook_norm": {},
    "batch_norm": {},
}


@pytest.mark.parametrize("case", STARTS)
@torch.no_grad()
def test_a_norm_starts_at_one_scale(case: str) -> None:
    norm = choice(case.split()[0], **STARTS[case]).build(512).double()
    assert norm(numbers(400, 512, around=0.0)).square().mean().item() == pytest.approx(1, rel=0.01)


@torch.no_grad()
def test_dynamic_tanh_starts_as_a_tanh_of_the_given_slope() -> None:
    x = numbers(2, 4)
    torch.testing.assert_close(choice("dynamic_tanh", alpha=0.25).build(4)(x.float()), torch.tanh(x.float() / 4))
    torch.testing.assert_close(choice("dynamic_tanh").build(4).double()(x), torch.tanh(x / 2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("x", [torch.zeros(2, 3, 6), torch.full((2, 3, 6), 7.0)], ids=["zeros", "constant"])
def test_features_that_are_all_alike_give_neither_nan_nor_endless_gradients(name: str, x: Tensor) -> None:
    norm, x = module(name), x.double().requires_grad_()
    y = norm(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_single_feature_gives_no_nan(name: str) -> None:
    assert module(name, d_model=1)(numbers(2, 3, 1)).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"unit_offset": True}], ids=str)
def test_promised_parameters_are_the_built_ones(name: str, settings: dict[str, bool]) -> None:
    if set(settings) <= set(registry.config_class("norm", name).model_fields):
        norm = choice(name, **settings)
        assert norm.params(6) == sum(p.numel() for p in norm.build(6).parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_the_dtype_of_the_input_is_that_of_the_output(name: str, dtype: torch.dtype) -> None:
    norm = choice(name).build(6).to(dtype)
    assert norm(numbers(2, 6).to(dtype)).dtype == dtype


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_half_precision_activations_meet_wider_weights_without_a_warning(name: str) -> None:
    x = numbers(2, 3, 6, spread=1.0, around=0.0)
    norm = choice(name).build(6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(norm(x.bfloat16()).double(), norm.double()(x), atol=0.03, rtol=0.02)


@torch.no_grad()
def test_a_small_offset_is_not_rounded_away_in_half_precision() -> None:
    norm = choice("rms_norm", unit_offset=True).build(64).bfloat16()
    norm.weight.fill_(0.003)  # 1.003 is 1 in bfloat16
    x = numbers(4000, 64).bfloat16()
    bigger = norm(x).double().mean() / choice("rms_norm").build(64)(x.float()).double().mean()
    assert bigger.item() == pytest.approx(1.003, abs=3e-4)


@torch.no_grad()
def test_only_batch_norm_looks_beyond_a_token_in_training() -> None:
    for name in NAMES:
        norm, x = module(name).train(), numbers(2, 3, 6)
        alone = norm(x)[0, 0].clone()
        x[0, 1:] += 1
        assert torch.equal(alone, norm(x)[0, 0]) != choice(name).leaks_in_training


def test_only_what_looks_at_other_tokens_is_told_which_are_real() -> None:
    assert [name for name in NAMES if hasattr(module(name), "reads_mask")] == ["batch_norm"]


# Batch normalisation


def real_tokens(x: Tensor, mask: Tensor) -> list[list[float]]:
    return [x[b, t].tolist() for b in range(x.shape[0]) for t in range(x.shape[1]) if mask[b, t]]


def statistics(tokens: list[list[float]], feature: int) -> tuple[float, float]:
    column = [token[feature] for token in tokens]
    mean = sum(column) / len(column)
    return mean, sum((each - mean) ** 2 for each in column) / len(column)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all real", "padded"])
@torch.no_grad()
def test_batch_norm_normalises_each_feature_over_the_real_tokens(mask: Tensor | None) -> None:
    norm, x = module("batch_norm", eps=0.1).train(), numbers(3, 5, 6)
    tokens = real_tokens(x, torch.ones(3, 5) if mask is None else mask)
    expected = torch.empty_like(x)
    for i in range(6):
        mean, variance = statistics(tokens, i)
        expected[..., i] = (x[..., i] - mean) / math.sqrt(variance + 0.1) * norm.weight[i] + norm.bias[i]
    torch.testing.assert_close(norm(x, mask=mask), expected, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_batch_norm_evaluates_with_the_running_statistics() -> None:
    norm, first, second = module("batch_norm", eps=0.1, momentum=0.25).train(), numbers(3, 5, 6), numbers(3, 5, 6) + 1
    means, variances = [0.0] * 6, [1.0] * 6
    for x in (first, second):
        norm(x, MASK)
        tokens = real_tokens(x, MASK)
        for i in range(6):
            mean, variance = statistics(tokens, i)
            means[i] = 0.75 * means[i] + 0.25 * mean
            variances[i] = 0.75 * variances[i] + 0.25 * variance * len(tokens) / (len(tokens) - 1)
    norm.eval()
    x, kept = numbers(2, 2, 6), norm.running_mean.clone()
    roots = torch.tensor([math.sqrt(variance + 0.1) for variance in variances])
    expected = (x - torch.tensor(means, dtype=torch.float64)) / roots * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(norm(x[:1, :1]), expected[:1, :1], atol=1e-6, rtol=1e-6)
    assert torch.equal(norm.running_mean, kept)


def test_what_stands_in_padding_moves_no_statistic_and_no_gradient() -> None:
    seen = []
    for filler in (3.0, -50.0):
        norm, x = module("batch_norm").train(), numbers(3, 5, 6).masked_fill(~MASK[..., None], filler)
        y = norm(x, MASK)
        y[MASK].pow(3).sum().backward()
        seen.append([y.detach()[MASK], norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("real", [0, 1])
def test_a_batch_without_a_variance_takes_the_running_statistics_and_leaves_them(real: int) -> None:
    norm = module("batch_norm").train()
    norm(numbers(3, 5, 6))
    before = copies(norm)
    x = (numbers(1, 4, 6) + 5).requires_grad_()
    y = norm(x, torch.arange(4)[None] < real)
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(torch.equal(old, new) for old, new in zip(before, copies(norm), strict=True))
    torch.testing.assert_close(y, norm.eval()(x), atol=1e-12, rtol=1e-12)


def copies(norm: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in norm.buffers()]


def test_running_statistics_are_kept_with_the_weights() -> None:
    norm = module("batch_norm").train()
    norm(numbers(3, 5, 6))
    fresh = choice("batch_norm").build(6).double()
    fresh.load_state_dict(norm.state_dict())
    x = numbers(2, 2, 6)
    assert torch.equal(fresh.eval()(x), norm.eval()(x))
    assert choice("batch_norm").params(6) == 12

"""The wiring of each block against its formula, with known functions in the places of norms and sublayers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ablate import registry
from ablate.block import BlockChoice
from ablate.choice import Shape

NAMES = registry.names("block")
X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Function = Callable[[Tensor], Tensor]


def choice(name: str, **settings: Any) -> BlockChoice:
    found = registry.configure("block", {"name": name, **settings})
    assert isinstance(found, BlockChoice)
    return found


def shape(**changes: Any) -> Shape:
    return Shape(**{"d_model": 4, "n_layers": 8, "n_heads": 1, "max_seq_len": 8, "vocab_size": 8} | changes)


def norm(i: int) -> Function:
    return lambda x: torch.sin((i + 1) * x)


def sublayer(i: int) -> Function:
    return lambda x: torch.cos(x + i) * x.roll(1, dims=1)


n0, n1, n2, n3 = map(norm, range(4))
f, g = map(sublayer, range(2))
ALPHA = 16**0.25


def pre_norm(x: Tensor) -> Tensor:
    y = x + f(n0(x))
    return y + g(n1(y))


def post_norm(x: Tensor) -> Tensor:
    y = n0(x + f(x))
    return n1(y + g(y))


def sandwich(x: Tensor) -> Tensor:
    y = x + n1(f(n0(x)))
    return y + n3(g(n2(y)))


def reordered_norm(x: Tensor) -> Tensor:
    y = x + n0(f(x))
    return y + n1(g(y))


def deep_norm(x: Tensor) -> Tensor:
    y = n0(ALPHA * x + f(x))
    return n1(ALPHA * y + g(y))


FORMULAS: dict[str, tuple[dict[str, Any], Function, bool]] = {
    "pre_norm": ({}, pre_norm, True),
    "post_norm": ({}, post_norm, False),
    "sandwich": ({}, sandwich, True),
    "parallel": ({}, lambda x: x + f(n0(x)) + g(n0(x)), True),
    "parallel with two norms": ({"shared_norm": False}, lambda x: x + f(n0(x)) + g(n1(x)), True),
    "reordered_norm": ({}, reordered_norm, True),
    "deep_norm": ({}, deep_norm, False),
    "no_residual": ({}, lambda x: g(n1(f(n0(x)))), True),
}
N_NORMS = dict.fromkeys(FORMULAS, 2) | {"sandwich": 4, "parallel": 1}


@pytest.mark.parametrize("case", FORMULAS)
def test_a_block_wires_as_its_formula_says(case: str) -> None:
    settings, formula, final = FORMULAS[case]
    found = choice(case.split()[0], **settings)
    assert found.n_norms(2) == N_NORMS[case]
    assert found.final_norm is final
    norms = [norm(i) for i in range(found.n_norms(2))]
    torch.testing.assert_close(found.build(shape())(X, norms, (f, g)), formula(X), atol=1e-14, rtol=0)


def test_every_block_is_held_against_a_formula() -> None:
    assert {case.split()[0] for case in FORMULAS} == set(NAMES)


@pytest.mark.parametrize("case", FORMULAS)
@pytest.mark.parametrize("n_sublayers", [1, 3])
def test_a_block_asks_for_the_norms_that_it_takes(case: str, n_sublayers: int) -> None:
    found = choice(case.split()[0], **FORMULAS[case][0])
    called: list[str] = []

    def told(kind: str, i: int) -> Function:
        return lambda x: called.append(f"{kind} {i}") or x  # type: ignore[func-returns-value]

    norms = [told("norm", i) for i in range(found.n_norms(n_sublayers))]
    found.build(shape())(X, norms, [told("sublayer", i) for i in range(n_sublayers)])
    everything = [f"norm {i}" for i in range(len(norms))] + [f"sublayer {i}" for i in range(n_sublayers)]
    assert sorted(called) == sorted(everything)


@pytest.mark.parametrize("case", [case for case in FORMULAS if "parallel" not in case])
def test_a_missing_norm_is_an_error(case: str) -> None:
    block = choice(case.split()[0], **FORMULAS[case][0]).build(shape())
    with pytest.raises(ValueError, match="zip"):
        block(X, [norm(0)], (f, g))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_holds_dropout_and_nothing_else(name: str) -> None:
    block = choice(name).build(shape(residual_dropout=0.5))
    assert list(block.parameters()) == []
    assert [module.p for module in block.modules() if isinstance(module, torch.nn.Dropout)] == [0.5]


@pytest.mark.parametrize("name", NAMES)
def test_dropout_falls_on_what_sublayers_say_and_only_in_training(name: str) -> None:
    found = choice(name)
    block, whole = found.build(shape(residual_dropout=0.5)), found.build(shape())
    norms: list[Function] = [lambda x: x] * found.n_norms(1)
    x = torch.ones(1, 1, 4096)
    torch.manual_seed(0)
    dropped = block.train()(x, norms, [lambda x: 3 * x])
    kept = block.eval()(x, norms, [lambda x: 3 * x])
    assert torch.equal(kept, whole(x, norms, [lambda x: 3 * x]))
    stream = kept.unique().item() - 3
    assert dropped.unique().tolist() == pytest.approx([stream, stream + 6])
    assert (dropped > stream + 3).float().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["sandwich", "reordered_norm"])
def test_dropout_falls_behind_a_norm_that_is_in_the_residual_branch(name: str) -> None:
    found, x = choice(name), torch.ones(1, 1, 4096)
    norms: list[Function] = [lambda x: torch.full_like(x, 3)] * found.n_norms(1)
    dropped = found.build(shape(residual_dropout=0.5)).train()(x, norms, [lambda x: x])
    assert dropped.unique().tolist() == [1, 7]


@pytest.mark.parametrize(
    ("changes", "alpha", "beta"),
    [
        ({"n_layers": 8}, 2.0, 64**-0.25),
        ({"n_layers": 8, "causal": False}, 2.0, 64**-0.25),
        ({"n_layers": 200}, 400**0.25, 1600**-0.25),
        ({"n_layers": 27, "partner_layers": 6}, 3.0, 324**-0.25),
        ({"n_layers": 16, "partner_layers": 2, "causal": False}, 0.81 * 2**1.0625, 0.87 / 2**1.0625),
        ({"n_layers": 6, "partner_layers": 6, "causal": False}, 0.81 * 6**0.3125, 0.87 / 6**0.3125),
    ],
    ids=["decoder", "encoder", "deep", "decoder of two", "encoder of two", "encoder of two alike"],
)
def test_deep_norms_gains_are_the_papers(changes: dict[str, Any], alpha: float, beta: float) -> None:
    found, sizes = choice("deep_norm"), shape(**changes)
    alone = found.build(sizes)(X, [lambda x: x], [torch.zeros_like])
    torch.testing.assert_close(alone, alpha * X)
    assert found.value_gain(sizes) == pytest.approx(beta)


def test_other_blocks_leave_the_weights_as_they_are_drawn() -> None:
    assert {choice(name).value_gain(shape()) for name in NAMES if name != "deep_norm"} == {1.0}

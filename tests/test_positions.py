"""Position schemes against slow float64 references and published numbers."""

from __future__ import annotations

import math

import pytest
import torch
from references import alibi_slopes, rotated, tiny
from torch import Tensor

from ablate.model import build
from ablate.position.alibi import Alibi, slopes
from ablate.position.learned import Learned
from ablate.position.rope import Rotary
from ablate.position.sinusoidal import Sinusoidal, sinusoids


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(("d_model", "start"), [(8, 0), (7, 0), (8, 11)])
def test_sinusoids_are_the_papers_formula(d_model: int, start: int) -> None:
    added = Sinusoidal(d_model).embed(torch.zeros(1, 5, d_model, dtype=torch.float64), start)[0]
    for t in range(5):
        for i in range(d_model):
            angle = (start + t) / 10000 ** (2 * (i // 2) / d_model)
            assert added[t, i].item() == pytest.approx([math.sin, math.cos][i % 2](angle), abs=1e-12)


def test_sinusoids_stay_exact_far_out() -> None:
    wave = sinusoids(torch.tensor([100_000]), 4, 10000.0).float()
    assert wave[0, 0].item() == pytest.approx(math.sin(100_000), abs=1e-6)


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_rope_turns_half_split_pairs(base: float, start: int) -> None:
    x = noise(1, 1, 6, 8)
    turned = Rotary(8, base).rotate(x, start)
    torch.testing.assert_close(turned[0, 0], rotated(x[0, 0], base, start), atol=1e-12, rtol=0)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    rope, (q, k) = Rotary(8), noise(2, 1, 1, 1, 8)

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


def test_a_table_first_needed_by_an_evaluation_serves_training() -> None:
    model = build(tiny(position="rope"))
    with torch.inference_mode():
        model(torch.arange(6)[None])
    model(torch.arange(6)[None]).sum().backward()


@pytest.mark.parametrize(
    ("n_heads", "expected"),
    [
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (5, alibi_slopes(5)),
        (12, alibi_slopes(12)),
        (40, alibi_slopes(40)),
    ],
)
def test_alibi_slopes_follow_the_released_rule(n_heads: int, expected: list[float]) -> None:
    assert slopes(n_heads) == pytest.approx(expected, rel=1e-12)


def test_alibi_falls_with_distance_from_where_the_queries_stand() -> None:
    bias = Alibi(2).bias(torch.zeros(1, 2, 3, 4), start=2, n_keys=5)
    distance = torch.tensor([[2, 1, 0, 1, 2], [3, 2, 1, 0, 1], [4, 3, 2, 1, 0]])
    assert torch.equal(bias, -torch.tensor([1 / 16, 1 / 256])[:, None, None] * distance)


def test_learned_adds_the_row_of_each_position() -> None:
    learned, x = Learned(6, 4), torch.zeros(2, 3, 4)
    assert torch.equal(learned.embed(x, 3), learned.table.weight[3:6].expand(2, 3, 4))


@torch.no_grad()
def test_learned_ends_with_its_table() -> None:
    model = build(tiny(position="learned", max_seq_len=8))
    model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="9 positions are asked of a table of 8"):
        model(torch.zeros(1, 9, dtype=torch.long))
    cache = model.new_cache(1, 9)
    model(torch.zeros(1, 8, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="9 positions"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)


def test_layers_of_different_rotary_width_share_one_learned_table() -> None:
    model = build(tiny(position="learned", layers=[{"every": 2, "attention": "mla"}]))
    assert [name for name, _ in model.named_parameters() if "table" in name] == ["positions.0.table.weight"]


def test_layers_of_different_rotary_width_turn_each_their_own() -> None:
    model = build(tiny(position="rope", layers=[{"every": 2, "attention": "mla"}]))
    assert sorted(scheme.dim for scheme in model.positions.values()) == [4, 8]  # type: ignore[union-attr]
    model(torch.arange(6)[None])

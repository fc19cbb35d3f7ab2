"""Attention against slow float64 references, and against itself where two choices must be one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from references import alibi_slopes, attention_of_one_head, grouped_attention, latent_attention, rotated, tiny
from torch import Tensor, nn

from ablate.attention import Cache, attend, mha
from ablate.attention._grouped import GroupedQueryAttention
from ablate.attention._scores import Scoring
from ablate.attention.mla import LatentAttention
from ablate.choice import Faults, Shape
from ablate.cost import cache_bytes, cache_bytes_per_token
from ablate.init import initialise
from ablate.position import Position
from ablate.position.alibi import Alibi
from ablate.position.rope import Rotary

POSITIONS = ("none", "rope", "alibi")


def drawn(module: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    initialise(module, "normal", 0.3, seed=0)
    return module.to(dtype)


def noise(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def scheme(name: str, width: int, n_heads: int) -> tuple[Position, Any, list[float]]:
    """A position scheme's module, and what the references need to do the same."""
    if name == "rope":
        return Rotary(width), rotated, [0.0] * n_heads
    if name == "alibi":
        return Alibi(n_heads), lambda x: x, alibi_slopes(n_heads)
    return Position(), lambda x: x, [0.0] * n_heads


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_grouped_attention_is_the_loop_over_heads(n_kv_heads: int, position: str) -> None:
    module = drawn(GroupedQueryAttention(16, 4, n_kv_heads, head_dim=6))
    place, turn, slopes = scheme(position, 6, 4)
    x = noise(2, 5, 16)
    expected = torch.stack([grouped_attention(module, row, turn, slopes) for row in x])
    torch.testing.assert_close(module(x, place, 0), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_latent_attention_is_the_papers_equations(q_lora_rank: int | None, position: str) -> None:
    module = drawn(LatentAttention(16, 4, 8, 6, 4, 5, q_lora_rank))
    place, turn, slopes = scheme(position, 4, 4)
    x = noise(2, 5, 16)
    expected = torch.stack([latent_attention(module, row, turn, slopes) for row in x])
    torch.testing.assert_close(module(x, place, 0), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("q_lora_rank", [None, 7])
@torch.no_grad()
def test_absorbed_decoding_equals_expanded(
    q_lora_rank: int | None, position: str, dtype: torch.dtype, within: float
) -> None:
    place, _, _ = scheme(position, 4, 4)
    x = noise(2, 7, 16, dtype=dtype)
    outputs = []
    for decode in ("absorbed", "expanded"):
        module = drawn(LatentAttention(16, 4, 8, 6, 4, 5, q_lora_rank, decode=decode), dtype)
        cache = module.new_cache(2, 7, dtype, x.device)
        starts = itertools.accumulate((4, 2, 1), initial=0)
        pieces = x.split((4, 2, 1), dim=1)
        outputs.append(torch.cat([module(p, place, s, None, cache) for p, s in zip(pieces, starts, strict=False)], 1))
    torch.testing.assert_close(*outputs, atol=within, rtol=0)
    torch.testing.assert_close(outputs[0], module(x, place, 0), atol=within, rtol=0)


@torch.no_grad()
def test_absorbed_decoding_never_expands_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    module = drawn(LatentAttention(16, 4, 8, 6, 4, 5))
    cache, x = module.new_cache(1, 4, torch.float64, torch.device("cpu")), noise(1, 4, 16)
    module(x[:, :3], Position(), 0, None, cache)
    monkeypatch.setattr(module, "_expanded", None)
    module(x[:, 3:], Position(), 3, None, cache)


@pytest.mark.parametrize(("n_kv_heads", "twin"), [(4, "mha"), (1, "mqa")])
def test_the_ends_of_gqa_are_mha_and_mqa(n_kv_heads: int, twin: str) -> None:
    ends = tiny(attention={"name": "gqa", "n_kv_heads": n_kv_heads})
    other = tiny(attention=twin)
    module, same = ends.attention.build(ends.shape), other.attention.build(other.shape)
    initialise(module, "normal", 0.3, seed=0)
    same.load_state_dict(module.state_dict())
    x = noise(2, 6, 32, dtype=torch.float32)
    torch.testing.assert_close(module(x, Rotary(8), 0), same(x, Rotary(8), 0), atol=0, rtol=0)


def test_heads_are_repeated_never_tiled() -> None:
    grouped = drawn(GroupedQueryAttention(16, 4, 2, head_dim=4))
    x = noise(2, 6, 16)
    repeated, tiled = (_as_mha(grouped, order)(x, Position(), 0) for order in ([0, 0, 1, 1], [0, 1, 0, 1]))
    torch.testing.assert_close(grouped(x, Position(), 0), repeated, atol=1e-12, rtol=0)
    assert (repeated - tiled).abs().max() > 0.01


def _as_mha(grouped: Any, order: list[int]) -> GroupedQueryAttention:
    """Multi-head attention whose key/value heads are those of `grouped` in the given order."""
    w_q, w_k, w_v = grouped.qkv.weight.detach().split(grouped.qkv.parts)
    spread = [w.unflatten(0, (2, 4))[order].flatten(0, 1) for w in (w_k, w_v)]
    full = GroupedQueryAttention(16, 4, 4, head_dim=4).double()
    full.load_state_dict({"qkv.weight": torch.cat([w_q, *spread]), "out.weight": grouped.out.weight})
    return full


def test_scores_see_the_mask_and_the_causal_order() -> None:
    q, k, v = noise(3, 1, 2, 5, 4).unbind()
    mask = torch.tensor([[True, True, False, True, True]])
    kept = [0, 1, 3, 4]
    out = attend(q, k, v, Scoring(causal=True), mask=mask)[0]
    for head in range(2):
        expected = attention_of_one_head(q[0, head, kept], k[0, head, kept], v[0, head, kept], 0.5)
        torch.testing.assert_close(out[head, kept], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [None, torch.zeros(2, 5, 5)], ids=["plain", "biased"])
def test_without_causality_every_query_sees_every_key(bias: Tensor | None) -> None:
    q, k, v = noise(3, 1, 2, 5, 4).unbind()
    weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
    torch.testing.assert_close(attend(q, k, v, Scoring(causal=False), bias=bias), weights @ v, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["mha", "mla"])
def test_attention_dropout_works_in_training_alone(name: str) -> None:
    settings = tiny(attention=name, dropout={"attention": 0.5})
    module, x = settings.attention.build(settings.shape), noise(1, 6, 32, dtype=torch.float32)
    initialise(module, "normal", 0.3, seed=0)
    position = Rotary(settings.attention.rotary_dim(settings.shape))
    torch.manual_seed(0)
    assert not torch.equal(module.train()(x, position, 0), module(x, position, 0))
    assert torch.equal(module.eval()(x, position, 0), module(x, position, 0))


def test_the_cache_of_deepseek_v3() -> None:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    settings = tiny(attention={"name": "mla", "q_lora_rank": 1536, **widths}, d_model=7168, n_heads=128, n_layers=61)
    assert settings.attention.cache_elements(settings.shape, 1) == 576
    assert cache_bytes(settings, 1, 1, "bf16") == cache_bytes_per_token(settings, "bf16") == 70_272
    module = LatentAttention(8, 2, 512, 4, 64, 4)
    cache = module.new_cache(1, 3, torch.bfloat16, torch.device("cpu"))
    assert cache.allocated_bytes() == 3 * 576 * 2


def test_a_configured_head_width_decides_the_cache() -> None:
    settings = tiny(attention={"name": "gqa", "n_kv_heads": 2, "head_dim": 6}, n_layers=3)
    # keys and values, layers, batch, tokens, heads, width, bytes
    assert cache_bytes(settings, 2, 5, "fp32") == 2 * 3 * 2 * 5 * 2 * 6 * 4


def test_a_full_cache_says_so() -> None:
    cache = Cache((1, 1, 2, 4), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="room for 2 tokens, not for 3"):
        cache.append(torch.zeros(1, 1, 3, 4))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"attention": {"name": "gqa", "n_kv_heads": 3}}, "n_heads 4 is not divisible by n_kv_heads 3"),
        ({"attention": {"name": "gqa", "n_kv_heads": 8}}, "n_heads 4 is not divisible by n_kv_heads 8"),
        ({"attention": {"name": "gqa", "n_kv_heads": 0}}, "must be at least 1"),
        ({"attention": "mha", "n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
        ({"attention": "mla", "n_heads": 5}, "d_model 32 is not divisible by n_heads 5"),
        ({"attention": {"name": "mha", "head_dim": 7}}, "the rotated width of a head is 7, which is odd"),
        ({"attention": {"name": "mla", "qk_rope_head_dim": 3}}, "the rotated width of a head is 3, which is odd"),
        ({"attention": {"name": "gqa", "n_kv_groups": 2}}, "unknown setting 'n_kv_groups'"),
    ],
)
def test_shapes_that_do_not_come_out_even_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(Faults, match=rule) as caught:
        tiny(**changes, layers=[{"every": 2, "feed_forward": "gelu"}])
    assert len(caught.value.faults) == 1


def test_the_width_of_a_head_need_not_divide_d_model() -> None:
    assert tiny(attention={"name": "mha", "head_dim": 12}, n_heads=5).attention.rotary_dim(tiny().shape) == 12


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8, 16])
def test_the_default_widths_of_mla_suit_every_scheme(n_heads: int) -> None:
    assert tiny(attention="mla", n_heads=n_heads, d_model=n_heads * 6).attention.qk_rope_head_dim == 2


@pytest.mark.parametrize(("n_heads", "kv_heads"), [(1, 1), (4, 1), (6, 1), (7, 1), (8, 2), (9, 1), (32, 8), (12, 3)])
def test_default_groups_come_out_even(n_heads: int, kv_heads: int) -> None:
    assert tiny(attention="gqa", n_heads=n_heads, d_model=8 * n_heads).attention.n_kv_heads == kv_heads


def test_padding_values_for_a_kernel_changes_nothing() -> None:
    from ablate.attention._scores import as_defined

    q, k, v = (torch.randn(2, 4, 7, width, dtype=torch.float64) for width in (12, 12, 8))
    padded = attend(q, k, v, Scoring(causal=True))
    with as_defined():
        plain = attend(q, k, v, Scoring(causal=True))
    assert padded.shape == (2, 4, 7, 8)
    torch.testing.assert_close(padded, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("extra", [{}, {"window": 3, "bias": True, "qk_norm": "projection", "scale": 0.3}], ids=str)
@pytest.mark.parametrize(("name", "n_promised"), [("mha", 1), ("mqa", 1), ("gqa", 2)])
def test_grouped_attention_promises_what_it_is_at_its_ends(name: str, n_promised: int, extra: dict[str, Any]) -> None:
    settings = tiny(attention={"name": name, **extra})
    promised = list(settings.attention.identities(settings.shape))
    assert len(promised) == n_promised
    for sentence, both in promised:
        one, other = both()
        assert torch.equal(one, other), sentence


def test_a_choice_with_a_module_of_its_own_does_not_promise_to_be_gqa() -> None:
    class Own(mha.Config):
        def build(self, shape: Shape) -> GroupedQueryAttention:
            return super().build(shape)

    assert list(mha.Config().identities(tiny().shape))
    assert not list(Own().identities(tiny().shape))


@pytest.mark.parametrize("scoring", [{}, {"window": 3}, {"softcap": 2.0}, {"causal": False}, {"chunk": 3}], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_every_kernel_computes_the_definition(kernel: Any, scoring: dict[str, Any]) -> None:
    if kernel == "sdpa" and "softcap" in scoring:
        pytest.skip("torch's own fused kernels bound no scores, and the settings refuse it")
    q, k, v = noise(2, 4, 7, 8), noise(2, 2, 7, 8), noise(2, 2, 7, 8).flip(-1)
    for bias in (None, noise(4, 7, 7), noise(2, 4, 7, 7)):
        for mask in (None, torch.tensor([[True] * 7, [True] * 4 + [False] * 3])):
            places = {"bias": bias, "mask": mask}
            found = attend(q, k, v, Scoring(kernel=kernel, **scoring), **places)
            torch.testing.assert_close(found, attend(q, k, v, Scoring(kernel="math", **scoring), **places))


def test_flex_says_where_it_does_not_run() -> None:
    q = noise(1, 1, 3, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="'flex' cannot train on the CPU: choose kernel 'sdpa' or 'math'"):
        attend(q, q, q, Scoring(kernel="flex"))

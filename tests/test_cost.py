"""Costs against numbers worked out by hand and against published models."""

from __future__ import annotations

from typing import Any

import pytest
from references import tiny

from ablate.cost import (
    cache_bytes,
    cache_bytes_by_devices,
    cache_bytes_per_token,
    cost,
    stages,
    tokens_that_weigh_as_much,
    training_bytes,
)

HAND = {"d_model": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 10, "max_seq_len": 16, "position": "none"}
PLAIN = {"name": "relu", "d_ff": 16, "bias": False}
# Beside attention and feed-forward: embedding 10·8, head 10·8, two norms and a final one 3·8.
REST = 80 + 80 + 24
TOKENS = 5  # a query sees (5 + 1) / 2 = 3 keys


def by_hand(**changes: Any) -> Any:
    return tiny(**(HAND | {"attention": "mha", "feed_forward": PLAIN} | changes))


@pytest.mark.parametrize(
    ("attention", "params", "projections", "scores", "values", "cached"),
    [
        # q, k, v, out 8·8 each. Scores and values: 2 heads · 4 wide · 3 keys · 2. Cached: k and v of 2 heads of 4.
        ({"name": "mha"}, 256, 512, 48, 48, 16),
        # the same, with biases 3·8 + 8, which cost no product
        ({"name": "mha", "bias": True}, 256 + 32, 512, 48, 48, 16),
        # heads 6 wide: q, k, v to 12 each and back from 12
        ({"name": "mha", "head_dim": 6}, 4 * 96, 8 * 96, 72, 72, 24),
        # q 8·8, k and v 8·4, out 8·8
        ({"name": "gqa", "n_kv_heads": 1}, 192, 384, 48, 48, 8),
        ({"name": "mqa"}, 192, 384, 48, 48, 8),
        # q 8·2·(3+2), down 8·(6+2), up 6·2·(3+4), out 2·4·8, norm 6; scores over 5, values over 4; cached 6 + 2
        (
            {"name": "mla", "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4},
            80 + 64 + 84 + 64 + 6,
            2 * (80 + 64 + 84 + 64),
            60,
            48,
            8,
        ),
        # queries through 5: down 8·5, norm 5, up 5·10
        (
            {
                "name": "mla",
                "q_lora_rank": 5,
                "kv_lora_rank": 6,
                "qk_nope_head_dim": 3,
                "qk_rope_head_dim": 2,
                "v_head_dim": 4,
            },
            40 + 50 + 5 + 64 + 84 + 64 + 6,
            2 * (40 + 50 + 64 + 84 + 64),
            60,
            48,
            8,
        ),
    ],
    ids=["mha", "mha-bias", "mha-wide", "gqa", "mqa", "mla", "mla-q"],
)
def test_attention_by_hand(
    attention: dict[str, Any], params: int, projections: int, scores: int, values: int, cached: int
) -> None:
    settings = by_hand(attention=attention)
    found = cost(settings, TOKENS)
    assert found.params_total == REST + 2 * 8 * 16 + params
    assert found.params_active == found.params_total
    assert found.flops == {
        "attention.projections": projections,
        "attention.scores": scores,
        "attention.values": values,
        "feed_forward": 2 * 2 * 8 * 16,
        "head": 2 * 8 * 10,
    }
    assert found.flops_per_token == sum(found.flops.values())
    assert cache_bytes(settings, 3, TOKENS, "fp32") == 3 * TOKENS * cached * 4
    assert cache_bytes(settings, 3, TOKENS, "bf16") == 3 * TOKENS * cached * 2
    assert cache_bytes_per_token(settings, "bf16") == cached * 2


@pytest.mark.parametrize(
    ("feed_forward", "params", "active", "flops"),
    [
        ({"name": "relu", "d_ff": 16}, 256 + 24, 256 + 24, {"feed_forward": 512}),
        ({"name": "gelu", "d_ff": 16, "bias": False}, 256, 256, {"feed_forward": 512}),
        ({"name": "gelu"}, 2 * 8 * 32 + 40, 2 * 8 * 32 + 40, {"feed_forward": 1024}),
        ({"name": "swiglu", "d_ff": 10}, 240, 240, {"feed_forward": 480}),
        ({"name": "swiglu", "d_ff": 10, "bias": True}, 240 + 28, 240 + 28, {"feed_forward": 480}),
        # 8/3 of 8 is 21.3, to a multiple of 8: 24
        ({"name": "swiglu"}, 576, 576, {"feed_forward": 1152}),
        # a router 8·4; four experts of 240 and a shared one, of which a token meets two and the shared one
        (
            {"name": "moe", "n_experts": 4, "top_k": 2, "n_shared_experts": 1, "d_ff": 10},
            32 + 5 * 240,
            32 + 3 * 240,
            {"router": 64, "feed_forward": 3 * 480},
        ),
    ],
    ids=["relu", "gelu", "gelu-default", "swiglu", "swiglu-bias", "swiglu-default", "moe"],
)
def test_feed_forward_by_hand(feed_forward: dict[str, Any], params: int, active: int, flops: dict[str, float]) -> None:
    found = cost(by_hand(feed_forward=feed_forward), TOKENS)
    assert found.params_total == REST + 256 + params
    assert found.params_active == REST + 256 + active
    assert found.flops == flops | {
        "attention.projections": 512,
        "attention.scores": 48,
        "attention.values": 48,
        "head": 160,
    }


def test_without_the_discount_every_query_pays_for_every_key() -> None:
    flops = cost(by_hand(), TOKENS, discount=False).flops
    assert flops is not None
    assert flops["attention.scores"] == flops["attention.values"] == 2 * 8 * TOKENS


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 696),  # 184 beside the layer's 256 of attention and 256 of feed-forward
        ({"norm": "layer_norm"}, 696 + 3 * 8),
        ({"block": "post_norm"}, 696 - 8),
        ({"tie_embeddings": True}, 696 - 80),
        ({"position": "learned"}, 696 + 16 * 8),
        ({"position": "sinusoidal"}, 696),
        ({"n_layers": 3}, 696 + 2 * (256 + 256 + 16)),
        ({"n_layers": 3, "layers": [{"every": 2, "attention": "mqa"}]}, 696 + 2 * (256 + 256 + 16) - 64),
    ],
)
def test_what_stands_around_by_hand(changes: dict[str, Any], total: int) -> None:
    assert cost(by_hand(**changes), TOKENS).params_total == total


def test_embeddings_and_head_are_told_apart() -> None:
    free, tied = cost(by_hand(position="learned"), TOKENS), cost(by_hand(tie_embeddings=True), TOKENS)
    assert (free.params_embedding, free.params_head) == (80 + 128, 80)
    assert (tied.params_embedding, tied.params_head) == (80, 0)
    assert free.params_non_embedding == tied.params_non_embedding == 256 + 256 + 24
    assert free.flops == tied.flops  # looking up is free, the head counts


def test_layers_that_differ_add_up() -> None:
    settings = by_hand(n_layers=4, layers=[{"every": 2, "attention": "mqa"}])
    assert cache_bytes(settings, 1, 1, "fp32") == (2 * 16 + 2 * 8) * 4
    flops = cost(settings, TOKENS).flops
    assert flops is not None
    assert flops["attention.projections"] == 2 * 512 + 2 * 384


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "block": "post_norm"}, {"position": "learned"}])
def test_stages_add_up_to_the_whole(changes: dict[str, Any]) -> None:
    mixture = {"name": "moe", "n_experts": 4, "d_ff": 10}
    settings = by_hand(n_layers=4, layers=[{"every": 2, "attention": "mqa", "feed_forward": mixture}], **changes)
    whole, parts = cost(settings, TOKENS), stages(settings, TOKENS)

    def total(column: str) -> float:
        return sum(stage["times"] * stage[column] for stage in parts)

    assert total("params") == whole.params_total
    assert total("params_active") == whole.params_active
    assert total("flops") == whole.flops_per_token
    assert total("cache") * 4 == cache_bytes(settings, 1, 1, "fp32")


def test_gpt2_124m_is_the_published_size() -> None:
    settings = tiny(
        d_model=768,
        n_layers=12,
        n_heads=12,
        vocab_size=50257,
        max_seq_len=1024,
        attention={"name": "mha", "bias": True},
        position="learned",
        feed_forward={"name": "gelu", "approximate": "tanh"},
        norm="layer_norm",
        tie_embeddings=True,
    )
    found = cost(settings, 1024)
    assert (found.params_total, found.params_active) == (124_439_808, 124_439_808)
    assert found.params_non_embedding == 85_056_000
    assert cache_bytes_per_token(settings, "bf16") == 36_864


def test_llama_7b_is_the_published_size() -> None:
    settings = tiny(
        d_model=4096,
        n_layers=32,
        n_heads=32,
        vocab_size=32000,
        max_seq_len=2048,
        feed_forward={"name": "swiglu", "d_ff": 11008},
    )
    found = cost(settings, 2048)
    assert (found.params_total, found.params_non_embedding) == (6_738_415_616, 6_476_271_616)
    assert cache_bytes_per_token(settings, "bf16") == 524_288


def test_mixtral_8x7b_is_the_published_size() -> None:
    settings = tiny(
        d_model=4096,
        n_layers=32,
        n_heads=32,
        vocab_size=32000,
        max_seq_len=4096,
        attention={"name": "gqa", "n_kv_heads": 8},
        feed_forward={"name": "moe", "n_experts": 8, "top_k": 2, "d_ff": 14336},
    )
    found = cost(settings, 4096)
    assert (found.params_total, found.params_active) == (46_702_792_704, 12_879_925_248)
    assert cache_bytes_per_token(settings, "bf16") == 131_072


def per_device(settings: Any) -> list[int | None]:
    return list(cache_bytes_by_devices(settings, "bf16").values())


def test_a_cache_is_shared_among_devices_and_copied_where_heads_no_longer_divide() -> None:
    sizes = {"d_model": 64, "n_layers": 3, "n_heads": 8, "vocab_size": 10, "max_seq_len": 16, "position": "none"}
    head = 3 * 2 * 16 * 8 * 2  # layers, keys and values, tokens, width, bytes
    assert per_device(tiny(**sizes, attention="mha")) == [8 * head, 4 * head, 2 * head, head]
    assert per_device(tiny(**sizes, attention={"name": "gqa", "n_kv_heads": 2})) == [2 * head, head, head, head]
    assert per_device(tiny(**sizes, attention="mqa")) == [head] * 4
    latent = 3 * 16 * (32 + 4) * 2
    assert per_device(tiny(**sizes, attention="mla")) == [latent] * 4, "every device has all of it"
    state = 3 * (8 + 1) * 8 * 2
    assert per_device(tiny(**sizes, attention="linear")) == [8 * state, 4 * state, 2 * state, state]
    assert per_device(tiny(**sizes, attention="lstm")) == [3 * 2 * 64 * 2, None, None, None], "it does not say"
    window = per_device(tiny(**sizes, attention={"name": "mha", "window": 4}))
    assert window == [2 * head, head, head // 2, head // 4]


def test_heads_that_do_not_come_out_even_are_not_shared() -> None:
    settings = by_hand(d_model=24, n_heads=6, attention={"name": "gqa", "n_kv_heads": 3})
    head = 2 * 16 * 4 * 2
    # of 2 devices each has 3 query heads: 0 to 2 read key/value heads 0 and 1, 3 to 5 read 1 and 2
    assert per_device(settings) == [3 * head, 2 * head, None, None]


def test_a_deepseek_v3_latent_takes_70_272_bytes_a_token_on_every_device() -> None:
    mla = {"name": "mla", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    settings = tiny(d_model=7168, n_layers=61, n_heads=128, vocab_size=10, max_seq_len=1000, attention=mla)
    assert per_device(settings) == [70_272_000] * 4


def test_the_length_at_which_the_cache_weighs_as_much_as_the_model() -> None:
    settings = by_hand()  # 696 parameters; 16 numbers a token
    assert tokens_that_weigh_as_much(settings, 696, "fp32") == tokens_that_weigh_as_much(settings, 696, "bf16") == 44
    assert tokens_that_weigh_as_much(settings, 16 * 43, "fp32") == 43
    windowed = by_hand(n_layers=2, layers=[{"first": 1, "attention": {"name": "mha", "window": 4}}])
    assert tokens_that_weigh_as_much(windowed, 696, "fp32") == 40, "the window's 4 · 16, and 16 a token"
    for attention in ("linear", {"name": "mha", "window": 4}):
        assert tokens_that_weigh_as_much(by_hand(attention=attention), 10**6, "fp32") is None
    seven = tiny(d_model=4096, n_layers=32, n_heads=32, vocab_size=32000, max_seq_len=2048)
    assert tokens_that_weigh_as_much(seven, 6_738_415_616, "bf16") == 25_706  # of 524 288 bytes each


def test_predicted_memory_holds_at_least_weights_gradients_and_state() -> None:
    settings = by_hand()
    params = cost(settings, TOKENS).params_total
    one, two = (training_bytes(settings, params, sequences, TOKENS) for sequences in (1, 2))
    assert 4 * 4 * params < one < two

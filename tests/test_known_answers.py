"""FLOPs and cache bytes of one layer, written out by hand for every choice that exists, and counted while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from references import decoded, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel

from ablate import registry
from ablate.cost import (
    cache_bytes,
    cache_bytes_by_devices,
    cache_bytes_per_token,
    cache_elements,
    cost,
    lengths,
    tokens_that_weigh_as_much,
)
from ablate.model import Transformer, build
from ablate.profiling.flops import AGREES_WITHIN, count_flops
from ablate.settings import ModelSettings

# One layer, 8 wide, with two heads of 4, over a vocabulary of 10. Of T = 5 tokens a query sees (5 + 1) / 2 = 3 keys on
# average, and a counter that ignores causality 5. A multiply-add is 2 FLOPs.
HAND = {"d_model": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 10, "max_seq_len": 16, "position": "none"}
PLAIN = {"name": "relu", "d_ff": 16, "bias": False}
T = 5

Terms = dict[str, float]


def by_hand(**changes: Any) -> ModelSettings:
    return tiny(**(HAND | {"attention": "mha", "feed_forward": PLAIN} | changes))


@dataclass
class Case:
    """What differs from the model above, and its terms: as causality needs them, and those that differ if all count."""

    changes: dict[str, Any]
    needed: Terms
    undiscounted: Terms = field(default_factory=dict)
    once_in_backward: Terms = field(default_factory=dict)  # products with one factor that needs no gradient


def choices_of(slot: str, cases: dict[str, list[Case]]) -> list[Any]:
    """The cases of a slot, one after the other. Choices without a case fail where they are looked for."""
    return [
        pytest.param(case, id=f"{slot}-{name}-{number}")
        for name, those in cases.items()
        for number, case in enumerate(those)
    ]


# --- Attention --------------------------------------------------------------------------------------------------------


def scored(
    flops_a_key: float, needed: float, every: float = T, values_a_key: float | None = None
) -> tuple[Terms, Terms]:
    """Scores and weighted values of so many keys on average."""
    values = flops_a_key if values_a_key is None else values_a_key
    return tuple(  # type: ignore[return-value]
        {"attention.scores": flops_a_key * keys, "attention.values": values * keys} for keys in (needed, every)
    )


def attention(settings: dict[str, Any], projections: float, terms: tuple[Terms, Terms], **changes: Any) -> Case:
    needed, undiscounted = terms
    return Case(
        {"attention": settings, **changes},
        {"attention.projections": projections, **needed},
        undiscounted,
    )


MLA = {"name": "mla", "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
MHA = 2 * (8 * 8 + 8 * 8 + 8 * 8 + 8 * 8)  # queries, keys, values, output
HEADS = 2 * 2 * 4  # a query with one key, or a weight with one value: both heads, 4 wide

ATTENTION: dict[str, list[Case]] = {
    "mha": [
        attention({"name": "mha"}, MHA, scored(HEADS, 3)),
        # heads 6 wide: queries, keys, values to 12, output back from 12
        attention({"name": "mha", "head_dim": 6}, 2 * (3 * 8 * 12 + 12 * 8), scored(2 * 2 * 6, 3)),
        # a window of 2: the tokens see 1, 2, 2, 2, 2 keys
        attention({"name": "mha", "window": 2}, MHA, scored(HEADS, (1 + 2 + 2 + 2 + 2) / 5)),
        # blocks of 2: the tokens see 1, 2 | 1, 2 | 1 keys
        attention({"name": "mha", "chunk": 2}, MHA, scored(HEADS, (1 + 2 + 1 + 2 + 1) / 5)),
        # blocks of 4 with a window of 3: 1, 2, 3, 3 | 1
        attention({"name": "mha", "chunk": 4, "window": 3}, MHA, scored(HEADS, (1 + 2 + 3 + 3 + 1) / 5)),
        # a bias, norms of heads and a bound of the scores are no products
        attention({"name": "mha", "bias": True, "qk_norm": "head", "softcap": 3.0}, MHA, scored(HEADS, 3)),
        # nothing hidden: all 5 keys are needed
        attention({"name": "mha", "causal": False}, MHA, scored(HEADS, 5)),
    ],
    "gqa": [
        # queries and output 8 to 8, keys and values of one head 8 to 4; scores are those of the query heads
        attention({"name": "gqa", "n_kv_heads": 1}, 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8), scored(HEADS, 3)),
        attention({"name": "gqa", "n_kv_heads": 2}, MHA, scored(HEADS, 3)),
        # a window of 3: 1, 2, 3, 3, 3
        attention(
            {"name": "gqa", "n_kv_heads": 1, "window": 3},
            2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8),
            scored(HEADS, (1 + 2 + 3 + 3 + 3) / 5),
        ),
    ],
    "mqa": [attention({"name": "mqa"}, 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8), scored(HEADS, 3))],
    "mla": [
        # queries of two heads of 3 + 2: 8 to 10; down to the latent and the rotated part: 8 to 6 + 2; up to keys
        # without position and values of two heads: 6 to 2 · (3 + 4); output 8 to 8. Scores are over 5, values over 4.
        attention(
            MLA,
            2 * (8 * 10 + 8 * 8 + 6 * 14 + 8 * 8),
            scored(2 * 2 * 5, 3, values_a_key=2 * 2 * 4),
            position="rope",
        ),
        # queries through a latent of 7: 8 to 7, 7 to 10
        attention(
            MLA | {"q_lora_rank": 7},
            2 * (8 * 7 + 7 * 10 + 8 * 8 + 6 * 14 + 8 * 8),
            scored(2 * 2 * 5, 3, values_a_key=2 * 2 * 4),
            position="rope",
        ),
        # how the cache is read is of decoding alone
        attention(
            MLA | {"decode": "expanded"},
            2 * (8 * 10 + 8 * 8 + 6 * 14 + 8 * 8),
            scored(2 * 2 * 5, 3, values_a_key=2 * 2 * 4),
        ),
    ],
    "linear": [
        # each token writes k vᵀ, 4 · 4 in two heads, and reads it; within the chunk that the 5 tokens are, scores and
        # values as in attention
        Case(
            {"attention": "linear"},
            {"attention.projections": MHA, "attention.state": 2 * 2 * 16 + 2 * 2 * 16, **scored(HEADS, 3)[0]},
            scored(HEADS, 3)[1],
        ),
        # nothing hidden: no chunks
        Case(
            {"attention": {"name": "linear", "causal": False}},
            {"attention.projections": MHA, "attention.state": 2 * 2 * 16 + 2 * 2 * 16},
        ),
    ],
    "lstm": [
        # four gates, of the input and of the last output, 8 · 8 each; the output projection
        Case(
            {"attention": "lstm"},
            {"attention.recurrence": 2 * (4 * 8 * 8 + 4 * 8 * 8), "attention.projections": 2 * 8 * 8},
        )
    ],
}

# --- Feed-forward -----------------------------------------------------------------------------------------------------

DENSE = 2 * (8 * 16 + 16 * 8)  # up, down
GATED = 2 * (8 * 10 + 8 * 10 + 10 * 8)  # gate, up, down


def feed_forward(settings: dict[str, Any], **terms: float) -> Case:
    return Case({"feed_forward": settings}, terms)


FEED_FORWARD: dict[str, list[Case]] = {
    **{
        name: [feed_forward({"name": name, "d_ff": 16}, feed_forward=DENSE)]
        for name in ("linear", "relu", "relu2", "gelu", "silu", "sigmoid", "tanh")
    },
    **{name: [feed_forward({"name": name, "d_ff": 10}, feed_forward=GATED)] for name in ("swiglu", "geglu", "reglu")},
    "soft_mixture": [
        # a router 8 to 4, and all four experts
        feed_forward({"name": "soft_mixture", "n_experts": 4, "d_ff": 10}, router=2 * 8 * 4, feed_forward=4 * GATED)
    ],
    "moe": [
        # a router 8 to 4, and two of four experts
        feed_forward({"name": "moe", "n_experts": 4, "top_k": 2, "d_ff": 10}, router=2 * 8 * 4, feed_forward=2 * GATED),
        # and a network of three times the width that every token meets
        feed_forward(
            {"name": "moe", "n_experts": 4, "top_k": 2, "n_shared_experts": 3, "d_ff": 10},
            router=2 * 8 * 4,
            feed_forward=2 * GATED + 2 * (8 * 30 + 8 * 30 + 30 * 8),
        ),
        # experts of another choice: up and down
        feed_forward(
            {"name": "moe", "n_experts": 3, "top_k": 1, "expert": "relu", "d_ff": 16},
            router=2 * 8 * 3,
            feed_forward=DENSE,
        ),
        # groups forbid experts and cost nothing
        feed_forward(
            {"name": "moe", "n_experts": 4, "top_k": 2, "n_expert_groups": 2, "top_groups": 1, "d_ff": 10},
            router=2 * 8 * 4,
            feed_forward=2 * GATED,
        ),
    ],
}

# --- Position ---------------------------------------------------------------------------------------------------------

# W · R, 8 to 8, for each of 5 distances once a sequence; (q + v) · W R, two heads of 4; u · k, the same for each key
XL = {"position.distances": 2 * 8 * 8 * 5 / 5, "position.scores": HEADS * 3, "position.keys": HEADS}
# looking both ways: distances -4 … 4, of which a query needs 5
XL_BOTH = {"position.distances": 2 * 8 * 8 * 9 / 5, "position.scores": HEADS * 5, "position.keys": HEADS}

POSITION: dict[str, list[Case]] = {
    **{name: [Case({"position": name}, {})] for name in ("none", "sinusoidal", "learned", "rope", "alibi", "t5")},
    "transformer_xl": [
        Case(
            {"position": "transformer_xl"},
            XL,
            {"position.scores": HEADS * 5},
            once_in_backward={"position.distances": XL["position.distances"]},
        ),
        Case(
            {"position": "transformer_xl", "attention": {"name": "mha", "causal": False}},
            XL_BOTH | scored(HEADS, 5)[0] | {"attention.projections": MHA},
            {"position.scores": HEADS * 9},
            once_in_backward={"position.distances": XL_BOTH["position.distances"]},
        ),
    ],
}

# --- What stands around -----------------------------------------------------------------------------------------------

BASE: Terms = {"attention.projections": MHA, **scored(HEADS, 3)[0], "feed_forward": DENSE, "head": 2 * 8 * 10}

AROUND = [
    Case({"tie_embeddings": True}, {}),
    # looking up 6 wide embeddings is free, bringing them to 8 is not; the head goes back to 6 and from there to 10
    Case({"d_embed": 6}, {"embedding": 2 * 6 * 8, "head": 2 * 8 * 6 + 2 * 6 * 10}),
    Case({"d_embed": 6, "tie_embeddings": True}, {"embedding": 2 * 6 * 8, "head": 2 * 8 * 6 + 2 * 6 * 10}),
    # one more layer of 8 to 8 before the head
    Case({"head": {"transform": True, "bias": True}}, {"head": 2 * 8 * 8 + 2 * 8 * 10}),
    Case({"n_token_types": 2, "embed_norm": True}, {}),
    Case(
        {"n_layers": 3, "layers": [{"every": 2, "attention": "mqa"}]},  # the second of the three
        {
            "attention.projections": 2 * MHA + 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8),
            "attention.scores": 3 * HEADS * 3,
            "attention.values": 3 * HEADS * 3,
            "feed_forward": 3 * DENSE,
        },
        {"attention.scores": 3 * HEADS * 5, "attention.values": 3 * HEADS * 5},
    ),
    # an encoder hides nothing, and has that layer before its head unless told otherwise
    Case({"family": "encoder"}, scored(HEADS, 5)[0] | {"head": 2 * 8 * 8 + 2 * 8 * 10}),
    Case({"family": "encoder", "head": {"transform": False}}, scored(HEADS, 5)[0]),
    Case(
        {"family": "encoder", "position": "transformer_xl", "head": {"transform": False}},
        XL_BOTH | scored(HEADS, 5)[0],
        {"position.scores": HEADS * 9},
        once_in_backward={"position.distances": XL_BOTH["position.distances"]},
    ),
]

# Of 5 tokens of an encoder-decoder 2 are the source, 3 the target. In one sum for all of them, by 5: the source among
# itself with 2 keys each; the target among itself, with (3 + 1) / 2 = 2 of 3 keys; and from the target to the source.
SOURCE, TARGET = 2, 3


def both(crossing: Terms, projections: float = MHA) -> Terms:
    """The terms by token: encoder, decoder, and what crosses, given for the whole sequence."""
    needed = HEADS * (SOURCE * 2 + TARGET * 2)
    terms = {
        "attention.projections": projections * (SOURCE + TARGET),
        "attention.scores": needed,
        "attention.values": needed,
        "feed_forward": DENSE * (SOURCE + TARGET),
        "head": 2 * 8 * 10 * TARGET,
    }
    return {name: (terms.get(name, 0) + crossing.get(name, 0)) / 5 for name in {**terms, **crossing}}


def all_keys(crossing: Terms) -> Terms:
    """Scores and values where a target's query pays for all 3 keys of its own sequence."""
    every = HEADS * (SOURCE * 2 + TARGET * 3)
    return {name: (every + crossing[name]) / 5 for name in ("attention.scores", "attention.values") if name in crossing}


def crossing(settings: Any, crossed: Terms) -> Case:
    undiscounted = all_keys({"attention.scores": 0, "attention.values": 0} | crossed)
    return Case({"family": "encoder_decoder", "cross_attention": settings}, both(crossed), undiscounted)


CROSSING = [
    # queries and output for the target, keys and values for the source; each of 3 queries with 2 keys
    crossing(
        "mha",
        {
            "attention.projections": 2 * (8 * 8 + 8 * 8) * TARGET + 2 * (8 * 8 + 8 * 8) * SOURCE,
            "attention.scores": HEADS * TARGET * SOURCE,
            "attention.values": HEADS * TARGET * SOURCE,
        },
    ),
    crossing(
        {"name": "gqa", "n_kv_heads": 1},
        {
            "attention.projections": 2 * (8 * 8 + 8 * 8) * TARGET + 2 * (8 * 4 + 8 * 4) * SOURCE,
            "attention.scores": HEADS * TARGET * SOURCE,
            "attention.values": HEADS * TARGET * SOURCE,
        },
    ),
    # queries 8 to 10 and output 8 to 8 for the target, the latent and what is made of it for the source
    crossing(
        MLA,
        {
            "attention.projections": 2 * (8 * 10 + 8 * 8) * TARGET + 2 * (8 * 8 + 6 * 14) * SOURCE,
            "attention.scores": 2 * 2 * 5 * TARGET * SOURCE,
            "attention.values": 2 * 2 * 4 * TARGET * SOURCE,
        },
    ),
    # the state is written by the source and read by the target
    crossing(
        "linear",
        {
            "attention.projections": 2 * (8 * 8 + 8 * 8) * TARGET + 2 * (8 * 8 + 8 * 8) * SOURCE,
            "attention.state": 2 * 2 * 16 * TARGET + 2 * 2 * 16 * SOURCE,
        },
    ),
]

CASES = [
    *choices_of("attention", ATTENTION),
    *choices_of("feed_forward", FEED_FORWARD),
    *choices_of("position", POSITION),
    *(pytest.param(case, id=f"around-{number}") for number, case in enumerate(AROUND)),
    *(pytest.param(case, id=f"crossing-{number}") for number, case in enumerate(CROSSING)),
]


def whole(case: Case, *, discount: bool) -> Terms:
    """All terms of a case: what the model above has in the place of what the case says."""
    terms = dict(BASE)
    if "attention" in case.changes or case.changes.get("family") == "encoder_decoder":
        terms = {name: flops for name, flops in terms.items() if not name.startswith("attention.")}
    if "feed_forward" in case.changes:
        del terms["feed_forward"]
    if discount:
        return terms | case.needed
    every = scored(HEADS, 3)[1] if {"attention.scores"} <= terms.keys() else {}
    return terms | every | case.needed | case.undiscounted


def executed(model: Transformer, *, backward: bool = False, kernel: SDPBackend = SDPBackend.MATH) -> float:
    """FLOPs a token that are counted while it runs."""
    rows = [torch.arange(n)[None] for n in lengths(model.settings, T).values()]

    def work() -> None:
        with torch.set_grad_enabled(backward):
            logits = model.train(backward)(*rows)
        if backward:
            logits.square().sum().backward()

    with sdpa_kernel([kernel, SDPBackend.MATH]):
        return count_flops(work) / T


@pytest.mark.parametrize(
    ("slot", "cases"), [("attention", ATTENTION), ("feed_forward", FEED_FORWARD), ("position", POSITION)]
)
def test_every_choice_has_an_answer_worked_out_by_hand(slot: str, cases: dict[str, list[Case]]) -> None:
    assert set(cases) == set(registry.names(slot)), f"write the FLOPs of the new {slot} out above"


@pytest.mark.parametrize("case", CASES)
def test_flops_term_by_term_are_those_on_paper(case: Case) -> None:
    settings = by_hand(**case.changes)
    for discount in (True, False):
        known, found = whole(case, discount=discount), cost(settings, T, discount=discount)
        assert found.flops == pytest.approx(known)
        assert found.flops_per_token == pytest.approx(sum(known.values()))


@pytest.mark.parametrize("case", CASES)
def test_flops_on_paper_are_those_that_are_executed(case: Case) -> None:
    model, forward = build(by_hand(**case.changes)), sum(whole(case, discount=False).values())
    exact = AGREES_WITHIN / 100
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        assert executed(model, kernel=kernel) == pytest.approx(forward, rel=exact)
    # a gradient for each factor of a product, but for those that need none
    training = 3 * forward - sum(case.once_in_backward.values())
    assert executed(model, backward=True) == pytest.approx(training, rel=exact)


@pytest.mark.parametrize("slot", ["norm", "block"])
def test_what_multiplies_no_matrices_costs_nothing(slot: str) -> None:
    for name in registry.names(slot):
        settings = by_hand(**{slot: name})
        assert cost(settings, T).flops == BASE, name
        assert executed(build(settings)) == sum(BASE.values()) + 2 * HEADS * 2, name


# --- Caches -----------------------------------------------------------------------------------------------------------

# Numbers that the layer keeps of one sequence, by its tokens. With attention's two heads of 4: keys and values of both.
KEPT: dict[str, list[tuple[dict[str, Any], dict[int, int]]]] = {
    "mha": [
        ({}, {1: 16, 3: 48, 9: 144}),
        ({"head_dim": 6}, {1: 24, 3: 72, 9: 216}),  # the width that is given, not d_model / n_heads
        ({"window": 4}, {1: 16, 3: 48, 4: 64, 5: 64, 9: 64}),
        ({"chunk": 3}, {1: 16, 3: 48, 4: 48, 9: 48}),
        ({"window": 2, "chunk": 3}, {1: 16, 2: 32, 9: 32}),
        ({"bias": True, "qk_norm": "projection"}, {9: 144}),
    ],
    "gqa": [
        ({"n_kv_heads": 1}, {1: 8, 3: 24, 9: 72}),  # of the key/value heads, not of those of queries
        ({"n_kv_heads": 2}, {1: 16, 9: 144}),
        ({"n_kv_heads": 1, "window": 4}, {1: 8, 4: 32, 9: 32}),
    ],
    "mqa": [({}, {1: 8, 3: 24, 9: 72})],
    "mla": [
        # one latent of 6 and one rotated part of 2 for all heads, and no second one for values
        (MLA, {1: 8, 3: 24, 9: 72}),
        (MLA | {"q_lora_rank": 7}, {9: 72}),
        (MLA | {"decode": "expanded"}, {9: 72}),
    ],
    # a state of 4 · 4 and a sum of 4 in each head, however many tokens
    "linear": [({}, {1: 40, 3: 40, 9: 40}), ({"head_dim": 6}, {1: 84, 9: 84})],
    # the output and the cell, 8 each
    "lstm": [({}, {1: 16, 3: 16, 9: 16})],
}
CACHES = [
    pytest.param({"name": name} | settings, kept, id=f"{name}-{number}")
    for name, those in KEPT.items()
    for number, (settings, kept) in enumerate(those)
]


def held(model: Transformer, ids: torch.Tensor) -> int:
    """Bytes that live tensors hold after a prompt and one token more."""
    tokens = ids.shape[1]
    with torch.no_grad():
        _, kept = decoded(model.eval(), ids, (tokens - 1, 1) if tokens > 1 else (1,))
    return kept.written_bytes()


def test_every_attention_has_a_cache_worked_out_by_hand() -> None:
    assert set(KEPT) == set(registry.names("attention")), "write the cache of the new attention out above"


@pytest.mark.parametrize(("choice", "kept"), CACHES)
def test_a_cache_takes_the_bytes_on_paper_and_holds_them(choice: dict[str, Any], kept: dict[int, int]) -> None:
    settings = by_hand(attention=choice)
    model = build(settings)
    for tokens, numbers in kept.items():
        assert cache_bytes(settings, 3, tokens, "fp32") == 3 * numbers * 4
        assert cache_bytes(settings, 3, tokens, "bf16") == 3 * numbers * 2
        assert held(model, torch.arange(3 * tokens).view(3, tokens) % 10) == 3 * numbers * 4


def test_layers_with_windows_add_to_layers_without() -> None:
    windowed = {"attention": {"name": "mha", "window": 4}}
    settings = by_hand(n_layers=4, layers=[{"every": 2, **windowed}])
    for tokens in (1, 4, 9):
        assert cache_bytes(settings, 1, tokens, "fp32") == 4 * (2 * 16 * tokens + 2 * 16 * min(4, tokens))
        assert held(build(settings), torch.zeros(1, tokens, dtype=torch.long)) == 4 * 2 * 16 * (tokens + min(4, tokens))


@pytest.mark.parametrize(
    ("crossed", "of_source"),
    [
        (None, 16 * 7),  # as the decoder's own
        ({"name": "gqa", "n_kv_heads": 1}, 8 * 7),
        (MLA, 8 * 7),
        ("linear", 40),
    ],
)
@pytest.mark.parametrize(("own", "of_own"), [("mha", 16 * 5), ({"name": "mha", "window": 4}, 16 * 4)])
def test_a_source_is_kept_whole_beside_ones_own_text(own: Any, of_own: int, crossed: Any, of_source: int) -> None:
    settings = by_hand(family="encoder_decoder", attention=own, cross_attention=crossed)
    assert cache_bytes(settings, 3, 5, "fp32", source_tokens=7) == 3 * (of_own + of_source) * 4
    model, kept = build(settings).eval(), None
    with torch.no_grad():
        kept = model.new_cache(3, 5, 7)
        model(torch.ones(3, 7, dtype=torch.long), torch.ones(3, 4, dtype=torch.long), cache=kept)
        model(None, torch.ones(3, 1, dtype=torch.long), cache=kept)
    assert kept.written_bytes() == 3 * (of_own + of_source) * 4


def test_the_length_at_which_a_cache_weighs_as_much_as_the_model() -> None:
    # 1000 weights of 2 bytes are 2000 bytes; 16 numbers a token are 32, of which 62.5 tokens have as many
    assert tokens_that_weigh_as_much(by_hand(), 1000, "bf16") == 63
    assert tokens_that_weigh_as_much(by_hand(), 992, "bf16") == 62, "exactly as many are enough"
    assert tokens_that_weigh_as_much(by_hand(attention="mqa"), 1000, "bf16") == 125
    # a source as long is kept beside one's own text: 16 + 8 numbers a token, of which 41 2/3 tokens have as many
    crossed = by_hand(family="encoder_decoder", cross_attention={"name": "gqa", "n_kv_heads": 1})
    assert tokens_that_weigh_as_much(crossed, 1000, "bf16") == 42
    assert cache_bytes_by_devices(crossed, "bf16")[1] == 16 * (16 + 8) * 2
    assert cache_bytes_by_devices(crossed, "bf16")[2] == 16 * (8 + 8) * 2, "the one head that crosses is on both"
    for fixed in ("linear", "lstm", {"name": "mha", "window": 4}):
        assert tokens_that_weigh_as_much(by_hand(attention=fixed), 1000, "bf16") is None


def test_an_encoder_keeps_nothing() -> None:
    assert cache_bytes(by_hand(family="encoder"), 3, 5, "fp32") == 0


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "fullest"),
    [
        (8, 8, [8, 4, 2, 1]),
        (8, 4, [4, 2, 1, 1]),  # on 8 devices each head is on two
        (8, 2, [2, 1, 1, 1]),
        (8, 1, [1, 1, 1, 1]),
        # 4 query heads read each of 6 key/value heads: 8 devices have 3 query heads, such as 3 4 5, which read 0 and 1
        (24, 6, [6, 3, 2, 2]),
        # 8 query heads read each of 3: 2 devices have 12, of which the first reads 0 and 1; 4 have 6, such as 6 … 11,
        # and 8 have 3, such as 6 7 8
        (24, 3, [3, 2, 2, 2]),
        (12, 3, [3, 2, 2, None]),
        (6, 3, [3, 2, None, None]),
    ],
)
def test_devices_have_the_key_value_heads_that_their_query_heads_read(
    n_heads: int, n_kv_heads: int, fullest: list[int | None]
) -> None:
    settings = by_hand(d_model=4 * n_heads, n_heads=n_heads, attention={"name": "gqa", "n_kv_heads": n_kv_heads})
    one = 2 * 16 * 4 * 2  # keys and values of 16 tokens, 4 wide, in bf16
    known = {n: None if heads is None else heads * one for n, heads in zip((1, 2, 4, 8), fullest, strict=True)}
    assert cache_bytes_by_devices(settings, "bf16") == known


def test_deepseek_v3_keeps_576_numbers_a_token_and_layer() -> None:
    published = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    mla = {"name": "mla", "q_lora_rank": 1536, **published}
    settings = by_hand(d_model=7168, n_layers=61, n_heads=128, max_seq_len=4096, attention=mla)
    assert cache_elements(settings, 1) == 61 * (512 + 64) == 61 * 576
    assert cache_bytes_per_token(settings, "bf16") == 61 * 576 * 2 == 70_272
    assert cache_bytes_by_devices(settings, "bf16") == dict.fromkeys((1, 2, 4, 8), 4096 * 70_272)

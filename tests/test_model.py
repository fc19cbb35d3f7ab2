"""The transformer as a whole: wiring, padding, layers, tied embeddings, and how weights start."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from references import VARIANTS, default, rms_norm, spell, tiny
from torch import Tensor

from ablate.choice import Faults
from ablate.model import Transformer, build
from ablate.settings import ModelSettings

MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
BLOCKS = ("pre_norm", "post_norm")
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=spell)


def some_ids(batch: int = 4, tokens: int = 7) -> Tensor:
    return torch.randint(40, (batch, tokens), generator=torch.Generator().manual_seed(0))


TARGET = torch.tensor([[3, 1, 4, 1, 5]] * 4)


def real_logits(model: Transformer, ids: Tensor, mask: Tensor) -> Tensor:
    """Those of the real places; of an encoder-decoder, whose source has the mask, those of its target."""
    if model.settings.family == "encoder_decoder":
        logits: Tensor = model(ids, TARGET, attention_mask=mask)
        return logits
    shown: Tensor = model(ids, attention_mask=mask)[mask]
    return shown


def loss_of_real_tokens(model: Transformer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Some loss over the real places, with the modules' own losses; and the logits there."""
    logits = real_logits(model, ids, MASK)
    auxiliary = [loss for module in model.modules() if hasattr(module, "losses") for loss in module.losses().values()]
    return torch.stack([logits.square().mean(), *auxiliary]).sum(), logits


@every_variant
def test_what_stands_in_padding_changes_nothing(variant: dict[str, Any]) -> None:
    seen = []
    for filler in (41, 47):
        model = build(tiny(**variant), seed=1).train()
        loss, logits = loss_of_real_tokens(model, some_ids().masked_fill(~MASK, filler))
        loss.backward()
        seen.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@every_variant
def test_a_row_of_padding_alone_gives_no_nan(variant: dict[str, Any]) -> None:
    model = build(tiny(**variant), seed=1).train()
    target = (TARGET,) if model.settings.family == "encoder_decoder" else ()
    logits = model(some_ids(), *target, attention_mask=MASK)
    logits.square().mean().backward()
    assert logits.isfinite().all()
    assert [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()] == []


@every_variant
@torch.no_grad()
def test_right_padding_is_as_if_it_were_not_there(variant: dict[str, Any]) -> None:
    model, ids = build(tiny(**variant), seed=1).eval(), some_ids()
    padded = real_logits(model, ids, torch.arange(7).expand(4, 7) < 5)
    whole = real_logits(model, ids[:, :5], torch.ones(4, 5, dtype=torch.bool))
    torch.testing.assert_close(padded, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if tiny(**v).is_causal], ids=spell)
@torch.no_grad()
def test_cached_decoding_of_padded_prompts_equals_the_full_forward(variant: dict[str, Any]) -> None:
    model, ids = build(tiny(**variant), seed=1).eval(), some_ids()
    cache = model.new_cache(4, 7, 7)
    if model.settings.family == "encoder_decoder":
        pieces = [model(ids, TARGET[:, :2], attention_mask=MASK, cache=cache), model(None, TARGET[:, 2:], cache=cache)]
        seen = torch.cat(pieces, 1)
    else:
        cuts = ((0, 4), (4, 6), (6, 7))
        pieces = [model(ids[:, a:b], attention_mask=MASK[:, :b], cache=cache) for a, b in cuts]
        seen = torch.cat(pieces, 1)[MASK]
    torch.testing.assert_close(seen, real_logits(model, ids, MASK), atol=1e-4, rtol=0)


def test_a_mask_of_ones_and_zeros_is_one_of_truth_values() -> None:
    model = build(tiny())
    assert torch.equal(model(some_ids(), attention_mask=MASK.long()), model(some_ids(), attention_mask=MASK))


def wired(model: Transformer, x: Tensor, order: str) -> Tensor:
    """The layers' sublayers wired by hand."""
    for layer in model.decoder.layers:
        attend = lambda h, layer=layer: layer.attention(h, model.decoder.positions[0], 0)  # noqa: E731
        for norm, sublayer in zip(layer.norms, (attend, layer.feed_forward), strict=True):
            scale = norm.weight
            if order == "pre_norm":
                x = x + sublayer(rms_norm(x, scale, 1e-6))
            else:
                x = rms_norm(x + sublayer(x), scale, 1e-6)
    return rms_norm(x, model.decoder.final_norm.weight, 1e-6) if order == "pre_norm" else x  # type: ignore[arg-type]


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_the_blocks_wire_as_they_say(block: str) -> None:
    model = build(tiny(block=block)).double()
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" in name:  # scales that are all 1 would hide which norm stands where
            parameter.mul_(1 + 0.1 * i)
    expected = wired(model, model.embedding(some_ids()), block) @ model.head.output.weight.T
    torch.testing.assert_close(model(some_ids()), expected, atol=1e-10, rtol=0)


def test_the_final_norm_belongs_to_the_placement() -> None:
    has = {block: "decoder.final_norm.weight" in dict(build(tiny(block=block)).named_parameters()) for block in BLOCKS}
    assert has == {"pre_norm": True, "post_norm": False}


def same_storage(model: Transformer) -> bool:
    return model.head.output.weight.data_ptr() == model.embedding.tokens.weight.data_ptr()


def test_tied_embeddings_are_one_tensor_for_ever() -> None:
    model = build(tiny(tie_embeddings=True))
    assert same_storage(model)
    twin = copy.deepcopy(model)
    assert same_storage(twin)
    assert same_storage(twin.to(torch.bfloat16))
    fresh = build(tiny(tie_embeddings=True), seed=5)
    fresh.load_state_dict(model.state_dict())
    assert same_storage(fresh)
    assert torch.equal(fresh.head.output.weight, model.embedding.tokens.weight)
    fresh.requires_grad_(False)
    fresh.embedding.tokens.weight.add_(1)
    assert torch.equal(fresh.head.output.weight, fresh.embedding.tokens.weight)


def test_tied_embeddings_are_counted_once() -> None:
    free, tied = (sum(p.numel() for p in build(tiny(tie_embeddings=on)).parameters()) for on in (False, True))
    assert free - tied == 48 * 32


@torch.no_grad()
def test_embed_scale_multiplies_by_the_root_of_d_model() -> None:
    plain, scaled = build(tiny(position="learned")), build(tiny(position="learned", embed_scale=True))
    plain.embedding.tokens.weight.mul_(32**0.5)
    torch.testing.assert_close(scaled(some_ids()), plain(some_ids()), atol=1e-5, rtol=0)


def names_of(settings: ModelSettings, slot: str) -> list[str]:
    return [getattr(layer, slot).name for layer in settings.stacks[-1].layers]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([{"every": 2, "feed_forward": "moe"}], ["relu", "moe", "relu", "moe", "relu"]),
        ([{"first": 2, "feed_forward": "moe"}], ["moe", "moe", "relu", "relu", "relu"]),
        ([{"every": 1, "feed_forward": "moe"}, {"first": 1, "feed_forward": "swiglu"}], ["swiglu", *["moe"] * 4]),
        ([{"first": 1, "feed_forward": "swiglu"}, {"every": 1, "feed_forward": "moe"}], ["moe"] * 5),
        ([{"first": 9, "feed_forward": "gelu"}], ["gelu"] * 5),
        ([{"every": 3, "attention": "mqa"}], ["relu"] * 5),
    ],
)
def test_of_the_rules_for_layers_the_last_wins(rules: list[dict[str, Any]], expected: list[str]) -> None:
    settings = tiny(n_layers=5, layers=rules)
    assert names_of(settings, "feed_forward") == expected
    built = [type(layer.feed_forward) for layer in build(settings).decoder.layers]
    assert built == [type(default("feed_forward", name).build(settings.shape)) for name in expected]


def test_rules_for_layers_win_slot_by_slot() -> None:
    rules = [{"every": 1, "attention": "mqa", "norm": "layer_norm"}, {"first": 1, "attention": "gqa"}]
    settings = tiny(layers=rules)
    assert names_of(settings, "attention") == ["gqa", "mqa"]
    assert names_of(settings, "norm") == ["layer_norm", "layer_norm"]
    assert [times for _, times in settings.stacks[-1].distinct_layers()] == [1, 1]


def test_a_rule_has_its_defaults_filled_in() -> None:
    settings = tiny(layers=[{"every": 2, "attention": "gqa"}])
    assert settings.stacks[-1].layer(1).attention.n_kv_heads == 1  # type: ignore[attr-defined]


def test_faults_in_rules_are_told_once_each_and_all_together() -> None:
    with pytest.raises(Faults) as caught:
        tiny(n_heads=0, layers=[{"every": 2, "attention": "gqaa"}, {"attention": "gqa"}, 3])
    told = [(fault.path, fault.message, fault.cure) for fault in caught.value.faults]
    assert told == [
        (("layers", 0, "attention"), "unknown attention 'gqaa'", "did you mean 'gqa'?"),
        (
            ("layers", 1),
            "a rule for layers needs 'every', 'first' or 'at'",
            "say which layers, as in `every: 2`",
        ),
        (("layers", 2), "settings are needed here, not 3", "write settings below it, as in `key: value`"),
        (("n_heads",), "'n_heads': must be at least 1 (it is 0)", "write 1 or more"),
    ]


@every_variant
def test_what_two_variants_share_starts_alike(variant: dict[str, Any]) -> None:
    settings = [tiny(**{"family": variant["family"]} | changes) for changes in ({}, variant)]
    base, other = (dict(build(each, seed=3).named_parameters()) for each in settings)
    alike = [name for name in base if name in other and base[name].shape == other[name].shape and "norm" not in name]
    assert alike
    if settings[1].block.value_gain(settings[1].shape) == 1:
        assert [name for name in alike if not torch.equal(base[name], other[name])] == []


def test_a_part_of_a_packed_matrix_starts_as_it_would_alone() -> None:
    mha, gqa = (build(tiny(attention=name)).decoder.layers[0].attention.qkv for name in ("mha", "gqa"))
    assert torch.equal(mha.weight[:32], gqa.weight[:32])


def test_the_learned_table_starts_alike_whatever_the_attention() -> None:
    mha, mla = (build(tiny(position="learned", attention=name)) for name in ("mha", "mla"))
    assert torch.equal(mha.decoder.positions[0].table.weight, mla.decoder.positions[0].table.weight)


def test_a_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, again, other = (build(tiny(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    same = {name for name in one if torch.equal(one[name], other[name])}
    assert same == {name for name in one if "norm" in name or "bias" in name}


def test_layers_do_not_start_alike() -> None:
    first, second = build(tiny()).decoder.layers
    assert not torch.equal(first.attention.qkv.weight, second.attention.qkv.weight)


def test_normal_initialisation_has_the_asked_spread() -> None:
    model = build(tiny(d_model=64, init_std=0.05, position="learned", max_seq_len=64))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.005


def test_xavier_bounds_each_part_of_a_packed_matrix_by_its_own_fans() -> None:
    model = build(tiny(init="xavier", attention={"name": "gqa", "n_kv_heads": 1}, feed_forward="swiglu"))
    layer = model.decoder.layers[0]
    for packed in (layer.attention.qkv, layer.feed_forward.gate_up):
        for part in packed.weight.split(packed.parts):
            assert_fills(part, math.sqrt(6 / (len(part) + 32)))
    assert_fills(model.head.output.weight, math.sqrt(6 / (48 + 32)))


def assert_fills(weight: Tensor, bound: float) -> None:
    assert 0.97 * bound < weight.abs().max().item() <= bound


def test_biases_start_at_0_and_scales_at_1() -> None:
    model = build(tiny(attention={"name": "mha", "bias": True}, norm="layer_norm"))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float(not name.endswith("bias"))))


@pytest.mark.parametrize("place", ["embedding", "attention", "residual"])
@pytest.mark.parametrize("block", BLOCKS)
def test_dropout_works_in_training_alone(block: str, place: str) -> None:
    model = build(tiny(block=block, dropout={place: 0.5}))
    torch.manual_seed(0)
    assert not torch.equal(model.train()(some_ids()), model(some_ids()))
    assert torch.equal(model.eval()(some_ids()), model(some_ids()))


def test_one_number_is_dropout_everywhere() -> None:
    assert set(tiny(dropout=0.25).dropout.model_dump().values()) == {0.25}


def said(**changes: Any) -> list[str]:
    with pytest.raises(Faults) as caught:
        tiny(**changes)
    return [fault.message for fault in caught.value.faults]


def test_a_rule_for_what_a_family_has_not_says_nothing_there() -> None:
    rules = [{"at": [2], "cross_attention": "mqa"}]
    for family in ("decoder", "encoder"):
        assert tiny(family=family, layers=rules) == tiny(family=family)
    both = tiny(family="encoder_decoder", layers=rules)
    assert [layer.cross_attention.name for layer in both.stacks[1].layers if layer.cross_attention] == ["mha", "mqa"]
    assert both.stacks[0].rules == []


def test_rules_that_cannot_mean_anything_are_refused() -> None:
    windowed = {"cross_attention": {"name": "mha", "window": 4}}
    assert said(family="encoder_decoder", **windowed) == ["cross attention has no window"]
    assert said(family="encoder_decoder", encoder={"layers": [{"at": [1], "cross_attention": "mqa"}]}) == [
        "an encoder reads no other sequence, and has no cross_attention"
    ]
    nowhere = [{"every": 2, "position": "none"}]
    assert said(position="learned", layers=nowhere) == [
        "position learned adds to the embeddings, and no layer is without it"
    ]
    assert said(layers=[{"at": [1, 9], "attention": "mqa"}]) == ["the rule is for layers that are none of the 2"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"layers": [{"every": 2, "attention": "mqa"}]}, {"layers": [{"at": [2], "attention": "mqa"}]}),
        ({"layers": [{"every": 2, "attention": "mha"}]}, {}),
        ({"attention": {"name": "mha", "scale": 1.0}}, {"attention": {"name": "mha", "scale": "none"}}),
        ({"attention": {"name": "mha", "scale": 8**-0.5}}, {}),
        ({"attention": {"name": "mha", "window": 16}}, {}),
        ({"attention": {"name": "mha", "chunk": 4, "window": 5}}, {"attention": {"name": "mha", "chunk": 4}}),
        (
            {"family": "encoder_decoder", "cross_attention": {"name": "mha", "causal": True}},
            {"family": "encoder_decoder"},
        ),
    ],
)
def test_equal_models_have_equal_settings(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert tiny(**one) == tiny(**other)

"""A model at a factor of its size: what grows with it, what stays, and which factors there are."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Expand, Refused

from ablate import catalogue, registry
from ablate.building import model_settings
from ablate.choice import Faults
from ablate.settings import ModelSettings

BASE = "baseline: {d_model: 64, n_layers: 2, n_heads: 4, max_seq_len: 32"


def models(expand: Expand, added: str, *sets: str) -> dict[str, ModelSettings]:
    return {each.name: each.settings.model for each in expand(added, *sets).variants}


def shape(model: ModelSettings) -> tuple[int, int, int]:
    return model.d_model, model.n_layers, model.n_heads


def test_width_depth_and_heads_grow_together(expand: Expand) -> None:
    found = models(expand, f"{BASE}}}\nvary: {{scale: [0.5, 1, 2, 1.5]}}")
    assert {name: shape(each) for name, each in found.items()} == {
        "baseline": (64, 2, 4),
        "scale=0.5": (32, 1, 2),
        "scale=2": (128, 4, 8),
        "scale=1.5": (96, 3, 6),
    }
    assert {each.vocab_size for each in found.values()} == {found["baseline"].vocab_size}
    assert {each.max_seq_len for each in found.values()} == {32}


@pytest.mark.parametrize(
    ("choice", "small", "large"),
    [
        ("attention: {name: gqa, n_kv_heads: 2}", 2, 4),
        ("attention: {name: mha, head_dim: 24}", 24, 24),
        ("attention: {name: mla, kv_lora_rank: 40}", 40, 40),
        ("attention: {name: mla, q_lora_rank: 40}", 40, 80),
        ("feed_forward: {name: swiglu, d_ff: 100}", 100, 200),
        ("feed_forward: {name: gelu, d_ff: 100}", 100, 200),
        ("feed_forward: {name: moe, n_experts: 4, d_ff: 24}", 24, 48),
        ("feed_forward: {name: moe, n_experts: 4}", 4, 4),
        ("feed_forward: {name: soft_mixture, d_ff: 24}", 24, 48),
        ("position: {name: t5, n_buckets: 8}", 8, 8),
    ],
)
def test_what_a_choice_says_grows_grows_and_all_else_stays(choice: str, small: int, large: int, expand: Expand) -> None:
    slot, setting = choice.partition(":")[0], choice.rpartition(", ")[2].partition(":")[0]
    for added in (
        f"{BASE}, {choice}}}\nvary: {{scale: [2]}}",
        f"{BASE}}}\nvariants: {{'scale=2': {{scale: 2, {choice}}}}}",
    ):
        assert getattr(getattr(models(expand, added)["scale=2"], slot), setting) == large
    assert getattr(getattr(models(expand, f"{BASE}, {choice}}}")["baseline"], slot), setting) == small


def test_a_factor_is_of_what_all_else_makes(expand: Expand) -> None:
    """Also where another axis sets a size of its own, or the choice that has it."""
    scale, others = "scale: [0.5, 2]", "feed_forward: [{name: gelu, d_ff: 96}], n_layers: [4]"
    for axes in (f"{scale}, {others}", f"{others}, {scale}"):
        found = models(expand, f"{BASE}}}\nvary: {{{axes}}}")
        assert sorted((each.n_layers, each.d_model, each.feed_forward.d_ff) for each in list(found.values())[1:]) == [  # type: ignore[attr-defined]
            (2, 32, 48),
            (8, 128, 192),
        ]


def test_layers_of_their_own_and_an_encoder_grow_too(expand: Expand) -> None:
    rules = "layers: [{every: 2, feed_forward: {name: gelu, d_ff: 32}}], d_embed: 16"
    large = models(expand, f"{BASE}, {rules}}}\nvary: {{scale: [2]}}")["scale=2"]
    assert [layer.feed_forward.settings().get("d_ff") for layer in large.stacks[0].layers[1::2]] == [64, 64]
    assert large.d_embed == 32
    own = "{n_layers: 3, n_heads: 2, feed_forward: {name: gelu, d_ff: 10}}"
    both = f"{BASE}, family: encoder_decoder, encoder: {own}}}"
    encoder, decoder = models(expand, f"{both}\nvary: {{scale: [2]}}")["scale=2"].stacks
    assert (encoder.shape.n_layers, encoder.shape.n_heads, decoder.shape.n_layers) == (6, 4, 4)
    assert encoder.usual.feed_forward.settings()["d_ff"] == 20


def test_what_grows_is_a_setting_of_its_choice() -> None:
    for slot in catalogue.SLOTS:
        for name in catalogue.names(slot):
            kind = registry.config_class(slot, name)
            assert set(kind.grows) <= set(kind.model_fields), f"{slot}/{name}"


def test_a_factor_of_a_preset_s_own_scale(expand: Expand) -> None:
    found = models(expand, "baseline: {preset: llama, scale: tiny}\nvary: {preset: [llama, gpt2], scale: [1, 2]}")
    assert {name: shape(each) for name, each in found.items()} == {
        "baseline": (64, 2, 4),
        "scale=2": (128, 4, 8),
        "preset=gpt2": (64, 2, 4),
        "preset=gpt2,scale=2": (128, 4, 8),
    }


def test_a_word_and_a_number_take_each_other_s_place(expand: Expand) -> None:
    found = models(expand, "baseline: {preset: llama, d_model: 128, scale: 2}\nvary: {scale: [tiny, 1]}")
    assert found["baseline"].d_model == 256
    assert found["scale=1"].d_model == 128
    assert shape(found["scale=tiny"]) == (64, 2, 4)


def test_the_same_factor_in_other_words_is_the_same_variant(expand: Expand) -> None:
    found = expand(
        f"{BASE}}}\nvary: {{scale: [1, 1.0, 2]}}\nvariants: {{twice: {{d_model: 128, n_layers: 4, n_heads: 8}}}}"
    )
    assert [each.name for each in found.variants] == ["baseline", "twice"]


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ("{scale: 2}", ["scale=1.5"]),
        ("{scale: 2, block: pre_norm}", ["scale=1.5"]),
        ("{scale: 1}", ["scale=1.5", "scale=2"]),
    ],
)
def test_a_factor_is_excluded_by_its_number(rule: str, left: list[str], expand: Expand) -> None:
    found = expand(f"{BASE}}}\nvary: {{scale: [1.5, 2]}}\nexclude: [{rule}]")
    assert [each.name for each in found.variants] == ["baseline", *left]


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            "vary: {scale: [1, 0.75]}",
            "5:19: scale 0.75 makes n_layers 2 to 1.5, which is not whole\n"
            "  write 1: the sizes have 2 as their greatest common divisor",
        ),
        ("vary: {scale: [0.1]}", "5:16: scale 0.1 makes d_model 64 to 6.4, which is not whole"),
        ("vary: {scale: [0]}", "5:16: 'scale': a factor is more than 0 (it is 0)\n  write a number such as 0.5 or 2"),
        ("vary: {scale: [-1]}", "5:16: 'scale': a factor is more than 0"),
        ("variants: {x: {scale: 0.3}}", "5:16: scale 0.3 makes d_model 64 to 19.2, which is not whole"),
        ("vary: {scale: [true]}", "5:16: a scale is that of a preset, and there is none"),
        ("vary: {scale: [1e6]}", "5:16: scale 1e+06: 'd_model': must be at most 16777216"),
    ],
)
def test_a_factor_that_there_is_not_refuses_the_file(added: str, said: str, refused: Refused) -> None:
    assert refused(f"{BASE}}}\n{added}").startswith(f"tiny.yaml:{said}")


def test_a_factor_that_only_another_axis_forbids_is_invalid(expand: Expand) -> None:
    found = expand(f"{BASE}}}\nvary: {{scale: [0.5, 1], n_layers: [2, 3]}}")
    assert [(each.name, each.reason) for each in found.invalid] == [
        ("scale=0.5,n_layers=3", "scale 0.5 makes n_layers 3 to 1.5, which is not whole")
    ]
    assert [each.name for each in found.variants] == ["baseline", "scale=0.5", "n_layers=3"]


def test_a_model_is_built_at_a_factor_from_python() -> None:
    small: dict[str, Any] = {"preset": "llama", "scale": 0.5, "d_model": 64, "n_layers": 2, "n_heads": 4}
    assert shape(model_settings(small)) == (32, 1, 2)
    with pytest.raises(Faults, match="not whole"):
        model_settings({**small, "scale": 0.3})

"""Presets against the published models that they are called after: sizes, every setting, small versions."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Expand, Refused

from ablate import building, catalogue, cost, describing, meta, model, presets
from ablate.settings import LayerSettings, ModelSettings

DATA = Path(__file__).parent / "data"
NAMES = catalogue.names(catalogue.PRESETS)
PUBLISHED: dict[str, Any] = json.loads((DATA / "published_shapes.json").read_text())["models"]
RECKONED: dict[str, Any] = json.loads((DATA / "reckoned_shapes.json").read_text())["models"]


@cache
def settings(preset: str, **changes: Any) -> ModelSettings:
    return building.model_settings({"preset": preset, **changes})


def layers(found: ModelSettings) -> list[LayerSettings]:
    return found.stacks[-1].layers


# --- What a preset is -------------------------------------------------------------------------------------------------


def test_every_published_model_is_a_preset() -> None:
    assert len(PUBLISHED) == 27
    assert set(PUBLISHED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_what_it_is_and_from_which_year(name: str) -> None:
    assert re.search(r"\b(20\d\d)\b", catalogue.text(catalogue.PRESETS, name))


# --- Sizes ------------------------------------------------------------------------------------------------------------


def expected(name: str) -> dict[str, int]:
    """The figures of a model that this project did not compute."""
    if name in RECKONED:
        return dict(RECKONED[name])
    figures, cached = PUBLISHED[name]["computed"], PUBLISHED[name]["computed"]["kv_cache"]
    return {
        "total": figures["total"],
        "non_embedding": figures["non_embedding"],
        "active_per_token": figures["active_per_token"],
        "kv_elements_per_token": cached["elements_per_token"],
        "kv_elements_per_source_token": cached.get("cross_attention_elements_per_encoder_token", 0),
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_describe_says_is_exactly_what_the_model_has(name: str) -> None:
    told = describing.describe_preset(name)
    found = {
        "total": told["params_total"],
        "non_embedding": told["params_non_embedding"],
        "active_per_token": told["params_active"],
        "kv_elements_per_token": told["kv_cache_elements_per_token"],
        "kv_elements_per_source_token": told["kv_cache_elements_per_source_token"],
    }
    assert found == {"kv_elements_per_source_token": 0, **expected(name)}


def table(found: ModelSettings) -> int:
    return found.shape.vocab_size * found.d_model


# What a publisher counted otherwise, and the number that it makes.
COUNTED: dict[str, Callable[[], tuple[float, float]]] = {
    "gpt2-xl-1.5b": lambda: (total("gpt2-xl-1.5b"), 1.5576e9),  # 1542M is a miscount
    "qwen2-7b": lambda: (total("qwen2-7b") - table(settings("qwen2-7b")), 7.07e9),  # without one of two matrices
    "llama-4-scout-text": lambda: (total("llama-4-scout-text"), 108e9),  # 109B with the vision tower
    "transformer-base-2017": lambda: (total("transformer-base-2017", vocab_size=40_800), 65e6),  # 63.1M with 37k
    "gemma-2b": lambda: (total("gemma-2b", vocab_size=256_128), 2_506_434_560),  # rows of padding
    "gemma-2-9b": lambda: (total("gemma-2-9b", vocab_size=256_128), 9_242_164_736),
}


def total(name: str, **changes: Any) -> int:
    return cost.cost(settings(name, **changes), 1).params_total


def last_digit(number: float) -> int:
    """The unit of the last digit that is said: 100 000 000 for 6.7e9."""
    digits = str(round(number))
    return int(10 ** (len(digits) - len(digits.rstrip("0"))))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_publishers_headline_is_met_within_its_rounding(name: str) -> None:
    found, headline = COUNTED[name]() if name in COUNTED else (total(name), PUBLISHED[name]["published"]["total_num"])
    assert abs(found - headline) < last_digit(headline)


ACTIVE = [name for name in PUBLISHED if "active_num" in PUBLISHED[name]["published"]]


@pytest.mark.parametrize("name", ACTIVE)
def test_the_active_parameters_meet_the_headline(name: str) -> None:
    """DeepSeek's figures are without the input embedding."""
    found, headline = settings(name), PUBLISHED[name]["published"]["active_num"]
    active = cost.cost(found, 1).params_active - (table(found) if name.startswith("deepseek") else 0)
    assert abs(active - headline) < last_digit(headline)


DESCRIBE = """
import sys
from pathlib import Path
from ablate.cli import main
try:
    main(["describe", "preset/deepseek-v3", "--json"])
finally:
    peak = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(int(peak[0].split()[1]) * 1024, file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's count of a process's memory")
def test_671_billion_parameters_are_described_in_a_gigabyte() -> None:
    done = subprocess.run([sys.executable, "-c", DESCRIBE], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout)["params_total"] == 671_026_404_352
    assert int(done.stderr) < 10**9


# --- Configurations ---------------------------------------------------------------------------------------------------


def attention(found: ModelSettings | LayerSettings) -> Any:
    return found.attention


def routed(found: ModelSettings) -> Any:
    """The mixture of experts of the last layer."""
    return layers(found)[-1].feed_forward


def dense_width(found: ModelSettings) -> int:
    """Of the first layer: of an expert, where all layers are mixtures."""
    width = layers(found)[0].feed_forward.model_dump()["d_ff"]
    assert isinstance(width, int)
    return width


def activation(found: ModelSettings) -> str:
    choice = layers(found)[0].feed_forward.model_dump()
    name = choice.get("expert", choice["name"])
    return f"{name} {choice['approximate']}" if "approximate" in choice else str(name)


def rope(found: ModelSettings) -> dict[str, Any]:
    """As a configuration says it, with scaled attention where the sequence is stretched."""
    position: Any = found.position
    said = {"rope_theta": position.base, "rope_type": "default"}
    if position.fraction != 1:
        said["partial_rotary_factor"] = position.fraction
    if (scaling := position.scaling) is not None:
        assert scaling.attention_factor == 1, "what multiplies cosines is 1: mscale / mscale_all_dim"
        width = attention(found).qk_nope_head_dim + attention(found).qk_rope_head_dim
        stretch = (math.sqrt(attention(found).scale * math.sqrt(width)) - 1) / (0.1 * math.log(scaling.factor))
        said |= {"rope_type": scaling.kind, "factor": scaling.factor}
        said |= {"original_max_position_embeddings": scaling.original_max_seq_len}
        said |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        said |= dict.fromkeys(("mscale", "mscale_all_dim"), round(stretch, 12))
    return said


def n_positions(found: ModelSettings) -> int:
    """Rows of RoBERTa's table are counted with its offset, OPT's without."""
    padded = getattr(found.position, "padding_id", None) is not None
    return found.max_seq_len + (found.position.model_dump()["offset"] if padded else 0)


NETWORKS = {
    "gelu_new": "gelu tanh",
    "gelu_pytorch_tanh": "geglu tanh",
    "gelu": "gelu none",
    "silu": "swiglu",
    "gated-gelu": "geglu tanh",
}
"""What an activation of a configuration is called here, where it is called otherwise."""

READ: dict[str, Callable[[ModelSettings], Any]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), lambda m: m.d_model),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers"), lambda m: len(m.stacks[0].layers)
    ),
    **dict.fromkeys(("num_decoder_layers", "decoder_layers"), lambda m: len(m.stacks[-1].layers)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"), lambda m: m.n_heads),
    "encoder_attention_heads": lambda m: m.stacks[0].shape.n_heads,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), n_positions),
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"), lambda m: m.norm.model_dump()["eps"]),
    **dict.fromkeys(("ffn_dim", "ffn_hidden_size", "d_ff"), dense_width),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size"), dense_width),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), lambda m: routed(m).n_experts),
    "vocab_size": lambda m: m.shape.vocab_size,
    "tie_word_embeddings": lambda m: m.tie_embeddings,
    "scale_embedding": lambda m: m.embed_scale,
    "type_vocab_size": lambda m: m.n_token_types,
    "word_embed_proj_dim": lambda m: m.d_embed or m.d_model,
    "head_dim": lambda m: getattr(m.attention, m.attention.rotary_setting),
    "d_kv": lambda m: attention(m).head_dim,
    "num_key_value_heads": lambda m: attention(m).kv_heads(m.shape) if hasattr(m.attention, "kv_heads") else m.n_heads,
    "multi_query": lambda m: attention(m).kv_heads(m.shape) == 1,
    "attention_bias": lambda m: getattr(m.attention, "bias", False),
    "sliding_window": lambda m: attention(m).window,
    "attn_logit_softcapping": lambda m: attention(m).softcap,
    "query_pre_attn_scalar": lambda m: (attention(m).scale or attention(m).head_dim ** -0.5) ** -2,
    "final_logit_softcapping": lambda m: m.head.softcap,
    "attention_chunk_size": lambda m: attention(m).chunk,
    "use_qk_norm": lambda m: attention(m).qk_norm == "l2",
    "parallel_attn": lambda m: m.block.n_norms(2) == 1,
    "do_layer_norm_before": lambda m: m.block.name == "pre_norm",
    "alibi": lambda m: m.position.name == "alibi",
    "rope_parameters": rope,
    "relative_attention_num_buckets": lambda m: m.position.model_dump()["n_buckets"],
    "relative_attention_max_distance": lambda m: m.position.model_dump()["max_distance"],
    "moe_intermediate_size": lambda m: routed(m).d_ff,
    "num_experts_per_tok": lambda m: routed(m).top_k,
    "n_shared_experts": lambda m: routed(m).n_shared_experts,
    "n_group": lambda m: routed(m).n_expert_groups,
    "topk_group": lambda m: routed(m).top_groups,
    "norm_topk_prob": lambda m: routed(m).renormalize,
    "routed_scaling_factor": lambda m: routed(m).routed_scaling,
    "router_aux_loss_coef": lambda m: routed(m).balance_loss,
    "first_k_dense_replace": lambda m: sum(each.feed_forward.name != "moe" for each in layers(m)),
    "interleave_moe_layer_step": lambda m: 1 if all(each.feed_forward.name == "moe" for each in layers(m)) else 0,
    **{key: lambda m, key=key: getattr(m.attention, key) for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},  # type: ignore[misc]
    **{key: lambda m, key=key: getattr(m.attention, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")},  # type: ignore[misc]
    **dict.fromkeys(("activation_function", "hidden_act", "hidden_activation", "feed_forward_proj"), activation),
}

UNUSED = {
    ("falcon-7b", "num_kv_heads"),  # what multi_query makes of no effect
    ("falcon-7b", "new_decoder_architecture"),
    ("qwen3-30b-a3b", "intermediate_size"),  # of dense layers, of which there is none
    ("llama-4-scout-text", "intermediate_size_mlp"),
    *((name, "topk_method") for name in ("deepseek-v2", "deepseek-v2-lite")),  # told by the groups
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_says_everything_that_the_published_configuration_says(name: str) -> None:
    config = {key: value for key, value in PUBLISHED[name]["config"].items() if (name, key) not in UNUSED}
    said = {key: NETWORKS.get(value, value) if isinstance(value, str) else value for key, value in config.items()}
    assert {key: READ[key](settings(name)) for key in config} == said


# What configurations leave to the code of their models: (presets, where in the settings, what stands there).
TRAITS: list[tuple[str, str, Any]] = [
    (
        "gpt2-124m gpt2-xl-1.5b opt-6.7b bloom-7b1 phi-2 bert-base roberta-base transformer-base-2017",
        "attention.bias",
        True,
    ),
    (
        "falcon-7b llama-7b llama-3-8b mistral-7b-v0.1 gemma-2b olmoe-1b-7b qwen3-30b-a3b t5-base",
        "attention.bias",
        False,
    ),
    ("qwen2-7b", "attention.bias", "qkv"),
    ("qwen3-30b-a3b", "attention.qk_norm", "head"),
    ("olmoe-1b-7b", "attention.qk_norm", "projection"),
    ("olmoe-1b-7b llama-4-scout-text", "attention.qk_norm_eps", 1e-5),
    ("qwen3-30b-a3b", "attention.qk_norm_eps", 1e-6),
    ("t5-base t5-v1.1-base", "attention.scale", "none"),
    ("mixtral-8x7b llama-3-8b qwen2-7b", "attention.window", None),
    ("gpt2-124m gpt2-xl-1.5b opt-6.7b bert-base roberta-base", "position.name", "learned"),
    ("gpt2-124m gpt2-xl-1.5b bert-base", "position.offset", 0),
    ("opt-6.7b roberta-base", "position.offset", 2),
    ("opt-6.7b bert-base", "position.padding_id", None),
    ("roberta-base", "position.padding_id", 1),
    ("bloom-7b1", "position.name", "alibi"),
    ("transformer-base-2017 vaswani-decoder", "position.name", "sinusoidal"),
    ("transformer-base-2017 vaswani-decoder", "position.layout", "interleaved"),
    ("llama-7b mistral-7b-v0.1 mixtral-8x7b gemma-2-9b phi-2 falcon-7b qwen2-7b", "position.layout", "half"),
    ("deepseek-v2 deepseek-v2-lite deepseek-v3 llama-4-scout-text", "position.layout", "interleaved"),
    ("bloom-7b1", "feed_forward.approximate", "tanh"),
    ("falcon-7b t5-base", "feed_forward.bias", False),
    ("gpt2-124m opt-6.7b bloom-7b1 phi-2 bert-base transformer-base-2017", "feed_forward.bias", True),
    ("gpt2-124m opt-6.7b bloom-7b1 phi-2 falcon-7b bert-base transformer-base-2017", "norm.name", "layer_norm"),
    ("llama-7b mistral-7b-v0.1 qwen3-30b-a3b deepseek-v3 t5-base t5-v1.1-base", "norm.name", "rms_norm"),
    ("gemma-2b gemma-2-9b", "norm.unit_offset", True),
    ("llama-7b qwen2-7b", "norm.unit_offset", False),
    ("gpt2-124m llama-7b bloom-7b1 deepseek-v3 gemma-2b t5-base t5-v1.1-base", "block.name", "pre_norm"),
    ("gemma-2-9b", "block.name", "sandwich"),
    ("falcon-7b phi-2", "block.name", "parallel"),
    ("bert-base roberta-base transformer-base-2017 vaswani-decoder", "block.name", "post_norm"),
    ("bert-base roberta-base bloom-7b1", "embed_norm", True),
    ("gpt2-124m transformer-base-2017 gemma-2b", "embed_norm", False),
    ("gemma-2b gemma-2-9b transformer-base-2017", "embed_scale", True),
    ("t5-base llama-7b", "embed_scale", False),
    ("roberta-base", "n_token_types", 1),
    ("falcon-7b bloom-7b1", "tie_embeddings", True),
    ("t5-base", "head.scale", True),
    ("t5-v1.1-base", "head.scale", False),
    ("phi-2 bert-base roberta-base", "head.bias", True),
    ("gpt2-124m transformer-base-2017", "head.bias", False),
    ("bert-base roberta-base", "head.transform", True),
    ("phi-2 t5-base", "head.transform", False),
    ("bert-base roberta-base", "family", "encoder"),
    ("t5-base t5-v1.1-base transformer-base-2017 vaswani", "family", "encoder_decoder"),
    ("gpt2-124m falcon-7b vaswani-decoder", "family", "decoder"),
    ("mixtral-8x7b olmoe-1b-7b qwen3-30b-a3b deepseek-v2 deepseek-v2-lite", "feed_forward.score", "softmax"),
    ("deepseek-v3 llama-4-scout-text", "feed_forward.score", "sigmoid"),
    ("mixtral-8x7b", "feed_forward.renormalize", True),
    ("deepseek-v2", "feed_forward.group_score", "max"),
    ("deepseek-v3", "feed_forward.group_score", "top2"),
    ("deepseek-v3", "feed_forward.balance", "bias"),
    ("llama-4-scout-text", "feed_forward.weigh", "input"),
    ("llama-4-scout-text", "feed_forward.n_shared_experts", 1),
    ("deepseek-v3 mixtral-8x7b", "feed_forward.weigh", "output"),
]


@pytest.mark.parametrize(("names", "place", "value"), TRAITS, ids=[f"{place}={value}" for _, place, value in TRAITS])
def test_a_preset_says_what_a_configuration_leaves_to_code(names: str, place: str, value: Any) -> None:
    for name in names.split():
        found: Any = settings(name)
        for part in place.split("."):
            found = getattr(found, part)
        assert found == value, name


def test_every_other_layer_of_gemma_2_sees_a_window_from_the_first_on() -> None:
    assert [attention(layer).window for layer in layers(settings("gemma-2-9b"))] == [4096, None] * 21


def test_every_fourth_layer_of_llama_4_sees_all_and_knows_no_position() -> None:
    found = layers(settings("llama-4-scout-text"))
    rotated = (8192, "l2", "rope")
    assert [(attention(each).chunk, attention(each).qk_norm, each.position.name) for each in found] == [
        *(rotated, rotated, rotated, (None, "none", "none")),
    ] * 12
    assert {attention(each).n_kv_heads for each in found} == {8}, "a rule for layers keeps what it does not say"


def test_deepseeks_first_layers_are_dense() -> None:
    widths = {"deepseek-v2-lite": (1, 10944), "deepseek-v2": (1, 12288), "deepseek-v3": (3, 18432)}
    for name, (first, width) in widths.items():
        dense = [each.feed_forward for each in layers(settings(name))[:first]]
        assert {(each.name, each.model_dump()["d_ff"]) for each in dense} == {("swiglu", width)}
        assert layers(settings(name))[first].feed_forward.name == "moe"


# --- Small versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_version_is_a_whole_model(name: str) -> None:
    """Its parameters are as reckoned, and it turns tokens into logits."""
    tiny = settings(name, scale="tiny")
    assert tiny.vocab_size == 256 + tiny.n_special_tokens, "bytes, and what the family needs beside them"
    reckoned = cost.cost(tiny, tiny.max_seq_len)
    assert 1e5 < reckoned.params_total < 1e6
    assert meta.count_parameters(lambda: model.Transformer(tiny)) == reckoned.params_total
    ids = torch.arange(16).view(2, 8)
    net = model.build(tiny, seed=0).eval()
    logits = net(ids, ids[:, :5]) if tiny.family == "encoder_decoder" else net(ids)
    assert logits.shape == (2, 5 if tiny.family == "encoder_decoder" else 8, tiny.vocab_size)
    assert torch.isfinite(logits).all()


def traits(plain: Any) -> Any:
    """Settings without their sizes: words, truth values, and what is there at all."""
    if isinstance(plain, dict):
        return {key: traits(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [traits(value) for value in plain]
    return plain if isinstance(plain, str | bool) or plain is None else "a number"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_version_keeps_every_trait(name: str) -> None:
    whole, tiny = settings(name), settings(name, scale="tiny")
    kept = {"init_std": None, "layers": None}
    assert traits({**tiny.model_dump(), **kept}) == traits({**whole.model_dump(), **kept})
    assert heads_a_key(tiny) == heads_a_key(whole)
    kinds = [{str(traits(layer.model_dump())) for layer in layers(each)} for each in (tiny, whole)]
    assert kinds[0] == kinds[1], "the same kinds of layers"


def heads_a_key(found: ModelSettings) -> int:
    return found.n_heads // getattr(found.attention, "n_kv_heads", found.n_heads)


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_version_is_small_in_every_way(name: str) -> None:
    tiny = settings(name, scale="tiny")
    for layer in layers(tiny):
        near = [getattr(layer.attention, key, None) for key in ("window", "chunk")]
        assert all(each is None or each <= tiny.max_seq_len // 4 for each in near), "much shorter than the context"
        if layer.feed_forward.name == "moe":
            mixture: Any = layer.feed_forward
            assert mixture.top_k < mixture.n_experts <= 8
            assert (mixture.n_expert_groups > 1) == (routed(settings(name)).n_expert_groups > 1)
            assert mixture.n_expert_groups == 1 or mixture.top_groups < mixture.n_expert_groups
    if (scaling := getattr(tiny.position, "scaling", None)) is not None:
        assert scaling.factor * scaling.original_max_seq_len == tiny.max_seq_len


def test_every_preset_has_a_tiny_version() -> None:
    assert all("tiny" in presets.scales(name) for name in NAMES)


def test_scales_and_presets_are_axes(expand: Expand) -> None:
    found = expand("baseline: {max_seq_len: 64}\nvary: {preset: [gpt2-124m, gemma-2-9b], scale: [tiny], n_heads: [4]}")
    assert found.counts["planned"] == 3
    assert not found.invalid
    named = {each.name: each.settings.model for each in found.variants}
    gemma = named["preset=gemma-2-9b,scale=tiny,n_heads=4"]
    assert (gemma.max_seq_len, gemma.n_heads, gemma.block.name) == (128, 4, "sandwich")
    assert [each.name for each in expand("baseline: {preset: llama, scale: tiny}\nvary: {scale: [tiny]}").variants] == [
        "baseline"
    ]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("baseline: {preset: llama, scale: small}", "4:27: unknown scale of preset llama 'small'\n  known: tiny"),
        ("baseline: {scale: tiny}", "4:12: a scale is that of a preset, and there is none"),
        ("variants: {a: {scale: tiny}}", "5:16: a scale is that of a preset, and there is none"),
        ("vary: {preset: [llama], scale: [tiny, small]}", "5:39: unknown scale of preset llama 'small'"),
        ("baseline: {preset: llama, hf: x}", "4:27: 'hf' stands in place of 'preset' and 'scale'"),
        ("baseline: {hf: nowhere}", "4:12: nowhere/config.json does not exist"),
    ],
)
def test_a_model_that_can_start_nowhere_is_told_at_its_place(refused: Refused, lines: str, told: str) -> None:
    assert told in refused(lines)

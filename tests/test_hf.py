"""Published models: logits that other code computed, configurations old and new, files that are not to be trusted."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ablate
from ablate import hf
from ablate.building import model_settings
from ablate.choice import Faults
from ablate.cost import cost
from ablate.importing import generate, load_hf
from ablate.model import Transformer
from ablate.position.t5 import buckets

DATA = Path(__file__).parent / "data" / "hf"
MODELS = sorted(folder.name for folder in DATA.iterdir() if (folder / "io.npz").exists())
LAYOUTS = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted((DATA / "layouts").glob("*.json"))
}
PUBLISHED = json.loads((DATA / "published.json").read_text(encoding="utf-8"))
Tensors = dict[str, Tensor]
Checkpoint = Callable[..., Path]


@cache
def arrays(name: str) -> dict[str, Tensor]:
    with np.load(DATA / name / "io.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


@cache
def meta(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / name / "meta.json").read_text(encoding="utf-8"))
    return found


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / name / "config.json").read_text(encoding="utf-8"))
    return found


@cache
def loaded(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return load_hf(DATA / name, dtype)


def tolerance(name: str) -> float:
    """1e-9 of the logits' deviation; BLOOM's own code has a constant of its GELU to eight digits alone."""
    return 1e-7 if name == "bloom" else 1e-9 * float(arrays(name)["logits_f64"].std())


def inputs(name: str, case: str = "") -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    given = arrays(name)
    both = [given[case + "input_ids"]]
    if "decoder_input_ids" in given:
        both.append(given.get(case + "decoder_input_ids", given["decoder_input_ids"]))
    named = {"token_type_ids": given["token_type_ids"]} if "token_type_ids" in given else {}
    if case:
        named["attention_mask"] = given[case + "attention_mask"]
    return tuple(both), named


@torch.no_grad()
def logits(model: Transformer, name: str, case: str = "") -> Tensor:
    ids, named = inputs(name, case)
    found: Tensor = model(*ids, **named)
    return found


@torch.no_grad()
def in_steps(model: Transformer, name: str, prefill: int = 5) -> Tensor:
    """Logits through the cache: a few tokens at once, then each by itself."""
    (*source, ids), _ = inputs(name)
    cache = model.new_cache(len(ids), ids.shape[1], source[0].shape[1] if source else 0)
    parts = [model(*source, ids[:, :prefill], cache=cache)]
    for i in range(prefill, ids.shape[1]):
        parts.append(model(*(None for _ in source), ids[:, i : i + 1], cache=cache))
    return torch.cat(parts, dim=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A changed copy of a model: fields of its configuration (None takes one out), and its tensors."""

    def checkpoint(
        name: str, change: Callable[[Tensors], Tensors] | None = None, without: tuple[str, ...] = (), **fields: Any
    ) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(DATA / name, folder, dirs_exist_ok=True)
        changed = {key: value for key, value in (config(name) | fields).items() if key not in without}
        (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        if change is not None:
            save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        return folder

    return checkpoint


def refused(folder: Path, load: Callable[[Path], Any] = load_hf) -> str:
    """What is said of a folder that is not imported, each fault on a line."""
    with pytest.raises(Faults) as caught:
        load(folder)
    lines = [fault.message for fault in caught.value.faults]
    assert all("\n" not in line for line in lines)
    return "\n".join(lines)


def described(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that stands alone."""
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return hf.settings(folder)


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_reference_s(name: str) -> None:
    torch.testing.assert_close(logits(loaded(name), name), arrays(name)["logits_f64"], atol=tolerance(name), rtol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if meta(name)["kind"] != "enc"])
def test_so_they_are_token_by_token_through_the_cache(name: str) -> None:
    torch.testing.assert_close(in_steps(loaded(name), name), arrays(name)["logits_f64"], atol=tolerance(name), rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_float32_is_as_close_as_the_reference_s_own(name: str) -> None:
    found = logits(loaded(name, torch.float32), name)
    assert found.dtype == torch.float32
    allowed = meta(name)["accuracy"]["suggested_atol_float32"]
    torch.testing.assert_close(found.double(), arrays(name)["logits_f64"], atol=allowed, rtol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if "padded_logits_f64" in arrays(name)])
def test_padding_changes_nothing_where_tokens_are_real(name: str) -> None:
    expected, real = arrays(name)["padded_logits_f64"], arrays(name)["padded_attention_mask"].bool()
    if meta(name)["kind"] == "encdec":
        real = torch.ones(expected.shape[:2], dtype=torch.bool)
    found = logits(loaded(name), name, "padded_")
    torch.testing.assert_close(found[real], expected[real], atol=tolerance(name), rtol=0)


@pytest.mark.parametrize(
    ("name", "case"), [(n, case) for n in MODELS for case in meta(n).get("extra", {}) if n != "t5"]
)
def test_variants_of_a_configuration_give_their_own_logits(name: str, case: str, checkpoint: Checkpoint) -> None:
    model = load_hf(checkpoint(name, **meta(name)["extra"][case]["config_override"]), torch.float64)
    expected = arrays(name)[f"extra_{case}_logits_f64"]
    torch.testing.assert_close(logits(model, name), expected, atol=tolerance(name), rtol=0)
    torch.testing.assert_close(in_steps(model, name), expected, atol=tolerance(name), rtol=0)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_t5_puts_distances_into_the_same_buckets(stack: str) -> None:
    expected = arrays("t5")[f"rel_buckets_{stack}"]
    at = torch.arange(len(expected))
    assert torch.equal(buckets(at[None, :] - at[:, None], 8, 16, stack == "encoder"), expected)


# --- Names and shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_of_a_layout_arrives_once_and_whole(name: str, tmp_path: Path) -> None:
    """Nothing is left over and nothing is missing: the model holds the file's numbers, in whatever order."""
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(shape, generator=generator).half() for key, shape in LAYOUTS[name]["tensors"].items()}
    (tmp_path / "config.json").write_text(json.dumps(LAYOUTS[name]["config"]), encoding="utf-8")
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_hf(tmp_path)
    held = [*model.parameters(), *(x for key, x in model.named_buffers() if key in model.state_dict())]
    found, given = (torch.cat([x.detach().flatten().float() for x in each]) for each in (held, tensors.values()))
    assert torch.equal(found.sort().values, given.sort().values)


def test_queries_keys_and_values_come_in_their_order() -> None:
    """A bias on keys moves no logit, so that only this test sees it."""
    given = load_file(DATA / "bart" / "model.safetensors")
    parts = [given[f"model.decoder.layers.1.self_attn.{each}_proj.bias"].double() for each in "qkv"]
    attention = loaded("bart").get_submodule("decoder.layers.1.attention.qkv")
    assert torch.equal(attention.bias, torch.cat(parts))  # type: ignore[arg-type]


def test_tied_weights_are_one_tensor_and_counted_once() -> None:
    model = loaded("bert")
    assert model.head.output.weight is model.embedding.tokens.weight
    assert sum(x.numel() for x in model.parameters()) == meta("bert")["parameters"]


def shards(folder: Path, tensors: Tensors) -> dict[str, str]:
    """The tensors in two files in place of one; which file has which."""
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    return where


def index(folder: Path, where: Mapping[str, Any]) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def test_shards_with_an_index_are_one_checkpoint(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    index(folder, shards(folder, load_file(folder / "model.safetensors")))
    assert torch.equal(logits(load_hf(folder, torch.float64), "llama"), logits(loaded("llama"), "llama"))


def without_prefix(tensors: Tensors) -> Tensors:
    """GPT-2's first files: no prefix, and each layer's causal mask."""
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    mask = torch.ones(1, 1, 32, 32, dtype=torch.uint8).tril()
    return short | {f"h.{i}.attn.bias": mask.clone() for i in range(2)}


def in_older_words(tensors: Tensors) -> Tensors:
    """BERT's first files: gamma and beta, positions as a buffer, and the heads of its other task."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    more = {"bert.embeddings.position_ids": torch.arange(32)[None], "bert.pooler.dense.weight": torch.ones(64, 64)}
    decoder = {"cls.predictions.decoder.weight": old["bert.embeddings.word_embeddings.weight"].clone()}
    return old | more | decoder | {"cls.seq_relationship.bias": torch.ones(2)}


def with_repeated_embeddings(tensors: Tensors) -> Tensors:
    """BART's first files: what is tied stands in them up to four times, here without its first name."""
    shared = tensors.pop("model.shared.weight")
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return short | {name: shared.clone() for name in names}


def with_further_tokens(tensors: Tensors) -> Tensors:
    """DeepSeek-V3's files: a layer more, which predicts the token after the next."""
    layer = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in tensors.items() if "layers.2." in name}
    return tensors | layer | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}


def with_sinusoids(tensors: Tensors) -> Tensors:
    """Marian's first files: the table of positions, in half precision."""
    at, even = torch.arange(32.0, dtype=torch.float64)[:, None], torch.arange(0, 48, 2, dtype=torch.float64)
    waves = torch.cat([f(at * 10000 ** (-even / 48)) for f in (torch.sin, torch.cos)], dim=1).half()
    return tensors | {f"model.{stack}.embed_positions.weight": waves.clone() for stack in ("encoder", "decoder")}


OLDER_FILES = {
    "gpt2": without_prefix,
    "bert": in_older_words,
    "bart": with_repeated_embeddings,
    "deepseek_v3": with_further_tokens,
    "marian": with_sinusoids,
}


@pytest.mark.parametrize("name", OLDER_FILES)
def test_files_in_older_words_hold_the_same_model(name: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(name, OLDER_FILES[name])
    assert torch.equal(logits(load_hf(folder, torch.float64), name), logits(loaded(name), name))


def test_a_bias_that_a_file_leaves_out_is_zero(checkpoint: Checkpoint) -> None:
    folder = checkpoint("bart", lambda tensors: {k: x for k, x in tensors.items() if k != "final_logits_bias"})
    bias = load_file(DATA / "bart" / "model.safetensors")["final_logits_bias"].double()
    assert bias.abs().max() > 0.1
    torch.testing.assert_close(logits(load_hf(folder, torch.float64), "bart") + bias, logits(loaded("bart"), "bart"))


# --- Configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_their_published_size(name: str, tmp_path: Path) -> None:
    settings = model_settings(described(tmp_path, PUBLISHED[name]["config"]))
    assert cost(settings, 8).params_total == PUBLISHED[name]["parameters"]


def test_every_family_has_logits_that_other_code_computed() -> None:
    assert {config(name)["model_type"] for name in MODELS} == set(hf.families())
    assert len(hf.families()) == 20


def test_there_is_a_published_configuration_of_every_family() -> None:
    assert {each["config"]["model_type"] for each in PUBLISHED.values()} == set(hf.families())


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_unknown_field_is_named(name: str, tmp_path: Path) -> None:
    fields = PUBLISHED[name]["config"] | {"attention_temperature": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert refused(tmp_path, hf.settings) == "config.json: unknown field 'attention_temperature', which is 0.5"


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantized_weights_are_refused(name: str, tmp_path: Path) -> None:
    fields = PUBLISHED[name]["config"] | {"quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert "'quantization_config' is {\"bits\": 4}, which is not imported" in refused(tmp_path, hf.settings)


NOT_IMPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'rope_scaling.type' is \"dynamic\""),
    ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 2.0, "gain": 3}}, "unknown field 'rope_scaling.gain'"),
    ("llama-2-7b", {"rope_parameters": {"rope_theta": 1e4, "mscale": 2}}, "unknown field 'rope_parameters.mscale'"),
    ("llama-2-7b", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    ("llama-2-7b", {"hidden_act": "mish"}, "'hidden_act' is \"mish\""),
    ("llama-2-7b", {"hidden_size": "4096"}, "'hidden_size' must be a whole number, not \"4096\""),
    ("llama-2-7b", {"num_hidden_layers": True}, "'num_hidden_layers' must be a whole number up to 4096, not true"),
    ("llama-2-7b", {"rms_norm_eps": math.inf}, "'rms_norm_eps' must be a number, not Infinity"),
    ("llama-2-7b", {"rms_norm_eps": math.nan}, "'rms_norm_eps' must be a number, not NaN"),
    ("llama-2-7b", {"rms_norm_eps": 10**400}, "'rms_norm_eps' must be a number, not 1000"),
    ("llama-2-7b", {"num_hidden_layers": 10**9}, "must be a whole number up to 4096, not 1000000000"),
    ("mistral-7b-v0.1", {"num_hidden_layers": 10**9}, "must be a whole number up to 4096, not 1000000000"),
    ("deepseek-v3", {"n_routed_experts": 10**9}, "must be a whole number up to 4096, not 1000000000"),
    ("llama-2-7b", {"hidden_size": 10**30}, "'hidden_size' must be a whole number, not 1000"),
    ("llama-2-7b", {"rope_scaling": {"type": []}}, "'rope_scaling.type' is [], which is not imported"),
    ("llama-2-7b", {"a\nb": 1}, "unknown field 'a\\nb', which is 1"),
    ("qwen2-7b", {"layer_types": [[]] * 28}, "'layer_types' is [["),
    ("bart-base", {"decoder_start_token_id": 10**30}, "'decoder_start_token_id' is 1000"),
    ("llama-2-7b", {"attention_bias": 1}, "'attention_bias' must be true or false, not 1"),
    ("llama-2-7b", {"vocab_size": None}, "'vocab_size' is null"),
    ("llama-2-7b", {"is_encoder_decoder": True}, "'is_encoder_decoder' is true"),
    ("llama-2-7b", {"pruned_heads": {"0": [1]}}, "'pruned_heads' is {\"0\": [1]}"),
    ("llama-3.1-8b", {"rope_parameters": {"rope_theta": 1e4}}, "'rope_scaling' is {"),
    ("mistral-7b-v0.1", {"layer_types": ["full_attention"] * 32}, "'layer_types' is ["),
    ("qwen2-7b", {"layer_types": ["sliding_attention"] * 28}, "'layer_types' is ["),
    ("qwen2-7b", {"use_mrope": True}, "'use_mrope' is true"),
    ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 64}, "'max_window_layers' is 48"),
    ("gemma-2b", {"hidden_activation": "gelu"}, "'hidden_activation' is \"gelu\""),
    ("gemma-2b", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is true"),
    ("falcon-7b", {"alibi": True}, "'alibi' is true"),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "'num_ln_in_parallel_attn' is 2"),
    ("falcon-40b", {"parallel_attn": False}, "'parallel_attn' is false"),
    ("phi-2", {"qk_layernorm": True}, "'qk_layernorm' is true"),
    ("olmoe-1b-7b", {"clip_qkv": 8.0}, "'clip_qkv' is 8.0"),
    ("mixtral-8x7b", {"hidden_act": "gelu"}, "'hidden_act' is \"gelu\""),
    ("mixtral-8x7b", {"num_experts": 4}, "'num_local_experts' is 8 and 'num_experts' is 4, but they are two names"),
    ("deepseek-v2-lite", {"norm_topk_prob": True}, "'norm_topk_prob' is true"),
    ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "'topk_method' is \"noaux_tc\""),
    ("deepseek-v2-lite", {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "'scoring_func' is \"softmax\""),
    ("deepseek-v3", {"attention_bias": True}, "'attention_bias' is true"),
    ("deepseek-v3", {"rope_scaling": {"type": "yarn", "truncate": False}}, "'rope_scaling.truncate' is false"),
    ("bloom-7b1", {"apply_residual_connection_post_layernorm": True}, "'apply_residual_connection_post_layernorm'"),
    ("opt-350m", {"layer_norm_elementwise_affine": False}, "'layer_norm_elementwise_affine' is false"),
    (
        "opt-350m",
        {"do_layer_norm_before": True, "_remove_final_layer_norm": True},
        "'_remove_final_layer_norm' is true",
    ),
    ("gpt2", {"activation_function": "quick_gelu"}, "'activation_function' is \"quick_gelu\""),
    ("gpt2", {"add_cross_attention": True}, "'add_cross_attention' is true"),
    ("bert-base-uncased", {"position_embedding_type": "relative_key"}, "'position_embedding_type' is \"relative_key\""),
    ("bert-base-uncased", {"hidden_act": "relu"}, "'hidden_act' is \"relu\""),
    ("roberta-base", {"is_decoder": True}, "'is_decoder' is true"),
    ("roberta-base", {"pad_token_id": None}, "'pad_token_id' is null"),
    ("t5-base", {"is_gated_act": True}, "'is_gated_act' is true"),
    ("t5-base", {"is_encoder_decoder": False}, "'is_encoder_decoder' is false"),
    ("bart-base", {"normalize_before": True}, "'normalize_before' is true"),
    ("bart-base", {"num_hidden_layers": 7}, "'num_hidden_layers' is 7"),
    ("opus-mt-en-de", {"share_encoder_decoder_embeddings": False}, "'share_encoder_decoder_embeddings' is false"),
    ("opus-mt-en-de", {"decoder_vocab_size": 100}, "'decoder_vocab_size' is 100"),
]


@pytest.mark.parametrize(("name", "fields", "said"), NOT_IMPORTED, ids=lambda value: str(value)[:40])
def test_what_would_change_the_numbers_is_refused_by_name(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]["config"] | fields), encoding="utf-8")
    assert said in refused(tmp_path, hf.settings)


def test_a_field_that_is_needed_is_named(tmp_path: Path) -> None:
    fields = {key: value for key, value in PUBLISHED["deepseek-v3"]["config"].items() if key != "q_lora_rank"}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert refused(tmp_path, hf.settings) == "config.json: 'q_lora_rank' is missing"


IN_NEW_WORDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama-2-7b": (("rope_scaling", "torch_dtype"), {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    "llama-3.1-8b": (
        ("rope_scaling", "rope_theta"),
        {"rope_parameters": PUBLISHED["llama-3.1-8b"]["config"]["rope_scaling"] | {"rope_theta": 500000.0}},
    ),
    "phi-2": (
        ("rope_theta", "partial_rotary_factor"),
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.4, "rope_type": "default"}},
    ),
    "deepseek-v3": (
        ("rope_scaling", "rope_theta", "topk_method", "scoring_func", "ep_size"),
        {
            "rope_parameters": {
                **{k: v for k, v in PUBLISHED["deepseek-v3"]["config"]["rope_scaling"].items() if k != "type"},
                "rope_type": "yarn",
                "rope_theta": 10000.0,
            },
            "head_dim": 64,
            "qk_head_dim": 192,
        },
    ),
    "gpt2": (("n_embd", "n_ctx"), {"hidden_size": 768}),
    "bloom-7b1": (("n_embed", "num_attention_heads", "n_inner"), {"hidden_size": 4096, "n_head": 32}),
    "qwen3-30b-a3b": (("num_experts",), {"num_local_experts": 128}),
    "gemma-2b": (("hidden_activation",), {"hidden_act": "gelu_pytorch_tanh"}),
    "falcon-7b": (("multi_query",), {"num_kv_heads": 71, "ffn_hidden_size": 18176, "activation": "gelu"}),
    "t5-v1.1-base": (
        ("output_past",),
        {"tie_word_embeddings": True, "scale_decoder_outputs": False, "is_gated_act": True, "dense_act_fn": "gelu_new"},
    ),
}


@pytest.mark.parametrize("name", IN_NEW_WORDS)
def test_old_and_new_words_mean_one_model(name: str, tmp_path: Path) -> None:
    old = PUBLISHED[name]["config"]
    gone, added = IN_NEW_WORDS[name]
    new = {key: value for key, value in old.items() if key not in gone} | added
    assert described(tmp_path, new) == described(tmp_path, old)


def test_deepseek_s_yarn_scales_the_softmax_and_turns_by_the_ratio(tmp_path: Path) -> None:
    fields = PUBLISHED["deepseek-v3"]["config"]
    scaling = fields["rope_scaling"] | {"mscale": 2.0}
    tree = described(tmp_path, fields | {"rope_scaling": scaling})
    gain = 0.1 * math.log(40) + 1
    assert tree["attention"]["scale"] == pytest.approx(192**-0.5 * gain**2, rel=1e-12)
    ratio = (0.2 * math.log(40) + 1) / gain
    assert tree["position"]["scaling"]["attention_factor"] == pytest.approx(ratio, rel=1e-12)


def test_a_factor_that_yarn_leaves_out_is_the_ratio_of_the_lengths_everywhere(tmp_path: Path) -> None:
    fields = PUBLISHED["deepseek-v3"]["config"]
    scaling = {key: value for key, value in fields["rope_scaling"].items() if key != "factor"}
    assert scaling["original_max_position_embeddings"] * 40 == fields["max_position_embeddings"]
    assert described(tmp_path, fields | {"rope_scaling": scaling}) == described(tmp_path, fields)


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 26}, [27, 28]),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "all"),
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 26}, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", *["full_attention"] * 27],
            },
            [1],
        ),
    ],
    ids=["from a layer on", "all", "none", "listed"],
)
def test_qwen_s_window_is_where_the_file_says(fields: dict[str, Any], at: Any, tmp_path: Path) -> None:
    tree = described(tmp_path, PUBLISHED["qwen2-7b"]["config"] | fields)
    settings = model_settings(tree)
    slide = [i + 1 for i, layer in enumerate(settings.stacks[-1].layers) if layer.attention.window == 64]  # type: ignore[attr-defined]
    assert slide == (list(range(1, 29)) if at == "all" else at or [])


def test_mistral_has_its_window_unless_the_file_says_null(tmp_path: Path) -> None:
    fields = PUBLISHED["mistral-7b-v0.1"]["config"]
    silent = {key: value for key, value in fields.items() if key != "sliding_window"}
    assert described(tmp_path, silent)["attention"]["window"] == 4096
    assert "window" not in described(tmp_path, fields | {"sliding_window": None})["attention"]


def test_phi_turns_half_of_each_head_unless_the_file_says_how_much(tmp_path: Path) -> None:
    fields = {k: v for k, v in PUBLISHED["phi-2"]["config"].items() if k != "partial_rotary_factor"}
    assert described(tmp_path, fields)["position"]["fraction"] == 0.5
    assert described(tmp_path, PUBLISHED["phi-2"]["config"])["position"]["fraction"] == 0.4


def test_gpt2_may_divide_its_scores_by_the_layer(tmp_path: Path) -> None:
    fields = PUBLISHED["gpt2"]["config"] | {"scale_attn_by_inverse_layer_idx": True}
    layers = model_settings(described(tmp_path, fields)).stacks[0].layers
    usual = 64**-0.5
    scales = [layer.attention.scale or usual for layer in layers]  # type: ignore[attr-defined]
    assert scales == pytest.approx([usual / i for i in range(1, 13)], rel=1e-12)


def test_qwen3_moe_is_dense_where_steps_and_lists_say(tmp_path: Path) -> None:
    fields = PUBLISHED["qwen3-30b-a3b"]["config"] | {"num_hidden_layers": 6}
    tree = described(tmp_path, fields | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert tree["layers"] == [{"at": [1, 2, 3, 5], "feed_forward": {"name": "swiglu", "d_ff": 6144}}]


def test_settings_need_no_torch() -> None:
    code = f"import sys; from ablate import hf; hf.settings({str(DATA / 't5')!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_experiment_can_start_from_a_folder() -> None:
    model = ablate.build({"hf": str(DATA / "mixtral"), "n_layers": 1})
    assert model(torch.arange(5)[None]).shape == (1, 5, 97)
    assert len(list(model.get_submodule("decoder.layers").children())) == 1


# --- Files that are not to be trusted ---------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "gpt2") == f"{tmp_path / 'gpt2' / 'config.json'} does not exist"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[1]", "must be a mapping, not [1]"),
        ('{"model_type": "mamba"}', "unknown model_type 'mamba'"),
        ('{"model_type": "_llama"}', "unknown model_type '_llama'"),
        ('{"model_type": "../llama"}', "unknown model_type '../llama'"),
        ("{}", "unknown model_type 'None'"),
        ('{"model_type": "a\\nb\\ud800"}', "unknown model_type 'a\\nb\\ud800'"),
    ],
    ids=["broken", "deep", "a list", "unknown", "private", "a path", "nothing", "unreadable"],
)
def test_a_config_that_is_none(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert said in refused(tmp_path)


def test_a_pickle_is_not_opened(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin alone, which is a pickle: opening it runs what is in it" in refused(folder)


def test_no_file_at_all(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(folder)


@pytest.mark.parametrize("damage", [lambda raw: raw[:1000], lambda raw: b"\xff" * 64 + raw, lambda raw: b""])
def test_a_broken_file(damage: Callable[[bytes], bytes], checkpoint: Checkpoint) -> None:
    file = checkpoint("llama") / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert f"{file} cannot be read" in refused(file.parent)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"a": "../secret.safetensors"}, 'names "../secret.safetensors", which is no safetensors file of its folder'),
        ({"a": "/etc/passwd"}, 'names "/etc/passwd", which is no safetensors file of its folder'),
        ({"a": "..\\secret.safetensors"}, "which is no safetensors file of its folder"),
        ({"a": "pytorch_model.bin"}, "which is no safetensors file of its folder"),
        ({"a": "model-00009.safetensors"}, "names model-00009.safetensors, which is missing"),
        ({"a": "x" * 300 + ".safetensors"}, "which is missing"),
        ({"a": "\0.safetensors"}, "names \\x00.safetensors, which is missing"),
        ({"a": 3}, "'weight_map' must name a file for every tensor"),
        ([], "'weight_map' must name a file for every tensor"),
    ],
    ids=["up", "root", "backslash", "pickle", "missing", "long", "zero", "a number", "a list"],
)
def test_an_index_leads_nowhere_else(where: Any, said: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    shutil.copy(folder / "model.safetensors", folder.parent / "secret.safetensors")
    (folder / "model.safetensors").unlink()
    index(folder, where)
    assert said in refused(folder)


def test_an_index_and_its_files_must_agree(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    where = shards(folder, load_file(folder / "model.safetensors"))
    name = min(where)
    index(folder, {key: file for key, file in where.items() if key != name})
    assert f"says that '{name}' is in no file; it is in {where[name]}" in refused(folder)
    index(folder, where | {"extra": where[name]})
    assert f"says that 'extra' is in {where[name]}; it is in none of the files" in refused(folder)


Q = "model.layers.1.self_attn.q_proj.weight"


def test_a_tensor_that_is_missing_is_named(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", lambda tensors: {name: x for name, x in tensors.items() if name != Q})
    assert refused(folder) == f"config.json asks for tensors that the checkpoint does not have: '{Q}'"


def test_tensors_that_are_left_over_are_named(checkpoint: Checkpoint) -> None:
    more = {f"model.layers.0.self_attn.q_proj.lora_{i}": torch.ones(1) for i in range(6)}
    said = refused(checkpoint("llama", lambda tensors: tensors | more))
    assert said.startswith("the checkpoint has tensors that config.json does not ask for: 'model.layers.0.self_attn.q_")
    assert said.endswith("and 2 more")


def test_a_layer_too_many_is_left_over(checkpoint: Checkpoint) -> None:
    said = refused(checkpoint("deepseek_v3", num_hidden_layers=2))
    assert "'model.layers.2.input_layernorm.weight'" in said


FUSED = "transformer.h.0.self_attention.query_key_value.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("llama", Q, (60, 64)),
        ("llama", Q, (128, 32)),
        ("llama", Q, (64, 64, 1)),
        ("llama", "model.norm.weight", (64, 1)),
        ("falcon_new", FUSED, (97, 64)),
        ("falcon_new", FUSED, (64, 128)),
        ("gpt2", "transformer.h.0.attn.c_proj.weight", (64 * 64,)),
    ],
    ids=str,
)
def test_a_tensor_of_another_shape_is_named(
    name: str, tensor: str, shape: tuple[int, ...], checkpoint: Checkpoint
) -> None:
    said = refused(checkpoint(name, lambda tensors: tensors | {tensor: torch.zeros(shape)}))
    assert f"'{tensor}' {list(shape)}" in said
    assert "of the checkpoint: config.json asks for [" in said


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("mistral", "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("mistral", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("llama", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_tensors_whose_sizes_only_add_up_are_refused(
    name: str, first: str, second: str, checkpoint: Checkpoint
) -> None:
    def shifted(tensors: Tensors) -> Tensors:
        moved = tensors[second][:4]
        taller, shorter = torch.cat([tensors[first], moved]), tensors[second][4:].clone()
        return tensors | {first: taller, second: shorter}

    assert f"'{first}'" in refused(checkpoint(name, shifted))


def test_a_huge_configuration_is_refused_before_it_takes_memory(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", intermediate_size=2**24, vocab_size=2**24)
    assert f"'model.embed_tokens.weight' [97, 64] of the checkpoint: config.json asks for [{2**24}, 64]" in refused(
        folder
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 4096}, "config.json asks for 4096 layers, and the checkpoint has 21 tensors in all"),
        (
            {"hidden_size": 2**24, "num_attention_heads": 2**22, "head_dim": 2**24},
            "config.json asks for tensors that no machine holds",
        ),
    ],
    ids=["layers", "sizes"],
)
def test_a_model_beyond_all_machines_is_refused(fields: dict[str, int], said: str, checkpoint: Checkpoint) -> None:
    assert said in refused(checkpoint("llama", **fields))


def test_a_file_in_place_of_the_folder(checkpoint: Checkpoint) -> None:
    file = checkpoint("llama") / "model.safetensors"
    assert refused(file) == f"{file / 'config.json'} does not exist"


def test_an_unknown_model_is_told_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "xyzzy"}', encoding="utf-8")
    with pytest.raises(Faults) as caught:
        load_hf(tmp_path)
    assert caught.value.faults[0].cure == "known: " + ", ".join(hf.families())


def test_whole_numbers_are_no_weights(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", lambda tensors: tensors | {Q: tensors[Q].to(torch.int8)})
    assert refused(folder) == f"model.safetensors: '{Q}' is of I8, and not of floats"


def test_what_is_tied_must_be_the_same(checkpoint: Checkpoint) -> None:
    folder = checkpoint("gpt2", lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1})
    assert "'lm_head.weight' differs from 'transformer.wte.weight'" in refused(folder)


def test_what_is_computed_must_be_the_same(checkpoint: Checkpoint) -> None:
    def wrong(tensors: Tensors) -> Tensors:
        return {name: x.flip(0) if "embed_positions" in name else x for name, x in with_sinusoids(tensors).items()}

    said = "'model.decoder.embed_positions.weight' of the checkpoint is not what this family computes there"
    assert said in refused(checkpoint("marian", wrong))


@pytest.mark.parametrize(
    ("stored", "loaded_as"), [("F16", torch.float32), ("F16", torch.bfloat16), ("BF16", torch.float32)]
)
def test_numbers_are_widened_and_never_changed(stored: str, loaded_as: torch.dtype, checkpoint: Checkpoint) -> None:
    kept = torch.bfloat16 if stored == "BF16" else torch.float16
    folder = checkpoint("llama", lambda tensors: {name: x.to(kept) for name, x in tensors.items()})
    model = load_hf(folder, loaded_as)
    assert {x.dtype for x in model.parameters()} == {loaded_as}
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(loaded_as)
    assert torch.equal(model.embedding.tokens.weight, expected)


def test_only_floats_are_a_model_s_numbers() -> None:
    with pytest.raises(ValueError, match=r"floats, not torch\.int8"):
        load_hf(DATA / "llama", torch.int8)


def test_loading_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    load_hf(DATA / "gpt2")
    assert torch.equal(torch.get_rng_state(), before)


# --- Writing ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "mistral", "deepseek_v3", "bloom"])
def test_each_token_written_is_the_likeliest(name: str) -> None:
    model, prompt = loaded(name), arrays(name)["input_ids"][:, :4]
    expected = prompt
    for _ in range(6):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(ablate.generate(model, prompt, 6), expected)
    assert torch.equal(generate(model, prompt, 0), prompt)


@torch.no_grad()
@pytest.mark.parametrize(("name", "start"), [("t5", 0), ("bart", 2), ("marian", 96)])
def test_an_encoder_decoder_writes_from_its_start(name: str, start: int) -> None:
    model, source = loaded(name), arrays(name)["padded_input_ids"]
    mask = arrays(name)["padded_attention_mask"]
    expected = torch.full((len(source), 1), start)
    for _ in range(5):
        step = model(source, expected, attention_mask=mask)[:, -1:].argmax(-1)
        expected = torch.cat([expected, step], dim=1)
    assert torch.equal(generate(model, source, 5, attention_mask=mask), expected)
    again = generate(model, source, 3, attention_mask=mask, decoder_input_ids=expected[:, :3])
    assert torch.equal(again, expected)


def test_padding_before_a_prompt_changes_nothing_that_is_written() -> None:
    prompt = arrays("llama")["input_ids"][:1, :6]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    found = generate(loaded("llama"), padded, 5, attention_mask=mask)
    assert torch.equal(found[:, 3:], generate(loaded("llama"), prompt, 5))


def test_a_model_in_training_writes_as_in_evaluation_and_goes_on_training() -> None:
    prompt = arrays("gpt2")["input_ids"][:, :4]
    model = ablate.build({"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 16, "dropout": 0.5}).train()
    assert torch.equal(generate(model, prompt, 4), generate(model, prompt, 4))
    assert model.training


def test_what_cannot_write_says_so() -> None:
    ids = arrays("bert")["input_ids"]
    with pytest.raises(ValueError, match="tokens see later ones"):
        generate(loaded("bert"), ids, 3)
    with pytest.raises(ValueError, match="-1 tokens cannot follow 17"):
        generate(loaded("llama"), ids, -1)
    with pytest.raises(ValueError, match="1 tokens cannot follow 0"):
        generate(loaded("llama"), ids[:, :0], 1)
    model = ablate.build({"family": "encoder_decoder", "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 16})
    with pytest.raises(ValueError, match="goes on from decoder_input_ids, which are not given"):
        generate(model, ids, 1)


def test_padding_is_refused_where_positions_would_count_it() -> None:
    model, ids = loaded("gpt2"), torch.ones(1, 5, dtype=torch.long)
    whole, padded = torch.ones(1, 5, dtype=torch.long), torch.tensor([[0, 1, 1, 1, 1]])
    assert torch.equal(generate(model, ids, 3, attention_mask=whole), generate(model, ids, 3))
    with pytest.raises(ValueError, match="positions count padding"):
        generate(model, ids, 3, attention_mask=padded)

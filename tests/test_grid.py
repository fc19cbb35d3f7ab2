"""Changes over trees, axes and their combinations, names."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate import catalogue, grid
from ablate.choice import Faults, SettingsError
from ablate.settings import resolved, typed

FILE: dict[str, Any] = {"baseline": {"d_model": 32}, "train": {"steps": 1}}


def base(**baseline: Any) -> grid.Tree:
    return grid.baseline_tree({**FILE, "baseline": baseline})


def fault(changes: dict[str, Any]) -> SettingsError:
    with pytest.raises(Faults) as caught:
        grid.overlay(base(), changes)
    (found,) = caught.value.faults
    return found


def test_a_baseline_without_anything_is_complete() -> None:
    assert typed(grid.baseline_tree({"train": {"steps": 1}})).model.d_model > 0


def test_the_baseline_overrides_its_preset_wherever_the_preset_stands() -> None:
    for baseline in ({"preset": "gpt2-124m", "n_layers": 3}, {"n_layers": 3, "preset": "gpt2-124m"}):
        model = base(**baseline)["model"]
        assert (model["n_layers"], model["d_model"], model["vocab_size"]) == (3, 768, 50257)
        assert model["norm"]["name"] == "layer_norm", "a preset may start from another one"


@pytest.mark.parametrize("name", catalogue.names(catalogue.PRESETS))
def test_every_preset_is_a_model(name: str) -> None:
    assert typed(base(preset=name)).model.n_layers > 0


def test_the_same_choice_merges_deep_and_another_one_replaces() -> None:
    tree = base(attention={"name": "gqa", "n_kv_heads": 2, "bias": True})
    merged = grid.overlay(tree, {"attention": {"name": "gqa", "n_kv_heads": 4}})
    assert merged["model"]["attention"] == {"name": "gqa", "n_kv_heads": 4, "bias": True}
    assert grid.overlay(tree, {"attention": "gqa"}) == tree
    assert grid.overlay(tree, {"attention": {"bias": False}})["model"]["attention"]["n_kv_heads"] == 2
    assert grid.overlay(tree, {"attention": "mha"})["model"]["attention"] == {"name": "mha"}
    assert grid.overlay(tree, {"attention.n_kv_heads": 1})["model"]["attention"]["bias"] is True
    assert tree["model"]["attention"]["n_kv_heads"] == 2, "the tree itself stays as it was"


def test_a_whole_slot_comes_before_its_settings_whatever_is_written_first() -> None:
    for keys in itertools.permutations(["attention.n_kv_heads", "attention", "preset"]):
        values = {"attention.n_kv_heads": 1, "attention": "gqa", "preset": "gpt2"}
        model = grid.overlay(base(), {key: values[key] for key in keys})["model"]
        assert model["attention"] == {"name": "gqa", "n_kv_heads": 1}
        assert model["position"] == {"name": "learned"}


@pytest.mark.parametrize("change", [{"dropout.attention": 0.0}, {"dropout": {"attention": 0.0}}])
def test_one_dropout_changes_and_the_others_stay(change: dict[str, Any]) -> None:
    dropout = typed(grid.overlay(base(dropout=0.1), change)).model.dropout
    assert (dropout.embedding, dropout.attention, dropout.residual) == (0.1, 0.0, 0.1)
    assert typed(grid.overlay(base(dropout={"attention": 0.5}), {"dropout": 0.2})).model.dropout.embedding == 0.2


@pytest.mark.parametrize("change", [{"train.optimizer.momentum": 0.5}, {"train": {"optimizer": {"momentum": 0.5}}}])
def test_a_setting_of_the_optimizer_changes_and_its_name_stays(change: dict[str, Any]) -> None:
    tree = grid.baseline_tree({"train": {"steps": 1, "optimizer": "sgd"}})
    optimizer = typed(grid.overlay(tree, change)).train.optimizer
    assert (optimizer.name, optimizer.momentum) == ("sgd", 0.5)


def test_sections_are_reached_by_path_and_by_mapping() -> None:
    for change in ({"train.lr": 0.5}, {"train": {"lr": 0.5}}):
        tree = grid.overlay(base(), change)
        assert (tree["train"]["lr"], tree["train"]["steps"]) == (0.5, 1)
    assert grid.overlay(base(), {"data": "cycle"})["data"] == {"name": "cycle"}
    assert grid.overlay(base(), {"data.path": "x"})["data"] == {"name": "text", "path": "x"}


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("d_modl", "did you mean 'd_model'?"),
        ("trian.lr", "did you mean 'train'?"),
        ("presets", "did you mean 'preset'?"),
        ("lr", "write train.lr"),
        ("warmup_steps", "write train.warmup_steps"),
        ("n_kv_heads", "write attention.n_kv_heads"),
        ("d_ff", "write feed_forward.d_ff"),
        ("softcap", "write attention.softcap or head.softcap"),
        ("residual", "write dropout.residual"),
        ("n_kv_groups", "write n_kv_heads, the number of key/value heads"),
    ],
)
def test_an_unknown_setting_is_told_with_the_right_one(word: str, cure: str) -> None:
    found = fault({word: 1})
    assert found.path == (word,)
    assert found.message == f"unknown setting '{word.partition('.')[0]}'"
    assert cure in found.cure


@pytest.mark.parametrize("preset", ["llama7b", 3, None, ["llama"]])
def test_an_unknown_preset_is_told(preset: object) -> None:
    found = fault({"preset": preset})
    assert found.path == ("preset",)
    assert "unknown preset" in found.message


# --- Where a model starts ---------------------------------------------------------------------------------------------


def test_another_preset_takes_the_whole_models_place_but_for_its_sizes() -> None:
    tree = base(preset="gemma-2", d_model=48, n_heads=6, dropout=0.3, layers=[{"first": 1, "norm": "layer_norm"}])
    assert grid.overlay(tree, {"preset": "llama"})["model"] == base(preset="llama", d_model=48, n_heads=6)["model"]


def test_a_scale_comes_after_its_preset_and_before_everything_else() -> None:
    for keys in itertools.permutations(["preset", "scale", "n_layers"]):
        values = {"preset": "llama-7b", "scale": "tiny", "n_layers": 5}
        model = base(**{key: values[key] for key in keys})["model"]
        assert (model["d_model"], model["n_layers"], model["feed_forward"]["d_ff"]) == (64, 5, 176)
        assert "vocab_size" not in model, "the tokenizer's"


def test_a_variants_scale_is_that_of_the_baselines_preset() -> None:
    tree = grid.overlay(base(preset="mistral-7b-v0.1", n_layers=5, dropout=0.1), {"scale": "tiny"})
    assert tree["model"]["attention"] == {"name": "gqa", "window": 32, "n_kv_heads": 2}
    assert (tree["model"]["n_layers"], tree["model"]["dropout"]["residual"]) == (2, 0.1)


def test_a_variants_preset_is_as_small_as_the_baselines() -> None:
    tree = grid.overlay(base(preset="llama-7b", scale="tiny"), {"preset": "mistral-7b-v0.1"})
    assert tree["model"] == base(preset="mistral-7b-v0.1", scale="tiny")["model"]


def test_a_scale_leaves_another_choice_than_its_presets_as_it_is() -> None:
    tree = grid.overlay(base(preset="mistral-7b-v0.1", attention="mla"), {"scale": "tiny"})
    assert tree["model"]["attention"] == {"name": "mla"}
    assert tree["model"]["feed_forward"]["d_ff"] == 224


PUBLISHED = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
}


def test_a_folder_stands_in_place_of_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found from where one stands; the tree that comes of it says nothing of the folder."""
    monkeypatch.chdir(tmp_path)
    Path("published").mkdir()
    Path("published/config.json").write_text(json.dumps(PUBLISHED), encoding="utf-8")
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "vocab_size": 500}
    found = base(hf="published", n_layers=2)
    assert "published" not in str(found)
    same = base(preset="llama", feed_forward={"d_ff": 96}, **sizes)
    assert resolved(typed(found)).model == resolved(typed(same)).model
    assert fault({"hf": "elsewhere"}).path == ("hf",)
    with_scale = grid.overlay(base(preset="gemma-2", scale="tiny"), {"hf": "published"})
    assert with_scale == base(hf="published"), "of the preset before nothing stays"


@pytest.mark.parametrize(
    ("changes", "key", "message", "cure"),
    [
        ({"preset": "llama", "scale": "tny"}, "scale", "unknown scale of preset llama 'tny'", "known: tiny"),
        ({"preset": "llama", "scale": ["tiny"]}, "scale", "unknown scale of preset llama", "known: tiny"),
        ({"scale": "tiny"}, "scale", "a scale is that of a preset, and there is none", "give a preset beside it"),
        ({"hf": "x", "preset": "llama"}, "hf", "'hf' stands in place of 'preset' and 'scale'", "take one of them out"),
        ({"hf": "x", "scale": "tiny"}, "hf", "'hf' stands in place of 'preset' and 'scale'", "take one of them out"),
        ({"hf": 3}, "hf", "the path of a folder is needed, not 3", "write it in quotes"),
    ],
)
def test_a_model_that_can_start_nowhere_is_told(changes: dict[str, Any], key: str, message: str, cure: str) -> None:
    found = fault(changes)
    assert found.path == (key,)
    assert message in found.message
    assert cure in found.cure


# --- Inside an encoder ------------------------------------------------------------------------------------------------


def encoder(*changes: dict[str, Any]) -> Any:
    tree = base(preset="t5", scale="tiny")
    for change in changes:
        tree = grid.overlay(tree, change)
    return typed(tree).model.encoder


def test_what_differs_in_the_encoder_is_reached_by_path() -> None:
    assert encoder({"encoder.n_layers": 3}, {"encoder": {"n_heads": 2}}).n_layers == 3
    found = encoder({"encoder.attention": {"name": "gqa", "n_kv_heads": 2}}, {"encoder.attention.bias": True})
    assert (found.attention.name, found.attention.n_kv_heads, found.attention.bias) == ("gqa", 2, True)
    assert (
        encoder({"encoder.attention": {"name": "gqa", "n_kv_heads": 2}}, {"encoder.attention": "mqa"}).attention.name
        == "mqa"
    )
    assert encoder({"encoder.attention.window": 8}).attention.name == "mha", "of the model's own choice"
    assert encoder({"encoder.attention.window": 8}).attention.scale == "none"


def test_groups_and_cross_attention_are_reached_by_path() -> None:
    tree = grid.overlay(base(preset="t5"), {"cross_attention": "gqa", "head.softcap": 5})
    tree = grid.overlay(tree, {"cross_attention.n_kv_heads": 2, "head.bias": True})
    model = typed(tree).model
    assert model.cross_attention is not None
    assert model.cross_attention.settings()["n_kv_heads"] == 2
    assert (model.head.softcap, model.head.bias, model.head.scale) == (5, True, True)


@pytest.mark.parametrize("path", ["encoder.attention.n_kv_heads", "cross_attention.n_kv_heads"])
def test_a_setting_of_an_inner_choice_means_nothing_where_that_choice_lacks_it(path: str) -> None:
    place = path.rpartition(".")[0]
    tree, meant = grid.applicable(base(preset="t5"), {path: 2})
    assert meant == {}, "the model's own choice is multi-head attention"
    tree, meant = grid.applicable(base(preset="t5"), {path: 2, place: "gqa"})
    assert meant == {path: 2, place: "gqa"}
    assert grid.get(tree, ("model", *path.split("."))) == 2
    (told,) = grid.homeless([path], [base(preset="t5")])
    assert told.message == f"unknown setting of {place.rpartition('.')[2]} mha 'n_kv_heads'"
    assert told.cure == "only gqa would know it"


@pytest.mark.parametrize(
    ("path", "listed"),
    [
        ("layers.0.norm", "layers"),
        ("encoder.layers.0", "encoder.layers"),
        ("train.optimizer.betas.0", "train.optimizer.betas"),
    ],
)
def test_a_path_into_a_list_is_told(path: str, listed: str) -> None:
    assert fault({path: 1}).cure == f"give all of {listed}"


# --- Combinations -----------------------------------------------------------------------------------------------------


SIZES = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 4), max_size=4)


@given(SIZES, st.sampled_from(["product", "one_at_a_time"]))
def test_the_count_is_that_of_the_combinations(sizes: dict[str, int], design: str) -> None:
    axes = grid.Axes({name: [f"{name}{i}" for i in range(size)] for name, size in sizes.items()}, design)
    found = list(axes.combinations())
    assert len(found) == axes.count()
    assert len({tuple(sorted(each.items())) for each in found}) == len(found)
    assert all(len(each) == (len(sizes) if design == "product" else 1) for each in found)


def test_combinations_come_one_by_one() -> None:
    axes = grid.Axes({f"x{i}": list(range(10)) for i in range(12)}, "product")
    assert axes.count() == 10**12
    assert next(iter(axes.combinations())) == {f"x{i}": 0 for i in range(12)}


def test_what_the_choice_does_not_have_means_nothing() -> None:
    combination = {"feed_forward.n_experts": 4, "feed_forward": "gelu", "train.lr": 0.5}
    tree, meant = grid.applicable(base(), combination)
    assert meant == {"feed_forward": "gelu", "train.lr": 0.5}
    assert tree["model"]["feed_forward"] == {"name": "gelu"}
    tree, meant = grid.applicable(base(), {**combination, "feed_forward": "moe"})
    assert tree["model"]["feed_forward"] == {"name": "moe", "n_experts": 4}
    assert list(meant) == ["feed_forward.n_experts", "feed_forward", "train.lr"], "in the order of the file"


@pytest.mark.parametrize(
    ("combination", "name"),
    [
        ({"block": "post_norm", "train.warmup_steps": 0}, "block=post_norm,train.warmup_steps=0"),
        ({"attention": {"name": "gqa", "n_kv_heads": 2}}, "attention=gqa(n_kv_heads=2)"),
        ({"tie_embeddings": True, "train.grad_clip": None}, "tie_embeddings=true,train.grad_clip=null"),
        ({"train.lr": 0.001, "train.tokens": "2M"}, "train.lr=0.001,train.tokens=2M"),
        ({"layers": [{"every": 2, "norm": "rms_norm"}]}, "layers=[(every=2,norm=rms_norm)]"),
        ({}, ""),
    ],
)
def test_a_combination_is_named_by_what_it_says(combination: dict[str, Any], name: str) -> None:
    assert grid.label(combination) == name


@pytest.mark.parametrize(
    ("combinations", "varied"),
    [
        ([], set()),
        ([{"n_layers": 1, "train.lr": 0.1}], set()),
        ([{"n_layers": 1, "train.lr": 0.1}, {"n_layers": 2, "train.lr": 0.1}], {"n_layers"}),
        ([{"n_layers": 1}, {"n_layers": 1, "train.grad_clip": None}], {"train.grad_clip"}),
        ([{"n_layers": 1}, {}], {"n_layers"}),
    ],
)
def test_what_varies_between_combinations(combinations: list[dict[str, Any]], varied: set[str]) -> None:
    assert grid.varied(combinations) == varied


@pytest.mark.parametrize(
    ("path", "keys", "place"),
    [
        (("attention",), ["attention", "attention.n_kv_heads"], ("attention",)),
        (("attention", "n_kv_heads"), ["attention", "attention.n_kv_heads"], ("attention.n_kv_heads",)),
        (("attention", "bias"), ["attention"], ("attention", "bias")),
        (("attention",), ["attention.bias"], ("attention.bias",)),
        (("train", "lr"), ["train.lr"], ("train.lr",)),
        (("train", "optimizer", "eps"), ["train"], ("train", "optimizer", "eps")),
        (("train", "lr"), ["train.steps", "attention"], ()),
        (("attention.n_kv_heads",), ["attention", "attention.n_kv_heads"], ("attention.n_kv_heads",)),
        (("trian.lr",), ["trian.lr"], ("trian.lr",)),
        (("data",), [], ()),
        ((), ["attention"], ()),
    ],
)
def test_the_key_that_says_something(path: tuple[str, ...], keys: list[str], place: tuple[str, ...]) -> None:
    assert grid.key_of(path, keys) == place

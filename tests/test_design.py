"""How axes combine: what a fraction runs and refuses, and what is told of every combination."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Expand, Refused, Write

from ablate.cli import main
from ablate.experiment import Experiment
from ablate.plan import document, plan

FOUR = "vary: {block: [pre_norm, post_norm], n_layers: [1, 2], train.lr: [1e-3, 3e-3], norm: [rms_norm, layer_norm]}"
NAMES = [
    "baseline",
    "train.lr=0.003,norm=layer_norm",
    "n_layers=2,norm=layer_norm",
    "n_layers=2,train.lr=0.003",
    "block=post_norm,norm=layer_norm",
    "block=post_norm,train.lr=0.003",
    "block=post_norm,n_layers=2",
    "block=post_norm,n_layers=2,train.lr=0.003,norm=layer_norm",
]


def facts(found: Experiment) -> dict[str, Any]:
    told = found.design_facts()
    assert told is not None
    return told


def cells(found: Experiment) -> dict[tuple[int | None, ...], str | None]:
    """By its levels, the variant at each combination, or why there is none."""
    return {tuple(each["levels"]): each["variant"] or each["missing"] for each in facts(found)["cells"]}


@pytest.mark.parametrize("written", ["{fractional: 4}", "{fractional: resolution 4}", "{fractional: 3}"])
def test_a_fraction_runs_half_of_all(written: str, expand: Expand) -> None:
    found = expand(f"{FOUR}\ndesign: {written}")
    assert [variant.name for variant in found.variants] == NAMES
    assert (found.counts["raw"], found.counts["planned"]) == (8, 8)
    told = facts(found)
    assert (told["combine"], told["resolution"], told["runs"], told["of"]) == ("fractional", 4, 8, 16)
    assert told["generators"] == ["D = ABC"]
    assert cells(found)[0, 1, 0, 1] == "n_layers=2,norm=layer_norm"
    together = [group for group in told["aliases"] if len(group) > 1]
    assert [[each["axes"] for each in group] for group in together] == [
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 3], [1, 2]],
    ]


def test_the_command_line_asks_for_another_fraction(expand: Expand) -> None:
    assert len(expand(f"{FOUR}\ndesign: product", "design.fractional=4").variants) == 8
    assert len(expand(f"{FOUR}\ndesign: {{fractional: 4}}", "design=product").variants) == 16


def test_a_fraction_changes_no_identity(expand: Expand) -> None:
    whole = {each.trial_id for each in expand(FOUR).trials("cpu", 1)}
    part = {each.trial_id for each in expand(f"{FOUR}\ndesign: {{fractional: 4}}").trials("cpu", 1)}
    assert part < whole


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            "design: {fractional: 5}",
            "6:10: no fraction of 4 axes has resolution 5\n  the highest is 4; design: product keeps all effects apart",
        ),
        ("design: {fractional: 2}", "6:10: 'design.fractional': a resolution is a whole number from 3 on (it is 2)"),
        ("design: {fractional: true}", "6:10: 'design.fractional': a resolution is a whole number from 3 on"),
        ("design: {fractional: 4.5}", "6:10: 'design.fractional': a resolution is a whole number from 3 on"),
        ("design: {fractional: '4'}", "6:10: 'design.fractional': a resolution is a whole number from 3 on"),
        ("design: {fractional: resolution IV}", "6:10: 'design.fractional': a resolution is a whole number"),
        ("design: {fractional: }", "6:10: 'design.fractional': a resolution is a whole number from 3 on (it is None)"),
        ("design: {fractonal: 4}", "6:10: unknown setting 'fractonal'\n  did you mean 'fractional'?"),
        ("design: fractional", "6:1: 'design': must be 'product' or 'one_at_a_time', or {fractional: a resolution}"),
        ("design: {}", "6:1: 'design': must be 'product' or 'one_at_a_time', or {fractional: a resolution}"),
        ("design: [product]", "6:1: 'design': text is needed, or settings are needed here"),
        (
            "exclude: [{block: post_norm, n_layers: 2}]\ndesign: {fractional: 4}",
            "6:1: a run of the fraction is excluded (block=post_norm, n_layers=2, train.lr=0.001, norm=rms_norm), "
            "and without it no effect can be told\n  take the rule out, or write design: product",
        ),
    ],
)
def test_what_is_no_fraction_of_four_axes(added: str, said: str, refused: Refused) -> None:
    assert refused(f"{FOUR}\n{added}").startswith(f"tiny.yaml:{said}")


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            "n_layers: [1, 2, 3], block: [pre_norm, post_norm], train.lr: [1, 2]",
            "5:8: a fraction has axes of two values each, and 'n_layers' has 3\n  give it two, or write",
        ),
        (
            "n_layers: [1, 2], train.lr: [1]",
            "5:26: a fraction has axes of two values each, and 'train.lr' has 1",
        ),
        (
            "n_layers: [1, 2], train.lr: [1, 2]",
            "6:10: there are fractions of 3 to 12 axes, not of 2\n  write design: product",
        ),
        (
            "feed_forward: [gelu, moe], feed_forward.n_experts: [4, 8], n_layers: [1, 2]",
            "5:35: 'feed_forward.n_experts' makes no difference in a run of the fraction "
            "(feed_forward=gelu, n_layers=1)\n  write design: product, or vary what every run has",
        ),
        (
            "train.schedule: [constant, cosine], train.final_lr: [0, 0.1], n_layers: [1, 2]",
            "5:44: 'train.final_lr' makes no difference in a run of the fraction",
        ),
        (
            "train.lr: [1e-3, 0.001], block: [pre_norm, post_norm], n_layers: [1, 2]",
            "5:8: a fraction has axes of two values each, and 'train.lr' has one twice (0.001)\n  give two that differ",
        ),
        (
            "train.lr: [1, 2, 1], block: [pre_norm, post_norm], n_layers: [1, 2]",
            "5:8: a fraction has axes of two values each, and 'train.lr' has one twice (1)",
        ),
        (
            "n_layerz: [1, 2, 3], block: [pre_norm, post_norm], n_heads: [2, 4]",
            "5:8: unknown setting 'n_layerz'\n  did you mean 'n_layers'?",
        ),
        (
            "block: [pre_norm, post_norm], train.lrr: [1, 2]",
            "5:50: unknown setting 'lrr'\n  did you mean 'lr'?",
        ),
        (
            "block: [pre_norm, post_nrom], n_layers: [1, 2]",
            "5:26: unknown block 'post_nrom'",
        ),
        (
            "attention.n_kv_headz: [1, 2, 4], block: [pre_norm, post_norm], n_layers: [1, 2]",
            "5:8: unknown setting of attention",
        ),
    ],
)
def test_axes_that_have_no_fraction(axes: str, said: str, refused: Refused) -> None:
    assert refused(f"vary: {{{axes}}}\ndesign: {{fractional: 3}}").startswith(f"tiny.yaml:{said}")


def test_a_run_that_cannot_work_is_invalid_and_the_rest_is_planned(expand: Expand) -> None:
    found = expand("vary: {n_heads: [4, 5], d_model: [32, 40], block: [pre_norm, post_norm]}\ndesign: {fractional: 3}")
    assert found.counts["invalid"] == 1
    assert cells(found)[1, 0, 1] == "invalid"


def test_every_combination_has_its_variant_or_says_why_not(expand: Expand) -> None:
    found = expand(
        "vary: {feed_forward: [swiglu, moe], feed_forward.n_experts: [4, 8], n_heads: [3, 4]}\n"
        "exclude: [{feed_forward: moe, feed_forward.n_experts: 8, n_heads: 4}]\n"
    )
    told = facts(found)
    assert [(each["path"], each["levels"], each["reference"]) for each in told["axes"]] == [
        ("feed_forward", ["swiglu", "moe"], 0),
        ("feed_forward.n_experts", ["4", "8"], 0),
        ("n_heads", ["3", "4"], 1),
    ]
    assert cells(found) == {
        (0, 0, 0): "invalid",
        (0, 0, 1): "baseline",
        (0, 1, 0): "invalid",
        (0, 1, 1): "baseline",
        (1, 0, 0): "invalid",
        (1, 0, 1): "feed_forward=moe,feed_forward.n_experts=4",
        (1, 1, 0): "invalid",
        (1, 1, 1): "excluded",
    }
    assert [each["idle"] for each in told["cells"]] == [[1], [1], [1], [1], [], [], [], []]


def test_one_at_a_time_leaves_the_others_at_the_baseline(expand: Expand) -> None:
    found = expand("vary: {block: [pre_norm, post_norm], n_layers: [2]}\ndesign: one_at_a_time")
    assert cells(found) == {(0, None): "baseline", (1, None): "block=post_norm", (None, 0): "n_layers=2"}
    assert found.design is not None
    assert found.design.combine == "one_at_a_time"


def test_a_variant_that_turns_out_not_to_work_is_missing_in_its_place(expand: Expand) -> None:
    found = expand("vary: {block: [pre_norm, post_norm], n_layers: [1, 2]}").without({"block=post_norm": "broken"})
    assert cells(found)[1, 0] == "invalid"
    assert cells(found)[1, 1] == "block=post_norm,n_layers=2"


def test_where_nothing_varies_there_is_no_design(expand: Expand) -> None:
    assert expand("variants: {x: {n_layers: 2}}").design_facts() is None


def test_the_design_is_stored_and_printed(expand: Expand, write: Write) -> None:
    found = expand(f"{FOUR}\ndesign: {{fractional: 4}}")
    stored = document(found, plan(found, timed=False), {"device": "cpu", "threads": 1}, "")
    assert json.loads(json.dumps(stored["design"])) == facts(found)
    printed = CliRunner().invoke(main, ["plan", str(write(f"{FOUR}\ndesign: {{fractional: 4}}"))]).output
    assert "fractional: 8 of 16 runs, resolution 4" in printed
    assert "A block, B n_layers, C train.lr, D norm; D = ABC" in printed
    assert "not told apart: AB + CD; AC + BD; AD + BC" in printed

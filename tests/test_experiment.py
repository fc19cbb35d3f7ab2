"""The experiment file, as DESIGN.md says: what it means, what is counted, what is refused and where."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from conftest import TINY, Expand, Refused, Write
from hypothesis import given
from hypothesis import strategies as st

from ablate import registry
from ablate.building import model_settings
from ablate.document import FileFaults
from ablate.experiment import Experiment
from ablate.settings import resolved, typed
from ablate.variant import Trial

SAMPLE = """\
name: attention
question: Which attention keeps MHA's loss at the smallest KV cache?

baseline:
  preset: llama                  # optional; the rest overrides it
  d_model: 256
  n_layers: 6
  n_heads: 8
  max_seq_len: 1024
  attention: mha

variants:                        # named changes to the baseline
  mqa: {attention: {name: gqa, n_kv_heads: 1}}
  gqa: {attention: {name: gqa, n_kv_heads: 2}}
  mla: {attention: {name: mla, kv_lora_rank: 64, qk_rope_head_dim: 16}}

vary:                            # axes; dotted paths reach any setting of the file
  block: [pre_norm, post_norm]
  train.warmup_steps: [0, 100]
design: product                  # or one_at_a_time (the classic ablation)
exclude:
  - {block: post_norm, train.warmup_steps: 0}

seeds: [0, 1, 2]                 # or a count

data: {name: text, tokenizer: bytes}
train: {tokens: 2M, seq_len: 256, batch_tokens: 8192, lr: 1e-3, schedule: cosine, warmup_steps: 100, precision: fp32}
profile: {prefill: {batch: [1], tokens: [512]}, decode: {batch: [1, 8], context: [512], new_tokens: 64}}
"""


def names(experiment: Experiment) -> list[str]:
    return [variant.name for variant in experiment.variants]


def counts(experiment: Experiment) -> tuple[int, ...]:
    return tuple(experiment.counts[word] for word in ("raw", "excluded", "invalid", "merged", "planned"))


def changes(experiment: Experiment, name: str) -> dict[str, Any]:
    return next(variant.changes for variant in experiment.variants if variant.name == name)


def test_the_sample_of_the_design(tmp_path: Path) -> None:
    file = tmp_path / "sample.yaml"
    file.write_text(SAMPLE, encoding="utf-8")
    found = Experiment.from_file(file)
    assert found.name == "attention"
    assert found.question == "Which attention keeps MHA's loss at the smallest KV cache?"
    assert counts(found) == (7, 1, 0, 0, 6)
    assert found.counts["trials"] == 18
    assert names(found) == ["baseline", "mqa", "gqa", "mla", "train.warmup_steps=0", "block=post_norm"]
    assert changes(found, "baseline") == {}
    assert changes(found, "gqa") == {"attention": "gqa", "attention.n_kv_heads": 2}
    assert changes(found, "block=post_norm") == {"block": "post_norm"}
    recipe = found.baseline.settings.train
    assert (recipe.n_steps, recipe.lr, recipe.warmup_steps, recipe.seq_len) == (245, 1e-3, 100, 256)
    assert found.baseline.settings.model.vocab_size == 256
    assert [variant.groups for variant in found.variants][1:3] == [["attention"], ["attention"]]


# --- Combinations and counts ------------------------------------------------------------------------------------------

FEED = "vary: {feed_forward: [swiglu, moe], feed_forward.n_experts: [4, 8]}"


@pytest.mark.parametrize(
    ("added", "expected", "named"),
    [
        ("", (1, 0, 0, 0, 1), []),
        ("vary: {block: [pre_norm, post_norm]}", (2, 0, 0, 0, 2), ["block=post_norm"]),
        ("vary: {block: [post_norm]}", (2, 0, 0, 0, 2), ["block=post_norm"]),
        ("vary: {block: [post_norm, post_norm, pre_norm]}", (3, 0, 0, 1, 2), ["block=post_norm"]),
        ("vary: {train.lr: [1, 1.0, 1e0]}", (4, 0, 0, 2, 2), ["train.lr=1"]),
        ("vary: {train.lr: [0.001, 1e-3]}", (2, 0, 0, 1, 1), []),
        ("variants: {a: {n_layers: 2}, b: {n_layers: 2}}", (3, 0, 0, 1, 2), ["a"]),
        ("variants: {same: {n_layers: 1}}", (1, 0, 0, 0, 1), []),
        ("variants: {a: {block: post_norm}}\nvary: {block: [pre_norm, post_norm]}", (3, 0, 0, 1, 2), ["a"]),
        (FEED, (4, 0, 0, 1, 3), [f"feed_forward=moe,feed_forward.n_experts={n}" for n in (4, 8)]),
        (f"{FEED}\ndesign: one_at_a_time", (4, 0, 0, 2, 2), ["feed_forward=moe"]),
        (
            "vary: {block: [pre_norm, post_norm], n_layers: [1, 2]}\ndesign: one_at_a_time",
            (4, 0, 0, 1, 3),
            ["block=post_norm", "n_layers=2"],
        ),
        (
            "vary: {n_heads: [4, 3], n_layers: [1, 2]}",
            (4, 0, 2, 0, 2),
            ["n_layers=2"],
        ),
        (
            "vary: {n_heads: [4, 3], n_layers: [1, 2]}\nexclude: [{n_heads: 3, n_layers: 2}]",
            (4, 1, 1, 0, 2),
            ["n_layers=2"],
        ),
        ("vary: {preset: [llama, gpt2], block: [pre_norm]}", (2, 0, 0, 0, 2), ["preset=gpt2"]),
        (
            "vary: {preset: [llama, mixtral], feed_forward.n_experts: [4, 6]}",
            (4, 0, 0, 1, 3),
            [f"preset=mixtral,feed_forward.n_experts={n}" for n in (4, 6)],
        ),
        ("vary: {data: [cycle, random_tokens], data.period: [16]}", (2, 0, 0, 0, 2), ["data=random_tokens"]),
        ("vary: {dropout: [0, 0.1], block: [pre_norm]}", (2, 0, 0, 0, 2), ["dropout=0.1"]),
        (
            "vary: {attention: [mha, {name: gqa, n_kv_heads: 2}, gqa]}",
            (3, 0, 0, 0, 3),
            ["attention=gqa(n_kv_heads=2)", "attention=gqa"],
        ),
        ("vary: {attention: [{name: gqa, n_kv_heads: 1}, gqa]}", (3, 0, 0, 1, 2), ["attention=gqa(n_kv_heads=1)"]),
        (
            "vary: {layers: [[], [{every: 1, norm: layer_norm}]]}",
            (2, 0, 0, 0, 2),
            ["layers=[(every=1,norm=layer_norm)]"],
        ),
    ],
)
def test_counts_and_names(added: str, expected: tuple[int, ...], named: list[str], expand: Expand) -> None:
    found = expand(added)
    assert counts(found) == expected
    assert names(found) == ["baseline", *named]
    raw, excluded, invalid, merged, planned = expected
    assert raw - excluded - invalid - merged == planned
    assert found.counts["trials"] == planned


NORMED = "attention.qk_norm: [none, head], attention.qk_norm_eps: [1e-6, 1e-3]"
FAMILIES = "family: [decoder, encoder_decoder], encoder.n_layers: [1, 2]"
BALANCE = "feed_forward.balance: [loss, bias], feed_forward.balance_rate: [1e-3, 0.1]"
GROUPS = "feed_forward.n_expert_groups: [1, 4], feed_forward.top_groups: [1, 2], feed_forward.group_score: [max, top2]"
SCHEDULES = "train.schedule: [constant, cosine], train.final_lr: [0, 1e-4]"
MOE = "feed_forward=moe"


@pytest.mark.parametrize(
    ("axes", "sets", "expected", "named"),
    [
        (
            NORMED,
            [],
            (4, 0, 0, 1, 3),
            [f"attention.qk_norm=head,attention.qk_norm_eps={eps}" for eps in ("1e-06", "0.001")],
        ),
        (FAMILIES, [], (4, 0, 0, 1, 3), [f"family=encoder_decoder,encoder.n_layers={n}" for n in (1, 2)]),
        (
            f"{FAMILIES}, cross_attention: [mha, mqa]",
            [],
            (8, 0, 0, 3, 5),
            [
                f"family=encoder_decoder,encoder.n_layers={n},cross_attention={kind}"
                for n in (1, 2)
                for kind in ("mha", "mqa")
            ],
        ),
        (
            BALANCE,
            [MOE],
            (4, 0, 0, 1, 3),
            [f"feed_forward.balance=bias,feed_forward.balance_rate={rate}" for rate in (0.001, 0.1)],
        ),
        (
            f"feed_forward: [swiglu, moe], {BALANCE}",
            [],
            (8, 0, 0, 4, 4),
            [
                f"feed_forward=moe,feed_forward.balance={how},feed_forward.balance_rate={rate}"
                for how, rate in (("loss", 0.001), ("bias", 0.001), ("bias", 0.1))
            ],
        ),
        (
            GROUPS,
            [MOE],
            (8, 0, 2, 2, 4),  # of two groups that hold the best two experts nothing is left out: the baseline
            [
                f"feed_forward.n_expert_groups=4,feed_forward.{rest}"
                for rest in ("group_score=max", "group_score=top2", "top_groups=2,feed_forward.group_score=top2")
            ],
        ),
        (
            SCHEDULES,
            ["train.schedule=constant"],
            (4, 0, 0, 1, 3),
            [f"train.schedule=cosine,train.final_lr={lr}" for lr in ("0", "0.0001")],
        ),
        (
            f"block: [pre_norm, post_norm], {NORMED}",
            [],
            (8, 0, 0, 2, 6),
            [
                "attention.qk_norm=head,attention.qk_norm_eps=1e-06",
                "attention.qk_norm=head,attention.qk_norm_eps=0.001",
                "block=post_norm",
                "block=post_norm,attention.qk_norm=head,attention.qk_norm_eps=1e-06",
                "block=post_norm,attention.qk_norm=head,attention.qk_norm_eps=0.001",
            ],
        ),
    ],
)
def test_what_means_nothing_in_the_baseline_is_told_where_it_matters(
    axes: str, sets: list[str], expected: tuple[int, ...], named: list[str], expand: Expand
) -> None:
    found = expand(f"vary: {{{axes}}}", *sets)
    assert counts(found) == expected
    assert names(found) == ["baseline", *named]
    assert len({each.trial_id for each in found.trials("cpu", 1)}) == len(names(found))


def test_a_value_is_left_out_of_a_name_that_is_unique_without_it(expand: Expand) -> None:
    axes = "attention.qk_norm: [none, head], attention.qk_norm_eps: [1e-3]"
    assert names(expand(f"vary: {{{axes}}}")) == ["baseline", "attention.qk_norm=head"]
    rule = "exclude: [{attention.qk_norm: head, attention.qk_norm_eps: 1e-3}]"
    assert names(expand(f"vary: {{{NORMED}}}\n{rule}")) == ["baseline", "attention.qk_norm=head"]


def test_a_name_means_either_a_variant_or_what_is_the_same_or_cannot_work(expand: Expand) -> None:
    named = "variants: {a: {attention.qk_norm: head, attention.qk_norm_eps: 1e-3}}"
    found = expand(f"{named}\nvary: {{{NORMED}}}")
    assert names(found) == ["baseline", "a", "attention.qk_norm=head,attention.qk_norm_eps=1e-06"]
    assert found.same == {"attention.qk_norm=head,attention.qk_norm_eps=0.001": "a"}
    found = expand(f"vary: {{n_heads: [4, 3], {NORMED}}}")
    assert len({each.name for each in found.invalid} - set(names(found))) == found.counts["invalid"] == 4


def test_what_cannot_work_takes_no_name_from_what_can(expand: Expand) -> None:
    found = expand("vary: {family: [decoder, encoder_decoder], encoder.n_heads: [4, 3]}")
    assert names(found) == ["baseline", "family=encoder_decoder"]
    assert [each.name for each in found.invalid] == ["family=encoder_decoder,encoder.n_heads=3"]


AXES = {
    "block": ["pre_norm", "post_norm"],
    "n_heads": [4, 3, 2],
    "family": ["encoder_decoder", "decoder"],
    "encoder.n_layers": [2, 1],
    "cross_attention": ["mqa", "mha"],
    "attention.qk_norm": ["none", "head", "l2"],
    "attention.qk_norm_eps": [1e-6, 1e-3],
    "feed_forward": ["moe", "swiglu"],
    "feed_forward.balance": ["bias", "loss"],
    "feed_forward.balance_rate": [0.1, 0.01],
    "train.schedule": ["constant", "cosine"],
    "train.final_lr": [0.0, 1e-4],
}


@given(
    st.lists(st.sampled_from(sorted(AXES)), min_size=2, max_size=3, unique=True),
    st.sampled_from(["[]", "[{n_heads: 2}]"]),
)
@hypothesis.settings(max_examples=15, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_whatever_varies_each_variant_has_a_name(expand: Expand, axes: list[str], exclude: str) -> None:
    found = expand(f"vary: {json.dumps({axis: AXES[axis] for axis in axes})}\nexclude: {exclude}", MOE)
    raw, excluded, invalid, merged, planned = counts(found)
    assert raw - excluded - invalid - merged == planned == len(set(names(found)))
    assert len({each.name for each in found.invalid} - set(names(found)) - set(found.same)) == invalid
    assert not set(found.same) & set(names(found))


def test_variants_and_axes_never_change_each_other(expand: Expand) -> None:
    found = expand("variants: {gqa: {attention: gqa}}\nvary: {block: [pre_norm, post_norm]}")
    assert [set(variant.changes) & {"attention", "block"} for variant in found.variants] == [
        *(set(), {"attention"}, {"block"})
    ]


def test_a_name_that_means_another_variant_is_kept_in_mind(expand: Expand) -> None:
    found = expand("variants: {a: {n_layers: 1}, b: {n_layers: 2}}\nvary: {n_layers: [2]}")
    assert found.same == {"a": "baseline", "n_layers=2": "b"}


@pytest.mark.parametrize(
    "rule",
    [
        "block: post_norm, n_layers: 2",
        "n_layers: 2.0, block: {name: post_norm}",
        "block: post_norm, n_layers: 2, train.steps: 4, train: {batch_tokens: 64}",
        "block: post_norm, n_layers: 2, attention.head_dim: 8",  # a default, once it is filled in
        "block: post_norm, n_layers: 2, dropout: 0, layers: []",
    ],
)
def test_exclude_leaves_out_what_it_describes_in_whatever_words(rule: str, expand: Expand) -> None:
    found = expand(f"vary: {{block: [pre_norm, post_norm], n_layers: [1, 2]}}\nexclude: [{{{rule}}}]")
    assert counts(found) == (4, 1, 0, 0, 3)
    assert names(found) == ["baseline", "n_layers=2", "block=post_norm"]


def test_exclude_matches_parts_and_counts(expand: Expand) -> None:
    axes = "vary: {attention: [mha, {name: gqa, n_kv_heads: 2}, {name: gqa, n_kv_heads: 4}], train.lr: [1e-3, 1e-2]}"
    assert counts(expand(f"{axes}\nexclude: [{{attention: gqa}}]")) == (6, 4, 0, 0, 2)
    assert counts(expand(f"{axes}\nexclude: [{{attention.n_kv_heads: 4}}]")) == (6, 2, 0, 0, 4)
    assert counts(expand(f"{axes}\nexclude: [{{attention.n_kv_heads: 4}}, {{train.lr: 0.01}}]")) == (6, 4, 0, 0, 2)
    assert counts(expand("vary: {train.steps: [2k, 4]}\nexclude: [{train.steps: 2000}]")) == (2, 1, 0, 0, 1)
    assert counts(expand("train: {tokens: 2k, batch_tokens: 64, seq_len: 16}\nvary: {train.tokens: [2k, 4k]}")) == (
        *(2, 0, 0, 0, 2),
    )


def test_the_baseline_cannot_be_excluded(expand: Expand) -> None:
    found = expand("vary: {block: [pre_norm, post_norm]}\nexclude: [{n_layers: 1}]")
    assert counts(found) == (2, 1, 0, 0, 1)


@pytest.mark.parametrize(
    ("added", "name", "reason"),
    [
        ("vary: {n_heads: [3]}", "n_heads=3", "d_model 32 is not divisible by n_heads 3"),
        (
            "vary: {attention: [gqa], attention.n_kv_heads: [3]}",
            "attention=gqa,attention.n_kv_heads=3",
            "n_heads 4 is not divisible by n_kv_heads 3",
        ),
        (
            "vary: {train.warmup_steps: [5]}",
            "train.warmup_steps=5",
            "warmup_steps 5 is more than the 4 steps of the run",
        ),
        ("vary: {max_seq_len: [8]}", "max_seq_len=8", "seq_len 16 is more than max_seq_len 8"),
        (
            "vary: {train.batch_tokens: [40]}",
            "train.batch_tokens=40",
            "batch_tokens 40 is not a multiple of seq_len 16",
        ),
        ("vary: {vocab_size: [15]}", "vocab_size=15", "vocab_size 15 is less than the 16 tokens of the data"),
        ("vary: {d_model: [4]}", "d_model=4", "the rotated width of a head is 1, which is odd"),
    ],
)
def test_what_is_wrong_only_together_is_listed_with_its_reason(
    added: str, name: str, reason: str, expand: Expand
) -> None:
    found = expand(added)
    assert counts(found) == (2, 0, 1, 0, 1)
    (invalid,) = found.invalid
    assert invalid.name == name
    assert invalid.reason == reason


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("baseline: {d_model: 32, n_layers: 1, n_heads: 3}", "tiny.yaml:4:1: d_model 32 is not divisible by n_heads 3"),
        ("variants: {x: {n_heads: 3}}", "tiny.yaml:5:12: d_model 32 is not divisible by n_heads 3"),
        (
            "variants: {x: {attention: {name: gqa, n_kv_heads: 3}}}",
            "tiny.yaml:5:16: n_heads 4 is not divisible by n_kv_heads 3",
        ),
        ("variants: {x: {train: {warmup_steps: 5}}}", "tiny.yaml:5:24: warmup_steps 5 is more than the 4 steps"),
        ("variants: {x: {train.steps: 1, train.warmup_steps: 2}}", "tiny.yaml:5:32: warmup_steps 2 is more than the 1"),
        (
            "profile: {prefill: {tokens: [16, 33]}}",
            "tiny.yaml:5:21: prefill of 33 tokens is more than max_seq_len 32",
        ),
        ("profile: {prefill: {tokens: [16, 8, 16]}}", "tiny.yaml:5:21: prefill.tokens has 16 twice"),
        (
            "profile: {decode: {context: [16], new_tokens: 17}}",
            "tiny.yaml:5:20: context + new_tokens is 33, more than max_seq_len 32",
        ),
        (
            "variants: {x: {layers: [{every: 1, attention: {name: gqa, n_kv_heads: 3}}]}}",
            "tiny.yaml:5:36: n_heads 4 is not divisible by n_kv_heads 3",
        ),
    ],
)
def test_what_is_wrong_together_refuses_the_file_in_the_baseline_and_named_variants(
    added: str, said: str, refused: Refused
) -> None:
    assert refused(added).startswith(said)


def test_profile_may_reach_the_longest_sequence(expand: Expand) -> None:
    assert expand("profile: {prefill: {tokens: [32]}, decode: {context: [16], new_tokens: 16}}").variants


@pytest.mark.parametrize("design", ["product", "one_at_a_time"])
def test_too_many_combinations_are_refused_before_any_is_made(design: str, refused: Refused) -> None:
    axes = [f"  {path}: [{', '.join(map(str, range(1, 1001)))}]" for path in ("n_layers", "d_model", "vocab_size")]
    said = refused("\n".join(["vary:", *axes, f"design: {design}"]))
    number = 10**9 if design == "product" else 3000
    assert said == f"tiny.yaml:5:1: {number} combinations are more than 1000\n" + (
        f"  take values out, or give --max-trials {number}"
    )


def test_max_trials_counts_raw_combinations_and_named_variants(expand: Expand, refused: Refused) -> None:
    added = "variants: {x: {n_layers: 2}}\nvary: {n_layers: [2, 2, 2]}"
    assert counts(expand(added, max_trials=4)) == (5, 0, 0, 3, 2)
    assert "4 combinations are more than 3" in refused(added, max_trials=3)


def test_two_variants_never_share_a_name(refused: Refused) -> None:
    added = "variants: {'block=post_norm': {block: post_norm, n_layers: 2}}\nvary: {block: [post_norm]}"
    assert "two different variants are called 'block=post_norm'" in refused(added)


# --- What is wrong by itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "said"),
    [
        # unknown names, at every depth
        ("varry: {}", "5:1: unknown setting 'varry'\n  did you mean 'vary'?"),
        ('"va[ry": {}', "5:1: unknown setting 'va[ry'\n  did you mean 'vary'?"),
        ("int: 3", "5:1: unknown setting 'int'\n"),
        ("baseline: {feed_forward: {name: moe, n_experts: 16777216}}", "4:38: 'n_experts': must be at most 8192"),
        ("seed: 3", "5:1: unknown setting 'seed'\n  did you mean 'seeds'?"),
        ("baseline: {d_modl: 3}", "4:12: unknown setting 'd_modl'\n  did you mean 'd_model'?"),
        ("baseline: {atention: mha}", "4:12: unknown setting 'atention'\n  did you mean 'attention'?"),
        ("baseline: {attention: {name: mha, biass: true}}", "4:35: unknown setting 'biass'\n  did you mean 'bias'?"),
        ("baseline: {preset: lama}", "4:12: unknown preset 'lama'\n  did you mean 'llama'?"),
        ("variants: {x: {block: postnorm}}", "5:16: unknown block 'postnorm'\n  did you mean 'post_norm'?"),
        ("variants: {x: {preset: lama}}", "5:16: unknown preset 'lama'"),
        ("variants: {x: {train: {lrr: 1}}}", "5:24: unknown setting 'lrr'\n  did you mean 'lr'?"),
        ("variants: {x: {train.lrr: 1}}", "5:16: unknown setting 'lrr'\n  did you mean 'lr'?"),
        ("variants: {x: {dropout: {embeding: 0}}}", "5:26: unknown setting 'embeding'\n  did you mean 'embedding'?"),
        ("vary: {blok: [pre_norm]}", "5:8: unknown setting 'blok'\n  did you mean 'block'?"),
        ("vary: {trian.lr: [1]}", "5:8: unknown setting 'trian'\n  did you mean 'train'?"),
        ("vary: {train.lrr: [1]}", "5:20: unknown setting 'lrr'\n  did you mean 'lr'?"),
        ("vary: {seeds: [1]}", "5:8: 'seeds' is a key of the file, not of a variant"),
        ("vary: {block: [pre_norm, postnorm]}", "5:26: unknown block 'postnorm'\n  did you mean 'post_norm'?"),
        ("vary: {attention: [mha, gqq], attention.n_kv_heads: [1]}", "5:8: unknown attention 'gqq'"),
        (
            "vary: {train.optimizer: [adamw, adammw]}",
            "5:33: 'optimizer.name': must be 'adamw', 'adam' or 'sgd' (it is 'adammw')\n  did you mean 'adamw'?",
        ),
        (
            "train: {steps: 4, batch_tokens: 64, optimizer: {beta: 1}}",
            "4:49: unknown setting 'beta'\n  did you mean 'betas'?",
        ),
        ("data: {name: cycle, periods: 4}", "4:21: unknown setting 'periods'\n  did you mean 'period'?"),
        ("data: cycles", "4:1: unknown data 'cycles'\n  did you mean 'cycle'?"),
        (
            "profile: {decode: {context: [8], new_token: 3}}",
            "5:34: unknown setting 'new_token'\n  did you mean 'new_tokens'?",
        ),
        ("exclude: [{blok: post_norm}]", "5:12: unknown setting 'blok'\n  did you mean 'block'?"),
        ("exclude: [{block: postnorm}]", "5:12: unknown block 'postnorm'\n  did you mean 'post_norm'?"),
        ("exclude: [{train.lrr: 1}]", "5:12: unknown setting 'lrr'\n  did you mean 'lr'?"),
        ("exclude: [{attention.heads: 1}]", "5:12: unknown setting of attention mha 'heads'"),
        # settings that no choice of the grid has
        (
            "vary: {attention.n_kv_heads: [1]}",
            "5:8: unknown setting of attention mha 'n_kv_heads'\n  only gqa would know it",
        ),
        (
            "vary: {feed_forward: [gelu, moe], feed_forward.n_expert: [2]}",
            "5:35: unknown setting of feed_forward gelu or moe or swiglu 'n_expert'\n  did you mean 'n_experts'?",
        ),
        # the ambiguous name
        (
            "variants: {x: {attention: {name: gqa, n_kv_groups: 2}}}",
            "5:39: unknown setting 'n_kv_groups'\n  write n_kv_heads",
        ),
        ("vary: {attention: [gqa], attention.n_kv_groups: [2]}", "5:26: unknown setting of attention gqa or mha"),
        ("baseline: {n_kv_groups: 2}", "4:12: unknown setting 'n_kv_groups'\n  write n_kv_heads"),
        # words that other YAML readers take for truth values
        ("vary: {position: [rope, no]}", "5:25: unknown position 'no'\n  did you mean 'none'?"),
        (
            "vary: {position: [rope, false]}",
            "5:25: position needs a name or a mapping with a name, not False\n  write one of: ",
        ),
        ("variants: {x: {position: off}}", "5:16: unknown position 'off'"),
        ("baseline: {attention: true}", "4:12: attention needs a name"),
        ("baseline: {attention: }", "4:12: attention needs a name"),
        ("baseline: {attention: {bias: true, name: no}}", "4:12: unknown attention 'no'"),
        # types
        ("vary: {n_layers: [1, two]}", "5:22: 'n_layers': a whole number is needed (it is 'two')"),
        ("vary: {block: [pre_norm, 4]}", "5:26: block needs a name"),
        ("vary: {tie_embeddings: [true, auto]}", "5:31: 'tie_embeddings': true or false is needed"),
        ("vary: {train.lr: [1, '1e-3']}", "5:22: 'lr': a number is needed (it is '1e-3')"),
        ("baseline: {n_layers: true}", "4:12: 'n_layers': a whole number is needed, not true"),
        ("baseline: {n_layers: 1.5}", "4:12: 'n_layers': a whole number is needed"),
        ("baseline: {n_layers: '6'}", "4:12: 'n_layers': a whole number is needed"),
        ("baseline: {n_layers: 2m}", "4:12: 'n_layers': a whole number is needed (it is '2m')"),
        ("baseline: {n_layers: 0.5}", "4:12: 'n_layers': a whole number is needed"),
        ("baseline: {dropout: true}", "4:12: 'dropout"),
        ("train: {steps: 4, batch_tokens: 64, lr: true}", "4:37: 'lr': a number is needed, not true"),
        ("variants: {x: }", "5:12: 'variants.x': settings are needed here"),
        ("variants: [x]", "5:1: 'variants'"),
        ("question: 3", "5:1: 'question': text is needed"),
        ("data: 3", "4:1: 'data': settings are needed here"),
        (
            "design: both",
            "5:1: 'design': must be 'product' or 'one_at_a_time', or {fractional: a resolution} (it is 'both')\n"
            "  write product",
        ),
        # bounds
        ("vary:\n  n_layers: [1,\n    0]", "7:5: 'n_layers': must be at least 1 (it is 0)\n  write 1 or more"),
        ("vary: {attention: [mha, {name: gqa, n_kv_heads: 0}]}", "5:37: 'n_kv_heads': must be at least"),
        ("vary: {dropout: [0.1, 1]}", "5:23: 'dropout.embedding': must be less than 1"),
        ("variants: {x: {train.lr: 0}}", "5:16: 'lr': must be more than 0 (it is 0)\n  write a number above 0"),
        ("train: {steps: 99999999999999999999, batch_tokens: 64}", "4:9: 'steps': must be at most 9007199254740992"),
        # nothing where something must be
        ("vary: {block: []}", "5:8: 'vary.block': a list of at least one value is needed"),
        ("vary: {block: pre_norm}", "5:8: 'vary.block': a list of at least one value is needed (it is 'pre_norm')"),
        ("vary: {block: }", "5:8: 'vary.block': a list of at least one value is needed"),
        ("vary: [block]", "5:1: 'vary'"),
        ("exclude: [{}]", "5:11: 'exclude.0'"),
        # the length of the run
        (
            "train: {batch_tokens: 64}",
            "4:1: exactly one of 'steps', 'tokens', 'flops', 'seconds' and 'tokens_per_param' says how long",
        ),
        ("train: {steps: 1, tokens: 64, batch_tokens: 64}", "4:1: exactly one of"),
        ("train: {steps: 1, batch_tokens: 60, seq_len: 16}", "4:19: batch_tokens 60 is not a multiple of seq_len 16"),
        ("train: {steps: 1, batch_tokens: 64}\nbaseline: {max_seq_len: 48}", "3:19: batch_tokens 64 is not a multiple"),
        ("train: {steps: 1, batch_tokens: 64, seq_len: 64}", "4:37: seq_len 64 is more than max_seq_len 32"),
        (
            "train: {steps: 1, batch_tokens: 64, seq_len: 16, accumulate: 3}",
            "4:19: batch_tokens 64 is not a multiple of 3",
        ),
        ("train: {steps: 4, batch_tokens: 64, warmup_steps: 5}", "4:37: warmup_steps 5 is more than the 4 steps"),
        # what no variant may change
        ("variants: {x: {profile: {rounds: 1}}}", "5:16: 'profile.rounds' is the same for all variants"),
        ("vary: {profile.rounds: [1, 2]}", "5:8: 'profile.rounds' is the same for all variants"),
        ("vary: {train.max_seconds: [1]}", "5:8: 'train.max_seconds' is the same for all variants"),
        ("vary: {train.checkpoint_every: [1]}", "5:8: 'train.checkpoint_every' is the same for all variants"),
        (
            "variants: {x: {train: {keep_checkpoints: true}}}",
            "5:16: 'train.keep_checkpoints' is the same for all variants",
        ),
        # layers
        ("baseline: {layers: [{feed_forward: moe}]}", "4:21: a rule for layers needs 'every', 'first' or 'at'"),
        ("baseline: {layers: [{every: 2, ffn: moe}]}", "4:32: unknown setting 'ffn'"),
        ("baseline: {layers: [{every: 2, position: learned}]}", "4:12: position learned adds to the embeddings"),
        ("baseline: {layers: [{every: 2, block: postnorm}]}", "4:32: unknown block 'postnorm'"),
        ("baseline: {layers: [{every: 0, block: post_norm}]}", "4:22: 'every': must be at least"),
        ("baseline: {layers: {every: 2}}", "4:12: 'layers': a list is needed"),
        # data
        ("data: {path: missing.txt}", "4:8: no such file or folder: 'missing.txt'"),
        ("vary: {data: [cycle, {name: text, path: missing.txt}]}", "5:35: no such file or folder: 'missing.txt'"),
        # names
        ("name: ../x", "4:1: '../x' cannot be the name of an experiment"),
        ("name: 3", "4:1: 3 cannot be the name of an experiment"),
        ("variants: {baseline: {n_layers: 2}}", "5:12: 'baseline' cannot be the name of a variant"),
        ("variants: {'': {n_layers: 2}}", "5:12: '' cannot be the name of a variant"),
        ('variants: {"a\\nb": {n_layers: 2}}', "5:12: 'a b' cannot be the name of a variant"),
        ("variants: {a: {n_layers: 2}, a: {n_layers: 3}}", "5:30: 'a' is written twice, in lines 5 and 5"),
        # seeds
        *[
            (f"seeds: {seeds}", "5:1: 'seeds': a list of at most 1000 seeds is needed, or a count from 1 to 1000")
            for seeds in ("0", "-1", "1001", "2M", "1.5", "'3'", "null", "{}", [*range(1001)])
        ],
        ("seeds: []", "5:1: 'seeds'"),
        ("seeds: true", "5:1: 'seeds': a whole number is needed, not true"),
        ("seeds: [0, true]", "5:12: 'seeds.1': a whole number is needed, not true"),
        ("seeds: [0, -1]", "5:12: 'seeds.1': must be at least"),
        ("seeds: [0, 1, 0]", "5:1: a seed is given twice"),
    ],
)
def test_what_is_wrong_by_itself_refuses_the_file_at_its_place(added: str, said: str, refused: Refused) -> None:
    assert refused(added).startswith(f"tiny.yaml:{said}")


def test_all_faults_are_told_at_once(refused: Refused) -> None:
    said = refused("baseline: {n_layers: 0, block: postnorm}\ntrain: {steps: 0, batch_tokens: 64, lrr: 3}")
    for part in ("'n_layers'", "'postnorm'", "'steps'", "'lrr'"):
        assert part in said


def test_a_file_without_a_recipe_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("baseline: {n_layers: 1}\n", encoding="utf-8")
    with pytest.raises(FileFaults, match="'train' is missing"):
        Experiment.from_file(file)


# --- What settings mean -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seeds", "meant"), [("3", [0, 1, 2]), ("[7, 3]", [7, 3]), ("[1.0, 2e0]", [1, 2]), ("1e0", [0])]
)
def test_seeds_are_a_list_or_a_count(seeds: str, meant: list[int], expand: Expand) -> None:
    found = expand(f"seeds: {seeds}\nvariants: {{x: {{n_layers: 2}}}}")
    assert found.seeds == meant
    trials = found.trials("cpu", 1)
    assert [(trial.seed, trial.variant.name) for trial in trials] == [
        (seed, name) for seed in meant for name in ("baseline", "x")
    ]


@pytest.mark.parametrize(
    ("written", "tokens"), [("2M", 2_000_000), ("8k", 8000), ("1.5B", 1_500_000_000), ("0.128k", 128), ("1e3", 1000)]
)
def test_counts_have_units_of_a_thousand(written: str, tokens: int, expand: Expand) -> None:
    recipe = expand(f"train: {{tokens: {written}, batch_tokens: 64, seq_len: 16}}").baseline.settings.train
    assert recipe.n_steps == -(-tokens // 64), "rounded up to whole steps"
    assert recipe.tokens is None, "the resolved recipe has one length"


def test_defaults_of_the_design(expand: Expand) -> None:
    found = expand("train: {steps: 4, batch_tokens: 64}").baseline.settings
    assert found.train.length == found.model.max_seq_len == 32
    assert found.train.warmup_steps == 0
    assert (found.profile.prefill, found.profile.decode) == (None, None)
    assert found.model.vocab_size == 16
    assert expand("baseline: {vocab_size: 99, d_model: 32, max_seq_len: 32}").baseline.settings.model.vocab_size == 99


@pytest.mark.parametrize("data", ["text", "{name: text, tokenizer: bytes}", "{tokenizer: bytes}", "{}"])
def test_data_is_a_name_or_a_mapping(data: str, expand: Expand) -> None:
    found = expand(f"data: {data}\nvariants: {{x: {{data: {{validation_fraction: 0.2}}}}, y: {{data: cycle}}}}")
    assert found.baseline.settings.data.name == "text"
    assert [variant.settings.data.name for variant in found.variants] == ["text", "text", "cycle"]
    assert changes(found, "x") == {"data.validation_fraction": 0.2}
    assert changes(found, "y")["data"] == "cycle"
    assert "vocab_size" not in changes(found, "y")  # it follows


def test_changes_tell_what_a_variant_sets_to_nothing(expand: Expand) -> None:
    found = expand("variants: {x: {train.grad_clip: null}, y: {train: {eval_tokens: null, lr: 1}}}")
    assert changes(found, "x") == {"train.grad_clip": None}
    assert changes(found, "y") == {"train.eval_tokens": None, "train.lr": 1.0}
    assert [variant.groups for variant in found.variants][1:] == [
        ["train.grad_clip"],
        ["train.eval_tokens", "train.lr"],
    ]


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        ("[{every: 2, feed_forward: moe}]", "dmdm"),
        ("[{first: 1, feed_forward: moe}]", "mddd"),
        ("[{every: 2, feed_forward: moe}, {first: 2, feed_forward: swiglu}]", "dddm"),
        ("[{first: 2, feed_forward: swiglu}, {every: 2, feed_forward: moe}]", "dmdm"),
        ("[{every: 1, feed_forward: moe}, {every: 3, feed_forward: swiglu}]", "mmdm"),
        ("[{every: 3, first: 1, feed_forward: moe}]", "mdmd"),
    ],
)
def test_of_the_rules_for_layers_the_last_wins(layers: str, kinds: str, expand: Expand) -> None:
    model = expand(f"variants: {{x: {{n_layers: 4, layers: {layers}}}}}").variants[1].settings.model
    found = [model.stacks[-1].layer(i).feed_forward.name for i in range(4)]
    assert found == [{"d": "swiglu", "m": "moe"}[kind] for kind in kinds]


def _rules() -> st.SearchStrategy[dict[str, Any]]:
    number, choice = st.integers(1, 7), st.sampled_from(["gelu", "moe", "relu"])
    places = st.fixed_dictionaries({}, optional={"every": number, "first": number, "at": st.lists(number, min_size=1)})
    return st.builds(lambda place, name: {**place, "feed_forward": name}, places.filter(bool), choice)


@given(st.lists(_rules(), max_size=3), st.integers(7, 9))
def test_different_layers_are_counted_as_they_come_one_by_one(rules: list[dict[str, Any]], n_layers: int) -> None:
    raw = {"d_model": 16, "n_layers": n_layers, "n_heads": 2, "layers": rules, "vocab_size": 9}
    stack = model_settings(raw).stacks[-1]
    found = [layer for layer, times in stack.distinct_layers() for _ in range(times)]
    name = operator.attrgetter("feed_forward.name")
    assert Counter(map(name, found)) == Counter(map(name, stack.layers))
    first = dict.fromkeys(map(name, stack.layers))
    assert [name(layer) for layer, _ in stack.distinct_layers()] == list(first)


def test_merges_in_the_file_are_told_where_they_stand(refused: Refused, expand: Expand) -> None:
    added = "variants:\n  x: &x\n    n_layers: 2\n    train: {lr: 0}\n  y: {<<: *x, n_layers: 3}"
    assert refused(added).startswith("tiny.yaml:8:13: 'lr'")
    found = expand(added.replace("lr: 0", "lr: 1"))
    assert changes(found, "y") == {"n_layers": 3, "train.lr": 1.0}


# --- The command line's settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "read", "meant"),
    [
        (["train.tokens=128"], lambda v: (v.train.n_steps, v.train.batch_tokens), (2, 64)),
        (["train.tokens=128", "train.steps=7"], lambda v: v.train.n_steps, 7),
        (["d_model=64"], lambda v: v.model.d_model, 64),
        (["baseline.d_model=64"], lambda v: v.model.d_model, 64),
        (["attention=gqa", "attention.n_kv_heads=2"], lambda v: v.model.attention.settings()["n_kv_heads"], 2),
        (["attention.n_kv_heads=2", "attention=gqa"], lambda v: v.model.attention.settings()["n_kv_heads"], 2),
        (["attention={name: gqa, n_kv_heads: 2}"], lambda v: v.model.attention.settings()["n_kv_heads"], 2),
        (["preset=gpt2"], lambda v: (v.model.position.name, v.model.d_model), ("learned", 32)),
        (
            ["dropout=0.5", "dropout.residual=0.1"],
            lambda v: (v.model.dropout.attention, v.model.dropout.residual),
            (0.5, 0.1),
        ),
        (["layers=[{every: 1, norm: layer_norm}]"], lambda v: v.model.stacks[-1].layer(0).norm.name, "layer_norm"),
        (["train.optimizer=sgd", "train.optimizer.momentum=0.5"], lambda v: v.train.optimizer.momentum, 0.5),
        (["data.period=8"], lambda v: v.model.vocab_size, 8),
        (["data=text", "data.path=tiny.yaml"], lambda v: v.data.settings()["path"], "tiny.yaml"),
        (["train.grad_clip=null"], lambda v: v.train.grad_clip, None),
        (["profile.prefill.tokens=[8]"], lambda v: v.profile.prefill.tokens, [8]),
        (["train.lr=1e-2"], lambda v: v.train.lr, 0.01),
    ],
)
def test_a_setting_of_the_command_line(sets: list[str], read: Any, meant: object, expand: Expand) -> None:
    assert read(expand("", *sets).baseline.settings) == meant


def test_a_dotted_setting_wins_over_the_same_one_in_the_file(expand: Expand) -> None:
    for attention in ("attention: {name: gqa, n_kv_heads: 4}", "attention: gqa, attention.n_kv_heads: 4"):
        baseline = f"baseline: {{d_model: 32, n_heads: 4, n_layers: 1, max_seq_len: 32, {attention}}}"
        found = expand(baseline, "attention.n_kv_heads=2").baseline.settings.model.attention
        assert found.settings()["n_kv_heads"] == 2


def test_the_command_line_reaches_the_rest_of_the_file(expand: Expand) -> None:
    added = "seeds: 3\nvariants: {x: {train: {lr: 1}}, y: {}}"
    found = expand(added, "seeds=[5]", "name=other", "question=why?", "variants.x.train.lr=2", "variants.y.n_layers=2")
    assert (found.seeds, found.name, found.question) == ([5], "other", "why?")
    assert changes(found, "x") == {"train.lr": 2.0}
    assert changes(found, "y") == {"n_layers": 2}
    found = expand("", "vary.train.lr=[1, 2]", "vary.block=[pre_norm]", "exclude=[{train.lr: 2}]")
    assert names(found) == ["baseline", "train.lr=1"]
    assert found.source["vary"] == {"train.lr": [1, 2], "block": ["pre_norm"]}, "as it is stored with the results"


def test_a_folder_of_ones_own_takes_the_place_of_the_text(expand: Expand, write: Write) -> None:
    write()
    Path("mine").mkdir()
    Path("mine/a.txt").write_text("abc " * 100, encoding="utf-8")
    found = expand("data: text", "data.path=mine")
    assert len(found.corpus(found.baseline).train) < 400
    file = Path("without.yaml")
    file.write_text(TINY.replace("data: {name: cycle, period: 16}\n", ""), encoding="utf-8")
    assert Experiment.from_file(file, ["data.path=mine"]).baseline.corpus.sha256 == found.baseline.corpus.sha256


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *[
            (wrong, f"--set {wrong}: not of the form key=value")
            for wrong in ("train.steps", "=3", "a..b=3", ".a=1", "")
        ],
        *[(wrong, f"--set {wrong}: not a value in YAML") for wrong in ("n_layers={a", "n_layers=*x", "n_layers=a: b")],
        ("n_layers=two", "--set n_layers=two: 'n_layers': a whole number is needed (it is 'two')"),
        ("n_layers=", "--set n_layers=: 'n_layers': a whole number is needed"),
        ("n_layer=2", "--set n_layer=2: unknown setting 'n_layer'\n  did you mean 'n_layers'?"),
        ("attention.n_kv_heads=2", "--set attention.n_kv_heads=2: unknown setting 'n_kv_heads'"),
        ("steps=3", "--set steps=3: unknown setting 'steps'\n  write train.steps"),
        ("train.lr=0", "--set train.lr=0: 'lr': must be more than 0 (it is 0)\n  write a number above 0"),
        ("train=3", "--set train=3: 'train'"),
        ("seeds=0", "--set seeds=0: 'seeds'"),
        ("name=../x", "--set name=../x: '../x' cannot be the name of an experiment"),
        ("vary.block=post_norm", "--set vary.block=post_norm: 'vary.block': a list"),
        ("claims=[a.x < 1]", "--set claims=[a.x < 1]: unknown metric 'x' in the claim 'a.x < 1'"),
        ("train.warmup_steps=9", "--set train.warmup_steps=9: warmup_steps 9 is more than the 4 steps"),
    ],
)
def test_a_wrong_setting_of_the_command_line_is_told_as_such(change: str, said: str, refused: Refused) -> None:
    assert refused("", change).startswith(said)


# --- The user's own choices -------------------------------------------------------------------------------------------

OWN = '''"""Attention that takes no position."""

from torch import nn

from ablate.attention import AttentionChoice


class Config(AttentionChoice):
    offers = frozenset({OFFERS})
    width: int = 4

    def build(self, shape):
        return nn.Linear(shape.d_model, shape.d_model)
'''


@pytest.fixture
def own(write: Write) -> Path:
    """A file with an attention of one's own, which offers no hook to a position scheme."""
    write()
    file = Path("own.py")
    file.write_text(OWN.replace("{OFFERS}", ""), encoding="utf-8")
    for remembered in (registry._config, registry._foreign, registry.announce):
        remembered.cache_clear()
    return file


def test_pairings_are_refused_by_what_each_side_declares(own: Path, expand: Expand, refused: Refused) -> None:
    found = expand("vary: {attention: [mha, ./own.py], position: [rope, alibi, none, learned]}")
    assert {each.name for each in found.invalid} == {
        "attention=./own.py",
        "attention=./own.py,position=alibi",
    }
    for invalid, hook in zip(found.invalid, ("rotate", "bias"), strict=True):
        assert hook in invalid.reason
        assert "./own.py" in invalid.reason
    assert counts(found) == (8, 0, 2, 0, 6)
    assert "position rope needs an attention that can rotate" in refused("variants: {x: {attention: ./own.py}}")
    layers = "variants: {x: {n_layers: 2, position: alibi, layers: [{first: 1, attention: ./own.py}]}}"
    assert "position alibi needs an attention that can bias" in refused(layers)
    assert expand("variants: {x: {attention: ./own.py, position: none}}").plug_ins() == ["./own.py"]


def test_a_choice_of_ones_own_that_fails_is_told(own: Path, expand: Expand, refused: Refused) -> None:
    own.write_text(
        OWN.replace("{OFFERS}", "") + "\n    def resolve(self, shape):\n        return 1 / 0\n", encoding="utf-8"
    )
    assert "./own.py fails in these settings: ZeroDivisionError" in refused("variants: {x: {attention: ./own.py}}")
    (invalid,) = expand("vary: {attention: [./own.py]}").invalid
    assert "ZeroDivisionError: division by zero" in invalid.reason


def test_a_choice_of_ones_own_that_is_not_there_is_told(refused: Refused) -> None:
    assert "attention './nowhere.py' cannot be loaded" in refused("variants: {x: {attention: ./nowhere.py}}")
    assert "attention 'no_lab.x' cannot be loaded" in refused("vary: {attention: [no_lab.x]}")


def test_the_source_of_a_choice_of_ones_own_is_part_of_the_identity(own: Path, expand: Expand) -> None:
    added = "variants: {x: {attention: ./own.py, position: none}}"
    before = [trial.trial_id for trial in expand(added).trials("cpu", 1)]
    assert [trial.trial_id for trial in expand(added).trials("cpu", 1)] == before
    own.write_text(own.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    after = [trial.trial_id for trial in expand(added).trials("cpu", 1)]
    assert before[0] == after[0], "the baseline does not use it"
    assert before[1] != after[1]


# --- Identity ---------------------------------------------------------------------------------------------------------


def trial(expand: Expand, added: str = "", *sets: str, device: str = "cpu", threads: int = 1) -> Trial:
    """The last variant's first trial."""
    return expand(added, *sets).trials(device, threads)[-1]


@pytest.mark.parametrize(
    "sets",
    [
        ["train.lr=0.001"],
        ["train.lr=1e-3"],
        ["train.warmup_steps=0.0"],
        ["train.steps=4.0"],
        ["train.tokens=256"],
        ["train.max_seconds=7"],
        ["train.checkpoint_every=2"],
        ["train.keep_checkpoints=true"],
        ["train.threads=1"],
        ["name=other"],
        ["question=another"],
        ["attention=mha"],
        ["attention={name: mha, bias: false}"],
        ["attention.head_dim=8"],
        ["vocab_size=16"],
        ["preset=llama"],
        ["data={period: 1.6e1, name: cycle}"],
        ["vary.n_layers=[1]"],
    ],
)
def test_the_same_thing_in_other_words_keeps_its_id(sets: list[str], expand: Expand) -> None:
    assert trial(expand, "", *sets).trial_id == trial(expand).trial_id


def test_names_and_order_do_not_change_an_id(expand: Expand) -> None:
    first = trial(expand, "variants: {a: {n_layers: 2, train: {lr: 1, steps: 3}, attention: {name: gqa, bias: true}}}")
    again = trial(
        expand, "variants: {b: {attention: {bias: true, name: gqa}, train.steps: 3, train.lr: 1.0, n_layers: 2}}"
    )
    assert first.trial_id == again.trial_id


@pytest.mark.parametrize(
    "sets",
    [
        ["n_layers=2"],
        ["d_model=64"],
        ["vocab_size=17"],
        ["attention=gqa"],
        ["attention.bias=true"],
        ["position=alibi"],
        ["block=post_norm"],
        ["norm.eps=1e-5"],
        ["dropout.residual=0.1"],
        ["tie_embeddings=true"],
        ["init_std=0.1"],
        ["layers=[{every: 1, norm: layer_norm}]"],
        ["train.lr=1e-2"],
        ["train.steps=5"],
        ["train.seq_len=8"],
        ["train.batch_tokens=128"],
        ["train.accumulate=2"],
        ["train.precision=bf16"],
        ["train.optimizer.eps=1e-6"],
        ["train.grad_clip=null"],
        ["train.eval_every=2"],
        ["train.threads=2"],
        ["train.deterministic=true"],
        ["data.train_tokens=99"],
        ["seeds=[1]"],
    ],
)
def test_whatever_determines_the_numbers_changes_the_id(sets: list[str], expand: Expand) -> None:
    changed, plain = trial(expand, "", *sets), trial(expand)
    assert changed.trial_id != plain.trial_id
    assert changed.profile_id == plain.profile_id


def test_device_and_threads_change_the_id(expand: Expand) -> None:
    ids = {trial(expand, device=device, threads=threads).trial_id for device in ("cpu", "cuda") for threads in (1, 2)}
    assert len(ids) == 4
    assert trial(expand, "", "train.threads=2").trial_id == trial(expand, threads=2).trial_id


def test_every_byte_of_the_corpus_changes_the_id(expand: Expand, write: Write) -> None:
    write()
    text = Path("text.txt")
    ids = set()
    for content in ("abc " * 200, "abc " * 199 + "abd ", "abd " + "abc " * 199, "abc " * 201):
        text.write_text(content, encoding="utf-8")
        ids.add(trial(expand, "data: {path: text.txt}").trial_id)
    assert len(ids) == 4
    Path("copy").mkdir()
    Path("copy/text.txt").write_text(content, encoding="utf-8")
    assert trial(expand, "data: {path: copy/text.txt}").trial_id in ids, "wherever the file lies"


@pytest.mark.parametrize("change", ["profile.rounds=2", "profile.prefill.tokens=[8]", "profile.decode.context=[8]"])
def test_what_is_profiled_has_an_id_of_its_own(change: str, expand: Expand) -> None:
    sets = ["profile={prefill: {tokens: [4]}, decode: {context: [4], new_tokens: 4}}"]
    plain, changed = trial(expand, "", *sets), trial(expand, "", *sets, change)
    assert plain.trial_id == changed.trial_id
    assert plain.profile_id != changed.profile_id


def test_ids_depend_on_no_hash_seed_and_no_order_of_keys(write: Write) -> None:
    variants = {"x": {"attention": {"name": "gqa", "n_kv_heads": 2}, "train": {"lr": 1, "steps": 3}, "n_layers": 2}}
    code = (
        "import sys; from ablate import Experiment;"
        "print([t.trial_id + t.profile_id for t in Experiment.from_file('tiny.yaml').trials('cpu', 1)])"
    )
    said = set()
    for seed, flip in (("1", 1), ("2", -1)):
        lines = TINY.splitlines()[::flip]
        flipped = {"x": {key: variants["x"][key] for key in [*variants["x"]][::flip]}}
        write().write_text("\n".join([*lines, f"variants: {json.dumps(flipped)}"]), encoding="utf-8")
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
        said.add(done.stdout)
    assert len(said) == 1


def test_trials_of_an_experiment_never_share_an_id(expand: Expand) -> None:
    found = expand(
        "seeds: 3\nvariants: {a: {n_layers: 2}, b: {train.lr: 1}, c: {data.period: 8}}\n"
        "vary: {block: [pre_norm, post_norm]}"
    )
    ids = [each.trial_id for each in found.trials("cpu", 2)]
    assert len(set(ids)) == len(ids) == 15
    assert all(len(each) == 16 and set(each) <= set("0123456789abcdef") for each in ids)


@pytest.mark.parametrize("change", ["vary: {train.tokens: [4096]}", "variants: {longer: {train: {tokens: 4096}}}"])
def test_one_way_to_give_the_length_replaces_the_other(change: str, expand: Expand) -> None:
    found = expand(change)
    assert not found.invalid
    longer = found.variants[-1].settings.train
    assert (longer.tokens, longer.n_steps * longer.batch_tokens) == (None, 4096)


# --- Settings that mean nothing, exceptions for layers, and cures -----------------------------------------------------

RULES = [
    *("[{every: 2, attention: gqa}]", "[{first: 1, feed_forward: moe}]", "[{every: 1, norm: layer_norm}]"),
    *("[{every: 2, block: post_norm}, {first: 1, norm: layer_norm, attention: mla}]", "[]"),
]


@pytest.mark.parametrize("layers", RULES)
def test_resolved_settings_survive_a_round_trip(layers: str, expand: Expand) -> None:
    settings = expand(
        f"variants: {{x: {{n_layers: 2, train.schedule: noam, train.warmup_steps: 1, layers: {layers}}}}}"
    )
    whole = settings.variants[1].settings
    again = typed(json.loads(json.dumps(whole.model_dump(mode="json"))))
    assert again == whole
    assert resolved(again) == whole


@pytest.mark.parametrize(
    ("recipe", "idle"),
    [
        ("train.optimizer: adamw", "train.optimizer.momentum: 0.5"),
        ("train.optimizer: adam", "train.optimizer.momentum: 0.5"),
        ("train.optimizer: sgd", "train.optimizer.betas: [0.5, 0.6]"),
        ("train.optimizer: sgd", "train.optimizer.eps: 0.1"),
        ("train.schedule: constant", "train.final_lr: 0.5"),
        ("train.schedule: noam, train.warmup_steps: 1", "train.final_lr: 0.5"),
        ("init: xavier", "init_std: 0.5"),
    ],
)
def test_a_setting_without_meaning_makes_no_variant(recipe: str, idle: str, expand: Expand) -> None:
    found = expand(f"variants: {{a: {{{recipe}, n_layers: 2}}, b: {{{recipe}, n_layers: 2, {idle}}}}}")
    assert names(found) == ["baseline", "a"]
    assert found.same == {"b": "a"}


def test_nothing_means_the_default_where_a_setting_has_a_meaning(expand: Expand) -> None:
    idle = ("train.optimizer.betas=null", "train.optimizer.eps=null", "train.final_lr=null", "init_std=null")
    assert expand("", *idle).baseline.settings == expand("").baseline.settings


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("[{every: 2}]", "a rule for layers needs a choice for them\n  give one of: attention, "),
        ("[{every: 9, norm: layer_norm}]", "the rule is for none of the 2 layers\n  take it out, or "),
        ("[{every: 1, norm: }]", "a rule for layers needs a choice for them"),
    ],
)
def test_a_rule_that_changes_nothing_is_refused(layers: str, said: str, refused: Refused) -> None:
    assert said in refused(f"variants: {{x: {{n_layers: 2, layers: {layers}}}}}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("n_layers=10001", "'n_layers': must be at most 10000 (it is 10001)\n  write 10000 or less"),
        ("n_layers=0", "'n_layers': must be at least 1"),
        ("d_model=1B", "'d_model': must be at most 16777216"),
        ("vocab_size=1B", "'vocab_size': must be at most 16777216"),
        ("max_seq_len=1B", "'max_seq_len': must be at most 16777216"),
        ("feed_forward.d_ff=1B", "'d_ff': must be at most 16777216"),
        ("attention.head_dim=1B", "'head_dim': must be at most 16777216"),
        ("train.warmup_steps=-1", "'warmup_steps': must be at least 0"),
        ("dropout.residual=1", "must be less than 1"),
        ("train.optimizer.betas=[0.9]", "it has too few values\n  give at least 2"),
        ("train.optimizer.betas=[0.9, 0.9, 0.9]", "it has too many values\n  give at most 2"),
        ("train.optimizer.betas=0.9", "a list is needed (it is 0.9)\n  write its values in brackets"),
        ("train.optimizer=3", "'optimizer': settings are needed here (it is 3)\n  write settings below it"),
        ("n_layers=two", "a whole number is needed (it is 'two')\n  write a whole number without quotes, such as 8"),
        ("n_layers=true", "a whole number is needed, not true (it is True)\n  write a whole number without quotes"),
        ("train.lr=fast", "a number is needed (it is 'fast')\n  write a number without quotes, such as 1e-3"),
        ("tie_embeddings=1", "true or false is needed (it is 1)\n  write true or false, without quotes"),
        ("question=3", "text is needed (it is 3)\n  write it in quotes"),
        ("train.schedule=cosin", "(it is 'cosin')\n  did you mean 'cosine'?"),
        ("train.precision=3", "must be 'fp32' or 'bf16' (it is 3)\n  write fp32"),
        ("attention={name: gqa, n_kv_heads: 3}", "not divisible by n_kv_heads 3\n  choose a divisor of n_heads"),
        ("feed_forward={name: moe, top_k: 9}", "top_k 9 is more than n_experts 8\n  choose top_k from 1 to 8"),
        ("attention.head_dim=7", "which is odd\n  give the attention an even width"),
        ("profile={prefill: {tokens: [99]}}", "\n  raise max_seq_len or shorten the prompt"),
        ("profile={decode: {context: [9]}}", "\n  raise max_seq_len, or lower context 9 or new_tokens 32"),
        ("profile={prefill: {}}", "'tokens' is missing\n  add it"),
        ("layers=[3]", "settings are needed here, not 3\n  write settings below it"),
    ],
)
def test_a_fault_comes_with_its_cure(change: str, said: str, refused: Refused) -> None:
    assert said in refused("", change)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ("{position: rope, attention: {name: mha, head_dim: 7}}", "5:55: the rotated width of a head is 7"),
        ("{position: rope, attention: {name: mla, qk_rope_head_dim: 3}}", "5:55: the rotated width of a head is 3"),
        ("{d_model: 28, position: rope, attention: mha}", "5:29: the rotated width of a head is 7"),
    ],
)
def test_an_odd_width_is_told_where_it_is_given(changes: str, place: str, refused: Refused) -> None:
    assert refused(f"variants: {{x: {changes}}}").startswith(f"tiny.yaml:{place}")

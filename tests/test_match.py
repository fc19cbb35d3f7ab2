"""Equal budgets: what is solved, how it is told, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Expand, Refused, Write

from ablate import catalogue, grid, match, plan
from ablate.cli import main
from ablate.experiment import Experiment
from ablate.lattice import GRAINS, CrookedError, Point, mismatch, nearest
from ablate.settings import resolved, typed
from ablate.variant import Variant

WIDE = "baseline: {d_model: 64, n_layers: 4, n_heads: 4, max_seq_len: 32, feed_forward: swiglu}\n"
BY_WIDTH = "match: {params: 0.01, by: feed_forward.d_ff}\n"
KV = "attention: {name: gqa, n_kv_heads: 1}"
D_FF = "feed_forward.d_ff"
BY = "n_layers"


def by_name(experiment: Experiment) -> dict[str, Variant]:
    return {variant.name: variant for variant in experiment.variants}


def params(variant: Variant) -> float:
    found = match.reached("params", variant.settings)
    assert found is not None
    return found


# --- What is solved ---------------------------------------------------------------------------------------------------


def test_a_variant_gets_the_baseline_s_parameters_in_a_round_number(expand: Expand) -> None:
    found = by_name(expand(f"{WIDE}{BY_WIDTH}variants: {{mqa: {{{KV}}}, gelu: {{feed_forward: gelu}}}}\n"))
    goal = params(found["baseline"])
    for name in ("mqa", "gelu"):
        assert mismatch(params(found[name]), goal) <= 0.01
        assert found[name].matched is not None
        assert found[name].matched.mismatch == params(found[name]) / goal - 1
    mqa = found["mqa"]
    assert mqa.changes == {"attention": "gqa", "attention.n_kv_heads": 1, "feed_forward.d_ff": 200}
    assert mqa.groups == ["attention"], "what an equal budget takes is no comparison of its own"
    assert (mqa.matched.before, mqa.matched.after) == (168, 200)  # type: ignore[union-attr]


def test_what_is_near_enough_stays_as_it_is(expand: Expand) -> None:
    found = by_name(expand(f"{WIDE}{BY_WIDTH}variants: {{geglu: {{feed_forward: geglu}}}}\n"))["geglu"]
    assert found.matched is not None
    assert (found.matched.before, found.matched.after, found.matched.mismatch) == (168, 168, 0.0)
    assert found.changes == {"feed_forward": "geglu"}


def test_each_rung_of_a_ladder_has_the_budget_of_the_baseline_at_that_rung(expand: Expand) -> None:
    ladder = "vary: {scale: [1, 2], feed_forward: [swiglu, gelu]}\n"
    found = by_name(expand(f"{WIDE}{BY_WIDTH}{ladder}"))
    large, gelu = found["scale=2"], found["scale=2,feed_forward=gelu"]
    assert params(large) > 4 * params(found["baseline"])
    assert large.matched is not None
    assert large.matched.before == large.matched.after, "it is the baseline at that rung"
    assert mismatch(params(gelu), params(large)) <= 0.01
    assert mismatch(params(found["feed_forward=gelu"]), params(found["baseline"])) <= 0.01
    assert gelu.matched is not None
    assert grid.get(gelu.plain, grid.full_path(D_FF)) == gelu.matched.after, "no factor multiplies what was solved"


def test_a_solved_variant_is_as_if_it_had_been_written_so(expand: Expand) -> None:
    solved = expand(f"{WIDE}{BY_WIDTH}variants: {{mqa: {{{KV}}}}}\n")
    written = expand(f"{WIDE}variants: {{mqa: {{{KV}, feed_forward.d_ff: 200}}}}\n")
    assert [t.trial_id for t in solved.trials("cpu", 1)] == [t.trial_id for t in written.trials("cpu", 1)]
    assert solved.variants[1].settings == written.variants[1].settings


@pytest.mark.parametrize(
    ("budget", "by", "change"),
    [
        ("params", "n_layers", "{feed_forward.d_ff: 100}"),
        ("params", "d_model", "{n_layers: 2}"),
        ("params_active", "feed_forward.d_ff", "{feed_forward: {name: moe, n_experts: 8, top_k: 2}}"),
        ("flops_per_token", "feed_forward.d_ff", f"{{{KV}}}"),
        ("flops_per_token", "n_layers", "{feed_forward.d_ff: 40}"),
        ("kv_cache_bytes_per_token", "n_layers", "{attention.n_kv_heads: 2}"),
        ("kv_cache_bytes_per_token", "attention.n_kv_heads", "{n_layers: 8}"),
    ],
)
def test_every_budget_by_every_kind_of_setting(expand: Expand, budget: str, by: str, change: str) -> None:
    baseline = WIDE.replace("feed_forward: swiglu", "attention: {name: gqa, n_kv_heads: 4}, feed_forward: swiglu")
    found = expand(f"{baseline}match: {{{budget}: 0.09, by: {by}}}\nvariants: {{a: {change}}}\n").variants
    own, theirs = (match.reached(budget, each.settings) for each in reversed(found))
    assert own is not None
    assert theirs is not None
    assert mismatch(own, theirs) <= 0.09
    assert by in found[1].changes


def test_experts_are_solved_for_too(expand: Expand) -> None:
    moe = "{name: moe, n_experts: 8, top_k: 2, d_ff: %d}"
    baseline = WIDE.replace("swiglu", moe % 64)
    change = f"variants: {{fine: {{feed_forward: {moe % 16}}}}}\n"
    found = expand(f"{baseline}match: {{params: 0.05, by: feed_forward.n_experts}}\n{change}").variants[1]
    assert found.changes == {"feed_forward.d_ff": 16, "feed_forward.n_experts": 32}
    assert found.groups == ["feed_forward"]


def test_a_width_stays_divisible(expand: Expand) -> None:
    """Whatever the settings refuse is skipped: heads must come out even, and turn in pairs."""
    text = "baseline: {d_model: 96, n_layers: 4, n_heads: 12, max_seq_len: 32}\n"
    found = expand(f"{text}match: {{params: 0.13, by: d_model}}\nvariants: {{shallow: {{n_layers: 2}}}}\n").variants
    width = found[1].settings.model.d_model
    assert width % 24 == 0
    assert mismatch(params(found[1]), params(found[0])) <= 0.13


def test_exceptions_for_layers_go_on_from_what_is_solved(expand: Expand) -> None:
    rule = "layers: [{every: 2, feed_forward: {bias: true}}]"
    baseline = WIDE.replace("swiglu", f"swiglu, {rule}")
    found = expand(f"{baseline}{BY_WIDTH}variants: {{mqa: {{{KV}}}}}\n").variants[1]
    widths = {layer.feed_forward.model_dump()["d_ff"] for layer in found.settings.model.stacks[0].layers}
    assert widths == {200}


def test_the_training_length_counts_for_flops(expand: Expand) -> None:
    """Scores are paid by the length that is trained at, not by the longest."""
    text = f"{WIDE}match: {{flops_per_token: 0.002, by: feed_forward.d_ff}}\nvariants: {{a: {{n_layers: 3}}}}\n"
    short, long = (expand(text, f"train.seq_len={n}").variants[1].settings for n in (2, 32))
    assert short.model.feed_forward.model_dump()["d_ff"] < long.model.feed_forward.model_dump()["d_ff"]


def shapes() -> Iterator[dict[str, int]]:
    """200 of them, from small to the size of a large model, with odd numbers of heads among them."""
    sizes = itertools.product((1, 2, 3, 4, 6, 8, 12, 16, 20, 32), (16, 32, 64, 80, 128), (1, 6, 24, 61))
    for heads, width, layers in sizes:
        yield {"d_model": heads * width, "n_heads": heads, "n_layers": layers, "max_seq_len": 64}


PAIRS = [
    ({slot: one}, {slot: other})
    for slot in ("feed_forward", "attention")
    for one, other in itertools.permutations(catalogue.names(slot), 2)
]
TARGETS = tuple(match.COLUMNS)


def best(values: dict[int, float], goal: float, tolerance: float) -> float:
    """By brute force: the mismatch of the nearest on the coarsest grain that has one, else of the nearest of all."""
    offs = {number: mismatch(value, goal) for number, value in values.items()}
    for grain in GRAINS:
        near = [off for number, off in offs.items() if number % grain == 0 and off <= tolerance]
        if near:
            return min(near)
    return min(offs.values())


@pytest.mark.parametrize("by", ["feed_forward.d_ff", "n_layers", "d_model"])
def test_every_pair_of_choices_is_matched_as_nearly_as_can_be(by: str) -> None:
    """Within the tolerance, or neither neighbour is nearer: then nothing is."""
    everything, met = list(shapes()), 0
    assert len(everything) == 200
    for place, (one, other) in enumerate(PAIRS):
        shape, budget = everything[place * 7 % 200], TARGETS[place % 3]
        variant, goal = solvable(shape, other), match.reached(budget, solvable(shape, one).settings)
        now = match.before(variant, budget, by)
        assert goal is not None
        assert now is not None
        found = match.solution(variant, now, budget, by, goal, 0.01)
        assert found is not None
        off, n, at = mismatch(found.reached, goal), found.number, match.Probe(variant, budget, by).at
        step = 2 * shape["n_heads"] if by == "d_model" else 1
        beside = [value for each in (n - step, n + step) if each > 0 and (value := at(each)) is not None]
        assert off <= 0.01 or all(mismatch(each, goal) >= off for each in beside), f"{shape}, {one}, {other}, {n}"
        met += off <= 0.01
    assert met > len(PAIRS) / 3


@pytest.mark.parametrize(
    ("by", "most", "choice"),
    [
        ("feed_forward.d_ff", 200, {}),
        ("n_layers", 40, {}),
        ("d_model", 260, {}),
        ("attention.n_kv_heads", 12, {"attention": "gqa"}),
        ("attention.head_dim", 40, {}),
        ("attention.kv_lora_rank", 120, {"attention": "mla"}),
        ("feed_forward.n_experts", 40, {"feed_forward": "moe"}),
    ],
)
def test_what_is_solved_and_what_is_refused_is_what_brute_force_finds(
    by: str, most: int, choice: dict[str, str]
) -> None:
    shape = {"d_model": 48, "n_heads": 12, "n_layers": 3, "max_seq_len": 64}
    variant = solvable(shape, choice)
    for budget in TARGETS:
        at, now = match.Probe(variant, budget, by).at, match.before(variant, budget, by)
        assert now is not None
        values = {number: value for number in range(1, most + 1) if (value := at(number)) is not None}
        within = sorted(values.values())[-1] * 0.8
        goals = [value * factor for value in list(values.values())[::7] for factor in (1, 1.004, 1.07)]
        for goal, tolerance in itertools.product([goal for goal in goals if 0 < goal < within], (0.001, 0.01, 0.1)):
            if len(set(values.values())) > 1 and mismatch(now.reached, goal) > tolerance:
                found = match.solution(variant, now, budget, by, goal, tolerance)
                assert found is not None
                assert mismatch(found.reached, goal) == best(values, goal, tolerance), f"{budget}, {goal}, {tolerance}"


@pytest.mark.parametrize("step", [1, 2, 24, 61, 300, 514])
def test_a_step_between_possible_numbers_is_found_out(step: int) -> None:
    """Heads divide a width: of 257 that turn in pairs every 514th is possible."""
    values = {number: 1000.0 + 3 * number for number in range(step, 50 * step + 1, step)}
    for goal, tolerance in itertools.product([values[9 * step] * each for each in (0.5, 0.93, 1, 1.3)], (0.001, 0.2)):
        found = nearest(values.get, Point(20 * step, values[20 * step]), goal, tolerance)
        assert found is not None
        assert mismatch(found.reached, goal) == best(values, goal, tolerance)


def test_every_pair_of_attentions_gets_the_cache_of_the_other() -> None:
    """By its layers: within the tolerance, or no whole number of layers is nearer; without a cache there is no way."""
    everything, met = list(shapes()), 0
    pairs = list(itertools.permutations(catalogue.names("attention"), 2))
    for place, (one, other) in enumerate(pairs):
        shape, budget = everything[place * 7 % 200], "kv_cache_bytes_per_token"
        variant = solvable(shape, {"attention": other})
        goal, now = (
            match.reached(budget, solvable(shape, {"attention": one}).settings),
            match.before(variant, budget, BY),
        )
        assert goal is not None
        assert now is not None
        found = match.solution(variant, now, budget, BY, goal, 0.01)
        if now.reached == 0:
            assert found == (now if goal == 0 else None)
            continue
        assert found is not None
        slope = now.reached / now.number
        assert found.reached == slope * found.number
        off = mismatch(found.reached, goal)
        beside = (found.number - 1, found.number + 1)
        assert off <= 0.01 or all(mismatch(slope * each, goal) >= off for each in beside if each), (
            f"{shape}, {one}, {other}"
        )
        met += off <= 0.01
    assert met > 3


@pytest.mark.parametrize("whole", [12, 32, 40, 61, 96, 128, 143, 8192])
def test_divisors_are_found_however_far_apart(whole: int) -> None:
    """Key/value heads divide heads, sequences divide a batch; of a prime number there are only two."""
    values = {number: 1000.0 + 3 * number for number in range(1, whole + 1) if whole % number == 0}
    for start, goal, tolerance in itertools.product(values, values.values(), (0.0001, 0.2)):
        found = nearest(values.get, Point(start, values[start]), goal, tolerance, [100, whole])
        assert found is not None
        assert mismatch(found.reached, goal) == best(values, goal, tolerance), f"{start}, {goal}, {tolerance}"


@pytest.mark.parametrize(("whole", "start"), [(140, 1), (1120, 8), (2520, 12)])
def test_divisors_in_a_row_are_not_taken_for_multiples_of_a_step(whole: int, start: int) -> None:
    values = {number: 1000.0 + 3 * number for number in range(1, whole + 1) if whole % number == 0}
    for number, goal in values.items():
        found = nearest(values.get, Point(start, values[start]), goal, 0.0, [whole])
        assert found == Point(number, goal)


@pytest.mark.parametrize(("heads", "own", "wanted"), [(61, 1, 61), (61, 61, 1), (122, 1, 61), (143, 143, 11)])
def test_the_only_other_numbers_of_key_value_heads_are_found(expand: Expand, heads: int, own: int, wanted: int) -> None:
    shape = f"d_model: {4 * heads}, n_layers: 1, n_heads: {heads}, max_seq_len: 32"
    baseline = f"baseline: {{{shape}, attention: {{name: gqa, n_kv_heads: {wanted}}}}}\n"
    asked = "match: {kv_cache_bytes_per_token: 0.01, by: attention.n_kv_heads}\n"
    change = f"variants: {{a: {{attention.n_kv_heads: {own}, feed_forward.d_ff: 8}}}}\n"
    found = expand(baseline + asked + change).variants[1]
    assert found.matched is not None
    assert (found.matched.before, found.matched.after) == (own, wanted)


def test_of_a_prime_number_of_heads_the_nearest_is_told(refused: Refused) -> None:
    """One or all: half of all are not to be had."""
    shape = "d_model: 244, n_layers: 2, n_heads: 61, max_seq_len: 32"
    baseline = f"baseline: {{{shape}, attention: {{name: gqa, n_kv_heads: 61}}}}\n"
    asked = "match: {kv_cache_bytes_per_token: 0.01, by: attention.n_kv_heads}\n"
    said = refused(f"{baseline}{asked}variants: {{a: {{n_layers: 3, attention.n_kv_heads: 1}}}}\n")
    assert "within 0.01 by attention.n_kv_heads: the nearest is 5,856 at 61\n  give 0.5, or match by another" in said


def test_what_goes_up_and_down_is_refused() -> None:
    with pytest.raises(CrookedError, match="10 at 10"):
        nearest(lambda number: float(number if number == 10 else 3 * number), Point(10, 10.0), 28.0, 0.01)


def solvable(shape: dict[str, int], choice: dict[str, str]) -> Variant:
    train = {"steps": 1, "batch_tokens": 64, "seq_len": 64}
    tree = grid.baseline_tree(
        {"baseline": {**shape, **choice, "position": "none"}, "train": train, "data": {"name": "cycle"}}
    )
    written = typed(tree)
    corpus = written.data.corpus()
    return Variant("a", resolved(written, corpus.vocab_size), corpus, {}, tree)


@pytest.mark.parametrize("named", [True, False])
def test_the_warm_up_is_held_against_the_steps_after_the_match(expand: Expand, refused: Refused, named: bool) -> None:
    """A variant that is small, and so short, before it gets its budget is as long as the baseline after it."""
    recipe = "train: {tokens_per_param: 0.1, batch_tokens: 64, seq_len: 16, warmup_steps: %d}\n"
    change = f"variants: {{thin: {{{D_FF}: 8}}}}" if named else "vary: {feed_forward: [{name: swiglu, d_ff: 8}]}"
    found = expand(f"{WIDE}{BY_WIDTH}{recipe % 290}{change}\n").variants
    steps = {each.settings.train.steps for each in found}
    assert len(found) == 1, "it has come to be the baseline"
    assert all(each is not None and each >= 290 for each in steps)
    assert "warmup_steps 290 is more than the" in refused(f"{WIDE}{recipe % 290}variants: {{thin: {{{D_FF}: 8}}}}\n")


# --- Several budgets --------------------------------------------------------------------------------------------------

TWO = "match: [{params: 0.02, by: feed_forward.d_ff}, {flops_per_token: 0.02, by: feed_forward.d_ff}]\n"
MOE = "moe: {feed_forward: {name: moe, n_experts: 4, top_k: 1}}"


def test_each_budget_makes_a_variant_of_its_own(expand: Expand) -> None:
    found = expand(f"{WIDE}{TWO}variants: {{{MOE}, mqa: {{{KV}}}}}\nseeds: 2\n")
    assert list(by_name(found)) == ["baseline", "moe@params", "mqa@params", "moe@flops_per_token"]
    assert found.same == {"mqa@flops_per_token": "mqa@params"}, "it comes to the same under both"
    counted = {"raw": 5, "excluded": 0, "invalid": 0, "merged": 1, "planned": 4, "trials": 8}
    assert found.counts == counted
    assert [each["variants"] for each in found.match] == [
        {"moe": "moe@params", "mqa": "mqa@params"},
        {"moe": "moe@flops_per_token", "mqa": "mqa@params"},
    ]
    goals = [match.reached(each["budget"], found.baseline.settings) for each in found.match]
    assert [each["goal"] for each in found.match] == goals


def test_names_that_meant_the_same_before_mean_the_same_still(expand: Expand) -> None:
    text = f"{WIDE}%s" + f"variants: {{{MOE}, again: {{{MOE.partition(': ')[2][1:-1]}}}, base: {{n_layers: 4}}}}\n"
    assert expand(text % TWO).same == {
        "again@params": "moe@params",
        "again@flops_per_token": "moe@flops_per_token",
        "base": "baseline",
    }
    found = expand(text % BY_WIDTH.replace("0.01", "0.02"))
    assert found.same == {"again": "moe", "base": "baseline"}
    assert found.counts["raw"] == sum(found.counts[word] for word in ("excluded", "invalid", "merged", "planned"))


def test_several_budgets_count_against_the_limit(expand: Expand, refused: Refused) -> None:
    text = f"{WIDE}{TWO}vary: {{feed_forward: [gelu, relu, geglu]}}\n"
    assert expand(text, max_trials=7).counts["raw"] == 7
    assert refused(text, max_trials=6) == (
        "tiny.yaml:5:1: 7 variants are more than 6\n  take some out, or give --max-trials 7"
    )


def test_two_variants_that_come_to_the_same_are_one(expand: Expand) -> None:
    found = expand(f"{WIDE}{BY_WIDTH}variants: {{a: {{{KV}, {D_FF}: 400}}, b: {{{KV}, {D_FF}: 800}}}}\n")
    assert list(by_name(found)) == ["baseline", "a"]
    assert found.same == {"b": "a"}
    assert found.counts["merged"] == 1


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "key", "said"),
    [
        ("match: 3", "match", "settings are needed here, not 3\n  write settings below it"),
        ("match: []", "match", "it has no budget\n  write one, as in {params: 0.01, by: n_layers}"),
        ("match:", "match", "settings are needed here, not None"),
        ("match: {params: 0.01}", "match", "'by' is missing\n  add it"),
        ("match: {by: d_model}", "match", "exactly one of params, params_active, flops_per_token, kv_cache_bytes_per"),
        ("match: {params: 0.1, params_active: 0.1, by: d_model}", "match", "exactly one of params,"),
        ("match: {parms: 0.1, by: d_model}", "parms", "unknown setting 'parms'\n  did you mean 'params'?"),
        ("match: {params: 2, by: d_model}", "params", "'params': must be less than 1 (it is 2)"),
        ("match: {params: 0.1, by: d_modle}", "by", "unknown setting 'd_modle'\n  did you mean 'd_model'?"),
        ("match: {params: 0.1, by: feed_forward.dff}", "by", "unknown setting of feed_forward"),
        ("match: {params: 0.1, by: block}", "by", "'block' is a whole number in no variant\n  match by a size"),
        ("match: {params: 0.1, by: train.lr}", "by", "'train.lr' is no setting of the model\n  match by a size"),
        ("match: {params: 0.1, by: preset}", "by", "'preset' is a whole number in no variant"),
        (
            "match: [{params: 0.2, by: d_model}, {params: 0.1, by: n_layers}]",
            "params: 0.1",
            "params is matched twice\n  give each budget once",
        ),
        (
            "match: {params: 0.1, by: d_model}\nvary: {d_model: [32, 64]}",
            "by",
            "'d_model' varies: matched by it, all its values would come to the same\n  match by another setting",
        ),
        (
            "match: {params: 0.0001, by: n_layers}\nvariants: {a: {d_model: 128}}",
            "params",
            "variant a cannot have the baseline's params 13,664 within 0.0001 by n_layers: the nearest is",
        ),
        (
            f"match: {{kv_cache_bytes_per_token: 0.01, by: feed_forward.d_ff}}\nvariants: {{a: {{{KV}}}}}",
            "kv_cache",
            "feed_forward.d_ff does not change the kv_cache_bytes_per_token of variant a: 64, the baseline has 256\n",
        ),
        (
            "match: {params: 0.1, by: attention.n_kv_heads}\nvariants: {a: {attention: gqa}, b: {attention: mqa}}",
            "by",
            "variant b has no attention.n_kv_heads, which is to give it the baseline's params\n  match by a",
        ),
    ],
)
def test_a_faulty_match_is_refused_with_its_place(lines: str, key: str, said: str, refused: Refused) -> None:
    assert refused(lines).startswith(f"tiny.yaml:5:{1 + lines.index(key)}: {said}")


def test_the_nearest_that_can_be_reached_is_told_and_cures(expand: Expand, refused: Refused) -> None:
    text = f"{WIDE}match: {{params: %s, by: n_layers}}\nvariants: {{a: {{feed_forward.d_ff: 300}}}}"
    said = refused(text % "0.01")
    assert "variant a cannot have the baseline's params 197,184 within 0.01 by n_layers: the nearest is " in said
    cure = said.partition("give ")[2].partition(",")[0]
    assert expand(text % cure).variants[1].matched is not None


def test_a_combination_that_cannot_be_matched_is_invalid_and_the_rest_runs(expand: Expand) -> None:
    text = f"{WIDE}match: {{params: 0.001, by: n_layers}}\nvary: {{feed_forward: [geglu, gelu], n_heads: [4, 8]}}\n"
    found = expand(text)
    assert list(by_name(found)) == ["baseline", "feed_forward=geglu"] or found.invalid
    assert all("cannot have the baseline's params" in each.reason for each in found.invalid)
    assert found.counts["raw"] == sum(found.counts[word] for word in ("excluded", "invalid", "merged", "planned"))


# --- How it is told ---------------------------------------------------------------------------------------------------


def test_the_plan_prints_what_was_changed_and_what_remains(write: Write) -> None:
    file = str(write(f"{WIDE}{BY_WIDTH}variants: {{mqa: {{{KV}}}, geglu: {{feed_forward: geglu}}}}\n"))
    shown = CliRunner().invoke(main, ["plan", file]).stdout
    assert "matched: mqa: feed_forward.d_ff 168 -> 200; params" in shown
    assert "matched: geglu: feed_forward.d_ff stays 168; params" in shown
    facts = json.loads(CliRunner().invoke(main, ["plan", file, "--json"]).stdout)
    assert facts["match"][0]["variants"] == {"mqa": "mqa", "geglu": "geglu"}
    told: dict[str, Any] = {each["name"]: each["matched"] for each in facts["variants"]}
    assert told["baseline"] is None
    assert (told["mqa"]["before"], told["mqa"]["after"]) == (168, 200)


def test_the_stored_document_tells_it(expand: Expand) -> None:
    experiment = expand(f"{WIDE}{BY_WIDTH}variants: {{mqa: {{{KV}}}}}\n")
    machine = {"device": "cpu", "threads": 1}
    document = plan.document(experiment, plan.plan(experiment, timed=False), machine, "run")
    assert document["match"] == experiment.match
    json.dumps(document, allow_nan=False)


def test_matching_names_settings_and_runs_no_code(write: Write) -> None:
    shown = CliRunner().invoke(main, ["plan", str(write(f"{WIDE}{BY_WIDTH}"))])
    assert "own code" not in shown.output
    assert shown.exit_code == 0

"""How long a variant trains: by steps, tokens, FLOPs, tokens a parameter or seconds; and seeds of data and weights."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Expand, Refused, Write

from ablate import budget, pace
from ablate.batches import Batches
from ablate.cli import main
from ablate.cost import cost
from ablate.experiment import Experiment
from ablate.objectives import NextToken
from ablate.pace import Pace
from ablate.progress import Running
from ablate.settings import ADDED, BUDGETS, TrainSettings, VariantSettings
from ablate.train import Trained, schedule
from tests.test_resume import assert_same, in_parts, trained
from tests.test_train import run, variant
from tests.test_trial import job, performed

pytestmark = pytest.mark.usefixtures("one_thread")


def by(length: str, more: str = "") -> str:
    return f"train: {{{length}, batch_tokens: 64, seq_len: 16}}\n{more}"


def steps(experiment: Experiment) -> list[int | None]:
    return [each.settings.train.steps for each in experiment.variants]


# --- As the file says it ----------------------------------------------------------------------------------------------


def test_tokens_for_each_parameter_that_a_token_meets(expand: Expand) -> None:
    moe = "variants: {moe: {feed_forward: {name: moe, n_experts: 4, top_k: 1}}}\n"
    found = expand(by("tokens_per_param: 20", moe))
    for each in found.variants:
        price = cost(each.settings.model, 16)
        assert each.settings.train.steps == math.ceil(20 * price.params_active / 64)
    assert price.params_active < price.params_total


def test_flops_are_of_forward_and_backward_at_the_training_length(expand: Expand) -> None:
    found = expand(by("flops: 1B", "variants: {deep: {n_layers: 4}}\n"))
    for each in found.variants:
        forward = cost(each.settings.model, 16).flops_per_token
        assert forward is not None
        assert each.settings.train.steps == math.ceil(1e9 / (3 * forward * 64))
        assert 1e9 <= 3 * forward * 64 * (each.settings.train.steps or 0) < 1e9 + 3 * forward * 64
    assert steps(found)[0] > 2 * steps(found)[1]  # type: ignore[operator]


@pytest.mark.parametrize("length", ["flops: 1e8", "tokens_per_param: 0.5"])
def test_it_comes_to_the_trials_of_so_many_steps(length: str, expand: Expand) -> None:
    given = expand(by(length))
    written = expand(by(f"steps: {steps(given)[0]}"))
    assert given.trials("cpu", 1)[0].trial_id == written.trials("cpu", 1)[0].trial_id
    assert given.variants[0].settings == written.variants[0].settings


def test_equal_budgets_come_before_the_length_is_reckoned(expand: Expand) -> None:
    match = "match: {params: 0.05, by: feed_forward.d_ff}\nvariants: {mqa: {attention: {name: gqa, n_kv_heads: 1}}}\n"
    found = expand(by("flops: 1e9", match)).variants[1]
    assert found.matched is not None
    assert found.matched.before != found.matched.after
    forward = cost(found.settings.model, 16).flops_per_token
    assert found.settings.train.steps == math.ceil(1e9 / (3 * (forward or 0) * 64))


def test_a_length_can_be_an_axis_and_a_variant_s_own(expand: Expand) -> None:
    found = expand(by("steps: 4", "vary: {train.flops: [1e8, 2e8]}\nvariants: {long: {train.tokens_per_param: 1}}\n"))
    assert [each.name for each in found.variants] == [
        "baseline",
        "long",
        "train.flops=100000000.0",
        "train.flops=200000000.0",
    ]
    assert all(each.settings.train.flops is None for each in found.variants)
    assert len(set(steps(found))) == 4


def test_a_command_line_s_length_takes_the_place_of_the_file_s(expand: Expand) -> None:
    for name, other in itertools.permutations(BUDGETS, 2):
        found = expand(by(f"{name}: 640"), f"train.{other}=320").source["train"]
        assert found == {other: 320, "batch_tokens": 64, "seq_len": 16}


ONE = "exactly one of 'steps', 'tokens', 'flops', 'seconds' and 'tokens_per_param' says how long to train\n  give one"


@pytest.mark.parametrize(
    ("length", "said"),
    [
        ("steps: 4, flops: 1e9", ONE),
        ("lr: 0.1", ONE),
        ("flops: 0", "'flops': must be more than 0 (it is 0)\n  write a number above 0"),
        ("seconds: -1", "'seconds': must be more than 0 (it is -1)"),
        ("seconds: true", "'seconds': a whole number is needed, not true"),
        ("tokens_per_param: many", "'tokens_per_param': a number is needed (it is 'many')"),
        ("tokens_per_prm: 1", "unknown setting 'tokens_per_prm'\n  did you mean 'tokens_per_param'?"),
        ("flops: 1e30", "e+25 tokens are no training\n  give less"),
        ("flops: 1e6, warmup_steps: 50", "warmup_steps 50 is more than the"),
        ("seconds: 9, max_seconds: 9", "max_seconds 9 ends the trial before its 9 seconds of training\n  give more"),
        ("steps: 4, data_seed: -1", "'data_seed': must be at least 0 (it is -1)"),
        ("steps: 4, init_seed: 0.5", "'init_seed': a whole number is needed"),
    ],
)
def test_a_faulty_length_is_refused_with_its_place(length: str, said: str, refused: Refused) -> None:
    told = refused(by(length))
    assert re.match(r"tiny\.yaml:4:\d+: ", told)
    assert said in told


def test_flops_of_a_choice_that_does_not_tell_them_are_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = SimpleNamespace(flops_per_token=None, params_active=1)
    monkeypatch.setattr(budget, "cost", lambda *_: silent)
    assert "does not tell its own\n  give steps or tokens" in refused(by("flops: 1e9"))


def test_what_was_stored_before_keeps_its_identity(expand: Expand) -> None:
    """Settings that there were not always are no part of it where they say nothing."""
    known = expand().variants[0].identity["train"]
    assert not known.keys() & set(ADDED)
    assert expand(by("seconds: 5")).variants[0].identity["train"]["seconds"] == 5
    assert expand(by("steps: 4, data_seed: 0")).variants[0].identity["train"]["data_seed"] == 0


def test_the_plan_tells_steps_that_differ_and_those_nobody_knows(write: Write) -> None:
    deep = "variants: {deep: {n_layers: 2}}\n"
    shown = CliRunner().invoke(main, ["plan", str(write(by("flops: 1e9", deep)))]).stdout
    assert re.search(r"variant +steps +training tokens +training FLOPs", shown)
    assert "training FLOPs" not in CliRunner().invoke(main, ["plan", str(write(by("steps: 4", deep)))]).stdout
    timed = str(write(by("seconds: 5", deep)))
    assert "differs between trials" in CliRunner().invoke(main, ["plan", timed]).stdout
    facts = json.loads(CliRunner().invoke(main, ["plan", timed, "--json"]).stdout)["variants"][0]
    assert (facts["steps"], facts["train_tokens"], facts["train_flops"]) == (None, None, None)
    assert facts["predicted_seconds"] == 5


# --- Seconds ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_second_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read as a step begins and as it ends, and stands still in between two steps."""
    ticks = itertools.count()
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def timed(seconds: float, **recipe: Any) -> VariantSettings:
    return variant({"dropout": 0.1}, steps=None, seconds=seconds, **{"eval_every": None, **recipe})


@pytest.mark.usefixtures("one_second_a_step")
def test_a_training_ends_at_the_first_step_past_its_time() -> None:
    for seconds, expected in ((0.5, 1), (1.0, 1), (1.5, 2), (9.9, 10), (10.0, 10)):
        _, done, _ = run(timed(seconds))
        assert (done.steps, done.seconds) == (expected, float(expected))


@pytest.mark.usefixtures("one_second_a_step")
def test_it_is_evaluated_after_each_tenth_of_its_time() -> None:
    _, _, notes = run(timed(20.0))
    assert [step for step, _ in notes.points["val", "loss"]] == list(range(2, 21, 2))
    _, _, notes = run(timed(4.0))
    assert [step for step, _ in notes.points["val", "loss"]] == [1, 2, 3, 4]
    _, _, notes = run(timed(10.0, eval_every=4))
    assert [step for step, _ in notes.points["val", "loss"]] == [4, 8, 10]


@pytest.mark.usefixtures("one_second_a_step")
def test_the_schedule_follows_the_share_of_the_time() -> None:
    _, _, notes = run(timed(12.0, schedule="linear", final_lr=0.0, warmup_steps=2, lr=1.0))
    rates = notes.values("train", "lr")
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:] == pytest.approx([1 - n / 10 for n in range(10)])


def test_only_the_time_of_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    done = Trained()
    watched = Pace(TrainSettings(seconds=3.0, warmup_steps=1), done)
    shares = []
    for step in (1, 2, 3):
        watched.begin()
        shares.append(watched.share)
        now[0] += 1.0
        watched.end(step)
        now[0] += 100.0  # an evaluation, or a checkpoint
        assert watched.is_over(step) == (step == 3)
    assert shares == [0.0, 0.0, 0.5]
    assert (done.seconds, done.warm_seconds) == (3.0, 1.0)


def test_steps_need_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = variant(steps=5)
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: float("nan")))
    _, done, _ = run(settings)
    assert (done.steps, done.seconds) == (5, 0.0)


@pytest.mark.usefixtures("one_second_a_step")
@pytest.mark.parametrize("stops", [(3,), (1, 4)])
def test_a_training_that_is_gone_on_with_counts_on(stops: tuple[int, ...], tmp_path: Path) -> None:
    settings = timed(9.5, warmup_steps=2)
    assert_same(in_parts(settings, tmp_path, *stops), trained(settings))


def test_a_schedule_without_a_clock_stands_at_its_peak() -> None:
    """Interleaved timing asks for the rate of steps of which nobody knows how many there will be."""
    assert schedule(TrainSettings(seconds=1.0, lr=0.5), 16)(7) == pytest.approx(0.5)


@pytest.mark.usefixtures("one_second_a_step")
@pytest.mark.parametrize("phases", [("train", "profile"), ("steps", "profile")])
def test_a_trial_in_seconds_is_ok(phases: tuple[str, ...]) -> None:
    done = performed(job(phases, train={"steps": None, "seconds": 8.5, "eval_every": None}))
    assert done.outcome == ("ok", "profile", "")
    columns = {key: value for each in done.of("columns") for key, value in each.items()}
    if "train" in phases:
        assert (columns["steps"], columns["tokens"]) == (9, 9 * 64)


def test_progress_shows_steps_of_which_nobody_knows_how_many() -> None:
    running = Running("a seed 0", None, "train", 7, 448, 2.5)
    running.began = (running.said - 1.0, 64)
    assert "step 7 " in running.line()
    assert "left" not in running.line()


# --- Seeds ------------------------------------------------------------------------------------------------------------


def test_the_order_of_the_data_has_a_seed_of_its_own() -> None:
    def windows(seed: int, **recipe: Any) -> list[int]:
        settings = variant(**recipe)
        batches = Batches.of(settings.data.corpus(), settings.train, seed, NextToken())
        return [int(each) for each in batches.windows(1)[:, 0]]

    assert windows(0) != windows(1)
    assert windows(0, data_seed=7) == windows(1, data_seed=7) == windows(7)


@pytest.mark.parametrize(
    ("recipe", "same"), [({}, (False, False)), ({"data_seed": 3}, (True, False)), ({"init_seed": 3}, (False, True))]
)
def test_a_trial_keeps_one_fixed_while_the_other_varies(recipe: dict[str, int], same: tuple[bool, bool]) -> None:
    found = []
    for seed in (0, 1):
        asked = job(("train",), train=recipe)
        done = performed(type(asked)(asked.settings, seed, "cpu", 1, ("train",), asked.log))
        columns = {key: value for each in done.of("columns") for key, value in each.items()}
        found.append((columns["batch_order_hash"], columns["train_loss"]))
    assert (found[0][0] == found[1][0]) == same[0]
    assert found[0][1] != found[1][1]
    settings = [TrainSettings(steps=1, **recipe).seed_of_weights(seed) for seed in (0, 1)]
    assert (settings[0] == settings[1]) == same[1]

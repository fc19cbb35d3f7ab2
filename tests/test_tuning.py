"""The search for settings: the same chances for every variant, on data and seeds that no final number comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from conftest import Expand, Refused, Write

import ablate
from ablate import search, sweep
from ablate.cli import main
from ablate.data import Corpus
from ablate.experiment import Experiment
from ablate.mlflow_run import run_content
from ablate.plan import most_bytes, plan
from ablate.report import write_report
from ablate.results import Results, Store
from ablate.runner import Run
from ablate.schema import CURVES, PROFILES, TRIALS
from ablate.search import Listed, Point, Range, Search, best_of, mean_loss
from ablate.settings import TrainSettings
from ablate.sweep import _Sweep
from ablate.tasks import Task
from ablate.tuning import Tuning, tuning
from ablate.variant import Trial

LR = "tune: {train.lr: [1e-3, 1e-2, 1e-1]}"
GQA = "variants: {gqa: {attention: {name: gqa, n_kv_heads: 2}}}"


# --- What the file may say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message", "cure"),
    [
        ("tune:", "settings are needed here (it is null)", "write settings below it"),
        ("tune: {}", "names no setting to search", "for example `train.lr: [3e-4, 1e-3, 3e-3]`"),
        ("tune: {lr: [1, 2]}", "'lr' is a setting of train", "write train.lr"),
        ("tune: {train: {lr: [1, 2]}}", "'train' is no setting to search", "`train.lr: [...]`"),
        ("tune: {train.lrr: [1, 2]}", "'train.lrr' is no setting of the recipe", "did you mean 'train.lr'?"),
        ("tune: {d_model: [1, 2]}", "'d_model' is no setting of the recipe", ""),
        ("tune: {train.lr: [1, 2], sampelr: grid}", "'sampelr' is no setting", "did you mean 'sampler'?"),
        ("tune: {train.lr: [1]}", "a list of at least two values is needed", "[3e-4, 1e-3, 3e-3]"),
        ("tune: {train.lr: 1e-3}", "a list of at least two values is needed", "[3e-4, 1e-3, 3e-3]"),
        ("tune: {train.lr: [1e-3, 0.001]}", "a value is given twice", "give each value once"),
        ("tune: {train.lr: [1e-3, fast]}", "a number is needed (it is 'fast')", "without quotes"),
        ("tune: {train.lr: [1e-3, -1]}", "must be more than 0", "above 0"),
        ("tune: {train.schedule: [cosine, cosin]}", "must be", "did you mean 'cosine'?"),
        ("tune: {train.lr: [1, 2], trials: 3}", "a grid tries all its values", "sampler: random"),
        ("tune: {train.lr: [1, 2], sampler: tpe}", "draws as many points as 'trials' says", "trials: 12"),
        ("tune: {train.lr: [1, 2], sampler: bayes}", "must be 'grid', 'random' or 'tpe'", "write grid"),
        ("tune: {train.lr: {low: 1, high: 2}}", "a grid has no range", "sampler: random"),
        ("tune: {train.lr: [1, 2], seeds: [0]}", "seed 0 is one of the experiment's own", "10000, 10001"),
        ("tune: {train.lr: [1, 2], seeds: [7, 7]}", "a seed is given twice", "once"),
        ("tune: {train.lr: [1, 2], seeds: 0}", "a count from 1 to 1000", ""),
        ("tune: {train.warmup_steps: [0, 100]}", "warmup_steps 100 is more than the 4 steps", "every variant"),
        ("tune: {train.batch_tokens: [64, 128]}", "a larger batch would train on more tokens", "train.tokens"),
        ("tune: {train.schedule: [constant, linear], train.final_lr: [0, 0.1]}", "train alike", "means something"),
        (f"{LR}\nvary: {{train.lr: [1, 2]}}", "is tuned and varied", "one of the two"),
        (f"{LR}\nvariants: {{a: {{train.lr: 1}}}}", "is tuned, and variant a sets it", "one of the two"),
        ("tune: {train.optimizer: [sgd, adam]}\nvariants: {a: {train: {optimizer: {eps: 1}}}}", "variant a sets", ""),
    ],
)
def test_a_search_that_cannot_be_is_refused_in_its_place(line: str, message: str, cure: str, refused: Refused) -> None:
    said = refused(line)
    fault, _, told = said.partition("\n")
    assert fault.startswith("tiny.yaml:5:")
    assert message in fault
    assert cure in told
    assert told.strip()


@pytest.mark.parametrize("name", sorted(search.UNFAIR.keys() & TrainSettings.model_fields.keys()))
def test_what_would_be_no_fair_search_is_refused(name: str, refused: Refused) -> None:
    """A longer training, another evaluation or a luckier seed has the lower loss, and says nothing of a recipe."""
    assert f"'train.{name}' is not tuned: {search.UNFAIR[name]}" in refused(f"tune: {{train.{name}: [1, 2]}}")


def test_too_many_points_are_refused(refused: Refused) -> None:
    assert "6 points to tune at are more than 5" in refused(f"{GQA}\n{LR}", max_trials=5)


def test_data_too_short_for_tuning_is_refused_by_the_plan(write: Write) -> None:
    write("data: {name: cycle, period: 16, train_tokens: 80, validation_tokens: 40}\n" + LR)
    done = CliRunner().invoke(main, ["plan", "tiny.yaml"])
    assert done.exit_code == 2
    assert "tuning, which holds out a part of the training split as well" in done.output


def test_a_sampler_needs_the_extra(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.importlib.util, "find_spec", lambda name: None)
    said = refused("tune: {train.lr: {low: 1e-4, high: 1e-2}, sampler: random, trials: 4}")
    assert "sampler random needs optuna, which is not installed" in said
    assert "pip install 'ablate[tune]'" in said


def test_the_command_line_changes_a_search(expand: Expand) -> None:
    found = expand(LR, "tune.train.lr=[0.5, 2]", "tune.seeds=3").search
    assert found is not None
    assert found.settings() == {"train.lr": [0.5, 2.0]}
    assert found.seeds == [10_000, 10_001, 10_002]


def test_seeds_of_a_count_keep_out_of_the_way(expand: Expand) -> None:
    found = expand(f"{LR}\nseeds: [3, 10000]").search
    assert found is not None
    assert found.seeds == [10_001, 10_002]


# --- A variant at a point ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "point"),
    [
        ("", {"train.lr": 3e-4}),
        ("", {"train.lr": 3e-4, "train.warmup_steps": 2}),
        ("train: {steps: 4, batch_tokens: 64, seq_len: 16, schedule: constant}", {"train.schedule": "linear"}),
        ("", {"train.schedule": "constant"}),
        ("", {"train.optimizer": "sgd"}),
        ("", {"train.optimizer.weight_decay": 0.0}),
        ("train: {tokens: 640, batch_tokens: 64, seq_len: 16}", {"train.batch_tokens": 128}),
        ("baseline: {preset: llama-7b, scale: tiny}", {"train.lr": 3e-4}),
        (
            "baseline: {d_model: 32, n_layers: 4, n_heads: 4, layers: [{every: 2, feed_forward: moe}]}",
            {"train.lr": 3e-4},
        ),
    ],
)
def test_a_tuned_variant_is_what_the_file_would_give(lines: str, point: Point, expand: Expand) -> None:
    """So its trials have the same ids, and what was trained without `tune` counts."""
    tuned = search.at(expand(lines).baseline, point)
    said = [f"{path}={value}" for path, value in point.items()]
    assert tuned.canonical == expand(lines, *said).baseline.canonical
    assert tuned.canonical != expand(lines).baseline.canonical


def test_tune_changes_no_identity_of_what_it_does_not_tune(expand: Expand) -> None:
    assert [each.canonical for each in expand(f"{GQA}\n{LR}").variants] == [
        each.canonical for each in expand(GQA).variants
    ]


def test_a_tuning_trial_sees_the_training_split_alone() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    whole = Corpus(tokens[:900], tokens[900:], 1000, "ab", 1.0, "numbers")
    part = whole.for_tuning()
    assert [*part.train, *part.validation] == [*range(900)]
    assert len(part.validation) == 100
    assert part.sha256 != whole.sha256
    other = Corpus(tokens[:900], tokens[900:], 1000, "cd", 1.0, "numbers").for_tuning()
    assert other.sha256 != part.sha256
    short = Corpus(tokens[:100], tokens[100:], 1000, "ab", 1.0, "numbers").for_tuning()
    assert len(short.validation) == 20, "at most a fifth"


def test_memory_is_reckoned_for_the_largest_step_that_tuning_may_try(expand: Expand) -> None:
    """A grid of batches may grow beyond its largest."""
    recipe = "train: {tokens: 1024, batch_tokens: 64, seq_len: 16}"
    small, large = (expand(recipe, f"train.batch_tokens={n}") for n in (64, 256))
    tuned = expand(f"{recipe}\ntune: {{train.batch_tokens: [32, 64, 128]}}")
    assert most_bytes(small, plan(small, timed=False)) < most_bytes(large, plan(large, timed=False))
    assert most_bytes(tuned, plan(tuned, timed=False)) == most_bytes(large, plan(large, timed=False))
    rate = expand(f"{recipe}\n{LR}")
    assert most_bytes(rate, plan(rate, timed=False)) == most_bytes(small, plan(small, timed=False))


# --- Which points, and which is best ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "end", "expected"),
    [
        ((1e-3, 3e-3), 3e-3, 9e-3),
        ((1e-3, 3e-3), 1e-3, 3.3e-4),
        ((3e-3, 1e-3, 3e-4), 3e-3, 9e-3),
        ((0.1, 0.2, 0.3), 0.3, 0.4),
        ((0.0, 0.1), 0.1, 0.2),
        ((0.0, 0.1), 0.0, -0.1),
        ((100, 200, 300), 300, 400),
        ((64, 128, 256), 256, 512),
        ((64, 128, 256), 64, 32),
    ],
)
def test_a_grid_grows_in_its_own_step(values: tuple[float, ...], end: float, expected: float) -> None:
    found = Listed(values).beyond(end)
    assert found == pytest.approx(expected)
    assert isinstance(found, int) == isinstance(values[0], int)


def _losses(best: Mapping[str, float]) -> search.Known:
    """Bowls, on a logarithmic scale, around the value given for each variant."""
    return lambda name, point: (math.log(point["train.lr"]) - math.log(best[name])) ** 2


GROWN = [0.001, 0.01, 0.1, 1.0]
GRID = Search({"train.lr": Listed((0.001, 0.01, 0.1))}, "grid", None, [1])


def _values(points: list[Point]) -> list[float]:
    return [point["train.lr"] for point in points]


def test_a_best_inside_the_grid_is_where_it_ends() -> None:
    points, grown = GRID.points(["a", "b"], _losses({"a": 0.01, "b": 0.02}), lambda _: True)
    assert {name: _values(each) for name, each in points.items()} == {"a": [0.001, 0.01, 0.1], "b": [0.001, 0.01, 0.1]}
    assert not grown.edges({"train.lr": 0.01})


def test_a_best_at_an_edge_grows_the_grid_for_all_and_only_once() -> None:
    points, grown = GRID.points(["a", "b"], _losses({"a": 0.01, "b": 1e9}), lambda _: True)
    assert {name: _values(each) for name, each in points.items()} == {"a": GROWN, "b": GROWN}
    assert grown.edges({"train.lr": 1.0}) == ["train.lr"]
    assert not grown.edges({"train.lr": 0.1})


def test_a_grid_grows_on_both_sides() -> None:
    points, _ = GRID.points(["a", "b"], _losses({"a": 1e-9, "b": 1e9}), lambda _: True)
    assert _values(points["a"]) == [0.001, 0.01, 0.1, 0.0001, 1.0]


def test_a_grid_does_not_grow_to_what_cannot_be_and_the_best_is_marked() -> None:
    points, grown = GRID.points(["a"], _losses({"a": 1e9}), lambda point: point["train.lr"] < 0.5)
    assert _values(points["a"]) == [0.001, 0.01, 0.1]
    assert grown.edges({"train.lr": 0.1}) == ["train.lr"]


def test_a_grid_grows_only_when_all_is_known() -> None:
    def known(name: str, point: Point) -> float | None:
        return None if (name, point["train.lr"]) == ("b", 0.001) else point["train.lr"]

    assert GRID.points(["a", "b"], known, lambda _: True)[1] == GRID


def test_words_have_no_edge() -> None:
    words = Search({"train.schedule": Listed(("cosine", "linear"))}, "grid", None, [1])
    points, _ = words.points(["a"], lambda _, point: float(len(point["train.schedule"])), lambda _: True)
    assert len(points["a"]) == 2
    assert not words.edges({"train.schedule": "cosine"})
    assert not Listed((True, False)).ends


def test_a_range_has_edges_too() -> None:
    axis = Range(1e-4, 1e-2, log=True, whole=False)
    assert axis.at_edge(1.1e-4)
    assert axis.at_edge(9e-3)
    assert not axis.at_edge(1e-3)


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([3.0, 2.0, 2.5], 1),
        ([math.inf, 2.0], 1),
        ([math.nan, 2.0, 1.0], 2),
        ([2.0, 2.0], 0),
        ([math.inf, math.nan, None], None),
        ([], None),
    ],
)
def test_the_best_is_the_lowest_finite_loss(losses: list[float | None], best: int | None) -> None:
    assert best_of(losses) == best


@pytest.mark.parametrize(
    ("losses", "mean"), [([1.0, 2.0], 1.5), ([1.0, math.inf], math.inf), ([1.0, None], None), ([None, math.nan], None)]
)
def test_the_mean_of_seeds(losses: list[float | None], mean: float | None) -> None:
    assert mean_loss(losses) == mean


def test_a_trial_that_came_to_nothing_leaves_no_mean() -> None:
    found = mean_loss([1.0, math.nan, math.inf])
    assert found is not None
    assert math.isnan(found)


# --- Samplers ---------------------------------------------------------------------------------------------------------


def _sampler(name: str, trials: int = 8) -> Search:
    pytest.importorskip("optuna")
    axes = {
        "train.lr": Range(1e-4, 1e-1, log=True, whole=False),
        "train.warmup_steps": Range(0, 4, log=False, whole=True),
        "train.schedule": Listed(("cosine", "linear")),
    }
    return Search(axes, name, trials, [1])


def test_at_random_all_variants_are_tried_at_the_same_points() -> None:
    found = _sampler("random")
    nothing, _ = found.points(["a", "b"], lambda *_: None, lambda _: True)
    assert nothing["a"] == nothing["b"]
    assert len(nothing["a"]) == 8
    assert all(
        1e-4 <= point["train.lr"] <= 1e-1 and isinstance(point["train.warmup_steps"], int) for point in nothing["a"]
    )
    assert found.points(["a"], _losses({"a": 0.01}), lambda _: True)[0]["a"] == nothing["a"]


def test_tpe_goes_on_from_the_losses_that_are_known() -> None:
    """Asked again with a part of them it asks for the same points: what was cut short goes on."""
    found, known = _sampler("tpe", 16), _losses({"a": 0.01})
    whole = found.points(["a"], known, lambda _: True)[0]["a"]
    assert len(whole) == 16
    for n in (0, 1, 12):
        some = found.points(
            ["a"], lambda name, point, n=n: known(name, point) if point in whole[:n] else None, lambda _: True
        )  # type: ignore[misc]
        assert some[0]["a"] == whole[: n + 1]


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_tpe_bears_what_diverges_and_fails(loss: float) -> None:
    found = _sampler("tpe", 14)
    points = found.points(["a"], lambda _, point: loss if point["train.lr"] > 1e-3 else 1.0, lambda _: True)[0]["a"]
    assert len(points) == 14


# --- What is stored ---------------------------------------------------------------------------------------------------


def _store(folder: Path, experiment: Experiment, losses: Mapping[str, float | str | None]) -> Tuning:
    """The search after its trials came to the losses given by the values of the one setting, or ended otherwise."""
    store = Store(folder, create=True)
    found = tuning(experiment, store, "cpu", 1)
    assert found is not None
    for name, candidates in found.candidates.items():
        for candidate in candidates:
            (value,) = candidate.point.values()
            loss = losses.get(f"{name} {value}", losses.get(str(value)))
            for trial in candidate.trials if loss is not None else []:
                row = {"trial_id": trial.trial_id, "variant": candidate.variant.name, "seed": trial.seed}
                row |= {"is_baseline": False, "is_for_tuning": True, "attempts": 1, "steps": 4}
                row |= {"status": loss} if isinstance(loss, str) else {"status": "ok", "val_loss": loss}
                store.write_trial(row, {}, {})
    after = tuning(experiment, store, "cpu", 1)
    assert after is not None
    return after


def test_the_choice_follows_from_the_rows(expand: Expand, tmp_path: Path) -> None:
    experiment = expand(f"{GQA}\n{LR}")
    losses = {"0.001": 3.0, "0.01": 2.0, "0.1": "diverged", "gqa 0.01": "crashed", "gqa 0.1": 2.5}
    before = _store(tmp_path, experiment, losses)
    assert not before.is_over, "the best of gqa is at the edge, so that the grid grows for both"
    assert not before.chosen
    assert [task.trial.variant.name for task in before.left(retry_failed=False)][::2] == [
        "baseline [train.lr=1.0]",
        "gqa [train.lr=1.0]",
    ]
    after = _store(tmp_path, experiment, {"1.0": 9.0})
    assert {name: each.point for name, each in after.chosen.items()} == {
        "baseline": {"train.lr": 0.01},
        "gqa": {"train.lr": 0.1},
    }
    assert [variant.settings.train.lr for variant in after.tuned().variants] == [0.01, 0.1]
    assert {len(each) for each in after.candidates.values()} == {4}, "as many points for each"
    assert after.facts()["outcomes"] == {"ok": 12, "diverged": 2, "crashed": 2}


def test_without_a_finite_loss_what_the_file_says_stands(expand: Expand, tmp_path: Path) -> None:
    found = _store(tmp_path, expand(LR), dict.fromkeys(("0.001", "0.01", "0.1"), "diverged"))
    assert found.is_over
    assert not found.chosen
    assert found.tuned().baseline.canonical == found.experiment.baseline.canonical


def test_an_interrupted_trial_is_not_the_end(expand: Expand, tmp_path: Path) -> None:
    found = _store(tmp_path, expand(LR), {"0.001": 3.0, "0.01": 2.0, "0.1": "interrupted"})
    assert not found.is_over
    assert len(found.left(retry_failed=False)) == 2


def test_tuning_rows_are_never_among_the_trials(expand: Expand, tmp_path: Path) -> None:
    found = _store(tmp_path, expand(LR), {"0.001": 3.0, "0.01": 2.0, "0.1": 2.5})
    loaded = Store(tmp_path).load()
    assert loaded.trials.empty, "also where no experiment.json says which they are"
    final = [trial.trial_id for trial in found.tuned().trials("cpu", 1)]
    entry = {"name": "baseline", "is_baseline": True, "trials": {"0": final[0]}}
    found.store.write_experiment({"variants": [entry], "invalid": [], "tuning": found.document()})
    found.store.write_trial({"trial_id": final[0], "variant": "baseline", "seed": 0, "status": "ok"}, {}, {})
    loaded = ablate.load(tmp_path)
    assert list(loaded.trials["trial_id"]) == final
    assert list(loaded.tuning["train.lr"]) == [0.001, 0.001, 0.01, 0.01, 0.1, 0.1]
    assert list(loaded.tuning["is_chosen"]) == [False, False, True, True, False, False]
    assert set(loaded.tuning["variant"]) == {"baseline"}
    assert found.store.mirrored() == [*final, *loaded.tuning["trial_id"]]


def test_runs_of_tuning_are_tagged() -> None:
    row = {**dict.fromkeys(TRIALS.names), "status": "ok", "seed": 1, "is_for_tuning": True, "attempts": 1}
    curves, profiles = (pa.Table.from_pylist([], schema=schema).to_pandas() for schema in (CURVES, PROFILES))
    content = run_content(row, curves, profiles, {}, {"name": "gqa [train.lr=1]"})
    assert content.tags["ablate.tuning"] == "true"
    assert "ablate.tuning" not in run_content(row | {"is_for_tuning": False}, curves, profiles, {}, {"name": "a"}).tags


# --- A whole run ------------------------------------------------------------------------------------------------------

WHOLE = """
name: tiny
baseline: {preset: llama, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 16}
variants: {gqa: {attention: {name: gqa, n_kv_heads: 1}}}
seeds: 1
data: {name: cycle, period: 11, train_tokens: 4000, validation_tokens: 500}
train: {steps: 4, batch_tokens: 32, lr: 1e-3, eval_every: 4, threads: 1, optimizer: sgd, grad_clip: null}
tune: {train.lr: [1e-3, 0.1, 1e30], seeds: 1}
"""


def _invoke(verb: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [verb, "tiny.yaml", "--device", "cpu", *arguments])


def test_a_run_tunes_chooses_and_goes_on_wherever_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(WHOLE, encoding="utf-8")
    assert "run it with --only train first" in _invoke("run", "--only", "profile").output

    with monkeypatch.context() as cut:
        whole = Run.carry_out
        cut.setattr(Run, "carry_out", lambda self, queue, received: whole(self, queue[:3], received))
        stopped = _invoke("run")
    assert stopped.exit_code == 1
    assert "tuning: 3 not run, 3 ok; 2 not run" in stopped.output, stopped.output
    report = Path("reports/tiny/report.md").read_text(encoding="utf-8")
    assert "**Settings are still being tuned: 3 of 6 tuning trials have ended." in report
    assert "tiny: tuning: 6 trials: 3 ok, 3 not run; 3 left, as far as is known by now" in _invoke("status").output

    done = _invoke("run")
    assert done.exit_code == 0, f"a setting at which training diverges is no failure: {done.output}"
    assert "6 trials so far, 3 to run" in done.output
    assert "chosen for gqa: train.lr=0.1" in done.output
    assert "tuning: 2 diverged, 4 ok; 2 ok; report" in done.output
    loaded = ablate.load("results/tiny")
    assert [*loaded.trials["variant"]] == ["baseline", "gqa"]
    assert [*loaded.tuning["status"]] == ["ok", "ok", "diverged"] * 2

    fixed = Experiment.from_file("tiny.yaml", ["train.lr=0.1"])
    assert [each.trial_id for each in fixed.trials("cpu", 1)] == [*loaded.trials["trial_id"]]
    again = _invoke("run")
    assert "all of them stored: nothing to train" in again.output
    assert again.exit_code == 0
    assert "tiny: tuning: 6 trials: 2 diverged, 4 ok; over" in _invoke("status").output
    assert "2 variants x 3 points x 1 seed = 6, 768 tokens; 6 of them stored" in _invoke("plan").output
    assert "## Tuning" in Path("reports/tiny/report.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "_mirror", lambda *_, **__: None)
    Path("tiny.yaml").write_text(WHOLE, encoding="utf-8")
    return tmp_path


def test_after_a_failure_in_tuning_fail_fast_begins_no_trial(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that was the last trial of the search, so that the choice is known: it is noted for the next run."""

    def fails(self: Run, queue: list[Task], received: list[int]) -> None:
        for task in queue:
            row = {"trial_id": task.trial.trial_id, "variant": "x", "seed": 1, "is_for_tuning": True, "steps": 4}
            ending = {"status": "crashed"} if task is queue[-1] else {"status": "ok", "val_loss": 1.0}
            self.store.write_trial(row | ending | {"attempts": 1}, {}, {})
        self.failed = True

    monkeypatch.setattr(Run, "carry_out", fails)
    done = _invoke("run", "--fail-fast", "--set", "tune={train.schedule: [constant, linear], seeds: 1}")
    assert done.exit_code == 1
    assert "tuning: 1 crashed, 3 ok; 2 not run" in done.output, done.output
    assert "chosen for" not in done.output
    assert Store(here / "results/tiny").experiment()["tuning"]["is_over"]


def test_what_another_run_has_tuned_meanwhile_is_what_is_noted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that is killed in between would leave a search that is not over beside results of what it led to."""
    ready = _Sweep._make_ready

    def other(self: _Sweep, trials: list[Trial], queue: list[Task]) -> None:
        ready(self, trials, queue)
        for trial in trials:
            row = {"trial_id": trial.trial_id, "variant": "x", "seed": 1, "is_for_tuning": True, "steps": 4}
            self.store.write_trial(row | {"status": "ok", "val_loss": 1.0, "attempts": 1}, {}, {})

    def killed(*_: object) -> None:
        raise SystemExit(137)

    monkeypatch.setattr(_Sweep, "_make_ready", other)
    monkeypatch.setattr(Run, "carry_out", killed)
    _invoke("run", "--set", "tune.train.schedule=[constant, linear]", "--set", "tune.train.lr=[1e-3, 0.1, 0.01]")
    stored = Store(here / "results/tiny").experiment()
    assert not stored["tuning"]["is_over"], "the best lies at an edge"
    _invoke("run", "--set", "tune.train.schedule=[constant, linear]", "--set", "tune.train.lr=[1e-3, 0.1, 0.01]")
    stored = Store(here / "results/tiny").experiment()
    assert stored["tuning"]["is_over"]
    assert all(each["trials"] for each in stored["variants"])


def _rows(run: Run, tasks: list[Task], status: str = "ok", **columns: Any) -> None:
    for task in tasks:
        trial = task.trial
        row = {"trial_id": trial.trial_id, "variant": trial.variant.name, "seed": trial.seed, "status": status}
        row |= {"is_for_tuning": trial.variant.is_for_tuning, "profile_id": trial.profile_id}
        run.store.write_trial(row | {"steps": 4, "val_loss": 1.0, "attempts": task.attempt} | columns, {}, {})


WORDS = ("--set", "tune={train.schedule: [constant, linear], seeds: 1}")


def test_what_another_run_gives_up_after_it_was_done_is_gone_on_with(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run tries again what failed here, and is interrupted, while this one does what is left."""
    queues: list[list[Task]] = []
    monkeypatch.setattr(Run, "carry_out", lambda self, queue, _: _rows(self, queue[:1], "crashed"))
    _invoke("run", *WORDS)
    (failed,) = Store(here / "results/tiny").look("trials").tables
    monkeypatch.setattr(Run, "carry_out", lambda self, queue, _: _gives_up(self, queue, queues, failed))
    done = _invoke("run", *WORDS)
    assert [failed] in [[task.trial.trial_id for task in queue] for queue in queues], done.output
    assert "tuning: 4 ok; 2 ok" in done.output
    assert done.exit_code == 0


def _gives_up(self: Run, queue: list[Task], queues: list[list[Task]], failed: str) -> None:
    _rows(self, queue)
    if not queues:
        others = next(t for t in self.experiment.trials("cpu", 1) if t.trial_id == failed)
        _rows(self, [Task(others, None, ("train",))], "interrupted", phase="train")
    queues.append(queue)


def test_what_was_just_done_in_vain_is_not_done_for_ever(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queues: list[list[Task]] = []

    def stopped(self: Run, queue: list[Task], received: list[int]) -> None:
        queues.append(queue)
        _rows(self, queue, "interrupted", phase="train")

    monkeypatch.setattr(Run, "carry_out", stopped)
    assert _invoke("run", *WORDS).exit_code == 1
    assert len(queues) == 1


def test_a_profile_alone_tunes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tuning trial failed, and what failed is to be done again."""
    queues: list[list[Task]] = []

    def first(self: Run, queue: list[Task], received: list[int]) -> None:
        queues.append(queue)
        _rows(self, queue[:1], "crashed")
        _rows(self, queue[1:])

    monkeypatch.setattr(Run, "carry_out", first)
    _invoke("run", *WORDS, "--only", "train")
    queues.clear()
    _invoke("run", *WORDS, "--only", "profile", "--retry-failed")
    assert [task.trial.variant.is_for_tuning for queue in queues for task in queue] == [False]


class _Told:
    """What a mirror is told."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def mirror(self, trial_id: str) -> None:
        self.ids.append(trial_id)

    def attach(self, folder: Path) -> None:
        pass

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_mlflow_learns_that_what_is_stored_is_what_tuning_led_to(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it was not known, the runs of these trials were marked as no part of the experiment."""
    monkeypatch.setattr(Run, "carry_out", lambda self, queue, _: _rows(self, queue))
    _invoke("run", "--set", "train.schedule=constant", "--set", "tune={train.lr: [0.1, 0.2], seeds: 1}")
    told = _Told()
    monkeypatch.setattr(sweep, "_mirror", lambda *_, **__: told)
    Store(here / "results/tiny").write_experiment({"variants": [], "invalid": []})
    for path in (here / "results/tiny/trials").iterdir():
        if Store(here / "results/tiny").trial(path.stem)["is_for_tuning"]:  # type: ignore[index]
            path.unlink()
    done = _invoke("run", "--set", "train.schedule=constant", "--set", "tune={train.lr: [0.1, 0.2], seeds: 1}")
    assert "nothing to train" in done.output, done.output
    assert told.ids == [*ablate.load("results/tiny").trials["trial_id"]]


def test_a_run_that_stops_while_tuning_keeps_which_variants_are_timed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = (*WORDS, "--set", "profile={repeats: 2, decode: null}")

    def fails(self: Run, queue: list[Task], received: list[int]) -> None:
        is_tuning = queue[0].trial.variant.is_for_tuning
        _rows(self, queue[:1], "crashed" if is_tuning else "ok")
        _rows(self, queue[1:])
        self.failed = is_tuning
        self._contrast()

    monkeypatch.setattr(Run, "carry_out", fails)
    _invoke("run", *timed)
    before = Store(here / "results/tiny").experiment()["timing"]
    done = _invoke("run", *timed, "--retry-failed", "--fail-fast")
    assert "1 crashed" in done.output, done.output
    assert Store(here / "results/tiny").experiment()["timing"] == before


def test_status_judges_claims_by_what_was_chosen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = ("--set", "claims=[baseline.val_loss < 5]", "--set", "seeds=4")
    monkeypatch.setattr(Run, "carry_out", lambda self, queue, _: _rows(self, queue))
    _invoke("run", *WORDS, *claims)
    status = json.loads(_invoke("status", *WORDS, *claims, "--json").output)
    plans = json.loads(_invoke("plan", *WORDS, *claims, "--json").output)
    assert [each["verdict"] for each in (*status["claims"], *plans["claims"])] == ["supported"] * 2


def test_a_point_that_is_drawn_again_is_tried_once(expand: Expand, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    experiment = expand("tune: {train.lr: [0.01, 0.1], sampler: random, trials: 6, seeds: 1}")
    begun = tuning(experiment, Store(tmp_path / "none", create=True), "cpu", 1)
    assert begun is not None
    assert len(begun.left(retry_failed=False)) == 2
    found = _store(tmp_path, experiment, {"0.01": 2.0, "0.1": 3.0})
    assert found.is_over
    found.store.write_experiment({"variants": [{"name": "baseline", "trials": {}}], "tuning": found.document()})
    loaded = ablate.load(tmp_path).tuning
    assert list(loaded[loaded["is_chosen"]]["train.lr"]) == [0.01]


# --- The report -------------------------------------------------------------------------------------------------------


def _results(losses: Mapping[str, list[float | str | None]], **document: Any) -> Results:
    """Results of a search over two learning rates with two seeds each; `losses` by variant, point after point."""
    rows, variants, tuned = [], [], {}
    for name, values in losses.items():
        ids = [f"{name}-{i}" for i in range(len(values))]
        for i, loss in enumerate(values):
            row = {"trial_id": ids[i], "variant": name, "seed": i % 2, "status": "ok", "is_for_tuning": True}
            row |= {"tokens": 1000, "flops_per_token": 10.0, "wall_seconds": 1.5}
            row |= {"status": loss} if isinstance(loss, str) else {"val_loss": loss}
            rows += [row] if loss is not None else []
        points = [
            {"point": {"train.lr": lr}, "is_added": False, "trials": {"0": ids[2 * i], "1": ids[2 * i + 1]}}
            for i, lr in enumerate((0.001, 0.1))
        ]
        tuned[name] = {"points": points, "chosen": 0, "edges": []}
        entry = {"name": name, "is_baseline": name == "baseline", "trials": {}, "config": {"vocab_size": 16}}
        variants.append(entry)
    search = {"settings": {"train.lr": [0.001, 0.1]}, "sampler": "grid", "seeds": [0, 1], "is_over": True}
    experiment = {"name": "demo", "variants": variants, "tuning": {**search, "variants": tuned, **document}}
    empty = [pa.Table.from_pylist([], schema=schema).to_pandas() for schema in (TRIALS, CURVES, PROFILES)]
    frame = pa.Table.from_pylist(rows, schema=TRIALS).to_pandas()
    return Results(Path("results/demo"), experiment, *empty, tuning=frame)


def _report(results: Results, folder: Path) -> str:
    return write_report(results, folder).read_text(encoding="utf-8")


def _row(report: str, name: str) -> list[str]:
    lines = report[report.index("## Tuning") :].splitlines()
    return [cell.strip() for cell in next(line for line in lines if line.startswith(f"| {name}")).split("|")][1:-1]


def test_sensitivity_is_the_mean_loss_above_the_best_with_no_loss_beyond_knowing_nothing(tmp_path: Path) -> None:
    """By hand: (2.0 + 2.4) / 2 - 2.0; and of one that diverges (2.0 + ln 16) / 2 - 2.0."""
    report = _report(_results({"baseline": [2.0, 2.0, 2.3, 2.5], "wild": [2.0, 2.0, 2.3, "diverged"]}), tmp_path)
    assert _row(report, "baseline")[:4] == ["baseline", "0.001", "2.0000 ± 0.0000", "0.2000"]
    assert _row(report, "wild")[3] == f"{(math.log(16) - 2.0) / 2:.4f}"
    assert _row(report, "baseline")[4:] == ["2", "4", "4,000", "1.2e+05", "6.00"]


def test_machines_are_told_of_a_search_in_full_precision(tmp_path: Path) -> None:
    _report(_results({"baseline": [2.0, 2.0, 2.3, 2.5], "wild": [2.0, 2.0, 2.3, "diverged"]}), tmp_path)
    steady, wild = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["tuning"]
    assert steady["chosen"] == {"train.lr": 0.001}
    assert steady["sensitivity"]["train.lr"] == pytest.approx(0.2)
    assert (steady["trials"], steady["tokens"], steady["seconds"]) == (4, 4000, 6.0)
    assert [each["losses"] for each in wild["points"]] == [[2.0, 2.0], [2.3, None]]
    assert wild["points"][1]["mean"] is None


def test_losses_beside_the_point_they_are_of(tmp_path: Path) -> None:
    report = _report(_results({"baseline": [2.0, 2.2, "diverged", "crashed"]}), tmp_path)
    (line,) = [line for line in report.splitlines() if "crashed, diverged" in line]
    assert [cell.strip() for cell in line.split("|")][1:-1] == ["baseline", "2.1000 ± 0.1414", "crashed, diverged"]
    assert "points without one cannot be chosen: baseline" in report
    assert (tmp_path / "plots/1-tuning.svg").read_bytes().startswith(b"<?xml")


def test_the_same_results_give_the_same_report(tmp_path: Path) -> None:
    found = _results({"baseline": [2.0, 2.2, 3.0, 3.0], "a|b": [2.0, 2.2, 3.0, 3.0]})
    first, second = (_report(found, tmp_path / each) for each in "ab")
    assert first == second
    assert (tmp_path / "a/plots/1-tuning.svg").read_bytes() == (tmp_path / "b/plots/1-tuning.svg").read_bytes()


def test_a_tuned_learning_rate_is_not_called_shared(tmp_path: Path) -> None:
    report = _report(_results({"baseline": [2.0] * 4, "other": [2.0] * 4}), tmp_path)
    assert "share one learning rate" not in report
    assert "Tuned for each variant: train.lr" in report


def test_edges_are_told(tmp_path: Path) -> None:
    found = _results({"baseline": [2.0] * 4, "other": [2.0] * 4})
    found.experiment["tuning"]["variants"]["other"]["edges"] = ["train.lr"]
    report = _report(found, tmp_path)
    assert "The best train.lr of other lies at the edge of what was tried" in report
    assert _row(report, "other")[1] == "0.001 (edge)"


def test_a_search_under_way_says_so(tmp_path: Path) -> None:
    found = _results({"baseline": [2.0, 2.0, None, None]}, is_over=False)
    found.experiment["counts"] = {"tuning_trials": 4, "trials": 3}
    found.experiment["tuning"]["variants"]["baseline"]["chosen"] = None
    report = _report(found, tmp_path)
    assert report.count("Settings are still being tuned: 2 of 4 tuning trials have ended.") == 2
    assert "Trials: 3 trials to come when tuning is over" in report
    assert "not finished" in report


def test_what_was_not_tuned_has_no_section(tmp_path: Path) -> None:
    found = _results({"baseline": [2.0] * 4})
    del found.experiment["tuning"]
    assert "uning" not in _report(found, tmp_path)
    assert isinstance(found.tuning, pd.DataFrame)

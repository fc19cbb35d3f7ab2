"""The largest batch and sequence that fit: the search against known thresholds, and real processes short of memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from references import Parent

import ablate
from ablate import attempt, capacity, child, plan
from ablate.capacity import FINEST, Answer, Largest, Notes, Tries, Try, largest
from ablate.cli import main
from ablate.experiment import Experiment
from ablate.job import CapacityJob
from ablate.plan import VariantPlan
from ablate.profiling import memory
from ablate.trial import Reporter

# --- The search -------------------------------------------------------------------------------------------------------


def sought(fit: int, start: int, most: int, slow: int = 10**9) -> tuple[Largest, list[int]]:
    """What a search finds where `fit` is the largest that fits, and `slow` the first that takes too long; its tries."""
    tried: list[int] = []

    def answer(n: int) -> Answer:
        tried.append(n)
        return "time" if slow <= n <= fit else "fits" if n <= fit else "memory"

    return largest(answer, start, most), tried


def test_from_one_it_doubles_and_then_halves_the_step() -> None:
    assert sought(100, 1, 10**6) == (Largest(96, "memory"), [1, 2, 4, 8, 16, 32, 64, 128, 96, 112, 104])
    assert sought(13, 1, 10**6)[0] == Largest(13, "memory"), "small values are exact"


def test_a_good_guess_takes_two_tries() -> None:
    assert sought(1050, 1000, 10**6) == (Largest(1000, "memory"), [1000, 1125])
    assert sought(980, 1000, 10**6) == (Largest(937, "memory"), [1000, 875, 937])


def test_nothing_fits_everything_fits_and_time_runs_out() -> None:
    assert sought(0, 40, 64)[0] == Largest(0, "memory")
    assert sought(10**6, 1, 50)[0] == Largest(50, "most")
    assert sought(10**6, 1, 10**6, slow=50) == (Largest(32, "time"), [1, 2, 4, 8, 16, 32, 64])
    assert sought(10**6, 60, 10**6, slow=50) == (Largest(39, "time"), [60, 53, 39])
    assert sought(10**6, 1, 10**6, slow=1)[0] == Largest(0, "time")


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 4000))
def test_any_threshold_is_found_to_one_part_in_eight(fit: int, start: int, most: int) -> None:
    found, tried = sought(fit, start, most)
    assert len(set(tried)) == len(tried) <= 30
    assert all(1 <= n <= most for n in tried)
    if found.limit == "most":
        assert found.value == most <= fit
        return
    value = found.value
    assert value <= fit < value + max(1, value // FINEST)
    assert value == 0 or value in tried
    assert any(fit < n <= value + max(1, value // FINEST) for n in tried), "what does not fit was met, near by"


# --- Real processes ---------------------------------------------------------------------------------------------------

TINY = """
name: tiny
baseline: {preset: llama, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 64}
variants:
  %s
seeds: 2
data: {name: random_tokens, vocab_size: 2048, train_tokens: 4000, validation_tokens: 500}
train: {steps: 2, batch_tokens: 64, threads: 1}
profile: {max_batch: true}
"""
WIDE = "wide: {feed_forward: {d_ff: 8192}}"
MEMORY = 100_000_000


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY % WIDE, encoding="utf-8")
    return Experiment.from_file(file)


def planned(experiment: Experiment, place: int = 0) -> VariantPlan:
    return plan.plan(experiment, timed=False)[place]


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(tmp_path / "tries.log")


def notes(folder: Path, memory_bytes: int = MEMORY) -> Notes:
    return Notes(folder / "notes.json", "cpu", "2", memory_bytes)


def tries(plan: VariantPlan, path: Path) -> Tries:
    return Tries(plan, "cpu", 1, Notes(path, "cpu", "2", MEMORY), str(path) + ".log", lambda: False, lambda size: None)


def test_a_run_finds_the_largest_that_fit_whatever_the_order(
    experiment: Experiment, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "available", lambda device, at_most: MEMORY)
    monkeypatch.setitem(capacity.MOST, "largest_length", 128)
    places = ["--results", str(tmp_path / "results"), "--reports", str(tmp_path / "reports")]
    whole = ["run", str(tmp_path / "tiny.yaml"), "--device", "cpu", "--only", "profile", "--workers", "2", *places]
    done = CliRunner().invoke(main, whole)
    assert done.exit_code == 0, done.output
    results = ablate.load(tmp_path / "results/tiny")
    found = results.trials.groupby("variant")["largest_batch"].unique()
    (narrow,), (wide,) = found["baseline"], found["wide"]
    assert 1 < wide < narrow
    assert set(results.trials["largest_batch_limit"]) == {"memory"}
    assert set(results.trials["largest_length"]) == {128}
    assert set(results.trials["largest_length_limit"]) == {"most"}
    told = (tmp_path / "reports/tiny/report.md").read_text(encoding="utf-8")
    assert "≥ 128" in told
    assert "### capacity" not in told

    for place, value in enumerate(map(int, (narrow, wide))):
        alone = tries(planned(experiment, place), tmp_path / "alone.json")
        assert alone.at(value, 64).answer == "fits"
        assert alone.at(value + max(1, value // FINEST), 64).answer == "memory"

    rows = results.profiles[results.profiles["phase"] == "capacity"]
    assert rows["trial_id"].nunique() == 4
    one = rows[rows["trial_id"] == rows["trial_id"].iloc[0]].pivot(
        index=["batch", "context"], columns="metric", values="value"
    )
    fits = one["fits"] == 1
    assert one.loc[fits, ["step_seconds", "step_memory_bytes"]].notna().all(axis=None)
    assert (one.loc[fits, "step_memory_bytes"] > 0).all()
    assert (one["memory_limit_bytes"] == MEMORY).all()


def test_where_not_even_the_model_fits_nothing_does(experiment: Experiment, log: str, tmp_path: Path) -> None:
    found = capacity.measure(planned(experiment), "cpu", 1, notes(tmp_path, 100_000), log)
    assert found.columns == {
        **{"largest_batch": 0, "largest_batch_limit": "memory"},
        **{"largest_length": 0, "largest_length_limit": "memory"},
    }
    assert found.lacking == {}


def ends(monkeypatch: pytest.MonkeyPatch, *outcome: str) -> None:
    ended = SimpleNamespace(columns={"limit_bytes": MEMORY})
    monkeypatch.setattr(capacity, "Child", lambda start, job: ended)
    monkeypatch.setattr(child, "attend", lambda running, stopped, anew: outcome)


def test_what_goes_wrong_otherwise_is_told_and_no_figure_given(
    experiment: Experiment, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, "crashed", "step", "KeyError: 'gone'")
    found = capacity.measure(planned(experiment), "cpu", 1, notes(tmp_path), log)
    assert found.columns == {}
    assert found.lacking["largest_batch"] == "a step of 1 x 64 tokens: KeyError: 'gone'"


def test_a_step_that_takes_too_long_is_no_lack_of_memory(
    experiment: Experiment, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, "timeout", "step", "stopped before it was done")
    found = capacity.measure(planned(experiment), "cpu", 1, notes(tmp_path), log)
    assert found.columns["largest_batch_limit"] == "time"


def test_a_try_is_ended_after_its_time(experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "LIMIT_SECONDS", 0.0)
    assert tries(planned(experiment), tmp_path / "notes.json").at(1, 64).answer == "time"


def test_a_search_that_was_cut_short_goes_on_where_it_was(
    experiment: Experiment, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with less memory kept back: all variants are sought under one limit, as long as that is there."""
    done: list[tuple[int, int]] = []

    def attempt(self: Tries, sequences: int, length: int) -> Try:
        done.append((sequences, length))
        size = sequences * length
        return Try("fits" if size <= 4000 else "memory", 1e-3, 100 * size, 400_000)

    monkeypatch.setattr(Tries, "_try", attempt)
    whole = capacity.measure(planned(experiment), "cpu", 1, notes(tmp_path / "whole"), log)
    order = list(done)
    for cut in range(len(order)):
        done.clear()
        some = partial(attempt_or_stop, attempt, iter(range(cut)))
        monkeypatch.setattr(Tries, "_try", lambda *given, some=some: some(*given))
        with pytest.raises(KeyboardInterrupt):
            capacity.measure(planned(experiment), "cpu", 1, notes(tmp_path / str(cut)), log)
        monkeypatch.setattr(Tries, "_try", attempt)
        again = notes(tmp_path / str(cut), MEMORY + 5)
        assert again.memory_bytes == (MEMORY if cut else MEMORY + 5)
        assert capacity.measure(planned(experiment), "cpu", 1, again, log) == whole
        assert done == order


def attempt_or_stop(attempt: Callable[..., Try], left: Iterator[int], *given: Any) -> Try:
    if next(left, None) is None:
        raise KeyboardInterrupt
    return attempt(*given)


@pytest.mark.parametrize(
    "changed",
    [{"device": "cuda"}, {"torch": "1"}, {"memory_bytes": MEMORY * 11 // 10}, {"tries": {"ab": [[1]]}}, {"tries": 3}],
)
def test_notes_that_do_not_hold_here_are_none(changed: dict[str, Any], tmp_path: Path) -> None:
    written = {"device": "cpu", "torch": "2", "memory_bytes": MEMORY, "tries": {"ab": [[1, 64, "fits", 1.0, 2, 3]]}}
    path = tmp_path / "notes.json"
    path.write_text(json.dumps(written), encoding="utf-8")
    assert Notes(path, "cpu", "2", MEMORY).known("ab") == {(1, 64): Try("fits", 1.0, 2, 3)}
    path.write_text(json.dumps(written | changed), encoding="utf-8")
    assert Notes(path, "cpu", "2", MEMORY).known("ab") == {}


def test_a_little_less_memory_than_before_loses_no_try(tmp_path: Path) -> None:
    """What a machine has available moves from one run to the next, and half of the time down."""
    notes(tmp_path).add("ab", 1, 64, Try("fits", 1.0, 2, 3))
    assert notes(tmp_path, MEMORY - MEMORY // 25).known("ab") == {(1, 64): Try("fits", 1.0, 2, 3)}
    assert notes(tmp_path, MEMORY - MEMORY // 25).memory_bytes == MEMORY, "one limit for all variants"
    assert notes(tmp_path, MEMORY - MEMORY // 10).known("ab") == {}


# --- One try ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["position: learned", "family: encoder, position: learned", "family: encoder_decoder, position: learned"]
)
def test_a_step_is_longer_than_the_model_that_the_file_asks_for(
    model: str, tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "limit", lambda device, at_most: at_most)
    file = tmp_path / "tiny.yaml"
    file.write_text((TINY % WIDE).replace("preset: llama", model), encoding="utf-8")
    settings = Experiment.from_file(file).baseline.plain
    parent = Parent()
    job = CapacityJob(settings, "cpu", 1, 3, 100, None, log, 60.0)
    assert attempt.attempt(job, Reporter(parent)).status == "ok"
    assert parent.columns["step_seconds"] > 0


def test_the_optimizer_has_its_state_before_the_step(experiment: Experiment) -> None:
    from ablate.model import build
    from ablate.train import Learner, state_of

    settings = experiment.baseline.settings
    learner = Learner.of(build(settings.model), settings.train)
    attempt.make_state(learner)
    assert state_of(learner.optimizer)[1] >= 2 * sum(4 * p.numel() for p in learner.parameters)
    assert all(p.grad is None for p in learner.parameters)


def test_a_gpu_is_limited_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (800, 1000))

    def set_fraction(share: float, device: Any = None) -> None:
        if device is not None and torch.device(device).index is None:
            raise ValueError("Expected a torch.device with a specified index or an integer")  # as torch does
        shares.append(share)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    assert memory.limit(torch.device("cuda"), None) == 800
    assert memory.limit(torch.device("cuda"), 500) == 500
    assert shares == [0.8, 0.5]

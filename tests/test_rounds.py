"""Interleaved repeats: the order, what is stored, what is done again, and what a planted slowness becomes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from click.testing import CliRunner
from conftest import Expand

import ablate
from ablate import child, rounds, sweep
from ablate.cli import main
from ablate.experiment import Experiment
from ablate.interleaved import Rounds
from ablate.interruption import signals
from ablate.job import TimingJob
from ablate.machine import Resources
from ablate.progress import Progress
from ablate.report import write_report
from ablate.report.evidence import records
from ablate.results import Store, load
from ablate.runner import Run
from ablate.tables import ResultsError

VARIANTS = """\
variants:
  narrow: {d_model: 16}
  deep: {n_layers: 2}
profile: {repeats: 2, decode: {batch: [2, 1], context: [8], new_tokens: 4}}
"""
SECONDS = {(32, 1): 0.010, (16, 1): 0.005, (32, 2): 0.020}
"""What a step takes, by width and depth."""

Ending = tuple[str, str | None, str | None]


class FakeChild:
    """Ends at once, with planted times, or as `ends` says of its number."""

    jobs: ClassVar[list[TimingJob]] = []
    environments: ClassVar[list[str]] = []
    ended: ClassVar[int] = 0
    where: ClassVar[dict[str, Any]] = {"other_load_cores": 0.2, "torch": "2.13.0", "device_name": "a CPU"}
    ends: ClassVar[Callable[[int], Ending]] = staticmethod(lambda number: ("ok", None, None))
    again = 1.0
    limit = None
    phase = "train"

    def __init__(self, start: Any, job: TimingJob) -> None:
        assert self.ended == len(self.jobs), "the member before it is still there"
        self.jobs.append(job)
        self.process = self
        model = job.settings["model"]
        took = SECONDS[model["d_model"], model["n_layers"]] * (1 + 0.001 * (len(self.jobs) % 3))
        took *= self.again if job.seed >= rounds.PARTNER_SEEDS else 1.0
        self.columns = {"values": {"step_seconds_p50": took}, "samples": {"step_seconds_p50": 100}, **self.where}
        self.environments.append(os.environ["OMP_NUM_THREADS"])
        self.outcome = FakeChild.ends(len(self.jobs))

    def is_alive(self) -> bool:
        return False

    def too_late(self) -> str | None:
        return None

    def listen(self) -> list[Any]:
        return []

    def end(self) -> Ending:
        FakeChild.ended += 1
        return self.outcome


class Silent:
    """Hears which member of which round is timed, and what a round gave."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, str]] = []

    def check(self, done: int, total: int) -> None:
        pass

    def time(self, number: int, total: int, label: str) -> None:
        self.heard.append((number, total, label))

    def timed(self, number: int, total: int, note: str) -> None:
        self.heard.append((number, total, note))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> type[FakeChild]:
    monkeypatch.setattr(rounds, "Child", FakeChild)
    monkeypatch.setattr(child, "warm_up", lambda *_: None)
    monkeypatch.setattr(FakeChild, "jobs", [])
    monkeypatch.setattr(FakeChild, "environments", [])
    monkeypatch.setattr(FakeChild, "ended", 0)
    return FakeChild


def stored(experiment: Experiment, folder: Path, **statuses: str) -> Store:
    """A store in which every trial has ended, all well but for those named."""
    store = Store(folder, create=True)
    for trial in experiment.trials("cpu", 1):
        name = trial.variant.name
        row = {"trial_id": trial.trial_id, "variant": name, "seed": trial.seed, "status": statuses.get(name, "ok")}
        row |= {"profile_id": trial.profile_id, "attempts": 1, "steps": 1}
        store.write_trial(row, {}, {})
    variants = [
        {"name": v.name, "is_baseline": v.is_baseline, "trials": {"0": t.trial_id}}
        for t in experiment.trials("cpu", 1)
        for v in [t.variant]
    ]
    store.write_experiment({"name": "tiny", "variants": variants, "invalid": []})
    return store


def carry_out(experiment: Experiment, store: Store, watcher: Any = None, **options: bool) -> Run:
    run = Run(experiment, [], store, Resources("cpu", 1, 1), watcher or Silent(), lambda trial: None, **options)
    with signals() as received:
        run.carry_out([], received)
    return run


def repeats(store: Store) -> pd.DataFrame:
    return load(store.folder).repeats


# --- The order --------------------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_with_the_baseline_at_both_ends(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild]
) -> None:
    experiment, watcher = expand(VARIANTS), Silent()
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store, watcher)
    order = [(job.settings["model"]["d_model"], job.settings["model"]["n_layers"], job.seed) for job in fakes.jobs]
    assert order[:4] == [(32, 1, 0), (16, 1, 0), (32, 2, 0), (32, 1, 1_000_000)]
    assert order[4:] == [(32, 1, 1), (16, 1, 1), (32, 2, 1), (32, 1, 1_000_001)]
    assert {(job.device, job.threads) for job in fakes.jobs} == {("cpu", 1)}
    assert fakes.jobs[0].cells == {"decode": [2, 8, 4]}
    rows = repeats(store)
    assert list(rows["place"]) == list(range(1, 9))
    assert list(rows["variant"]) == ["baseline", "narrow", "deep", "baseline"] * 2
    assert list(rows["is_partner"]) == [False, False, False, True] * 2
    assert list(rows["round"]) == [0] * 4 + [1] * 4
    assert list(rows["seed"]) == [job.seed for job in fakes.jobs]
    assert rows["started_at"].is_monotonic_increasing
    assert set(rows["torch"]) == {"2.13.0"}
    assert set(rows["samples"]) == {100}
    assert len(list((store.folder / "repeats").iterdir())) == 2, "a file a round"
    assert [label for _, _, label in watcher.heard[:4]] == ["baseline", "narrow", "deep", "baseline again"]
    assert watcher.heard[4] == (1, 2, "baseline 10.01 ms  narrow 5.01 ms  deep 20 ms  baseline again 10.01 ms")
    assert list((store.folder / "leases").iterdir()) == []


def test_a_variant_without_a_good_trial_is_not_timed(expand: Expand, tmp_path: Path, fakes: type[FakeChild]) -> None:
    experiment = expand(VARIANTS)
    store = stored(experiment, tmp_path / "r", narrow="diverged")
    carry_out(experiment, store)
    assert list(repeats(store)["variant"]) == ["baseline", "deep", "baseline"] * 2


def test_without_the_baseline_or_without_repeats_nothing_is_timed(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild]
) -> None:
    experiment = expand(VARIANTS)
    carry_out(experiment, stored(experiment, tmp_path / "r", baseline="oom"))
    none = expand(VARIANTS.replace("repeats: 2, ", ""))
    carry_out(none, stored(none, tmp_path / "s"))
    assert fakes.jobs == []
    assert "timing" not in Store(tmp_path / "s").experiment()


# --- Again ------------------------------------------------------------------------------------------------------------


def test_an_interrupted_round_is_measured_anew(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(number: int) -> Ending:
        if number == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return "ok", None, None

    experiment = expand(VARIANTS)
    store = stored(experiment, tmp_path / "r")
    monkeypatch.setattr(FakeChild, "ends", ends)
    carry_out(experiment, store)
    assert set(repeats(store)["round"]) == {0}
    assert len(fakes.jobs) == 6
    before = repeats(store)
    carry_out(experiment, store)
    assert [job.seed for job in fakes.jobs[6:]] == [1, 1, 1, 1_000_001], "all of the second round, nothing of the first"
    assert repeats(store)[:4].equals(before)
    carry_out(experiment, store)
    assert len(fakes.jobs) == 10


def test_a_torn_round_is_measured_anew(expand: Expand, tmp_path: Path, fakes: type[FakeChild]) -> None:
    experiment = expand(VARIANTS)
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store)
    torn = sorted((store.folder / "repeats").iterdir())[0]
    torn.write_bytes(torn.read_bytes()[:50])
    assert load(store.folder).skipped == [f"repeats/{torn.name}: torn, or not a Parquet file"]
    carry_out(experiment, store)
    assert [job.seed for job in fakes.jobs[8:]] == [0, 0, 0, 1_000_000]
    assert load(store.folder).skipped == []


def test_more_repeats_add_rounds_and_fewer_do_nothing(expand: Expand, tmp_path: Path, fakes: type[FakeChild]) -> None:
    experiment = expand(VARIANTS)
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store)
    more = expand(VARIANTS, "profile.repeats=3")
    assert more.trials("cpu", 1)[0].profile_id == experiment.trials("cpu", 1)[0].profile_id
    carry_out(more, store)
    assert [job.seed for job in fakes.jobs[8:]] == [2, 2, 2, 1_000_002]
    assert list(repeats(store)["place"]) == list(range(1, 13))
    carry_out(expand(VARIANTS, "profile.repeats=1"), store)
    assert len(fakes.jobs) == 12


@pytest.mark.parametrize("change", ["profile.decode.context=[4]", "variants.deep.n_layers=3", "train.threads=2"])
def test_another_contrast_is_measured_anew(
    change: str, expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECONDS, (32, 3), 0.03)
    first = expand(VARIANTS)
    store = stored(first, tmp_path / "r")
    carry_out(first, store)
    changed = expand(VARIANTS, change)
    carry_out(changed, stored(changed, tmp_path / "r"))
    assert len(fakes.jobs) == 16
    assert len(repeats(store)) == 8, "the old rounds stay, and are not compared with"
    carry_out(first, stored(first, tmp_path / "r"))
    assert len(fakes.jobs) == 16
    assert len(repeats(store)) == 8


def test_a_renamed_variant_keeps_its_rounds(expand: Expand, tmp_path: Path, fakes: type[FakeChild]) -> None:
    first = expand(VARIANTS)
    store = stored(first, tmp_path / "r")
    carry_out(first, store)
    renamed = expand(VARIANTS.replace("narrow", "slim"))
    carry_out(renamed, stored(renamed, tmp_path / "r"))
    assert len(fakes.jobs) == 8
    assert list(repeats(store)["variant"]) == ["baseline", "slim", "deep", "baseline"] * 2


@pytest.mark.parametrize("name", ["torch", "device_name", "gpu_uuid"])
def test_rounds_of_another_device_or_torch_are_measured_anew_and_not_pooled(
    name: str, expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = expand(VARIANTS)
    store = stored(first, tmp_path / "r")
    carry_out(first, store)
    monkeypatch.setattr(FakeChild, "where", FakeChild.where | {name: "another"})
    carry_out(first, store)
    assert len(fakes.jobs) == 8, "nothing is asked for, and nothing says that it is another"
    more = expand(VARIANTS, "profile.repeats=3")
    store = stored(more, tmp_path / "r")
    run = Run(more, [], store, Resources("cpu", 1, 1), Silent(), lambda trial: None, fail_fast=True)
    monkeypatch.setattr(FakeChild, "ends", lambda number: ("oom" if number == 9 else "ok", None, None))
    with signals() as received:
        run.carry_out([], received)
    pooled = Rounds.latest(records(repeats(store)))
    assert pooled.numbers == [2]
    assert pooled.rows[0]["status"] == "oom", "a member that failed belongs to its round"
    carry_out(more, store)
    assert [job.seed for job in fakes.jobs[12:]] == [0, 0, 0, 1_000_000, 1, 1, 1, 1_000_001]
    assert Rounds.latest(records(repeats(store))).numbers == [0, 1, 2]


def test_rounds_that_turn_out_to_be_of_another_device_follow_at_once(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = expand(VARIANTS)
    carry_out(first, stored(first, tmp_path / "r"))
    monkeypatch.setattr(FakeChild, "where", FakeChild.where | {"device_name": "another"})
    more = expand(VARIANTS, "profile.repeats=3")
    store = stored(more, tmp_path / "r")
    carry_out(more, store)
    assert [job.seed % 1_000_000 for job in fakes.jobs[8:]] == [2] * 4 + [0] * 4 + [1] * 4
    assert set(repeats(store)["device_name"]) == {"another"}


def test_a_member_has_its_own_threads(expand: Expand, tmp_path: Path, fakes: type[FakeChild]) -> None:
    experiment = expand(VARIANTS, "train.threads=3", "profile.repeats=1")
    carry_out(experiment, stored(experiment, tmp_path / "r"))
    assert {job.threads for job in fakes.jobs} == {3}
    assert set(fakes.environments) == {"3"}


# --- What fails -------------------------------------------------------------------------------------------------------


def second_fails(number: int) -> Ending:
    return ("killed", "train", "signal 9") if number == 2 else ("ok", None, None)


def test_a_member_that_fails_is_a_row_and_the_others_go_on(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeChild, "ends", second_fails)
    experiment = expand(VARIANTS)
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store)
    rows = repeats(store)
    assert list(rows["status"]) == ["ok", "killed", *["ok"] * 6]
    lost = rows.iloc[1]
    assert (lost["variant"], lost["reason"]) == ("narrow", "train: signal 9")
    assert pd.isna(lost["value"])
    assert pd.isna(lost["metric"])
    carry_out(experiment, store)
    assert len(fakes.jobs) == 8, "what failed is not repeated unless asked for"
    carry_out(experiment, store, retry_failed=True)
    assert [job.seed for job in fakes.jobs[8:]] == [0, 0, 0, 1_000_000]
    assert set(repeats(store)["status"]) == {"ok"}


def test_a_round_that_fails_is_an_exit_status(
    expand: Expand, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_mirror", lambda *_, **__: None)
    stored(expand(VARIANTS, "train.threads=1"), Path("results/tiny"))
    command = ["tiny.yaml", "--device", "cpu", "--set", "train.threads=1"]
    assert "rounds of timing" not in CliRunner().invoke(main, ["run", *command, "--only", "train"]).output
    assert "rounds of timing: 2 left" in CliRunner().invoke(main, ["status", *command]).output
    monkeypatch.setattr(FakeChild, "ends", second_fails)
    done = CliRunner().invoke(main, ["run", *command])
    assert "nothing to train, and 2 rounds of timing to run" in done.output
    assert "round   1 of 2  baseline 10.01 ms  narrow killed: train: signal 9" in done.output
    assert done.exit_code == 1
    assert "rounds of timing" not in CliRunner().invoke(main, ["status", *command]).output
    assert CliRunner().invoke(main, ["run", *command, "--retry-failed"]).exit_code == 0


def test_fail_fast_begins_no_further_round(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeChild, "ends", second_fails)
    experiment = expand(VARIANTS)
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store, fail_fast=True)
    assert set(repeats(store)["round"]) == {0}
    assert len(fakes.jobs) == 4


def test_what_never_ends_is_ended_after_the_time_of_a_trial(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[Any] = []

    def stop(self: FakeChild, outcome: Ending) -> None:
        self.outcome = outcome
        stops.append(outcome)

    monkeypatch.setattr(FakeChild, "is_alive", lambda self: not stops)
    monkeypatch.setattr(FakeChild, "too_late", lambda self: "still running after 7 s")
    monkeypatch.setattr(FakeChild, "stop", stop, raising=False)
    monkeypatch.setattr(FakeChild, "limit", 7.0)
    experiment = expand(VARIANTS, "profile.repeats=1", "train.max_seconds=7")
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store)
    assert fakes.jobs[0].limit == 7.0
    assert repeats(store).iloc[0]["status"] == "timeout"
    assert repeats(store).iloc[0]["reason"] == "train: still running after 7 s"


# --- Stored, and told -------------------------------------------------------------------------------------------------


def test_a_round_that_is_not_as_declared_is_not_stored(tmp_path: Path) -> None:
    store = Store(tmp_path, create=True)
    with pytest.raises(ResultsError, match="not a trial id"):
        store.write_round("../up", 0, {"metric": ["x"]})
    with pytest.raises(ResultsError, match="mettric"):
        store.write_round("a1", 0, {"mettric": ["x"]})
    whole = {"variant_id": ["a"], "variant": ["a"], "is_partner": [False], "place": [1], "status": ["ok"]}
    store.write_round("a1", 3, {"metric": ["x"], "value": [1.0], **whole})
    (tmp_path / "repeats/a1-3.parquet").rename(tmp_path / "repeats/a1-4.parquet")
    assert load(tmp_path).skipped == ["repeats/a1-4.parquet: is about another round than its name says"]


def test_a_planted_slowness_is_found(expand: Expand, tmp_path: Path, fakes: type[FakeChild]) -> None:
    experiment = expand(VARIANTS, "profile.repeats=3")
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store)
    text = write_report(load(store.folder), tmp_path / "report").read_text(encoding="utf-8")
    lines = {
        line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|") and " step " in line
    }
    assert "slower" in lines["deep"]
    assert "+100." in lines["deep"] or "+99." in lines["deep"]
    assert "faster" in lines["narrow"]


def test_a_baseline_that_differs_from_itself_withholds_verdicts(
    expand: Expand, tmp_path: Path, fakes: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeChild, "again", 1.1)
    experiment = expand(VARIANTS, "profile.repeats=3")
    store = stored(experiment, tmp_path / "r")
    carry_out(experiment, store)
    text = write_report(load(store.folder), tmp_path / "report").read_text(encoding="utf-8")
    assert "it differs from itself" in text
    assert not [line for line in text.splitlines() if line.startswith(("|", "- ")) and "slower" in line]


def test_plain_progress_tells_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    progress = Progress(Console(), 0)
    progress.time(1, 2, "baseline")
    progress.timed(1, 2, "baseline 10 ms")
    assert capsys.readouterr().out == "round   1 of 2  baseline 10 ms\n"


# --- With real processes ----------------------------------------------------------------------------------------------

SLEEPY = '''"""Multi-head attention that takes its time in training."""

import time

from ablate.attention import mha


class Config(mha.Config):
    def build(self, shape):
        module = super().build(shape)
        module.register_forward_pre_hook(lambda module, given: time.sleep(0.1 * module.training))
        return module
'''


def test_a_variant_that_sleeps_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sleepy.py").write_text(SLEEPY, encoding="utf-8")
    Path("tiny.yaml").write_text(
        "name: tiny\n"
        "baseline: {d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 16, attention: mha}\n"
        "variants:\n  sleepy: {attention: sleepy.py}\n"
        "data: {name: cycle, period: 16}\n"
        "train: {steps: 4, batch_tokens: 32, seq_len: 16, threads: 1, eval_every: 4}\n",
        encoding="utf-8",
    )
    command = ["run", "tiny.yaml", "--device", "cpu"]
    assert CliRunner().invoke(main, command).exit_code == 0
    asked = [*command, "--set", "profile.repeats=3"]
    status = CliRunner().invoke(main, ["status", *asked[1:]])
    assert "rounds of timing: 3 left" in status.output
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "nothing to train, and 3 rounds of timing to run" in done.output
    rows = ablate.load("results/tiny").repeats
    times = rows[(rows["metric"] == "step_seconds_p50") & ~rows["is_partner"]].groupby("variant")["value"].min()
    assert times["sleepy"] > 0.1, "what was planted"
    assert rows["other_load_cores"].notna().all()
    report = Path("reports/tiny/report.md").read_text(encoding="utf-8")
    assert "Order: baseline, sleepy, baseline again; 3 rounds" in report
    (line,) = [each for each in report.splitlines() if each.startswith("| sleepy") and " step " in each]
    assert any(said in line for said in ("slower", "withheld", "A/A too coarse"))  # as quiet as the machine is
    again = CliRunner().invoke(main, asked)
    assert again.output.startswith("tiny: 2 variants x 1 seed = 2 trials, all of them stored: nothing to train\n")


def test_decoding_is_timed_where_there_is_a_further_token(expand: Expand) -> None:
    (variant,) = expand(VARIANTS, "variants={}", "profile.decode.new_tokens=[1, 4]").variants
    assert rounds.contrast([variant], "cpu", 1).cells == {"decode": [2, 8, 4]}
    (variant,) = expand(VARIANTS, "variants={}", "profile.decode.new_tokens=1").variants
    assert rounds.contrast([variant], "cpu", 1).cells == {}


def test_a_time_of_nothing_is_none() -> None:
    row = {"variant": "a", "is_partner": False, "status": "ok", "metric": "step_seconds_p50", "round": 0}
    assert Rounds([{**row, "value": 0.0}, {**row, "round": 1, "value": 1.0}]).values("step", "a") == {1: 1.0}


def test_what_was_never_timed_has_no_verdict() -> None:
    row = {"status": "ok", "metric": "decode_seconds_per_token_p50", "value": 1.0}
    members = ({"variant": "a", "is_partner": False}, {"variant": "a", "is_partner": True})
    rows = [{**row, **member, "round": number} for member in members for number in range(3)]
    assert Rounds(rows).verdict("decode", "b") == "no common round"

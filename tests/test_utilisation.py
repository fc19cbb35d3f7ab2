"""FLOPs as counted, the peaks that a device is calibrated to, and the share of them that training used."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from references import SMALL, Parent

from ablate import calibration, cost
from ablate.job import Job, Peaks
from ablate.model import build
from ablate.profiling import calibrate, clock, flops, kept, utilisation
from ablate.settings import VariantSettings, resolved, typed
from ablate.trial import Reporter, perform

CPU = torch.device("cpu")
MODEL = SMALL | {"n_layers": 1}
TRAIN = {"steps": 8, "batch_tokens": 64, "seq_len": 32, "eval_tokens": 64}
DATA = {"name": "random_tokens", "vocab_size": 32, "train_tokens": 2000, "validation_tokens": 200}


def variant(**model: Any) -> VariantSettings:
    return resolved(typed({"model": MODEL | model, "train": TRAIN, "data": DATA, "profile": {}}))


def trained(peaks: Peaks, **model: Any) -> Parent:
    parent = Parent()
    job = Job(variant(**model).model_dump(mode="json"), 0, "cpu", 1, ("train",), "trial.log", peaks)
    perform(job, Reporter(parent), time.perf_counter())
    return parent


# --- FLOPs ------------------------------------------------------------------------------------------------------------

TOKENS = 32
LINEAR = 4 * 32 * 32 + 2 * 32 * 128 + 32 * 32  # queries, keys, values, output; up, down; head
ATTENTION = 2 * 32 * TOKENS  # products of a query with all keys, and of its weights with all values


def counted(**model: Any) -> flops.Counted:
    tokens = torch.randint(32, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    return flops.counted(build(variant(**model).model), {"input_ids": tokens}, 2 * TOKENS, "fp32")


def test_counted_flops_of_a_layer_are_those_on_paper() -> None:
    found = counted()
    assert found.forward == 2 * (LINEAR + ATTENTION)
    # Backward: two products for each of forward; the fused kernel computes its scores again and skips hidden keys.
    assert found.training == 3 * 2 * LINEAR + 3.5 * 2 * ATTENTION * (TOKENS + 1) / (2 * TOKENS)


def test_what_is_written_out_skips_nothing_and_computes_nothing_again() -> None:
    found = counted(attention={"name": "mha", "kernel": "math"})
    assert found.training == 3 * 2 * (LINEAR + ATTENTION)


def test_a_mask_skips_nothing() -> None:
    found = counted(attention={"name": "mha", "window": 4})
    assert found.training == 3 * 2 * LINEAR + 3.5 * 2 * ATTENTION


def test_counting_leaves_the_model_as_it_was() -> None:
    model = build(variant(norm="batch_norm", feed_forward="moe").model).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    flops.counted(model, {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)}, TOKENS, "bf16")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("promised", "wrong"), [(1000.0, False), (1009.0, False), (1011.0, True), (None, False)])
def test_one_percent_is_the_most_that_formula_and_count_may_differ(promised: float | None, wrong: bool) -> None:
    assert bool(flops.Counted(1000.0, 3000.0).disagreement(promised)) is wrong


def test_a_trial_tells_both_and_a_disagreement_makes_it_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = trained(Peaks())
    assert parent.outcome[0] == "ok"
    assert parent.columns["flops_per_token_counted"] == 2 * (LINEAR + ATTENTION)
    needed = 3 * cost.cost(variant().model, TOKENS).flops_per_token
    assert parent.columns["train_flops_per_token"] == needed
    assert parent.columns["train_flops_per_token_counted"] > needed

    real = flops.count_flops
    monkeypatch.setattr(flops, "count_flops", lambda work, **how: int(1.02 * real(work, **how)))
    status, _, reason = trained(Peaks()).outcome
    assert status == "incomplete"
    assert "FLOPs a token are counted" in reason


# --- Utilisation ------------------------------------------------------------------------------------------------------


def test_utilisation_is_flops_by_peak() -> None:
    found = utilisation.columns(1e3, needed=6e6, executed=7e6, peak=1e10, datasheet=2e10)
    assert found == {"mfu": 0.6, "hfu": 0.7, "mfu_datasheet": 0.3, "matmul_peak_flops": 1e10}


def test_what_is_unknown_leaves_only_its_own_shares_unknown() -> None:
    assert utilisation.columns(1e3, 6e6, 7e6, None, 2e10) == {
        "mfu": None,
        "hfu": None,
        "mfu_datasheet": 0.3,
        "matmul_peak_flops": None,
    }
    assert utilisation.columns(1e3, None, 7e6, 1e10, None)["hfu"] == 0.7
    assert utilisation.columns(1e3, None, 7e6, 1e10, None)["mfu"] is None
    assert set(utilisation.columns(None, 6e6, 7e6, None, 2e10).values()) == {None}


def test_more_than_all_is_no_share() -> None:
    found = utilisation.columns(1e3, needed=6e6, executed=1.2e7, peak=1e10, datasheet=5e9)
    assert found == {"mfu": 0.6, "hfu": None, "mfu_datasheet": None, "matmul_peak_flops": 1e10}


def test_a_trial_s_utilisation_is_of_the_peak_of_its_precision() -> None:
    parent = trained(Peaks({"fp32": 1e12, "bf16": 9e12}))
    speed = parent.columns["train_tokens_per_second"]
    assert parent.outcome[0] == "ok"
    assert parent.columns["matmul_peak_flops"] == 1e12
    assert parent.columns["mfu"] == pytest.approx(parent.columns["train_flops_per_token"] * speed / 1e12)
    assert parent.columns["hfu"] == pytest.approx(parent.columns["train_flops_per_token_counted"] * speed / 1e12)
    assert parent.columns["mfu_datasheet"] is None, "no data sheet of a CPU"


def test_a_trial_that_is_faster_than_its_peak_is_kept_without_shares_of_it() -> None:
    parent = trained(Peaks({"fp32": 1.0}))
    assert parent.outcome[0] == "ok"
    assert parent.columns["matmul_peak_flops"] == 1.0
    assert parent.columns["mfu"] is None
    assert parent.columns["hfu"] is None


# --- Calibration ------------------------------------------------------------------------------------------------------


def ticking(costs: Callable[[int], float]) -> tuple[clock.Clock, Callable[[], None]]:
    """A clock, and a call that takes so long the n-th time."""
    now, calls = [0.0], [0]

    def call() -> None:
        now[0] += costs(calls[0])
        calls[0] += 1

    return clock.Clock(lambda: now[0], lambda a, b: b - a), call


def test_a_rate_is_that_of_the_best_round_and_its_first_call_is_not_in_it() -> None:
    slow = {0: 100.0, 3: 4.0}  # the first call of all, and a disturbed round
    steady, call = ticking(lambda n: slow.get(n, 2.0))
    found = calibrate.rate(call, 10.0, steady, seconds=1e9)
    assert (found.best, found.median) == (5.0, 5.0)
    steady, call = ticking(lambda n: 2.0 if n == 3 else 4.0)
    found = calibrate.rate(call, 10.0, steady, seconds=1e9)
    assert (found.best, found.median) == (5.0, 2.5)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 2), (0.07, 3), (1e9, calibrate.ROUNDS)])
def test_short_work_is_repeated_until_a_timer_can_see_it(seconds: float, rounds: int) -> None:
    count = [0]

    def costs(n: int) -> float:
        count[0] = n + 1
        return 0.01

    steady, call = ticking(costs)
    assert calibrate.rate(call, 1.0, steady, seconds).best == pytest.approx(100.0)
    assert count[0] == 2 + rounds * 3, "rounds of 0.03 s"


def test_the_peak_is_that_of_the_best_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SIZES", {"cpu": (2, 4, 8)})
    monkeypatch.setattr(calibrate, "LONGEST_SECONDS", 1e9)
    now = [0.0]
    speeds = {(2, 1): 1.0, (4, 1): 2.0, (4, 4): 10.0, (8, 1): 5.0}  # by size, and by how a row of the second lies

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        now[0] += 2 * len(a) ** 3 / speeds.get((len(a), b.stride(0)), 1.0)

    monkeypatch.setattr(torch, "mm", mm)
    steady = clock.Clock(lambda: now[0], lambda a, b: b - a)
    found = calibrate.matmul_peak(CPU, torch.float32, steady)
    assert (found["flops_per_second"], found["size"]) == (pytest.approx(10.0), 4)
    monkeypatch.setattr(calibrate, "LONGEST_SECONDS", 20.0)
    assert calibrate.matmul_peak(CPU, torch.float32, steady)["size"] == 2, "the next would take too long"


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "COPY_BYTES", {"cpu": 4000})
    monkeypatch.setattr(calibrate, "rate", lambda call, work, clock: calibrate.Rate(work, call().sum()))
    assert calibrate.copy_bytes_per_second(CPU, clock.clock_for(CPU)) == 2 * 4000


def test_a_gpu_s_copy_is_bounded_by_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80_000, 10**9))
    monkeypatch.setattr(torch, "zeros", lambda n, *, dtype, device: taken.append(n) or zeros(n, dtype=dtype))
    monkeypatch.setattr(calibrate, "rate", lambda call, work, clock: calibrate.Rate(work, work))
    assert calibrate.copy_bytes_per_second(torch.device("cuda"), clock.clock_for(CPU)) == 2 * 10_000
    assert taken == [2_500]


def test_a_timer_s_step_is_the_smallest_it_makes() -> None:
    marks = iter([0.0, 0.0, 3.0, 5.0, 5.0, 9.0])
    assert calibrate.timer_seconds(clock.Clock(lambda: next(marks), lambda a, b: b - a), readings=6) == 2.0
    assert calibrate.timer_seconds(clock.Clock(lambda: 1.0, lambda a, b: b - a), readings=6) is None


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Measuring takes no time here and is counted; the cache is empty."""
    count: list[int] = []

    def measure(device: torch.device) -> dict[str, Any]:
        count.append(1)
        product = {"flops_per_second": 5.0, "median_flops_per_second": 4.0, "size": 256}
        return {**calibrate.identity(device), "matmul": {"fp32": product}, "timer_seconds": 1e-7}

    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "measure", measure)
    return count


def test_a_machine_is_measured_once(measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = calibrate.calibrated(CPU, anew=False)
    assert calibrate.calibrated(CPU, anew=False).items() >= first.items()
    assert len(measured) == 1
    calibrate.calibrated(CPU, anew=True)
    assert len(measured) == 2
    (file,) = (tmp_path / "cache").iterdir()
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written.items() >= first.items()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert calibrate.calibrated(CPU, anew=False)["threads"] == 77
    assert len(measured) == 3


@pytest.fixture
def loads(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What other programs do while the machine is measured, time after time."""
    coming: list[float] = []
    quiet = calibrate.measure

    def measure(device: torch.device) -> dict[str, Any]:
        return {**quiet(device), "other_load_cores": coming.pop(0), "timer_seconds": 1e-9 * len(coming) + 1e-9}

    monkeypatch.setattr(calibrate, "measure", measure)
    return coming


def test_a_busy_machine_is_measured_again_and_the_calmest_time_kept(
    loads: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "REST_SECONDS", -1.0)
    loads += [1.5, 0.9, 1.2, 0.1]
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 1.5
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 0.9
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 0.9, "busier: the one before stays"
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 0.1
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 0.1
    assert loads == []


def test_a_machine_that_stays_busy_is_not_measured_for_each_run(loads: list[float]) -> None:
    loads += [1.5, 1.6, 1.7]
    for _ in range(3):
        assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 1.5
    assert loads == [1.6, 1.7]
    what = calibrate.identity(CPU)
    long_ago = {**(kept.read("calibration", what) or {}), "tried_at": "2026-01-01T00:00:00+00:00"}
    kept.write("calibration", what, long_ago)
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 1.5
    assert loads == [1.7], "after a while it is"
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 1.5
    assert loads == [1.7], "busier than before: that was a try, too"


def test_what_a_person_asks_for_is_shown_but_takes_no_calmer_one_s_place(loads: list[float]) -> None:
    loads += [0.0, 1.5]
    calibrate.calibrated(CPU, anew=True)
    assert calibrate.calibrated(CPU, anew=True)["other_load_cores"] == 1.5
    assert calibrate.calibrated(CPU, anew=False)["other_load_cores"] == 0.0


def test_a_gpu_s_peak_is_its_own_whatever_keeps_the_processor_busy() -> None:
    busy = {"device": "cuda", "matmul": {"bf16": {"flops_per_second": 5.0}}, "other_load_cores": 9.0, "lacking": {}}
    assert calibration.peaks_of(busy) == Peaks({"bf16": 5.0})
    assert calibration.lacking(busy) == {}


def test_nothing_is_held_against_what_was_measured_on_a_busy_machine() -> None:
    found = {"matmul": {"fp32": {"flops_per_second": 5.0}}, "copy_bytes_per_second": 3.0, "lacking": {"a": "b"}}
    assert calibration.peaks_of(found) == Peaks({"fp32": 5.0}, 3.0)
    assert calibration.lacking(found) == {"a": "b"}
    busy = {**found, "other_load_cores": 1.5}
    assert calibration.peaks_of(busy) == Peaks()
    assert set(calibration.lacking(busy)) == {"a", "mfu", "decode_bandwidth_share"}
    assert "1.5 cores" in calibration.lacking(busy)["mfu"]
    assert calibration.peaks_of(busy | {"cpus": 64, "threads": 60}) == Peaks({"fp32": 5.0}, 3.0), "four are spare"
    assert calibration.peaks_of(busy | {"cpus": 4, "threads": 4}) == Peaks()


WRONG = ("fast", -5, 0, math.nan, math.inf)


def test_a_broken_or_forbidden_cache_costs_a_measurement_and_no_more(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate.calibrated(CPU, anew=False)
    (file,) = (tmp_path / "cache").iterdir()
    whole = json.loads(file.read_text(encoding="utf-8"))
    product = whole["matmul"]["fp32"]
    peaks = (
        [],
        None,
        {"fp32": 5},
        {"fp32": {"size": 1}},
        *({"fp32": product | {"flops_per_second": each}} for each in WRONG),
    )
    wrong = [{"threads": 0}, {"timer_seconds": -1}, *({"matmul": each} for each in peaks)]
    for broken in ("{", "[]", "{}", "[" * 200_000, *(json.dumps(whole | each) for each in wrong)):
        before = len(measured)
        file.write_text(broken, encoding="utf-8")
        assert calibrate.calibrated(CPU, anew=False)["matmul"]
        assert len(measured) == before + 1, broken[:100]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file" / "below"))
    assert calibrate.calibrated(CPU, anew=False)["matmul"]


def test_a_child_calibrates_and_what_it_cannot_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found, why = calibration.calibrate("cpu", 1)
    assert why is None
    peaks = calibration.peaks_of(found | {"other_load_cores": 0.0})
    assert set(peaks.matmul_flops) == {"fp32", "bf16"}
    assert min(*peaks.matmul_flops.values(), peaks.copy_bytes_per_second or 0) > 1e6
    assert calibration.calibrate("cpu", 1, stopped=lambda: True) in [({}, "stopped before it was done"), (found, None)]
    assert calibration.peaks_of({}) == Peaks()
    assert calibration.calibrate("nonsense", 1)[0] == {}

"""Known answers, against scipy and by hand; and what never competes."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from ablate.metrics import METRICS, Metric, metric_of
from ablate.stats import finite, paired_difference, power_law, summarize, values_by_seed

LOSSES = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


def by_seed(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


def test_mean_and_sample_sd() -> None:
    summary = summarize([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (summary.mean, summary.n) == (5.0, 8)
    assert summary.sd == pytest.approx(math.sqrt(32 / 7))


def test_one_value_has_no_sd_and_none_has_no_mean() -> None:
    assert summarize([3.0]).sd is None
    assert summarize([]) == summarize(iter([]))
    assert summarize([]).mean is None


@given(LOSSES, LOSSES)
def test_interval_is_that_of_scipys_paired_t_test(variant: list[float], baseline: list[float]) -> None:
    n = min(len(variant), len(baseline))
    differences = np.subtract(variant[:n], baseline[:n])
    if np.std(differences, ddof=1) < 1e-6:
        return
    ours = paired_difference(by_seed(variant[:n]), by_seed(baseline[:n]), "lower")
    theirs = scipy.stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    assert ours.n == n
    assert ours.mean == pytest.approx(differences.mean(), rel=1e-6, abs=1e-9)
    assert ours.low == pytest.approx(theirs.low, rel=1e-6, abs=1e-9)
    assert ours.high == pytest.approx(theirs.high, rel=1e-6, abs=1e-9)


def test_interval_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, sd 1, t(2) = 4.3026527.
    found = paired_difference({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0}, "lower")
    assert found.low == pytest.approx(2 - 4.3026527 / math.sqrt(3))
    assert found.high == pytest.approx(2 + 4.3026527 / math.sqrt(3))
    assert found.verdict == "no clear difference"


@pytest.mark.parametrize(
    ("shift", "direction", "verdict"),
    [
        (-1.0, "lower", "better"),
        (1.0, "lower", "worse"),
        (-1.0, "higher", "worse"),
        (1.0, "higher", "better"),
        (1.0, None, "different"),
        (0.0, "lower", "no clear difference"),
        (0.0, None, "no clear difference"),
    ],
)
def test_verdict_follows_the_stated_direction(shift: float, direction: Any, verdict: str) -> None:
    baseline = {0: 2.0, 1: 2.1, 2: 1.9}
    variant = {seed: value + shift + 0.001 * (seed - 1) for seed, value in baseline.items()}
    assert paired_difference(variant, baseline, direction).verdict == verdict


def test_pairing_removes_what_a_seed_does_to_both() -> None:
    baseline = {0: 1.0, 1: 5.0, 2: 9.0}
    variant = {0: 0.9, 1: 4.91, 2: 8.89}
    assert paired_difference(variant, baseline, "lower").verdict == "better"


def test_a_single_seed_never_wins() -> None:
    found = paired_difference({0: 1.0, 1: 1.0}, {1: 100.0, 2: 100.0}, "lower")
    assert (found.mean, found.low, found.high, found.n, found.verdict) == (-99.0, None, None, 1, "single seed")
    assert not found.is_clear


def test_no_common_seed_is_said() -> None:
    assert paired_difference({0: 1.0}, {1: 1.0}, "lower").verdict == "no common seed"


@pytest.mark.parametrize("status", ["diverged", "oom", "incomplete", "decode_mismatch", "gate_failed", "interrupted"])
def test_only_ok_rows_compete(status: str) -> None:
    rows = [{"seed": 1, "status": status, "val_loss": 0.1}, {"seed": 0, "status": "ok", "val_loss": 2.0}]
    assert values_by_seed(rows, "val_loss") == {0: 2.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, True, "2.0"])
def test_only_finite_numbers_compete(value: Any) -> None:
    assert finite(value) is None
    assert values_by_seed([{"seed": 0, "status": "ok", "val_loss": value}], "val_loss") == {}


def test_large_whole_numbers_keep_their_digits() -> None:
    rows = [{"seed": 0, "status": "ok", "params_total": 2**60 + 1}]
    assert values_by_seed(rows, "params_total") == {0: 2**60 + 1}


# --- Growth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 1.0, 2.0, 2.5])
def test_an_exact_power_law_is_found(exponent: float) -> None:
    xs = [64, 128, 256, 512, 1024]
    law = power_law(xs, [3e-6 * x**exponent for x in xs])
    assert law is not None
    for found in (law.exponent, law.low, law.high, law.local):
        assert found == pytest.approx(exponent, abs=1e-10)
    assert law.factor == pytest.approx(3e-6)
    assert law.n == 5
    assert law.is_straight


@given(st.lists(st.floats(1e-9, 1e9), min_size=3, max_size=8))
def test_a_power_law_is_scipys_line_through_logarithms(ys: list[float]) -> None:
    xs = [100 * 1.7**n for n in range(len(ys))]
    law, line = power_law(xs, ys), scipy.stats.linregress(np.log(xs), np.log(ys))
    half = scipy.stats.t.ppf(0.975, len(ys) - 2) * line.stderr
    assert law is not None
    assert law.exponent == pytest.approx(line.slope, rel=1e-10, abs=1e-10)
    assert law.factor == pytest.approx(np.exp(line.intercept), rel=1e-9)
    if line.stderr > 1e-6:  # scipy's is of squares that cancel
        assert law.low == pytest.approx(line.slope - half, rel=1e-8, abs=1e-8)
        assert law.high == pytest.approx(line.slope + half, rel=1e-8, abs=1e-8)
    assert law.local == pytest.approx(np.log(ys[-1] / ys[-2]) / np.log(1.7), rel=1e-9, abs=1e-9)


def test_a_power_law_with_known_values() -> None:
    xs, ys = [128.0, 256.0, 512.0, 1024.0], [0.011, 0.021, 0.052, 0.172]
    law, line = power_law(xs, ys), scipy.stats.linregress(np.log(xs), np.log(ys))
    assert law is not None
    half = scipy.stats.t.ppf(0.975, 2) * line.stderr
    assert (law.exponent, law.low, law.high) == pytest.approx(
        (line.slope, line.slope - half, line.slope + half), rel=1e-10
    )
    assert law == power_law(reversed(xs), reversed(ys)), "whatever the order"


def test_the_longest_two_tell_a_bend() -> None:
    xs = [2.0**n for n in range(4, 12)]
    law = power_law(xs, [1000 + x**2 for x in xs])
    assert law is not None
    assert law.local > 1.9 > law.exponent
    assert not law.is_straight


def test_two_points_have_no_interval_and_fewer_no_law() -> None:
    law = power_law([1, 10], [1, 100])
    assert law is not None
    assert (law.exponent, law.low, law.high, law.n) == (pytest.approx(2.0), None, None, 2)
    assert law.is_straight
    for xs, ys in (
        ([], []),
        ([8], [1]),
        ([8, 8], [1, 2]),
        ([8, 16], [0, 1]),
        ([8, 16], [1, math.nan]),
        ([0, 8], [1, 1]),
    ):
        assert power_law(xs, ys) is None


def test_every_metric_states_its_direction() -> None:
    with pytest.raises(TypeError, match="direction"):
        Metric(column="x", label="x", unit="", noisy=True, scale=1, decimals=None)  # type: ignore[call-arg]
    assert METRICS["val_loss"].heading == "validation loss ↓ (nats/token)"
    assert METRICS["decode_tokens_per_second"].heading == "decode ↑ (tokens/s)"


def test_an_unknown_metric_has_no_direction() -> None:
    assert metric_of("accuracy_of_mine").direction is None
    assert metric_of("accuracy_of_mine").heading == "accuracy_of_mine"


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, ablate.report, ablate.stats;"
        "heavy = {'torch', 'mlflow', 'matplotlib', 'scipy', 'tabulate'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

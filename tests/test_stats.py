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

from ablate.metrics import METRICS, TIMED, Metric, metric_of
from ablate.stats import (
    Ratio,
    corrected,
    finite,
    paired_difference,
    paired_ratio,
    power_law,
    repeats_needed,
    smallest_visible,
    summarize,
    upper_sd,
    values_by_seed,
    visible_by_interval,
)

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


# --- Times, paired by round -------------------------------------------------------------------------------------------


def test_a_ratio_by_hand() -> None:
    # Log ratios ln 2, ln 2, ln 8: mean ln 2 + ln 4 / 3, sd ln 4 / √3, t(2) = 4.3026527.
    found = paired_ratio({0: 2.0, 1: 6.0, 2: 8.0, 3: 9.0}, {0: 1.0, 1: 3.0, 2: 1.0})
    mean, sd = math.log(2) + math.log(4) / 3, math.log(4) / math.sqrt(3)
    assert (found.n, found.verdict) == (3, "no clear difference")
    assert found.sd == pytest.approx(sd)
    assert found.mean == pytest.approx(math.exp(mean))
    assert found.low == pytest.approx(math.exp(mean - 4.3026527 * sd / math.sqrt(3)))
    assert found.high == pytest.approx(math.exp(mean + 4.3026527 * sd / math.sqrt(3)))


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, "slower"), (0.5, "faster"), (1.0, "no clear difference")])
def test_times_are_faster_or_slower(factor: float, verdict: str) -> None:
    baseline = {n: 1.0 + n for n in range(4)}
    found = paired_ratio({n: factor * each * (1 + 0.01 * (-1) ** n) for n, each in baseline.items()}, baseline)
    assert found.verdict == verdict
    assert found.is_clear == (verdict != "no clear difference")
    assert found.mean == pytest.approx(factor, rel=1e-3)


def test_one_round_gives_no_verdict_and_none_no_figure() -> None:
    one = paired_ratio({0: 3.0, 1: 1.0}, {0: 1.0, 2: 1.0})
    assert (one.mean, one.low, one.high, one.sd, one.n) == (pytest.approx(3.0), None, None, None, 1)
    assert not one.is_clear
    assert not one.holds_equality
    none = paired_ratio({0: 3.0}, {1: 1.0})
    assert (none.mean, none.n, none.verdict) == (None, 0, "no common round")


@pytest.mark.parametrize(("sd", "n"), [(0.01, 3), (0.05, 10), (0.3, 5)])
def test_what_can_be_seen_is_what_scipys_noncentral_t_finds(sd: float, n: int) -> None:
    shift = math.log1p(smallest_visible(sd, n)) * math.sqrt(n) / sd
    edge = scipy.stats.t.ppf(0.975, n - 1)
    assert scipy.stats.nct.sf(edge, n - 1, shift) == pytest.approx(0.9, abs=1e-4)


@pytest.mark.parametrize(
    ("low", "high", "is_beyond"),
    [(1.21, 2.0, True), (1.19, 2.0, False), (0.5, 0.83, True), (0.5, 0.84, False), (None, None, False)],
)
def test_the_whole_interval_lies_beyond_a_difference(low: float | None, high: float | None, is_beyond: bool) -> None:
    assert Ratio(1.5, low, high, 0.1, 3, "slower").is_beyond(0.2) == is_beyond


@pytest.mark.parametrize("n", [2, 3, 4, 10, 1000])
def test_what_an_interval_alone_says_to_be_visible_is_never_too_little(n: int) -> None:
    rest = paired_ratio({k: 1 + 0.01 * (k % 3) + 0.02 * (k == 1) for k in range(n)}, dict.fromkeys(range(n), 1.0))
    assert rest.low is not None
    assert rest.high is not None
    assert rest.visible is not None
    assert 1 <= visible_by_interval(rest.low, rest.high) / rest.visible < 1.1


def test_the_sd_is_planned_with_at_its_upper_bound() -> None:
    # Of 10 values: chi-squared(9) is below 5.3801 with probability 0.2.
    assert upper_sd(1.0, 10) == pytest.approx(math.sqrt(9 / 5.3801), rel=1e-4)
    assert upper_sd(0.02, 3) == pytest.approx(0.02 * math.sqrt(2 / scipy.stats.chi2.ppf(0.2, 2)))


def power(sd: float, n: int, difference: float) -> float:
    shift, edge = math.log1p(difference) * math.sqrt(n) / sd, scipy.stats.t.ppf(0.975, n - 1)
    return float(scipy.stats.nct.sf(edge, n - 1, shift) + scipy.stats.nct.cdf(-edge, n - 1, shift))


@pytest.mark.parametrize(
    ("sd", "n", "difference"), [(0.01, 10, 0.05), (0.03, 10, 0.05), (0.1, 4, 0.2), (0.002, 10, 0.01)]
)
def test_so_many_rounds_and_no_fewer_are_needed(sd: float, n: int, difference: float) -> None:
    needed = repeats_needed(sd, n, difference)
    assert needed is not None
    bound = upper_sd(sd, n)
    assert power(bound, needed, difference) >= 0.9
    assert needed == 2 or power(bound, needed - 1, difference) < 0.9


def test_where_a_thousand_rounds_are_too_few_none_are_recommended() -> None:
    assert repeats_needed(1.0, 10) is None
    assert repeats_needed(0.0, 10) == 2


def test_the_interval_of_equal_times_holds_equality_nineteen_times_in_twenty() -> None:
    rng = np.random.default_rng(4)
    noise = np.exp(rng.normal(0.0, 0.03, size=(2000, 2, 10)))
    held = [
        paired_ratio(dict(enumerate(again)), dict(enumerate(first))).holds_equality for first, again in noise.tolist()
    ]
    assert 0.935 <= np.mean(held) <= 0.965


def test_the_rounds_that_are_recommended_find_five_percent() -> None:
    """Of many machines with the same noise, each recommended so many rounds as its own A/A check of 10 says."""
    rng, found = np.random.default_rng(5), []
    for _ in range(400):
        check = paired_ratio(*(dict(enumerate(np.exp(rng.normal(0.0, 0.02, 10)).tolist())) for _ in range(2)))
        assert check.sd is not None
        n = repeats_needed(check.sd, check.n)
        assert n is not None
        slow, fast = (np.exp(rng.normal(shift, 0.02, n)).tolist() for shift in (math.log(1.05), 0.0))
        found.append(paired_ratio(dict(enumerate(slow)), dict(enumerate(fast))).verdict == "slower")
    assert np.mean(found) >= 0.85


def test_the_rounds_that_are_recommended_find_five_percent_among_six_contrasts() -> None:
    """Even where nothing else differs, so that Holm's first step is the one that decides."""
    rng, found = np.random.default_rng(6), []
    for _ in range(300):
        check = paired_ratio(*(dict(enumerate(np.exp(rng.normal(0.0, 0.02, 10)).tolist())) for _ in range(2)))
        assert check.sd is not None
        n = repeats_needed(check.sd, check.n, contrasts=6)
        assert n is not None
        base = dict(enumerate(np.exp(rng.normal(0.0, 0.02, n)).tolist()))
        shifts = [math.log(1.05), *[0.0] * 5]
        times = [dict(enumerate(np.exp(rng.normal(shift, 0.02, n)).tolist())) for shift in shifts]
        found.append(corrected({i: paired_ratio(each, base) for i, each in enumerate(times)})[0].verdict == "slower")
    assert np.mean(found) >= 0.85


def test_every_metric_states_its_direction() -> None:
    with pytest.raises(TypeError, match="direction"):
        Metric(column="x", label="x", unit="", timing=None, noisy=True, scale=1, decimals=None)  # type: ignore[call-arg]
    assert METRICS["val_loss"].heading == "validation loss ↓ (nats/token)"
    assert METRICS["decode_tokens_per_second"].heading == "decode ↑ (tokens/s)"


def test_an_unknown_metric_has_no_direction() -> None:
    assert metric_of("accuracy_of_mine").direction is None
    assert metric_of("accuracy_of_mine").heading == "accuracy_of_mine"


@pytest.mark.parametrize(
    ("column", "timing"),
    [
        ("train_tokens_per_second", "step"),
        ("backward_seconds_p50", "step"),
        ("mfu_datasheet", "step"),
        ("prefill_tokens_per_second", "prefill"),
        ("decode_seconds_per_token_p50", "decode"),
        ("wall_seconds", "other"),
        ("compile_seconds", "other"),
        ("val_loss", None),
        ("peak_rss_bytes", None),
        ("energy_joules_per_token", "other"),
        ("decode_energy_joules_per_token", "other"),
        ("kv_cache_bytes_per_token", None),
    ],
)
def test_what_is_a_timing(column: str, timing: str | None) -> None:
    assert METRICS[column].timing == timing
    assert all(METRICS[metric].timing == kind for kind, metric in TIMED.items())


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, ablate.report, ablate.stats;"
        "heavy = {'torch', 'mlflow', 'matplotlib', 'scipy', 'tabulate'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

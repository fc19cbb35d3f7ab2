"""Contrasts as a whole: against published figures and scipy, over simulated experiments, and in the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.stats
from aa_losses import Deal, Findings, contrasts_of, dealt
from test_report import NAN, Row, cell, entry, losses, plain_text, repeats, results, section, table_rows, trial

from ablate.interleaved import Rounds
from ablate.metrics import METRICS, Direction
from ablate.report import document
from ablate.report.comparison import LOSS, best
from ablate.report.evidence import Variant, contrasted, evidence_of
from ablate.stats import (
    ALPHA,
    MOST_REPEATS,
    Difference,
    by_rank,
    corrected,
    hedges_g,
    holm,
    paired_difference,
    power,
    resampled_interval,
    rounds_to_decide,
    seeds_needed,
    smallest_difference,
    upper_sd,
)

__all__ = ["plain_text"]

# Extra hours of sleep of ten patients by each of two drugs (Student 1908), R's data set `sleep`.
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def by_seed(values: Any) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


def sleep(direction: Direction | None = None) -> Difference:
    return paired_difference(by_seed(FIRST), by_seed(SECOND), direction)


# --- Against what others publish and compute --------------------------------------------------------------------------


def test_sleep_as_r_prints_it() -> None:
    # t.test(extra ~ group, data = sleep, paired = TRUE): t = -4.0621, df = 9, p-value = 0.002833
    found = sleep()
    assert found.p == pytest.approx(0.002833, abs=5e-7)
    assert (found.low, found.high) == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)
    assert found.mean == pytest.approx(-1.58)
    assert found.effect == pytest.approx(-1.17, abs=0.005)


def test_the_paired_test_is_scipys() -> None:
    rng = np.random.default_rng(1)
    for n in (2, 3, 5, 40):
        variant, baseline = rng.normal(0.3, 1, n), rng.normal(0, 1, n)
        found, theirs = paired_difference(by_seed(variant), by_seed(baseline), "lower"), scipy.stats.ttest_rel
        assert found.p == pytest.approx(theirs(variant, baseline).pvalue, abs=1e-10)
        interval = theirs(variant, baseline).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-10)


@pytest.mark.parametrize(
    ("ps", "adjusted"),  # statsmodels 0.15.0, multipletests(ps, method="holm")
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.0001, 0.05, 0.03, 0.03, 0.9, 0.012, 0.2], [0.0007, 0.15, 0.15, 0.15, 0.9, 0.072, 0.4]),
        ([1.0, 0.6], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holm_is_that_of_statsmodels(ps: list[float], adjusted: list[float]) -> None:
    assert holm(ps) == pytest.approx(adjusted, abs=1e-12)


def test_what_is_still_to_come_counts_as_a_contrast() -> None:
    assert holm([0.02, 0.01], pending=2) == holm([0.02, 0.01, 1.0, 1.0])[:2] == [0.06, 0.04]


def test_the_correction_for_few_seeds_by_hand() -> None:
    # Hedges (1981): c(m) = Γ(m/2) / (√(m/2) Γ((m - 1)/2)), so that c(2) = 1/√π, c(3) = √(π/6), c(4) = √(2/π).
    for degrees, factor in ((2, 1 / math.pi), (3, math.pi / 6), (4, 2 / math.pi)):
        assert hedges_g(1.0, 1.0, degrees + 1) == pytest.approx(math.sqrt(factor), abs=1e-12)
    assert hedges_g(1.0, 1.0, 2) is None
    assert hedges_g(1.0, 0.0, 5) is None
    assert hedges_g(-0.1, 2e-17, 3) is None, "rounding is no spread"


def test_power_is_that_of_published_examples() -> None:
    # The manual of G*Power 3.1, differences of matched pairs: dz = 0.421637, N = 50: power 0.832114.
    assert power(0.421637, 1.0, 50) == pytest.approx(0.832114, abs=5e-7)
    # R, power.t.test(delta = 0.5, power = 0.8, type = "one.sample"): n = 33.3672
    assert power(0.5, 1.0, 33) < 0.8 < power(0.5, 1.0, 34)


@pytest.mark.parametrize("level", [0.05, 0.05 / 4, 0.05 / 200])
@pytest.mark.parametrize(("effect", "n"), [(0.3, 5), (1.0, 5), (1.0, 26), (2.0, 3), (-1.5, 8), (40.0, 100)])
def test_power_is_scipys_noncentral_t(effect: float, n: int, level: float) -> None:
    edge, shift = scipy.stats.t.ppf(1 - level / 2, n - 1), abs(effect) * math.sqrt(n)
    above, below = (float(np.nan_to_num(scipy.stats.nct.cdf(side, n - 1, shift))) for side in (edge, -edge))
    assert power(effect, 1.0, n, level) == pytest.approx(1 - above + below, abs=1e-8)


@pytest.mark.parametrize("level", [0.05, 0.01, 0.05 / 200])
def test_the_smallest_difference_that_is_seen_has_that_power(level: float) -> None:
    for n in (3, 5, 20):
        assert power(smallest_difference(0.02, n, level), 0.02, n, level) == pytest.approx(0.9, abs=1e-4)


@pytest.mark.parametrize(("difference", "sd", "n", "level"), [(0.02, 0.02, 5, 0.05), (-0.01, 0.02, 3, 0.05 / 6)])
def test_so_many_seeds_and_no_fewer_decide(difference: float, sd: float, n: int, level: float) -> None:
    needed = seeds_needed(difference, sd, n, level)
    assert needed is not None
    bound = upper_sd(sd, n)
    assert power(difference, bound, needed - 1, level) < 0.9 <= power(difference, bound, needed, level)


def test_power_grows_with_every_seed_at_any_level() -> None:
    for level in (0.05, 0.05 / 200):
        values = [power(1.0, 1.0, n, level) for n in range(2, 200)]
        assert all(one <= other + 1e-9 for one, other in pairwise(values))


def test_further_seeds() -> None:
    unclear = paired_difference(by_seed([1.0, 3.0, 2.0, 0.0, 1.5]), by_seed([0.5, 2.0, 2.5, 0.0, 0.8]), "lower")
    total = seeds_needed(unclear.mean or 0, unclear.sd or 0, 5)
    assert total is not None
    assert unclear.further_seeds() == total - 5 > 0
    assert corrected(dict.fromkeys(range(9), unclear))[0].further_seeds() > total - 5  # type: ignore[operator]
    assert sleep("lower").further_seeds() == 0
    equal = paired_difference(by_seed([1.0, 2.0]), by_seed([2.0, 1.0]), "lower")
    assert not equal.is_same
    assert (equal.mean, equal.further_seeds()) == (0.0, None), f"more than {MOST_REPEATS}"
    assert paired_difference({0: 1.0}, {0: 2.0}, "lower").further_seeds() is None


def test_the_bootstrap_is_scipys_and_always_the_same() -> None:
    differences = np.subtract(FIRST, SECOND)
    theirs = scipy.stats.bootstrap((differences,), np.mean, random_state=np.random.default_rng(0)).confidence_interval
    assert resampled_interval(list(differences)) == (theirs.low, theirs.high)
    assert resampled_interval(list(differences[:9])) is None
    assert resampled_interval([0.5] * 12) is None


# --- Ranks of times ---------------------------------------------------------------------------------------------------


def test_ranks_as_r_prints_them() -> None:
    # wilcox.test(extra ~ group, data = sleep, exact = FALSE): W = 25.5, p-value = 0.06933
    found = by_rank({"a": (FIRST, SECOND)})["a"]
    assert (found.u, found.n) == (25.5, 10)
    assert found.p == pytest.approx(0.06933, abs=5e-6)
    assert found.verdict == "no clear difference"


def test_ranks_without_ties_are_scipys_exact_test_after_holm() -> None:
    rng = np.random.default_rng(3)
    pairs = {n: (list(rng.normal(0.8 * n, 1, 8)), list(rng.normal(0, 1, 8))) for n in range(3)}
    found = by_rank(pairs)
    exact = [scipy.stats.mannwhitneyu(*pairs[n], method="exact").pvalue for n in range(3)]
    assert [found[n].p for n in range(3)] == pytest.approx(exact, abs=1e-12)
    assert [found[n].adjusted for n in range(3)] == pytest.approx(holm(exact), abs=1e-12)


@pytest.mark.parametrize(("contrasts", "rounds"), [(1, 4), (2, 5), (6, 5), (7, 6), (100, 8)])
def test_with_fewer_rounds_no_order_of_times_says_anything(contrasts: int, rounds: int) -> None:
    def apart(n: int) -> set[str]:
        """One contrast as different as times can be, the others equal."""
        fast, slow = [1 + 0.01 * k for k in range(n)], [2 + 0.01 * k for k in range(n)]
        even, odd = [1 + 0.02 * k for k in range(n)], [1.01 + 0.02 * k for k in range(n)]
        found = by_rank({k: (slow, fast) if k == 0 else (even, odd) for k in range(contrasts)})
        return {found[0].verdict}

    assert rounds_to_decide(contrasts) == rounds
    assert apart(rounds) == {"slower"}
    assert apart(rounds - 1) == {"too few rounds"}


def test_equal_times_have_no_ranks() -> None:
    assert by_rank({"a": ([1.0] * 6, [1.0] * 6)})["a"].p == 1.0
    assert by_rank({"a": ([], [])}) == {}


def test_times_are_judged_after_holm_and_told_by_ranks(plain_text: Any) -> None:
    """A slowdown whose interval excludes equality, among ten others that are none."""
    noise = [0.0, 0.02, 0.01, 0.03, -0.01]
    equal = {f"v{k}": [1.0 + noise[(k + n) % 5] for n in range(5)] for k in range(10)}
    slow = [1.05, 1.07, 1.02, 1.09, 1.0]
    base = [1.0, 1.01, 0.99, 1.02, 0.98]
    rounds = Rounds(repeats("step", baseline=base, again=base, slow=slow, **equal))
    assert rounds.against_baseline("step", "slow").low > 1  # type: ignore[operator]
    assert rounds.verdict("step", "slow") == "no clear difference (after Holm)"
    alone = Rounds(repeats("step", baseline=base, again=base, slow=slow))
    assert alone.verdict("step", "slow") == "slower"
    names = ["baseline", "slow", *equal]
    text = plain_text(results([trial(name, 0, 2.5) for name in names], rounds=list(rounds.rows)))
    assert table_rows(text, "by ranks")["slow"]["by ranks, p after Holm"] == "too few rounds: 6 needed"
    assert "Holm over 11 contrasts" in section(text, "Speed, interleaved")


# --- Simulated experiments --------------------------------------------------------------------------------------------

NAMES = ("baseline", "a", "b", "c", "d", "e", "f")


def simulated(rng: np.random.Generator, seeds: int, noise: float = 0.01) -> list[Variant]:
    """Equal variants that share what a seed does to all, and have noise of their own; the baseline first."""
    shared, own = rng.normal(0, 0.05, seeds), rng.normal(2.5, noise, (len(NAMES), seeds))
    return contrasted([_simulated(name, values) for name, values in zip(NAMES, (own + shared).tolist(), strict=True)])


def _simulated(name: str, values: list[float]) -> Variant:
    rows = [trial(name, seed, value) for seed, value in enumerate(values)]
    trials = {str(row["seed"]): row["trial_id"] for row in rows}
    return Variant(
        name, name == "baseline", ("norm" if name > "c" else "attention",), {}, trials, {}, rows, frozenset()
    )


def test_equal_variants_are_declared_different_in_five_percent_of_experiments() -> None:
    rng, declared, uncorrected = np.random.default_rng(6), 0, 0
    for _ in range(200):
        baseline, *others = simulated(rng, seeds=5)
        found = [each.against(baseline, LOSS) for each in others]
        clear = any(each.is_clear for each in found)
        declared += clear
        uncorrected += any(each.p <= ALPHA for each in found if each.p is not None)
        tables = ([baseline, *(each for each in others if group in each.groups)] for group in ("attention", "norm"))
        assert clear or not any(best(each, LOSS) for each in tables), "bold is what is declared"
    most = scipy.stats.binom.ppf(0.975, 200, ALPHA)
    assert declared <= most < uncorrected


@pytest.mark.parametrize("planted", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("seeds", [5, 8])
def test_a_planted_difference_is_found_as_often_as_its_power_says(planted: float, seeds: int) -> None:
    """In units of the noise of a paired difference, beside five variants that are equal."""
    rng, times = np.random.default_rng(int(10 * planted) + seeds), 400
    noise = rng.normal(0, math.sqrt(0.5), (times, len(NAMES), seeds))
    noise[:, 1] -= planted
    found = 0
    for base, *others in noise.tolist():
        contrasts = {k: paired_difference(by_seed(each), by_seed(base), "lower") for k, each in enumerate(others)}
        found += corrected(contrasts)[0].verdict == "better"
    predicted = power(planted, 1.0, seeds, ALPHA / (len(NAMES) - 1))
    assert abs(found / times - predicted) < 0.1


def test_the_further_seeds_that_are_advised_decide() -> None:
    """Of experiments whose difference is not clear, so many seeds more find one as large with the promised power."""
    rng, powers = np.random.default_rng(9), []
    for _ in range(120):
        first = paired_difference(by_seed(rng.normal(-1.0, 1.0, 4)), by_seed([0.0] * 4), "lower")
        further = first.further_seeds()
        if further and first.mean:
            powers.append(power(first.mean, 1.0, 4 + further))
    assert len(powers) > 40
    assert np.mean([each >= 0.9 for each in powers]) > 0.75


# --- In the report ----------------------------------------------------------------------------------------------------


def contrasts_table(text: str) -> dict[str, dict[str, str]]:
    return table_rows(section(text, "Contrasts"), "p after Holm")


def many(count: int) -> dict[str, list[float]]:
    """So many variants that do not differ from the baseline of `BORDERLINE`."""
    return {f"v{k}": [2.5 + 0.01 * ((k + n) % 3 - 1) for n in range(5)] for k in range(count)}


BASE = [2.5] * 5
BORDERLINE = [2.48, 2.49, 2.47, 2.5, 2.46]
"""Better than `BASE` with p = 0.047."""


def test_what_is_clear_alone_is_not_among_many(plain_text: Any) -> None:
    alone = plain_text(results(losses(baseline=BASE, a=BORDERLINE)))
    assert contrasts_table(alone)["a"]["verdict"] == cell(alone, "a", "difference").rpartition("] ")[2] == "better"
    assert "**" in cell(alone, "a", "validation loss")
    assert "over 5 seeds: better;" in alone
    text = plain_text(results(losses(baseline=BASE, a=BORDERLINE, **many(4))))
    row = contrasts_table(text)["a"]
    after = "no clear difference (after Holm)"
    assert row["verdict"] == cell(text, "a", "difference").rpartition("] ")[2] == after
    assert "**" not in cell(text, "a", "validation loss")
    assert row["minus baseline, 95 % interval"] == contrasts_table(alone)["a"]["minus baseline, 95 % interval"]
    assert float(row["p after Holm"]) == pytest.approx(5 * float(contrasts_table(alone)["a"]["p after Holm"]), abs=5e-4)
    further = row["further seeds to decide"]
    assert int(further) > 0
    assert f"{after} ({further} further seeds would decide);" in section(text, "Summary")


def test_what_is_equal_with_every_seed_is_not_said_to_need_more_of_them(plain_text: Any) -> None:
    text = plain_text(results(losses(baseline=BASE, a=BASE)))
    row = contrasts_table(text)["a"]
    assert (row["verdict"], row["further seeds to decide"]) == ("no clear difference", "—")
    assert row["seen with 90 % probability from"] == "n/a", "no noise was seen"
    assert "no clear difference (equal with every seed);" in section(text, "Summary")


def test_machines_are_told_of_claims_and_contrasts_as_people_are() -> None:
    claims = [{"claim": "a.val_loss < baseline.val_loss"}, {"claim": "gone.val_loss < 1"}]
    evidence = evidence_of(results(losses(baseline=[2.0, 2.0, 2.0], a=[2.1, 2.2, 2.3]), claims=claims))
    told = json.loads(document.written(evidence, []))
    assert [each["verdict"] for each in told["claims"]] == ["inconclusive", "inconclusive"]
    assert told["claims"][0]["difference"] == pytest.approx(0.2)
    contrast = told["variants"][1]["to_baseline"]["val_loss"]
    assert contrast["effect"] == pytest.approx(1.1284, abs=1e-4)
    assert contrast["visible"] == pytest.approx(6.795612 * 0.1 / math.sqrt(3), abs=0.005)
    assert contrast["further_seeds"] == (seeds_needed(0.2, 0.1, 3) or 0) - 3


def test_a_row_by_hand(plain_text: Any) -> None:
    row = contrasts_table(plain_text(results(losses(baseline=[2.0, 2.0, 2.0], a=[2.1, 2.2, 2.3]))))["a"]
    # Differences .1, .2, .3: mean .2, sd .1; g_z = 2 c(2); t = 2 √3; 6.7956 is what nct(2) has below 4.3027 in a tenth.
    assert row["minus baseline, 95 % interval"] == "+0.2000 [-0.0484, +0.4484]"
    assert row["p after Holm"] == "0.0742"
    assert row["effect size g_z"] == "+1.13"
    assert row["seen with 90 % probability from"] == "0.39"
    assert float(row["seen with 90 % probability from"]) == pytest.approx(6.795612 * 0.1 / math.sqrt(3), abs=0.005)
    assert row["further seeds to decide"] == str((seeds_needed(0.2, 0.1, 3) or 0) - 3)
    assert row["seeds"] == "3"


def test_a_bootstrap_interval_stands_beside_from_ten_seeds_on(plain_text: Any) -> None:
    few = plain_text(results(losses(baseline=SECOND[:9], a=FIRST[:9])))
    assert "ootstrap" not in few
    text = plain_text(results(losses(baseline=SECOND, a=FIRST, b=FIRST[:5])))
    low, high = resampled_interval(list(np.subtract(FIRST, SECOND))) or (NAN, NAN)
    assert contrasts_table(text)["a"]["bootstrap, 95 %"] == f"[{low:+.4f}, {high:+.4f}]"
    assert contrasts_table(text)["b"]["bootstrap, 95 %"] == "—"


def test_a_contrast_that_is_still_to_come_counts(plain_text: Any) -> None:
    rows = losses(baseline=BASE, a=BORDERLINE)
    variants = [entry(name, range(5)) for name in ("baseline", "a", "b", "c")]
    text = plain_text(results(rows, variants))
    assert contrasts_table(text)["a"]["verdict"] == "no clear difference (after Holm)"
    assert "Holm over 3 contrasts, 2 of them still to come" in section(text, "Contrasts")
    assert contrasts_table(text)["b"]["verdict"] == "not finished"


def test_what_cannot_come_any_more_does_not_count(plain_text: Any) -> None:
    rows = losses(baseline=BASE, a=BORDERLINE, b=[NAN] * 5) + [trial("c", n, status="oom") for n in range(5)]
    table = contrasts_table(plain_text(results(rows)))
    assert [table[name]["verdict"] for name in "abc"] == ["better", "no finite loss", "OOM"]
    assert table["c"]["p after Holm"] == "n/a"


def test_the_baseline_wins_only_if_all_are_worse_after_holm(plain_text: Any) -> None:
    better = [2.5 - (each - 2.5) for each in BORDERLINE]
    text = plain_text(results(losses(baseline=BASE, a=better)))
    assert "**" in cell(text, "baseline", "validation loss")
    text = plain_text(results(losses(baseline=BASE, a=better, b=better)))
    assert "**" not in cell(text, "baseline", "validation loss")


def test_a_winner_beats_its_rivals_after_holm_too(plain_text: Any) -> None:
    """Far better than the baseline, and than each other by as much as one contrast alone would declare."""
    low = [each - 1 for each in BORDERLINE]
    text = plain_text(results(losses(baseline=BASE, a=low, b=[1.5] * 5)))
    assert "**" in cell(text, "a", "validation loss"), "the second of Holm's two steps asks for 5 %"
    text = plain_text(results(losses(baseline=BASE, a=low, b=[1.5] * 5, c=[1.5] * 5)))
    assert "**" not in cell(text, "a", "validation loss")


def test_one_seed_has_no_contrasts(plain_text: Any) -> None:
    assert "## Contrasts" not in plain_text(results(losses(baseline=[2.5], a=[2.4])))
    assert "## Contrasts" not in plain_text(results(losses(a=[2.5, 2.6], b=[2.4, 2.5])))


@pytest.mark.parametrize("column", ["val_bits_per_byte", "best_val_loss", "train_tokens_per_second", "peak_rss_bytes"])
def test_every_measured_number_is_one_of_all_contrasts(column: str) -> None:
    def rows() -> Iterator[Row]:
        for row in losses(baseline=BASE, a=BORDERLINE, **many(4)):
            yield {**row, "val_loss": None, column: round(1000 * row["val_loss"])}

    evidence = evidence_of(results(list(rows())))
    assert evidence.baseline is not None
    (found,) = [each for each in evidence.variants if each.name == "a"]
    forth, back = found.against(evidence.baseline, METRICS[column]), evidence.baseline.against(found, METRICS[column])
    assert forth.verdict == back.verdict == "no clear difference (after Holm)"
    assert (forth.mean, forth.low) == (-(back.mean or 0), -(back.high or 0))


# --- Real experiments, dealt out --------------------------------------------------------------------------------------


def test_no_two_variants_of_the_study_share_a_seed() -> None:
    deal = Deal(experiments=3, variants=2, seeds=4)
    places = [deal.place(seed) for seed in range(deal.total)]
    assert len(set(places)) == deal.total == 36
    assert places[0] == (0, "baseline", 0)
    assert places[-1] == (2, "equal-2", 3)


def test_the_study_judges_as_the_report_does() -> None:
    deal = Deal(experiments=2, variants=1, seeds=5)
    whole = results([trial("baseline", n, loss) for n, loss in enumerate([*BASE, *BASE, *BASE, *BORDERLINE])])
    equal, unequal = (contrasts_of(each) for each in dealt(whole, deal))
    assert (equal["equal-1"].verdict, unequal["equal-1"].verdict) == ("no clear difference", "better")
    found = Findings(deal, 40, 0, [equal, unequal])
    assert (found.declared, found.uncorrected, found.allowed, found.holds) == (1, 1, 1, True)
    assert not Findings(deal, 40, 1, [equal, unequal]).holds, "a trial is missing"
    assert not Findings(deal, 40, 0, [unequal, unequal]).holds
    assert "A difference was declared in 1 of 2 experiments" in found.page()

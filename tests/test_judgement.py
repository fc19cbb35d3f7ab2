"""Claims judged: what is supported, what is refuted, and what nobody can say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from test_report import entry, repeats, results, tables_of, text_of, trial

from ablate.claims import Figure, parse
from ablate.report.claims import section
from ablate.report.evidence import evidence_of
from ablate.report.judgement import Compared, Judgement, compared, judgements
from ablate.results import Results, nothing_stored

NAN = math.nan
Losses = dict[str, list[float]]


def stored(losses: Losses, *claims: str | dict[str, str], **document: Any) -> Results:
    """Variants with these losses by seed; a NaN is a trial that diverged."""
    rows = [
        trial(name, seed, loss, **({} if math.isfinite(loss) else {"status": "diverged"}))
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    variants = [entry(name, range(len(values))) for name, values in losses.items()]
    return results(rows, document.pop("variants", variants), claims=as_stored(claims), **document)


def as_stored(claims: Any) -> list[dict[str, str]]:
    return [{"claim": each} if isinstance(each, str) else each for each in claims]


def judged(found: Results) -> list[Judgement]:
    return judgements(evidence_of(found))


def verdict(losses: Losses, claim: str) -> str:
    return judged(stored(losses, claim))[0].verdict


# --- What is measured -------------------------------------------------------------------------------------------------

CLEAR: Losses = {"baseline": [2.50, 2.52, 2.51], "gqa": [2.40, 2.43, 2.41], "same": [2.51, 2.51, 2.51]}


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("gqa.val_loss < baseline.val_loss", "supported"),
        ("gqa.val_loss <= baseline.val_loss", "supported"),
        ("gqa.val_loss > baseline.val_loss", "refuted"),
        ("gqa.val_loss >= baseline.val_loss", "refuted"),
        ("gqa.val_loss == baseline.val_loss", "refuted"),
        ("baseline.val_loss - gqa.val_loss > 0.05", "supported"),
        ("baseline.val_loss - gqa.val_loss > 0.2", "refuted"),
        ("same.val_loss < baseline.val_loss", "inconclusive"),
        ("same.val_loss >= baseline.val_loss", "inconclusive"),
        ("same.val_loss == baseline.val_loss", "inconclusive"),
        ("abs(same.val_loss - baseline.val_loss) < 0.1", "supported"),
        ("abs(gqa.val_loss - baseline.val_loss) < 0.05", "refuted"),
        ("abs(gqa.val_loss - baseline.val_loss) > 0.05", "supported"),
        ("min(gqa.val_loss, same.val_loss) < 2.46", "supported"),
        ("max(gqa.val_loss, same.val_loss) < 2.45", "refuted"),
        ("gqa.val_loss / baseline.val_loss < 0.98", "supported"),
        ("gqa.val_loss < 1.01 * min(baseline.val_loss, same.val_loss)", "supported"),
        ("-abs(same.val_loss - baseline.val_loss) > -0.1", "supported"),
        ("1 / max(gqa.val_loss, baseline.val_loss) < 0.5", "supported"),
        ("abs(same.val_loss - baseline.val_loss) >= 0", "supported"),
        ("baseline.val_loss == baseline.val_loss", "supported"),
        ("baseline.val_loss < baseline.val_loss", "refuted"),
        ("baseline.val_loss / 3 * 3 <= baseline.val_loss", "supported"),
    ],
)
def test_verdicts(claim: str, said: str) -> None:
    assert verdict(CLEAR, claim) == said


VALUES = st.lists(st.floats(1, 4).map(lambda each: round(each, 3)), min_size=2, max_size=6)
PAIRS = st.tuples(VALUES, VALUES).map(lambda pair: [values[: min(map(len, pair))] for values in pair])


def said_of(losses: Losses, *sentences: str) -> list[Compared]:
    """By the values alone."""
    values = {Figure(name, "val_loss"): tuple(each) for name, each in losses.items()}
    return [compared(parse(each), values, exact=False) for each in sentences]


def words(losses: Losses, *sentences: str) -> list[str]:
    return [each.verdict for each in said_of(losses, *sentences)]


@given(PAIRS)
def test_the_interval_is_that_of_the_paired_t_test(pair: list[list[float]]) -> None:
    (found,) = said_of({"baseline": pair[0], "a": pair[1]}, "a.val_loss < baseline.val_loss")
    difference = np.subtract(pair[1], pair[0])
    assert found.difference.value == pytest.approx(difference.mean(), abs=1e-12)
    if difference.std() > 1e-9:
        half = scipy.special.stdtrit(len(difference) - 1, 0.975) * difference.std(ddof=1) / math.sqrt(len(difference))
        low, high = difference.mean() - half, difference.mean() + half
        assert (found.difference.low, found.difference.high) == pytest.approx((low, high), abs=1e-8)
        assert (found.verdict == "supported") == (high < 0)
        assert (found.verdict == "refuted") == (low >= 0)


def test_the_interval_is_that_of_r_on_the_sleep_data() -> None:
    """Student 1908, as `t.test(extra ~ group, paired = TRUE)` prints it: -2.4598858 to -0.7001142."""
    one, other = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0, 2], [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    (found,) = said_of({"a": one, "baseline": other}, "a.val_loss < baseline.val_loss")
    assert (found.difference.low, found.difference.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)


@given(PAIRS, st.sampled_from([1e-6, 0.5, 3, 1e6]))
def test_a_sentence_turned_around_is_judged_the_same(pair: list[list[float]], factor: float) -> None:
    losses = {"baseline": pair[0], "a": pair[1]}
    opposite = {"supported": "refuted", "refuted": "supported", "inconclusive": "inconclusive"}
    for sign, turned, not_so in (("<", ">", ">="), ("<=", ">=", ">")):
        (said,) = words(losses, f"a.val_loss {sign} baseline.val_loss")
        same = (
            f"baseline.val_loss {turned} a.val_loss",
            f"a.val_loss - baseline.val_loss {sign} 0",
            f"{factor:g} * a.val_loss {sign} baseline.val_loss * {factor:g}",
            f"max(a.val_loss, a.val_loss) {sign} baseline.val_loss",
        )
        assert words(losses, *same) == [said] * 4
        assert words(losses, f"a.val_loss {not_so} baseline.val_loss") == [opposite[said]]


@given(PAIRS, st.floats(0.001, 1))
def test_abs_is_two_sentences(pair: list[list[float]], margin: float) -> None:
    losses, difference = {"baseline": pair[0], "a": pair[1]}, "a.val_loss - baseline.val_loss"
    both = words(losses, f"{difference} < {margin!r}", f"-({difference}) < {margin!r}")
    (said,) = words(losses, f"abs({difference}) < {margin!r}")
    assert said == ("refuted" if "refuted" in both else "inconclusive" if "inconclusive" in both else "supported")


def test_equal_things_are_rarely_called_different() -> None:
    """Of 400 experiments in which nothing differs, at most as many as chance gives in one of a thousand such tests."""
    rng, wrong = np.random.default_rng(0), [0] * 4
    sentences = {
        "a.val_loss == baseline.val_loss": ("refuted", 0.05),
        "abs(a.val_loss - baseline.val_loss) > 0.0001": ("supported", 0.05),
        "max(a.val_loss, b.val_loss, c.val_loss) > baseline.val_loss + 0.0001": ("supported", 0.05),
        "a.val_loss < baseline.val_loss": ("supported", 0.025),
    }
    for _ in range(400):
        losses = {name: rng.normal(2.5, 0.02, 4).tolist() for name in ("baseline", "a", "b", "c")}
        for place, (said, (mistake, _)) in enumerate(zip(words(losses, *sentences), sentences.values(), strict=True)):
            wrong[place] += said == mistake
    most = [scipy.stats.binom.isf(0.001, 400, rate) for _, rate in sentences.values()]
    assert all(count <= bound for count, bound in zip(wrong, most, strict=True)), wrong


def test_so_many_further_seeds_decide() -> None:
    """The number that is told has at least the power, if difference and noise are as they looked."""
    found = judged(stored({"baseline": [2.5, 2.51, 2.49], "a": [2.48, 2.51, 2.45]}, "a.val_loss < baseline.val_loss"))[
        0
    ]
    assert found.verdict == "inconclusive"
    assert found.further is not None
    assert found.why == f"the interval holds zero; about {found.further} further seeds would decide"
    sd, mean, n = np.std([0.02, 0.0, 0.04], ddof=1), 0.02, 3 + found.further
    shift = mean / sd * math.sqrt(n)
    power = scipy.stats.nct.sf(scipy.stats.t.isf(0.025, n - 1), n - 1, shift)
    assert power >= 0.9
    equal = judged(stored({"baseline": [2.5, 2.52], "a": [2.52, 2.5]}, "a.val_loss < baseline.val_loss"))[0]
    assert equal.why == "the interval holds zero; more than 1,000 seeds would be needed to decide"
    both = judged(
        stored({"baseline": [2.5, 2.51, 2.49], "a": [2.48, 2.51, 2.45]}, "abs(a.val_loss - baseline.val_loss) < 0.06")
    )
    assert both[0].further is not None


def test_equality_of_what_is_measured_has_a_cure() -> None:
    assert "write abs(a - b) < margin" in judged(stored(CLEAR, "same.val_loss == baseline.val_loss"))[0].why


# --- What is missing --------------------------------------------------------------------------------------------------

MISSING: Losses = {"baseline": [2.5, 2.52, 2.51], "gqa": [2.4, NAN, 2.41], "gone": [NAN, NAN, NAN]}


def why(found: Results) -> str:
    (only,) = judged(found)
    assert only.verdict == "inconclusive"
    return only.why


def test_what_did_not_end_well_leaves_no_verdict_and_is_told() -> None:
    assert why(stored(MISSING, "gqa.val_loss < baseline.val_loss")) == "gqa: 1 diverged, 2 ok"
    assert why(stored(MISSING, "gone.val_loss < baseline.val_loss")) == "gone: 3 diverged"
    found = judged(stored(MISSING, "gqa.val_loss < baseline.val_loss"))[0]
    assert found.n == 2
    assert found.difference is not None, "what there is is shown"


def test_a_run_that_is_under_way_has_no_verdict_yet() -> None:
    rows = [trial("baseline", 0, 2.5), trial("baseline", 1, 2.5), trial("gqa", 0, 2.0)]
    variants = [entry("baseline", range(2)), entry("gqa", range(2))]
    found = results(rows, variants, claims=as_stored(["gqa.val_loss < baseline.val_loss"]))
    assert why(found) == "gqa: 1 not finished, 1 ok"


def test_a_single_seed_has_no_interval() -> None:
    assert (
        why(stored({"baseline": [2.5], "gqa": [2.0]}, "gqa.val_loss < baseline.val_loss"))
        == "a single seed has no interval"
    )


def test_a_figure_that_was_not_measured_is_told() -> None:
    assert why(stored(CLEAR, "gqa.peak_rss_bytes < 1")) == "gqa.peak_rss_bytes was not measured with seeds 0, 1, 2"
    assert why(stored(CLEAR, "gqa.kv_cache_bytes_measured < 1")) == "gqa.kv_cache_bytes_measured is not known (3 ok)"


def test_variants_that_are_not_there_any_more() -> None:
    invalid = [{"variant": "n_heads=3", "reason": "heads do not come out even"}]
    assert (
        why(stored(CLEAR, '"n_heads=3".val_loss < 3', invalid=invalid))
        == "n_heads=3 is invalid: heads do not come out even"
    )
    assert why(stored(CLEAR, "moe.val_loss < 3")) == "moe is none of the stored variants: run again"


def test_claims_that_cannot_be_read_any_more_do_not_stop_a_report() -> None:
    assert why(stored(CLEAR, "moe.val_loss ~ 3")).startswith("it cannot be read: no comparison at '~'")


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("gqa.val_loss / (gqa.params_total - baseline.params_total) < 3", "it divides by zero"),
        ("gqa.val_loss * 1e300 * 1e300 < 3", "it comes to no finite number"),
        (
            "abs(gqa.val_loss - 2) * (same.val_loss - baseline.val_loss) < 3",
            "a choice of abs, min or max is multiplied by, or divides, what is above and below zero",
        ),
    ],
)
def test_what_cannot_be_reckoned_is_told(claim: str, said: str) -> None:
    assert why(stored(CLEAR, claim)) == said


def test_losses_of_different_tasks_do_not_compare() -> None:
    variants = [entry("baseline", range(2), task="next token"), entry("bert", range(2), task="masked tokens")]
    losses = {"baseline": [2.5, 2.6], "bert": [1.0, 1.1]}
    found = stored(losses, "bert.val_loss < baseline.val_loss", variants=variants)
    assert why(found) == "losses of different tasks do not compare: masked tokens, next token"


def test_what_was_only_profiled_does_not_compare() -> None:
    rows = [trial("baseline", seed, 2.5, peak_rss_bytes=5) for seed in range(2)]
    rows += [trial("gqa", seed, steps=None, peak_rss_bytes=4) for seed in range(2)]
    claims = as_stored(["gqa.peak_rss_bytes < baseline.peak_rss_bytes", "gqa.val_loss < baseline.val_loss"])
    found = judged(results(rows, claims=claims))
    assert [each.why for each in found] == [
        "some trials were trained, and others only profiled",
        "gqa: 2 only profiled",
    ]


def test_different_profiles_do_not_compare() -> None:
    rows = [trial("baseline", 0, 2.5, profile_id="a", kv_cache_bytes_measured=8)]
    rows += [trial("gqa", 0, 2.5, profile_id="b", kv_cache_bytes_measured=4)]
    found = results(rows, claims=as_stored(["gqa.kv_cache_bytes_measured < baseline.kv_cache_bytes_measured"]))
    assert why(found) == "its variants were profiled in different ways"


# --- What is exact ----------------------------------------------------------------------------------------------------

EXACT = [
    trial("baseline", 0, 2.5, kv_cache_bytes_per_token=512, params_total=3000),
    trial("gqa", 0, 2.5, kv_cache_bytes_per_token=128, params_total=1000),
]


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("gqa.kv_cache_bytes_per_token == baseline.kv_cache_bytes_per_token / 4", "supported"),
        ("gqa.kv_cache_bytes_per_token == baseline.kv_cache_bytes_per_token / 4.0001", "refuted"),
        ("gqa.params_total == baseline.params_total / 3", "supported"),
        ("gqa.params_total * 0.1 * 3 <= baseline.params_total * 0.1", "supported"),
        ("gqa.params_total * 0.1 * 3 < baseline.params_total * 0.1", "refuted"),
        ("abs(gqa.params_total / baseline.params_total - 1) < 2 / 3", "refuted"),
        ("abs(gqa.params_total / baseline.params_total - 1) <= 2 / 3", "supported"),
        ("max(gqa.params_total, 2k, 1) == 2000", "supported"),
        ("min(gqa.params_total, -baseline.params_total) == -3k", "supported"),
        ("gqa.params_total + 1 > 1M / 1000", "supported"),
        ("baseline.params_total * 1.1 - gqa.params_total * 3.3 == 0", "supported"),
        ("0 < baseline.params_total * 1.1 - gqa.params_total * 3.3", "refuted"),
        ("gqa.params_total - baseline.params_total == -2000.001", "refuted"),
    ],
)
def test_what_is_exact_is_compared_as_it_is(claim: str, said: str) -> None:
    found = judged(results(EXACT, claims=as_stored([claim])))[0]
    assert (found.verdict, found.paired_by, found.n) == (said, "", 0)


def test_what_is_exact_is_known_before_the_run() -> None:
    variants = [entry("baseline", range(2), params_total=10), entry("gqa", range(2), params_total=9)]
    claims = as_stored(["gqa.params_total < baseline.params_total", "gqa.val_loss < baseline.val_loss"])
    found = judged(nothing_stored({"variants": variants, "claims": claims}))
    assert [each.verdict for each in found] == ["supported", "inconclusive"]
    assert found[1].why == "gqa: 2 not finished; baseline: 2 not finished"


def test_what_should_be_exact_and_differs_has_no_verdict() -> None:
    rows = [trial("baseline", seed, 2.5, kv_cache_bytes_measured=seed) for seed in range(2)]
    found = results(rows, claims=as_stored(["baseline.kv_cache_bytes_measured < 9"]))
    assert why(found) == "baseline.kv_cache_bytes_measured differs between trials"


def test_a_lower_bound_is_none() -> None:
    rows = [trial("baseline", 0, 2.5, largest_batch=8, largest_batch_limit="most")]
    found = results(rows, claims=as_stored(["baseline.largest_batch < 9"]))
    assert why(found) == "baseline.largest_batch is a lower bound: its search ended before memory did"
    rows[0]["largest_batch_limit"] = "memory"
    assert judged(results(rows, claims=as_stored(["baseline.largest_batch < 9"])))[0].verdict == "supported"


# --- Times ------------------------------------------------------------------------------------------------------------

STEP = "gqa.step_seconds_p50 < 0.9 * baseline.step_seconds_p50"


def timed(*claims: str, again: list[float], rounds: int = 3, **columns: Any) -> Results:
    rows = [
        trial(name, seed, 2.5, step_seconds_p50=0.1, train_tokens_per_second=9.0, **columns)
        for name in ("baseline", "gqa")
        for seed in range(3)
    ]
    found = repeats("step", baseline=[1.0, 1.02, 1.01], gqa=[0.71, 0.73, 0.72], again=again) if again else []
    return results(rows, rounds=found, claims=as_stored(claims), profile={"repeats": rounds if again else None})


def test_times_are_judged_by_rounds_that_stand() -> None:
    found = judged(timed(STEP, again=[1.01, 1.0, 1.02]))[0]
    assert (found.verdict, found.n, found.paired_by) == ("supported", 3, "round")
    assert found.left == pytest.approx(0.72)


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ([1.2, 1.23, 1.21], "the A/A check of step times shows a difference of the baseline from itself"),
        ([1.0], "the A/A check of step times has no interval"),
    ],
)
def test_times_have_no_verdict_where_the_baseline_is_not_itself(again: list[float], said: str) -> None:
    assert why(timed(STEP, again=again)).startswith(said)


def test_what_a_coarse_check_would_have_missed_decides_nothing() -> None:
    """Three rounds at this noise find 14 %."""
    again = [1.05, 1.0, 1.02]
    close = STEP.replace("0.9", "0.8")
    assert why(timed(close, again=again)).startswith("the A/A check is too coarse: it sees only +14")
    assert judged(timed(close, again=[1.01, 1.0, 1.02]))[0].verdict == "supported"
    for sentence, said in (("<", "supported"), (">", "refuted")):
        claim = f"gqa.step_seconds_p50 {sentence} baseline.step_seconds_p50"
        assert judged(timed(claim, again=again))[0].verdict == said
    assert evidence_of(timed(STEP, again=again)).rounds.against_itself("step").is_coarse


def test_rounds_that_are_still_to_come_leave_no_verdict() -> None:
    assert "gqa.step_seconds_p50 has 3 of 5 rounds" in why(timed(STEP, again=[1.01, 1.0, 1.02], rounds=5))


def test_speeds_of_trials_have_no_verdict_without_an_a_a_check() -> None:
    claim = "gqa.train_tokens_per_second > 1"
    for again in ([], [1.01, 1.0, 1.02]):
        assert why(timed(claim, again=again)).startswith("no A/A check stands behind train_tokens_per_second")
        assert "time step_seconds_p50" in why(timed(claim, again=again))
    assert why(timed("gqa.wall_seconds > 1", again=[])).endswith("interleaved repeats do not time it")
    assert "has values by seed" in why(timed("gqa.val_loss * gqa.step_seconds_p50 > 1", again=[1.01, 1.0, 1.02]))
    assert why(timed("gqa.decode_seconds_per_token_p50 > 1", again=[1.01, 1.0, 1.02])) != ""


def test_a_machine_that_checked_itself_vouches_for_training() -> None:
    checked: dict[str, Any] = {"aa_step_ratio_low": 0.99, "aa_step_ratio_high": 1.01, "trials_at_once": 1.0}
    assert judged(timed("gqa.train_tokens_per_second > 1", again=[], **checked))[0].verdict == "supported"
    assert judged(timed("gqa.wall_seconds > 1", again=[], **checked))[0].verdict == "inconclusive"


# --- The table --------------------------------------------------------------------------------------------------------

ODD = ("a|b `c` <d> & _e_", "1e5", "00012", "中文", 'says "no"', "gqa@params", "block=post_norm,train.lr=0.01")


def test_the_table_parses_whatever_the_names_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.report.plots_of", lambda *_: [])
    claims = ['"{}".val_loss < 9'.format(name.replace('"', '""')) for name in ODD]
    losses = {"baseline": [2.5, 2.6], **{name: [2.4, 2.5] for name in ODD}}
    text = text_of(
        stored(losses, *claims, {"claim": "baseline.val_loss < 9", "says": "1.20 | x", "source": "§ 2"}), tmp_path
    )
    part = text.split("## Claims\n")[1].split("\n## ")[0]
    assert text.index("## Summary") < text.index("## Claims") < text.index("## What ran")
    assert part.strip().startswith("8 claims: 8 supported.")
    head, *rows = tables_of(part)[0]
    assert head == ["claim", "verdict", "left", "right", "left - right, 95 % interval", "n", "a text says", "where"]
    assert [row[0] for row in rows] == [*claims, "baseline.val_loss < 9"]
    assert rows[-1][-2:] == ["1.20 | x", "§ 2"]
    assert {row[5] for row in rows} == {"2 seeds"}


def test_nothing_is_said_where_nothing_is_claimed() -> None:
    assert section(evidence_of(stored(CLEAR))) == ""


def test_reasons_stand_below_and_notes_say_what_concerns_them() -> None:
    text = section(evidence_of(stored(MISSING, "gqa.val_loss < 3", "gqa.params_total < 3k")))
    assert "2 claims: 1 supported, 1 inconclusive." in text
    assert "- gqa.val_loss &lt; 3: gqa: 1 diverged, 2 ok" in text
    assert "exact" in text
    assert "not corrected" not in text
    assert "not corrected for their number: of 2" in section(
        evidence_of(stored(CLEAR, "gqa.val_loss < 3", "gqa.val_loss > 3"))
    )

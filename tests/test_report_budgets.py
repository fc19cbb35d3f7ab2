"""What the report says of equal budgets, of orders that depend on them, and of how long variants trained."""

from __future__ import annotations

from typing import Any

from markdown_it import MarkdownIt

from ablate.report import budgets
from ablate.report.evidence import evidence_of
from tests.test_report import Row, entry, results, trial

SEEDS = range(3)
NOISE = (-0.001, 0.0, 0.001)


def matched(budget: str, before: int, after: int, mismatch: float = 0.001) -> dict[str, Any]:
    return {
        "matched": {
            "budget": budget,
            "by": "feed_forward.d_ff",
            "before": before,
            "after": after,
            "mismatch": mismatch,
            "goal": 1000,
        }
    }


def rows(**losses: float) -> list[Row]:
    return [
        trial(name.replace("_at_", "@"), seed, loss + NOISE[seed]) for name, loss in losses.items() for seed in SEEDS
    ]


def section(found: list[Row], variants: list[Row], **document: Any) -> str:
    return budgets.section(evidence_of(results(found, variants, **document)))


def two_budgets(losses: dict[str, float], wiggle: float = 0.0) -> str:
    """Variants `a` and `b` under two budgets, `b`'s loss going up and down over the seeds by so much more."""
    names = ["baseline", "a@params", "a@flops_per_token", "b@params", "b@flops_per_token"]
    found = [
        trial(name, seed, losses[name] + (wiggle * (-1) ** seed if name.startswith("b") else NOISE[seed]))
        for name in names
        for seed in SEEDS
    ]
    variants = [
        entry(name, SEEDS, **({} if name == "baseline" else matched(name.partition("@")[2], 64, 96))) for name in names
    ]
    match = [
        {
            **{"budget": budget, "column": column, "by": "feed_forward.d_ff", "tolerance": 0.01, "goal": 1000},
            "variants": {each: f"{each}@{budget}" for each in "ab"},
        }
        for budget, column in (("params", "params_total"), ("flops_per_token", "flops_per_token"))
    ]
    return section(found, variants, match=match)


ORDER = {"baseline": 3.0, "a@params": 2.5, "b@params": 2.6, "a@flops_per_token": 2.7, "b@flops_per_token": 2.4}


def test_without_a_budget_there_is_nothing_to_say() -> None:
    assert section(rows(baseline=3.0, a=2.9), [entry("baseline", SEEDS), entry("a", SEEDS)]) == ""
    assert section(rows(baseline=3.0), [entry("baseline", SEEDS, steps=10, train_tokens=100)]) == ""


def test_what_was_changed_and_what_remains_stand_in_a_table() -> None:
    match = [{"budget": "params", "column": "params_total", "by": "feed_forward.d_ff", "tolerance": 0.01, "goal": 1000}]
    variants = [entry("baseline", SEEDS), entry("a|b", SEEDS, **matched("params", 64, 1024, -0.0031))]
    said = section(rows(baseline=3.0), variants, match=[{**match[0], "variants": {"a|b": "a|b"}}])
    assert "brought to the baseline's params 1,000 by feed_forward.d_ff, within 1 %" in said
    html = MarkdownIt("commonmark").enable("table").render(said)
    (told,) = budgets.data(evidence_of(results(rows(baseline=3.0), variants)))
    assert (told["variant"], told["before"], told["after"], told["mismatch"]) == ("a|b", 64, 1024, -0.0031)
    cells = [cell.partition("<")[0] for cell in html.split("<td")[1:] for cell in [cell.partition(">")[2]]]
    assert cells == ["a|b", "params", "feed_forward.d_ff", "64", "1,024", "-0.31 %"]


def test_an_order_that_depends_on_the_budget_is_flagged() -> None:
    said = two_budgets(ORDER)
    assert "1 pair of variants changes places" in said
    assert "1 of them beyond the noise" in said
    assert "- a minus b: -0.1" in said
    assert "(better) and +0.3" in said
    assert said.count("**the order flips**") == 1


def test_a_flip_within_the_noise_is_called_so() -> None:
    said = two_budgets(ORDER, wiggle=0.5)
    assert "none of them beyond the noise" in said
    assert "**the order flips**" not in said
    assert "within the noise" in said


def test_an_order_that_stays_is_said_to() -> None:
    said = two_budgets({**ORDER, "b@flops_per_token": 2.8})
    assert "No two variants change places" in said


def test_a_variant_that_is_the_same_under_both_budgets_is_compared_in_both() -> None:
    """Merged, it has one name; against the others it may flip all the same."""
    names = ["baseline", "a@params", "b@params", "b@flops_per_token"]
    losses = {"baseline": 3.0, "a@params": 2.5, "b@params": 2.6, "b@flops_per_token": 2.4}
    found = [trial(name, seed, losses[name] + NOISE[seed] * (1 + (name[0] == "b"))) for name in names for seed in SEEDS]
    variants = [entry(name, SEEDS, **({} if name == "baseline" else matched("params", 64, 64))) for name in names]
    known = [
        {"a": "a@params", "b": "b@params"},
        {"a": "a@params", "b": "b@flops_per_token"},
    ]
    match = [
        {"budget": word, "column": column, "by": "n_layers", "tolerance": 0.01, "goal": 1000, "variants": own}
        for word, column, own in zip(
            ("params", "flops_per_token"), ("params_total", "flops_per_token"), known, strict=True
        )
    ]
    assert section(found, variants, match=match).count("**the order flips**") == 1


def test_steps_that_differ_stand_in_a_table() -> None:
    variants = [
        entry("baseline", SEEDS, steps=10, train_tokens=1000, train_flops=6e12),
        entry("a", SEEDS, steps=20, train_tokens=2000, train_flops=None),
    ]
    said = section(rows(baseline=3.0, a=2.9), variants)
    assert "| baseline" in said
    assert "6.000e+12" in said
    assert "n/a" in said
    assert "seconds" not in said


def test_of_a_training_in_seconds_the_steps_are_those_that_were_made() -> None:
    found = [trial("baseline", seed, 3.0, steps=100 + seed, tokens=1000 * (100 + seed)) for seed in SEEDS]
    said = section(found, [entry("baseline", SEEDS, steps=None, flops_per_token=2000.0)])
    assert "100 to 102" in said
    assert "100,000 to 102,000" in said
    assert budgets.TIMED in said

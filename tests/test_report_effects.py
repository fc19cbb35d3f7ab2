"""The report's table of effects: what it tells of a design, and what it refuses to tell."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Expand
from test_effects import fractional, name, product
from test_report import cell, entry, results, section, table_rows, text_of, trial

from ablate.fractional import LETTERS, fraction
from ablate.report import effects
from ablate.report.evidence import evidence_of

HEADING = "Effects of the axes"
SEEDS = 4


@pytest.fixture
def plain_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr("ablate.report.plots_of", lambda *_: [])
    return lambda given_results: text_of(given_results, tmp_path)


def noise(levels: tuple[int, ...], seed: int) -> float:
    """Of each variant its own, always the same, and far below the effects that are planted."""
    return 1e-3 * ((7 * sum(level << place for place, level in enumerate(levels)) + 13 * seed) % 11)


def stored(design: dict[str, Any], losses: dict[tuple[int, ...], float], **document: Any) -> Any:
    """Results of every combination that has a loss, the first one the baseline."""
    rows, variants = [], []
    for levels, loss in losses.items():
        called = "baseline" if not any(levels) else name(levels)
        variants.append(entry(called, range(SEEDS)))
        rows += [trial(called, seed, 2.5 + loss + noise(levels, seed)) for seed in range(SEEDS)]
    first = {name((0,) * len(design["axes"])): "baseline"}
    cells = [{**each, "variant": first.get(each["variant"], each["variant"])} for each in design["cells"]]
    return results(rows, variants, design={**design, "cells": cells}, **document)


def losses_of(*sizes: int) -> dict[tuple[int, ...], float]:
    """The first axis makes it worse by 0.2, the second better by 0.1 and by another 0.1 where the first has moved."""
    places = itertools.product(*map(range, sizes))
    return {each: 0.2 * each[0] - 0.1 * each[1] - 0.1 * each[0] * each[1] for each in places}


def test_main_effects_and_interactions_have_intervals_and_verdicts(plain_text: Any) -> None:
    report = plain_text(stored(product(2, 2, 2), losses_of(2, 2, 2)))
    rows = table_rows(section(report, HEADING), "averaged over")
    assert list(rows) == ["A: 1 minus 0", "B: 1 minus 0", "C: 1 minus 0", "A=1 × B=1", "A=1 × C=1", "B=1 × C=1"]
    assert [row["verdict"] for row in rows.values()][:4] == ["worse", "better", "no clear difference", "they interact"]
    assert rows["A: 1 minus 0"]["validation loss, 95 % interval (nats/token)"].startswith("+0.15")
    assert rows["A=1 × B=1"]["validation loss, 95 % interval (nats/token)"].startswith("-0.1")
    assert rows["A=1 × C=1"]["verdict"] == "no clear interaction"
    assert {row["averaged over"] for row in rows.values()} == {"4", "2"}
    assert {row["seeds"] for row in rows.values()} == {str(SEEDS)}
    assert "Holm over all 6 effects" in report.replace("\n", " ")


def test_the_summary_tells_of_the_clear_effects_and_of_how_many_are_not(plain_text: Any) -> None:
    said = section(plain_text(stored(product(2, 2, 2), losses_of(2, 2, 2))), "Summary")
    (line,) = [line for line in said.splitlines() if "Effects of the axes" in line]
    assert line.startswith("- **Effects of the axes**: validation loss after Holm: ")
    assert "A: 1 minus 0 +0.15" in line
    assert "(worse)" in line
    assert "(they interact)" in line
    assert re.search(
        r"in 1 main effect and 2 interactions \(\d+ further seeds would decide the first of them\)\.$", line
    )
    assert "unequal" not in line


def test_the_summary_says_that_effects_are_of_variants_of_unequal_budget(plain_text: Any) -> None:
    found = stored(product(2, 2, 2), losses_of(2, 2, 2))
    found.trials["params_active"] = [1000 + 100 * (variant != "baseline") for variant in found.trials["variant"]]
    assert "decide the first of them); the variants are of unequal budgets (†)." in section(
        plain_text(found), "Summary"
    )


def test_what_size_itself_does_is_for_the_ladder_to_tell(plain_text: Any) -> None:
    design = product(2, 2, 2)
    design["axes"][0] |= {"path": "scale", "values": [1, 2]}
    (line,) = [
        line
        for line in section(plain_text(stored(design, losses_of(2, 2, 2))), "Summary").splitlines()
        if "Effects of the axes" in line
    ]
    assert "scale: 1 minus 0" not in line
    assert "scale=1 × B=1" in line


def test_of_one_seed_the_summary_tells_no_effect(plain_text: Any) -> None:
    found = stored(product(2, 2, 2), losses_of(2, 2, 2))
    found.trials.loc[found.trials["seed"] > 0, "status"] = "diverged"
    assert "**Effects of the axes**: no verdict" in section(plain_text(found), "Summary")


def test_holm_is_over_the_effects(plain_text: Any) -> None:
    found = stored(product(2, 2, 2), losses_of(2, 2, 2))
    (told,) = effects.found(evidence_of(found))
    assert all(difference.contrasts == 6 for _, difference in told.estimates)
    smallest = min((difference for _, difference in told.estimates), key=lambda each: each.p or 1)
    assert smallest.adjusted == pytest.approx(6 * (smallest.p or 0))


def test_what_is_missing_is_said(plain_text: Any) -> None:
    losses = losses_of(2, 3)
    del losses[1, 2]
    report = plain_text(stored(product(2, 3, v12="invalid"), losses))
    rows = table_rows(section(report, HEADING), "averaged over")
    assert rows["A: 1 minus 0"]["averaged over"] == "2 of 3 (1 invalid)"
    nothing = rows["A=1 × B=2"]
    assert (nothing["verdict"], nothing["averaged over"], nothing["seeds"]) == ("not told", "0 of 1 (1 invalid)", "0")
    assert "is left out for all seeds" in report


def test_a_seed_that_failed_in_one_variant_counts_for_none(plain_text: Any) -> None:
    found = stored(product(2, 2), losses_of(2, 2))
    found.trials.loc[(found.trials["variant"] == "v11") & (found.trials["seed"] == 2), "status"] = "diverged"
    report = plain_text(found)
    assert {row["seeds"] for row in table_rows(section(report, HEADING), "averaged over").values()} == {"3"}
    assert "4 seeds have one." in report


def test_a_fraction_names_its_generators_and_aliases(plain_text: Any) -> None:
    losses = {run: value for run, value in losses_of(2, 2, 2, 2).items() if sum(run[:3]) % 2 == run[3]}
    report = plain_text(stored(whole_fraction(4, 4), losses))
    text = section(report, HEADING)
    assert "fractional: 8 of 16 runs, resolution 4" in text
    assert "A A, B B, C C, D D; D = ABC" in text
    assert "not told apart: AB + CD; AC + BD; AD + BC" in text
    rows = table_rows(text, "averaged over")
    assert list(rows)[-3:] == ["A=1 × B=1 + C × D", "A=1 × C=1 + B × D", "A=1 × D=1 + B × C"]
    assert rows["A=1 × B=1 + C × D"]["verdict"] == "one of these interacts"


def whole_fraction(n_axes: int, resolution: int, **missing: str) -> dict[str, Any]:
    part = fraction(n_axes, resolution)
    assert part is not None
    facts = {"resolution": part.resolution, "runs": part.n_runs, "of": 2**n_axes, "generators": part.words()}
    return {**fractional(n_axes, resolution, **missing), **facts, "letters": list(LETTERS[:n_axes])}


def test_a_fraction_without_a_run_tells_nothing(plain_text: Any) -> None:
    design = whole_fraction(4, 4, v1111="invalid")
    losses = {tuple(each["levels"]): 0.1 for each in design["cells"] if each["variant"]}
    text = section(plain_text(stored(design, losses)), HEADING)
    assert "1 invalid: no effect can be told without every run of the fraction." in text
    assert "|" not in text


def test_each_budget_has_its_own_effects(plain_text: Any) -> None:
    found = stored(product(2, 2), losses_of(2, 2))
    rows, variants = [], [entry("baseline", range(SEEDS))]
    for row in found.trials.to_dict("records"):
        budgets = ["baseline"] if row["is_baseline"] else [f"{row['variant']}@{each}" for each in ("params", "flops")]
        rows += [trial(each, row["seed"], row["val_loss"] - 0.5 * each.endswith("flops")) for each in budgets]
        variants += [entry(each, range(SEEDS)) for each in budgets if each not in [v["name"] for v in variants]]
    names = [each for each in dict.fromkeys(found.trials["variant"]) if each != "baseline"]
    told = results(rows, variants, design=found.experiment["design"])
    match = [{"budget": b, "variants": {each: f"{each}@{b}" for each in names}} for b in ("params", "flops")]
    told.experiment["match"] = match
    report = plain_text(told)
    text = section(report, HEADING)
    assert text.index("### At equal params") < text.index("### At equal flops")
    params, flops = (table_rows(part, "averaged over")["A: 1 minus 0"] for part in text.split("### ")[1:])
    assert params != flops


def test_what_comes_to_the_same_under_two_budgets_stands_in_both(plain_text: Any) -> None:
    """Brought to the second budget it is the first one's variant, under whose name it is stored."""
    found = stored(product(2, 2), losses_of(2, 2))
    names = {each: each for each in dict.fromkeys(found.trials["variant"]) if each != "baseline"}
    renamed = {**names, "v11": "v11@params"}
    found.trials["variant"] = [renamed.get(each, each) for each in found.trials["variant"]]
    found.experiment["variants"] = [entry(renamed.get(each, each), range(SEEDS)) for each in ("baseline", *names)]
    found.experiment["match"] = [{"budget": budget, "variants": renamed} for budget in ("params", "flops")]
    (told,) = effects.found(evidence_of(found))
    assert told.budget == "params and flops"
    assert not any(effect.lost for effect, _ in told.estimates)


def test_combinations_that_a_budget_makes_equal_are_not_called_invalid(expand: Expand) -> None:
    """An axis that the budget takes back makes no difference; that is another thing than a refusal."""
    vary = "feed_forward: [swiglu, {name: swiglu, d_ff: 8}], block: [pre_norm, post_norm]"
    found = expand(f"match: {{params: 0.02, by: feed_forward.d_ff}}\nvary: {{{vary}}}\n")
    design = found.design_facts()
    assert design is not None
    assert [cell["variant"] for cell in design["cells"]] == ["baseline", "block=post_norm"] * 2
    assert not any(cell["missing"] for cell in design["cells"])


def test_a_value_without_any_result_leaves_the_others_of_its_axis_in_the_plot() -> None:
    found = stored(product(2, 3, 2), losses_of(2, 3, 2))
    found.trials.loc[found.trials["variant"].str.match("v.2."), "status"] = "oom"
    (told,) = effects.found(evidence_of(found))
    assert set(effects.means(told, (0, 1))) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_axes_that_change_the_task_have_no_effects(plain_text: Any) -> None:
    found = stored(product(2, 2), losses_of(2, 2))
    for each in found.experiment["variants"]:
        each["task"] = "fill in" if each["name"] == "v11" else "go on"
    assert "The axes change the task (fill in, go on): no effects." in plain_text(found)


@pytest.mark.parametrize("how", ["one axis", "one at a time", "no design", "no losses"])
def test_where_there_is_nothing_to_tell_there_is_no_section(how: str, plain_text: Any) -> None:
    found = stored(product(2, 2), losses_of(2, 2))
    if how == "one axis":
        found = stored(product(3, 1), {(i, 0): 0.1 * i for i in range(3)})
    elif how == "one at a time":
        found.experiment["design"]["combine"] = "one_at_a_time"
    elif how == "no design":
        found.experiment["design"] = None
    else:
        found.trials["status"] = "diverged"
    assert HEADING not in plain_text(found)


def test_many_interactions_are_cut_to_those_of_the_smallest_p(plain_text: Any) -> None:
    sizes = (5, 5, 5)
    losses = {each: 0.2 * (each == (1, 1, each[2])) for each in itertools.product(*map(range, sizes))}
    rows = table_rows(section(plain_text(stored(product(*sizes), losses)), HEADING), "averaged over")
    assert len(rows) == effects.MOST_ROWS == 60
    assert (
        cell(section(plain_text(stored(product(*sizes), losses)), HEADING), "A=1 × B=1", "verdict") == "they interact"
    )


def test_a_file_s_own_fraction_and_ladder_are_told(expand: Expand, plain_text: Any) -> None:
    """From the file's axes to the report, as `experiment.json` carries them."""
    axes = "scale: [1, 2], block: [pre_norm, post_norm], train.lr: [1e-3, 3e-3]"
    for design, heading in (("{fractional: 3}", HEADING), ("product", "Ladder of sizes")):
        experiment = expand(f"vary: {{{axes}}}\ndesign: {design}")
        names = [each.name for each in experiment.variants]
        rows = [
            trial(
                each, seed, 2.0 + 0.1 * place + 0.001 * seed * place, params_total=1000 * (2 if "scale" in each else 1)
            )
            for place, each in enumerate(names)
            for seed in range(3)
        ]
        found = results(rows, [entry(each, range(3)) for each in names], design=experiment.design_facts())
        text = section(plain_text(found), heading)
        assert "block" in text
        assert "n/a" not in table_rows(text, "seeds")[next(iter(table_rows(text, "seeds")))].values()


def test_the_interaction_plot_has_one_scale_and_says_which_are_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a scale of its own each panel would show its noise as large as another's finding."""
    drawn: list[Any] = []

    def keep(draw: Any) -> bytes:
        drawn.append(draw())
        return b""

    monkeypatch.setattr(effects, "svg_of", keep)
    (plot,) = effects.plots(evidence_of(stored(product(2, 2, 2), losses_of(2, 2, 2))))
    assert plot.caption.endswith("Clear after Holm: A × B; elsewhere lines that cross may be noise.")
    assert len({axes.get_ylim() for axes in drawn[0].axes}) == 1
    (plot,) = effects.plots(evidence_of(stored(product(2, 2, 2), dict.fromkeys(losses_of(2, 2, 2), 0.0))))
    assert plot.caption.endswith("No interaction is clear after Holm: lines that cross may be noise.")

"""The report's ladder of sizes: exponents, what is missing, and whether the order holds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from test_report import entry, results, section, table_rows, text_of, trial

from ablate.report import ladder
from ablate.report.evidence import evidence_of

HEADING = "Ladder of sizes"
SEEDS = 4
FACTORS = (0.5, 1, 2)


@pytest.fixture
def plain_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr("ablate.report.plots_of", lambda *_: [])
    return lambda given_results: text_of(given_results, tmp_path)


def name(form: str, factor: float) -> str:
    told = [f"scale={factor:g}"] * (factor != 1) + [f"attention={form}"] * (form != "mha")
    return ",".join(told) or "baseline"


def stored(
    factors: dict[str, float],
    exponents: dict[str, float],
    *,
    rungs: tuple[float, ...] = FACTORS,
    noise: float = 1e-4,
    missing: tuple[tuple[str, float], ...] = (),
    **columns: Any,
) -> Any:
    """Losses on a power law of the parameters for each form, which grow with the square of the factor."""
    rows, variants, cells = [], [], []
    for (place, factor), (number, form) in itertools.product(enumerate(rungs), enumerate(factors)):
        is_there = (form, factor) not in missing
        called = name(form, factor)
        cells.append({"levels": [place, number], "idle": [], "variant": called if is_there else None})
        cells[-1]["missing"] = None if is_there else "invalid"
        if is_there:
            params = round(1e5 * factor**2)
            facts = {"params_total": params, "flops_per_token": 2.0 * params, **columns}
            losses = [
                factors[form] * params ** exponents[form] + noise * ((7 * seed + 3 * place + 5 * number) % 11)
                for seed in range(SEEDS)
            ]
            variants.append(entry(called, range(SEEDS)))
            rows += [trial(called, seed, loss, **{"tokens": 10**6, **facts}) for seed, loss in enumerate(losses)]
    axes = [
        {"path": "scale", "levels": [f"{each:g}" for each in rungs], "values": list(rungs), "reference": 1},
        {"path": "attention", "levels": list(factors), "values": list(factors), "reference": 0},
    ]
    return results(rows, variants, design={"combine": "product", "axes": axes, "cells": cells})


def test_exponents_and_an_order_that_holds(plain_text: Any) -> None:
    report = plain_text(stored({"mha": 8.0, "gqa": 8.4}, {"mha": -0.1, "gqa": -0.1}))
    rows = table_rows(section(report, HEADING), "e by parameters")
    assert list(rows) == ["baseline", "attention=gqa"]
    assert rows["baseline"]["e by parameters"].startswith("-0.100 [-0.1")
    assert rows["baseline"]["e by training FLOPs"].startswith("-0.100 [")
    assert rows["baseline"]["e by training tokens"] == "—", "all sizes were trained on as many"
    assert (rows["baseline"]["sizes"], rows["baseline"]["seeds"]) == ("3", str(SEEDS))
    assert rows["attention=gqa"]["e by parameters, minus the first's"].endswith("further seeds would decide)")
    order = "by mean loss it is the same at all 3 sizes (baseline, attention=gqa); clear after Holm: 3 of 3 differences"
    assert f"**The order holds**: {order} between two variants at a size." in report
    said = section(report, "Summary")
    assert (
        "**Ladder of sizes**: over 3 sizes the loss of baseline goes with parameters to the power of -0.100 [" in said
    )
    assert "further seeds would decide); the order holds: by mean loss it is the same" in said


def test_what_one_seed_says_of_size_is_called_so(plain_text: Any) -> None:
    found = stored({"mha": 8.0, "gqa": 8.4}, {"mha": -0.1, "gqa": -0.1})
    found.trials.loc[found.trials["seed"] > 0, "status"] = "diverged"
    assert "with parameters to the power of -0.100 over 1 seed; " in section(plain_text(found), "Summary")


def test_several_budgets_have_ladders_of_their_own(plain_text: Any) -> None:
    """What is the same under both is one; `gqa` of size 2 comes to the same."""
    found = stored({"mha": 8.0, "gqa": 8.4}, {"mha": -0.1, "gqa": -0.1}, rungs=(1, 2))
    names = [each["name"] for each in found.experiment["variants"] if each["name"] != "baseline"]
    at = {"params": {each: f"{each}@params" for each in names}}
    at["flops"] = {**at["params"], "attention=gqa": "attention=gqa@flops"}
    rows, variants = [], [entry("baseline", range(SEEDS))]
    for row in found.trials.to_dict("records"):
        called = dict.fromkeys(each.get(row["variant"], row["variant"]) for each in at.values())
        columns = {name: row[name] for name in ("params_total", "flops_per_token", "tokens")}
        rows += [trial(each, row["seed"], row["val_loss"], **columns) for each in called]
    variants += [
        entry(each, range(SEEDS)) for each in dict.fromkeys(row["variant"] for row in rows) if each != "baseline"
    ]
    match = [{"budget": budget, "variants": each} for budget, each in at.items()]
    again = results(rows, variants, design=found.experiment["design"])
    again.experiment["match"] = match
    names = [each.name for each in ladder.found(evidence_of(again))]
    assert names == ["baseline", "attention=gqa@params", "attention=gqa@flops"]


def test_an_order_of_means_that_are_all_inside_the_noise_is_no_finding(plain_text: Any) -> None:
    report = plain_text(stored({"mha": 8.0, "gqa": 8.0 + 1e-4}, {"mha": -0.1, "gqa": -0.1}, noise=0.05))
    assert "which may be noise; clear after Holm: 0 of 3 differences" in section(report, HEADING) or (
        "means change places inside the noise" in section(report, HEADING)
    )
    assert "order holds**" not in section(report, HEADING)
    assert "the order holds:" not in section(report, "Summary")


def test_an_order_that_turns_with_size(plain_text: Any) -> None:
    report = plain_text(stored({"mha": 8.0, "gqa": 8.0 * 1e5**0.2}, {"mha": -0.1, "gqa": -0.3}))
    text = section(report, HEADING)
    assert "**The order does not hold** across 3 sizes: attention=gqa and baseline clearly change places;" in text
    assert "clearly gaining with size: attention=gqa; the order does not hold" in section(report, "Summary")
    assert table_rows(text, "e by parameters")["attention=gqa"]["e by parameters, minus the first's"].endswith(
        "gains with size"
    )


def test_an_order_that_turns_inside_the_noise(plain_text: Any) -> None:
    found = stored({"mha": 8.0, "gqa": 8.0 * 1e5**0.002}, {"mha": -0.1, "gqa": -0.102}, noise=0.01)
    assert "**Whether the order holds is not clear**: across 3 sizes means change places" in plain_text(found)


def test_what_is_missing_is_said(plain_text: Any) -> None:
    found = stored({"mha": 8.0, "gqa": 8.4}, {"mha": -0.1, "gqa": -0.1}, missing=(("gqa", 2),))
    found.trials.loc[(found.trials["variant"] == "scale=2") & (found.trials["seed"] == 1), "status"] = "diverged"
    text = section(plain_text(found), HEADING)
    rows = table_rows(text, "e by parameters")
    assert rows["attention=gqa"]["sizes"] == "2 of 3 (1 invalid)"
    assert rows["baseline"]["seeds"] == "3"
    assert table_rows(text, "at scale 2")["attention=gqa"]["validation loss at scale 2"] == "—"
    assert "order" not in text, "two variants at all sizes would be needed"


def test_a_variant_without_a_result_at_a_size_is_counted(plain_text: Any) -> None:
    found = stored({"mha": 8.0, "gqa": 8.4}, {"mha": -0.1, "gqa": -0.1})
    found.trials.loc[found.trials["variant"] == "scale=2,attention=gqa", "status"] = "oom"
    rows = table_rows(section(plain_text(found), HEADING), "e by parameters")
    assert rows["attention=gqa"]["sizes"] == "2 of 3 (1 no result)"


def test_tokens_that_grow_with_size_have_an_exponent_too(plain_text: Any) -> None:
    found = stored({"mha": 8.0, "gqa": 8.4}, {"mha": -0.1, "gqa": -0.1})
    found.trials["tokens"] = 20 * found.trials["params_total"]
    row = table_rows(section(plain_text(found), HEADING), "e by parameters")["baseline"]
    assert row["e by training tokens"].startswith("-0.100")
    assert row["e by training FLOPs"].startswith("-0.050")


def test_a_bend_is_marked_and_a_floor_told_where_sizes_suffice(plain_text: Any) -> None:
    rungs = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
    found = stored({"mha": 80.0}, {"mha": -0.5}, rungs=rungs, noise=1e-6)
    found.trials["val_loss"] += 2.0
    text = section(plain_text(found), HEADING)
    row = table_rows(text, "e by parameters")["baseline"]
    assert row["e by parameters"].endswith("§")
    assert "§ No power law" in text
    assert row["floor; e above it, by parameters"].startswith("2.0")
    assert "is sought from 5 sizes on" not in text


def test_without_a_ladder_there_is_no_section(plain_text: Any) -> None:
    found = stored({"mha": 8.0, "gqa": 8.4}, {"mha": -0.1, "gqa": -0.1})
    found.experiment["design"]["axes"][0]["values"] = ["tiny", "small", "large"]
    assert HEADING not in plain_text(found)
    assert not ladder.found(evidence_of(results([trial("baseline", 0, 2.0)])))


def test_the_plots_are_drawn_and_are_the_same_bytes(tmp_path: Path) -> None:
    found = stored({"mha": 8.0, "$gqa_": 8.4}, {"mha": -0.1, "$gqa_": -0.1})
    texts = [text_of(found, tmp_path / each) for each in "ab"]
    assert texts[0] == texts[1]
    for plot in ("interactions", "ladder"):
        one, two = (next((tmp_path / each / "plots").glob(f"*-{plot}.svg")).read_bytes() for each in "ab")
        assert one == two
        assert b"gqa_" in one


def test_every_ladder_is_drawn_those_of_lowest_loss_in_colour_and_who_is_not_is_named() -> None:
    """One that has a single size has no line."""
    forms = {"mha": 8.0, **{f"form{i}": 9.0 - 0.1 * i for i in range(12)}}
    missing = (("form3", 0.5), ("form3", 1))
    found = evidence_of(stored(forms, dict.fromkeys(forms, -0.1), missing=missing))
    (plot,) = ladder.plots(found)
    assert "grey: 3 others" in plot.caption
    assert "Not drawn, with losses at fewer than two sizes: attention=form3" in plot.caption
    looks = ladder._looks(ladder.found(found))
    assert [name for name, look in looks.items() if not look.named] == [f"attention=form{i}" for i in range(3)]
    assert plot.svg
    assert all(f"attention=form{i}".encode() in plot.svg for i in range(12) if i != 3)

"""The report: what it says, what it refuses to say, and that any results give a valid one."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ablate.metrics import METRICS, TIMED, Timing
from ablate.report import executed, write_report
from ablate.report.text import escape, table
from ablate.results import Results
from ablate.schema import CURVES, PROFILES, REPEATS, TRIALS
from ablate.stats import MOST_HIDDEN, repeats_needed

GOLDEN = Path(__file__).parent / "golden" / "report.md"
NAN = math.nan

Row = dict[str, Any]


# --- Results made by hand ---------------------------------------------------------------------------------------------


def trial(variant: str, seed: int, loss: float | None = None, **columns: Any) -> Row:
    return {
        "experiment": "demo",
        "variant": variant,
        "trial_id": f"{variant}-{seed}",
        "seed": seed,
        "is_baseline": variant == "baseline",
        "status": "ok",
        "attempts": 1,
        "wall_seconds": 10.0,
        "val_loss": loss,
        "steps": 100,
        "params_total": 1000,
        "params_active": 1000,
        "flops_per_token": 2000.0,
        "kv_cache_bytes_per_token": 512,
        "log": f"logs/{variant}-{seed}.log",
        **columns,
    }


def curve(trial_id: str, losses: list[float]) -> list[Row]:
    return [
        {"trial_id": trial_id, "step": n, "tokens": 1000 * n, "split": "val", "metric": "loss", "value": value}
        for n, value in enumerate(losses)
    ]


def entry(name: str, seeds: range, slots: tuple[str, ...] = ("attention",), **facts: Any) -> Row:
    base = name == "baseline"
    return {
        "name": name,
        "is_baseline": base,
        "changes": {} if base else dict.fromkeys(slots, name),
        "groups": [] if base else sorted(slots),
        "trials": {str(seed): f"{name}-{seed}" for seed in seeds},
        **facts,
    }


def repeats(kind: Timing, *, again: list[float], **seconds: list[float]) -> list[Row]:
    """Rounds in which each took so many seconds, the baseline among them, and the baseline `again` so many."""
    members = [*((name, False, values) for name, values in seconds.items()), ("baseline", True, again)]
    return [
        {
            **{"timing_id": "c0", "variant_id": f"id-{name}", "variant": name, "is_partner": partner, "status": "ok"},
            **{"round": number, "place": number * len(members) + position + 1, "seed": number + 1_000_000 * partner},
            **{"started_at": datetime(2026, 5, 4, 3, number, position, tzinfo=UTC), "other_load_cores": 0.1},
            **{"device": "cpu", "device_name": "Some CPU", "threads": 2, "torch": "2.13.0"},
            **{"metric": TIMED[kind], "value": values[number]},
        }
        for number in range(len(again))
        for position, (name, partner, values) in enumerate(members)
    ]


def results(
    rows: list[Row],
    variants: list[Row] | None = None,
    *,
    curves: list[Row] | None = None,
    profiles: list[Row] | None = None,
    rounds: list[Row] | None = None,
    **document: Any,
) -> Results:
    """As `load` gives them: through the declared schemas, so that dtypes are the real ones."""
    if variants is None:
        names = dict.fromkeys(row["variant"] for row in rows)
        seeds = range(max((row["seed"] for row in rows), default=0) + 1)
        variants = [entry(name, seeds) for name in names]
    frames = [
        pa.Table.from_pylist(records, schema=schema).to_pandas()
        for records, schema in (
            *((rows, TRIALS), (curves or [], CURVES), (profiles or [], PROFILES)),
            (sorted(rounds or [], key=lambda row: row["place"]), REPEATS),
        )
    ]
    experiment = {"schema": 1, "name": "demo", "variants": variants, **document}
    return Results(Path("results/demo"), experiment, *frames[:3], repeats=frames[3])


def lengths(trial_id: str, seconds: dict[int, float], metric: str = "training_pass_seconds_p50") -> list[Row]:
    cell = {"trial_id": trial_id, "phase": "lengths", "batch": 1, "spread": 0.0}
    return [{**cell, "context": length, "metric": metric, "value": value} for length, value in seconds.items()]


def golden_results() -> Results:
    """A bit of everything: ties, NaN, OOM, a divergence, a missing seed, a single seed, odd names, a mid-run plan."""
    rows = [
        *(trial("baseline", seed, loss) for seed, loss in enumerate([2.50, 2.52, 2.51])),
        *(trial("gqa", seed, loss, kv_cache_bytes_per_token=128) for seed, loss in enumerate([2.51, 2.50, 2.53])),
        *(trial("tie", seed, loss, kv_cache_bytes_per_token=128) for seed, loss in enumerate([2.40, 2.42, 2.41])),
        trial("a|b `c` <d> & _e_", 0, 2.6, params_total=1500, params_active=1030),
        trial("a|b `c` <d> & _e_", 2, 2.61, params_total=1500, params_active=1030),
        trial("1e5", 0, NAN),
        trial("00012", 0, 2.45),
        trial("中文", 0, None, status="oom", phase="train", reason="CUDA out of memory\nTried | to", steps=3),
        trial("中文", 1, None, status="diverged", phase="train", reason="loss is nan", diverged_step=17),
    ]
    for row in rows:
        speed = 1000.0 + 10 * row["seed"] + (400 if row["variant"] == "gqa" else 0)
        if row["status"] == "ok":
            row |= {"train_tokens_per_second": speed, "peak_rss_bytes": 300 * 2**20, "precision": "fp32", "threads": 2}
            row |= {
                "device": "cpu",
                "device_name": "Some CPU",
                "python": "3.12.1",
                "torch": "2.13.0",
                "ablate": "0.1.0",
            }
            row |= {"ablate": "0.1.0", "git_commit": "abc123", "git_dirty": True}
            row |= {"decode_tokens_per_second": 100.0 + row["seed"] + (90 if row["variant"] == "gqa" else 0)}
            row |= {"compiled": False, "kernels": json.dumps({"train": ["mm"], "optimizer": ["_fused_adamw_"]})}
            row |= {"largest_batch": 96, "largest_batch_limit": "memory", "largest_length": 2**20}
            row |= {"largest_length_limit": "most" if row["variant"] == "gqa" else "memory"}
            row |= {"parameter_bytes": 4000, "activation_bytes": 2**20, "peak_live_bytes": 3 * 2**20}
    rows[-3] |= {"precision": "bf16"}
    sizes = {"baseline": 512, "gqa": 128, "tie": 128}
    variants = [
        entry(
            name,
            range(1) if name in ("1e5", "00012") else range(3),
            ("block", "norm") if name in ("1e5", "00012") else ("attention",),
            kv_cache_bytes_by_tokens=[[n, sizes.get(name, 512) * n] for n in (0, 1, 64, 1024)],
            kv_cache_bytes_by_devices={str(n): None if n > 4 else sizes.get(name, 512) * 1024 // n for n in (1, 2, 8)},
            kv_cache_equals_weights_at_tokens={"gqa": 32, "tie": None}.get(name, 8),
            notes=["final norm: yes"],
        )
        for name in dict.fromkeys(row["variant"] for row in rows)
    ]
    curves = [
        *(each for seed in range(3) for each in curve(f"baseline-{seed}", [5.5, 3.0 + 0.1 * seed, 2.5])),
        *(each for seed in range(3) for each in curve(f"gqa-{seed}", [5.5, 3.1, 2.5])),
        *curve("中文-1", [5.5, 7.0, NAN]),
    ]
    profiles = [
        {"trial_id": "gqa-0", "phase": phase, "batch": 8, "context": 512, "metric": metric, "value": v, "spread": s}
        for phase, metric, v, s in (
            ("decode", "tokens_per_second", 1234.5, 12.0),
            ("decode", "cache_bytes", 65536.0, None),
            ("prefill", "tokens_per_second", 99.0, 1.0),
            ("capacity", "fits", 1.0, None),
        )
    ]
    profiles += lengths("gqa-0", {128: 1.0, 256: 2.1, 512: 8.0}) + lengths("tie-0", {128: 1.0, 256: 4.0, 512: 16.0})
    return results(
        rows,
        variants,
        curves=curves,
        profiles=profiles,
        rounds=[
            *repeats(
                "step", baseline=[1.0, 1.02, 1.01], gqa=[0.71, 0.73, 0.72], tie=[1.01] * 3, again=[1.01, 1.0, 1.03]
            ),
            *repeats("decode", baseline=[0.01] * 3, gqa=[0.005, 0.006, 0.005], tie=[0.01] * 3, again=[0.011] * 3),
            {**repeats("step", again=[1.0])[0], "variant": "tie", "is_partner": False, "round": 3, "place": 16}
            | {"status": "oom", "reason": "train: out of memory", "metric": None, "value": None},
        ],
        profile={"repeats": 5},
        question="Does | it hold?",
        seeds=[0, 1, 2],
        counts={"raw": 8, "excluded": 0, "invalid": 1, "merged": 0, "planned": 7, "trials": 17},
        machine={
            **{"device": "cpu", "threads": 2, "workers": 2, "memory_bytes": 32 * 2**30, "os": "Linux"},
            **{"python": "not", "torch": "of", "ablate": "the", "git_commit": "rows", "git_dirty": False},
        },
        data={"description": "a text", "train_tokens": 90000, "validation_tokens": 10000, "sha256": "ab" * 32},
        train={"tokens": 126000, "lr": 1e-3, "warmup_steps": 0, "optimizer": {"betas": [0.9, 0.95]}},
        command="python -m ablate run experiments/demo.yaml",
        invalid=[{"variant": "n_heads=3", "reason": "d_model 256 is not a multiple of n_heads 3"}],
    )


def profiled(variant: str, seed: int, **columns: Any) -> Row:
    return trial(variant, seed, steps=None, train_tokens_per_second=1000.0 + seed, **columns)


def text_of(given_results: Results, folder: Path, **links: str) -> str:
    return write_report(given_results, folder, links).read_text(encoding="utf-8")


@pytest.fixture
def plain_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The report without its plots, which take most of the time."""
    monkeypatch.setattr("ablate.report.plots_of", lambda *_: [])
    return lambda given_results, **links: text_of(given_results, tmp_path, **links)


# --- A report read back -----------------------------------------------------------------------------------------------


def tables_of(markdown: str) -> list[list[list[str]]]:
    """Every table as a GFM parser sees it: rows of cells as they are shown, bold ones between `**`."""
    found: list[list[list[str]]] = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and token.level >= 4 and found:
            found[-1][-1].append("".join(shown(each) for each in token.children or []))
    return found


def shown(token: Any) -> str:
    return "**" if token.type in ("strong_open", "strong_close") else str(token.content)


def table_rows(markdown: str, heading: str) -> dict[str, dict[str, str]]:
    """variant -> heading -> cell, of the first table that has such a column."""
    for found in tables_of(markdown):
        if heading in found[0] or (len(heading) > 1 and any(heading in cell for cell in found[0])):
            return {row[0]: dict(zip(found[0], row, strict=True)) for row in found[1:]}
    raise AssertionError(f"no table with {heading}")


def cell(markdown: str, variant: str, heading: str) -> str:
    row = table_rows(markdown, heading)[variant]
    return row[heading] if heading in row else next(text for name, text in row.items() if heading in name)


def section(markdown: str, heading: str) -> str:
    return markdown.split(f"## {heading}\n")[1].split("\n## ")[0]


def unpadded(markdown: str) -> str:
    # How far the table writer pads a wide character depends on a library that may be missing.
    return re.sub(r"-{3,}", "---", re.sub(r" {2,}", " ", markdown))


# --- The whole report -------------------------------------------------------------------------------------------------


def test_golden_report(tmp_path: Path) -> None:
    text = text_of(golden_results(), tmp_path, comparison="http://127.0.0.1:5000/#/a b")
    assert unpadded(text) == unpadded(GOLDEN.read_text(encoding="utf-8")), f"python {__file__} writes it anew"


def test_what_was_only_profiled_has_costs_and_no_loss(plain_text: Any) -> None:
    rows = [profiled(name, seed) for name in ("baseline", "gqa") for seed in range(2)]
    report = plain_text(results(rows))
    assert "All variants were only profiled: there is no loss" in report
    assert "- **gqa**: only profiled; KV cache ×1.00, parameters ×1.00, training tokens/s ×1.00" in report
    assert "4 planned: 4 only profiled" in report
    assert "validation loss" not in section(report, "Comparison: attention")
    assert "learning rate and warm-up" not in report
    assert cell(report, "gqa", "training") == "1,000 ± 1", "no number of seeds beside each"


def test_a_variant_that_was_only_profiled_stands_beside_trained_ones(plain_text: Any) -> None:
    report = plain_text(results([trial("baseline", 0, 2.5), profiled("gqa", 0), trial("mqa", 0, 2.4)]))
    assert "gqa: only profiled: there is no loss" in report
    assert cell(report, "gqa", "validation loss") == "n/a"
    assert cell(report, "gqa", "n") == "0 of 1 ‡ (1 only profiled)"
    assert cell(report, "gqa", "difference") == "n/a"
    assert table_rows(report, "outcome")["gqa"]["outcome"] == "only profiled"


def test_same_results_give_the_same_bytes_and_replace_what_was_there(tmp_path: Path) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    stale = tmp_path / "one" / "plots" / "99-loss.svg"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an earlier report", encoding="utf-8")
    (tmp_path / "one" / "plots" / "mine.svg").write_text("kept", encoding="utf-8")
    for folder in ("one", "two", "one"):
        write_report(golden_results(), tmp_path / folder)
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert one.pop("plots/mine.svg") == b"kept"
    assert one == two
    linked = re.findall(r"!\[[^]]*\]\(([^)]+)\)", one["report.md"].decode("utf-8"))
    assert sorted(linked) == sorted(name for name in one if name.endswith(".svg"))
    for name in linked:
        assert ElementTree.fromstring(one[name]).tag.endswith("svg")


def test_every_row_of_every_table_has_the_same_number_of_cells(plain_text: Any) -> None:
    text = plain_text(golden_results())
    raw_rows = [line for line in text.splitlines() if line.startswith("|")]
    for line in raw_rows:
        assert line.endswith("|")
    tables = tables_of(text)
    assert sum(len(each) + 1 for each in tables) == len(raw_rows)
    assert all(len({len(row) for row in each}) == 1 for each in tables)


def test_names_appear_as_they_are(plain_text: Any) -> None:
    text = plain_text(golden_results())
    names = {row[0] for each in tables_of(text) for row in each}
    assert {"a|b `c` <d> & _e_", "1e5", "00012", "中文"} <= names


def test_writes_utf8_in_any_locale(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "from pathlib import Path; import test_report as t;"
        f"t.write_report(t.golden_results(), Path({str(tmp_path)!r}));"
        "sys.exit('torch' in sys.modules or 'mlflow' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("DISPLAY", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    text = (tmp_path / "report.md").read_bytes().decode("utf-8")
    assert "中文" in text
    assert "±" in text


def test_without_matplotlib_the_plots_are_missing_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = text_of(golden_results(), tmp_path)
    assert text.count("matplotlib is not installed") == 1
    assert "![" not in text
    assert not (tmp_path / "plots").exists()
    assert table_rows(text, "validation loss")


def test_two_hundred_variants_fit(tmp_path: Path) -> None:
    names = ["baseline", *(f"variant {number} with quite a long name, lr={number}" for number in range(200))]
    rows = [
        trial(name, seed, 2.5 + 0.001 * place + 0.01 * seed, train_tokens_per_second=1000.0 + place)
        for place, name in enumerate(names)
        for seed in range(2)
    ]
    curves = [each for row in rows for each in curve(row["trial_id"], [5.0, row["val_loss"]])]
    text = text_of(results(rows, curves=curves), tmp_path)
    assert list(table_rows(text, "validation loss")) == names
    assert "grey: 191 others" in text
    picture = (tmp_path / "plots" / "1-loss.svg").read_text(encoding="utf-8")
    width, height = (float(each) for each in re.findall(r'(?:width|height)="([\d.]+)pt"', picture)[:2])
    assert width < 1000
    assert height < 1000


# --- What happened ----------------------------------------------------------------------------------------------------


def test_a_report_in_mid_run_says_what_is_missing(plain_text: Any) -> None:
    variants = [entry("baseline", range(5)), entry("gqa", range(5))]
    rows = [trial("baseline", seed, 2.5 + 0.01 * seed) for seed in range(5)]
    text = plain_text(results([*rows, trial("gqa", 0, 2.4), trial("gqa", 1, 2.41)], variants))
    assert "**3 of 10 trials are not finished" in text
    assert "10 planned: 7 ok, 3 not finished" in text
    assert cell(text, "gqa", "n") == "2 of 5 ‡ (3 not finished)"


def test_a_report_before_the_first_trial_ended(plain_text: Any) -> None:
    text = plain_text(results([], [entry("baseline", range(1)), entry("gqa", range(1))]))
    assert "**2 of 2 trials are not finished" in text
    assert "No result yet" in text
    assert cell(text, "gqa", "validation loss") == "not finished"


def test_every_outcome_is_counted_and_listed(plain_text: Any) -> None:
    statuses = ["diverged", "oom", "timeout", "killed", "crashed", "interrupted", "incomplete", "decode_mismatch"]
    rows = [trial("baseline", 0, 2.5)]
    rows += [trial(f"v{n}", 0, None, status=status, reason="why") for n, status in enumerate(statuses)]
    text = plain_text(results(rows))
    assert "9 planned: 1 ok, " in text
    listed = table_rows(section(text, "Failures"), "outcome")
    for number, status in enumerate(statuses):
        word = {"oom": "OOM"}.get(status, status)
        assert listed[f"v{number}"]["outcome"] == word
        assert listed[f"v{number}"]["log"] == f"logs/v{number}-0.log"
        assert cell(text, f"v{number}", "validation loss") == word


def test_all_failed_is_no_valid_result(tmp_path: Path) -> None:
    rows = [trial(name, 0, NAN, status="diverged", reason="nan") for name in ("baseline", "gqa")]
    text = text_of(results(rows), tmp_path)
    assert "No valid result" in text
    assert "**" not in section(text, "Comparison: attention").split("**Bold**")[0]
    assert "no data" in text


def test_no_baseline_result_gives_no_contrast(plain_text: Any) -> None:
    rows = [trial("baseline", 0, None, status="oom"), trial("gqa", 0, 2.4)]
    text = plain_text(results(rows))
    assert "**baseline** has no valid result (OOM)" in text
    assert cell(text, "gqa", "difference") == "n/a"


def test_without_experiment_json_the_rows_speak(plain_text: Any) -> None:
    whole = results([trial("baseline", 0, 2.5), trial("gqa", 0, 2.4)])
    text = plain_text(Results(whole.folder, {}, whole.trials, whole.curves, whole.profiles, ["experiment.json: torn"]))
    assert cell(text, "gqa", "difference") == "-0.1000 single seed"
    assert "experiment.json: torn" in text


def test_four_different_texts(plain_text: Any) -> None:
    rows = [
        trial("baseline", 0, 2.5, train_tokens_per_second=10.0),
        trial("a", 0, 2.5),
        trial("b", 0, status="diverged"),
        trial("c", 0, status="oom"),
    ]
    text = plain_text(results(rows))
    assert cell(text, "a", "training ↑") == "n/a"
    assert cell(text, "baseline", "difference") == "—"
    assert cell(text, "b", "training ↑") == "diverged"
    assert cell(text, "c", "training ↑") == "OOM"
    assert "nan" not in text.lower().replace("finance", "")


def test_what_nobody_measured_has_no_column(plain_text: Any) -> None:
    text = plain_text(results([trial("baseline", 0, 2.5, peak_rss_bytes=3 * 2**20), trial("a", 0, 2.5)]))
    assert cell(text, "baseline", "peak RSS ↓ (MiB)") == "3.00"
    assert cell(text, "a", "peak RSS ↓ (MiB)") == "n/a"
    assert "peak allocated ↓" not in text


def test_what_only_holm_takes_the_verdict_from_is_no_clear_difference_in_short(plain_text: Any) -> None:
    close = [2.541, 2.533, 2.552]  # its own interval excludes zero, and six are compared
    losses_of = {f"v{i}": [2.5, 2.51, 2.49] for i in range(5)} | {"close": close}
    said = plain_text(results(losses(baseline=[2.5, 2.5, 2.5], **losses_of)))
    assert "no clear difference (after Holm)" in said
    assert "**no verdict**" not in said


def test_the_summary_begins_with_who_is_better(plain_text: Any) -> None:
    rows = losses(baseline=[2.5, 2.6, 2.7], good=[2.4, 2.5, 2.6001], bad=[2.6, 2.7, 2.8001], same=[2.5, 2.61, 2.69])
    rows += [trial("lone", 0, 2.5, params_total=2000), trial("lost", 0, None, status="oom")]
    first = section(plain_text(results(rows)), "Summary").strip().splitlines()[0]
    assert first == (
        "- In short, against the baseline, **better**: good; **worse**: bad; **no clear difference**: same; "
        "**no verdict**: lone †, lost. († not at equal budget)"
    )
    alone = section(plain_text(results(losses(baseline=[2.5, 2.6], a=[2.5, 2.6]))), "Summary")
    assert "In short" not in alone
    assert "In short" not in plain_text(results(losses(baseline=[2.5], a=[2.5], b=[2.5])))


# --- What is best -----------------------------------------------------------------------------------------------------


def losses(**by_name: list[float]) -> list[Row]:
    return [trial(name, seed, loss) for name, values in by_name.items() for seed, loss in enumerate(values)]


def test_a_clear_winner_is_bold(plain_text: Any) -> None:
    text = plain_text(results(losses(baseline=[2.5, 2.6, 2.7], a=[2.3, 2.401, 2.5], b=[2.4, 2.5, 2.601])))
    assert cell(text, "a", "validation loss") == "**2.4003 ± 0.1000**"
    assert cell(text, "a", "difference").endswith(" better")
    assert "**" not in cell(text, "b", "validation loss")


def test_a_winner_inside_the_noise_is_not(plain_text: Any) -> None:
    text = plain_text(results(losses(baseline=[2.5, 2.6, 2.7], a=[2.3, 2.401, 2.5], b=[2.3, 2.41, 2.49])))
    assert "**" not in cell(text, "a", "validation loss") + cell(text, "b", "validation loss")


def test_a_single_seed_has_no_spread_no_verdict_and_no_bold(plain_text: Any) -> None:
    text = plain_text(results(losses(baseline=[2.5], a=[0.1])))
    assert cell(text, "a", "validation loss") == "0.1000"
    assert cell(text, "a", "difference") == "-2.4000 single seed"
    assert "on a single seed: no verdict" in text


def test_nan_is_never_best(plain_text: Any) -> None:
    text = plain_text(results(losses(a=[NAN, NAN, NAN], baseline=[2.5, 2.6, 2.7], b=[2.3, 2.401, 2.5])))
    assert cell(text, "b", "validation loss").startswith("**")
    assert cell(text, "a", "validation loss") == "n/a"
    assert cell(text, "a", "n") == "0 of 3 ‡ (3 without a finite loss)"


@pytest.mark.parametrize(
    ("sizes", "bold"),
    [((512, 64, 64), {"a", "b"}), ((64, 512, 128), {"baseline"}), ((64, 64, 64), set()), ((0, 8, 8), {"baseline"})],
)
def test_exact_metrics_bold_all_that_share_the_best(sizes: tuple[int, ...], bold: set[str], plain_text: Any) -> None:
    names = ("baseline", "a", "b")
    rows = [trial(name, 0, 2.5, kv_cache_bytes_per_token=size) for name, size in zip(names, sizes, strict=True)]
    text = plain_text(results(rows))
    assert {name for name in names if "**" in cell(text, name, "KV cache ↓")} == bold


def test_what_was_profiled_in_other_ways_is_not_compared(plain_text: Any) -> None:
    """A file whose `profile` was changed, and a run of it that was interrupted: old cells stand beside new ones."""
    sizes = {"baseline": 100, "a": 900, "b": 800}
    for ways, bold in ((("x", "x", "x"), {"baseline"}), (("y", "x", "x"), set()), (("x", "x", None), {"baseline"})):
        each = zip(sizes.items(), ways, strict=True)
        rows = [trial(name, 0, 2.5, kv_cache_bytes_held=size, profile_id=way) for (name, size), way in each]
        text = plain_text(results(rows))
        assert {name for name in sizes if "**" in cell(text, name, "KV cache in memory ↓")} == bold
        warned = "Not all trials were profiled in the same way (baseline; a, b)" in text.replace(" and ", ", ")
        assert warned == (bold == set())


def test_what_did_not_end_ok_does_not_compete(plain_text: Any) -> None:
    rows = [
        trial("baseline", 0, 2.5, kv_cache_bytes_per_token=512),
        trial("a", 0, 2.5, kv_cache_bytes_per_token=256),
        trial("b", 0, status="crashed", kv_cache_bytes_per_token=8),
    ]
    text = plain_text(results(rows))
    assert cell(text, "a", "KV cache ↓") == "**256**"
    assert cell(text, "b", "KV cache ↓") == "8"


def test_higher_is_better_where_the_metric_says_so(plain_text: Any) -> None:
    text = plain_text(results(speeds("train_tokens_per_second", **CHECKED)))
    # Differences without any spread are as clear as can be.
    assert cell(text, "a", "training ↑").startswith("**201.7")
    assert "**" not in cell(text, "baseline", "training ↑")


CHECKED = {"aa_step_ratio_low": 0.98, "aa_step_ratio_high": 1.03, "trials_at_once": 1.0}
"""Of trials before which the machine was found to time alike what is alike."""


def speeds(column: str, **columns: Any) -> list[Row]:
    """A variant that is clearly better than the baseline, by its trials."""
    rows = losses(baseline=[2.5, 2.6, 2.7], a=[2.5, 2.6, 2.7])
    for row in rows:
        row |= {column: (200.0 if row["variant"] == "a" else 100.0) + row["seed"] ** 2, **columns}
    return rows


# --- Which timings may be judged --------------------------------------------------------------------------------------

EQUAL, DIFFERS = [1.01, 1.0, 1.02], [1.11, 1.1, 1.12]
BASE, SLOW = [1.0, 1.02, 1.01], [2.0, 2.05, 2.0]
ROUNDS = repeats("step", baseline=BASE, a=SLOW, again=EQUAL)


def test_a_variant_that_takes_longer_is_slower(plain_text: Any) -> None:
    rows = [trial("baseline", 0, 2.5), trial("a", 0, 2.5)]
    rounds = repeats("step", baseline=BASE, a=SLOW, again=EQUAL)
    text = section(plain_text(results(rows, rounds=rounds, profile={"repeats": 3})), "Speed, interleaved")
    assert "Order: baseline, a, baseline again; 3 rounds, every member in a fresh process" in text
    assert "Measured on cpu, Some CPU, 2 threads, torch 2.13.0; 2026-05-04 03:00 to 2026-05-04 03:02 UTC." in text
    assert "over 3 rounds: no difference from itself; one of +" in text
    line = table_rows(text, "verdict")["a"]
    assert line["verdict"] == "slower"
    assert line["timing"] == "step"
    assert line["n"] == "3"
    assert line["time against the baseline, 95 % interval"].startswith("+99.7 % [+")


def test_where_the_baseline_differs_from_itself_verdicts_are_withheld(plain_text: Any) -> None:
    rows = speeds("train_tokens_per_second", decode_tokens_per_second=50.0)
    rounds = repeats("step", baseline=BASE, a=SLOW, again=DIFFERS) + repeats(
        "decode", baseline=BASE, a=SLOW, again=EQUAL
    )
    text = plain_text(results(rows, rounds=rounds))
    lines = {line[1]: line[4] for line in tables_of(section(text, "Speed, interleaved"))[0] if line[0] == "a"}
    assert lines == {"step": "withheld", "decode": "slower"}
    assert "A/A, step: the baseline again took +9.9 %" in text
    assert "it differs from itself" in section(text, "Speed, interleaved")
    assert "The baseline timed against itself differs (step): verdicts" in section(text, "Read with care")
    assert "**" not in cell(text, "a", "training ↑")
    assert "a training step, interleaved, takes +99.7 % [+95.9, +103.4]: verdict withheld." in text


NOISY = [0.8, 1.25, 1.05]
"""What such a baseline takes again: no difference from itself, but neither would a large one be one."""


def test_an_aa_check_that_sees_little_vouches_for_little(plain_text: Any) -> None:
    rounds = repeats("step", baseline=[1.0] * 3, near=[1.2] * 3, far=[3.0] * 3, quick=[0.3] * 3, again=NOISY)
    names = ("baseline", "near", "far", "quick")
    text = plain_text(results([trial(name, 0, 2.5) for name in names], rounds=rounds))
    lines = table_rows(section(text, "Speed, interleaved"), "verdict")
    assert [lines[name]["verdict"] for name in names[1:]] == ["A/A too coarse", "slower", "faster"]
    assert "no difference from itself; one of +141.7 % would have been seen" in text
    assert "**That is too coarse**" in section(text, "Speed, interleaved")
    told = section(text, "Read with care")
    assert "The A/A check of 3 rounds is too coarse (step): it would miss a difference of 10 %" in told
    logs = [math.log(each) for each in NOISY]
    assert f"`profile: {{repeats: {repeats_needed(statistics.stdev(logs), 3, 0.1)}}}`" in told
    assert "interleaved, takes +20.0 % [+20.0, +20.0]: A/A too coarse." in text
    assert "interleaved, takes +200.0 % [+200.0, +200.0]: slower." in text


def test_an_aa_check_that_no_number_of_rounds_mends_says_so(plain_text: Any) -> None:
    rounds = repeats("step", baseline=[1.0] * 3, a=[1.2] * 3, again=[0.05, 20.0, 1.0])
    told = section(plain_text(results(speeds("train_tokens_per_second"), rounds=rounds)), "Read with care")
    assert "At this noise it takes over 1,000 rounds" in told


def test_trials_that_ran_beside_others_have_no_verdict_by_rounds_of_processes_alone(plain_text: Any) -> None:
    # By trials a has twice the speed, by rounds half of it.
    rows = [row | CHECKED for row in speeds("train_tokens_per_second", decode_tokens_per_second=50.0, mfu=0.2)]
    rounds = repeats("step", baseline=BASE, a=SLOW, again=EQUAL) + repeats("decode", baseline=BASE, a=BASE, again=EQUAL)
    text = plain_text(results(rows, rounds=rounds))
    assert "a training step, interleaved, takes +99.7 % [+95.9, +103.4]: slower." in text
    assert "training tokens/s" not in section(text, "Summary")
    for heading in ("training ↑", "decode ↑", "model FLOPs"):
        assert "**" not in cell(text, "a", heading), heading


def test_what_was_no_member_of_the_rounds_has_no_verdict_by_them(plain_text: Any) -> None:
    rows = [*speeds("train_tokens_per_second", **CHECKED)]
    rows += [row | {"variant": "b", "trial_id": f"b-{row['seed']}"} for row in rows if row["variant"] == "a"]
    text = plain_text(results(rows, rounds=repeats("step", baseline=BASE, a=SLOW, again=EQUAL)))
    assert "**b**" in text
    (line,) = [line for line in section(text, "Summary").splitlines() if line.startswith("- **b**")]
    assert line.endswith("training tokens/s ×1.98 (no verdict).")
    assert "**" not in cell(text, "b", "training ↑")
    assert "Not timed in interleaved repeats, so that no verdict on speed is given: b." in text


def test_rounds_of_another_baseline_are_not_quoted(plain_text: Any) -> None:
    rounds = [row | {"variant": {"baseline": "old"}.get(row["variant"], row["variant"])} for row in ROUNDS]
    text = plain_text(results(speeds("train_tokens_per_second"), rounds=rounds))
    assert "training tokens/s ×1.98 (no verdict)" in text


def test_energy_is_never_best(plain_text: Any) -> None:
    for column in ("energy_joules_per_token", "decode_energy_joules_per_token"):
        assert METRICS[column].timing == "other"
        text = plain_text(results(speeds(column, **CHECKED)))
        assert "**" not in cell(text, "baseline", METRICS[column].heading), column


@pytest.mark.parametrize("column", ["train_tokens_per_second", "peak_rss_bytes"])
def test_what_only_profiled_trials_measured_does_not_compete_with_trained_ones(column: str, plain_text: Any) -> None:
    rows = speeds(column, **CHECKED)
    best = "a" if column == "train_tokens_per_second" else "baseline"
    heading = METRICS[column].heading
    assert "**" in cell(plain_text(results(rows)), best, heading), "it would be seen"
    rows = [row | ({"steps": None, "val_loss": None} if row["variant"] == "a" else {}) for row in rows]
    text = plain_text(results(rows))
    assert "**" not in cell(text, best, heading)
    compared = "training tokens/s do not compare (trained against only profiled)" in text
    assert compared == (column == "train_tokens_per_second")


def test_the_definitions_have_the_figures_of_the_code(plain_text: Any) -> None:
    from ablate import capacity, trial
    from ablate.profiling import clock

    text = plain_text(results([profiled("baseline", 0)]))
    assert f"at most {trial.MOST_STEPS} steps" in text
    told = " ".join(section(text, "What the numbers mean").split())
    most = capacity.MOST
    assert f"a step's time ({capacity.LIMIT_SECONDS:.0f} s)" in told
    assert f"({most['largest_batch']:,} sequences, {most['largest_length']:,} tokens)" in told
    assert f"up to {clock.MOST_SAMPLES:,} a series" in told
    assert f"the same over at least {clock.WINDOW_STEPS} steps on end" in told
    assert (capacity.KEPT_BACK, capacity.FINEST) == (0.1, 8)
    assert "a tenth is kept back" in told
    assert "Exact below 16, else to an eighth" in told
    assert f"would have found one of {MOST_HIDDEN * 100:.0f} %" in told


def test_one_round_vouches_for_nothing(plain_text: Any) -> None:
    rows = speeds("train_tokens_per_second")
    text = plain_text(
        results(rows, rounds=repeats("step", baseline=[1.0], a=[2.0], again=[1.0]), profile={"repeats": 4})
    )
    assert "1 round of 4 (the rest is still to come)" in text
    assert table_rows(section(text, "Speed, interleaved"), "verdict")["a"]["verdict"] == "withheld"
    assert "one round has no interval, so that verdicts are withheld" in text
    assert "**" not in cell(text, "a", "training ↑")
    told = section(text, "Read with care")
    assert "(step), so that none is marked as best: it takes two rounds or more in which the baseline" in told
    assert "doctor --aa" not in told, "no check of the machine stands behind rounds"


def test_what_no_round_has_of_a_variant_is_no_contrast(plain_text: Any) -> None:
    speeds_of = [trial(name, 0, 2.5, train_tokens_per_second=9.0) for name in ("baseline", "a", "b")]
    timed = {"baseline": [1.0, 1.01, 1.02], "again": [1.01, 1.0, 1.02]}
    rounds = [*repeats("step", a=[2.0, 2.1, 2.2], b=[1.0] * 3, **timed), *repeats("decode", a=[2.0, 2.1, 2.2], **timed)]
    text = section(plain_text(results(speeds_of, rounds=rounds)), "Speed, interleaved")
    assert "Holm over 3 contrasts" in text, "b cannot write, and has two timings less one"


def test_without_an_aa_check_no_timing_is_best(plain_text: Any) -> None:
    text = plain_text(results(speeds("train_tokens_per_second", prefill_tokens_per_second=1.0)))
    assert "**" not in cell(text, "a", "training ↑")
    assert "Speed, interleaved" not in text
    told = section(text, "Read with care")
    assert "No A/A check stands behind times and speeds (step, prefill)" in told
    assert "`profile: {repeats: n}`" in told
    assert "`python -m ablate doctor --aa`" in told


@pytest.mark.parametrize(
    ("low", "high", "at_once", "said"),
    [
        (0.98, 1.03, 1.0, None),
        (0.98, 1.03, 1.05, None),
        (0.98, 1.03, 1.2, "No A/A check stands behind times and speeds (step)"),
        (0.98, 1.03, None, "No A/A check stands behind times and speeds (step)"),
        (1.02, 1.07, 1.0, "timed against itself differs (step)"),
        (0.37, 1.42, 1.0, "The A/A check of the machine is too coarse (step)"),
        (None, None, 1.0, "No A/A check stands behind times and speeds (step)"),
    ],
)
def test_the_check_of_the_machine_vouches_for_training_alone_on_it(
    low: float | None, high: float | None, at_once: float | None, said: str | None, plain_text: Any
) -> None:
    checked = {"aa_step_ratio_low": low, "aa_step_ratio_high": high, "trials_at_once": at_once}
    text = plain_text(results(speeds("train_tokens_per_second", **checked)))
    assert cell(text, "a", "training ↑").startswith("**") == (said is None)
    assert ("training tokens/s ×1.98 (no verdict)" in text) == (said is not None)
    assert said is None or said in section(text, "Read with care")
    text = plain_text(results(speeds("decode_tokens_per_second", **checked)))
    assert "**" not in cell(text, "a", "decode ↑")


def test_a_variant_without_a_check_takes_the_verdict_from_all(plain_text: Any) -> None:
    rows = speeds("train_tokens_per_second", **CHECKED)
    rows[0]["aa_step_ratio_low"] = None
    assert "**" not in cell(plain_text(results(rows)), "a", "training ↑")


def test_repeats_go_before_the_check_of_the_machine(plain_text: Any) -> None:
    rows = speeds("train_tokens_per_second", **CHECKED)
    text = plain_text(results(rows, rounds=repeats("step", baseline=BASE, a=SLOW, again=DIFFERS)))
    assert "**" not in cell(text, "a", "training ↑")


def test_what_could_not_be_timed_is_told(plain_text: Any) -> None:
    rounds = repeats("step", baseline=BASE, a=SLOW, again=EQUAL)
    lost = rounds[-2] | {"status": "killed", "reason": "signal 9", "metric": None, "value": None}
    text = plain_text(results(speeds("train_tokens_per_second"), rounds=[*rounds[:-2], lost, rounds[-1]]))
    assert "- Not timed in round 3: a, killed: signal 9" in text
    assert table_rows(section(text, "Speed, interleaved"), "verdict")["a"]["n"] == "2"


def test_only_the_rounds_measured_last_are_compared(plain_text: Any) -> None:
    whole = results(speeds("train_tokens_per_second"), rounds=repeats("step", baseline=BASE, a=SLOW, again=EQUAL))
    earlier = whole.repeats.assign(
        timing_id="b0", value=7.0, started_at=whole.repeats["started_at"] - timedelta(days=1)
    )
    both = replace(whole, experiment={}, repeats=pd.concat([whole.repeats, earlier]))
    assert section(plain_text(both), "Speed, interleaved") == section(plain_text(whole), "Speed, interleaved")


def test_other_budgets_are_marked(plain_text: Any) -> None:
    rows = [
        trial("baseline", 0, 2.5),
        trial("near", 0, 2.5, params_total=1020),
        trial("far", 0, 2.5, params_total=1021),
        trial("active", 0, 2.5, params_active=900),
        trial("flops", 0, 2.5, flops_per_token=2100.0),
    ]
    text = plain_text(results(rows))
    marked = {name for name in table_rows(text, "difference") if "†" in cell(text, name, "difference")}
    assert marked == {"far", "active", "flops"}
    assert cell(text, "far", "parameters, total") == "1,021 †"
    assert "† over 2 %" in text
    assert "not at equal budget (FLOPs +5.0 %)" in text


# --- What must be read with care --------------------------------------------------------------------------------------


def test_a_shared_recipe_is_said(plain_text: Any) -> None:
    rows = [trial("baseline", 0, 2.5), trial("a", 0, 2.5), trial("b", 0, 2.5)]
    variants = [entry(name, range(1)) for name in ("baseline", "a", "b")]
    assert "All variants share one learning rate and warm-up" in plain_text(results(rows, variants))
    variants[2]["changes"]["train.lr"] = 0.1
    assert "The baseline and a share one learning rate" in plain_text(results(rows, variants))
    variants[1]["changes"]["train.warmup_steps"] = 10
    assert "share one learning rate" not in plain_text(results(rows, variants))


@pytest.mark.parametrize("column", ["precision", "param_dtype", "optimizer_state_dtype", "device", "torch"])
def test_unlike_conditions_are_flagged(column: str, plain_text: Any) -> None:
    rows = [trial("baseline", 0, 2.5, **{column: "x"}), trial("a", 0, 2.5, **{column: "y"})]
    flagged = section(plain_text(results(rows)), "Read with care")
    assert "x (baseline); y (a)" in flagged
    rows[1][column] = "x"
    assert "Not the same" not in plain_text(results(rows))


def test_threads_and_batches_that_differ_are_flagged(plain_text: Any) -> None:
    rows = [
        trial("baseline", 0, 2.5, threads=2, batch_order_hash="x"),
        trial("a", 0, 2.5, threads=4, batch_order_hash="y"),
    ]
    text = plain_text(results(rows))
    assert "Not the same number of threads" in text
    assert "same batches (seed 0)" in text


def test_measured_beside_unlike_numbers_of_trials(plain_text: Any) -> None:
    rows = [trial("baseline", 0, 2.5, trials_at_once=1.0), trial("a", 0, 2.5, trials_at_once=1.9)]
    machine = {"workers": 4}
    text = plain_text(results(rows, machine=machine))
    assert "with between 1.0 and 1.9 trials at once" in section(text, "Read with care")
    assert "1 to 1.9 trials at a time" in text
    rows[0]["trials_at_once"] = 1.9
    text = plain_text(results(rows, machine=machine))
    assert "trials at once" not in text
    assert "1.9 trials at a time" in text
    rows = [trial("baseline", 0, 2.5)]
    assert "4 trials at a time" in plain_text(results(rows, machine=machine))


def test_in_mid_run_one_seed_is_one_seed(plain_text: Any) -> None:
    variants = [entry(name, range(3)) for name in ("baseline", "a", "b")]
    first = plain_text(results(losses(baseline=[2.5], a=[2.4], b=[2.3]), variants))
    assert "One seed only, so that no ± and no verdict is given: baseline, a, b." in first
    assert "not corrected for that" not in first
    more = plain_text(results(losses(baseline=[2.5, 2.6], a=[2.4, 2.5], b=[2.3, 2.4]), variants))
    assert "One seed only" not in more
    assert "2 variants are compared with one baseline" in more


def test_links_are_one_line_that_says_what_to_start(plain_text: Any) -> None:
    text = plain_text(results([trial("baseline", 0, 2.5)]), charts="http://x/1", table="http://x/2")
    assert "- MLflow (start `python -m ablate ui` first): [charts](<http://x/1>), [table](<http://x/2>)\n" in text


def test_many_changes_of_a_variant_are_one_below_the_other(plain_text: Any) -> None:
    variants = [entry("baseline", range(1)), entry("a<br>", range(1), ("attention", "norm"))]
    text = plain_text(results([], variants))
    assert "attention: a&lt;br&gt;<br>norm: a&lt;br&gt;" in section(text, "Variants")


def test_a_corpus_read_more_than_once_is_said(plain_text: Any) -> None:
    rows = [trial("baseline", 0, 2.5, corpus_passes=1.42)]
    assert "The corpus was read 1.4 times" in plain_text(results(rows))
    assert "corpus was read" not in plain_text(results([trial("baseline", 0, 2.5, corpus_passes=0.9)]))


def test_losses_of_different_tasks_do_not_compare(plain_text: Any) -> None:
    def told(*tasks: str) -> str:
        names = dict(zip(("baseline", "other"), tasks, strict=True))
        variants = [entry(name, range(3), task=task) for name, task in names.items()]
        rows = [
            trial(name, seed, 2.5 if name == "baseline" else 1.0 + seed / 100) for name in names for seed in range(3)
        ]
        return plain_text(results(rows, variants))

    other, same = told("next tokens", "masked tokens"), told("masked tokens", "masked tokens")
    assert "Not all are taught the same (masked tokens, next tokens)" in other
    assert "nats/token, of masked tokens" in other
    assert "another task" in other
    assert "better" not in other.split("## Summary")[1].split("##")[0]
    assert "over 3 seeds: better" in same
    assert "another task" not in same


# --- Numbers, profiles, escapes ---------------------------------------------------------------------------------------


def test_whole_numbers_stay_whole(plain_text: Any) -> None:
    rows = [trial("baseline", 0, 2.5, params_total=6_738_415_616), trial("a", 0, 2.5, params_total=8)]
    text = plain_text(results(rows))
    assert cell(text, "baseline", "parameters, total") == "6,738,415,616"
    assert cell(text, "a", "parameters, total") == "**8** †"


def test_an_interval_shows_on_which_side_of_zero_it_lies(plain_text: Any) -> None:
    text = plain_text(results(losses(baseline=[2.5, 2.6, 2.7], a=[2.50001, 2.600011, 2.70001])))
    low, high = re.findall(r"[+-][\d.]+", cell(text, "a", "difference"))[1:]
    assert float(low) > 0
    assert float(high) > 0


def test_a_difference_too_small_to_matter_is_not_spelled_out(plain_text: Any) -> None:
    text = plain_text(results(losses(baseline=[2.5], a=[2.50000931], b=[2.5 - 1e-11])))
    assert cell(text, "a", "difference") == "+0.00001 single seed"
    assert cell(text, "b", "difference") == "+0.00000 single seed"


@pytest.mark.parametrize(("points", "panels"), [(1, 1), (2, 1), (4, 1), (6, 2)])
def test_the_second_half_is_shown_where_it_is_a_curve(points: int, panels: int, tmp_path: Path) -> None:
    given = results([trial("baseline", 0, 2.5)], curves=curve("baseline-0", [3.0 - 0.1 * n for n in range(points)]))
    text_of(given, tmp_path)
    picture = (tmp_path / "plots" / "1-loss.svg").read_text(encoding="utf-8")
    assert len(re.findall('id="axes_', picture)) == panels


def test_a_long_cache_curve_has_few_markers(tmp_path: Path) -> None:
    sizes = [[tokens, 8 * tokens] for tokens in range(1, 65)]
    variants = [entry("baseline", range(1), kv_cache_bytes_by_tokens=sizes)]
    text_of(results([trial("baseline", 0, 2.5)], variants), tmp_path)
    picture = (tmp_path / "plots" / "1-cache.svg").read_text(encoding="utf-8")
    # Ticks are drawn in the same way.
    assert picture.count("<use ") < len(sizes) / 2


def test_kernels_are_told_with_the_way_that_was_taken() -> None:
    ran = json.dumps({"train": ["mm"], "decode": ["_scaled_dot_product_flash", "mm", "path absorbed"]})
    assert executed.attention_kernels({"kernels": ran}) == "train: unfused; decode: unfused"
    ran = ran.replace("flash", "flash_attention")
    assert executed.attention_kernels({"kernels": ran}) == "train: unfused; decode: flash_attention"
    assert executed.lines([{"kernels": ran}]) == "train: unfused<br>decode: flash_attention, path absorbed"
    assert executed.attention_kernels({}) is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["_foreach_add_", "_fused_adamw_"], "fused_adamw"),
        (["_foreach_add_", "_foreach_lerp_"], "foreach"),
        (["_foreach_add_", "lerp_"], "for each weight"),
    ],
)
def test_the_form_of_the_optimizer_is_told_by_what_it_ran(names: list[str], said: str) -> None:
    assert executed.optimizer({"kernels": json.dumps({"train": ["_fused"], "optimizer": names})}) == said
    assert executed.optimizer({"kernels": json.dumps({"train": ["_fused"]})}) is None


def test_a_trial_that_fell_back_to_eager_is_warned_of(plain_text: Any) -> None:
    limit = "recompile limit reached, the rest ran eager: x"
    rows = [
        trial("baseline", 0, 2.5, compiled=True, graph_breaks=0, recompiles=0),
        trial("moe", 0, 2.5, compiled=True, graph_breaks=8, recompiles=1),
        trial("fell", 0, 2.5, compiled=False, compile_fault=limit, graph_breaks=0, recompiles=8),
        trial("late", 0, 2.5, compiled=True, compile_fault="2.0 s of compilation in timed steps", graph_breaks=0),
    ]
    text = plain_text(results(rows))
    care = section(text, "Read with care")
    assert f"What was to be compiled ran as it is written, compare with care: fell ({limit})." in care
    assert (
        "Times are not of compiled steps alone, compare with care: late (2.0 s of compilation in timed steps)." in care
    )
    same = "Not the same compilation of training steps in all trials, compare with care: "
    assert f"{same}yes (baseline, late); yes, 8 graph breaks (moe); no: {limit} (fell)." in care
    assert "compiled: yes, 8 graph breaks, 1 recompile" in section(text, "Variants")


def test_trials_that_ran_alike_are_not_warned_of(plain_text: Any) -> None:
    text = plain_text(results([trial(name, 0, 2.5, compiled=False) for name in ("baseline", "other")]))
    assert "ompil" not in section(text, "Read with care")
    assert "compiled: no" in section(text, "Variants")


def test_single_values_are_in_no_table(plain_text: Any) -> None:
    cell = {"trial_id": "baseline-0", "phase": "train", "batch": 4, "context": 16, "spread": None}
    series = [{**cell, "metric": "step_seconds", "value": 1.0, "sample": n} for n in (1, 2)]
    median = {**cell, "metric": "step_seconds_p50", "value": 1.0, "sample": None}
    text = section(plain_text(results([trial("baseline", 0, 2.5)], profiles=[*series, median])), "Profiles")
    ((heads, *rows),) = tables_of(text)
    assert heads == ["variant", "batch", "context", "step, median ↓ (ms)", "n"]
    assert rows == [["baseline", "4", "16", "1,000", "1"]]


def test_exponents_are_told_by_variant_with_the_kernel_that_ran(plain_text: Any) -> None:
    ran = json.dumps({"train": ["_scaled_dot_product_flash_attention_for_cpu", "mm"], "decode": ["mm"]})
    rows = [trial("baseline", seed, 2.5, kernels=ran) for seed in range(3)] + [trial("a", 0, 2.5)]
    squares, flat = {128: 1.0, 256: 4.0, 512: 16.0}, {128: 1.0, 256: 1.0, 512: 4.0}
    profiles = [
        *(
            row
            for seed, far in enumerate((0.9, 1.0, 5.0))
            for row in lengths(f"baseline-{seed}", squares | {512: far * 16})
        ),
        *lengths("a-0", flat),
        *lengths("a-0", {128: 100, 256: 200}, "training_pass_bytes_p50"),
    ]
    text = section(plain_text(results(rows, profiles=profiles)), "Scaling with sequence length")
    exponents, points = tables_of(text)
    assert exponents[1] == ["baseline", "flash_attention_for_cpu", "n/a", "2.00 [2.00, 2.00]; 2.00", "n/a", "3"]
    assert exponents[2][:3] == ["a", "n/a", "n/a"]
    assert exponents[2][4:] == ["1.00; 1.00", "3"], "two points have no interval"
    assert points[0][:3] == ["variant", "batch", "context"]
    assert [row[2] for row in points[1:]] == ["128", "256", "512"] * 2
    assert "§" not in text, "a wide interval holds what lies between the last two"


def test_what_is_no_power_law_is_marked(plain_text: Any) -> None:
    bent = {2**n: 100.0 + 2.0**n for n in range(4, 12)}
    text = plain_text(results([trial("baseline", 0, 2.5)], profiles=lengths("baseline-0", bent)))
    shown = section(text, "Scaling with sequence length")
    assert re.search(r"0\.\d+ \[.*; 0\.9\d §", shown)
    assert "No power law" in shown


def test_a_cell_has_its_new_tokens_and_its_path(plain_text: Any) -> None:
    cell = {"trial_id": "baseline-0", "phase": "decode", "batch": 1, "context": 8, "metric": "x", "value": 1.0}
    profiles = [{**cell, "new_tokens": n, "path": path} for n in (16, 4) for path in ("b", None, "a")]
    ((heads, *rows),) = tables_of(
        section(plain_text(results([trial("baseline", 0, 2.5)], profiles=profiles)), "Profiles")
    )
    assert heads == ["variant", "batch", "context", "new tokens", "path", "x", "n"]
    assert [row[3:5] for row in rows] == [[n, path] for n in ("4", "16") for path in ("—", "a", "b")]


def test_profiles_give_median_and_spread(plain_text: Any) -> None:
    rows = [trial("baseline", seed, 2.5) for seed in range(3)] + [trial("a", 0, None, status="decode_mismatch")]
    profiles = [
        {
            **{"trial_id": row["trial_id"], "phase": "decode", "batch": 8, "context": 512},
            **{"metric": "tokens_per_second", "value": 100.0 * (row["seed"] + 1) ** 2, "spread": 5.0},
        }
        for row in rows
    ]
    found = tables_of(section(plain_text(results(rows, profiles=profiles)), "Profiles"))
    assert found == [
        [
            ["variant", "batch", "context", "tokens_per_second", "n"],
            ["baseline", "8", "512", "400.0 (800.0)", "3"],
        ]
    ]
    alone = [each | {"spread": 5.0} for each in profiles[1:2]]
    assert "400.0 (5.000)" in section(plain_text(results(rows, profiles=alone)), "Profiles")


def test_trials_without_a_spread_of_their_own_have_one_between_them(plain_text: Any) -> None:
    rows = [trial("baseline", seed, 2.5) for seed in range(3)]
    cell_of = {"phase": "decode", "batch": 8, "context": 512, "spread": None}
    measured = {"tokens_per_second": (100.0, 400.0, 900.0), "cache_bytes": (64.0, 64.0, 64.0)}
    profiles = [
        {**cell_of, "trial_id": row["trial_id"], "metric": metric, "value": each[row["seed"]]}
        for metric, each in measured.items()
        for row in rows
    ]
    (table,) = tables_of(section(plain_text(results(rows, profiles=profiles)), "Profiles"))
    assert table[1] == ["baseline", "8", "512", "400.0 (800.0)", "64", "3"]


def test_what_no_trial_has_is_told_where_it_could_have_been(plain_text: Any) -> None:
    rows = [
        trial(
            "baseline", 0, 2.5, train_tokens_per_second=9.0, decode_tokens_per_second=2.0, decode_bandwidth_share=0.5
        ),
        trial("a", 0, 2.5, train_tokens_per_second=9.0, mfu=0.1, hfu=0.2),
    ]
    (line,) = (each for each in plain_text(results(rows)).splitlines() if each.startswith("- Not measured"))
    absent = ("model FLOPs utilisation of the data sheet", "energy", "decode energy")
    doctor = "`python -m ablate doctor` tells what this machine lacks for it"
    assert line == f"- Not measured: {'; '.join(absent)} ({doctor})"
    assert "Not measured" not in plain_text(results([trial("baseline", 0, 2.5)])), "nothing of it was asked for"


def test_what_was_only_profiled_is_run_again_so(plain_text: Any) -> None:
    again = "python -m ablate run x.yaml"
    profiled = [trial("baseline", 0, None, steps=None, train_tokens_per_second=9.0)]
    assert f"  {again} --only profile\n" in plain_text(results(profiled, command=again))
    trained = [*profiled, trial("a", 0, 2.5, steps=4)]
    assert f"  {again}\n" in plain_text(results(trained, command=again))


def test_a_profile_of_another_machine_than_the_training_is_told(plain_text: Any) -> None:
    then = {"torch": "2.13.0", "device_name": "Some CPU", "git_commit": "abc"}
    rows = [
        trial("baseline", 0, 2.5, **then, profile_conditions=json.dumps(then)),
        trial("a", 0, 2.5, **then, profile_conditions=json.dumps(then | {"torch": "2.14.0"})),
    ]
    care = section(plain_text(results(rows)), "Read with care")
    assert "Prefill and decoding of a were measured with another torch than training" in care
    assert "another device than" not in care
    assert "another commit" not in care


def test_times_and_speeds_of_two_trials_tell_the_same(plain_text: Any) -> None:
    rows = [trial("baseline", seed, 2.5) for seed in range(2)]
    values = {"decode_seconds_per_token_p50": (0.002, 0.008), "decode_tokens_per_second": (500.0, 125.0)}
    cell_of = {"phase": "decode", "batch": 1, "context": 512, "spread": None}
    profiles = [
        {**cell_of, "trial_id": row["trial_id"], "metric": metric, "value": each[row["seed"]]}
        for metric, each in values.items()
        for row in rows
    ]
    (table,) = tables_of(section(plain_text(results(rows, profiles=profiles)), "Profiles"))
    assert table[1] == ["baseline", "1", "512", "4.000 (6.000)", "250.0 (375.0)", "2"]


def test_what_went_on_around_a_profile_is_told_too(plain_text: Any) -> None:
    around = {"throttle_reasons": "container_quota", "other_load_cores": 0.8}
    rows = [
        trial("baseline", 0, 2.5, throttle_reasons="none", other_load_cores=0.1, profile_conditions=json.dumps(around)),
        trial("a", 0, 2.5, throttle_reasons="thermal", profile_conditions=json.dumps({"throttle_reasons": None})),
    ]
    text = section(plain_text(results(rows)), "Read with care")
    assert "held back (container_quota, thermal) while these were measured: baseline, a." in text
    assert "Up to 0.8 cores were busy with something else" in text


def test_points_that_a_log_axis_cannot_show_are_counted(tmp_path: Path) -> None:
    rows = [trial("baseline", 0, 2.5), trial("a", 0, 2.5), trial("_b$c$", 0, 2.5)]
    variants = [
        entry("baseline", range(1), kv_cache_bytes_by_tokens=[[0, 0], [64, 6400]]),
        entry("a", range(1), kv_cache_bytes_by_tokens=[[0, 0], [64, 0]]),
        entry("_b$c$", range(1), kv_cache_bytes_by_tokens=[[0, 64], [64, 640]]),
    ]
    text = text_of(results(rows, variants), tmp_path)
    assert "Not drawn: 4 points at zero." in text
    picture = (tmp_path / "plots" / "1-cache.svg").read_text(encoding="utf-8")
    assert ">baseline<" in picture
    assert ">_b$c$<" in picture
    assert ">a<" not in picture


def test_a_device_that_was_held_back_or_shared_is_told(plain_text: Any) -> None:
    rows = [
        trial("baseline", 0, 2.5, throttle_reasons="none", other_load_cores=0.1, matmul_peak_flops=1e9),
        trial(
            "a",
            0,
            2.5,
            throttle_reasons="hw_slowdown,sw_power_cap",
            other_load_cores=1.26,
            matmul_peak_flops=2e9,
            train_flops_per_token_counted=3e6,
            train_tokens_per_second=700.0,
        ),
    ]
    text = section(plain_text(results(rows)), "Read with care")
    assert "held back (hw_slowdown, sw_power_cap) while these were measured: a." in text
    assert "Up to 1.3 cores were busy with something else" in text
    assert "- a trained faster than the measured matmul peak allows" in text
    assert "Not the same measured matmul peak" in text
    quiet = [trial(name, 0, 2.5, throttle_reasons="none", other_load_cores=0.4) for name in ("baseline", "a")]
    text = plain_text(results(quiet))
    assert "held back" not in text
    assert "matmul peak allows" not in text
    assert "cores were busy" not in text


def test_nothing_above_zero_is_no_data(tmp_path: Path) -> None:
    variants = [entry("baseline", range(1), kv_cache_bytes_by_tokens=[[64, 0]])]
    text = text_of(results([trial("baseline", 0, 2.5)], variants), tmp_path)
    assert "KV cache by context length: no data above zero." in text
    assert not (tmp_path / "plots" / "1-cache.svg").exists()


@given(st.lists(st.text(), min_size=2, max_size=4))
def test_any_text_in_a_cell_is_shown_as_it_is(texts: list[str]) -> None:
    markdown = table([escape(each) for each in texts], [[escape(each) for each in texts]])
    (found,) = tables_of(f"before\n\n{markdown}\n\nafter")
    control = r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
    expected = [" ".join(re.sub(control, " ", each).split()) for each in texts]
    assert found == [expected, expected]


@given(st.text(alphabet="|\\`*_[]<>&$~#ab \n", max_size=12))
def test_special_characters_survive_each_other(text: str) -> None:
    markdown = table(["x", "y"], [[escape(text), "end"]])
    (found,) = tables_of(markdown)
    assert found[1] == [" ".join(text.split()), "end"]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        new = text_of(golden_results(), Path(scratch), comparison="http://127.0.0.1:5000/#/a b")
    GOLDEN.write_text(new, encoding="utf-8")

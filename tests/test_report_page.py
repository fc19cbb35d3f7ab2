"""The report for browsers and for machines: the same as the Markdown, whole, safe to open, and the same bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_report import NAN, cell, curve, entry, golden_results, losses, results, tables_of, text_of, trial
from test_security import HOSTILE

from ablate import report
from ablate.report import document, page
from ablate.report.drawn import inline
from ablate.report.markup import read
from ablate.results import Results

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags with their attributes, and the cells of each table as they are shown; fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("strong", "br") and {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += {"strong": "**", "br": "<br>"}[tag]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "strong" and {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += "**"

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)


@dataclass
class Written:
    """A report's three files."""

    text: str
    html: str
    data: dict[str, Any]

    @property
    def page(self) -> Page:
        return Page(self.html)


def written(given: Results, folder: Path) -> Written:
    def refused(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = text_of(given, folder)
    data = json.loads((folder / "report.json").read_text(encoding="utf-8"), parse_constant=refused)
    return Written(text, (folder / "report.html").read_text(encoding="utf-8"), data)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The files without plots, which take most of the time."""
    monkeypatch.setattr("ablate.report.plots_of", lambda _: [])
    return lambda given: written(given, tmp_path)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(golden_results(), tmp_path_factory.mktemp("golden"))


# --- The same in all three --------------------------------------------------------------------------------------------


def test_the_page_has_every_table_of_the_report_cell_for_cell(golden: Written) -> None:
    assert golden.page.tables == tables_of(golden.text)


def test_the_document_has_every_table_of_the_report_cell_for_cell(golden: Written) -> None:
    told = [each for section in golden.data["sections"] for each in section["tables"]]
    shown = tables_of(golden.text)
    found = [
        [[text.replace("\n", "<br>") for text in row] for row in (each["headers"], *each["rows"])] for each in told
    ]
    assert found == [[[text.replace("**", "") for text in row] for row in each] for each in shown]
    for each, rows in zip(told, shown, strict=True):
        bold = [[y, x] for y, row in enumerate(rows[1:]) for x, text in enumerate(row) if "**" in text]
        assert each["bold"] == bold


def test_every_heading_is_a_section_with_an_address(golden: Written) -> None:
    headings = re.findall(r"(?m)^##? (.+)$", re.sub(r"(?s)```.*?```", "", golden.text))
    assert len(golden.data["sections"]) == len(headings)
    names = [attributes["id"] for tag, attributes in golden.page.tags if tag == "section"]
    links = [str(attributes["href"]) for tag, attributes in golden.page.tags if tag == "a"]
    assert len(set(names)) == len(headings)
    assert [link[1:] for link in links if link.startswith("#")] == names


def test_what_a_part_adds_later_is_in_all_three(monkeypatch: pytest.MonkeyPatch, without_plots: Any) -> None:
    @dataclass(frozen=True)
    class Found:
        loss: float
        names: frozenset[str]

    new = "## Added\n\nA sentence.\n\n### Below\n\n| x |\n|:---|\n| **1** |"
    monkeypatch.setattr("ablate.report.scaling.section", lambda _: new)
    monkeypatch.setitem(document.PARTS, "added", lambda _: {"a": Found(NAN, frozenset("ba")), "b": (1, 2)})
    monkeypatch.setitem(document.PARTS, "nothing", lambda _: None)
    found = without_plots(results([trial("baseline", 0, 2.5)]))
    assert new in found.text
    assert [["x"], ["**1**"]] in found.page.tables
    assert found.data["added"] == {"a": {"loss": None, "names": ["a", "b"]}, "b": [1, 2]}
    assert "nothing" not in found.data
    (section,) = (each for each in found.data["sections"] if each["title"] == "Added")
    assert section == {
        "title": "Added",
        "text": ["A sentence."],
        "tables": [{"under": "Below", "headers": ["x"], "rows": [["1"]], "bold": [[0, 0]]}],
    }


def test_sentences_are_told_as_they_are_shown() -> None:
    found = read("## T\n\n- **a\\|b**: x  \n  y\n- `c`\n\n> q\n\n```sh\nrun\n```\n\n![alt](p.svg)\n\ncaption")
    assert found.text == ["a|b: x y", "c", "q", "run", "caption"]


# --- The page is safe to open -----------------------------------------------------------------------------------------

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "nav", "ol", "ul", "li", "a", "main", "section", "p", "script"),
    *("h1", "h2", "h3", "blockquote", "strong", "em", "code", "pre", "details", "summary", "br", "div"),
    *("table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "defs", "clippath", "path", "rect", "use", "circle", "text"),
}


def loads(attributes: dict[str, str | None]) -> list[str]:
    """What an element would fetch or run."""
    kept = {"style", "class", "id", "href", "role", "rel", "content"}
    return [name for name in attributes if name.startswith("on") or name in {"src", "srcset", "action", "data"} - kept]


def test_the_page_loads_nothing_and_runs_its_own_script_alone(golden: Written) -> None:
    tags = golden.page.tags
    assert {tag for tag, _ in tags} <= TAGS
    assert not [(tag, found) for tag, attributes in tags if (found := loads(attributes))]
    assert not re.findall(r"@import|url\((?!#)", golden.html)
    assert all(str(each["href"]).startswith("#") for tag, each in tags if tag == "use")
    (script,) = re.findall(r"(?s)<script>(.*?)</script>", golden.html)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [str(each["content"]) for tag, each in tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in policy


def test_every_plot_of_the_report_is_in_the_page_under_names_of_its_own(golden: Written) -> None:
    plots = [attributes for tag, attributes in golden.page.tags if tag == "svg"]
    assert [each["aria-label"] for each in plots] == re.findall(r"!\[([^]]*)\]\(plots/", golden.text)
    names = Counter(each["id"] for _, each in golden.page.tags if each.get("id"))
    assert {name for name, times in names.items() if times > 1} == set()
    used = set(re.findall(r"url\(#([^)]*)\)", golden.html)) | {
        str(each["href"])[1:] for tag, each in golden.page.tags if tag == "use"
    }
    assert used
    assert used <= set(names)


def test_what_hostile_results_say_is_text_in_the_page(tmp_path: Path) -> None:
    names = [
        "baseline",
        *HOSTILE,
        "</script><script>alert(1)</script>",
        "]]><svg onload=alert(1)>",
        "\uffff\ufffe x",
        '"><img src=x>',
    ]
    rows = [
        trial(name, 0, 2.5 + i / 10, reason=name, log=name, train_tokens_per_second=1.0 + i)
        for i, name in enumerate(names)
    ]
    rows += [trial(text, 1, None, status="crashed", reason=text, phase=text, device=text, log=text) for text in names]
    curves = [each for name in names for each in curve(f"{name}-0", [3.0, 2.9, 2.8])]
    given = results(rows, [entry(name, range(2)) for name in names], curves=curves, question=names[-1], name=names[-3])
    found = written(given, tmp_path)
    assert {tag for tag, _ in found.page.tags} <= TAGS
    assert not [attributes for _, attributes in found.page.tags if loads(attributes)]
    assert found.html.count("<script") == 1
    targets = [str(each["href"]) for tag, each in found.page.tags if tag == "a"]
    assert all(target.startswith("#") for target in targets)
    assert found.page.tables == tables_of(found.text)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", found.html)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "a <img src=x onerror=alert(1)> b",
        "[x](javascript:alert(1)) [x](data:text/html,x) [x](//evil.example)",
        "![x](http://evil.example/x.svg)",
        "<details ontoggle=alert(1)>",
    ],
)
def test_markup_that_slips_into_a_section_is_text(text: str) -> None:
    """A part that forgets to escape a name."""
    found = Page(page.written(["# t", f"## s\n\n{text}\n\n- {text}"], {}).decode())
    assert {tag for tag, _ in found.tags} <= TAGS - {"details", "svg"}
    assert not [attributes for _, attributes in found.tags if loads(attributes)]
    assert [str(each["href"]) for tag, each in found.tags if tag == "a"] == ["#t", "#s"]


def test_of_a_plot_only_what_draws_is_kept() -> None:
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9">'
    svg = (
        '<script>x</script><g onclick="x" id="a"><path d="M0" style="fill: url(#c)"/><image xlink:href="http://x"/>'
        '<use xlink:href="#a"/><use xlink:href="http://x#a"/><rect style="fill: url(http://x)"/></g></svg>'
    )
    shown = inline((head + svg).encode(), 'a "b"', "p1-")
    assert "script" not in shown
    assert "http" not in shown
    assert "onclick" not in shown
    assert 'aria-label="a &quot;b&quot;"' in shown
    assert '<g id="p1-a"><path d="M0" style="fill: url(#p1-c)"></path><use href="#p1-a"></use>' in shown


# --- The document -----------------------------------------------------------------------------------------------------


def test_figures_are_told_in_full(without_plots: Any) -> None:
    given = results(losses(baseline=[2.5, 2.6, 2.7], a=[2.3, 2.401, 2.5], b=[NAN, math.inf, 2.0]))
    found = without_plots(given)
    by_name = {each["name"]: each for each in found.data["variants"]}
    loss = by_name["a"]["values"]["val_loss"]
    assert loss["by_seed"] == {"0": 2.3, "1": 2.401, "2": 2.5}
    assert loss["mean"] == pytest.approx(2.400333333, abs=1e-9)
    assert loss["n"] == 3
    difference = by_name["a"]["to_baseline"]["val_loss"]
    assert difference["verdict"] == "better"
    assert difference["low"] < difference["mean"] < difference["high"] < 0
    assert by_name["b"]["values"]["val_loss"]["by_seed"] == {"2": 2.0}
    assert by_name["baseline"]["to_baseline"] == {}
    assert by_name["a"]["values"]["params_total"] == {"exact": 1000}
    assert found.data["metrics"]["val_loss"] == {
        **{"label": "validation loss", "unit": "nats/token", "shown_divided_by": 1},
        **{"better": "lower", "exact": False},
    }


def test_a_timing_without_a_check_has_no_verdict_for_machines_either(without_plots: Any) -> None:
    rows = losses(baseline=[2.5, 2.6, 2.7], a=[2.5, 2.6, 2.7])
    for row in rows:
        row["train_tokens_per_second"] = (200.0 if row["variant"] == "a" else 100.0) + row["seed"] ** 2
    found = without_plots(results(rows)).data["variants"][1]["to_baseline"]
    assert found["train_tokens_per_second"]["verdict"] == "withheld"
    assert found["val_loss"]["verdict"] == "no clear difference"


def test_every_planned_trial_is_told_with_its_end(golden: Written) -> None:
    told = Counter((each["variant"], each["status"]) for each in golden.data["trials"])
    assert told["中文", "oom"] == told["中文", "diverged"] == told["中文", None] == 1
    assert sum(told.values()) == golden.data["experiment"]["planned"] == 17
    assert golden.data["experiment"]["outcomes"]["not finished"] == 2
    assert golden.data["invalid"][0]["variant"] == "n_heads=3"


def test_what_is_best_is_told_as_it_is_bold(golden: Written) -> None:
    for each in golden.data["comparisons"]:
        table = next(rows for rows in tables_of(golden.text) if [row[0] for row in rows[1:]] == each["variants"])
        heading = next(text for text in table[0] if text.startswith("validation loss"))
        bold = [row[0] for row in table[1:] if row[table[0].index(heading)].startswith("**")]
        assert each["best"].get("val_loss", []) == bold


def test_a_report_before_the_first_trial_ended_has_all_files(without_plots: Any) -> None:
    found = without_plots(results([], [entry("baseline", range(1)), entry("a", range(1))]))
    assert [each["status"] for each in found.data["trials"]] == [None, None]
    assert "No result yet" in "".join(found.page.texts)


def test_the_report_names_the_files_beside_it(without_plots: Any) -> None:
    found = without_plots(results([trial("baseline", 0, 2.5)]))
    assert found.text.index("[report.html](report.html)") < found.text.index("## Summary")
    assert "report.html" not in found.html


# --- Tables that fit a screen -----------------------------------------------------------------------------------------


def test_no_table_is_wider_than_a_screen_where_all_is_measured(without_plots: Any) -> None:
    from ablate.metrics import METRICS

    everything = {name: 7 if name.endswith("bytes") else 7.0 for name in METRICS if name != "val_loss"}
    rows = [trial(name, seed, 2.5, **everything) for name in ("baseline", "a") for seed in range(2)]
    devices = {str(n): 512 for n in (1, 2, 4, 8)}
    variants = [entry(name, range(2), kv_cache_bytes_by_devices=devices) for name in ("baseline", "a")]
    profiles = [
        {"trial_id": "a-0", "phase": phase, "batch": 1, "context": 8, "new_tokens": 4, "path": "p"}
        | {"metric": name, "value": 1.0, "spread": 0.1}
        for phase in ("train", "decode")
        for name in METRICS
    ]
    text = without_plots(results(rows, variants, profiles=profiles)).text
    wide = [table[0] for table in tables_of(text) if len(table[0]) > 5 + 6 + 1]
    assert not wide
    compared = text.split("## Comparison: attention")[1].split("\n## ")[0]
    assert max(len(table[0]) for table in tables_of(compared)) <= 9
    for name in ("wall_seconds", "peak_rss_bytes", "mfu_datasheet", "decode_bandwidth_share", "largest_length"):
        assert cell(compared, "a", METRICS[name].heading)
    in_profiles = {heading for table in tables_of(text.split("## Profiles")[1]) for heading in table[0]}
    assert {metric.heading for metric in METRICS.values()} <= in_profiles


def test_the_files_of_the_page_are_part_of_the_package() -> None:
    import tomllib

    settings = tomllib.loads((Path(report.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    packed = settings["tool"]["setuptools"]["package-data"]["ablate"]
    home = Path(report.__file__).parents[1]
    files = {path for pattern in packed for path in home.glob(pattern)}
    assert {path for path in (home / "report").iterdir() if path.suffix in (".css", ".js")} <= files

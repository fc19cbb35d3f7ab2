"""Results -> Markdown, plots, one page of HTML and JSON. A pure function: the same results give the same bytes, at any
moment of a run.

A part of the report makes a section, a Markdown text that is empty where it has nothing to say: a line in `_document`.
The page and `report.json` are made of all sections; what a part tells machines beyond them is a line in `document`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ablate.files import write_bytes
from ablate.report import (
    appendix,
    budgets,
    claims,
    conditions,
    contrasts,
    document,
    effects,
    ladder,
    page,
    scaling,
    timing,
    tuning,
)
from ablate.report import summary as first_page
from ablate.report.comparison import COSTS, Comparison, comparisons, footnotes, tables_of
from ablate.report.drawing import Plot, can_draw
from ablate.report.evidence import Evidence, evidence_of
from ablate.report.plots import plots_of
from ablate.report.text import escape
from ablate.results import Results

__all__ = ["write_report"]

PLOTS = "plots"
NOT_DRAWN = "The plots are left out: matplotlib is not installed where this report was written."
NO_TIME = "The plots are left out: the run was interrupted. `python -m ablate report FILE` draws them."
BESIDE = (
    "The same in one file, with tables that sort and plots with hover: [report.html](report.html). For machines: "
    "[report.json](report.json)."
)
_OWN_PLOT = re.compile(r"\d+-[a-z]+\.svg")


def write_report(
    results: Results, folder: Path, links: Mapping[str, str] | None = None, *, in_haste: bool = False
) -> Path:
    """Writes `report.md`, its plots, `report.html` and `report.json` into `folder`; `links` (label -> URL) are in it.
    Drawing takes longer than all the rest: `in_haste` it is left out.

    Each file is replaced whole and the report comes last, so that a reader never sees half of one. Returns its path.
    """
    evidence = evidence_of(results, NO_TIME if in_haste else "" if can_draw() else NOT_DRAWN)
    sections, plots = _document(evidence, links or {})
    for name, svg in plots.items():
        write_bytes(folder / PLOTS / name, svg)
    write_bytes(folder / "report.json", document.written(evidence, sections))
    write_bytes(folder / "report.html", page.written(sections, {f"{PLOTS}/{name}": svg for name, svg in plots.items()}))
    path = folder / "report.md"
    title, *rest = sections
    write_bytes(path, ("\n\n".join([title, BESIDE, *rest]) + "\n").encode("utf-8"))
    _remove_stale_plots(folder / PLOTS, set(plots))
    return path


def _document(evidence: Evidence, links: Mapping[str, str]) -> tuple[list[str], dict[str, bytes]]:
    """The sections in their order, and the plots that they show, by name: `<a number>-<a word>.svg`."""
    files: dict[str, bytes] = {}
    sections = [
        first_page.title(evidence),
        first_page.summary(evidence),
        claims.section(evidence),
        conditions.cautions(evidence),
        conditions.variants_table(evidence),
        contrasts.section(evidence),
        effects.section(evidence),
        budgets.section(evidence),
        ladder.section(evidence),
        timing.section(evidence),
        tuning.section(evidence, files),
        *map(_comparison, comparisons(evidence)),
        scaling.section(evidence),
        appendix.profiles(evidence),
        _plots(evidence, files),
        appendix.failures(evidence),
        conditions.what_ran(evidence, links),
        appendix.all_trials(evidence),
        appendix.DEFINITIONS,
    ]
    return [section for section in sections if section], files


def _comparison(comparison: Comparison) -> str:
    found = tables_of(comparison)
    parts = [f"## Comparison: {escape(comparison.title)}"]
    parts += [f"### {topic}\n\n{text}" for topic, text in found.items()]
    if not found.keys() & COSTS.keys():
        parts.append("Speed and memory: no data.")
    return "\n\n".join([*parts, *footnotes(comparison)])


def _plots(evidence: Evidence, files: dict[str, bytes]) -> str:
    if evidence.why_no_plots:
        return f"## Plots\n\n{evidence.why_no_plots}"
    parts = []
    for place, title, plots in plots_of(evidence):
        parts.append(f"### {escape(title)}")
        parts += [_picture(plot, f"{place}-{plot.slug}.svg", files) for plot in plots]
    return "\n\n".join(["## Plots", *parts]) if parts else ""


def _picture(plot: Plot, name: str, files: dict[str, bytes]) -> str:
    if plot.svg is None:
        return plot.caption
    files[name] = plot.svg
    return f"![{escape(plot.title)}]({PLOTS}/{name})\n\n{plot.caption}"


def _remove_stale_plots(folder: Path, current: set[str]) -> None:
    """Plots of an earlier report whose comparison is gone; nothing else in the folder is ours."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _OWN_PLOT.fullmatch(path.name) and path.name not in current:
                path.unlink(missing_ok=True)

"""Results -> Markdown and plots. A pure function: the same results give the same bytes, at any moment of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ablate.files import write_bytes
from ablate.report import appendix, conditions, scaling, timing, tuning
from ablate.report import summary as first_page
from ablate.report.comparison import (
    Comparison,
    cache_table,
    capacity_table,
    comparisons,
    cost_table,
    footnotes,
    memory_table,
    quality_table,
)
from ablate.report.evidence import Evidence, evidence_of
from ablate.report.plots import Plot, can_draw, plots_of
from ablate.report.text import escape
from ablate.results import Results

__all__ = ["write_report"]

PLOTS = "plots"
NOT_DRAWN = "The plots are left out: matplotlib is not installed where this report was written."
_OWN_PLOT = re.compile(r"\d+-(loss|trade|cache|tuning)\.svg")


def write_report(results: Results, folder: Path, links: Mapping[str, str] | None = None) -> Path:
    """Writes `report.md` and its plots into `folder`; `links` (label -> URL) are listed in it.

    Each file is replaced whole and the report comes last, so that a reader never sees half of one.
    """
    evidence = evidence_of(results)
    sections, plots = _document(evidence, links or {})
    for name, svg in plots.items():
        write_bytes(folder / PLOTS / name, svg)
    path = folder / "report.md"
    write_bytes(path, ("\n\n".join(sections) + "\n").encode("utf-8"))
    _remove_stale_plots(folder / PLOTS, set(plots))
    return path


def _document(evidence: Evidence, links: Mapping[str, str]) -> tuple[list[str], dict[str, bytes]]:
    files: dict[str, bytes] = {}
    sections = [
        first_page.title(evidence),
        first_page.summary(evidence),
        conditions.cautions(evidence),
        conditions.what_ran(evidence, links),
        conditions.variants_table(evidence),
        timing.section(evidence),
        tuning.section(evidence, files),
        *_comparison_sections(evidence, files),
        scaling.section(evidence),
        appendix.profiles(evidence),
        appendix.failures(evidence),
        appendix.all_trials(evidence),
        appendix.DEFINITIONS,
    ]
    return [section for section in sections if section], files


def _comparison_sections(evidence: Evidence, files: dict[str, bytes]) -> Iterator[str]:
    for place, comparison in enumerate(comparisons(evidence), start=1):
        parts = [f"## Comparison: {escape(comparison.title)}", *_tables(comparison)]
        if can_draw():
            parts += [_picture(plot, f"{place}-{plot.slug}.svg", files) for plot in plots_of(comparison, evidence)]
        elif place == 1:
            parts.append(NOT_DRAWN)
        yield "\n\n".join(parts)


def _tables(comparison: Comparison) -> list[str]:
    cost = cost_table(comparison)
    measured = [
        cost or "Speed and memory: no data.",
        memory_table(comparison),
        capacity_table(comparison),
        cache_table(comparison),
    ]
    parts = [quality_table(comparison), *measured, "\n\n".join(footnotes(comparison))]
    return [part for part in parts if part]


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

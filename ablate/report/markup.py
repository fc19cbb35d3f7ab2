"""The report's Markdown, read back: a section's heading, its sentences, and its tables as their cells show them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

_ADDRESS = re.compile(r"https?://|[\w-][\w./-]*\Z")


@dataclass(frozen=True)
class Table:
    """What the cells show, as text; `bold` are the places (row, column) of those that are marked as best."""

    under: str  # the heading above it
    headers: list[str]
    rows: list[list[str]]
    bold: list[tuple[int, int]]


@dataclass(frozen=True)
class Section:
    """Its heading, its paragraphs and points in their order, and its tables."""

    title: str
    text: list[str]
    tables: list[Table]


@cache
def parser() -> MarkdownIt:
    """CommonMark with tables. What leads elsewhere than into the web or to a file beside is no link."""
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark").enable("table")
    made.validateLink = lambda url: _ADDRESS.match(url) is not None  # type: ignore[method-assign]
    return made


def read(markdown: str) -> Section:
    """One section of the report."""
    from markdown_it.tree import SyntaxTreeNode

    section, under = Section("", [], []), ""
    for node in SyntaxTreeNode(parser().parse(markdown)).children:
        if node.type == "heading" and not section.title:
            section = Section(shown(node), section.text, section.tables)
        elif node.type == "heading":
            under = shown(node)
        elif node.type == "table":
            section.tables.append(_table(node, under))
        else:
            section.text.extend(text for each in _points(node) if (text := shown(each)))
    return section


def _points(node: SyntaxTreeNode) -> Iterator[SyntaxTreeNode]:
    """The points of a list; of all else itself."""
    yield from node.children if node.type in ("bullet_list", "ordered_list") else (node,)


def _table(node: SyntaxTreeNode, under: str) -> Table:
    lines = [list(row.children) for row in node.walk() if row.type == "tr"]
    cells = [[shown(cell) for cell in line] for line in lines]
    bold = [(y, x) for y, line in enumerate(lines[1:]) for x, cell in enumerate(line) if _is_bold(cell)]
    return Table(under, cells[0], cells[1:], bold)


def _is_bold(cell: SyntaxTreeNode) -> bool:
    return any(each.type == "strong" for each in cell.walk())


def shown(node: SyntaxTreeNode) -> str:
    """What a reader sees of it as text, lines apart."""
    if node.type in ("text", "code_inline", "code_block", "fence"):
        return node.content.rstrip("\n")
    if node.type in ("softbreak", "hardbreak"):
        return " "
    if node.type == "html_inline":
        return "\n" if node.content == "<br>" else node.content
    # Blocks, as the paragraphs of a point, are apart.
    between = "\n" if any(each.is_root or each.type in ("paragraph", "fence") for each in node.children) else ""
    return between.join(shown(each) for each in node.children if each.type != "image")

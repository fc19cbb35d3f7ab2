"""`report.html`: the sections of the report as one file that loads nothing, with tables that sort and plots with hover.

It is made of the same Markdown texts as `report.md`: a section that a part adds there is here too. Markup in a text is
shown as text, and by the page's own policy no script runs but ours.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from ablate.report.drawn import inline
from ablate.report.markup import parser, read

HERE = Path(__file__).parent
PREFORMED = re.compile(r"(<br>|</?details>|</?summary>)")
"""Markup that the report itself writes. What else looks like markup is text."""

FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<nav aria-label="Sections">
<ol>
{links}</ol>
</nav>
<main>
{body}</main>
<p id="told" hidden></p>
<script>{script}</script>
</body>
</html>
"""


def written(sections: Sequence[str], plots: Mapping[str, bytes]) -> bytes:
    """The page; `plots` are SVG by the address that the sections give them."""
    script, style = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    titles = [read(text).title for text in sections]
    named = list(zip(_names(titles), titles, strict=True))
    renderer = _Renderer(plots)
    bodies = [
        f'<section id="{name}">\n{renderer.page_of(text)}</section>\n'
        for (name, _), text in zip(named, sections, strict=True)
    ]
    links = [f'<li><a href="#{name}">{escape(title)}</a></li>\n' for name, title in named]
    page = FRAME.format(
        policy=_policy(script),
        title=escape(titles[0]),
        style=style,
        links="".join(links),
        body="".join(bodies),
        script=script,
    )
    return page.encode("utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    own = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _names(titles: Sequence[str]) -> Iterator[str]:
    """What an address of a section ends in, each once."""
    used: dict[str, int] = {}
    for title in titles:
        name = re.sub(r"\W+", "-", title.lower()).strip("-") or "section"
        used[name] = used.get(name, 0) + 1
        yield name if used[name] == 1 else f"{name}-{used[name]}"


class _Renderer(RendererHTML):
    """Each method says how tokens of its name become HTML; all others as CommonMark has them."""

    def __init__(self, plots: Mapping[str, bytes]) -> None:
        super().__init__()
        self._plots = plots
        self._drawn = 0

    def page_of(self, markdown: str) -> str:
        made = parser()
        return self.render(made.parse(markdown), made.options, {})

    def image(self, tokens: Sequence[Token], place: int, *_: Any) -> str:
        """The plot itself; of what is no plot of this report its words, and nothing is loaded."""
        token = tokens[place]
        svg = self._plots.get(str(token.attrGet("src")))
        if svg is None:
            return escape(token.content)
        self._drawn += 1
        return inline(svg, token.content, f"plot{self._drawn}-")

    def link_open(self, tokens: Sequence[Token], place: int, *_: Any) -> str:
        return f'<a href="{escape(str(tokens[place].attrGet("href")))}" rel="noopener noreferrer">'

    def table_open(self, *_: Any) -> str:
        return '<div class="table"><table>\n'

    def table_close(self, *_: Any) -> str:
        return "</table></div>\n"

    def html_inline(self, tokens: Sequence[Token], place: int, *_: Any) -> str:
        return _own_markup(tokens[place].content)

    def html_block(self, tokens: Sequence[Token], place: int, *_: Any) -> str:
        return _own_markup(tokens[place].content)


def _own_markup(text: str) -> str:
    parts = PREFORMED.split(text)
    return "".join(part if PREFORMED.fullmatch(part) else escape(part) for part in parts)

"""A plot's SVG as a part of a page: what it is drawn with and nothing else, under names that no other plot has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from xml.etree import ElementTree

ELEMENTS = {"svg", "g", "defs", "clipPath", "path", "rect", "use", "circle", "text", "tspan", "title"}
ATTRIBUTES = {
    *("viewBox", "d", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "width", "height", "transform", "style"),
    *("clip-path", "fill", "stroke", "pointer-events", "class", "id", "href"),
}
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_OUTSIDE = re.compile(r"url\((?!#)|@import|expression\(", re.IGNORECASE)


def inline(svg: bytes, title: str, prefix: str) -> str:
    """`svg` as HTML, called `title`; each id in it gets the `prefix`. What no plot is drawn with is left out."""
    root = ElementTree.fromstring(svg)
    size = " ".join(f'{name}="{escape(root.get(name, ""))}"' for name in ("viewBox", "width", "height"))
    inside = "".join(_markup(child, prefix) for child in root)
    return f'<svg class="plot" role="img" aria-label="{escape(title)}" {size}>{inside}</svg>'


def _markup(element: ElementTree.Element, prefix: str) -> str:
    name = _local(element.tag)
    if name not in ELEMENTS:
        return ""
    attributes = "".join(f' {key}="{escape(value)}"' for key, value in _attributes(element, prefix))
    inside = escape(element.text or "") + "".join(
        _markup(child, prefix) + escape(child.tail or "") for child in element
    )
    return f"<{name}{attributes}>{inside.strip()}</{name}>"


def _attributes(element: ElementTree.Element, prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in element.items():
        name = _local(key)
        if name == "id":
            yield name, prefix + value
        elif name == "href":
            if value.startswith("#"):
                yield name, f"#{prefix}{value[1:]}"
        elif name in ATTRIBUTES and not _OUTSIDE.search(value):
            yield name, _REFERENCE.sub(lambda match: f"url(#{prefix}{match.group(1)})", value)


def _local(name: str) -> str:
    return name.rpartition("}")[2]

"""Trees as YAML text, in ways that no ordinary writer would have: doubled keys, raw scraps, one line or many."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any


class Raw(str):
    """A scrap of text that goes into the file as it is."""


class Pairs(list[tuple[str, Any]]):
    """A mapping in which keys may occur twice."""


def flow(node: Any) -> str:
    """On one line: JSON but for what JSON does not have."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, Mapping | Pairs):
        pairs = node.items() if isinstance(node, Mapping) else node
        return "{" + ", ".join(f"{_key(key)}: {flow(value)}" for key, value in pairs) + "}"
    if isinstance(node, Sequence) and not isinstance(node, str):
        return "[" + ", ".join(map(flow, node)) + "]"
    return json.dumps(node)


def _key(key: str) -> str:
    return str(key) if isinstance(key, Raw) else json.dumps(key)


def written(node: Any, rng: Random) -> str:
    """As a file: all of it on one line, or its keys in lines of their own down to some level."""
    return "\n".join(_block(node, rng.randrange(4), "")) + "\n"


def _block(node: Any, levels: int, indent: str) -> list[str]:
    pairs = list(node.items()) if isinstance(node, Mapping) else node
    if levels == 0 or not isinstance(node, Mapping | Pairs) or not pairs:
        return [indent + flow(node)]
    lines = []
    for key, value in pairs:
        nested = levels > 1 and isinstance(value, Mapping | Pairs) and value
        lines += [f"{indent}{_key(key)}:" + ("" if nested else f" {flow(value)}")]
        lines += _block(value, levels - 1, indent + "  ") if nested else []
    return lines

"""Text for a terminal, in which nothing speaks to the terminal itself: no colours, no cursor, no writing backwards.

Names, reasons and whatever else is printed come from files, plug-ins and stored results of others.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from typing import Any

import click

# Spaces and letters of whatever script stay; so do joiners, which some scripts and emoji need.
_KEPT = "\n\t\u200c\u200d\ufe0e\ufe0f"
_SPECIAL = re.compile(r"[^ -~]")


def visible(text: str) -> str:
    """The text, with what would act on a terminal written out: `\\x1b[31m`."""
    return _SPECIAL.sub(lambda found: _shown(found.group()), text)


def visible_json(text: str) -> str:
    """The same of a JSON document, which means what it meant before."""
    return _SPECIAL.sub(lambda found: found.group() if _is_harmless(found.group()) else _escaped(found.group()), text)


def _is_harmless(letter: str) -> bool:
    return letter.isprintable() or letter in _KEPT or unicodedata.category(letter) == "Zs"


def _shown(letter: str) -> str:
    return letter if _is_harmless(letter) else ascii(letter)[1:-1]


def _escaped(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


class VisibleFormatter(logging.Formatter):
    """Log messages as `visible` text."""

    def format(self, record: logging.LogRecord) -> str:
        """The message alone."""
        return visible(super().format(record))


def echo(text: str, *, err: bool = False) -> None:
    """Print text that files, plug-ins and others' results had a part in."""
    click.echo(visible(text), err=err)


def print_json(document: Any) -> None:
    """Print one document, and nothing else."""
    click.echo(visible_json(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)))


def write_utf8() -> None:
    """Names and reasons may hold any letter, in whatever locale; what is no text must not stop a run either."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")

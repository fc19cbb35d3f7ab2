"""The report of the checks, in Markdown: the machine by what it is, never by whose or where it is."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.carried import ROOT
from gpu_checks.ledger import Finding, Stage

WORDS = ("passed", "failed", "skipped", "not run")
LONGEST = 600


def cleaner(work: Path) -> Callable[[str], str]:
    """What takes paths and names of this machine out of a text."""
    places = {
        work.resolve(): "WORK",
        work: "WORK",
        ROOT: ".",
        Path(sys.prefix): "PYTHON",
        Path(sys.base_prefix): "PYTHON",
    }
    known = sorted(((str(path), word) for path, word in places.items()), key=lambda each: -len(each[0]))
    names = [name for name in (socket.gethostname(), _user()) if name and len(name) > 2 and name != "root"]

    def clean(text: str) -> str:
        for path, word in known:
            text = text.replace(path, word)
        text = re.sub(r"(?<![\w.<])/(?:[\w.+~-]+/)+([\w.+-]+)", r"…/\1", text)
        for name in names:
            text = re.sub(rf"\b{re.escape(name)}\b", "…", text)
        return text

    return clean


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return None


def page(
    stages: Sequence[Stage],
    findings: Sequence[Finding],
    seconds: Mapping[str, float],
    facts: Mapping[str, str],
    clean: Callable[[str], str],
) -> str:
    """The whole report; `seconds` are those that each stage took so far."""
    counts = Counter[str](finding.word for finding in findings)
    parts = ["# GPU check", ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) + "."]
    parts.append(
        "\n".join(["| what | here |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in facts.items())])
    )
    for stage in stages:
        own = [finding for finding in findings if finding.stage == stage.name]
        rows = [f"| {_cell(each.says)} | {_word(each.word)} | {_cell(clean(each.figure))} |" for each in own]
        title = f"## {stage.title} ({seconds.get(stage.name, 0.0):.0f} s)"
        parts.append("\n".join([title, "", "| check | outcome | figure |", "|---|---|---|", *rows]))
    parts += _details(findings, clean)
    return "\n\n".join(parts) + "\n"


def _word(word: str) -> str:
    return f"**{word}**" if word == "failed" else word


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _details(findings: Sequence[Finding], clean: Callable[[str], str]) -> Iterator[str]:
    told = {clean(each.details): each for each in findings if each.details.strip()}
    if told:
        yield "## What was printed last"
    for text, finding in told.items():
        yield f"{finding.stage}: {finding.check}\n\n```text\n{text.strip()}\n```"


def machine(facts: Mapping[str, Any]) -> dict[str, str]:
    """What is to be told of the machine, from what `doctor` and torch said; n/a for what neither did."""
    cuda = facts.get("device") == "cuda"
    gibibytes = facts.get("bytes_by_torch") or facts.get("memory_bytes")
    told: dict[str, Any] = {
        "device": facts.get("device_name"),
        "memory": f"{gibibytes / 2**30:.1f} GiB" if gibibytes else None,
        "CPUs": facts.get("cpus"),
        "torch": facts.get("torch_build"),
    }
    if cuda:
        told |= {
            "compute capability": facts.get("capability"),
            "driver": facts.get("driver"),
            "CUDA of torch": facts.get("cuda"),
            "cuDNN": facts.get("cudnn"),
            "temperature": f"{facts['device_temperature_celsius']} °C"
            if facts.get("device_temperature_celsius")
            else None,
        }
    clock = facts.get("device_clock_mhz")
    told |= {"clock": f"{clock:,.0f} MHz" if clock else None, "held back by": facts.get("throttle_reasons")}
    return {name: "n/a" if value is None else str(value) for name, value in told.items()}

"""Whether what comes of a file is right: two lines for each fault, or a whole plan; and never anything left behind."""

from __future__ import annotations

import functools
import json
import re
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ablate import commands, gatekeeper
from ablate.asked import Wanted
from ablate.document import FileFaults
from fuzzing.case import Case

FILE = "fuzzed.yaml"
MOST_TRIALS = 60
"""Combinations to accept: a plan of a thousand takes its time rightly."""

_PLACED = re.compile(rf"{re.escape(FILE)}(:[1-9]\d*:[1-9]\d*)?: \S| is empty$")
_TIMED = ("predicted_seconds",)


def judge(case: Case) -> tuple[str, str]:
    """("refused" or "planned", "") where a file is dealt with rightly, else ("fault", what is wrong).

    The current directory must be empty, and is so afterwards.
    """
    outcome, told = _come_of(case.content)
    if outcome != "fault" and case.must == "refuse" and outcome != "refused":
        return "fault", "planned, though it is wrong"
    if outcome != "fault" and case.must == "same" and (outcome, told) != _of_origin(case.origin):
        return "fault", "not the same as of the file that says the same"
    return outcome, told if outcome == "fault" else ""


def _come_of(content: bytes) -> tuple[str, str]:
    file = Path(FILE)
    file.write_bytes(content)
    try:
        with patch.object(gatekeeper, "rehearse", return_value={}):  # of the user's own code none is there
            facts = commands.plan_facts(Wanted(FILE, device="cpu", max_trials=MOST_TRIALS))
        outcome = "planned", _signature(facts)
    except FileFaults as faults:
        wrong = _wrongly_told(faults)
        outcome = ("fault", wrong) if wrong else ("refused", "")
    except Exception:
        outcome = "fault", traceback.format_exc()
    file.unlink()
    if left := sorted(path.name for path in Path.cwd().iterdir()):
        return "fault", f"left behind: {', '.join(left)}"
    return outcome


def _wrongly_told(faults: FileFaults) -> str:
    """What is wrong with the way that faults are told: each has a line and a cure, and begins with its place."""
    for told in faults.lines:
        fault, _, cure = told.partition("\n  ")
        if "\n" in cure or not cure.strip() or (not told.isprintable() and not told.replace("\n", "").isprintable()):
            return f"not two lines: {told!r}"
        if not (_PLACED.match(fault) or fault == f"{FILE} is empty"):
            return f"without its place: {told!r}"
        if len(told) > 2000:
            return f"too long to be read: {told!r}"
    return "" if faults.lines else "refused without a word"


def _signature(facts: dict[str, Any]) -> str:
    """All that a plan says, but for times; what is not strict JSON raises."""
    said = json.dumps(facts, allow_nan=False, sort_keys=True)
    if not facts["variants"]:
        raise AssertionError("a plan of nothing")
    return re.sub(rf'"({"|".join(_TIMED)})": [^,}}]*', "", said)


@functools.lru_cache(maxsize=64)
def _of_origin(text: str) -> tuple[str, str]:
    return _come_of(text.encode())

"""What a check is, how a stage of them is carried out, and what came of each."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Word = Literal["passed", "failed", "skipped", "not run"]

OUT_OF_TIME = "out of time"


class Failed(Exception):
    """What was found is not what must be; `details` are for whoever looks into it."""

    def __init__(self, figure: str, details: str = "") -> None:
        super().__init__(figure)
        self.details = details


class Skipped(Exception):
    """There is a reason why this cannot be checked here."""


class Late(Exception):
    """There was no time for it."""


def expect(holds: object, figure: str) -> str:
    """`figure` if it `holds`; else it is what is wrong."""
    if not holds:
        raise Failed(figure)
    return figure


@dataclass(frozen=True)
class Setup:
    """Where a stage works: kind of device, folders for everything and for what is to be kept, and until when."""

    device: str
    quick: bool
    work: Path
    reports: Path
    deadline: float

    def seconds_left(self) -> float:
        """Until the stage is ended."""
        return self.deadline - time.time()

    def read(self, name: str) -> dict[str, Any]:
        """What an earlier stage wrote; empty where it did not come to that."""
        try:
            found: dict[str, Any] = json.loads((self.work / name).read_text(encoding="utf-8"))
        except OSError:
            return {}
        return found

    def write(self, name: str, facts: dict[str, Any]) -> None:
        """For later stages, and the report."""
        (self.work / name).write_text(json.dumps(facts), encoding="utf-8")


@dataclass(frozen=True)
class Finding:
    """What came of one check: the word, and the figure behind it or the reason."""

    stage: str
    check: str
    says: str
    word: Word
    figure: str
    details: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Which check of which stage."""
        return self.stage, self.check


@dataclass(frozen=True)
class Check:
    """One sentence, the docstring of `judge`, which returns the figure that shows it, or raises."""

    judge: Callable[[Any], str]
    cuda: bool = False

    @property
    def name(self) -> str:
        """That of the function."""
        return self.judge.__name__

    @property
    def says(self) -> str:
        """The sentence."""
        return inspect.cleandoc(self.judge.__doc__ or "").replace("\n", " ")


def on_cuda(judge: Callable[[Any], str]) -> Check:
    """A check that means something on a GPU alone."""
    return Check(judge, cuda=True)


@dataclass(frozen=True)
class Stage:
    """Checks of one thing that `prepare` makes, in at most so many `seconds`."""

    name: str
    title: str
    seconds: float
    prepare: Callable[[Setup], Any]
    judges: tuple[Check | Callable[[Any], str], ...]

    @property
    def checks(self) -> list[Check]:
        """All of them."""
        return [judge if isinstance(judge, Check) else Check(judge) for judge in self.judges]

    def all(self, word: Word, figure: str, checks: Iterable[Check] | None = None) -> Iterator[Finding]:
        """The same said of every check, or of those given."""
        for check in self.checks if checks is None else checks:
            yield Finding(self.name, check.name, check.says, word, figure)

    def run(self, setup: Setup) -> Iterator[Finding]:
        """What comes of each check, as it is known."""
        meant = [check for check in self.checks if setup.device == "cuda" or not check.cuda]
        yield from self.all("skipped", "only on a GPU", [check for check in self.checks if check not in meant])
        if not meant:
            return
        try:
            subject = self.prepare(setup)
        except Exception as error:
            yield from (self._ended(check, error) for check in meant)
            return
        yield from (self._judged(check, subject) for check in meant)

    def _judged(self, check: Check, subject: Any) -> Finding:
        try:
            return Finding(self.name, check.name, check.says, "passed", check.judge(subject))
        except Exception as error:
            return self._ended(check, error)

    def _ended(self, check: Check, error: Exception) -> Finding:
        words: dict[type[Exception], Word] = {Skipped: "skipped", Late: "not run"}
        told = isinstance(error, (Failed, Skipped, Late))
        figure = str(error) if told else f"{type(error).__name__}: {error}"
        details = getattr(error, "details", "")
        return Finding(self.name, check.name, check.says, words.get(type(error), "failed"), figure, details)


def to_line(finding: Finding) -> str:
    """For a file of findings, one a line."""
    return json.dumps(asdict(finding)) + "\n"


def from_lines(text: str) -> list[Finding]:
    """Those of such a file; a line that was not written whole is none."""
    return [Finding(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def complete(stage: Stage, found: Iterable[Finding], word: Word, figure: str) -> list[Finding]:
    """One finding of every check of the stage, in its order: of those that nobody judged, the word and figure given."""
    known = {finding.check: finding for finding in found}
    return [known.get(each.check, each) for each in stage.all(word, figure)]

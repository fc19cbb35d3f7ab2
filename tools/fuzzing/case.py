"""One mutated file, and what is known of it before anything reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Must = Literal["", "refuse", "same"]
"""What must come of a file: anything but a crash; a refusal; or the same as of the file that it was made from."""


@dataclass(frozen=True)
class Case:
    """A file's bytes, the kind of what was done to them, and what must come of it."""

    kind: str
    content: bytes
    must: Must = ""
    origin: str = ""

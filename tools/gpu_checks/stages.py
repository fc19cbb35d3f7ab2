"""The stages, in order of worth: where time runs out, it is the last that are missing."""

from __future__ import annotations

from gpu_checks import again, grid, machine, quickstart
from gpu_checks.ledger import Stage

STAGES: list[Stage] = [
    *machine.STAGES,
    quickstart.FIRST,
    grid.FIRST,
    grid.COMPILED,
    quickstart.LATER,
    grid.CAPACITY,
    again.STAGE,
]

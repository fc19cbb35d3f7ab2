"""The stages, in order of worth: where time runs out, it is the last that are missing.

Together their limits are no more than the script's time, so that each way that only a GPU has is gone once.
"""

from __future__ import annotations

from gpu_checks import again, grid, machine, quickstart
from gpu_checks.ledger import Stage

STAGES: list[Stage] = [
    *machine.STAGES,
    quickstart.FIRST,
    grid.CAPACITY,
    quickstart.LATER,
    again.STAGE,
    grid.FIRST,
    grid.COMPILED,
]

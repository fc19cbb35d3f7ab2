"""Has a device calibrated by a child, so that this process never touches a GPU and the child's memory goes with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ablate import child
from ablate.child import Child
from ablate.job import CalibrationJob, Peaks

LIMIT_SECONDS = 120.0


def calibrate(
    device: str, threads: int, *, anew: bool = False, stopped: Callable[[], bool] = lambda: False
) -> tuple[dict[str, Any], str | None]:
    """What is known of `device`, stored or measured (see `ablate.profiling.calibrate`); empty, with why, if nothing."""
    job = CalibrationJob(device, threads, anew, os.devnull, LIMIT_SECONDS)
    with child.environment(threads):
        running = Child(child.context(device), job)
    status, _, reason = child.attend(running, stopped)
    return (running.columns, None) if status == "ok" else ({}, reason)


def peaks_of(calibration: dict[str, Any]) -> Peaks:
    """The figures that measurements are held against."""
    products = calibration.get("matmul", {})
    known = {precision: each["flops_per_second"] for precision, each in products.items() if each}
    return Peaks(known, calibration.get("copy_bytes_per_second"))

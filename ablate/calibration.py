"""Has a device calibrated by a child, so that this process never touches a GPU and the child's memory goes with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ablate import child
from ablate.child import Child
from ablate.job import CalibrationJob, Peaks
from ablate.metrics import TIMED
from ablate.profiling import kept

LIMIT_SECONDS = 120.0

HELD_AGAINST = ("decode_bandwidth_share", "mfu")
"""Columns that are null where the device's peaks are not known."""


def calibrate(
    device: str, threads: int, *, anew: bool = False, stopped: Callable[[], bool] = lambda: False
) -> tuple[dict[str, Any], str | None]:
    """What is known of `device`, stored or measured (see `ablate.profiling.calibrate`); empty, with why, if nothing."""
    job = CalibrationJob(device, threads, anew, os.devnull, LIMIT_SECONDS)
    with child.environment(threads):
        running = Child(child.context(device), job)
    status, _, reason = child.attend(running, stopped)
    return (running.columns, None) if status == "ok" else ({}, reason)


def keep_aa(calibration: dict[str, Any], facts: dict[str, Any]) -> None:
    """Keep what an A/A check found of the device that the calibration is of."""
    from ablate.profiling import calibrate  # imports torch

    calibrate.keep_aa(calibration, facts)


def aa_columns(calibration: dict[str, Any]) -> dict[str, float]:
    """For a trial's row: within which bounds a step takes as long as itself by the A/A check; nothing without one."""
    step = ((calibration.get("aa") or {}).get("figures") or {}).get(TIMED["step"]) or {}
    bounds = {f"aa_step_{name}": step.get(name) for name in ("ratio_low", "ratio_high")}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def lacking(calibration: dict[str, Any]) -> dict[str, str]:
    """What cannot be measured here, by column, and why."""
    found: dict[str, str] = dict(calibration["lacking"])
    if others := kept.disturbance(calibration):
        found |= dict.fromkeys(HELD_AGAINST, f"other programs kept {others:.1f} cores busy when the peak was measured")
    return found


def peaks_of(calibration: dict[str, Any]) -> Peaks:
    """The figures that measurements are held against: none where they were disturbed."""
    if kept.disturbance(calibration):
        return Peaks()
    products = calibration.get("matmul", {})
    known = {precision: each["flops_per_second"] for precision, each in products.items() if each}
    return Peaks(known, calibration.get("copy_bytes_per_second"))

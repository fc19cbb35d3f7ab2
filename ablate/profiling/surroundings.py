"""What else went on while something was measured: other programs' load, clocks, heat, and what held the device back.

Each is None where it cannot be read. Asking takes some milliseconds, so it is done between steps, and seldom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from ablate import cgroup
from ablate.profiling.clock import percentile
from ablate.profiling.device import gpu_uuid
from ablate.profiling.nvml import Gpu

EVERY_SECONDS = 2.0

_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


class Surroundings:
    """Watches from `begin` on, whenever `sample` is called; clocks and heat are those of the device that computes.

    `used_bytes` is the most that was seen in use of a GPU's memory, by anybody; None where nothing tells.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._gpu = device.type == "cuda", Gpu(gpu_uuid(device))
        self._start: tuple[float, float, float] | None = None
        self._throttled: int | None = None
        self._due = float("inf")
        self._clocks: list[float] = []
        self._temperatures: list[float] = []
        self._reasons: set[str] | None = None
        self.used_bytes: int | None = None

    def begin(self) -> None:
        """What is measured begins."""
        self._start = _moment()
        self._throttled = None if self._on_gpu else times_throttled()
        self._due = 0.0

    def sample(self) -> None:
        """Look, if it is time to."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_SECONDS
        clock = self._gpu.clock_mhz() if self._on_gpu else cpu_clock_mhz()
        heat = self._gpu.temperature_celsius() if self._on_gpu else cpu_temperature_celsius()
        self._clocks += [] if clock is None else [clock]
        self._temperatures += [] if heat is None else [heat]
        if (used := self._gpu.used_bytes()) is not None:
            self.used_bytes = max(used, self.used_bytes or 0)
        if (reasons := self._gpu.held_back_by()) is not None:
            self._reasons = (self._reasons or set()) | reasons

    def columns(self) -> dict[str, Any]:
        """For the trial's row."""
        reasons = self._reasons if self._on_gpu else self._quota()
        return {
            "other_load_cores": self._others(),
            "device_clock_mhz_p50": percentile(self._clocks, 50) if self._clocks else None,
            "device_clock_mhz_min": min(self._clocks, default=None),
            "device_temperature_celsius_max": max(self._temperatures, default=None),
            "throttle_reasons": None if reasons is None else ",".join(sorted(reasons)) or "none",
        }

    def _others(self) -> float | None:
        """Cores that other programs kept busy on average."""
        now = _moment()
        if self._start is None or now is None or now[0] <= self._start[0]:
            return None
        wall, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        return max(0.0, (busy - own) / wall)

    def _quota(self) -> set[str] | None:
        now = times_throttled()
        if self._throttled is None or now is None:
            return None
        return {"container_quota"} if now > self._throttled else set()


def _moment() -> tuple[float, float, float] | None:
    """Seconds: of the clock on the wall, of all cores busy with anything, of this process."""
    busy = _asked(psutil.cpu_times)
    if busy is None:
        return None
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return time.perf_counter(), sum(getattr(busy, kind, 0.0) for kind in kinds), time.process_time()


def cpu_clock_mhz() -> float | None:
    """Of the processor's cores on average, now."""
    found = _asked(psutil.cpu_freq)
    return float(found.current) if found and found.current else None


def cpu_temperature_celsius() -> float | None:
    """Of the processor's hottest sensor, now."""
    found: Mapping[str, Any] = _asked(getattr(psutil, "sensors_temperatures", dict)) or {}
    degrees = [each.current for name in _SENSORS for each in found.get(name, []) if each.current is not None]
    return float(max(degrees)) if degrees else None


def times_throttled() -> int | None:
    """How often this container, or a group around it, was held back for its CPU quota."""
    told = [cgroup.words(folder / "cpu.stat") for folder in cgroup.folders("cpu")]
    counts = [int(words[words.index("nr_throttled") + 1]) for words in told if "nr_throttled" in words]
    return sum(counts) if counts else None


def _asked(question: Callable[[], Any]) -> Any:
    """The answer, or None: psutil fails in many ways where a system does not tell."""
    try:
        return question()
    except Exception:
        return None

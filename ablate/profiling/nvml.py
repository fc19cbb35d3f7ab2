"""What NVML tells of one GPU. Each question stands alone: what has no answer is None, and nothing raises."""

from __future__ import annotations

import math
from typing import Any

HELD_BACK = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of why clocks are not higher. An idle GPU's (0x001) is left out: nothing is held back."""

_IDLE = 0x001


class Gpu:
    """A GPU by its UUID, since NVML's numbering is not that of CUDA; a slice of one (MIG) by the slice's own.

    `shared` is whether it is a slice, or cut in slices: then others draw from the same counter of energy.
    """

    def __init__(self, uuid: str | None) -> None:
        self.why: str | None = None
        self.shared = False
        self._nvml: Any = None
        self._handle: Any = None
        if uuid is None:
            self.why = "no GPU is in use"
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = _handle(pynvml, uuid)
            self._nvml = pynvml
        except Exception as error:  # no package, no driver, no such GPU, or a driver that fails in its own way
            self.why = f"{type(error).__name__}: {error}".rstrip(": ")
        modes = self.ask("MigMode")
        self.shared = uuid.startswith("MIG-") or (isinstance(modes, list | tuple) and bool(modes and modes[0]))

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer to `nvmlDeviceGet<question>`, or None."""
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{question}")(self._handle, *arguments)
        except Exception:  # not supported here, or unknown to an older pynvml
            return None

    def joules(self) -> float | None:
        """What it has drawn since its driver was loaded; None where that is not its own."""
        drawn = None if self.shared else _number(self.ask("TotalEnergyConsumption"))
        return None if drawn is None else drawn / 1e3

    def used_bytes(self) -> int | None:
        """What anybody uses of its memory, now; None for a slice, of which NVML would tell the whole GPU's."""
        used = None if self.shared else _number(getattr(self.ask("MemoryInfo"), "used", None))
        return None if used is None else int(used)

    def clock_mhz(self) -> float | None:
        """Of its multiprocessors, now."""
        sm = 1
        return _number(self.ask("ClockInfo", sm)) or None

    def temperature_celsius(self) -> float | None:
        """Of the chip, now."""
        chip = 0
        return _number(self.ask("Temperature", chip))

    def held_back_by(self) -> set[str] | None:
        """Why its clocks are not higher, now; empty where nothing holds them back."""
        told = _number(self.ask("CurrentClocksEventReasons"))
        told = _number(self.ask("CurrentClocksThrottleReasons")) if told is None else told  # the name before driver 535
        if told is None:
            return None
        bits = int(told) & ~_IDLE
        known = {word for bit, word in HELD_BACK.items() if bits & bit}
        return known | ({f"{rest:#x}"} if (rest := bits & ~sum(HELD_BACK)) else set())


def _number(answer: Any) -> float | None:
    """An answer that can be one: a driver may give words, nothing, or less than nothing where it knows none."""
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return None
    return float(answer) if math.isfinite(answer) and answer >= 0 else None


def _handle(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except TypeError:  # older bindings take bytes alone
        return nvml.nvmlDeviceGetHandleByUUID(uuid.encode())


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # as above
        return None
    version = version.decode(errors="replace") if isinstance(version, bytes) else version
    return version if isinstance(version, str) else None

"""Energy of the device that computes: a GPU's by NVML, a CPU's by RAPL; None where neither can be read.

RAPL (running average power limit) counts what a processor's packages and its memory draw, whoever uses them. So energy
is that of a trial only while it has the device to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ablate.model import Transformer
from ablate.profiling.clock import Clock
from ablate.profiling.decode import generate
from ablate.profiling.device import gpu_uuid
from ablate.profiling.nvml import Gpu

POWERCAP = Path("/sys/class/powercap")
"""Where Linux shows the counters of RAPL, one folder a zone."""

AT_LEAST_SECONDS = 1.0
"""Decoding goes on for so long: counters are renewed some ten times a second."""

MOST_ROUNDS = 200


class _Zone:
    """The counter of one RAPL zone, in microjoules. It starts anew from 0 after its largest value."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._largest = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
        self._last, self._total = self._reading(), 0

    def _reading(self) -> int:
        return int(self._file.read_text(encoding="ascii"))

    def joules(self) -> float:
        """Since this object was made. Right if asked at least once in each turn of the counter."""
        now = self._reading()
        self._total += (now - self._last) % (self._largest + 1)
        self._last = now
        return self._total / 1e6


def _folders(powercap: Path) -> list[Path]:
    """Those of packages, and of memory, which is in no package. Parts of a package would count twice."""
    found = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        found += [folder] if name.startswith("package") or name == "dram" else []
    return found


class EnergyMeter:
    """Counts the joules of a device. `source` is "nvml" or "rapl", or None with the reason in `why`."""

    def __init__(self, device: torch.device, powercap: Path = POWERCAP) -> None:
        self.source: str | None = None
        self.why: str | None = None
        self._gpu = Gpu(gpu_uuid(device))
        self._zones: list[_Zone] = []
        self._last = 0.0
        if device.type == "cuda":
            self._open_gpu()
        else:
            self._open(powercap)

    def _open_gpu(self) -> None:
        self.source = None if self._gpu.joules() is None else "nvml"
        if self.source is None:
            shared = "energy is counted for the whole GPU, not for a slice of it"
            self.why = self._gpu.why or (shared if self._gpu.shared else "this GPU does not count its energy")

    def _open(self, powercap: Path) -> None:
        folders = _folders(powercap)
        if not folders:
            self.why = f"no RAPL counter in {powercap}"
            return
        try:
            self._zones = [_Zone(folder) for folder in folders]
            self.source = "rapl"
        except PermissionError:
            self.why = f"the RAPL counters in {powercap} may be read by root alone"
        except (OSError, ValueError) as error:
            self.why = f"the RAPL counters in {powercap} cannot be read: {error}"

    def joules(self) -> float | None:
        """The reading now, from an arbitrary start; None for good once a counter has started anew in between."""
        now = self._gpu.joules() if self.source == "nvml" else self._of_zones()
        if now is not None and now < self._last:
            self.source, self.why, self._zones, now = None, "the counter of energy started anew", [], None
        self._last = self._last if now is None else now
        return now

    def _of_zones(self) -> float | None:
        try:
            return sum(zone.joules() for zone in self._zones) if self._zones else None
        except (OSError, ValueError):
            return None


@torch.inference_mode()
def decode_joules_per_token(
    model: Transformer, prompt: torch.Tensor, new_tokens: int, meter: EnergyMeter, clock: Clock, seconds: float | None
) -> float | None:
    """Energy of a token written after `prompt` `(B, T)`, which takes about so many `seconds`; None where unknown.

    What the prompts alone take is measured as often and taken off, since a counter is too slow to tell where reading
    ends and writing begins.
    """
    if new_tokens == 0 or not seconds or meter.joules() is None:
        return None
    rounds = min(MOST_ROUNDS, math.ceil(AT_LEAST_SECONDS / (seconds * new_tokens)))
    whole = _joules(lambda: generate(model, prompt, new_tokens, clock), rounds, meter, clock)
    read = _joules(lambda: generate(model, prompt, 0, clock), rounds, meter, clock)
    if whole is None or read is None or whole <= read:
        return None
    return (whole - read) / (rounds * new_tokens * len(prompt))


def _joules(work: Callable[[], Any], rounds: int, meter: EnergyMeter, clock: Clock) -> float | None:
    before = meter.joules()
    for _ in range(rounds):
        work()
    clock.seconds(clock.mark(), clock.mark())  # waits for the device
    after = meter.joules()
    return None if before is None or after is None else after - before

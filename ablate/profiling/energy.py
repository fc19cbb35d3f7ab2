"""Energy of the device that computes: a GPU's by NVML, a CPU's by RAPL; None where neither can be read.

RAPL (running average power limit) counts what a processor's packages and its memory draw, whoever uses them. So energy
is that of a trial only while it has the device to itself.
"""

from __future__ import annotations

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

RENEWED_SECONDS = {"nvml": 0.1, "rapl": 0.001}
"""How often a counter is renewed, by where it is."""

LEAST_RENEWALS = 20
"""What is measured lasts for so many: its energy is known to one of them at both ends."""

AT_LEAST_SECONDS = 2.0
"""Decoding goes on for so long, and so does what is taken off it."""


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

    @property
    def least_seconds(self) -> float:
        """What takes less is too short for this counter."""
        return LEAST_RENEWALS * RENEWED_SECONDS.get(self.source or "", 0.0)

    def too_short(self, seconds: float) -> bool:
        """Whether it counted so few seconds that it tells nothing; the trial's log then says so."""
        if seconds >= self.least_seconds:
            return False
        print(f"no energy: {seconds:.3g} s were measured, and {self.source} needs {self.least_seconds:g} s", flush=True)
        return True

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
    model: Transformer, prompt: torch.Tensor, new_tokens: int, meter: EnergyMeter, clock: Clock
) -> float | None:
    """Energy of a token written after `prompt` `(B, T)`; None where unknown.

    What a prompt alone takes is measured by itself and taken off, since a counter is too slow to tell where reading
    ends and writing begins.
    """
    if new_tokens == 0 or meter.joules() is None:
        return None
    whole = _joules(lambda: generate(model, prompt, new_tokens, clock), meter, clock)
    read = _joules(lambda: generate(model, prompt, 0, clock), meter, clock)
    if whole is None or read is None or whole <= read:
        return None
    return (whole - read) / (new_tokens * len(prompt))


def _joules(work: Callable[[], Any], meter: EnergyMeter, clock: Clock) -> float | None:
    """Of one round of `work`, which is done again and again for as long as the counter needs."""
    before, begin, rounds, seconds = meter.joules(), clock.mark(), 0, 0.0
    while seconds < AT_LEAST_SECONDS:
        work()
        rounds += 1
        seconds = clock.seconds(begin, clock.mark())  # waits for the device
    after = meter.joules()
    return None if before is None or after is None or after <= before else (after - before) / rounds

"""What this machine can measure, what not, and why. No GPU is touched here: a child does, and tells."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import psutil

from ablate import calibration, child, machine
from ablate.metrics import TIMED


def examine(device: str) -> dict[str, Any]:
    """Facts by name, null where unknown; `lacking` names columns of a trial that are null here, with the reason.

    Peaks are measured anew, and stored for the runs to come.
    """
    threads = machine.available_threads()
    with child.environment(threads):
        child.warm_up(child.context(device))
    measured, why = calibration.calibrate(device, threads, anew=True)
    software = machine.software()
    return {
        "device": device,
        "device_name": measured.get("device_name"),
        "gpu_uuid": measured.get("gpu_uuid"),
        "driver": measured.get("driver"),
        "cpus": os.cpu_count(),
        "affinity_cpus": machine.affinity(),
        "quota_cores": machine.cgroup_quota(),
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "matmul": measured.get("matmul", {}),
        "datasheet_flops": measured.get("datasheet_flops", {}),
        "copy_bytes_per_second": measured.get("copy_bytes_per_second"),
        "timer_seconds": measured.get("timer_seconds"),
        "energy_source": measured.get("energy_source"),
        "device_clock_mhz": measured.get("device_clock_mhz_p50"),
        "device_temperature_celsius": measured.get("device_temperature_celsius_max"),
        "throttle_reasons": measured.get("throttle_reasons"),
        "other_load_cores": measured.get("other_load_cores"),
        "aa": measured.get("aa"),
        "os": platform.system(),
        **{name: software[name] for name in ("python", "torch", "ablate")},
        "lacking": measured.get("lacking", {}),
        "fault": why,
    }


Line = tuple[str, str, str]


def lines(facts: Mapping[str, Any]) -> list[Line]:
    """The facts for people: what, the figure or n/a, and what it means or why it is missing."""
    return [*_machine(facts), *_peaks(facts), *_counters(facts), *_aa(facts["aa"])]


def _machine(facts: Mapping[str, Any]) -> list[Line]:
    fault = f"could not be examined: {facts['fault']}" if facts["fault"] else ""
    quota = "no quota" if facts["quota_cores"] is None else f"a quota of {facts['quota_cores']:g}"
    affinity = "no affinity" if facts["affinity_cpus"] is None else f"{facts['affinity_cpus']} allowed"
    software = ", ".join(f"{name} {facts[name]}" for name in ("torch", "python", "ablate"))
    return [
        ("device", f"{facts['device']}: {facts['device_name'] or 'n/a'}", facts["gpu_uuid"] or fault),
        ("NVIDIA driver", facts["driver"] or "n/a", "" if facts["driver"] else "NVML finds none"),
        ("threads", str(facts["threads"]), f"{facts['cpus']} CPUs, {affinity}, {quota}"),
        ("memory", f"{facts['memory_bytes'] / 2**30:,.1f} GiB", facts["os"]),
        ("software", software, ""),
    ]


def _peaks(facts: Mapping[str, Any]) -> list[Line]:
    load = facts["other_load_cores"]
    disturbed = f"; {load:.1f} cores were busy with other programs" if load is not None and load >= 0.2 else ""
    found: list[Line] = []
    for precision, peak in facts["matmul"].items():
        size, usual = int(peak["size"]), _amount(peak["median_flops_per_second"], "FLOP/s")
        note = f"{size:,} x {size:,}, median round {usual}{disturbed}"
        found.append((f"matmul {precision}", _amount(peak["flops_per_second"], "FLOP/s"), note))
        promised = facts["datasheet_flops"].get(precision)
        if promised is not None:
            found.append((f"data sheet {precision}", _amount(promised, "FLOP/s"), "dense"))
    copied = facts["copy_bytes_per_second"]
    found.append(("memory bandwidth", _amount(copied, "B/s"), f"of a copy, read and written{disturbed}"))
    return [*found, ("timer", _amount(facts["timer_seconds"], "s"), "smallest step seen")]


def _counters(facts: Mapping[str, Any]) -> list[Line]:
    lacking = facts["lacking"]
    shown = {
        "energy_joules_per_token": ("energy", facts["energy_source"], "with one trial at a time (--workers 1)"),
        "device_clock_mhz_p50": ("clock", _with_unit(facts["device_clock_mhz"], "MHz"), ""),
        "device_temperature_celsius_max": ("temperature", _with_unit(facts["device_temperature_celsius"], "°C"), ""),
        "throttle_reasons": ("held back by", facts["throttle_reasons"], "while this was measured"),
        "other_load_cores": ("other load", _with_unit(facts["other_load_cores"], "cores"), "while this was measured"),
    }
    found: list[Line] = [
        (what, "n/a", lacking.get(column, "")) if here is None or column in lacking else (what, here, note)
        for column, (what, here, note) in shown.items()
    ]
    if "mfu_datasheet" in lacking:
        found.append(("data sheet", "n/a", lacking["mfu_datasheet"]))
    return found


def _aa(kept: Mapping[str, Any] | None) -> list[Line]:
    """The noise of a time, from one process to the next, as the last A/A check found it."""
    if kept is None:
        return [("A/A noise", "n/a", "python -m ablate doctor --aa measures it")]
    known = [(kind, kept["figures"].get(metric)) for kind, metric in TIMED.items()]
    return [
        (f"A/A noise, {kind}", f"{100 * each['sd']:.2g} %", _judged(each, kept["measured_at"]))
        for kind, each in known
        if each and each["sd"] is not None
    ]


def _judged(figure: Mapping[str, Any], measured_at: str) -> str:
    said = "no difference seen" if figure["inside"] else "DIFFERS FROM ITSELF"
    low, high = (100 * (figure[name] - 1) for name in ("ratio_low", "ratio_high"))
    return f"{said}: [{low:+.1f}, {high:+.1f}] % over {figure['n']} rounds, {measured_at[:10]}"


def _with_unit(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:,.1f} {unit}"


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def _amount(value: float | None, unit: str) -> str:
    if not value:
        return "n/a"
    factor, prefix = next(((f, p) for f, p in _PREFIXES if value >= f), _PREFIXES[-1])
    return f"{value / factor:.3g} {prefix}{unit}"

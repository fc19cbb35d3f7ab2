"""What a machine is told to be able to measure, on machines that are made up, and on this one."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ablate import calibration, doctor, machine
from ablate.cli import main
from ablate.job import Peaks
from ablate.machine import Resources
from ablate.profiling import energy, lacking, surroundings
from ablate.runner import Run

MEASURED = {
    "device_name": "NVIDIA H200",
    "gpu_uuid": "GPU-1",
    "driver": "570.1",
    "matmul": {"bf16": {"flops_per_second": 7.5e14, "median_flops_per_second": 7.0e14, "size": 8192}},
    "datasheet_flops": {"bf16": 989e12},
    "copy_bytes_per_second": 4.2e12,
    "timer_seconds": 5e-7,
    "energy_source": "nvml",
    "device_clock_mhz_p50": 1980.0,
    "device_temperature_celsius_max": 61.0,
    "throttle_reasons": "sw_power_cap",
    "other_load_cores": 0.1,
    "lacking": {},
}


def examined(monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any], why: str | None = None) -> dict[str, Any]:
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: (measured, why))
    monkeypatch.setattr(doctor.child, "warm_up", lambda _: None)
    monkeypatch.setattr(machine, "cgroup_quota", lambda: 1.5)
    return doctor.examine("cpu")


def shown(facts: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {what: (here, note) for what, here, note in doctor.lines(facts)}


def test_everything_that_can_be_measured_is_shown_with_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shown(examined(monkeypatch, MEASURED))
    assert found["device"] == ("cpu: NVIDIA H200", "GPU-1")
    assert found["NVIDIA driver"][0] == "570.1"
    assert found["matmul bf16"] == ("750 TFLOP/s", "8,192 x 8,192, median round 700 TFLOP/s")
    assert found["data sheet bf16"] == ("989 TFLOP/s", "dense")
    assert found["memory bandwidth"][0] == "4.2 TB/s"
    assert found["timer"][0] == "500 ns"
    assert found["energy"][0] == "nvml"
    assert found["clock"][0] == "1,980.0 MHz"
    assert found["held back by"][0] == "sw_power_cap"
    assert "a quota of 1.5" in found["threads"][1]
    assert len(found) <= 24, "one screen"


def test_what_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"energy_joules_per_token": "root alone", "device_temperature_celsius_max": "no sensor can be read"}
    measured = {**MEASURED, "energy_source": None, "device_temperature_celsius_max": None, "lacking": missing}
    found = shown(examined(monkeypatch, measured | {"other_load_cores": 1.3, "driver": None}))
    assert found["energy"] == ("n/a", "root alone")
    assert found["temperature"] == ("n/a", "no sensor can be read")
    assert found["NVIDIA driver"] == ("n/a", "NVML finds none")
    assert "1.3 cores were busy" in found["matmul bf16"][1]


def test_a_device_that_cannot_be_examined_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examined(monkeypatch, {}, "signal 9 (SIGKILL)")
    assert facts["matmul"] == {}
    assert facts["copy_bytes_per_second"] is None
    found = shown(facts)
    assert "signal 9" in found["device"][1]
    assert found["memory bandwidth"][0] == found["energy"][0] == "n/a"


def test_doctor_of_this_machine() -> None:
    done = CliRunner().invoke(main, ["doctor", "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["device"] == "cpu"
    assert {"fp32", "bf16"} == set(facts["matmul"])
    assert facts["threads"] == machine.available_threads()
    assert 0 < facts["timer_seconds"] < 1e-3
    assert facts["copy_bytes_per_second"] > 1e6
    assert ("energy_joules_per_token" in facts["lacking"]) == (facts["energy_source"] is None)
    assert {what for what, _, _ in doctor.lines(facts)} >= {"device", "threads", "matmul fp32", "timer", "energy"}


def test_a_machine_that_tells_nothing_lacks_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(surroundings.Surroundings, "columns", lambda _: dict.fromkeys(lacking._UNREAD))
    meter = energy.EnergyMeter(torch.device("cpu"), tmp_path)
    monkeypatch.setattr(lacking, "EnergyMeter", lambda _: meter)
    found = lacking.lacking(torch.device("cpu"))
    assert set(found) == {"energy_joules_per_token", "mfu_datasheet", *lacking._UNREAD}
    assert all(found.values())


def test_a_sweep_says_once_what_it_cannot_measure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def calibrate(device: str, threads: int, **_: Any) -> tuple[dict[str, Any], str | None]:
        asked.append(threads)
        known = {"matmul": {"fp32": {"flops_per_second": 1e9 * threads}}, "lacking": {"mfu_datasheet": "unknown"}}
        return ({}, "timeout") if threads == 4 else (known, None)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setattr(Run, "_threads", lambda self, task: task)
    run = Run.__new__(Run)
    run.resources, run.peaks, run.aa = Resources("cpu", 2, 1), {}, {}
    with caplog.at_level(logging.WARNING):
        run._calibrate([2, 1, 2, 4], [])  # type: ignore[list-item]
        run._calibrate([], [])
    assert asked == [1, 2, 4]
    assert run.peaks == {1: Peaks({"fp32": 1e9}), 2: Peaks({"fp32": 2e9}), 4: Peaks()}
    (warning,) = caplog.messages
    for word in ("mfu_datasheet (unknown)", "mfu (timeout)", "energy_joules_per_token (trials that run at once"):
        assert word in warning

"""Energy, clocks, heat and load: against counters that are known, and where none can be read."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from ablate import cgroup
from ablate.profiling import clock, energy, surroundings
from ablate.profiling.energy import EnergyMeter, decode_joules_per_token
from ablate.profiling.nvml import Gpu, driver_version
from ablate.profiling.surroundings import Surroundings
from ablate.profiling.watch import Watch
from ablate.settings import TrainSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def fake_nvml(**calls: Callable[..., Any]) -> types.ModuleType:
    """A driver with two GPUs, that answers what is given and nothing else."""
    module = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-1": 7, "GPU-2": 3, "MIG-1": 5}[uuid]
    for name, call in calls.items():
        setattr(module, name, call)
    return module


def refuse(*_: Any) -> None:
    raise sys.modules["pynvml"].NVMLError("Not Supported")


@pytest.fixture
def with_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU of this UUID is in use, with this driver; None is none."""

    def install(module: Any, uuid: str = "GPU-1") -> None:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        for user in (energy, surroundings):
            monkeypatch.setattr(user, "gpu_uuid", lambda device: uuid if device.type == "cuda" else None)

    return install


@pytest.fixture
def powercap(tmp_path: Path) -> Callable[..., Path]:
    """A tree as Linux shows it: zones as a flat list, each with its name, counter and largest value."""

    def write(**readings: int) -> Path:
        zones = {
            "intel-rapl:0": "package-0",
            "intel-rapl:0:0": "core",
            "intel-rapl:0:1": "dram",
            "intel-rapl:1": "psys",
            "intel-rapl-mmio:0": "package-0",
        }
        for folder, name in zones.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "name").write_text(f"{name}\n")
            (tmp_path / folder / "max_energy_range_uj").write_text("9999999\n")
            (tmp_path / folder / "energy_uj").write_text(f"{readings.get(name.partition('-')[0], 0)}\n")
        (tmp_path / "intel-rapl").mkdir(exist_ok=True)
        return tmp_path

    return write


# --- A GPU's ----------------------------------------------------------------------------------------------------------


def test_a_gpu_s_energy_is_its_own_in_joules(with_nvml: Callable[..., None]) -> None:
    with_nvml(fake_nvml(nvmlDeviceGetTotalEnergyConsumption=lambda handle: {7: 2500, 3: 9000}[handle]))
    meter = EnergyMeter(CUDA)
    assert (meter.joules(), meter.source, meter.why) == (2.5, "nvml", None)


@pytest.mark.parametrize(
    "calls",
    [{"nvmlInit": refuse}, {"nvmlDeviceGetHandleByUUID": refuse}, {"nvmlDeviceGetTotalEnergyConsumption": refuse}, {}],
)
def test_without_a_driver_or_its_counter_energy_is_unknown(with_nvml: Callable[..., None], calls: Any) -> None:
    with_nvml(fake_nvml(**calls))
    meter = EnergyMeter(CUDA)
    assert (meter.joules(), meter.source) == (None, None)
    assert meter.why


def test_without_nvml_nothing_of_a_gpu_is_known_and_nothing_raises(with_nvml: Callable[..., None]) -> None:
    with_nvml(None)
    assert EnergyMeter(CUDA).joules() is None
    gpu = Gpu("GPU-1")
    assert "pynvml" in str(gpu.why)
    assert [gpu.joules(), gpu.clock_mhz(), gpu.temperature_celsius(), gpu.held_back_by()] == [None] * 4
    assert driver_version() is None


def test_each_question_to_a_slice_of_a_gpu_stands_alone(with_nvml: Callable[..., None]) -> None:
    module = fake_nvml(
        nvmlDeviceGetClockInfo=lambda handle, kind: {(5, 1): 1755}[handle, kind],
        nvmlDeviceGetTemperature=refuse,
        nvmlDeviceGetTotalEnergyConsumption=refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x001 | 0x004 | 0x040 | 0x400,
    )
    with_nvml(module, uuid="MIG-1")
    around = Surroundings(CUDA)
    around.begin()
    around.sample()
    found = around.columns()
    assert found["device_clock_mhz_p50"] == found["device_clock_mhz_min"] == 1755
    assert found["device_temperature_celsius_max"] is None
    assert found["throttle_reasons"] == "0x400,hw_thermal_slowdown,sw_power_cap", "idle holds nothing back"
    module.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0  # the newer name is asked first
    assert Gpu("MIG-1").held_back_by() == set()


# --- A CPU's ----------------------------------------------------------------------------------------------------------


def test_rapl_counts_packages_and_memory_once(powercap: Callable[..., Path]) -> None:
    meter = EnergyMeter(CPU, powercap(package=1_000_000, dram=500_000, core=7, psys=7))
    assert (meter.joules(), meter.source) == (0.0, "rapl")
    powercap(package=4_000_000, dram=700_000, core=9_000_000, psys=9_000_000)
    assert meter.joules() == pytest.approx(3.2)


def test_a_counter_that_starts_anew_goes_on_counting(powercap: Callable[..., Path]) -> None:
    meter = EnergyMeter(CPU, powercap(package=9_000_000))
    powercap(package=1_000_000)
    assert meter.joules() == pytest.approx(2.0)
    powercap(package=500_000)
    assert meter.joules() == pytest.approx(2.0 + 9.5)
    powercap(package=600_000)
    assert meter.joules() == pytest.approx(11.6)


def test_rapl_is_renewed_each_millisecond_and_needs_twenty(
    powercap: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    meter = EnergyMeter(CPU, powercap())
    assert [meter.too_short(seconds) for seconds in (0.019, 0.02)] == [True, False]
    assert capfd.readouterr().out == "no energy: 0.019 s were measured, and rapl needs 0.02 s\n"


def zone(powercap: Path, folder: str, name: str, reading: int, largest: int = 9_999_999) -> None:
    """One more zone, or a new reading of it."""
    (powercap / folder).mkdir(exist_ok=True)
    for file, content in {"name": name, "energy_uj": reading, "max_energy_range_uj": largest}.items():
        (powercap / folder / file).write_text(f"{content}\n")


SERVER = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "dram",
    "intel-rapl:0:1": "core",
    "intel-rapl:1": "package-1-die-0",
    "intel-rapl:1:0": "dram",
    "intel-rapl:2": "package-1-die-1",
    "intel-rapl:3": "psys",
}


def test_every_package_and_its_memory_counts_once_and_the_whole_platform_never(tmp_path: Path) -> None:
    for folder, name in SERVER.items():
        zone(tmp_path, folder, name, 100)
    meter = EnergyMeter(CPU, tmp_path)
    drawn = {"package-0": 1, "dram": 10, "core": 1_000, "package-1-die-0": 100, "package-1-die-1": 200, "psys": 5_000}
    for folder, name in SERVER.items():
        zone(tmp_path, folder, name, 100 + 1_000 * drawn[name])
    assert meter.joules() == pytest.approx((1 + 100 + 200 + 2 * 10) / 1e3)


def test_counters_start_anew_one_by_one_each_at_its_own_end(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 7_000_000, largest=9_999_999)
    zone(tmp_path, "intel-rapl:0:0", "dram", 2_000_000, largest=2_999_999)
    meter = EnergyMeter(CPU, tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000, largest=9_999_999)  # 2 J
    zone(tmp_path, "intel-rapl:0:0", "dram", 1_500_000, largest=2_999_999)  # 1 J to its end, and 1.5 J
    assert meter.joules() == pytest.approx(2 + 2.5)
    zone(tmp_path, "intel-rapl:0", "package-0", 500_000, largest=9_999_999)  # 1 J to its end, and 0.5 J
    assert meter.joules() == pytest.approx(2 + 2.5 + 1.5)


def test_a_counter_that_is_unreadable_for_a_while_loses_nothing(powercap: Callable[..., Path]) -> None:
    folder = powercap(package=1_000_000)
    meter = EnergyMeter(CPU, folder)
    (folder / "intel-rapl:0" / "energy_uj").write_text("")
    assert meter.joules() is None
    powercap(package=3_000_000)
    assert meter.joules() == pytest.approx(2.0)


@pytest.mark.parametrize("zones", [["intel-rapl:0"], ["intel-rapl:0:1"], ["intel-rapl:0", "intel-rapl:0:1"]])
def test_a_sum_without_one_of_its_counters_is_not_given(
    powercap: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, zones: list[str]
) -> None:
    folder, read = powercap(package=5, dram=5), Path.read_text

    def forbid(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.name == "energy_uj" and self.parent.name in zones:
            raise PermissionError(13, "Permission denied", str(self))
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", forbid)
    meter = EnergyMeter(CPU, folder)
    assert (meter.joules(), meter.source) == (None, None)
    assert "root alone" in str(meter.why)


def test_counters_that_are_broken_or_missing_say_why(powercap: Callable[..., Path], tmp_path: Path) -> None:
    nothing = EnergyMeter(CPU, tmp_path / "nowhere")
    assert (nothing.joules(), nothing.source) == (None, None)
    assert "no RAPL counter" in str(nothing.why)
    folder = powercap(package=5)
    (folder / "intel-rapl:0" / "energy_uj").write_text("broken")
    assert "cannot be read" in str(EnergyMeter(CPU, folder).why)
    powercap(package=5)
    (folder / "intel-rapl:0" / "max_energy_range_uj").unlink()
    assert "cannot be read" in str(EnergyMeter(CPU, folder).why)


# --- A token's --------------------------------------------------------------------------------------------------------


class Counter:
    """A meter that shows what is written into it, however short the time."""

    source = "rapl"

    def __init__(self) -> None:
        self.now, self.read = 0.0, 0

    def joules(self) -> float:
        self.read += 1
        return self.now

    def too_short(self, seconds: float) -> bool:
        return False


def watched(meter: Any) -> Watch:
    recipe = TrainSettings(steps=20, batch_tokens=64, seq_len=16, eval_every=10)
    return Watch(recipe, CPU, 0.0, lambda _: None, lambda *_: None, meter)


def test_energy_is_that_of_the_timed_steps() -> None:
    meter = Counter()
    watch = watched(meter)
    for step in range(20):
        with watch.step():
            meter.now += 128.0
        if step == 10:
            with watch.evaluation():
                meter.now += 1e6
    columns = watch.columns()
    assert columns["energy_joules_per_token"] == 2.0
    assert columns["energy_source"] == "rapl"


def test_a_long_run_reads_its_counter_before_it_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now, meter = [0.0], Counter()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = watched(meter)
    for _ in range(20):
        with watch.step():
            now[0] += 40.0
    assert meter.read >= 8, "17 timed steps, a reading every second one"


def test_without_a_meter_energy_is_unknown() -> None:
    watch = watched(None)
    for _ in range(20):
        with watch.step():
            pass
    assert watch.columns()["energy_joules_per_token"] is None
    assert watch.columns()["energy_source"] is None


def test_energy_of_writing_is_without_that_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, runs, now = Counter(), [], [0.0]

    def generate(model: Any, prompt: Tensor, new_tokens: int, clock: Any) -> None:
        runs.append(new_tokens)
        now[0] += 1 / 512 + new_tokens / 64
        meter.now += len(prompt) * (100.0 + 3.0 * new_tokens)

    monkeypatch.setattr(energy, "generate", generate)
    ticking = clock.Clock(lambda: now[0], lambda a, b: b - a)
    prompt = torch.zeros(2, 8, dtype=torch.long)
    found = decode_joules_per_token(None, prompt, 5, meter, ticking)
    assert found == pytest.approx(3.0)
    assert runs == [5] * 25 + [0] * 1024, "two seconds of each, however short one is"
    assert decode_joules_per_token(None, prompt, 0, meter, ticking) is None
    monkeypatch.setattr(energy, "generate", lambda *_: now.__setitem__(0, now[0] + 1))
    assert decode_joules_per_token(None, prompt, 5, meter, ticking) is None, "less than the counter shows"
    monkeypatch.setattr(meter, "joules", lambda: None)
    assert decode_joules_per_token(None, prompt, 5, meter, ticking) is None


# --- What else went on ------------------------------------------------------------------------------------------------


def test_other_programs_load_is_all_load_without_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([(10.0, 100.0, 3.0), (14.0, 112.0, 7.0)])
    monkeypatch.setattr(surroundings, "_moment", lambda: next(moments))
    around = Surroundings(CPU)
    around.begin()
    assert around.columns()["other_load_cores"] == (12.0 - 4.0) / 4.0


def test_all_kinds_of_work_are_load_and_waiting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    times = types.SimpleNamespace(user=1.0, nice=2.0, system=4.0, idle=100.0, iowait=100.0, irq=8.0, steal=16.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    moment = surroundings._moment()
    assert moment is not None
    assert moment[1] == 31.0


def test_clocks_and_heat_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, now = iter([3000.0, 1000.0, 2000.0]), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(psutil, "cpu_freq", lambda: types.SimpleNamespace(current=next(clocks)))
    heat = {"coretemp": [types.SimpleNamespace(current=each) for each in (61.0, 72.0)], "nvme": []}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: heat, raising=False)
    around = Surroundings(CPU)
    around.sample()  # before it begins nothing is looked at
    around.begin()
    for _ in range(3):
        around.sample()
        around.sample()  # too soon
        now[0] += surroundings.EVERY_SECONDS
    found = around.columns()
    assert (found["device_clock_mhz_p50"], found["device_clock_mhz_min"]) == (2000.0, 1000.0)
    assert found["device_temperature_celsius_max"] == 72.0


def test_a_container_held_back_for_its_quota_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "cpu.stat"
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)

    def said(before: int, after: int) -> Any:
        around = Surroundings(CPU)
        stat.write_text(f"nr_periods 9\nnr_throttled {before}\n")
        around.begin()
        stat.write_text(f"nr_periods 19\nnr_throttled {after}\n")
        return around.columns()["throttle_reasons"]

    assert said(3, 4) == "container_quota"
    assert said(3, 3) == "none"
    stat.unlink()
    assert Surroundings(CPU).columns()["throttle_reasons"] is None


def test_where_a_system_tells_nothing_all_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError

    for name in ("cpu_times", "cpu_freq", "sensors_temperatures"):
        monkeypatch.setattr(psutil, name, fail, raising=False)
    monkeypatch.setattr(surroundings, "times_throttled", lambda: None)
    around = Surroundings(CPU)
    around.begin()
    around.sample()
    assert set(around.columns().values()) == {None}

"""What a machine is told to be able to measure, on machines that are made up, and on this one."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from conftest import Write

from ablate import calibration, doctor, machine, noise, rounds
from ablate.cli import main
from ablate.job import Peaks, TimingJob
from ablate.machine import Resources
from ablate.profiling import calibrate, energy, lacking, surroundings
from ablate.profiling import kept as storage
from ablate.runner import Run, Seen
from ablate.stats import repeats_needed

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
    run = Run.__new__(Run)
    run.seen = Seen()
    run.rows = SimpleNamespace(threads=lambda task: task)
    run.resources, run.peaks, run.aa = Resources("cpu", 2, 1), {}, {}
    with caplog.at_level(logging.WARNING):
        run._calibrate([2, 1, 2, 4], [])  # type: ignore[list-item]
        run._calibrate([], [])
    assert asked == [1, 2, 4]
    assert run.peaks == {1: Peaks({"fp32": 1e9}), 2: Peaks({"fp32": 2e9}), 4: Peaks()}
    (warning,) = caplog.messages
    assert "decode_bandwidth_share (timeout)" in warning
    for word in ("mfu_datasheet (unknown)", "mfu (timeout)", "energy_joules_per_token (trials that run at once"):
        assert word in warning


# --- The A/A check ----------------------------------------------------------------------------------------------------


class TwiceTimed:
    """A child that ends at once, with planted times: at the end of a round `again` times as long."""

    again = 1.0
    status = "ok"
    limit = None
    taken: ClassVar[list[float]] = []

    def __init__(self, start: Any, job: TimingJob) -> None:
        factor = self.again if job.seed >= rounds.PARTNER_SEEDS else 1.0
        values = {"step_seconds_p50": factor * (1 + 0.01 * (job.seed % 3)), "prefill_seconds_p50": 1.0}
        self.columns = {"values": values, "other_load_cores": 0.3}
        self.taken.append(job.seed)
        self.process, self.phase = self, "train"

    def is_alive(self) -> bool:
        return False

    def listen(self) -> list[Any]:
        return []

    def end(self) -> tuple[str, str | None, str | None]:
        return (self.status, None, None) if self.status == "ok" else (self.status, "train", "signal 9")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[TwiceTimed]:
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    monkeypatch.setattr(rounds, "Child", TwiceTimed)
    monkeypatch.setattr(noise.child, "warm_up", lambda _: None)
    monkeypatch.setattr(TwiceTimed, "taken", [])
    known = {name: MEASURED.get(name) for name in calibrate.IDENTITY} | {"torch": "2.13.0"}
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: (known, None))
    return TwiceTimed


def aa(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["doctor", "--device", "cpu", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_a_model_that_equals_itself_is_told_with_its_noise(timed: type[TwiceTimed]) -> None:
    code, output, heard = aa("--aa", "--repeats", "6")
    assert code == 0, output
    assert timed.taken == [seed for n in range(6) for seed in (n, n + rounds.PARTNER_SEEDS)]
    lines = {line.split()[0]: line for line in output.splitlines() if line}
    assert "none seen" in lines["step"]
    assert "none seen" in lines["prefill"]
    assert "the baseline of built-in, 6 rounds of two processes; other programs kept up to 0.3 cores busy" in output
    assert "reckoned for 2 contrasts judged at once" in output
    assert "round   6 of 6" in heard
    assert "too noisy" not in output


def test_rounds_are_recommended_for_all_that_a_file_compares(timed: type[TwiceTimed], tmp_path: Path) -> None:
    file = tmp_path / "three.yaml"
    file.write_text(
        "name: three\nbaseline: {d_model: 32, n_layers: 1, n_heads: 4}\ntrain: {steps: 1}\nprofile: {repeats: 3}\n"
        "variants: {a: {n_layers: 2}, b: {n_layers: 3}, c: {n_layers: 4}}\n"
    )
    facts = json.loads(aa("--aa", str(file), "--repeats", "6", "--json")[1])
    step = facts["figures"]["step_seconds_p50"]
    assert facts["contrasts"] == 6  # two times of three variants
    assert step["repeats_needed"] == repeats_needed(step["sd"], 6, contrasts=6)


def test_a_machine_too_noisy_for_its_rounds_says_so(timed: type[TwiceTimed]) -> None:
    code, output, _ = aa("--aa", "--repeats", "3")
    assert code == 0, output
    assert "too noisy for so few rounds: a slowdown of 5 % would mostly go unseen" in output


def test_what_is_beyond_telling_has_no_number() -> None:
    known = {"ratio": 1.0, "ratio_low": 0.5, "ratio_high": 2.0, "sd": 3.0, "inside": True, "repeats_needed": None}
    seen = [
        noise.lines({"figures": {"step_seconds_p50": {**known, "smallest_visible": share}}})[0][4]
        for share in (0.05, 9.0, 1e20)
    ]
    assert seen == ["+5.00 %", "+900.00 %", "over +900 %"]


def test_an_aa_check_as_json_with_known_answers(timed: type[TwiceTimed]) -> None:
    code, output, _ = aa("--aa", "--repeats", "6", "--json")
    facts = json.loads(output)
    assert code == 0
    step = facts["figures"]["step_seconds_p50"]
    # In rounds 0 to 5 seeds by 3 leave 0, 1, 2, 0, 1, 2, and 1,000,000 more of them 1, 2, 0, 1, 2, 0.
    logs = [math.log((1 + 0.01 * ((n + 1) % 3)) / (1 + 0.01 * (n % 3))) for n in range(6)]
    assert step["ratio"] == pytest.approx(math.exp(statistics.fmean(logs)))
    assert step["sd"] == pytest.approx(statistics.stdev(logs))
    assert step["n"] == 6
    assert step["inside"] is True
    assert facts["contrasts"] == 2  # a step and a prefill, of one variant
    assert step["repeats_needed"] == repeats_needed(step["sd"], 6, contrasts=2) > repeats_needed(step["sd"], 6)
    assert 0 < step["smallest_visible"] < 0.05
    assert facts["inside"] is True
    assert facts["failed"] == []


def test_what_differs_from_itself_is_an_exit_status(timed: type[TwiceTimed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwiceTimed, "again", 1.2)
    code, output, _ = aa("--aa", "--repeats", "6")
    assert code == 1
    (line,) = [line for line in output.splitlines() if line.startswith("step")]
    assert "+20." in line
    assert "DIFFERS" in line
    assert "not to be trusted here" in output


def test_what_cannot_be_timed_is_no_check(timed: type[TwiceTimed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwiceTimed, "status", "killed")
    code, output, _ = aa("--aa", "--repeats", "2")
    assert code == 1
    assert "not timed: killed: train: signal 9" in output
    assert calibrate.kept_aa(dict.fromkeys(calibrate.IDENTITY)) is None
    assert not list(storage.folder().glob("aa-*"))


def test_a_check_is_kept_beside_the_calibration_and_shown(timed: type[TwiceTimed]) -> None:
    aa("--aa", "--repeats", "6")
    (file,) = storage.folder().glob("aa-*.json")
    kept = {key: value for key, value in json.loads(file.read_text(encoding="utf-8")).items() if key != "checksum"}
    what = {name: kept[name] for name in calibrate.IDENTITY}
    assert calibrate.kept_aa(what) == kept
    assert calibrate.kept_aa(what | {"threads": 3}) is None
    assert calibrate.kept_aa(what | {"torch": "2.14.0"}) is None
    for nonsense in (
        [1],
        {"step_seconds_p50": 5},
        {"step_seconds_p50": kept["figures"]["step_seconds_p50"] | {"sd": "x"}},
    ):
        file.write_text(json.dumps(kept | {"figures": nonsense}), encoding="utf-8")
        assert calibrate.kept_aa(what) is None
    columns = calibration.aa_columns({"aa": kept})
    assert columns["aa_step_ratio_low"] < 1 < columns["aa_step_ratio_high"]
    assert calibration.aa_columns({"aa": None}) == {}
    here, note = {what: rest for what, *rest in doctor._aa(kept)}["A/A noise, step"]
    assert here.endswith(" %")
    assert note.startswith("no difference seen: [-")
    assert "over 6 rounds" in note


def test_without_a_check_the_doctor_says_how_to_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(examined(monkeypatch, MEASURED))["A/A noise"] == ("n/a", "python -m ablate doctor --aa measures it")


def test_the_check_of_a_file_takes_its_baseline(timed: type[TwiceTimed], write: Write) -> None:
    file = write("variants:\n  a: {n_layers: 2}\nprofile: {repeats: 3}\n")
    code, output, _ = aa("--aa", str(file), "--repeats", "3", "--set", "train.threads=1", "--json")
    assert code == 0, output
    facts = json.loads(output)
    assert (facts["model"], facts["repeats"], facts["threads"]) == ("tiny", 3, 1)
    assert len(timed.taken) == 6


def test_an_interrupted_check_keeps_nothing(timed: type[TwiceTimed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwiceTimed, "listen", lambda self: os.kill(os.getpid(), signal.SIGINT) or [])
    code, output, _ = aa("--aa", "--repeats", "2")
    assert code == 130
    assert output == ""
    assert len(timed.taken) == 1
    assert not list(storage.folder().glob("aa-*"))


def test_trials_alone_on_the_machine_carry_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"step_seconds_p50": {"ratio_low": 0.98, "ratio_high": 1.01}}
    known = {"lacking": {}, "aa": {"figures": figures}}
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: (known, None))
    run = Run.__new__(Run)
    run.seen = Seen()
    run.rows = SimpleNamespace(threads=lambda task: task)
    for workers, columns in ((1, {"aa_step_ratio_low": 0.98, "aa_step_ratio_high": 1.01}), (2, {})):
        run.resources, run.peaks, run.aa = Resources("cpu", workers, 1), {}, {}
        run._calibrate([2], [])  # type: ignore[list-item]
        assert run.aa == {2: columns}

"""The script for a machine with a GPU: on this CPU, with stages that are planted, and with what it takes along."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import carry
import pytest
from gpu_checks import carried
from gpu_checks.page import cleaner
from gpu_checks.stages import STAGES

ROOT = Path(__file__).parent.parent
OUTCOMES = {"passed", "**failed**", "skipped", "not run"}

PLANTED = """\
import os, time
from gpu_checks.ledger import Skipped, Stage, expect, on_cuda

def nothing(setup):
    return setup

def broken(setup):
    raise KeyError("planted")

def it_is_right(setup):
    '''What is right passes.'''
    return expect(True, "1 = 1")

def it_is_wrong(setup):
    '''What is wrong fails.'''
    return expect(False, "1 = 2 at /home/somebody/secret/file.py")

def it_is_not_built(setup):
    '''What is not there is skipped.'''
    raise Skipped("not built")

def it_needs_a_gpu(setup):
    '''What needs a GPU is skipped.'''

def it_dies(setup):
    '''What dies fails.'''
    print("planted death", flush=True)
    os._exit(3)

def it_hangs(setup):
    '''What hangs is ended.'''
    time.sleep(600)

STAGES = [
    Stage("hanging", "A stage that hangs", 1, nothing, (it_hangs,)),
    Stage("dying", "A stage that dies", 60, nothing, (it_is_right, it_dies, it_is_wrong)),
    Stage("raising", "A stage that cannot begin", 60, broken, (it_is_right,)),
    Stage("judging", "All kinds", 60, nothing, (it_is_right, it_is_wrong, it_is_not_built, on_cuda(it_needs_a_gpu))),
]
"""

SMALL = """\
from dataclasses import replace

from gpu_checks import machine, quickstart
from gpu_checks.runs import run


def fp32(setup):
    # What a busy CPU does at best in bf16 is little, and a share of it may come out over 1.
    sets = quickstart.short(setup) | {"train.precision": "fp32"}
    return run(setup, "fp32", quickstart.FILE, sets, keep=True)


STAGES = [machine.STAGES[1], replace(quickstart.FIRST, prepare=fp32)]
"""


def script(folder: Path, *arguments: str, stages: str = "") -> tuple[int, str]:
    """Exit status of the script, and its report."""
    (folder / "planted.py").write_text(stages, encoding="utf-8")
    own = ["--stages", "planted"] if stages else []
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--out", str(folder / "out"), *own, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    report = folder / "out/report.md"
    assert report.is_file(), done.stderr
    return done.returncode, report.read_text(encoding="utf-8")


def outcomes(report: str) -> dict[str, list[tuple[str, str]]]:
    """Outcome and figure of each check, by its sentence."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in OUTCOMES:
            found.setdefault(cells[0], []).append((cells[1], cells[2]))
    return found


def test_no_check_is_missing_whatever_becomes_of_its_stage(tmp_path: Path) -> None:
    status, report = script(tmp_path, "--device", "cpu", stages=PLANTED)
    assert status == 1
    said = outcomes(report)
    assert said["What hangs is ended."] == [("not run", "out of time")]
    assert said["What dies fails."] == [("**failed**", "the stage ended with exit status 3: planted death")]
    right = [("passed", "1 = 1"), ("**failed**", "KeyError: 'planted'"), ("passed", "1 = 1")]
    assert said["What is right passes."] == right
    assert said["What is wrong fails."][1] == ("**failed**", "1 = 2 at …/file.py")
    assert said["What is not there is skipped."] == [("skipped", "not built")]
    assert said["What needs a GPU is skipped."] == [("skipped", "only on a GPU")]
    assert "2 passed, 4 failed, 2 skipped, 1 not run." in report


def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    status, report = script(tmp_path, "--device", "cpu", "--seconds", "0", stages=PLANTED)
    assert status == 0
    assert {each for found in outcomes(report).values() for each in found} == {("not run", "out of time")}


def test_without_a_gpu_every_check_is_skipped_and_listed(tmp_path: Path) -> None:
    status, report = script(tmp_path)
    assert status == 0
    said = outcomes(report)
    assert sum(map(len, said.values())) == sum(len(stage.checks) for stage in STAGES)
    assert {each for found in said.values() for each in found} == {("skipped", "no CUDA device here")}


def test_the_quickstart_is_checked_on_a_cpu(tmp_path: Path) -> None:
    status, report = script(tmp_path, "--device", "cpu", "--quick", stages=SMALL)
    assert status == 0, report
    words = [word for found in outcomes(report).values() for word, _ in found]
    assert words.count("passed") >= 10
    assert set(words) == {"passed", "skipped"}
    assert re.search(r"\| commit \| [0-9a-f]{40}( with changes)? \|", report)
    for place in (str(tmp_path), str(ROOT), str(Path.home()), socket.gethostname()):
        assert place not in report


def test_stages_and_checks_have_names_of_their_own() -> None:
    keys = [(stage.name, check.name) for stage in STAGES for check in stage.checks]
    assert len(keys) == len(set(keys))
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    assert all(check.says.endswith((".", ".)")) for stage in STAGES for check in stage.checks)


def test_paths_and_names_are_taken_out(tmp_path: Path) -> None:
    clean = cleaner(tmp_path)
    assert clean(f"{tmp_path}/a.log") == "WORK/a.log"
    assert clean(f"{ROOT}/ablate/cli.py") == "./ablate/cli.py"
    assert clean("in /opt/somebody/x.py, 3 GB/s of 4 TFLOP/s") == "in …/x.py, 3 GB/s of 4 TFLOP/s"


# --- What is taken along ----------------------------------------------------------------------------------------------


def test_everything_needed_is_taken_along_and_nothing_else() -> None:
    found = carry.needed((each.name for each in carry.requirements(carry.own())), (*carry.THERE, *carry.WITHOUT))
    assert {"pydantic", "pydantic-core", "ruamel-yaml", "click", "rich", "tabulate", "psutil", "nvidia-ml-py"} <= set(
        found
    )
    assert not {"torch", "numpy", "pandas", "pyarrow", "scipy", "mlflow", "matplotlib", "pillow"} & set(found)


def test_a_package_that_another_wants_in_one_version_goes_with_it() -> None:
    found = carry.conditions({"pydantic": "2.14.4", "pydantic-core": "2.50.5", "typing-extensions": "4.16.0"})
    assert found["pydantic-core"]["with"] == "pydantic"
    assert "with" not in found["pydantic"]
    assert carried.numbers(found["typing-extensions"]["oldest"]) >= [4, 14]


@pytest.mark.parametrize(
    ("here", "taken"),
    [
        ({}, {"one", "core", "two"}),
        ({"one": "2.0"}, {"two"}),
        ({"one": "2.0", "two": "1.10.0"}, set()),
        ({"core": "9.9", "two": "1.9"}, {"one", "core", "two"}),
        ({"one": "1.9", "core": "9.9", "two": "2.0rc1"}, {"one", "core"}),
    ],
)
def test_what_is_here_wins_unless_it_is_too_old(
    here: dict[str, str], taken: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"one": {"oldest": "2"}, "core": {"oldest": "0", "with": "one"}, "two": {"oldest": "1.10"}}
    (tmp_path / carried.MANIFEST).write_text(json.dumps({"packages": packages}), encoding="utf-8")

    def version(name: str) -> str:
        if name not in here:
            raise carried.metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(carried.metadata, "version", version)
    assert {folder.name for folder in carried.missing(tmp_path)} == taken


def test_without_a_repository_the_commit_is_that_of_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"commit": "c0ffee", "changed": False, "digest": carried.source()["digest"]}
    monkeypatch.setattr(carried, "_git", lambda *_: None)
    assert carried.commit(tmp_path) == "unknown"
    (tmp_path / carried.MANIFEST).write_text(json.dumps(state), encoding="utf-8")
    assert carried.commit(tmp_path) == "c0ffee"
    (tmp_path / carried.MANIFEST).write_text(json.dumps(state | {"digest": "other"}), encoding="utf-8")
    assert carried.commit(tmp_path) == "unknown"

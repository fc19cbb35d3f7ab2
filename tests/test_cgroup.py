"""Threads: what affinity and the container's quota leave, in both forms of control groups, nested and alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ablate import cgroup, machine

Groups = Callable[..., None]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """A machine of 16 CPUs whose process stands in the groups `own`, with these files below the root."""

    def write(own: str, **files: str) -> None:
        (tmp_path / "own").write_text(own, encoding="utf-8")
        for name, text in files.items():
            file = tmp_path / "root" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "root")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return write


def second(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    """A quota in the newer form."""
    return {f"{folder}cpu.max": f"{quota} {period}\n"}


def first(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    """A quota in the older form."""
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("own", "files", "quota", "threads"),
    [
        # one group: 250 ms in every 100 ms are 2.5 cores, of which two whole ones
        ("0::/\n", second("", 250_000), 2.5, 2),
        ("0::/\n", second("", 400_000, 50_000), 8.0, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None, 16),
        ("0::/\n", second("", 3_200_000), 32.0, 16),  # more than there are CPUs
        ("0::/\n", second("", 50_000), 0.5, 1),  # never none
        ("4:cpu,cpuacct:/\n", first("cpu/", 150_000), 1.5, 1),
        ("4:cpu,cpuacct:/\n", first("cpu/", -1), None, 16),
        # nested: the narrowest holds, wherever it is
        ("0::/a/b\n", second("a/b/", 600_000) | second("a/", 400_000), 4.0, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"} | second("a/", 700_000), 7.0, 7),
        ("0::/a/b\n", second("a/b/", 300_000) | {"a/cpu.max": "max 100000\n"}, 3.0, 3),
        ("0::/a/b\n", second("a/c/", 100_000), None, 16),  # a neighbour's
        ("5:cpu:/a/b\n", first("cpu/a/b/", 900_000) | first("cpu/a/", 500_000) | first("cpu/", -1), 5.0, 5),
        # a container that sees its own group as the root, whatever its path is outside
        ("0::/docker/123\n", second("", 200_000), 2.0, 2),
        ("0::/..\n", second("../", 100_000) | second("", 200_000), 2.0, 2),
        ("4:cpu,cpuacct:/docker/123\n2:memory:/\n", first("cpu/", 300_000), 3.0, 3),
        # both forms on one machine
        ("4:cpu:/a\n0::/\n", first("cpu/a/", 600_000) | second("unified/", 500_000), 5.0, 5),
        # nothing, and nonsense
        ("", {}, None, 16),
        ("0::/\n", {"cpu.max": ""}, None, 16),
        ("0::/\n", {"cpu.max": "many 100000\n"}, None, 16),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000\n"}, None, 16),
    ],
)
def test_threads_are_those_of_affinity_and_quota(
    groups: Groups, own: str, files: dict[str, str], quota: float | None, threads: int
) -> None:
    groups(own, **files)
    assert machine.cgroup_quota() == quota
    assert machine.available_threads() == threads


def test_affinity_may_leave_less_than_the_quota(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    groups("0::/\n", **second("", 800_000))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 9})
    assert machine.available_threads() == 3
    assert machine.share("cpu", 1, 0).threads == 3
    assert machine.share("cpu", 2, 0).threads == 1


def test_without_control_groups_or_affinity_all_cpus_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "none")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "nowhere")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.available_threads() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.available_threads() == 1

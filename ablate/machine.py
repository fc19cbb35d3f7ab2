"""The machine that a run happens on: what it offers, and what must be written beside its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import ablate
from ablate import cgroup
from ablate.choice import SettingsError

_MOST_WORKERS = 4
_INTERPRETER_BYTES = 500_000_000


def available_threads() -> int:
    """CPU threads that this process may use: its affinity, or its container's quota where that is less."""
    allowed, quota = affinity() or os.cpu_count() or 1, cgroup_quota()
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def affinity() -> int | None:
    """CPUs that this process may run on; None where nothing says, as on macOS and Windows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def cgroup_quota() -> float | None:
    """Cores that the container may use on average, by the narrowest of its groups; None where nothing limits it."""
    quotas = [quota for folder in cgroup.folders("cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _quota(folder: Path) -> float | None:
    """That of one group, in either form."""
    found = cgroup.words(folder / "cpu.max") or [
        word for name in ("quota", "period") for word in cgroup.words(folder / f"cpu.cfs_{name}_us")
    ]
    try:
        quota, period = map(int, found)
    except ValueError:  # nothing is there, or no limit, which is the word "max"
        return None
    return quota / period if min(quota, period) > 0 else None


def find_device(wanted: str) -> str:
    """`cpu` or `cuda`. Asked through NVML, so that this process never touches a GPU. Raises `SettingsError`."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    there = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise SettingsError((), "no CUDA device is available here", "leave --device out, or give --device cpu")
    return "cuda" if there else "cpu"


@dataclass(frozen=True)
class Resources:
    """What a run takes: kind of device, trials at a time, CPU threads of each, and the memory that each may take, which
    is that of the device, beside its interpreter; None where nothing is said.
    """

    device: str
    workers: int
    threads: int
    memory_bytes: int | None = None
    is_memory_given: bool = False


def share(wanted_device: str, workers: int | None, bytes_each: int, memory_bytes: int | None = None) -> Resources:
    """How to share this machine. Raises `SettingsError` where the device is not there.

    Unless `workers` says otherwise, a GPU has one trial at a time, and a CPU one a thread: small models gain little
    from a second thread, and two trials with a thread each finish before one after the other with two. At most four,
    so that they do not take each other's memory bandwidth, and only as many as memory holds, at `bytes_each`. Each may
    take `memory_bytes`; unless given, on a CPU, as much as is left for each now: together they never take it all down.
    """
    device = find_device(wanted_device)
    left = available_bytes()
    in_all = min([psutil.virtual_memory().total, *_left_in_groups()])
    fitting = int(0.8 * in_all) // (bytes_each + _INTERPRETER_BYTES)
    alone = 1 if device == "cuda" else max(1, min(_MOST_WORKERS, available_threads(), fitting))
    chosen = workers or alone
    each = left // chosen if memory_bytes is None and device == "cpu" else memory_bytes
    return Resources(device, chosen, max(1, available_threads() // chosen), each, memory_bytes is not None)


def available_bytes() -> int:
    """Memory that may still be taken: what the machine has left, or less where a container allows less. Swap is none:
    a trial that lives on it takes days, and with it the machine.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> list[int]:
    return [left for folder in cgroup.folders("memory") if (left := cgroup.memory_left(folder)) is not None]


def facts(resources: Resources) -> dict[str, Any]:
    """What a report says about the machine; nothing that names it or its user."""
    return {
        "device": resources.device,
        "processor": processor(),
        "threads": resources.threads,
        "workers": resources.workers,
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.system(),
        **software(),
    }


def software() -> dict[str, Any]:
    """Versions, and the commit of the folder that the command runs in."""
    from importlib.metadata import version

    commit, dirty = git_state()
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "ablate": ablate.__version__,
        "git_commit": commit,
        "git_dirty": dirty,
    }


def git_state() -> tuple[str | None, bool | None]:
    """Commit of the current folder and whether tracked files differ from it; None where there is no repository."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return commit or None, None if commit is None or changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    try:
        # The folder may be somebody else's, and its settings name programs.
        safely = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments]
        done = subprocess.run(safely, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor() -> str:
    """The maker's name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())

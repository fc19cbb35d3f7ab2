"""Disks: full, broken, read-only, over quota, at each write of parent and children; and a real small one."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterable, Iterator

from faulting.bench import Bench, Case, Home, Skipped
from faulting.catalogue import at, fault, literally, moment, some

_KILOBYTES = (100, 400, 1000, 1800)


def _at_writes(
    bench: Bench, number: int, *, kind: str = "parent", lasts: bool, every: int = 1, only: str = ".*"
) -> Iterator[Case]:
    for operation, role in some(bench.writes(kind, only), every, number):
        when = moment(kind, operation, literally(role))
        given = at(when, errno=number, lasts=lasts)
        # What cannot be written any more is not there; a trial that ends then is done again.
        yield Case(f"{operation} {role}", (0, 1, 2), given, again=("--retry-failed",), steps_again=None)


@fault
def disk_full_once(bench: Bench) -> Iterable[Case]:
    """ENOSPC at one operation of the parent, of each sort on each sort of file."""
    return _at_writes(bench, errno.ENOSPC, lasts=False)


@fault
def disk_full_from_then_on(bench: Bench) -> Iterable[Case]:
    """ENOSPC at that operation, and at all that write afterwards."""
    return _at_writes(bench, errno.ENOSPC, lasts=True, every=4)


@fault
def over_quota_from_then_on(bench: Bench) -> Iterable[Case]:
    """EDQUOT."""
    return _at_writes(bench, errno.EDQUOT, lasts=True, every=15)


@fault
def input_output_error_once(bench: Bench) -> Iterable[Case]:
    """EIO."""
    return _at_writes(bench, errno.EIO, lasts=False, every=10)


@fault
def input_output_error_from_then_on(bench: Bench) -> Iterable[Case]:
    """EIO."""
    return _at_writes(bench, errno.EIO, lasts=True, every=15)


@fault
def read_only_from_then_on(bench: Bench) -> Iterable[Case]:
    """EROFS, as a file system does that is remounted after an error."""
    return _at_writes(bench, errno.EROFS, lasts=True, every=10)


@fault
def disk_full_for_logs(bench: Bench) -> Iterable[Case]:
    """ENOSPC where a child writes its log, for ever."""
    for kind in ("GateJob", "Job", "TimingJob"):
        yield from _at_writes(bench, errno.ENOSPC, kind=kind, lasts=True, only=".*/logs/.*")


@fault
def disk_full_for_checkpoints(bench: Bench) -> Iterable[Case]:
    """ENOSPC and EIO where a child writes a checkpoint, once: the training goes on."""
    for number in (errno.ENOSPC, errno.EIO):
        for operation, role in bench.writes("Job", ".*/checkpoints/.*"):
            given = at(moment("Job", operation, literally(role)), errno=number)
            yield Case(f"{errno.errorcode[number]}: {operation} {role}", given=given)


@fault
def small_disk(bench: Bench) -> Iterable[Case]:
    """A file system of so few kilobytes, with MLflow's database on it; then it gets larger."""
    for kilobytes in _KILOBYTES:
        disk = _Disk(kilobytes)
        yield Case(
            f"{kilobytes} kB",
            (0, 1, 2),
            environment={},
            again=("--retry-failed",),
            before=disk.mount,
            mend=disk.enlarge,
            close=disk.unmount,
            steps_again=None,  # where the disk takes no checkpoint, none spares any
        )


class _Disk:
    """A file system in memory where results go."""

    def __init__(self, kilobytes: int) -> None:
        self.kilobytes = kilobytes

    def mount(self, home: Home) -> None:
        """Raises `Skipped` where it cannot be."""
        home.results.mkdir()
        self._call("mount", "-t", "tmpfs", "-o", f"size={self.kilobytes}k", "none", str(home.results))

    def enlarge(self, home: Home) -> None:
        """There is room again."""
        self._call("mount", "-o", "remount,size=64m", str(home.results))

    def unmount(self, home: Home) -> None:
        """Nobody looks at it any more."""
        self._call("umount", "--lazy", str(home.results))

    def _call(self, *command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise Skipped(f"no file system can be mounted: {error.strerror}") from None
        if done.returncode:
            raise Skipped(f"no file system can be mounted: {done.stderr.strip()}")

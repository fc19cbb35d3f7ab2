"""Files that are not as they were written: tables, documents and checkpoints, damaged in each way between two runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from faulting.bench import Bench, Case, Home, check_permissions_hold
from faulting.catalogue import at, fault, moment

DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped byte": lambda path: _flip(path),
    "cut in half": lambda path: _written(path, path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: _written(path, b""),
    "foreign": lambda path: _written(path, b"PAR1 or anything else\n" * 50),
    "another's": lambda path: _another(path),
    "a folder": lambda path: _folder(path),
    "gone": lambda path: path.unlink(),
}


def _written(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _flip(path: Path) -> None:
    """Some bytes in the middle."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(255 - each for each in content[middle : middle + 8])
    path.write_bytes(content)


def _another(path: Path) -> None:
    """Another file of the same sort under this name."""
    others = sorted(each for each in path.parent.glob(f"*{path.suffix}") if each != path)
    others += sorted(each for each in path.parent.parent.glob(f"*/*{path.suffix}") if each.parent != path.parent)
    shutil.copy(others[0], path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _damaged(damage: str, pattern: str, home: Home) -> None:
    DAMAGE[damage](home.one(pattern))


def _cleared(pattern: str, home: Home) -> None:
    """A person does as the cure says."""
    for path in home.store.glob(pattern):
        if path.is_dir():
            path.rmdir()


def _of(pattern: str, ways: Iterable[str], start: str = "undisturbed") -> Iterator[Case]:
    for damage in ways:
        yield Case(
            f"{pattern.removesuffix('/*.parquet')}: {damage}",
            (0, 2) if damage == "a folder" else (0,),
            start=start,
            before=partial(_damaged, damage, pattern),
            mend=partial(_cleared, pattern),
        )


@fault
def a_damaged_table(bench: Bench) -> Iterable[Case]:
    """A Parquet file of a run that is done: it is named, what it held is done again, and nothing else is touched."""
    bench.undisturbed  # noqa: B018  what this starts from
    yield from _of("trials/*.parquet", DAMAGE)
    for kind in ("curves", "profiles", "repeats"):
        yield from _of(f"{kind}/*.parquet", ("flipped byte", "empty", "another's", "gone"))


@fault
def a_damaged_document(bench: Bench) -> Iterable[Case]:
    """experiment.json of a run that is done: it is written again."""
    bench.undisturbed  # noqa: B018
    ways = [each for each in DAMAGE if each != "another's"]
    yield from _of("experiment.json", ways)


@fault
def no_permission(bench: Bench) -> Iterable[Case]:
    """Folders of a run that is done may not be written, or not be read: refused, and nothing is touched."""
    check_permissions_hold()
    bench.undisturbed  # noqa: B018
    for folder in (".", "trials", "curves", "logs"):
        for mode in (0o555, 0o000):
            start = partial(_allowed, folder, mode)
            mend = partial(_allowed, folder, 0o755)
            yield Case(f"{folder}: {mode:o}", (2,), start="undisturbed", before=start, mend=mend)


def _allowed(folder: str, mode: int, home: Home) -> None:
    (home.store / folder).chmod(mode)


@fault
def a_damaged_checkpoint(bench: Bench) -> Iterable[Case]:
    """The newest checkpoint of a trial that was killed: the one before it is used, or none."""
    start = bench.state("killed", at(moment("Job", "step", nth=9), signal=9, to=("parent",)))
    bench.undisturbed  # noqa: B018
    for damage in DAMAGE:
        yield Case(f"the newest: {damage}", (0, 2), start=start, before=partial(_newest, damage))
    yield Case("all: flipped byte", start=start, before=_all)
    yield Case("all: those of another trial", start=start, before=partial(_others, bench))


def _newest(damage: str, home: Home) -> None:
    DAMAGE[damage](sorted((home.store / "checkpoints").glob("*/step-*.safetensors"))[-1])


def _others(bench: Bench, home: Home) -> None:
    """The second trial finds what is of the first."""
    folder = next(each for each in (home.store / "checkpoints").iterdir() if any(each.glob("step-*")))
    for trial_id in {*bench.whole.trials["trial_id"]} - {folder.name}:
        shutil.copytree(folder, folder.with_name(trial_id), dirs_exist_ok=True)


def _all(home: Home) -> None:
    for path in (home.store / "checkpoints").glob("*/step-*.safetensors"):
        _flip(path)

"""Fetch what `ablate` needs beside torch, pandas, pyarrow and scipy into one folder, for a machine without network.

Usage: python tools/carry.py [--python 3.12] [--platform x86_64] [--into .carried]

Run it where there is a network, with the Python of an environment that has what `ablate` needs (`nox -s carry` does):
it takes those very versions, as wheels for the Python and processor of the other machine. Each package has a folder of
its own, so that `tools/gpu_check.py` takes those alone that are missing there. matplotlib weighs more than all of this
together and is left out: reports go without plots.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from gpu_checks import carried
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = ("torch", "pandas", "pyarrow", "scipy", "numpy")
"""The other machine has these, and what they need."""

WITHOUT = ("mlflow", "matplotlib")
"""Everything but the mirror and the plots works without them."""

MOST_BYTES = 50 * 2**20

GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Minor versions of the C library that wheels name; pip takes each name as it is."""


def needed(names: Iterable[str], left_out: Iterable[str]) -> dict[str, str]:
    """Versions by name of these packages and all that they need here, but those left out."""
    found: dict[str, str] = {}
    waiting, passed = list(names), {canonicalize_name(name) for name in left_out}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in passed:
            passed.add(name)
            found[name] = metadata.version(name)
            waiting += [each.name for each in requirements(metadata.requires(name) or [])]
    return dict(sorted(found.items()))


def own() -> list[str]:
    """What `ablate` itself asks for."""
    project = tomllib.loads((carried.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[str] = project["project"]["dependencies"]
    return found


def requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    """Those of them that hold here, without extras."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def fetch(versions: dict[str, str], python: str, platform: str, folder: Path) -> list[Path]:
    """Wheels of exactly these versions for that machine."""
    names = [f"manylinux_2_{minor}_{platform}" for minor in GLIBC]
    names += [f"manylinux2014_{platform}", f"linux_{platform}"]
    target = ["--python-version", python, "--implementation", "cp", *(f"--platform={name}" for name in names)]
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, *target, "--dest", str(folder), *wanted], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, into: Path) -> None:
    """Unpacks a wheel into a folder of its name."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into / canonicalize_name(wheel.name.partition("-")[0]))


def size(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def conditions(versions: dict[str, str]) -> dict[str, dict[str, str]]:
    """When each package is to be taken: `oldest` is the lowest version that the others, and `ablate`, are content with;
    one that another asks for in one version alone goes `with` it.
    """
    found: dict[str, dict[str, str]] = {name: {"version": version, "oldest": "0"} for name, version in versions.items()}
    for user, lines in {"": own(), **{name: metadata.requires(name) or [] for name in versions}}.items():
        for requirement in requirements(lines):
            package = found.get(canonicalize_name(requirement.name), {"oldest": "0"})
            for bound in requirement.specifier:
                if bound.operator == "==":
                    package["with"] = user
                elif bound.operator in (">=", "~="):
                    package["oldest"] = max(package["oldest"], bound.version, key=carried.numbers)
    return found


def main(arguments: list[str]) -> int:
    """Fetch, unpack, say what there is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--python", default="3.12", help="of the other machine (3.12)")
    parser.add_argument("--platform", default="x86_64", help="its processor (x86_64), with Linux")
    parser.add_argument("--into", type=Path, default=Path(carried.FOLDER), help=f"folder ({carried.FOLDER})")
    wanted = parser.parse_args(arguments)
    versions = needed((each.name for each in requirements(own())), (*THERE, *WITHOUT))
    shutil.rmtree(wanted.into, ignore_errors=True)
    wanted.into.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        for wheel in fetch(versions, wanted.python, wanted.platform, Path(folder)):
            unpack(wheel, wanted.into)
    target = {"python": wanted.python, "platform": wanted.platform}
    state = {**target, **carried.source(), "packages": conditions(versions)}
    (wanted.into / carried.MANIFEST).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    taken = size(wanted.into)
    print(f"{wanted.into}: {len(versions)} packages for Python {wanted.python}, {taken / 2**20:.1f} MiB")
    if taken > MOST_BYTES:
        print(f"that is more than {MOST_BYTES / 2**20:.0f} MiB")
    return 1 if taken > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

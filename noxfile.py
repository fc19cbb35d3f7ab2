"""Reproducible sessions: `nox -s quickstart`, `nox -s tests`, … (`nox --list` says what each is for)."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

# torch and MLflow weigh two gigabytes, so that sessions share one environment, and install only when what it is made of
# has changed.
SHARED = Path(".nox/ablate")
MADE_OF = ("pyproject.toml", "constraints.txt")


def environment(session: nox.Session, folder: Path, *extras: str, editable: bool = True) -> str:
    """The Python of an environment with the package and the exact versions of constraints.txt."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    state = hashlib.sha256(b"".join(Path(name).read_bytes() for name in MADE_OF)).hexdigest()
    done = folder / f"ablate-{'-'.join(extras) or 'plain'}"
    if done.exists() and done.read_text(encoding="utf-8") == state:
        return str(python)
    if not python.exists():
        session.run(sys.executable, "-m", "venv", str(folder), external=True)
    install = (str(python), "-m", "pip", "install", "--quiet", "-c", "constraints.txt")
    # torch first and alone: asked for together with others, pip may choose a build many times the size.
    session.run(*install, "torch", external=True)
    package = f".[{','.join(extras)}]" if extras else "."
    session.run(*install, *(["-e"] if editable else []), package, external=True)
    done.write_text(state, encoding="utf-8")
    return str(python)


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """Run experiments/quickstart.yaml: leaves reports/quickstart/report.md."""
    python = environment(session, SHARED)
    session.run(python, "-m", "ablate", "run", "experiments/quickstart.yaml", *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests."""
    python = environment(session, SHARED, "test")
    session.run(python, "-m", "pytest", "-n", "2", *session.posargs, external=True)


@nox.session(venv_backend="none")
def report(session: nox.Session) -> None:
    """Write the quickstart's report again from what is stored."""
    python = environment(session, SHARED)
    session.run(python, "-m", "ablate", "report", "experiments/quickstart.yaml", *session.posargs, external=True)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the checks that need a GPU: leaves reports/gpu/report.md. Where there is none they are skipped and say so."""
    python = environment(session, SHARED)
    session.run(python, "tools/gpu_check.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Read and plan mutated experiment files: `nox -s fuzz -- --files 100000 --seed 1`. Files with faults: .fuzzed."""
    python = environment(session, SHARED, "test")
    session.run(python, "tools/fuzz.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def carry(session: nox.Session) -> None:
    """Fetch what those checks need on a machine without network into .carried."""
    python = environment(session, SHARED)
    session.run(python, "tools/carry.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Inject faults into a tiny experiment, one at a time: leaves reports/faults.md."""
    python = environment(session, SHARED)
    session.run(python, "tools/faults.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def kills(session: nox.Session) -> None:
    """Kill a small experiment at random moments, and go on: leaves reports/kills/report.md."""
    python = environment(session, SHARED)
    session.run(python, "tools/kill_study.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check types: mypy, strict."""
    python = environment(session, SHARED, "types")
    session.run(python, "-m", "mypy", external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style: ruff."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def reproduce(session: nox.Session) -> None:
    """Run one small experiment in two fresh environments: everything but times and memory is equal to the last bit."""
    results = []
    for name in ("first", "second"):
        home = Path(session.cache_dir) / "reproduce" / name
        shutil.rmtree(home, ignore_errors=True)
        python = environment(session, home / "environment", editable=False)
        results.append(str(home / "results"))
        places = ("--results", results[-1], "--reports", str(home / "reports"))
        session.run(python, "-m", "ablate", "run", "experiments/reproduce.yaml", *places, external=True)
    folders = [str(Path(each) / "reproduce") for each in results]
    session.run(python, "tools/compare_results.py", *folders, external=True)

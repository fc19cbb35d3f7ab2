"""Reproducible sessions: `nox -s quickstart`, `nox -s tests`, … (`nox --list` says what each is for)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

# torch and MLflow weigh two gigabytes, so that sessions share one environment, and install only when what it holds
# has changed.
SHARED = ".nox/ablate"
ASKS = ("pyproject.toml", "constraints.txt")


def install(session: nox.Session, *extras: str) -> None:
    """The package, editable, with the exact versions of constraints.txt; skipped where that is done already."""
    state = hashlib.sha256(b"".join(Path(name).read_bytes() for name in ASKS)).hexdigest()
    done = Path(session.virtualenv.location) / f"ablate-{'-'.join(extras) or 'plain'}"
    if done.exists() and done.read_text(encoding="utf-8") == state:
        return
    # torch first and alone: asked for together with others, pip may choose a build many times the size.
    session.install("-c", "constraints.txt", "torch")
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]" if extras else ".")
    done.write_text(state, encoding="utf-8")


@nox.session(venv_location=SHARED)
def quickstart(session: nox.Session) -> None:
    """Run experiments/quickstart.yaml: leaves reports/quickstart/report.md."""
    install(session)
    session.run("python", "-m", "ablate", "run", "experiments/quickstart.yaml", *session.posargs)


@nox.session(venv_location=SHARED)
def tests(session: nox.Session) -> None:
    """Run the tests."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(venv_location=SHARED)
def report(session: nox.Session) -> None:
    """Write the quickstart's report again from what is stored."""
    install(session)
    session.run("python", "-m", "ablate", "report", "experiments/quickstart.yaml", *session.posargs)


@nox.session(venv_location=SHARED)
def gpu(session: nox.Session) -> None:
    """Run the checks that need a GPU; where there is none they are skipped and say so."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-m", "gpu", "-rs", *session.posargs, success_codes=[0, 5])


@nox.session(venv_location=SHARED)
def types(session: nox.Session) -> None:
    """Check types: mypy, strict."""
    install(session, "types")
    session.run("python", "-m", "mypy")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style: ruff."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def reproduce(session: nox.Session) -> None:
    """Run one small experiment in two fresh environments: everything but times and memory is equal to the last bit."""
    folders = []
    for name in ("first", "second"):
        home = Path(session.cache_dir) / "reproduce" / name
        session.run("python", "-m", "venv", "--clear", str(home), external=True)
        python = str(home / ("Scripts" if os.name == "nt" else "bin") / "python")
        for what in ("torch", "."):
            session.run(python, "-m", "pip", "install", "-q", "-c", "constraints.txt", what, external=True)
        folders.append(home / "results")
        run = (python, "-m", "ablate", "run", "experiments/reproduce.yaml", "--results", str(folders[-1]))
        session.run(*run, "--reports", str(home / "reports"), external=True)
    session.run(python, "tools/compare_results.py", *(str(folder / "reproduce") for folder in folders), external=True)

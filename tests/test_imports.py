"""The house's rules that no compiler checks: imports go one way, the core names no choice, heavy packages wait."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ablate import catalogue

HOME = Path(catalogue.__file__).parent
SLOTS = (*catalogue.SLOTS, *catalogue.SOURCES)

# From the ground up. A module imports from its own storey or from below; modules of one storey stand in a line each.
STOREYS = [
    [
        "__init__",
        "catalogue",
        "choice",
        "schema",
        "fractional",
        "linear",
        "rms",
        "meta",
        "cache",
        "metrics",
        "init",
        "cgroup",
        "bond",
        "inside",
        "plug_in",
        "terminal",
        "pulse",
        "files",
        "host",
        "sealed",
        "redaction",
        "interruption",
        "curve",
        "checkpoint",
        "checkpoint_file",
    ],
    ["registry", "document", "presets", "hf"],
    [*SLOTS],
    [
        *(
            "settings",
            "cost",
            "grid",
            "sizes",
            "design",
            "variant",
            "claims",
            "lattice",
            "budget",
            "experiment_file",
            "expansion",
            "match",
            "search",
        ),
        "experiment",
        "position_plot",
    ],
    [
        *("model", "building", "importing", "job", "tables", "documents", "shelf", "results", "lease"),
        "mlflow_view",
    ],
    [
        "twin",
        "objectives",
        "batches",
        "pace",
        "train",
        "resume",
        "profiling",
        "plan",
        "machine",
        "stats",
        "effects",
        "laws",
        "interleaved",
    ],
    [
        "gates",
        "gatekeeper",
        "trial",
        "timing",
        "child",
        "rounds",
        "noise",
        "calibration",
        "attempt",
        "capacity",
        "doctor",
        "progress",
        "report",
        "tracking",
        "mirror",
        "mlflow_run",
        "mlflow_ui",
        "mlflow_address",
        "mlflow_database",
        "mlflow_experiment",
        "tasks",
        "rows",
        "keeping",
        "verify",
        "compact",
    ],
    ["runner", "tuning"],
    ["asked"],
    ["sweep", "describing", "commands"],
    ["options", "guarded", "printing", "cli", "__main__"],
]
STOREY = {module: height for height, modules in enumerate(STOREYS) for module in modules}
FILES = sorted(HOME.rglob("*.py"))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def part(file: Path) -> str:
    """The file's module, or the folder that it belongs to."""
    return file.relative_to(HOME).parts[0].removesuffix(".py")


def imports(file: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names of everything imported for use; without `lazy` only what is imported with the file itself."""
    waiting: list[ast.AST] = [tree(file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def parts_imported(file: Path, *, lazy: bool = True) -> set[str]:
    names = {name.split(".")[1] for name in imports(file, lazy=lazy) if name.startswith("ablate.")}
    return {name if name in STOREY else "__init__" for name in names}


def test_every_module_has_its_storey() -> None:
    assert {part(file) for file in FILES} == set(STOREY), "a new module needs a place in the list above"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(HOME)))
def test_imports_go_one_way(file: Path) -> None:
    above = {name for name in parts_imported(file) if STOREY[name] > STOREY[part(file)]}
    if part(file) == "registry":
        above -= set(SLOTS)  # by name only, when a choice is asked for
    assert not above


def test_no_module_imports_itself_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for file in FILES:
        graph.setdefault(part(file), set()).update(parts_imported(file, lazy=False) - {part(file), "__init__"})
    while ready := [name for name, needed in graph.items() if not needed & set(graph)]:
        for name in ready:
            del graph[name]
    assert not graph


# What the identities of a choice compare it with.
COMPARED = {
    "attention/_grouped.py": {"gqa"},
    "attention/gqa.py": {"mha", "mqa"},
    "feed_forward/moe.py": {"soft_mixture"},
    "feed_forward/reglu.py": {"relu2"},
}


def reached(file: Path) -> Iterator[str]:
    """Modules of slots that a choice's file imports from, however that is written, as `slot.module`."""
    for name in imports(file):
        home, slot, module, *_ = (*name.split("."), "", "")
        if home == "ablate" and slot in SLOTS and (HOME / slot / f"{module}.py").is_file():
            yield f"{slot}.{module}"


@pytest.mark.parametrize("slot", SLOTS)
def test_a_choice_knows_no_other_choice_and_no_other_slot_s(slot: str) -> None:
    for file in (HOME / slot).glob("*.py"):
        places = [name.split(".") for name in reached(file)]
        known = {module for where, module in places if where == slot and not module.startswith("_")}
        assert known == COMPARED.get(f"{slot}/{file.name}", set()), f"{file.name} knows another choice"
        assert {where for where, _ in places} <= {slot}, f"{file.name} reaches into another slot"


@pytest.mark.parametrize(
    "line", ["from ablate.norm import none", "from ablate.norm.none import Config", "import ablate.norm.none"]
)
def test_a_choice_is_known_however_it_is_imported(line: str, tmp_path: Path) -> None:
    file = tmp_path / "choice.py"
    file.write_text(f"from ablate.norm import NormChoice\n\n\ndef lazy():\n    {line}\n", encoding="utf-8")
    assert list(reached(file)) == ["norm.none"]


def core_files() -> list[Path]:
    return [file for file in FILES if part(file) not in (*SLOTS, "presets", "hf")]


def words(file: Path) -> Iterator[tuple[str, int]]:
    """Names and texts in the code, without what it says to people: docstrings and comments."""
    said = {
        id(node.body[0].value)
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.lineno) for alias in node.names)


# Words that are choices' names and mean something else as well in the core.
ALSO_WORDS = {"none", "text", "linear", "sigmoid", "tanh"}


@pytest.mark.parametrize("file", core_files(), ids=lambda file: str(file.relative_to(HOME)))
def test_the_core_names_no_choice(file: Path) -> None:
    choices = {name for slot in catalogue.SLOTS for name in catalogue.names(slot)} - ALSO_WORDS
    found = [(word, line) for word, line in words(file) if word in choices]
    assert not found, "settings, modules, caches and costs of a choice stand in its own file"


def test_the_core_compares_with_no_choice_by_its_parts() -> None:
    pattern = re.compile(r"\.name\s*(==|!=|in)\s")
    found = [
        f"{file.name}: {line.strip()}"
        for file in core_files()
        for line in file.read_text(encoding="utf-8").splitlines()
        if pattern.search(line) and re.search(r"(attention|position|feed_forward|norm|block)\.name", line)
    ]
    assert not found


LATE = {
    "mlflow": lambda file: True,
    "torch": lambda file: part(file) in STOREYS[0][:3] or part(file) in LIGHT,
    "pandas": lambda file: (
        part(file) in (*STOREYS[-1], "catalogue", "__init__", "__main__", "choice", "document", "registry")
    ),
    "matplotlib": lambda file: True,
    "scipy": lambda file: True,
    "pynvml": lambda file: True,
    "optuna": lambda file: True,
}
LIGHT = (
    *(
        "registry",
        "document",
        "presets",
        "tables",
        "documents",
        "results",
        "mlflow_view",
        "claims",
        "stats",
        "metrics",
        "report",
        "tracking",
        "machine",
    ),
    *(
        "mlflow_run",
        "mlflow_ui",
        "mlflow_address",
        "mlflow_database",
        "mlflow_experiment",
        "progress",
        "runner",
        "tasks",
        "rows",
        "keeping",
        "verify",
        "compact",
        "calibration",
        "capacity",
        "doctor",
        "interleaved",
        "rounds",
        "noise",
        "asked",
        "sweep",
        "describing",
        "commands",
        *STOREYS[-1],
        "data",
    ),
)


@pytest.mark.parametrize("package", LATE)
def test_heavy_packages_wait_until_they_are_needed(package: str) -> None:
    early = [
        str(file.relative_to(HOME))
        for file in FILES
        if LATE[package](file) and any(name.split(".")[0] == package for name in imports(file, lazy=False))
    ]
    assert not early


def test_only_the_tracking_knows_mlflow() -> None:
    users = {part(file) for file in FILES if any(name.split(".")[0] == "mlflow" for name in imports(file))}
    assert users <= {"tracking", "mlflow_experiment", "mlflow_database", "mlflow_run", "mlflow_ui"}

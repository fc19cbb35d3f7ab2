"""Experiment files to start from: those of `experiments/`, of the README and of the tests, and one for each choice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from ablate import catalogue, document, presets, registry
from ablate.document import FileFaults
from ablate.experiment_file import ExperimentFile
from fuzzing.settings import every_setting
from fuzzing.writing import written

ROOT = Path(__file__).parent.parent.parent
TINY: dict[str, Any] = {
    "name": "tiny",
    "baseline": {"d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 32},
    "data": {"name": "cycle", "period": 16},
    "train": {"steps": 4, "batch_tokens": 64, "seq_len": 16},
}
_KEYS = set(ExperimentFile.model_fields)


@cache
def corpus() -> tuple[str, ...]:
    """Each file once, in the same order everywhere."""
    return tuple(dict.fromkeys([*_experiments(), *_readme(), *_of_tests(), *_of_choices(), *_of_presets()]))


@cache
def tree(text: str) -> dict[str, Any]:
    """What a file of the corpus says."""
    return document.parse(text, "corpus.yaml").data


def _experiments() -> Iterator[str]:
    for file in sorted((ROOT / "experiments").rglob("*.yaml")):
        yield file.read_text(encoding="utf-8")


def _readme() -> Iterator[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for fenced in re.findall(r"```ya?ml\n(.*?)```", text, re.DOTALL):
        if _keys(fenced) & {"baseline", "train"}:
            yield fenced


def _of_tests() -> Iterator[str]:
    """Texts in the tests that hold keys of a file, over the tiny experiment that most of them are added to."""
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        strings = {
            node.value
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value
        }
        for text in sorted(strings):
            if (keys := _keys(text)) and keys <= _KEYS:
                yield written({**TINY, **tree(text)}, Random(0))


def _keys(text: str) -> set[str]:
    try:
        return set(document.parse(text, "").data)
    except FileFaults:
        return set()


def _of_choices() -> Iterator[str]:
    """Every choice with every setting of its own written out at its default."""
    own: dict[tuple[str, ...], dict[str, Any]] = {}
    for setting in every_setting():
        for (*place, _), name in setting.beside.items():
            choice = own.setdefault((*place, str(name)), {"name": name})
            default = setting.schema.get("default")
            if default is not None and len(setting.place) == len(place) + 1:
                choice[setting.place[-1]] = default
    for slot in registry.SLOTS:
        for name in registry.names(slot):
            choice = own.get(("baseline", slot, name), {"name": name})
            yield written({**TINY, "baseline": {**TINY["baseline"], slot: choice}}, Random(1))


def _of_presets() -> Iterator[str]:
    for name in catalogue.names(catalogue.PRESETS):
        scales = [{"scale": scale} for scale in presets.scales(name)] or [{}]
        baseline = {"preset": name, **scales[0]} if scales[0] else {"preset": name, **TINY["baseline"]}
        yield written({**TINY, "baseline": baseline}, Random(2))

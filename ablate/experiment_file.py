"""The keys of an experiment file: which there are, what each may hold, and at which level each stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ablate import document, grid
from ablate.choice import Faults, Path, Settings, SettingsError, Whole, as_whole, validated
from ablate.design import PRODUCT
from ablate.document import Document
from ablate.settings import OF_NO_NUMBER
from ablate.variant import BASELINE

_MOST_SEEDS = 1000


def _seeds(value: object) -> object:
    """A count means the seeds 0, 1, …"""
    if isinstance(value, list) and len(value) <= _MOST_SEEDS:
        return value
    count = as_whole(value)
    if not isinstance(count, int) or not 0 < count <= _MOST_SEEDS:
        raise ValueError(f"a list of at most {_MOST_SEEDS} seeds is needed, or a count from 1 to {_MOST_SEEDS}")
    return list(range(count))


def _values(value: object) -> object:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of at least one value is needed")
    return value


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


def _sentence(value: object) -> object:
    if isinstance(value, str):
        return {"claim": value}
    if not isinstance(value, Mapping):
        raise SettingsError((), "a sentence is needed", "write one, as in gqa.val_loss < baseline.val_loss")
    return value


def _as_told(value: object) -> object:
    """A figure that a text quotes may be a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class ClaimEntry(Settings):
    """A claim, and what a text says of it."""

    claim: str = Field(description="arithmetic and one comparison over metrics of variants")
    says: Annotated[str | None, BeforeValidator(_as_told)] = Field(None, description="the figure that a text quotes")
    source: str | None = Field(None, description="where the text quotes it")


class ExperimentFile(Settings):
    """The file's own keys; what stands below them is checked where it is used."""

    name: str = Field(description="of the experiment and its folder of results")
    question: str | None = Field(None, description="what the experiment is to answer")
    baseline: dict[str, Any] = Field({}, description="the model that everything is compared with")
    variants: dict[str, dict[str, Any]] = Field({}, description="named changes to the baseline")
    vary: dict[str, Annotated[list[Any], BeforeValidator(_values)]] = Field({}, description="axes: paths with values")
    design: str | dict[str, Any] = Field(PRODUCT, description="how axes combine")
    exclude: list[Annotated[dict[str, Any], Field(min_length=1)]] = Field([], description="combinations to leave out")
    seeds: Annotated[list[Annotated[Whole, Field(ge=0, lt=2**31)]], BeforeValidator(_seeds), Field(min_length=1)] = (
        Field([0], description="a list, or a count")
    )
    data: Annotated[dict[str, Any], BeforeValidator(_named)] = Field({}, description="where tokens come from")
    train: dict[str, Any] = Field(description="the recipe")
    profile: dict[str, Any] = Field({}, description="what is measured beside training")
    claims: list[Annotated[ClaimEntry, BeforeValidator(_sentence)]] = Field(
        [], max_length=1000, description="sentences that the results are judged by"
    )
    match: Any = Field(None, description="the budget that every variant is brought to, and by which setting")
    tune: dict[str, Any] = Field({}, description="settings of the recipe to search for each variant")


def read(found: Document) -> ExperimentFile:
    """The file's keys, checked. Raises `Faults`."""
    file = validated(ExperimentFile, {**found.data, "name": document.experiment_name(found)})
    _check_names(file)
    _check_levels(file)
    _check_alike(file)
    return file


def refusal(path: Path, message: str, cure: str) -> Faults:
    """One fault, and its cure."""
    return Faults([SettingsError(path, message, cure)])


def _check_names(file: ExperimentFile) -> None:
    for name in file.variants:
        if name == BASELINE or not name.strip() or not name.isprintable():
            raise refusal(("variants", name), f"'{name}' cannot be the name of a variant", "choose another name")
    if len(set(file.seeds)) < len(file.seeds):
        raise refusal(("seeds",), "a seed is given twice", "give each seed once")


def _check_levels(file: ExperimentFile) -> None:
    """The file's own keys stand at its top level; variants may change what its sections say."""
    changes: list[tuple[Path, Mapping[str, Any]]] = [(("variants", name), each) for name, each in file.variants.items()]
    changes += [(("vary",), file.vary), *((("exclude", i), rule) for i, rule in enumerate(file.exclude))]
    keys = set(ExperimentFile.model_fields)
    wrong: list[tuple[Path, str]] = [((BASELINE, key), key) for key in file.baseline if key.partition(".")[0] in keys]
    inner = keys - set(grid.SECTIONS)
    wrong += [((*place, key), key) for place, each in changes for key in each if key.partition(".")[0] in inner]
    if wrong:
        cure = "write it at the top level of the file"
        raise Faults(SettingsError(p, f"'{k}' is a key of the file, not of a {_kind(p)}", cure) for p, k in wrong)


def _kind(place: Path) -> str:
    return "model" if place[0] == BASELINE else "variant"


def _check_alike(file: ExperimentFile) -> None:
    """What determines no number of training, and so is no part of a trial's identity, is the same for all variants."""
    paths: list[tuple[Path, Path]] = [(("vary", path), tuple(path.split("."))) for path in file.vary]
    for name, changes in file.variants.items():
        for key, value in changes.items():
            inner: list[Path] = [(*key.split("."), below) for below in value] if isinstance(value, dict) else []
            paths += [(("variants", name, key), each) for each in (inner or [tuple(key.split("."))])]
    for place, path in paths:
        if path[0] == "profile" or (path[0] == "train" and path[1:] in [(name,) for name in OF_NO_NUMBER]):
            message = f"'{'.'.join(map(str, path))}' is the same for all variants"
            raise refusal(place, message, "set it in the file's own section")

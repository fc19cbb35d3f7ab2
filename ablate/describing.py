"""What `describe` tells: of a choice, a preset, a section of the file, or of a file's variants."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate import document
from ablate.asked import Wanted, aside, read
from ablate.choice import Faults, Settings, SettingsError

if TYPE_CHECKING:
    pass


@aside()
def describe_choice(word: str) -> dict[str, Any]:
    """Settings and source of a choice, given as `slot/name` or as a name; also of a file's section. Raises `Faults`."""
    from ablate import registry
    from ablate.search import TuneSettings
    from ablate.settings import MatchSettings, ProfileSettings, TrainSettings

    sections: dict[str, type[Settings]] = {
        "train": TrainSettings,
        "profile": ProfileSettings,
        "match": MatchSettings,
        "tune": TuneSettings,
    }
    if section := sections.get(word):
        text = inspect.cleandoc(section.__doc__ or "")
        facts = {"slot": "section", "name": word, "summary": text.partition("\n")[0], "text": text}
        return {**facts, "settings": _settings_facts(section.model_json_schema())}

    slot, name = _slot_and_name(word)
    kind = registry.config_class(slot, name)
    text = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    facts = {"slot": slot, "name": name, "summary": text.partition("\n")[0], "text": text}
    return {**facts, "settings": _settings_facts(kind.model_json_schema())}


@aside()
def plot_position(word: str, file: Path) -> None:
    """Draw a position scheme, with its defaults, into a PNG file. Raises `Faults` for what is none."""
    from ablate import registry
    from ablate.position import PositionChoice
    from ablate.position_plot import png

    slot, name = ("", word) if word.startswith("preset/") or word.endswith((".yaml", ".yml")) else _slot_and_name(word)
    choice = registry.configure(slot, name) if slot == "position" else None
    if not isinstance(choice, PositionChoice):
        raise Faults([SettingsError((), f"only a position scheme can be plotted, not {word}", "give position/NAME")])
    if file.suffix.lower() != ".png":
        raise Faults([SettingsError((), f"{file}: a plot is a PNG file", f"write --plot {file.with_suffix('.png')}")])
    if importlib.util.find_spec("matplotlib") is None:
        raise Faults([SettingsError((), "matplotlib, which draws, is not installed", "pip install matplotlib")])
    file.write_bytes(png(choice))


def _slot_and_name(word: str) -> tuple[str, str]:
    """`slot/name`, whose name may be that of a user's own file; a built-in name may stand alone."""
    from ablate import catalogue, registry
    from ablate.choice import unknown

    slots = (*catalogue.SLOTS, *catalogue.SOURCES)
    slot, _, name = word.partition("/")
    if slot in slots and name:
        return slot, name
    if "." in word:
        return registry.slot_of(word), word
    known = [(slot, name) for slot in slots for name in catalogue.names(slot)]
    if found := [each for each in known if each[1] == word]:
        return found[0]
    names = [*(f"{slot}/{name}" for slot, name in known), *(name for _, name in known)]
    names += [*(f"preset/{name}" for name in catalogue.names(catalogue.PRESETS)), "train", "profile", "match", "tune"]
    raise Faults([unknown(word, names, "choice", ())])


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


_NO_BOUND = 2**53  # what a number can hold says nothing of the setting


def _settings_facts(schema: dict[str, Any]) -> dict[str, Any]:
    """What each setting is; those of settings below it follow with its name in front."""
    found = {}
    for key, field in schema["properties"].items():
        if key == "name":
            continue
        found[key] = _field_facts(field)
        for reference in (kind["$ref"] for kind in _kinds(field) if "$ref" in kind):
            below = schema["$defs"][reference.rpartition("/")[2]]["properties"]
            found |= {f"{key}.{each}": _field_facts(own) for each, own in below.items() if each != "name"}
    return found


def _field_facts(field: dict[str, Any]) -> dict[str, Any]:
    kinds = _kinds(field)
    bounds = {sign: kinds[0][key] for key, sign in _BOUNDS.items() if abs(kinds[0].get(key, _NO_BOUND)) < _NO_BOUND}
    kind = " | ".join(map(_kind_in_words, kinds))
    facts = {"type": kind, "default": field.get("default"), "description": field.get("description", "")}
    return {**facts, "bounds": " ".join(f"{sign} {value}" for sign, value in bounds.items())}


def _kinds(field: dict[str, Any]) -> list[dict[str, Any]]:
    return [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]


def _kind_in_words(kind: dict[str, Any]) -> str:
    if "$ref" in kind:
        return "settings"
    words = kind.get("enum") or [kind.get("const", kind.get("type", "any"))]
    return " | ".join(map(str, words))


def describe_preset(name: str) -> dict[str, Any]:
    """Settings and totals of a preset. Raises `Faults`."""
    from ablate import catalogue, presets
    from ablate.building import model_settings

    settings = model_settings({"preset": name})
    summary = catalogue.text(catalogue.PRESETS, name)
    known = {"preset": name, "summary": summary, "scales": presets.scales(name)}
    return {**known, **_model_facts(settings, settings.max_seq_len)}


@aside()
def describe_variants(wanted: Wanted, only: str | None) -> dict[str, Any]:
    """The shapes and costs, stage by stage, of an experiment's variants, or of one of them. Raises `FileFaults`."""
    experiment = read(wanted)
    known = [variant.name for variant in experiment.variants]
    if only is not None and only not in known:
        raise document.FileFaults([f"{wanted.file}: no variant '{only}'\n  known: {', '.join(known)}"])
    variants = [v for v in experiment.variants if only in (None, v.name)]
    facts = [{"variant": v.name, **_model_facts(v.settings.model, v.settings.train.length)} for v in variants]
    return {"name": experiment.name, "variants": facts}


def _model_facts(settings: Any, tokens: int) -> dict[str, Any]:
    from ablate.cost import cache_elements, cost, stages

    price, empty = cost(settings, tokens), cache_elements(settings, 0, 0)
    one, source = cache_elements(settings, 1, 0), cache_elements(settings, 0, 1)
    told = [{key: value for key, value in stage.items() if key != "terms"} for stage in stages(settings, tokens)]
    return {
        "params_total": price.params_total,
        "params_active": price.params_active,
        "params_embedding": price.params_embedding,
        "params_non_embedding": price.params_non_embedding,
        "flops_per_token": price.flops_per_token,
        "flops_at_tokens": tokens,
        "kv_cache_elements_per_token": None if one is None or empty is None else one - empty,
        "kv_cache_elements_per_source_token": None if source is None or empty is None else source - empty,
        "stages": told,
        "settings": settings.model_dump(mode="json"),
    }

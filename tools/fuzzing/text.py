"""What can be done to a file's text without knowing what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from fuzzing.case import Case

_SCRAPS = (
    *(
        ": ",
        "- ",
        ", ",
        "? ",
        "[",
        "]",
        "{",
        "}",
        "&a ",
        "*a",
        "!",
        "!!int ",
        "!!float ",
        "!!binary ",
        "|\n",
        ">-\n",
        "'",
    ),
    *(
        '"',
        "#",
        "\n",
        "\t",
        "  ",
        "<<: *a\n",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "%TAG ! x:\n",
        "\\ud83d",
        "\u2028",
        "\r",
    ),
    *("@", "`", "!<x>", "~", "é", "\u0430", "\uff11", "\u202e", "\ufeff", "\u0085", "\U0001f600", "1_000", "1:30:00"),
    *(
        "0o17",
        "017",
        "0x1F",
        "2001-12-14t21:59:43.10-05:00",
        "2026-11-30",
        "yes",
        "NO",
        "Off",
        ".5",
        "+1",
        "1e-3",
        "=",
        "<<",
    ),
)
_UNREADABLE = tuple(map(chr, [*range(9), 11, 12, *range(14, 32), 127, 0x80, 0x9F, 0xFFFE, 0xFFFF]))


def _flipped(text: str, rng: Random) -> Case:
    content = bytearray(text.encode())
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return Case("bits flipped", bytes(content))


def _replaced(text: str, rng: Random) -> Case:
    content = bytearray(text.encode())
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return Case("bytes replaced", bytes(content))


def _cut(text: str, rng: Random) -> Case:
    start, stop = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    left = text[:start] if rng.random() < 0.3 else text[:start] + text[stop:]
    return Case("cut", left.encode())


def _repeated(text: str, rng: Random) -> Case:
    start, stop = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return Case("a piece repeated", (text[:stop] + text[start:stop] * rng.choice((1, 1, 2, 50)) + text[stop:]).encode())


def _scraps(text: str, rng: Random) -> Case:
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice([rng.randrange(len(text) + 1), *(m.end() for m in re.finditer(r"[\n:,{\[]", text))])
        text = text[:at] + rng.choice(_SCRAPS) + text[at:]
    return Case("signs put in", text.encode("utf-8", "surrogatepass"))


def _lines(text: str, rng: Random) -> Case:
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    what = rng.randrange(5)
    if what == 0:
        lines[i], lines[j] = lines[j], lines[i]
    elif what == 1:
        lines[i] = " " * rng.randrange(1, 9) + lines[i]
    elif what == 2:
        lines[i] = lines[i].lstrip()
    elif what == 3:
        lines.insert(i, lines[j])
    else:
        del lines[i]
    return Case("lines moved", "\n".join(lines).encode())


def _tabs(text: str, rng: Random) -> Case:
    return Case("tabs", re.sub("  " if rng.random() < 0.5 else " ", "\t", text).encode())


def _unreadable(text: str, rng: Random) -> Case:
    at = rng.randrange(len(text) + 1)
    return Case("control characters", (text[:at] + rng.choice(_UNREADABLE) + text[at:]).encode())


def _encoded(text: str, rng: Random) -> Case:
    encoding = rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift_jis", "cp037"))
    worded = text.replace("name:", "# é – name\nname:", 1).encode(encoding, "replace")
    return Case(f"encoded as {encoding}", worded if rng.random() < 0.8 else text.encode() + worded)


def _long(text: str, rng: Random) -> Case:
    word = rng.choice(("x", "é", " ", "[", "{a: ", "- ", "? ", '"', "0", "9", "a.", "../", "#", "\n", "&a ", "!")) * (
        rng.choice((200, 200, 200, 5_000, 5_000, 60_000))
    )
    at = rng.choice([0, len(text), *(m.end() for m in re.finditer(r": |\[|\{", text))])
    return Case("very long", (text[:at] + word + text[at:]).encode())


def _two(text: str, rng: Random) -> Case:
    return Case("two documents", (text + rng.choice(("\n---\n", "\n...\n---\n")) + "a: 1\n").encode(), "refuse")


def _nothing(text: str, rng: Random) -> Case:
    nothing = (
        "",
        " ",
        "\n",
        "---",
        "...",
        "---\n...\n",
        "# only words\n",
        "~",
        "null",
        "{}",
        "[]",
        "''",
        "0",
        "- a",
        "a",
    )
    return Case("nothing", rng.choice(nothing).encode(), "refuse")


def _kept(text: str, rng: Random) -> Case:
    """What changes nothing of what a file says."""
    ways: tuple[Callable[[str], str], ...] = (
        lambda t: t.replace("\n", "\r\n"),
        lambda t: "\ufeff" + t,
        lambda t: f"# {'x' * 300}\n\n{t}\n\n# é\n",
        lambda t: "---\n" + t + "\n...\n",
        lambda t: "%YAML 1.1\n---\n" + t,
        lambda t: t.rstrip("\n"),
        lambda t: t + "\n" * 50,
    )
    return Case("said otherwise", rng.choice(ways)(text).encode(), "same", text)


WAYS: tuple[Callable[[str, Random], Case], ...] = (
    *(
        _flipped,
        _replaced,
        _cut,
        _repeated,
        _scraps,
        _scraps,
        _lines,
        _tabs,
        _unreadable,
        _encoded,
        _long,
        _two,
        _nothing,
    ),
    _kept,
)

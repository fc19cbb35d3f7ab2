"""Mutated experiment files: some hundred here, any number by `nox -s fuzz`; and that a fault would be seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import fuzz
import pytest
from conftest import TINY
from fuzzing import judge as judging
from fuzzing import text, trees
from fuzzing.case import Case
from fuzzing.corpus import corpus, tree
from fuzzing.judge import judge
from fuzzing.settings import every_setting
from fuzzing.writing import Pairs, Raw, flow

from ablate import asked, commands, document
from ablate.document import FileFaults

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("way", [*text.WAYS, *trees.WAYS], ids=lambda way: way.__name__)
def test_whatever_is_done_to_a_file_it_is_planned_or_refused(way: Callable[[Any, Random], Case]) -> None:
    for number in range(5):
        rng = Random(f"{way.__name__} {number}")
        origin = rng.choice(corpus())
        case = way(origin if way in text.WAYS else tree(origin), rng)  # type: ignore[operator]
        outcome, wrong = judge(case)
        assert outcome in ("refused", "planned"), f"{case.content.decode(errors='replace')}\n{wrong}"


def test_whatever_hypothesis_makes_up_is_planned_or_refused() -> None:
    for number, case in fuzz.cases(1, range(100)):
        if number % 4 == 0:
            outcome, wrong = judge(case)
            assert outcome in ("refused", "planned"), f"{case.content.decode(errors='replace')}\n{wrong}"


def test_where_the_files_come_from() -> None:
    for origin in corpus():
        assert tree(origin) == document.parse(origin, "").data
    whole = "".join(corpus())
    assert all(word in whole for word in ("quickstart", "mixtral", "windowed", "llama"))
    assert len(corpus()) > 100


def test_settings_are_known_with_their_bounds() -> None:
    found = {setting.place: setting for setting in every_setting()}
    assert {0, 2**53 + 1} <= set(found["train", "steps"].beyond())
    assert list(found["train", "lr"].misfits()) == ["zzqx", True, [], {"zzqx": 1}, None]
    assert found["baseline", "attention", "n_kv_heads"].beside == {("baseline", "attention", "name"): "gqa"}
    assert ("train", "optimizer", "betas") in found


def test_files_may_say_what_no_writer_would() -> None:
    assert (
        flow({"a": [1, Raw("!!x")], "b": Pairs([("c", None), ("c", "d")])})
        == '{"a": [1, !!x], "b": {"c": null, "c": "d"}}'
    )


# --- A fault is seen --------------------------------------------------------------------------------------------------


def test_a_wrong_file_that_is_planned_is_a_fault() -> None:
    assert judge(Case("", TINY.encode()))[0] == "planned"
    assert judge(Case("", TINY.encode(), "refuse")) == ("fault", "planned, though it is wrong")


def test_the_same_that_is_read_otherwise_is_a_fault() -> None:
    other = TINY.replace("d_model: 32", "d_model: 64")
    assert judge(Case("", TINY.encode(), "same", TINY + "# words\n"))[0] == "planned"
    assert judge(Case("", other.encode(), "same", TINY)) == ("fault", "not the same as of the file that says the same")
    assert judge(Case("", b"name: [", "same", TINY))[0] == "fault"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (FileFaults(["fuzzed.yaml:1:1: wrong"]), "not two lines"),
        (FileFaults(["fuzzed.yaml:1:1: wrong\n  mend it\n  or not"]), "not two lines"),
        (FileFaults(["fuzzed.yaml:1:1: wr\x1bong\n  mend it"]), "not two lines"),
        (FileFaults(["wrong\n  mend it"]), "without its place"),
        (FileFaults(["fuzzed.yaml:1:1: " + "x" * 3000 + "\n  mend it"]), "too long"),
        (FileFaults([]), "without a word"),
    ],
)
def test_anything_but_two_lines_is_a_fault(error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(wanted: asked.Wanted) -> None:
        raise error

    monkeypatch.setattr(commands, "plan_facts", fails)
    outcome, wrong = judge(Case("", b""))
    assert outcome == "fault"
    assert said in wrong


def test_what_is_left_behind_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(wanted: asked.Wanted) -> None:
        Path("results").mkdir()
        raise FileFaults(["fuzzed.yaml:1:1: wrong\n  mend it"])

    monkeypatch.setattr(judging.commands, "plan_facts", leaves)
    assert judge(Case("", b"")) == ("fault", "left behind: results")


HELD_UP = """
import sys
sys.path.insert(0, {tools!r})
import fuzz

def judge(case, done=[]):
    done.append(case)
    while len(done) == 3:
        pass
    return "refused", ""

fuzz.judge, fuzz.SECONDS = judge, 0.5
for number, _, outcome, wrong in fuzz.fuzzed(0, range(5)):
    print(number, outcome, *wrong.split()[-3:])
"""


def test_a_file_that_holds_up_the_child_is_a_fault_and_another_child_goes_on() -> None:
    code = HELD_UP.format(tools=str(Path(fuzz.__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 refused", "1 refused", "2 fault ended by -26", "3 refused", "4 refused"]

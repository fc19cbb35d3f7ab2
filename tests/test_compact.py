"""Few files for many, and all of them checked: the same rows, each once, whatever happens on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from stored import CURVE, PROFILE, ROUND, frames, row

from ablate import checkpoint, files, results
from ablate.cli import main
from ablate.compact import compact
from ablate.results import Store
from ablate.schema import SCHEMAS
from ablate.verify import verify

LEFT = f".a1.parquet.{'0' * 32}.tmp"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "x", create=True)
    for number, trial_id in enumerate(("a3", "a1", "a2")):
        store.write_trial(row(trial_id, seed=number, val_loss=1.0 + number), CURVE, PROFILE)
    for number in range(2):
        store.write_round("ab", number, {**ROUND, "place": [2 * number + 1, 2 * number + 2]})
    trials = {"0": "a3", "1": "a1", "2": "a2"}
    store.write_experiment({"name": "x", "variants": [{"name": "baseline", "trials": trials}], "timing": TIMING})
    return store


TIMING = {"timing_id": "ab", "members": {"a1": "baseline"}}


def same(before: dict[str, pd.DataFrame], after: dict[str, pd.DataFrame]) -> None:
    for kind, frame in before.items():
        pd.testing.assert_frame_equal(after[kind], frame)


def told(*words: str) -> Any:
    return CliRunner().invoke(main, ["results", *words])


def faults(store: Store) -> list[str]:
    return [each["file"] for each in verify(Store(store.folder))["faults"]]


def test_the_rows_are_the_same_and_each_is_there_once_for_whoever_reads(store: Store) -> None:
    before, trial, rounds = frames(store), store.trial("a1"), store.rounds("ab")
    assert compact(store)["merged"] == {"trials": 3, "curves": 3, "profiles": 3, "repeats": 2}
    same(before, frames(store))
    assert (store.trial("a1"), store.rounds("ab")) == (trial, rounds)
    assert store.curves("a1")["value"].tolist() == CURVE["value"]
    for kind in SCHEMAS:
        assert [path.name for path in (store.folder / kind).iterdir()] == ["compacted.parquet"]
        assert len(pd.read_parquet(store.folder / kind)) == len(before[kind])
    assert sum(compact(store)["merged"].values()) == 0
    assert (store.load().skipped, faults(store)) == ([], [])


def test_a_compacted_store_goes_on(store: Store) -> None:
    compact(store)
    store.write_trial(row("a1", seed=1, val_loss=9.0), {**CURVE, "value": [9.0, 9.0]}, {})
    store.write_trial(row("b1", seed=3), CURVE, PROFILE)
    store.write_round("ab", 1, {**ROUND, "value": [9.0, None], "place": [3, 4]})
    assert len(store.rounds("ab")) == 4
    assert len(pd.read_parquet(store.folder / "trials")) == 4, "nobody sees a row twice"
    assert len(pd.read_parquet(store.folder / "repeats")) == 4
    before = frames(store)
    assert before["trials"]["val_loss"].tolist() == [1.0, 9.0, 3.0]
    assert before["curves"].groupby("trial_id")["value"].max().to_dict() == {"a1": 9.0, "a2": 2.5, "a3": 2.5}
    assert before["profiles"]["trial_id"].tolist() == ["a2", "a3"]
    compact(store)
    same(before, frames(store))


def test_a_row_that_cannot_be_read_hides_an_older_one(store: Store) -> None:
    compact(store)
    (store.folder / "trials/a1.parquet").write_bytes(b"torn")
    assert store.trial("a1") is None
    assert store.load().trials["trial_id"].tolist() == ["a3", "a2"]
    compact(store)
    assert (store.folder / "trials/a1.parquet").read_bytes() == b"torn"


def test_a_compacted_file_that_cannot_be_read_is_not_written_over(store: Store) -> None:
    compact(store)
    path = store.folder / "trials/compacted.parquet"
    path.write_bytes(damaged := path.read_bytes()[:-9])
    store.write_trial(row("a1", seed=1), CURVE, PROFILE)
    done = compact(store)
    assert done["merged"]["trials"] == 0
    assert done["damaged"] == ["trials/compacted.parquet"]
    assert path.read_bytes() == damaged
    assert store.load().trials["trial_id"].tolist() == ["a1"]
    assert "trials/compacted.parquet" in faults(store)


KILLED = """
import os, sys
from pathlib import Path
from ablate.compact import compact
from ablate.results import Store
folder, left = Path(sys.argv[1]), 0

def dying(function):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0: os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return call

for moment in range(1, 100):
    if (child := os.fork()) == 0:
        left = moment
        os.fsync, os.replace, os.rename, os.unlink = map(dying, (os.fsync, os.replace, os.rename, os.unlink))
        Path.unlink, Path.replace = dying(Path.unlink), dying(Path.replace)
        compact(Store(folder))
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    found = Store(folder).load()
    print(moment, ended, len(found.trials), len(found.curves), len(found.profiles), len(found.repeats),
          [each for each in found.skipped if "did not finish" not in each], flush=True)
    if ended == 0: break
    if moment % 3 == 0: Store(folder).write_trial(dict(trial_id="a2", variant="baseline", seed=2, status="ok"),
        dict(step=[1, 2], split=["val"] * 2, metric=["loss"] * 2, value=[5.0, 5.0]), dict(phase=["x"], metric=["y"]))
"""


def test_a_compaction_killed_at_any_moment_leaves_each_row_once(store: Store) -> None:
    found = frames(store)
    sizes = " ".join(str(len(found[kind])) for kind in SCHEMAS)
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.folder)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) > 8
    assert {line.split(maxsplit=2)[2] for line in lines} == {f"{sizes} []"}
    assert [line.split()[1] for line in lines[:-1]] == ["9"] * (len(lines) - 1)
    assert store.load().curves["value"].max() == 5.0


def test_it_is_refused_while_somebody_else_writes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_SECONDS_TO_WAIT", 0.0)
    with Store(store.folder).alone():
        done = told("compact", str(store.folder))
    assert (done.exit_code, done.output.splitlines()[1:]) == (2, ["  try again later"])


def test_what_a_killed_writer_left_goes_when_it_is_old_and_surely_ours(store: Store) -> None:
    kept = [store.folder / "trials" / name for name in (".own.tmp", f".a2.parquet.{'1' * 32}.tmp", "notes.tmp")]
    old = store.folder / "trials" / LEFT
    for path in (old, *kept):
        path.write_bytes(b"x")
    (store.folder / "trials" / f".d.{'2' * 32}.tmp").mkdir()
    hours_ago = time.time() - 7200
    for path in (old, kept[0], kept[2]):
        os.utime(path, (hours_ago, hours_ago))
    assert f"trials/{LEFT}" in faults(store)
    assert compact(store)["removed"] == [f"trials/{LEFT}"]
    assert not old.exists()
    assert all(path.exists() for path in kept)


def test_what_a_writer_left_that_is_known_to_be_gone_goes_at_once(store: Store) -> None:
    path = store.folder / "trials" / "a1.parquet"
    script = (
        "import os, sys; from pathlib import Path; from ablate.files import write_atomically\n"
        "write_atomically(Path(sys.argv[1]), lambda file: os.kill(os.getpid(), 9))\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -9
    left, mine = next(path.parent.glob(".*.tmp")), files._beside(path)
    mine.touch()
    assert store.remove_leftovers() == [left]
    assert mine.exists(), "its writer lives"


# --- verify -----------------------------------------------------------------------------------------------------------


def test_a_sound_store_has_no_fault(store: Store) -> None:
    for name in ("checkpoints", "leases"):
        (store.folder / name).mkdir()
    done = told("verify", str(store.folder))
    assert (done.exit_code, done.output) == (
        0,
        f"{store.folder}: 3 trials, 3 curves, 3 profiles, 2 repeats; all is well\n",
    )
    facts = json.loads(told("verify", str(store.folder), "--json").output)
    assert (facts["faults"], facts["without_checksum"]) == ([], 0)


def spoil(store: Store) -> dict[str, str]:
    folder = store.folder
    (folder / "trials/a1.parquet").write_bytes(b"")
    (folder / "curves/a2.parquet").unlink()
    (folder / "trials/mine.txt").write_text("x", encoding="utf-8")
    (folder / "notes").mkdir()
    (folder / "checkpoints/a1").mkdir(parents=True)
    (folder / LEFT).write_bytes(b"x")
    (folder / "capacity.json").write_text("{", encoding="utf-8")
    for step, name in ((3, "step-000000000003"), (4, "step-000000000009"), (5, "step-000000000005")):
        checkpoint.write(folder / "checkpoints" / f"{step}", step, {}, {})
        (folder / f"checkpoints/{step}/step-{step:012d}.safetensors").rename(
            folder / f"checkpoints/a1/{name}.safetensors"
        )
    (folder / "checkpoints/a1/step-000000000005.safetensors").write_bytes(b"PK")
    return {
        "trials/a1.parquet": "zero bytes",
        "curves/a1.parquet": "its trial has no row",
        "profiles/a1.parquet": "its trial has no row",
        "trials/a2": "its curves are gone",
        "trials/mine.txt": "not a file of ablate",
        "notes": "not of ablate",
        LEFT: "did not finish",
        "capacity.json": "cannot be read",
        "checkpoints/a1/step-000000000009.safetensors": "another step's name",
        "checkpoints/a1/step-000000000005.safetensors": "torn, or changed",
        "experiment.json": "1 of its trials have no row, a1 for one",
    }


def test_whatever_is_wrong_is_named_with_what_to_do(store: Store) -> None:
    expected = spoil(store)
    done = told("verify", str(store.folder), "--json")
    assert done.exit_code == 1
    found = {each["file"]: each for each in json.loads(done.output)["faults"]}
    assert found.keys() == expected.keys()
    assert [name for name, fault in expected.items() if fault not in found[name]["fault"]] == []
    assert all(each["cure"] for each in found.values())
    lines = told("verify", str(store.folder)).output.splitlines()
    assert len(lines) == 2 * len(expected) + 1


@pytest.mark.parametrize("verb", ["verify", "compact"])
def test_where_nothing_is_stored_it_says_so(verb: str, tmp_path: Path) -> None:
    done = told(verb, str(tmp_path))
    assert (done.exit_code, done.output.splitlines()[0]) == (2, f"no results in {tmp_path}")


def test_a_row_of_another_experiment_is_named_and_nothing_asked_of_it(store: Store) -> None:
    store.write_trial(row("ff99", experiment="another"), {}, {})
    told = [fault for fault in verify(store)["faults"] if "ff99" in fault["file"]]
    assert told == [{"file": "trials/ff99", "fault": "is of the experiment another", "cure": "move it away"}]

"""Whole runs over real processes: what ends badly is a row, the rest is complete, and nothing is done twice."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from click.testing import CliRunner

import ablate
from ablate import gatekeeper
from ablate.child import Child, explain
from ablate.cli import main
from ablate.job import GateJob
from ablate.results import Results, Store
from ablate.runner import running_now
from ablate.schema import CONDITIONS

TINY = """
name: tiny
question: Does it run?
baseline: {preset: llama, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 16}
variants:
%s
seeds: 1
data: {name: random_tokens, vocab_size: 11, train_tokens: 4000, validation_tokens: 500}
train: {steps: 6, batch_tokens: 32, lr: 1e-3, eval_every: 3, threads: 1}
profile: {decode: {context: [8], new_tokens: 4}}
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ablate", "run", "tiny.yaml", "--device", "cpu", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """In this process, whose imports and server of children serve all tests."""
    places = ("--results", str(folder / "results"), "--reports", str(folder / "reports"))
    done = CliRunner().invoke(main, ["run", str(folder / "tiny.yaml"), "--device", "cpu", *places, *arguments])
    return done.exit_code, done.output


def said(verb: str, folder: Path) -> str:
    places = ("--results", str(folder / "results"), "--device", "cpu")
    return CliRunner().invoke(main, [verb, str(folder / "tiny.yaml"), *places]).output


def write(folder: Path, *variants: str) -> None:
    lines = "\n".join(f"  {each}" for each in variants) or "  {}"
    (folder / "tiny.yaml").write_text(TINY % lines, encoding="utf-8")


def rows(folder: Path) -> pd.DataFrame:
    return ablate.load(folder / "results/tiny").trials.set_index("variant")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Runs that a test starts; none of them outlives it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(condition: Callable[[], Any], seconds: float = 300) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it never happened")


def trial_process(run_pid: int, folder: Path, variant: str) -> psutil.Process | None:
    """The process of the variant's trial once it has begun: the one that writes its log."""
    store = Store(folder / "results/tiny")
    if running_now(store) != [f"{variant} seed 0"]:
        return None
    (held,) = (store.folder / "leases").glob("[!.]*.json")
    for child in psutil.Process(run_pid).children(recursive=True):
        with contextlib.suppress(OSError, psutil.Error):
            if Path(f"/proc/{child.pid}/fd/1").resolve() == store.log_path(held.stem).resolve():
                return child
    return None


def test_what_ends_badly_is_a_row_and_the_rest_is_complete(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    write(
        tmp_path,
        "huge: {d_model: 200000}",
        "wild: {train: {lr: 1e30, grad_clip: null, optimizer: sgd}}",
        "victim: {train: {steps: 1000000}}",
        "gqa: {attention: {name: gqa, n_kv_heads: 1}}",
    )
    process = start(tmp_path, "--workers", "1")
    processes.append(process)
    victim = wait_for(lambda: trial_process(process.pid, tmp_path, "victim"))
    victim.kill()
    output, _ = process.communicate(timeout=300)

    trials = rows(tmp_path)
    assert trials["status"].to_dict() == {
        "baseline": "ok",
        "huge": "oom",
        "wild": "diverged",
        "victim": "killed",
        "gqa": "ok",
    }, output
    assert process.returncode == 1
    assert "signal 9" in trials.loc["victim", "reason"]
    assert trials.loc["wild", "diverged_step"] >= 1
    assert trials["val_loss"].notna().to_dict()["gqa"]
    for log in trials["log"]:
        assert (tmp_path / "results/tiny" / log).is_file()
    report = (tmp_path / "reports/tiny/report.md").read_text(encoding="utf-8")
    assert "## Failures" in report
    assert "signal 9" in report


def test_again_does_nothing_and_a_failure_is_repeated_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path, "wild: {train: {lr: 1e30, grad_clip: null, optimizer: sgd}}")
    assert run(tmp_path)[0] == 1
    first = rows(tmp_path)

    status, output = run(tmp_path)
    assert status == 1
    assert "nothing to train" in output
    pd.testing.assert_frame_equal(rows(tmp_path), first)

    status, output = run(tmp_path, "--retry-failed")
    assert rows(tmp_path)["attempts"].to_dict() == {"baseline": 1, "wild": 2}


def test_a_new_profile_profiles_and_trains_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    assert run(tmp_path)[0] == 0
    before = ablate.load(tmp_path / "results/tiny")
    new_profile = ("profile.decode.context=[4]", "profile.decode.new_tokens=1", "profile.lengths=[4, 8]")
    status, output = run(tmp_path, *(part for each in new_profile for part in ("--set", each)))
    after = ablate.load(tmp_path / "results/tiny")
    assert status == 0, output
    assert after.trials["trial_id"].equals(before.trials["trial_id"])
    assert after.trials["val_loss"].equals(before.trials["val_loss"])
    assert after.trials["step_seconds_p50"].equals(before.trials["step_seconds_p50"]), "training was measured anew"
    assert after.trials["started_at"].equals(before.trials["started_at"])
    assert list(after.trials["attempts"]) == [2]
    old, new = (each.profiles.set_index("phase") for each in (before, after))
    assert set(old.loc["decode", "context"]) == {8}
    assert set(new.loc["decode", "context"]) == {4}
    assert set(new.loc["lengths", "context"]) == {4, 8}
    assert "lengths" not in old.index
    assert before.trials["decode_tokens_per_second"].notna().all()
    assert after.trials["decode_tokens_per_second"].isna().all(), "of a profile that is gone"
    assert new.loc["train"].equals(old.loc["train"]), "what was measured in training stays"
    assert new.loc["train", "sample"].notna().any()
    assert after.curves.equals(before.curves)


def rewrite(folder: Path, **columns: Any) -> dict[str, Any]:
    """What is stored of the one trial, with some columns changed as if it had been so."""
    store = Store(folder / "results/tiny")
    (trial_id,) = ablate.load(store.folder).trials["trial_id"]
    row = (store.trial(trial_id) or {}) | columns
    tables = [getattr(store, name)(trial_id).drop(columns="trial_id").astype(object) for name in ("curves", "profiles")]
    store.write_trial(
        row, *({name: list(frame[name].where(frame[name].notna(), None)) for name in frame} for frame in tables)
    )
    return row


def test_a_new_profile_leaves_the_conditions_of_the_training(tmp_path: Path) -> None:
    write(tmp_path)
    assert run(tmp_path)[0] == 0
    (fresh,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    assert json.loads(fresh["profile_conditions"])["torch"] == fresh["torch"]
    of_training = {"torch": "1.0", "python": "2.7", "ablate": "0.0", "git_commit": "abc", "git_dirty": True}
    of_training |= {"device_name": "another", "gpu_uuid": "GPU-1", "trials_at_once": 1.95}
    ran = {"train": ["a"], "optimizer": ["b"], "prefill": ["c"], "decode": ["d"]}
    rewrite(tmp_path, **of_training, wall_seconds=1000.0, kernels=json.dumps(ran))

    assert run(tmp_path, "--set", "profile.decode=null", "--set", "profile.prefill.tokens=[8]")[0] == 0
    (row,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    assert {name: row[name] for name in of_training} == of_training
    assert row["wall_seconds"] > 1000
    profile = json.loads(row["profile_conditions"])
    assert profile["other_load_cores"] >= 0
    assert {name: profile[name] for name in CONDITIONS} == {
        name: None if pd.isna(fresh[name]) else fresh[name] for name in CONDITIONS
    }
    kernels = json.loads(row["kernels"])
    assert set(kernels) == {"train", "optimizer", "prefill"}, "decoding is of a profile that is gone"
    assert (kernels["train"], kernels["optimizer"]) == (["a"], ["b"])
    assert kernels["prefill"] != ["c"]


@pytest.mark.parametrize("status", ["oom", "killed", "interrupted"])
def test_a_profile_that_failed_beside_a_training_is_repeated_alone(tmp_path: Path, status: str) -> None:
    write(tmp_path)
    assert run(tmp_path)[0] == 0
    before = rewrite(tmp_path, status=status, phase="profile", reason="it was so", train_loss=7.0, profile_id="0")
    if status != "interrupted":
        assert "nothing to train" in run(tmp_path)[1]
        assert "nothing to train" in run(tmp_path, "--only", "train", "--retry-failed")[1]
    curves = ablate.load(tmp_path / "results/tiny").curves
    assert run(tmp_path, "--retry-failed")[0] == 0
    after = ablate.load(tmp_path / "results/tiny")
    (row,) = after.trials.to_dict("records")
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["train_loss"] == 7.0, "it was trained anew"
    assert row["started_at"] == before["started_at"]
    assert row["decode_tokens_per_second"] > 0
    assert after.curves.equals(curves)
    assert {"train", "decode"} <= set(after.profiles["phase"])


def test_a_new_profile_that_fails_leaves_the_training(tmp_path: Path) -> None:
    write(tmp_path)
    assert run(tmp_path)[0] == 0
    (before,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    huge = ("--set", "profile.decode.batch=[1000000000]")
    assert run(tmp_path, *huge)[0] == 1
    (failed,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    assert (failed["status"], failed["phase"]) == ("oom", "profile")
    assert run(tmp_path, "--retry-failed")[0] == 0
    (after,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    same = [*LOSSES, "step_seconds_p50", "startup_seconds", "started_at"]
    assert [after[name] for name in same] == [failed[name] for name in same] == [before[name] for name in same]
    assert after["decode_tokens_per_second"] > 0
    assert after["attempts"] == 3


LOSSES = ["steps", "tokens", "train_loss", "val_loss", "best_val_loss", "batch_order_hash"]


def test_a_profile_alone_measures_steps_and_trains_nothing(tmp_path: Path) -> None:
    write(tmp_path, "gqa: {attention: {name: gqa, n_kv_heads: 1}}")
    assert run(tmp_path, "--only", "profile")[0] == 0
    profiled = ablate.load(tmp_path / "results/tiny")
    assert list(profiled.trials["status"]) == ["ok"] * 2
    assert profiled.trials[LOSSES].isna().all(axis=None)
    measured = ["train_tokens_per_second", "peak_live_bytes", "optimizer_state_bytes", "kv_cache_bytes_measured"]
    assert profiled.trials[[*measured, "profile_id"]].notna().all(axis=None)
    assert set(profiled.profiles["phase"]) == {"train", "decode"}
    assert profiled.curves.empty
    assert "2 trials: 2 ok (2 only profiled); 2 left" in said("status", tmp_path)
    assert "2 trials, 0 of them stored" in said("plan", tmp_path)
    assert "nothing to train" in run(tmp_path, "--only", "profile")[1]

    assert run(tmp_path)[0] == 0
    whole = ablate.load(tmp_path / "results/tiny")
    assert list(whole.trials["steps"]) == [6, 6]
    decoded = [each.profiles[each.profiles["phase"] == "decode"].reset_index(drop=True) for each in (profiled, whole)]
    assert decoded[0].equals(decoded[1]), "what was profiled stays, and is not measured again"
    assert set(whole.profiles["phase"]) == {"train", "decode"}
    assert "2 trials: 2 ok; 0 left" in said("status", tmp_path)
    assert "nothing to train" in run(tmp_path)[1]


def test_a_training_that_is_added_has_no_aa_check_of_an_earlier_time(tmp_path: Path) -> None:
    """It stood behind the few steps of the profile. What stands behind a training stays when a profile is added."""
    write(tmp_path)
    checked = {"aa_step_ratio_low": 0.9, "aa_step_ratio_high": 1.1}
    assert run(tmp_path, "--only", "profile")[0] == 0
    rewrite(tmp_path, **checked)
    assert run(tmp_path)[0] == 0
    (trained,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    assert all(pd.isna(trained[name]) for name in checked)
    rewrite(tmp_path, **checked)
    assert run(tmp_path, "--set", "profile.decode.new_tokens=3")[0] == 0
    (again,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    assert {name: again[name] for name in checked} == checked


def test_training_alone_has_no_profile_and_a_whole_run_adds_it(tmp_path: Path) -> None:
    write(tmp_path)
    assert run(tmp_path, "--only", "train")[0] == 0
    (trained,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    assert trained["status"] == "ok"
    assert trained["steps"] == 6
    assert pd.isna(trained["profile_id"])
    assert pd.isna(trained["kv_cache_bytes_measured"])
    assert "nothing to train" in run(tmp_path, "--only", "train")[1]
    assert "1 ok; 1 left" in said("status", tmp_path)

    assert run(tmp_path, "--only", "profile")[0] == 0
    (whole,) = ablate.load(tmp_path / "results/tiny").trials.to_dict("records")
    same = [*LOSSES, "train_tokens_per_second", "started_at"]
    assert [whole[name] for name in same] == [trained[name] for name in same], "trained or measured anew"
    assert whole["kv_cache_bytes_measured"] > 0
    assert "nothing to train" in run(tmp_path)[1]


def test_a_profile_alone_that_failed_is_repeated_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path, "huge: {d_model: 200000}")
    assert run(tmp_path, "--only", "profile")[0] == 1
    assert rows(tmp_path)["status"].to_dict() == {"baseline": "ok", "huge": "oom"}
    assert "1 to run" in run(tmp_path, "--only", "train")[1]
    assert rows(tmp_path).loc["baseline", "steps"] == 6
    assert "1 to run" in run(tmp_path, "--only", "profile", "--retry-failed")[1]
    assert rows(tmp_path)["attempts"].to_dict() == {"baseline": 2, "huge": 2}


@pytest.mark.parametrize(
    ("number", "status", "to_all"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True)],
)
def test_an_interrupted_run_says_so_and_goes_on_next_time(
    tmp_path: Path, processes: list[subprocess.Popen[str]], number: signal.Signals, status: int, to_all: bool
) -> None:
    write(tmp_path, "long: {train: {steps: 1000000}}", "gqa: {attention: {name: gqa, n_kv_heads: 1}}")
    process = start(tmp_path, "--workers", "1")
    processes.append(process)
    child = wait_for(lambda: trial_process(process.pid, tmp_path, "long"))
    wait_for(lambda: psutil.Process(child.pid).cpu_times().user > 5)  # it trains by now
    for each in psutil.Process(process.pid).children(recursive=True) if to_all else []:
        each.send_signal(number)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == status, output
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert rows(tmp_path)["status"].to_dict() == {"baseline": "ok", "long": "interrupted"}
    cut = rows(tmp_path).loc["long"]
    assert cut["reason"] == f"the run got {number.name}; stopped at step {cut['steps']}"
    assert (tmp_path / "reports/tiny/report.md").is_file()
    assert list((tmp_path / "results/tiny/leases").iterdir()) == []

    assert run(tmp_path, "--workers", "1", "--set", "train.max_seconds=5")[0] == 1
    assert rows(tmp_path)["status"].to_dict() == {"baseline": "ok", "long": "timeout", "gqa": "ok"}
    assert rows(tmp_path)["attempts"].to_dict() == {"baseline": 1, "long": 2, "gqa": 1}
    results = ablate.load(tmp_path / "results/tiny")
    steps = results.curves.query(f"trial_id == '{cut['trial_id']}' and split == 'train' and metric == 'loss'")["step"]
    assert list(steps) == list(range(1, len(steps) + 1))
    assert len(steps) > cut["steps"] > 0
    assert [path.name for path in (tmp_path / "results/tiny/checkpoints").iterdir()] == [cut["trial_id"]]


def test_fail_fast_starts_nothing_more(tmp_path: Path) -> None:
    write(tmp_path, "wild: {train: {lr: 1e30, grad_clip: null, optimizer: sgd}}", "gqa: {attention: gqa}")
    assert run(tmp_path, "--workers", "1", "--fail-fast")[0] == 1
    assert rows(tmp_path)["status"].to_dict() == {"baseline": "ok", "wild": "diverged"}
    assert (rows(tmp_path)["trials_at_once"] < 1.02).all()


def test_workers_share_the_work(tmp_path: Path) -> None:
    write(tmp_path, "gqa: {attention: {name: gqa, n_kv_heads: 1}}", "mqa: {attention: mqa}")
    status, output = run(tmp_path, "--workers", "2", "--set", "seeds=2")
    assert status == 0, output
    results = ablate.load(tmp_path / "results/tiny")
    assert list(results.trials["status"]) == ["ok"] * 6
    assert results.trials.groupby("seed")["batch_order_hash"].nunique().to_dict() == {0: 1, 1: 1}
    assert results.trials["batch_order_hash"].nunique() == 2
    assert results.trials["trials_at_once"].between(1.0, 2.0).all()
    assert results.trials["trials_at_once"].max() > 1.2


ZEROS = '''"""Attention that mixes nothing."""

from torch import nn

from ablate.attention import AttentionChoice


class Nothing(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, position, start, mask=None, cache=None, memory=None):
        %s
        return self.out(x)

    def new_cache(self, batch, tokens, dtype, device):
        from ablate.cache import Cache

        return Cache((batch, tokens, 0), dtype=dtype, device=device)


class Config(AttentionChoice):
    offers = frozenset({"rotate"})

    def build(self, shape):
        return Nothing(shape.d_model)
'''


def test_a_choice_of_ones_own_runs_by_path_and_by_dotted_name(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab/nothing.py").write_text(ZEROS % "pass", encoding="utf-8")
    write(tmp_path, "path: {attention: my_lab/nothing.py}", "dotted: {attention: my_lab.nothing}")
    process = start(tmp_path)
    processes.append(process)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    trials = rows(tmp_path)
    assert list(trials["status"]) == ["ok"] * 3
    assert trials.loc["path", "val_loss"] == trials.loc["dotted", "val_loss"]
    assert trials["flops_per_token"].isna().to_dict() == {"baseline": False, "path": True, "dotted": True}


FAULTS = {
    "raises": ("raise KeyError('gone')", "builds: KeyError: 'gone' (raises.py, line 14)"),
    "nan": ("x = x * float('nan')", "builds: 100% of the logits are not finite"),
    "shape": ("x = x[:, :-1]", "builds: RuntimeError"),
    "leaks": ("x = x + x.mean(1, keepdim=True)", "causal: later tokens account for"),
    "cached": ("x = x + (start > 0)", "cached: cached and full logits differ by"),
    "aborts": ("import os; os.abort()", "builds: signal 6 (SIGABRT)"),
    "leaves": ("import os; os._exit(3)", "builds: the process ended with exit status 3 and no word"),
    "grows": ("bytearray(2**40)", "builds: MemoryError"),
}
LATER = {
    "raises": ("raise KeyError('gone')", "crashed", "KeyError"),
    "nan": ("x = x * float('nan')", "diverged", "step 1"),
    "shape": ("x = x[:, :-1]", "crashed", "RuntimeError"),
    "aborts": ("import os; os.abort()", "killed", "SIGABRT"),
    "leaves": ("import os; os._exit(3)", "crashed", "exit status 3"),
    "quits": ("import sys; sys.exit(0)", "crashed", "SystemExit"),
    "mute": ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "crashed", "Mute"),
    "leaks": ("x = x + x.mean(1, keepdim=True)", "gate_failed", "a later token changes"),
}


def test_a_choice_of_ones_own_that_is_not_what_it_says_is_a_row_and_the_rest_runs(tmp_path: Path) -> None:
    for name, (fault, _) in FAULTS.items():
        (tmp_path / f"{name}.py").write_text(ZEROS % fault, encoding="utf-8")
    (tmp_path / "prints.py").write_text(ZEROS % "print('a word')", encoding="utf-8")
    variants = (*FAULTS, "prints")
    write(tmp_path, *(f"{name}: {{attention: {tmp_path / name}.py}}" for name in variants))
    code, output = run(tmp_path, "--set", "seeds=2")
    assert code == 1, output
    trials = ablate.load(tmp_path / "results/tiny").trials
    outcomes = dict.fromkeys(("baseline", "prints"), "ok") | dict.fromkeys(FAULTS, "gate_failed")
    assert sorted(zip(trials["variant"], trials["status"], strict=True)) == sorted([*outcomes.items()] * 2)
    refused = trials[trials["status"] == "gate_failed"]
    for _, row in refused.iterrows():
        assert row["reason"].startswith(FAULTS[row["variant"]][1])
        assert row["phase"] == "gates"
        assert pd.isna(row["wall_seconds"])
    raised = refused[refused["variant"] == "raises"]["log"].unique()
    assert [(tmp_path / "results/tiny" / log).read_text("utf-8").count("KeyError: 'gone'") for log in raised] == [2]
    assert "gate_failed" in (tmp_path / "reports/tiny/report.md").read_text(encoding="utf-8")


def test_a_choice_of_ones_own_that_fails_later_is_a_row(tmp_path: Path) -> None:
    for name, (fault, _, _) in LATER.items():
        late = f"if x.shape[1] == 16: {fault}"  # at the gates sequences are shorter
        (tmp_path / f"{name}.py").write_text(ZEROS % late, encoding="utf-8")
    write(tmp_path, *(f"{name}: {{attention: {tmp_path / name}.py}}" for name in LATER))
    code, output = run(tmp_path)
    assert code == 1, output
    trials = rows(tmp_path)
    assert trials["status"].to_dict() == {"baseline": "ok"} | {name: fault[1] for name, fault in LATER.items()}
    for name, (_, _, word) in LATER.items():
        assert word in trials.loc[name, "reason"]


DEADLY = {"leaves": "import os; os._exit(3)", "aborts": "import os; os.abort()", "raises": "raise KeyError('gone')"}


def test_what_ends_the_process_that_builds_it_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for name, fault in DEADLY.items():
        code = (
            ZEROS.replace("    def build(self, shape):\n", f"    def build(self, shape):\n        {fault}\n") % "pass"
        )
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    write(tmp_path, *(f"{name}: {{attention: {tmp_path / name}.py}}" for name in DEADLY))
    code, output = run(tmp_path)
    assert code == 2
    assert [line for line in output.splitlines() if not line.startswith("  ")] == [
        f"{tmp_path}/tiny.yaml:6:3: variant leaves cannot be built: the process ended with exit status 3 and no word",
        f"{tmp_path}/tiny.yaml:7:3: variant aborts cannot be built: signal 6 (SIGABRT)",
        f"{tmp_path}/tiny.yaml:8:3: variant raises cannot be built: KeyError: 'gone'",
    ]
    assert not (tmp_path / "results").exists()


def test_a_combination_that_holds_up_its_builder_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = "    def build(self, shape):\n        import time; time.sleep(1000)\n"
    code = ZEROS.replace("    def build(self, shape):\n", hang) % "pass"
    (tmp_path / "hangs.py").write_text(code, encoding="utf-8")
    write(tmp_path)
    monkeypatch.setattr(Child, "overdue", lambda child: child.phase.isdigit())
    status, _ = run(tmp_path, "--set", f"vary.attention=[gqa, {tmp_path}/hangs.py]")
    assert status == 1
    assert rows(tmp_path)["status"].to_dict() == {"baseline": "ok", "attention=gqa": "ok"}
    (left_out,) = ablate.load(tmp_path / "results/tiny").experiment["invalid"]
    assert left_out["reason"].endswith("cannot be built: still at it after 120 s")


def test_a_variant_that_hangs_at_its_gates_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = tmp_path / "hangs.txt"
    hang = f"import pathlib, time; pathlib.Path({str(sign)!r}).touch(); time.sleep(1000)"
    (tmp_path / "hangs.py").write_text(ZEROS % hang, encoding="utf-8")
    write(tmp_path, f"hangs: {{attention: {tmp_path}/hangs.py}}", "gqa: {attention: gqa}")

    def overdue(child: Child) -> bool:
        hangs = child.phase == "builds" and sign.exists()
        sign.unlink() if hangs else None
        return hangs

    monkeypatch.setattr(Child, "overdue", overdue)
    assert run(tmp_path, "--workers", "1")[0] == 1
    trials = rows(tmp_path)
    assert trials["status"].to_dict() == {"baseline": "ok", "hangs": "gate_failed", "gqa": "ok"}
    assert trials.loc["hangs", "reason"] == "builds: still at it after 120 s"


def test_an_interrupt_at_the_gates_leaves_nothing_behind(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    sign = tmp_path / "hangs.txt"
    hang = f"import pathlib, time; pathlib.Path({str(sign)!r}).touch(); time.sleep(1000)"
    (tmp_path / "hangs.py").write_text(ZEROS % hang, encoding="utf-8")
    write(tmp_path, f"hangs: {{attention: {tmp_path}/hangs.py}}")
    process = start(tmp_path)
    processes.append(process)
    wait_for(sign.exists)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert rows(tmp_path).empty
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_gates_have_a_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "LIMIT_SECONDS", 0.0)
    write(tmp_path)
    assert run(tmp_path)[0] == 1
    assert rows(tmp_path)["reason"].str.endswith("still at it after 0 s").all()


def test_a_model_goes_through_its_gates_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    led: list[GateJob] = []
    monkeypatch.setattr(gatekeeper, "Child", lambda start, job: (led.append(job), Child(start, job))[1])
    write(tmp_path, "slow: {train: {lr: 1e-4}}", "gqa: {attention: gqa}")
    assert run(tmp_path, "--set", "seeds=2")[0] == 0
    assert len(led) == 2, "one for two variants that are trained differently, one for the other"
    assert run(tmp_path, "--set", "seeds=2", "--set", "profile.decode.context=[4]")[0] == 0
    assert len(led) == 2, "what is stored needs no gates"
    assert run(tmp_path, "--set", "seeds=[0, 2]", "--set", "profile.decode.context=[4]")[0] == 0
    assert len(led) == 4


def test_fail_fast_trains_nothing_after_a_failed_gate(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(ZEROS % "x = x + x.mean(1, keepdim=True)", encoding="utf-8")
    write(tmp_path, f"leaks: {{attention: {tmp_path}/leaks.py}}", "gqa: {attention: gqa}")
    assert run(tmp_path, "--workers", "1", "--fail-fast")[0] == 1
    assert rows(tmp_path)["status"].to_dict() == {"leaks": "gate_failed"}


def test_exit_codes_are_explained() -> None:
    assert explain(-signal.SIGSEGV, "train", memory_was_short=False) == ("killed", "train", "signal 11 (SIGSEGV)")
    assert explain(-signal.SIGKILL, "train", memory_was_short=True)[0] == "oom"
    assert explain(-signal.SIGKILL, "train", memory_was_short=False)[2].endswith("probably host memory")
    assert explain(0, "profile", memory_was_short=False)[:2] == ("crashed", "profile")


def mlflow_runs(folder: Path) -> dict[str, dict[str, Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'results/mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    return {run.data.tags["ablate.trial_id"]: run.data.metrics | {"status": run.info.status} for run in found}


@pytest.mark.filterwarnings("ignore")
def test_mlflow_mirrors_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(tmp_path, "gqa: {attention: {name: gqa, n_kv_heads: 1}}")
    assert run(tmp_path, "--set", "seeds=2")[0] == 0
    trials: Results = ablate.load(tmp_path / "results/tiny")
    mirrored = mlflow_runs(tmp_path)
    assert set(mirrored) == set(trials.trials["trial_id"])
    for row in trials.trials.to_dict("records"):
        assert mirrored[row["trial_id"]]["val_loss"] == row["val_loss"]
        assert mirrored[row["trial_id"]]["kv_cache_bytes_per_token"] == row["kv_cache_bytes_per_token"]
        assert mirrored[row["trial_id"]]["status"] == "FINISHED"
    whole = pd.read_parquet(tmp_path / "results/tiny/trials")
    assert sorted(whole["trial_id"]) == sorted(trials.trials["trial_id"])

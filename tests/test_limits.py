"""Limits: a child dies with its parent, leaves signals to it, is told from one that hangs, and takes no more memory
than it may. Each case is a process of its own that starts children as a run does, without a model in them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from ablate import bond, cgroup, child, machine, pulse
from ablate.child import Child
from ablate.cli import main
from ablate.job import BuildJob, Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part in it is Linux's")

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]

PARENT = """
import multiprocessing, os, signal, subprocess, sys, time
from ablate import bond, child, pulse

def life(connection, folder, work):
    bond.bind()
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    with open(f"{folder}/pids", "w") as file:
        file.write(f"{os.getpid()} {helper.pid}")
    os.rename(f"{folder}/pids", f"{folder}/there")
    if work == "in C":  # the interpreter lets go of nothing: no thread of Python has its turn
        import ctypes
        ctypes.PyDLL(None).sleep(1000)
    time.sleep(1000)

if __name__ == "__main__":
    method, work, folder = sys.argv[1:]
    start = multiprocessing.get_context(method)
    ours, theirs = multiprocessing.Pipe()
    process = start.Process(target=life, args=(theirs, folder, work), daemon=True)
    with bond.shielded():
        process.start()
    print(process.pid, flush=True)
    process.join()
    bond.sweep(process.pid)
    time.sleep(1000)
"""


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it never happened")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Family:
    """A parent in a group of its own, its child, and what that has started."""

    def __init__(self, folder: Path, method: str, work: str) -> None:
        script = folder / "parent.py"
        script.write_text(PARENT, encoding="utf-8")
        command = [sys.executable, str(script), method, work, str(folder)]
        self.parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        wait_for((folder / "there").exists)
        self.child, self.helper = map(int, (folder / "there").read_text("utf-8").split())
        self.others = [each.pid for each in psutil.Process(self.parent.pid).children(recursive=True)]

    def forkserver(self) -> int:
        """The process that the child was forked from."""
        parent = psutil.Process(self.child).parent()
        assert parent is not None
        return parent.pid

    def end(self) -> None:
        for pid in (self.parent.pid, self.child, self.helper, *self.others):
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.parent.wait()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[[str, str], Family]]:
    started: list[Family] = []

    def start(method: str, work: str) -> Family:
        started.append(Family(tmp_path, method, work))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.mark.parametrize("work", ["in Python", "in C"])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_child_and_what_it_started_die_with_the_parent(
    family: Callable[[str, str], Family], method: str, work: str
) -> None:
    those = family(method, work)
    os.kill(those.child, signal.SIGSTOP)  # not even that keeps it
    os.kill(those.parent.pid, signal.SIGKILL)
    wait_for(lambda: is_gone(those.child) and is_gone(those.helper))
    wait_for(lambda: all(map(is_gone, those.others)))


def test_a_child_dies_with_the_whole_group_of_the_parent(family: Callable[[str, str], Family]) -> None:
    those = family("forkserver", "in C")
    os.killpg(those.parent.pid, signal.SIGKILL)
    wait_for(lambda: is_gone(those.child) and is_gone(those.helper))


def test_a_child_dies_with_the_server_that_it_was_forked_from(family: Callable[[str, str], Family]) -> None:
    """The parent takes it for ended, and would go on beside it."""
    those = family("forkserver", "in C")
    os.kill(those.forkserver(), signal.SIGKILL)
    wait_for(lambda: is_gone(those.child) and is_gone(those.helper))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_stop_are_the_parent_s(family: Callable[[str, str], Family], number: signal.Signals) -> None:
    those = family("forkserver", "in Python")
    server = those.forkserver()
    for pid in (those.child, server):
        os.kill(pid, number)
    assert os.getpgid(those.child) == os.getpgid(those.helper) == those.child
    os.kill(those.helper, signal.SIGTERM)  # what a child starts is as it always was
    wait_for(lambda: is_gone(those.helper))
    assert not is_gone(those.child)
    assert not is_gone(server)


def test_a_child_goes_first_when_memory_is_short(family: Callable[[str, str], Family]) -> None:
    those = family("spawn", "in Python")
    score = {pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text("ascii")) for pid in (those.parent.pid, those.child)}
    assert score[those.child] == 1000 > score[those.parent.pid]


# --- Children of this process -----------------------------------------------------------------------------------------


def hang(job: BuildJob, connection: Any) -> None:
    """A child's life that tells of one phase and says nothing more."""
    bond.bind()
    connection.send(("phase", "train"))
    time.sleep(1000)


def spin(job: BuildJob, connection: Any) -> None:
    bond.bind()
    connection.send(("phase", "train"))
    while True:
        pass


def close_the_pipe(job: BuildJob, connection: Any) -> None:
    bond.bind()
    connection.close()
    time.sleep(1000)


def abort() -> None:
    """As C does it, without the tests' own word on it."""
    faulthandler.disable()
    os.abort()


def abort_for_memory(job: BuildJob, connection: Any) -> None:
    bond.bind()
    child._redirect_output(Path(job.log))
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    abort()


def leave_a_helper(job: BuildJob, connection: Any) -> None:
    bond.bind()
    connection.send(("columns", {"pid": subprocess.Popen(SLEEPER).pid}))


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts a child whose life is the given function; it is gone after the test."""
    started: list[Child] = []

    def begin(life: Callable[[Any, Any], None], limit: float = 1000.0) -> Child:
        monkeypatch.setattr(child, "perform", life)
        job = BuildJob("", (), 0, 0, str(tmp_path / "log"), limit)
        started.append(Child(multiprocessing.get_context("fork"), job))
        return started[-1]

    yield begin
    for each in started:
        each._at_exit()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "QUIET_SECONDS", 0.4)
    monkeypatch.setattr(pulse, "BUSY_SECONDS", 1000.0)


@pytest.mark.usefixtures("hasty")
def test_a_child_that_hangs_is_told_and_ended(begin: Callable[..., Child]) -> None:
    status, phase, reason = child.attend(begin(hang), lambda: False)
    assert (status, phase) == ("timeout", "train")
    assert reason is not None
    assert reason.startswith("no sign of life for ")
    assert reason.endswith(" s in phase train")


@pytest.mark.usefixtures("hasty")
def test_a_child_that_is_stopped_is_told_and_ended(begin: Callable[..., Child]) -> None:
    stopped = begin(spin)
    pid = stopped.process.pid
    os.kill(pid, signal.SIGSTOP)
    assert child.attend(stopped, lambda: False)[0] == "timeout"
    assert is_gone(pid)


@pytest.mark.usefixtures("hasty")
def test_a_child_that_is_merely_slow_is_let_be(begin: Callable[..., Child]) -> None:
    busy = begin(spin)
    deadline = time.monotonic() + 3
    child.attend(busy, lambda: time.monotonic() > deadline)
    assert busy.outcome == ("timeout", "train", "stopped before it was done")


def test_a_child_that_is_busy_for_too_long_is_ended(
    begin: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "BUSY_SECONDS", 0.5)
    status, _, reason = child.attend(begin(spin), lambda: False)
    assert status == "timeout"
    assert reason is not None
    assert "no sign of life" in reason


@pytest.mark.usefixtures("hasty")
def test_a_pipe_that_is_closed_keeps_nobody_busy(begin: Callable[..., Child]) -> None:
    mute = begin(close_the_pipe)
    wait_for(lambda: list(mute.listen()) or mute._is_deaf)
    assert mute.connection not in mute.waitables()
    assert child.attend(mute, lambda: False)[0] == "timeout"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that a test lets pass; no CPU works for anybody meanwhile unless said."""
    made = Clock()
    monkeypatch.setattr(pulse, "time", made)
    monkeypatch.setattr(pulse, "_cpu_seconds", lambda pid: 0.0)
    return made


def first_alarm(patience: pulse.Patience, clock: Clock, most: float = 10_000) -> float | None:
    """Asked every second, when it says that the silence is too long."""
    begin = clock.now
    while clock.now - begin < most:
        clock.now += 1
        if patience.silence() is not None:
            return clock.now - begin
    return None


def test_silence_is_borne_in_proportion_to_what_was_seen(clock: Clock) -> None:
    assert first_alarm(pulse.Patience(1), clock) == pulse.QUIET_SECONDS + 1
    slow = pulse.Patience(1)
    for _ in range(200):
        clock.now += 1
        assert slow.silence() is None
    slow.hear()
    assert first_alarm(slow, clock) == 200 * pulse.LONGER + 1


def test_work_of_a_cpu_is_borne_longer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_cpu_seconds", lambda pid: clock.now * 0.5)
    assert first_alarm(pulse.Patience(1), clock) == pulse.BUSY_SECONDS + 1


def test_the_work_of_helpers_counts_also_where_one_ends(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(10**6, 0, -1))
    monkeypatch.setattr(pulse, "_cpu_seconds", lambda pid: float(next(used)))
    assert first_alarm(pulse.Patience(1), clock, most=2 * pulse.QUIET_SECONDS) is None


def test_a_parent_that_was_away_itself_blames_nobody(clock: Clock) -> None:
    patience = pulse.Patience(1)
    assert patience.silence() is None
    clock.now += 100_000
    assert patience.silence() is None
    assert first_alarm(patience, clock) == pulse.QUIET_SECONDS + 1


def test_signs_of_life_are_given_once_a_second(clock: Clock) -> None:
    giver, given = pulse._Giver(), list[float]()
    giver.give = lambda: given.append(clock.now)
    for _ in range(30):
        clock.now += 0.25
        giver.beat()
    assert given == [0.25 + i for i in range(8)]


def test_what_a_child_leaves_behind_is_ended(begin: Callable[..., Child]) -> None:
    left = begin(leave_a_helper)
    child.attend(left, lambda: False)
    helper = left.columns["pid"]
    wait_for(lambda: is_gone(helper))


def test_a_child_that_cannot_be_killed_is_waited_for_no_longer(
    begin: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = begin(hang, limit=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(bond, "kill", lambda pid: None)
        patched.setattr(bond, "sweep", lambda pid: None)
        patched.setattr(child, "STOP_SECONDS", 0.1)
        status, _, reason = child.attend(stuck, lambda: False)
    assert (status, reason) == ("timeout", "still running after 0 s")
    pid = stuck.process.pid
    assert f"process {pid} cannot be ended" in caplog.text
    assert stuck.process not in multiprocessing.active_children(), "or the parent waits for it at its exit"
    bond.kill(pid)
    stuck.process.join()


def test_a_parent_that_leaves_early_takes_its_children_along(tmp_path: Path) -> None:
    text = """
    import multiprocessing, sys, time
    from ablate import bond, child
    from ablate.job import BuildJob

    def life(job, connection):
        bond.bind()
        connection.send(("phase", "there"))
        time.sleep(1000)

    child.perform = life
    running = child.Child(multiprocessing.get_context("fork"), BuildJob("", (), 0, 0, "/dev/null", 1.0))
    while running.phase != "there":
        list(running.listen())
    print(running.process.pid, flush=True)
    sys.exit(7)
    """
    command = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 7, done.stderr
    assert is_gone(int(done.stdout))


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_what_ends_for_want_of_memory_in_c_says_so(begin: Callable[..., Child], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier time\n", encoding="utf-8")
    assert child.attend(begin(abort_for_memory), lambda: False) == (
        "oom",
        "start",
        "out of memory: signal 6 (SIGABRT)",
    )


def test_what_an_earlier_attempt_said_of_memory_is_of_that_one(begin: Callable[..., Child], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("std::bad_alloc\n", encoding="utf-8")

    assert child.attend(begin(lambda *_: abort()), lambda: False)[0] == "killed"


def test_a_child_that_the_system_ended_for_memory_is_oom_in_any_group(
    begin: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("0::/a/b\n", encoding="utf-8")
    (tmp_path / "a").mkdir()
    events = tmp_path / "a/memory.events"
    events.write_text("low 0\noom 1\noom_kill 1\n", encoding="utf-8")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    victim = begin(hang)
    events.write_text("low 0\noom 2\noom_kill 2\n", encoding="utf-8")
    os.kill(victim.process.pid, signal.SIGKILL)
    assert child.attend(victim, lambda: False)[0] == "oom"


GROUPS: dict[str, tuple[str, dict[str, str], int]] = {
    "newer": ("0::/\n", {"memory.max": "1000", "memory.current": "400"}, 600),
    "nested, the outer narrower": (
        "0::/a/b\n",
        {"a/b/memory.max": "max", "a/b/memory.current": "1", "a/memory.max": "500", "a/memory.current": "100"},
        400,
    ),
    "nested, the inner narrower": (
        "0::/a/b\n",
        {"a/b/memory.max": "300", "a/b/memory.current": "100", "a/memory.max": "500", "a/memory.current": "100"},
        200,
    ),
    "slowed down before it is ended": (
        "0::/\n",
        {"memory.max": "1000", "memory.high": "800", "memory.current": "400"},
        400,
    ),
    "files that were read make room": (
        "0::/\n",
        {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 200\ninactive_file 600\nslab 1"},
        700,
    ),
    "older": (
        "4:memory:/a\n",
        {"memory/a/memory.limit_in_bytes": "1000", "memory/a/memory.usage_in_bytes": "250"},
        750,
    ),
    "older, nested": (
        "4:memory:/a/b\n",
        {
            "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
            "memory/a/b/memory.usage_in_bytes": "10",
            "memory/a/memory.limit_in_bytes": "100",
            "memory/a/memory.usage_in_bytes": "90",
            "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 20",
        },
        30,
    ),
    "over its limit": ("0::/\n", {"memory.max": "1000", "memory.current": "1400"}, 0),
}


@pytest.mark.parametrize("case", GROUPS)
def test_memory_is_what_the_narrowest_group_leaves(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, files, left = GROUPS[case]
    (tmp_path / "own").write_text(own, encoding="utf-8")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    assert machine.available_bytes() == left


@pytest.mark.parametrize("text", ["max", "", "many", "-1"])
def test_what_limits_nothing_leaves_all(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(text, encoding="utf-8")
    (tmp_path / "memory.current").write_text("5", encoding="utf-8")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    assert machine.available_bytes() > 2**20


def test_trials_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1200)
    assert machine.share("cpu", 3, 0).memory_bytes == 400
    assert machine.share("cpu", 1, 0).memory_bytes == 1200
    given = machine.share("cpu", 3, 0, 500)
    assert (given.memory_bytes, given.is_memory_given) == (500, True)
    monkeypatch.setattr(machine, "find_device", lambda wanted: "cuda")
    assert machine.share("cuda", 1, 0).memory_bytes is None
    assert machine.share("cuda", 1, 0, 500).memory_bytes == 500


TINY = """
name: tiny
baseline: {preset: llama, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 16}
variants: {wide: {d_model: 4096, max_seq_len: 16}}
data: {name: random_tokens, vocab_size: 11, train_tokens: 4000, validation_tokens: 500}
train: {steps: 2, batch_tokens: 32, threads: 1}
"""


def test_a_trial_that_needs_more_than_it_may_take_is_oom_and_the_rest_runs(tmp_path: Path) -> None:
    import ablate

    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    places = ("--results", str(tmp_path / "results"), "--reports", str(tmp_path / "reports"))
    done = CliRunner().invoke(
        main, ["run", str(tmp_path / "tiny.yaml"), "--device", "cpu", "--memory", "600M", *places]
    )
    assert done.exit_code == 1, done.output
    trials = ablate.load(tmp_path / "results/tiny").trials.set_index("variant")
    assert trials["status"].to_dict() == {"baseline": "ok", "wide": "oom"}
    assert str(trials.loc["wide", "reason"]).endswith("(a trial may take 0.59 GiB here: --memory, --workers)")


SIZES = {
    "8G": 8 * 2**30,
    "1.5GiB": 3 * 2**29,
    "500m": 500 * 2**20,
    "800000": 800000,
    "2 G": None,
    "0": None,
    "-1G": None,
}


@pytest.mark.parametrize("word", [*SIZES, "G", "lots", "1e9", "٣G"])
def test_sizes_are_read_as_people_write_them(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ablate import asked, sweep

    seen: list[int | None] = []

    def run(wanted: asked.Wanted, console: Any) -> None:
        seen.append(wanted.memory)
        raise ValueError("that is all")

    monkeypatch.setattr(sweep, "run", run)
    done = CliRunner().invoke(main, ["run", "none.yaml", "--memory", word])
    assert done.exit_code == 2
    size = SIZES.get(word)
    assert seen == ([] if size is None else [size])


def test_a_gpu_is_limited_only_where_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ablate.profiling import memory

    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (800, 1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    memory.confine(torch.device("cuda"), None)
    assert shares == []
    memory.confine(torch.device("cuda"), 250)
    assert shares == [0.25]


def test_a_job_carries_what_it_may_take() -> None:
    assert Job({}, 0, "cpu", 1, (), "").memory_bytes is None


def test_a_signal_to_the_whole_group_interrupts_and_crashes_nothing(tmp_path: Path) -> None:
    """As a scheduler, a terminal or `kill -- -PID` sends it: to the run, the server of its children, and all else."""
    import ablate
    from ablate.results import Store
    from ablate.runner import running_now

    text = TINY.replace("steps: 2", "steps: 1000000").replace("{wide: {d_model: 4096, max_seq_len: 16}}", "{}")
    (tmp_path / "tiny.yaml").write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ablate",
        "run",
        "tiny.yaml",
        "--device",
        "cpu",
        "--workers",
        "1",
        "--only",
        "train",
    ]
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **told) as run:  # type: ignore[call-overload]
        try:
            store = Store(tmp_path / "results/tiny")
            wait_for(lambda: "baseline seed 0" in running_now(store), 120)
            family = psutil.Process(run.pid).children(recursive=True)
            os.killpg(run.pid, signal.SIGTERM)
            output, _ = run.communicate(timeout=120)
        finally:
            if run.poll() is None:
                run.kill()
    assert run.returncode == 143, output
    assert list(ablate.load(tmp_path / "results/tiny").trials["status"]) == ["interrupted"]
    assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.mark.parametrize("module", [bond, child, pulse])
def test_no_limit_goes_by_a_clock_that_somebody_sets(module: Any) -> None:
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert "time.time(" not in text
    assert "datetime" not in text


def test_tries_of_a_step_take_no_more_than_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from ablate import capacity

    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    assert [capacity.available("cpu", at_most) for at_most in (None, 500, 5000)] == [900, 500, 900]
    assert [capacity.available("cuda", at_most) for at_most in (None, 500)] == [None, 500]


WARMER = """
import multiprocessing, signal, time
from ablate import child
from ablate.interruption import signals

if __name__ == "__main__":
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["slow"])
    with signals() as received:
        print("ready", flush=True)
        child.warm_up(start, lambda: bool(received))
        print(received, flush=True)
"""


def test_a_signal_does_not_wait_for_what_children_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('slow').touch()\ntime.sleep(60)\n")
    (tmp_path / "warmer.py").write_text(WARMER)
    path = os.pathsep.join([str(tmp_path), str(Path(child.__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "warmer.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE
    )
    try:
        wait_for((tmp_path / "slow").exists)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0].split() == [b"ready", b"[2]"]
        assert process.returncode == 0
    finally:
        process.kill()

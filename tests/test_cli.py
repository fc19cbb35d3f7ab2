"""The commands: what they print, where, with which exit status, and what they leave unloaded."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from conftest import Write
from stored import CURVE, PROFILE, row

from ablate import __version__, asked, catalogue, commands, options, registry, sweep
from ablate.cli import main
from ablate.machine import Resources
from ablate.results import Store

ROOT = Path(__file__).parent.parent
VERBS = sorted(main.commands)


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    """A file of the same name in another folder is another choice."""
    for remembered in (registry._config, registry._foreign, registry.announce):
        remembered.cache_clear()


def ablate(*arguments: str) -> Result:
    """In this process. Nothing but `SystemExit` may come out."""
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def told(*arguments: str, status: int = 0) -> str:
    done = ablate(*arguments)
    assert done.exit_code == status, done.output
    return done.stdout


def facts(*arguments: str) -> Any:
    return json.loads(told(*arguments, "--json"))


def refused(*arguments: str) -> list[str]:
    """The lines on standard error of an input that is wrong: nothing on standard output, no traceback."""
    done = ablate(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


# --- Documentation ----------------------------------------------------------------------------------------------------


def test_the_verbs_of_the_design_exist() -> None:
    assert {"run", "plan", "report", "list", "describe", "status", "doctor", "sync", "ui"} <= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_every_option_is_documented(verb: str) -> None:
    command = main.commands[verb]
    assert command.help
    assert command.help.splitlines()[0].endswith(".")
    shown = told(verb, "--help")
    assert command.help.split()[0] in shown
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{verb} {option.name}"
            assert option.opts[-1] in shown


def test_help_and_version_name_everything() -> None:
    shown = told("--help")
    assert all(f"  {verb}" in shown for verb in VERBS)
    assert told("--version").strip().endswith(__version__)


@pytest.mark.parametrize("verb", ["run", "plan", "status"])
def test_the_same_options_say_the_same_of_a_run(verb: str) -> None:
    assert {"--results", "--set", "--device", "--workers", "--max-trials"} <= {
        option for parameter in main.commands[verb].params for option in parameter.opts
    }


@pytest.mark.parametrize("verb", ["plan", "list", "describe", "status", "report", "doctor"])
def test_whatever_prints_facts_takes_json(verb: str) -> None:
    assert "--json" in {option for parameter in main.commands[verb].params for option in parameter.opts}


def readme_lines() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    code = [*(line.strip() for block in blocks for line in block.splitlines()), *re.findall(r"`([^`\n]+)`", text)]
    return sorted({line for line in code if line.startswith("python -m ablate ")})


@pytest.mark.parametrize("line", readme_lines())
def test_what_the_readme_says_can_be_typed(line: str) -> None:
    verb, *arguments = shlex.split(line, comments=True)[3:]
    command = main.commands[verb]
    if isinstance(command, click.Group):
        verb, *arguments = arguments
        command = command.commands[verb]
    command.make_context(verb, [*arguments], resilient_parsing=not arguments)  # raises where an option does not exist
    for word in arguments:
        if word.startswith("experiments/"):
            assert (ROOT / word).is_file(), word
        if "/" in word and word.partition("/")[0] in catalogue.SLOTS:
            assert word.partition("/")[2] in catalogue.names(word.partition("/")[0])


def test_the_readme_shows_the_main_verbs() -> None:
    assert {shlex.split(line)[3] for line in readme_lines()} >= {"run", "plan", "report", "list", "describe"}


# --- list and describe ------------------------------------------------------------------------------------------------


def test_list_names_every_choice_with_its_first_line() -> None:
    shown, found = told("list"), facts("list")
    assert list(found) == [*catalogue.SLOTS, *catalogue.SOURCES, catalogue.PRESETS]
    for slot, choices in found.items():
        assert sorted(choices) == catalogue.names(slot) != []
        for name, summary in choices.items():
            assert re.search(rf"^  {re.escape(name)} +{re.escape(summary)}$", shown, re.MULTILINE)
            assert len(summary) > 10


def test_list_of_one_slot() -> None:
    assert list(facts("list", "attention")) == ["attention"]
    assert "arXiv" in facts("list", "attention")["attention"]["gqa"]
    assert refused("list", "attentoin") == ["unknown slot 'attentoin'", "  did you mean 'attention'?"]


def test_list_of_the_presets_by_either_word() -> None:
    assert facts("list", "preset") == facts("list", "presets")


def every_choice() -> list[str]:
    return [f"{slot}/{name}" for slot in (*catalogue.SLOTS, *catalogue.SOURCES) for name in catalogue.names(slot)]


@pytest.mark.parametrize("choice", every_choice())
def test_describe_a_choice(choice: str) -> None:
    found = facts("describe", choice)
    assert f"{found['slot']}/{found['name']}" == choice
    assert found["text"].startswith(found["summary"])
    for setting, about in found["settings"].items():
        assert about["description"], f"{setting} says nothing of itself"
        assert about["type"] != "any", f"{setting} has no type"
    shown = told("describe", choice)
    assert found["summary"] in shown
    assert all(setting in shown for setting in found["settings"])


def test_describe_gqa() -> None:
    found = facts("describe", "gqa")
    assert found["settings"]["n_kv_heads"]["type"] == "integer"
    assert found["settings"]["n_kv_heads"]["bounds"] == ">= 1 <= 16777216"
    assert "2305.13245" in found["summary"]


def test_describe_a_choice_of_ones_own(write: Write) -> None:
    write()
    code = '"""Mine."""\nfrom ablate.norm import Base\nclass Config(Base):\n    width: int = 3\n'
    Path("mine.py").write_text(code, encoding="utf-8")
    found = facts("describe", "norm/./mine.py")
    assert (found["summary"], found["settings"]["width"]["default"]) == ("Mine.", 3)
    for name in ("./mine.py", "mine.py", str(Path("mine.py").resolve())):
        assert facts("describe", name) == found | {"name": name}


def test_describe_nothing() -> None:
    assert refused("describe", "")[0] == "unknown choice ''"


def test_describe_llama_7b() -> None:
    found = facts("describe", "preset/llama-7b")
    assert found["params_total"] == found["params_active"] == 6_738_415_616
    assert found["params_non_embedding"] == 6_738_415_616 - 2 * 32_000 * 4096
    assert found["kv_cache_elements_per_token"] == 2 * 32 * 4096
    assert sum(stage["times"] * stage["params"] for stage in found["stages"]) == found["params_total"]
    assert sum(stage["times"] * stage["flops"] for stage in found["stages"]) == found["flops_per_token"]
    assert "6,738,415,616" in told("describe", "preset/llama-7b")


@pytest.mark.parametrize("preset", catalogue.names(catalogue.PRESETS))
def test_every_preset_can_be_described(preset: str) -> None:
    assert facts("describe", f"preset/{preset}")["params_total"] > 0


def test_describe_a_file_and_one_of_its_variants(write: Write) -> None:
    file = str(write("variants: {größe: {n_layers: 2}}"))
    both = facts("describe", file)["variants"]
    assert [each["variant"] for each in both] == ["baseline", "größe"]
    (one,) = facts("describe", file, "--variant", "größe")["variants"]
    assert one == both[1]
    assert one["flops_at_tokens"] == 16
    assert "größe" in told("describe", file, "--variant", "größe")
    assert refused("describe", file, "--variant", "x") == ["tiny.yaml: no variant 'x'", "  known: baseline, größe"]
    assert facts("describe", file, "--set", "d_model=64")["variants"][0]["settings"]["d_model"] == 64


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        ("gqq", ["unknown choice 'gqq'", "  did you mean 'gqa'?"]),
        ("attention/gqq", ["unknown attention 'gqq'", "  did you mean 'gqa'?"]),
        ("atention/gqa", ["unknown choice 'atention/gqa'", "  did you mean 'attention/gqa'?"]),
        ("preset/llama-8b", ["unknown preset 'llama-8b'", "  did you mean 'llama-3-8b'?"]),
        (
            "missing.yaml",
            ["missing.yaml: cannot be read: No such file or directory", "  give the path of an experiment file"],
        ),
    ],
)
def test_describe_what_does_not_exist(target: str, lines: list[str]) -> None:
    assert refused("describe", target) == lines


# --- doctor -----------------------------------------------------------------------------------------------------------

TELLTALE = """
from ablate.attention import mha
from ablate.attention._grouped import GroupedQueryAttention

class Module(GroupedQueryAttention):
    def forward(self, x, *given):
        print("a word")
        return super().forward(x + x.mean(1, keepdim=True), *given)

class Config(mha.Config):
    def build(self, shape):
        return Module(shape.d_model, shape.n_heads, shape.n_heads, self.head_dim)
"""


def test_doctor_leads_every_variant_through_its_gates(write: Write) -> None:
    file = write("variants: {gqa: {attention: gqa}}")
    found = facts("doctor", "--gates", str(file))
    assert (found["name"], found["invalid"]) == ("tiny", [])
    assert [(each["variant"], each["passed"]) for each in found["variants"]] == [("baseline", True), ("gqa", True)]
    said = {gate["gate"]: (gate["result"], gate["detail"]) for gate in found["variants"][1]["gates"]}
    assert said["builds"] == ("passed", "decoder layers 1, d_model 32, n_heads 4")
    assert said["tied"] == ("not applicable", "the head has weights of its own")
    assert said["gqa: with one key/value head it is mqa"][0] == "passed"
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"], "nothing is left behind"


def test_doctor_says_what_is_wrong_with_a_choice_of_ones_own(write: Write) -> None:
    file = write("variants: {own: {attention: ./own.py}}\nvary: {n_heads: [4, 5]}")
    Path("own.py").write_text(TELLTALE, encoding="utf-8")
    done = ablate("doctor", "--gates", str(file))
    assert done.exit_code == 1
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["own", "causal", "failed", "later", "tokens", "account", "for"] in [row[:7] for row in rows]
    assert ["baseline", "causal", "passed"] in [row[:3] for row in rows]
    assert "invalid: n_heads=5: d_model 32 is not divisible by n_heads 5" in done.stdout
    assert done.stdout.splitlines()[-1] == "tiny: 1 of 2 variants passed"
    assert "a word" not in done.output


def test_doctor_of_what_is_no_experiment(write: Write) -> None:
    assert refused("doctor", "--gates", "missing.yaml")[0].startswith("missing.yaml: cannot be read: ")
    assert refused("doctor", "--gates", str(write("baseline: {n_layer: 2}")))[1] == "  did you mean 'n_layers'?"


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["run", "plan", "status", "report", "sync", "describe"])
def test_what_is_no_file_is_told_in_two_lines(verb: str, write: Write) -> None:
    write()
    assert refused(verb, "missing.yaml")[0] == "missing.yaml: cannot be read: No such file or directory"
    Path("empty.yaml").write_text("# nothing\n", encoding="utf-8")
    assert refused(verb, "empty.yaml")[0] == "empty.yaml is empty"
    Path("latin.yaml").write_bytes(b"name: \xfc")
    assert refused(verb, "latin.yaml")[0] == "latin.yaml: not UTF-8 text (byte 6)"
    Path("wrong.yaml").write_text("name: [", encoding="utf-8")
    assert refused(verb, "wrong.yaml")[0].startswith("wrong.yaml:1:8: not YAML")
    Path("name.yaml").write_text("name: ../x\ntrain: {steps: 1}\n", encoding="utf-8")
    lines = refused(verb, "name.yaml")
    assert lines[0] == "name.yaml:1:1: '../x' cannot be the name of an experiment"
    assert len(lines) == 2
    assert not Path("results").exists()


@pytest.mark.parametrize("verb", ["run", "plan", "status"])
def test_a_folder_is_no_experiment(verb: str, write: Write) -> None:
    write()
    assert refused(verb, ".") == [".: cannot be read: Is a directory", "  give the path of an experiment file"]


@pytest.mark.parametrize("verb", ["run", "plan", "status", "describe"])
def test_a_fault_of_the_file_is_told_where_it_stands(verb: str, write: Write) -> None:
    file = str(write("baseline: {n_layer: 2}"))
    assert refused(verb, file) == ["tiny.yaml:4:12: unknown setting 'n_layer'", "  did you mean 'n_layers'?"]
    assert refused(verb, file, "--set", "x")[0] == "--set x: not of the form key=value"
    assert sorted(path.name for path in Path().iterdir()) == ["tiny.yaml"], "nothing is left behind"


def test_debug_shows_the_traceback(write: Write) -> None:
    done = ablate("plan", str(write("baseline: {n_layer: 2}")), "--debug")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith("did you mean 'n_layers'?")


def test_a_fault_of_ablate_is_told_as_such(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(wanted: asked.Wanted) -> dict[str, Any]:
        raise KeyError("some\nthing")

    monkeypatch.setattr(commands, "plan_facts", fail)
    lines = refused("plan", str(write()))
    assert len(lines) == 2
    assert lines[0].startswith("KeyError: ")
    assert "--debug" in lines[1]


def test_an_interrupt_ends_with_130(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(wanted: asked.Wanted) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "plan_facts", stop)
    assert ablate("plan", str(write())).exit_code == 130


def test_results_that_are_not_there(write: Write) -> None:
    file = str(write())
    Path("folder").mkdir()
    cure = "  run the experiment first, or give its folder of results"
    for verb in ("report", "sync"):
        assert refused(verb, file) == [f"no results in {Path('results/tiny')}", cure]
        assert refused(verb, "folder") == ["no results in folder", cure]
    assert not Path("reports").exists()
    assert "1 trials: none stored; 1 left" in told("status", file)
    assert facts("status", file)["left"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "x.yaml", "--frob"],
        ["frob"],
        ["plan", "x.yaml", "--max-trials", "0"],
        ["run", "x", "--workers", "0"],
    ],
)
def test_wrong_usage_is_told(arguments: list[str]) -> None:
    assert "Error: " in refused(*arguments)[-1]


def test_a_device_that_is_not_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused("plan", str(write()), "--device", "cuda") == [
        "no CUDA device is available here",
        "  leave --device out, or give --device cpu",
    ]


def test_the_command_that_runs_it_again(write: Write) -> None:
    wanted = asked.Wanted("my file.yaml", sets=("train.lr=1", "question=why not?"))
    assert wanted.command() == "python -m ablate run 'my file.yaml' --set train.lr=1 --set 'question=why not?'"


# --- The system -------------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(wanted: asked.Wanted) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(commands, "plan_facts", fail)


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (OSError(28, "No space left on device"), ["No space left on device", "  free some space and run again"]),
        (PermissionError(13, "Permission denied", "x"), ["x: Permission denied", "  see to it that this can be "]),
        (SystemExit(0), ["SystemExit: 0", "  code that the experiment names ended the program"]),
    ],
)
def test_a_fault_of_the_system_is_told_with_its_cure(
    error: BaseException, lines: list[str], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, error)
    said = refused("plan", str(write()))
    assert len(said) == 2
    assert all(found.startswith(line) for found, line in zip(said, lines, strict=True))


def test_a_reader_that_goes_away_ends_it_quietly(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, BrokenPipeError(32, "Broken pipe"))
    done = ablate("plan", str(write()))
    assert (done.exit_code, done.output) == (1, "")


def test_what_a_choice_prints_stays_out_of_the_document(write: Write) -> None:
    file = write("variants: {x: {norm: ./own.py}}")
    code = "from ablate.norm import rms_norm\nclass Config(rms_norm.Config):\n    def build(self, d_model):\n"
    Path("own.py").write_text(f"print(1)\n{code}        print(2)\n        return super().build(d_model)\n", "utf-8")
    assert len(facts("plan", str(file))["variants"]) == 2


@pytest.mark.parametrize("option", ["--results", "--reports"])
def test_a_folder_that_cannot_be_written_is_told_before_training(
    option: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ablate.runner.Run.carry_out", lambda *_: pytest.fail("nothing may run"))
    Path("taken").write_text("", encoding="utf-8")
    lines = refused("run", str(write()), option, "taken")
    assert lines[0].startswith(f"{Path('taken/tiny')}: no folder that can be written: ")
    assert lines[1:] == [f"  give another {option}"]


@pytest.mark.parametrize("verb", ["run", "plan", "status", "report", "sync"])
@pytest.mark.parametrize("name", ["mlflow.db", "MLflow.db-wal", "mlartifacts", "x.db", "x.lock"])
def test_a_name_that_something_else_has_in_results_is_refused(verb: str, name: str, write: Write) -> None:
    assert refused(verb, str(write(f"name: {name}"))) == [
        f"tiny.yaml:4:1: '{name}' is kept for what stands beside it in results",
        "  choose another name",
    ]


def test_what_is_stored_but_not_ok_is_told(write: Write) -> None:
    experiment = asked.read(asked.Wanted(str(write())))
    said = [sweep._opening(experiment, 0, Counter(statuses), 0) for statuses in ({"ok": 1}, {"crashed": 1})]
    assert said == [
        "tiny: 1 variant x 1 seed = 1 trial, all of them stored: nothing to train",
        "tiny: 1 variant x 1 seed = 1 trial, all of them stored: nothing to train"
        " (1 crashed; --retry-failed runs it again)",
    ]


def test_what_is_left_of_a_part_is_not_told_to_be_asked_for_as_it_was(write: Write) -> None:
    experiment = asked.read(asked.Wanted(str(write())))
    said = sweep._opening(experiment, 0, Counter({"timeout": 1}), 0, only="train")
    assert said.endswith("nothing to train (1 timeout; the rest than --only train is left of it)")


def test_trials_of_another_number_of_threads_are_told(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ablate.machine.available_threads", lambda: 2)
    experiment, store = asked.read(asked.Wanted(str(write("seeds: 2")))), Store(tmp_path / "r", create=True)
    alone, aside = Resources("cpu", 1, 2), Resources("cpu", 2, 1)
    assert asked.of_other_threads(experiment, store, aside) is None
    store.write_trial(row(experiment.trials("cpu", 2)[0].trial_id), CURVE, PROFILE)
    assert asked.of_other_threads(experiment, store, alone) is None
    assert asked.of_other_threads(experiment, store, aside) == (
        "1 trial with 2 threads each stored, none with 1 thread as now: "
        "another --workers, or --set train.threads=2, goes on with them"
    )


@pytest.mark.parametrize("at_once", [True, False])
def test_a_sync_that_fails_names_the_command_that_is_to_be_given_again(
    at_once: bool, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ablate.tracking import SYNC, SyncResult, Tracker, TrackingError

    class Failing:
        def sync(self, _: Path) -> SyncResult:
            return SyncResult(failed=f"the server is gone.\n  Later: {SYNC}")

    def connect(*_: Any) -> Failing:
        if at_once:
            raise TrackingError("the server is gone.", f"Later: {SYNC}")
        return Failing()

    file = str(write())
    Store(Path("elsewhere/tiny"), create=True).write_experiment({"name": "tiny", "variants": []})
    monkeypatch.setattr(Tracker, "connect", connect)
    done = ablate("sync", file, "--results", "elsewhere")
    assert done.exit_code == (2 if at_once else 1)
    command = f"python -m ablate sync {file} --results elsewhere"
    assert done.stderr == f"the server is gone.\n  Later: {command}\n"


# --- Where packages are missing ---------------------------------------------------------------------------------------


def test_everything_but_ui_and_sync_works_without_mlflow_and_matplotlib(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    file = str(write())
    assert "1 ok" in told("run", file, "--device", "cpu")
    assert "plots are left out" in Path("reports/tiny/report.md").read_text(encoding="utf-8")
    for verb in ("report", "status", "plan", "describe"):
        assert told(verb, file)
    assert "pip install mlflow" in "".join(refused("sync", file))
    assert refused("ui")


# --- In a process of its own ------------------------------------------------------------------------------------------

HEAVY = {"torch", "mlflow", "pandas", "pydantic", "matplotlib", "scipy", "numpy", "rich"}


def loaded(*arguments: str) -> set[str]:
    """The heavy packages that a command imports."""
    code = f"""
import sys
from ablate.cli import main
try:
    main({list(arguments)!r})
finally:
    print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list"], ["list", "attention", "--json"]])
def test_help_and_list_load_nothing_heavy(arguments: list[str]) -> None:
    assert loaded(*arguments) == set()


def test_report_loads_neither_torch_nor_mlflow(write: Write) -> None:
    write()
    store = Store(Path("results/tiny"), create=True)
    store.write_experiment({"schema": 1, "name": "tiny", "seeds": [0], "counts": {}, "variants": [], "invalid": []})
    assert not loaded("report", "tiny.yaml") & {"torch", "mlflow"}
    assert Path("reports/tiny/report.md").is_file()


def test_a_locale_without_letters_is_no_obstacle(write: Write) -> None:
    file = write("question: größer ↓?\nvariants: {größe: {n_layers: 2}}").rename("größe.yaml")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    for arguments, word in ((["plan", str(file)], "größe"), (["list", "--json"], "arXiv")):
        command = [sys.executable, "-m", "ablate", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert done.stderr == b""
        assert word in done.stdout.decode("utf-8")


def test_all_that_is_written_is_utf8_in_such_a_locale_too() -> None:
    word = "größe ↓ " + chr(0xDCC3)
    code = f"import sys; from ablate.terminal import write_utf8; write_utf8(); sys.stdout.write({word!a})"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout.decode("utf-8") == "größe ↓ \\udcc3"
    assert options.as_word("größe".encode().decode("ascii", "surrogateescape")) == "größe"


def test_python_m_ablate_without_a_verb_shows_the_help() -> None:
    done = subprocess.run([sys.executable, "-m", "ablate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Usage: python -m ablate" in done.stderr
    assert "Traceback" not in done.stderr

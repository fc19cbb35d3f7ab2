"""SECURITY.md by its sentences: nothing runs that was not named, nothing leaves its folder, nothing secret stays."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from markdown_it import MarkdownIt

import ablate
from ablate import checkpoint_file, child, cli, inside, lease, machine, plug_in, registry, terminal
from ablate.cli import main
from ablate.document import FileFaults, parse
from ablate.report.text import escape
from ablate.results import Store
from ablate.verify import verify

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("ablate/**/*.py"), *ROOT.glob("tools/**/*.py"), ROOT / "noxfile.py"])

TINY = """
name: tiny
baseline: {preset: llama, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 16}
data: {name: random_tokens, vocab_size: 11, train_tokens: 4000, validation_tokens: 500}
train: {steps: 2, batch_tokens: 32, threads: 1}
"""


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


# --- What the code never does -----------------------------------------------------------------------------------------

FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code", "pty"}
FORBIDDEN_CALLS = {"os.system", "os.popen", "torch.load", "torch.save", "pd.read_pickle", "pandas.read_pickle"}
FORBIDDEN_CALLS |= {"np.load", "numpy.load", "torch.hub.load", "subprocess.getoutput", "subprocess.getstatusoutput"}
FORBIDDEN_WORDS = {"shell", "trust_remote_code", "allow_pickle"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{each.name}" for each in node.names}
            yield from names & FORBIDDEN_CALLS
            if node.module.split(".")[0] in FORBIDDEN_MODULES:
                yield node.module
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_NAMES | FORBIDDEN_CALLS or called.startswith("builtins."):
                yield called
            for word in node.keywords:
                if word.arg in FORBIDDEN_WORDS and not (isinstance(word.value, ast.Constant) and not word.value.value):
                    yield f"{called}({word.arg}=...)"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_evaluated_unpickled_or_given_to_a_shell(file: Path) -> None:
    assert list(offences(ast.parse(file.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)",
        "exec(x)",
        "compile(x, '', 'exec')",
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(x)",
        "torch.load(x, weights_only=True)",
        "subprocess.run(x, shell=True)",
        "np.load(x, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "import yaml",
        "os.system(x)",
        "builtins.eval(x)",
    ],
)
def test_the_check_sees_what_it_looks_for(line: str) -> None:
    assert list(offences(ast.parse(line)))


TALKERS = {"socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "asyncio"}


def imported(file: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found |= set(names)
    return {name for name in found if name.split(".")[0] in TALKERS and name != "urllib.parse"}


def test_only_the_ui_opens_a_connection_and_only_on_this_machine() -> None:
    users = {file.name for file in ROOT.glob("ablate/**/*.py") if imported(file)}
    assert users == {"mlflow_ui.py"}
    texts = [file.read_text(encoding="utf-8") for file in ROOT.glob("ablate/**/*.py")]
    assert not [text for text in texts if "0.0.0.0" in text]
    from ablate import mlflow_ui

    assert mlflow_ui.HOST == "127.0.0.1"


def test_only_the_registry_imports_what_a_file_names() -> None:
    loaders = {"exec_module", "spec_from_file_location", "run_path", "run_module", "SourceFileLoader"}
    users = {
        file.name
        for file in ROOT.glob("ablate/**/*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in loaders
    }
    assert users == {"registry.py"}


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['true']",
        "a: !!python/name:os.system",
        "a: !evil {}",
        "a: !!binary aGk=",
        "a: &a [*a]",
        "a: " + "[" * 200 + "]" * 200,
    ],
)
def test_yaml_makes_plain_values_only(text: str) -> None:
    with pytest.raises(FileFaults):
        parse(text, "x.yaml")


def test_yaml_that_grows_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(FileFaults, match="too much"):
        parse("\n".join(lines), "x.yaml")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickled_checkpoints_are_refused(file: str, tmp_path: Path) -> None:
    from ablate.choice import Faults
    from ablate.hf._files import Checkpoint

    (tmp_path / file).write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")
    with pytest.raises(Faults):
        Checkpoint(tmp_path)
    assert not Path("harmed").exists()


# --- Plug-ins ---------------------------------------------------------------------------------------------------------

MARKING = "from pathlib import Path\nwith Path({log!r}).open('a') as file:\n    file.write({name!r} + '\\n')\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package, and a file, which note that they were run; `ran` holds what was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {
        "planted_lab/__init__.py": "lab",
        "planted_lab/inner/__init__.py": "inner",
        "planted_lab/inner/own.py": "own",
    }
    for place, name in {**names, "alone.py": "alone"}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(MARKING.format(log=str(tmp_path / "ran"), name=name), encoding="utf-8")
    yield tmp_path
    for name in [each for each in sys.modules if each.startswith("planted_lab")]:
        del sys.modules[name]
    registry._foreign.cache_clear()
    registry.announce.cache_clear()
    registry._config.cache_clear()


PLANTED = ["planted_lab/__init__.py", "planted_lab/inner/__init__.py", "planted_lab/inner/own.py"]


def test_the_files_of_a_plug_in_are_found_without_running_one(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(lab))
    assert plug_in.files_of("planted_lab.inner.own") == PLANTED
    assert plug_in.files_of("./alone.py") == ["alone.py"]
    assert plug_in.files_of("alone.py") == ["alone.py"]
    nowhere = (
        "planted_lab.gone",
        "planted_lab.inner.own.deeper",
        "gone.gone",
        "./gone.py",
        "..",
        ".",
        "a..b",
        "planted_lab.",
    )
    for name in nowhere:
        assert plug_in.files_of(name) == []
    assert plug_in.files_of("os.path")
    assert not (lab / "ran").exists()
    assert not [name for name in sys.modules if name.startswith("planted_lab")]


@pytest.mark.parametrize(("name", "files"), [("planted_lab.inner.own", PLANTED), ("./alone.py", ["alone.py"])])
@pytest.mark.parametrize("verb", ["plan", "run", "status", "describe"])
def test_a_plug_in_is_announced_before_it_runs(lab: Path, verb: str, name: str, files: list[str]) -> None:
    said: list[tuple[str, bool]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((record.getMessage(), (lab / "ran").exists()))

    listener = Listener()
    logging.getLogger("ablate.registry").addHandler(listener)
    try:
        (lab / "tiny.yaml").write_text(TINY + f"vary: {{attention: [gqa, {name}]}}", encoding="utf-8")
        assert invoke(verb, "tiny.yaml").exit_code == 2, "there is no Config in it"
    finally:
        logging.getLogger("ablate.registry").removeHandler(listener)
    assert said[0] == (f"imports your own code: {name} ({', '.join(files)})", False)
    assert (lab / "ran").exists()
    assert not (lab / "results").exists()


def test_the_announcement_is_on_standard_error_and_in_json(tmp_path: Path) -> None:
    own = "from ablate.position.none import Config as Nothing\n\n\nclass Config(Nothing):\n    name: str\n"
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(TINY + "variants: {x: {position: ./own.py}}", encoding="utf-8")
    command = [sys.executable, "-m", "ablate", "plan", "tiny.yaml", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr.splitlines()[0] == "imports your own code: ./own.py (own.py)"
    facts = json.loads(done.stdout)
    assert (facts["plug_ins"], facts["plug_in_files"]) == (["./own.py"], {"./own.py": ["own.py"]})


def test_what_no_file_names_is_not_run(lab: Path) -> None:
    (lab / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (lab / "sitecustomize.py").write_text((lab / "alone.py").read_text("utf-8"), encoding="utf-8")
    assert invoke("plan", "tiny.yaml").exit_code == 0
    for word in ("antigravity", "this", "alone", "planted_lab"):
        assert invoke("plan", "tiny.yaml", "--set", f"attention={word}").exit_code == 2, "a plain word is a built-in"
    assert not (lab / "ran").exists()


# --- Folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "../x", "a\\b", "x\n", "-\u202e", "~"])
def test_a_name_cannot_leave_the_results(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(TINY.replace("name: tiny", f"name: {json.dumps(name)}"), encoding="utf-8")
    done = invoke(
        "run", str(tmp_path / "x.yaml"), "--results", str(tmp_path / "in"), "--reports", str(tmp_path / "out")
    )
    assert done.exit_code == 2
    assert [each.name for each in tmp_path.iterdir()] == ["x.yaml"]


@pytest.mark.parametrize(
    "link", ["results/tiny", "results/tiny/trials", "results/tiny/logs", "reports/tiny", "reports/tiny/plots"]
)
def test_a_link_out_of_the_folder_is_refused_before_anything_is_written(link: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / link).parent.mkdir(parents=True)
    (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    places = ("--results", str(tmp_path / "results"), "--reports", str(tmp_path / "reports"))
    done = invoke("run", str(tmp_path / "tiny.yaml"), "--device", "cpu", *places)
    assert done.exit_code == 2
    fault, cure = done.output.splitlines()[-2:]
    assert "leads out of" in fault
    assert cure.startswith("  ")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert list((tmp_path / "reports").rglob("*.md")) == []


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "big")
    assert inside.folder_of(tmp_path / "results", "tiny", "trials") == tmp_path / "results/tiny"


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept", encoding="utf-8")
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    _redirect(tmp_path / "log")
    assert (tmp_path / "precious").read_text("utf-8") == "kept"


def _answered(ask: Callable[[], object]) -> list[object]:
    """What `ask` gave, within seconds; nothing where it waits on."""
    given: list[object] = []
    asking = threading.Thread(target=lambda: given.append(ask()), daemon=True)
    asking.start()
    asking.join(10)
    return given


def test_nobody_waits_for_a_pipe_among_results(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_experiment({"variants": []})
    for name in ("running.json", "lease", "1-1.safetensors", "log"):
        os.mkfifo(tmp_path / name)
    (facts,) = _answered(lambda: verify(store))
    assert "running.json" in {each["file"] for each in facts["faults"]}  # type: ignore[index]
    (found,) = _answered(lambda: lease._look(tmp_path / "lease"))
    assert found.holder is None  # type: ignore[attr-defined]
    assert _answered(lambda: _error_of(lambda: checkpoint_file.plain_data(tmp_path / "1-1.safetensors"))) == [
        "not a file"
    ]
    assert _answered(lambda: _error_of(lambda: child._opened(tmp_path / "log"))) == ["not a file"]


def test_output_of_a_trial_does_not_wait_for_a_pipe_in_the_place_of_its_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    _redirect(tmp_path / "log")


def _redirect(log: Path) -> None:
    """In a process of its own: the output of the one that does it is gone."""
    code = "import sys, pathlib; from ablate import child; child._redirect_output(pathlib.Path(sys.argv[1])); print(1)"
    subprocess.run([sys.executable, "-c", code, str(log)], check=True, timeout=60)


def _error_of(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except OSError as error:
        return error.strerror


def test_a_file_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept", encoding="utf-8")
    (tmp_path / "experiment.json").symlink_to(tmp_path / "precious")
    Store(tmp_path).write_experiment({"variants": []})
    assert (tmp_path / "precious").read_text("utf-8") == "kept"
    assert not (tmp_path / "experiment.json").is_symlink()


@pytest.mark.parametrize(
    "log", ["/etc/passwd", "../secret", "logs/link", "logs/../../secret", "logs", "", None, "a\0b", 3]
)
def test_a_row_of_somebody_else_passes_no_file_on(log: object, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    (folder / "logs").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (folder / "logs/link").symlink_to(tmp_path / "secret")
    (folder / "logs/own.log").write_text("said", encoding="utf-8")
    assert inside.file_of(folder, log) is None
    assert inside.file_of(folder, "logs/own.log") == folder / "logs/own.log"


# --- What is printed --------------------------------------------------------------------------------------------------

HOSTILE = [
    "[x](javascript:alert(1))",
    "![x](http://evil.example/p.png)",
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "<http://evil.example>",
    "http://evil.example/x",
    "see https://evil.example",
    "www.evil.example",
    "a|b`c`*d*_e_~f~",
    "a\n\n# b\n\n<b>",
    "&lt;b&gt; &#60;b&#62;",
    "[x]: http://evil.example",
    "$x$",
    "\x1b[31mred\x07\x9b2J",
    "\u202egnp.exe",
    "</text><script>alert(1)</script>",
    "--><b>",
    "]]>",
]


def markdown_of(text: str) -> str:
    parser = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    return str(parser.render(text))


# GitHub's own links of bare addresses, by the rule in its specification.
BARE_LINK = re.compile(r"(?i)(https?|ftp)://|(?<![\w])www\.")


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_report_prints_is_text(text: str) -> None:
    shown = escape(text)
    for page in (
        shown,
        f"| a |\n|---|\n| {shown} |",
        f"- {shown}",
        f"**{shown}**",
        f"## {shown}",
        f"![{shown}](plots/1.svg)",
    ):
        html = markdown_of(page)
        html = html.replace("plots/1.svg", "")
        assert not re.search(r"<(a|script|b|h1|code|em|del)\b", html), html
        assert len(re.findall("<img", html)) == page.count("plots/1.svg")
        assert not BARE_LINK.search(page)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)


def test_a_report_of_hostile_results_has_no_markup_of_theirs(tmp_path: Path) -> None:
    from test_report import entry, results, text_of, trial

    names = ["baseline", *HOSTILE]
    rows = [trial(name, 0, 2.5 + i / 10, reason=name, log=name) for i, name in enumerate(names)]
    rows += [trial(text, 1, None, status="crashed", reason=text, phase=text, device=text, log=text) for text in HOSTILE]
    point = {"split": "val", "metric": "loss"}
    curves = [
        {"trial_id": f"{name}-0", "step": step, "tokens": 32 * step, "value": 3 - step / 10, **point}
        for name in names
        for step in (1, 2)
    ]
    text = text_of(results(rows, [entry(name, range(2)) for name in names], curves=curves), tmp_path)
    outside = re.sub(r"```sh\n.*?\n *```", "", text, flags=re.DOTALL)
    foreign = r"<script\b|<a (?!href=\"report\.(html|json)\")|<img (?!src=\"plots/)"
    assert not re.search(foreign, markdown_of(outside))
    assert not BARE_LINK.search(outside)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    plots = list((tmp_path / "plots").glob("*.svg"))
    assert plots
    for svg in plots:
        tags = {each.tag.rpartition("}")[2] for each in ET.fromstring(svg.read_bytes()).iter()}
        assert not tags & {"script", "a", "foreignObject", "image"}


@pytest.mark.parametrize("text", HOSTILE)
def test_text_cannot_control_a_terminal(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.echo(text)
    terminal.echo(text, err=True)
    terminal.print_json({"x": text})
    out, err = capsys.readouterr()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out + err)
    assert terminal.visible(text) in err
    assert json.loads(out[out.index("{\n") :]) == {"x": text}


def test_letters_of_all_scripts_are_left_alone() -> None:
    text = "größe 日本語 العربية ±↓ a\u00a0b 全\u3000角\n\tend"
    assert terminal.visible(text) == text
    assert terminal.visible("\U000e0001\u2028") == r"\U000e0001\u2028"


def test_all_that_the_command_line_prints_goes_through_one_door() -> None:
    of_a_child = ("resume.py", "energy.py")  # what they print goes to the trial's log
    doors = [
        function.name
        for file in Path(cli.__file__).parent.rglob("*.py")
        if file.name not in of_a_child
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "click.secho", "print")
    ]
    assert sorted(doors) == ["echo", "print_json"]


def test_stored_words_of_others_cannot_control_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ablate import commands

    failed = {"variant": "a\x1b[2J", "seed": 0, "status": "crashed", "reason": "b\x9b31m", "log": "logs/\x07"}
    facts = {
        "name": "tiny",
        "planned": 1,
        "outcomes": {},
        "running": ["c\x1b]0;title\x07"],
        "only_profiled": 0,
        "left": 0,
        "damaged": 0,
    }
    monkeypatch.setattr(commands, "status", lambda wanted: {**facts, "rounds_left": 0, "failed": [failed]})
    for flags in ((), ("--json",)):
        output = invoke("status", "tiny.yaml", *flags).output
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", output)
        assert "tiny" in output


# --- Secrets ----------------------------------------------------------------------------------------------------------

SECRETS = {
    "PLANTED_TOKEN": "s3cr3t-of-the-environment",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-the-cloud",
    "USER": "planted-user-name",
    "LOGNAME": "planted-user-name",
    "HOSTNAME": "planted-host-name",
}
REMOTE = "https://someone:s3cr3t-of-the-remote@git.example/x.git"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in a folder whose path tells who works here; its remote has a token."""
    folder = tmp_path / "home-of-planted-person/work"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for words in (["init", "-q"], ["remote", "add", "origin", REMOTE]):
        if subprocess.run(["git", *words], check=False, capture_output=True).returncode:
            pytest.skip("there is no git here")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "planted-host-name")
    monkeypatch.setattr("platform.node", lambda: "planted-host-name")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_nothing_of_the_environment_is_stored(repository: Path) -> None:
    """In Parquet, JSON, logs, the report, its plots, and MLflow's database and artifacts."""
    (repository / "tiny.yaml").write_text(TINY + "variants: {bad: {attention: ./bad.py}}", encoding="utf-8")
    bad = "from ablate.attention.gqa import Config as Base\n\n\nclass Config(Base):\n    name: str\n"
    (repository / "bad.py").write_text(bad, encoding="utf-8")
    done = invoke("run", str(repository / "tiny.yaml"), "--device", "cpu", "--workers", "1")
    assert done.exit_code in (0, 1), done.output
    assert set(ablate.load("results/tiny").trials["variant"]) == {"baseline", "bad"}
    files = [each for root in ("results", "reports") for each in Path(root).rglob("*") if each.is_file()]
    kinds = {each.suffix for each in files}
    assert {".parquet", ".json", ".log", ".md"} <= kinds
    words = [*SECRETS.values(), "s3cr3t-of-the-remote", "git.example"]
    planted = {file: [word for word in words if word.encode() in file.read_bytes()] for file in files}
    assert {file: found for file, found in planted.items() if found} == {}
    document = json.loads(Path("results/tiny/experiment.json").read_text("utf-8"))
    assert document["command"] == "python -m ablate run tiny.yaml"
    records = [
        each for each in files if each.suffix in (".parquet", ".json", ".md", ".svg") and each.name != "mlflow.json"
    ]
    assert [each for each in records if b"planted-person" in each.read_bytes()] == []


def test_a_file_elsewhere_is_told_without_its_place(tmp_path: Path) -> None:
    from ablate.commands import Wanted

    assert Wanted(str(tmp_path / "who/x.yaml")).command() == "python -m ablate run x.yaml"
    assert Wanted("experiments/x.yaml").command() == "python -m ablate run experiments/x.yaml"


def test_git_runs_no_program_that_a_repository_names(repository: Path) -> None:
    (repository / "monitor.sh").write_text(f"#!/bin/sh\ntouch {repository}/harmed\n", encoding="utf-8")
    (repository / "monitor.sh").chmod(0o755)
    subprocess.run(["git", "config", "core.fsmonitor", f"{repository}/monitor.sh"], check=True)
    machine.git_state()
    assert not (repository / "harmed").exists()


# --- SECURITY.md ------------------------------------------------------------------------------------------------------


def test_the_document_names_what_there_is() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for name in re.findall(r"tests/\w+\.py", text):
        assert (ROOT / name).is_file()
    for command in re.findall(r"`(plan|run|status|describe|doctor)`", text):
        assert command in main.commands
    for link in re.findall(r"\]\(([\w/.-]+)\)", text):
        assert (ROOT / link).is_file()

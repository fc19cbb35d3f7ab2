"""Every experiment file of the repository runs, shrunk to a few steps; so does every command of the README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ruamel import yaml

import ablate
from ablate import asked, commands
from ablate.building import model_settings
from ablate.cli import main
from ablate.experiment import Experiment

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "experiments").glob("*.yaml"))
PROFILES = [file for file in FILES if file.stem.startswith("profile-")]
SHRUNK = {
    "baseline.d_model": "32",
    "baseline.n_layers": "1",
    "baseline.max_seq_len": "32",
    "train.steps": "2",
    "train.seq_len": "16",
    "train.batch_tokens": "64",
    "train.warmup_steps": "1",
    "train.eval_every": "1",
    "train.eval_tokens": "64",
    "train.threads": "1",
    "seeds": "1",
    "profile": "{prefill: {tokens: [8]}, decode: {context: [8], new_tokens: 4}, rounds: 1}",
}
# Of a published shape the inner widths stay, which are what its variants share.
NARROW = {**SHRUNK, "baseline.d_model": "64", "baseline.n_heads": "8", "baseline.n_layers": "2"}
NARROW |= {"baseline.feed_forward.d_ff": "64", "baseline.vocab_size": "256", "data.vocab_size": "256"}
NARROW_SETS = [part for key, value in NARROW.items() for part in ("--set", f"{key}={value}")]
# A ladder has a half of it too.
SETS_OF = {"ladder": {**SHRUNK, "baseline.n_layers": "2"}}
SETS = [part for key, value in SHRUNK.items() for part in ("--set", f"{key}={value}")]


def ablate_command(*arguments: str) -> Result:
    """In this process, in the folder that the README speaks of."""
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", [each for each in FILES if each not in PROFILES], ids=lambda file: file.stem)
def test_every_experiment_runs(file: Path, tmp_path: Path) -> None:
    places = ("--results", str(tmp_path / "results"), "--reports", str(tmp_path / "reports"))
    shrunk = SETS_OF.get(file.stem, SHRUNK)
    sets = [part for key, value in shrunk.items() for part in ("--set", f"{key}={value}")]
    done = ablate_command("run", f"experiments/{file.name}", *sets, *places, "--device", "cpu")
    assert done.exit_code == 0, done.output
    results = ablate.load(tmp_path / "results" / file.stem)
    assert set(results.trials["status"]) == {"ok"}
    measured = results.trials["kv_cache_bytes_measured"]
    assert (measured == results.trials["kv_cache_bytes_per_token"] * (8 + 4)).all()
    assert (tmp_path / "reports" / file.stem / "report.md").is_file()


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_every_published_shape_is_profiled(file: Path, tmp_path: Path) -> None:
    places = ("--results", str(tmp_path / "results"), "--reports", str(tmp_path / "reports"))
    done = ablate_command(
        "run", f"experiments/{file.name}", *NARROW_SETS, *places, "--device", "cpu", "--only", "profile"
    )
    assert done.exit_code == 0, done.output
    trials = ablate.load(tmp_path / "results" / file.stem).trials
    assert set(trials["status"]) == {"ok"}
    assert trials["val_loss"].isna().all()
    assert trials[["kv_cache_bytes_measured", "step_seconds_p50", "peak_live_bytes"]].notna().all(axis=None)


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_every_published_shape_fits_and_is_as_published_but_for_its_depth(file: Path) -> None:
    """All of its tensors in 20 GB, as reckoned, and the widths of the preset."""
    facts = commands.plan_facts(asked.Wanted(f"experiments/{file.name}", device="cpu"))
    assert facts["question"]
    assert max(each["predicted_memory_bytes"] for each in facts["variants"]) < 20e9
    own = Experiment.from_file(file).baseline.settings.model
    preset = yaml.YAML(typ="safe").load(file)["baseline"]["preset"]
    published = model_settings({"preset": preset})
    same = ("d_model", "n_heads", "max_seq_len", "vocab_size", "attention", "position")
    assert {name: getattr(own, name) for name in same} == {name: getattr(published, name) for name in same}
    assert own.n_layers <= 2


@pytest.mark.parametrize("file", ["ladder", "fractional"])
def test_a_design_of_an_example_is_whole_as_it_stands(file: str) -> None:
    """Every size comes out whole, and no run of the fraction is missing or another's."""
    facts = commands.plan_facts(asked.Wanted(f"experiments/{file}.yaml", device="cpu"))
    assert not facts["invalid"]
    assert not facts["same"]
    cells = [cell["variant"] for cell in facts["design"]["cells"]]
    assert len(set(cells)) == len(cells) == facts["counts"]["planned"]


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.strip() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if line.startswith("python -m ablate")]


def test_the_readme_has_commands() -> None:
    assert len(readme_commands()) >= 5


def test_every_command_of_the_readme_works(tmp_path: Path) -> None:
    """In the README's order, over one folder of results, shrunk; `ui` has tests of its own."""
    for line in readme_commands():
        verb, *rest = shlex.split(line)[3:]
        if verb == "ui":
            continue
        rest = [
            word.replace("results/", f"{tmp_path}/results/").replace("rope.png", f"{tmp_path}/r.png") for word in rest
        ]
        extra = [*(NARROW_SETS if "profile-" in line else SETS)] if ".yaml" in line else []
        extra += ["--reports", str(tmp_path / "reports")] if verb in ("run", "report") else []
        extra += ["--results", str(tmp_path / "results")] if verb != "describe" else []
        done = ablate_command(verb, *rest, *extra)
        assert done.exit_code == 0, line + done.output


def test_the_readmes_experiments_are_right(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "attention.yaml"
    file.write_text(first.replace("path: my_corpus/", ""), encoding="utf-8")
    done = ablate_command("plan", str(file), "--results", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "5 planned" in done.output
    model_settings(yaml.YAML(typ="safe").load(second)["baseline"])

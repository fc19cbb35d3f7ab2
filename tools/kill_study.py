"""Is anything lost when a run is killed? `kill -9` of the whole process group at random moments of a small experiment.

Usage: python tools/kill_study.py [--kills 50] [--each 5] [--seed 0] [--out reports/kills]

An experiment is run, killed at a random moment, and run again by the same command, which is killed again, and so on;
the last one is let finish. Then its store must equal that of a run that nobody disturbed in every column except times,
speeds, memory and attempts, its curves to the last bit, and MLflow must hold each trial once, finished. Writes a report
with the machine and the commit; exit status 1 where anything is lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from compare_results import differences

import ablate
from ablate import machine

EXPERIMENT = """\
name: killed
question: Is anything lost?
baseline: {d_model: 32, n_layers: 2, n_heads: 4, max_seq_len: 64, feed_forward: {name: moe, n_experts: 4, top_k: 2}}
variants: {mla: {attention: {name: mla, kv_lora_rank: 16, qk_rope_head_dim: 4}}, dropout: {dropout: 0.1}}
seeds: 2
data: text
train: {steps: 80, batch_tokens: 512, eval_every: 20, eval_tokens: 2048, checkpoint_every: 10, threads: 1}
profile: {prefill: {tokens: [32]}, decode: {context: [32], new_tokens: 8}}
"""


@dataclass(frozen=True)
class Study:
    """Where the runs are."""

    folder: Path

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """The command, in a process group of its own."""
        places = [f"--{kind}={self.folder / name / kind}" for kind in ("results", "reports")]
        command = [sys.executable, "-m", "ablate", "run", str(self.folder / "killed.yaml"), "--device=cpu", *places]
        environment = {**os.environ, "ABLATE_CACHE": str(self.folder / "cache")}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def killed(self, name: str, seconds: float) -> str | None:
        """Run, and kill all of it after so many seconds: where it was then, None where it had ended."""
        running = self.start(name)
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return self.moment(name)
        return None

    def moment(self, name: str) -> str:
        """What a run had come to, by the last words in its log."""
        lines = (self.folder / f"{name}.log").read_text(encoding="utf-8").splitlines()
        if not lines or not lines[-1].strip():
            return "nothing"
        return "a trial's progress" if lines[-1].startswith(" ") else f"`{lines[-1].split()[0].rstrip(':')}`"

    def whole(self, name: str) -> float:
        """Run to the end. Returns its seconds; raises where it does not end well."""
        begin = time.monotonic()
        running = self.start(name)
        if status := running.wait():
            raise RuntimeError(f"{name}: exit status {status}: {(self.folder / f'{name}.log').read_text()[-2000:]}")
        return time.monotonic() - begin

    def lost(self, name: str) -> list[str]:
        """What of the experiment is not as it would be undisturbed."""
        stores = [ablate.load(self.folder / each / "results/killed") for each in ("undisturbed", name)]
        return [*differences(*stores), *stores[1].skipped, *self._mirror(name), *self._left_over(name)]

    def _mirror(self, name: str) -> list[str]:
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{self.folder / name / 'results/mlflow.db'}")
        (experiment,) = (each for each in client.search_experiments() if each.name == "killed")
        runs = client.search_runs([experiment.experiment_id], max_results=1000)
        found = Counter((run.data.tags.get("ablate.trial_id"), run.info.status) for run in runs)
        trials = ablate.load(self.folder / name / "results/killed").trials
        wanted = Counter((trial_id, "FINISHED") for trial_id in trials["trial_id"])
        return [f"MLflow: {n} x {each}" for each, n in ((found - wanted) + (wanted - found)).items()]

    def _left_over(self, name: str) -> list[str]:
        results = self.folder / name / "results"
        return [f"left over: {each.name}" for each in (results / "killed").glob("checkpoints/*")]


@dataclass
class Findings:
    """What was found so far."""

    seconds: float
    moments: list[str] = field(default_factory=list)
    lost: list[list[str]] = field(default_factory=list)

    def page(self) -> str:
        """The report."""
        software = machine.software()
        dirty = " (dirty)" if software["git_dirty"] else ""
        where = (
            f"{machine.processor()}, {os.cpu_count()} CPUs; torch {software['torch']}, Python {software['python']}; "
        )
        where += f"commit {software['git_commit']}{dirty}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        whole = sum(not each for each in self.lost)
        rows = [f"| {moment} | {n} |" for moment, n in sorted(Counter(self.moments).items())]
        found = [f"- experiment {n}: {fault}" for n, faults in enumerate(self.lost, 1) for fault in faults]
        lines = [
            "# Killed at random moments",
            f"{where}. Written by `python tools/kill_study.py`.",
            f"`kill -9` of the whole process group, {len(self.moments)} times in {len(self.lost)} experiments of "
            f"{self.seconds:.0f} s undisturbed, each time followed by the same command. **{whole} of {len(self.lost)} "
            "stores equal the undisturbed one** in every column except times, speeds, memory and attempts, and in "
            "every point of the curves; in MLflow each trial is finished exactly once, and no checkpoint is left over.",
            "\n".join(["| last word of the run when it was killed | times |", "|:---|---:|", *rows]),
            "\n".join(found) or "Nothing was lost.",
        ]
        return "\n\n".join(lines) + "\n"


def main(kills: int, each: int, seed: int, out: Path) -> int:
    """Kill and compare, write the report as it goes on, and say whether all was kept."""
    generator = random.Random(seed)
    with TemporaryDirectory() as folder:
        study = Study(Path(folder))
        (study.folder / "killed.yaml").write_text(EXPERIMENT, encoding="utf-8")
        study.whole("first")  # what is measured once a machine is measured now
        found = Findings(study.whole("undisturbed"))
        while len(found.moments) < kills:
            name = f"experiment-{len(found.lost) + 1}"
            for _ in range(min(each, kills - len(found.moments))):
                if (moment := study.killed(name, generator.uniform(0.5, found.seconds))) is None:
                    break  # it had come to its end
                found.moments.append(moment)
            study.whole(name)
            found.lost.append(study.lost(name))
            out.mkdir(parents=True, exist_ok=True)
            (out / "report.md").write_text(found.page(), encoding="utf-8")
    return 1 if any(found.lost) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/kills"))
    asked = parser.parse_args()
    sys.exit(main(asked.kills, asked.each, asked.seed, asked.out))

"""Does the report call losses different that are equal? Real experiments whose variants are one and the same.

Usage: python tools/aa_losses.py [--experiments 20] [--variants 4] [--seeds 5] [--results results] [--out reports/aa]

One tiny model is trained with as many seeds as all experiments need, through the command line, as anybody would. No two
trials share a seed, so that their losses differ by what initialisation and order of the data do, and by nothing else.
They are dealt out: the first seeds are those of the baseline of the first experiment, the next those of its first
variant, and so on. Each experiment is then judged by the very code of the report. Writes `losses.md`; run again it goes
on where it was. Exit status 1 where more experiments declare a difference than 5 % allow (binomial, 97.5 %), or where a
trial did not end ok.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ablate
from ablate import machine
from ablate.metrics import METRICS
from ablate.report.contrasts import further_seeds
from ablate.report.evidence import Evidence, evidence_of
from ablate.report.text import interval, p_value, table
from ablate.results import Results
from ablate.stats import ALPHA, Difference

NAME = "aa-losses"
LOSS = METRICS["val_loss"]

FILE = """\
name: {name}
question: How often is a difference declared where there is none?
baseline: {{preset: llama, d_model: 32, n_layers: 2, n_heads: 2, max_seq_len: 64}}
seeds: [{seeds}]
data: text
train:
  {{steps: {steps}, batch_tokens: 512, lr: 4e-3, schedule: cosine, warmup_steps: 5, eval_tokens: 8192, threads: 1}}
"""


@dataclass(frozen=True)
class Deal:
    """How seeds are dealt to variants: each experiment has a baseline and so many variants, each so many seeds."""

    experiments: int
    variants: int
    seeds: int

    @property
    def total(self) -> int:
        """How many seeds there are in all."""
        return self.experiments * (1 + self.variants) * self.seeds

    def place(self, seed: int) -> tuple[int, str, int]:
        """The experiment, the variant and the seed within it that a trial stands for."""
        rest, own = divmod(seed, self.seeds)
        experiment, variant = divmod(rest, 1 + self.variants)
        return experiment, f"equal-{variant}" if variant else "baseline", own


def trained(deal: Deal, steps: int, folder: Path) -> Results:
    """The results of the one model with all seeds; what is stored is not trained again."""
    with TemporaryDirectory() as scratch:
        file = Path(scratch, f"{NAME}.yaml")
        seeds = ", ".join(map(str, range(deal.total)))
        file.write_text(FILE.format(name=NAME, steps=steps, seeds=seeds), encoding="utf-8")
        places = ["--results", str(folder), "--reports", str(Path(scratch, "reports"))]
        command = [sys.executable, "-m", "ablate", "run", str(file), "--device", "cpu", *places]
        done = subprocess.run(command, env={**os.environ, "MLFLOW_TRACKING_URI": "file:off"}, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.returncode)
    return ablate.load(folder / NAME)


def dealt(whole: Results, deal: Deal) -> Iterator[Evidence]:
    """Each experiment as the report would see it."""
    places = [deal.place(int(seed)) for seed in whole.trials["seed"]]
    for number in range(deal.experiments):
        own = whole.trials[[place[0] == number for place in places]]
        told = [deal.place(int(seed)) for seed in own["seed"]]
        trials = own.assign(
            variant=[variant for _, variant, _ in told],
            seed=[seed for _, _, seed in told],
            is_baseline=[variant == "baseline" for _, variant, _ in told],
        )
        yield evidence_of(replace(whole, experiment={}, trials=trials))


def contrasts_of(evidence: Evidence) -> dict[str, Difference]:
    """Every variant against the baseline, as the report has it; nothing where the baseline has no trial."""
    baseline = evidence.baseline
    others = [each for each in evidence.variants if not each.is_baseline]
    return {each.name: each.against(baseline, LOSS) for each in others} if baseline else {}


@dataclass(frozen=True)
class Findings:
    """The contrasts of each experiment."""

    deal: Deal
    steps: int
    failed: int
    contrasts: Sequence[dict[str, Difference]]

    @property
    def declared(self) -> int:
        """Experiments in which any difference is declared."""
        return sum(any(each.is_clear for each in found.values()) for found in self.contrasts)

    @property
    def uncorrected(self) -> int:
        """Experiments in which one would be, if each contrast were the only one."""
        return sum(any((each.p or 1) <= ALPHA for each in found.values()) for found in self.contrasts)

    @property
    def allowed(self) -> int:
        """What 97.5 % of studies like this do not exceed, if 5 % is true."""
        from scipy.stats import binom

        return int(binom.ppf(0.975, self.deal.experiments, ALPHA))

    @property
    def holds(self) -> bool:
        """Whether every trial ended ok and no more is declared than chance allows."""
        return not self.failed and self.declared <= self.allowed

    def page(self) -> str:
        """The report."""
        deal, software = self.deal, machine.software()
        dirty = " (dirty)" if software["git_dirty"] else ""
        where = (
            f"{machine.processor()}, {os.cpu_count()} CPUs; torch {software['torch']}, Python {software['python']}; "
        )
        where += f"commit {software['git_commit']}{dirty}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        tested = sum(each.p is not None for found in self.contrasts for each in found.values())
        lines = [
            "# Equal variants, compared",
            f"{where}. Written by `python tools/aa_losses.py --experiments {deal.experiments}`.",
            f"{deal.experiments} experiments of a baseline and {deal.variants} variants, all the same model of "
            f"{self.steps} steps, {deal.seeds} seeds each: {deal.total} trials, no two with one seed; {self.failed} of "
            f"them did not end ok. {tested} contrasts were tested.",
            f"**A difference was declared in {self.declared} of {deal.experiments} experiments**; up to {self.allowed} "
            f"are within the binomial interval of 5 %. Without Holm it would have been {self.uncorrected}.",
            table(
                [
                    "experiment",
                    "variant",
                    "difference (nats/token), 95 %",
                    "p",
                    "after Holm",
                    "verdict",
                    "further seeds",
                ],
                [row for number, found in enumerate(self.contrasts, 1) for row in _rows(number, found)],
            ),
        ]
        return "\n\n".join(lines) + "\n"


def _rows(number: int, found: dict[str, Difference]) -> Iterator[list[str]]:
    for name, each in found.items():
        p, adjusted = p_value(each.p), p_value(each.adjusted)
        yield [str(number), name, interval(each, LOSS), p, adjusted, each.verdict, further_seeds(each)]


def main(deal: Deal, steps: int, folder: Path, out: Path) -> int:
    """Train what is not stored, judge, and write the report."""
    whole = trained(deal, steps, folder)
    rows: Any = whole.trials[whole.trials["seed"] < deal.total]
    failed = deal.total - int((rows["status"] == "ok").sum())
    found = Findings(deal, steps, failed, [contrasts_of(evidence) for evidence in dealt(whole, deal)])
    out.mkdir(parents=True, exist_ok=True)
    (out / "losses.md").write_text(found.page(), encoding="utf-8")
    print(f"a difference was declared in {found.declared} of {deal.experiments}, up to {found.allowed} are allowed")
    return 0 if found.holds else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=20)
    parser.add_argument("--variants", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("reports/aa"))
    asked = parser.parse_args()
    wanted = Deal(asked.experiments, asked.variants, asked.seeds)
    sys.exit(main(wanted, asked.steps, asked.results, asked.out))

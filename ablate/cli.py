"""The command line: parses and prints, decides nothing.

Exit status: 0 all trials `ok`; 1 some are not, or with --check-claims some claim is not supported; 2 the input is
wrong; 130 and 143 interrupted.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from ablate import printing
from ablate.guarded import command, told
from ablate.options import (
    CHECK_CLAIMS,
    DEVICE,
    FILE,
    JSON,
    MAX_TRIALS,
    MEMORY,
    REPORTS,
    RESULTS,
    SET,
    WORKERS,
    as_word,
)
from ablate.terminal import echo, print_json, write_utf8


class _Verbs(click.Group):
    """The commands; also what they print of themselves may find no place."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse, run and exit."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            with contextlib.suppress(OSError):
                echo(told(error, debug=False), err=True)
            sys.exit(2)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ablate")
def main() -> None:
    """What does a transformer's architecture choice buy, and what does it cost?

    Write an experiment file, then: python -m ablate run FILE
    """
    write_utf8()


@main.command()
@FILE
@RESULTS
@REPORTS
@SET
@DEVICE
@WORKERS
@MEMORY
@MAX_TRIALS
@click.option(
    "--only", type=click.Choice(["train", "profile"]), help="Train without a profile, or profile without training."
)
@click.option("--retry-failed", is_flag=True, help="Run trials again that ended otherwise than `ok`.")
@click.option("--fail-fast", is_flag=True, help="Start no more trials after the first that is not `ok`.")
@CHECK_CLAIMS
@command
def run(**options: Any) -> int:
    """Train and profile every variant of FILE, store the numbers, write the report. Resumes by itself."""
    from rich.console import Console

    from ablate import asked, sweep

    console = Console(highlight=False)
    ran = sweep.run(asked.Wanted(**options), console)
    outcomes = ", ".join(f"{number} {word}" for word, number in sorted(ran.outcomes.items()))
    tried = ", ".join(f"{number} {word}" for word, number in sorted(ran.tuning.items()))
    echo(f"{f'tuning: {tried}; ' if tried else ''}{outcomes}; report: {ran.report or 'not written'}")
    printing.print_claims([each.document() for each in ran.claims])
    if ran.lost:
        lines = "".join(f"{each}\n" for each in ran.lost)
        echo(
            f"{lines}  this could not be stored: free some space, or see to it that the folders can be written; "
            "then run the same again, which does what is missing",
            err=True,
        )
    return ran.status


@main.command()
@FILE
@RESULTS
@SET
@DEVICE
@WORKERS
@MAX_TRIALS
@JSON
@command
def plan(as_json: bool, **options: Any) -> int:
    """Show what FILE would run and what each variant costs, without running it."""
    from ablate import asked, commands

    facts = commands.plan_facts(asked.Wanted(**options))
    print_json(facts) if as_json else printing.print_plan(facts)
    return 1 if facts["invalid"] else 0


@main.command()
@click.argument("target")
@RESULTS
@REPORTS
@CHECK_CLAIMS
@JSON
@command
def report(target: str, results: Path, reports: Path, check_claims: bool, as_json: bool) -> int:
    """Write the report of an experiment's FILE or folder of results again, at any moment.

    Beside report.md stand report.html, with tables that sort and plots with hover, and report.json for machines.
    """
    from ablate import asked

    found = asked.stored(target, results)
    claims, changed = [each.document() for each in asked.judged(found)], asked.other_claims(target, found)
    if check_claims:
        asked.check_claimed(claims, target)
    path = asked.report(found, reports)
    if changed:
        echo(changed, err=True)
    if as_json:
        print_json({"report": str(path), "claims": claims})
    else:
        echo(f"report: {path}")
        printing.print_claims(claims)
    return 1 if check_claims and (changed or any(each["verdict"] != "supported" for each in claims)) else 0


@main.command(name="list")
@click.argument("slot", required=False)
@JSON
@command
def list_(slot: str | None, as_json: bool) -> int:
    """List the choices of every slot, or of SLOT, and the presets."""
    from ablate.catalogue import listing

    found = listing(slot)
    if as_json:
        print_json(found)
        return 0
    for each, choices in found.items():
        echo(f"{each}:")
        width = max(map(len, choices), default=0)
        for name, summary in choices.items():
            echo(f"  {name:<{width}}  {summary}")
    return 0


@main.command()
@click.argument("target")
@click.option("--variant", type=as_word, metavar="NAME", help="One variant of an experiment's file.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    is_flag=False,
    flag_value="position.png",
    metavar="[PNG]",
    help="Draw a position scheme too, into position.png unless given.",
)
@SET
@JSON
@command
def describe(target: str, variant: str | None, plot: Path | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Describe a choice (attention/gqa), a preset (preset/llama-7b), a section (train, tune), or FILE's variants."""
    from ablate import asked, describing

    if plot is not None:
        describing.plot_position(target, plot)
    if target.startswith("preset/"):
        facts = describing.describe_preset(target.removeprefix("preset/"))
        print_json(facts) if as_json else printing.print_model(facts, facts["summary"])
    elif (Path(target).is_file() and not target.endswith(".py")) or target.endswith((".yaml", ".yml")):
        facts = describing.describe_variants(asked.Wanted(target, sets=sets), variant)
        if as_json:
            print_json(facts)
        else:
            for each in facts["variants"]:
                printing.print_model(each, each["variant"])
    else:
        facts = describing.describe_choice(target)
        facts |= {} if plot is None else {"plot": str(plot)}
        print_json(facts) if as_json else printing.print_choice(facts)
    return 0


@main.command()
@FILE
@RESULTS
@SET
@DEVICE
@WORKERS
@MAX_TRIALS
@JSON
@command
def status(as_json: bool, **options: Any) -> int:
    """Show the trials of FILE by outcome, what runs now and what is left."""
    from ablate import asked, commands

    facts = commands.status(asked.Wanted(**options))
    print_json(facts) if as_json else printing.print_status(facts)
    return 0


@main.command()
@click.option("--gates", "file", metavar="FILE", help="Lead every variant of FILE through its gates instead.")
@click.option(
    "--aa",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Time the baseline of FILE, or a small model, against itself instead.",
)
@click.option(
    "--repeats", type=click.IntRange(2), default=10, show_default=True, help="Rounds of --aa, of two processes each."
)
@SET
@DEVICE
@WORKERS
@MAX_TRIALS
@JSON
@command
def doctor(file: str | None, aa: str | None, repeats: int, as_json: bool, **options: Any) -> int:
    """Tell what this machine can measure, what not, and why; peaks are measured anew.

    With --gates: check whether the variants of a file are what they say, each on a tiny twin of itself, without
    training one; --set, --workers and --max-trials are about that. With --aa: whether this machine calls two equal
    things different, how noisy its times are, and how many rounds find a difference of 5 %. Exit status 1 where a
    model differs from itself.
    """
    from ablate import asked, commands

    if aa is not None:
        wanted = asked.Wanted(**{**options, "file": aa})
        return _check_noise(wanted, repeats, as_json)
    if file is None:
        facts = commands.doctor(options["device"])
        print_json(facts) if as_json else printing.print_machine(facts)
        return 0
    facts = commands.gates(asked.Wanted(**{**options, "file": file}))
    print_json(facts) if as_json else printing.print_gates(facts)
    return 0 if all(each["passed"] for each in facts["variants"]) and not facts["invalid"] else 1


def _check_noise(wanted: Any, repeats: int, as_json: bool) -> int:
    from rich.console import Console

    from ablate import commands
    from ablate.interruption import Interrupted

    try:
        facts = commands.aa(wanted, repeats, Console(stderr=True, highlight=False))
    except Interrupted as signal:
        return 128 + signal.number
    print_json(facts) if as_json else printing.print_noise(facts)
    return 0 if facts["inside"] and not facts["failed"] else 1


@main.command()
@click.argument("target")
@RESULTS
@REPORTS
@command
def sync(target: str, results: Path, reports: Path) -> int:
    """Bring MLflow up to date with what is stored of an experiment's FILE or folder."""
    from ablate import commands

    done = commands.sync(target, results, reports)
    echo(f"{len(done.written)} written, {len(done.replaced)} replaced, {len(done.unchanged)} unchanged")
    if done.failed:
        echo(done.failed, err=True)
    return 1 if done.failed else 0


@main.group()
def results() -> None:
    """Check and tidy what is stored."""


@results.command()
@click.argument("target")
@RESULTS
@JSON
@command
def verify(target: str, results: Path, as_json: bool) -> int:
    """Check every stored file of an experiment's FILE or folder: checksums, schema, ids, and what belongs together.

    Exit status 1 where something is wrong.
    """
    from ablate import commands

    facts = commands.verify(target, results)
    print_json(facts) if as_json else printing.print_faults(facts)
    return 1 if facts["faults"] else 0


@results.command()
@click.argument("target")
@RESULTS
@JSON
@command
def compact(target: str, results: Path, as_json: bool) -> int:
    """Merge the many small files of an experiment's FILE or folder into one of each kind; the rows stay the same."""
    from ablate import commands

    facts = commands.compact(target, results)
    print_json(facts) if as_json else printing.print_compacted(facts)
    return 0


@main.command()
@click.argument("experiments", nargs=-1)
@RESULTS
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True, help="On 127.0.0.1.")
@command
def ui(experiments: tuple[str, ...], results: Path, port: int) -> int:
    """Start MLflow's UI over the results; print links that compare the runs of EXPERIMENTS (all unless given)."""
    from ablate import commands

    return commands.ui(results, port, experiments)

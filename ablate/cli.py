"""The command line: parses and prints, decides nothing.

Exit status: 0 all trials `ok`; 1 some are not, or with --check-claims some claim is not supported; 2 the input is
wrong; 130 and 143 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click


def echo(text: str, *, err: bool = False) -> None:
    """Print text that files, plug-ins and others' results had a part in."""
    from ablate.terminal import visible

    click.echo(visible(text), err=err)


def _text(word: str) -> str:
    """A word that is no path."""
    from ablate.document import as_text

    return as_text(word)


FILE = click.argument("file")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, nothing else.")
RESULTS = click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of results."
)
REPORTS = click.option(
    "--reports", type=click.Path(path_type=Path), default=Path("reports"), show_default=True, help="Folder of reports."
)
SET = click.option(
    "--set", "sets", type=_text, multiple=True, metavar="KEY=VALUE", help="Change a setting of the file."
)
DEVICE = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
WORKERS = click.option(
    "--workers", type=click.IntRange(1, 1024), help="Trials at a time; chosen by the machine unless given."
)


_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _size(word: str) -> int:
    """Bytes as people write them: `8G`, `1.5GiB` or `500M`, in powers of 1024."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMGT]?)(?:i?B)?", word.strip(), re.IGNORECASE | re.ASCII)
    size = int(float(found[1]) * _FACTORS[found[2].upper()]) if found else 0
    if not size:
        raise click.BadParameter(f"{word!r} is no size of memory: write 8G or 500M")
    return size


MEMORY = click.option(
    "--memory",
    type=_size,
    metavar="SIZE",
    help="Most memory that each trial may take of its device, as 8G; on a CPU its share of what is left unless given.",
)
MAX_TRIALS = click.option(
    "--max-trials", type=click.IntRange(1), default=1000, show_default=True, help="Most combinations to accept."
)
CHECK_CLAIMS = click.option("--check-claims", is_flag=True, help="Exit status 1 unless every claim is supported.")
DEBUG = click.option("--debug", is_flag=True, help="Show tracebacks.")

Command = Callable[..., int | None]


def command(function: Command) -> Command:
    """Faults of the user's input become a line or two on standard error and exit status 2."""

    @wraps(function)
    def guarded(*args: Any, debug: bool, **kwargs: Any) -> None:
        _log_visibly()
        try:
            _check_here()
            status = function(*args, **kwargs)
        except KeyboardInterrupt:
            status = 130
        except BaseException as error:  # a user's own code may raise whatever it likes
            if BrokenPipeError in (type(error), type(error.__context__)):
                raise BrokenPipeError(errno.EPIPE, "nobody reads on") from None  # click ends quietly
            if debug:
                from ablate.redaction import redacted

                echo(redacted(traceback.format_exc()), err=True)
            echo(_told(error, debug), err=True)
            status = 2
        sys.exit(status or 0)

    return DEBUG(guarded)


def _log_visibly() -> None:
    from ablate.terminal import VisibleFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter())
    logging.basicConfig(handlers=[handler])


def _check_here() -> None:
    """Libraries end the program, in words of their own, where no current directory is there."""
    try:
        os.getcwd()  # noqa: PTH109 (Path.cwd() is the same in more steps)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "the current directory is gone") from None


def _told(error: BaseException, debug: bool) -> str:
    """One line for the fault, one for the cure."""
    faults = getattr(error, "faults", None)
    if faults:
        return "\n".join(f"{f.message}" + (f"\n  {f.cure}" if f.cure else "") for f in faults)
    if cure := getattr(error, "cure", None):
        return f"{error}\n  {cure}" if cure not in str(error) else str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return (
            f"{place}{error.strerror}\n  {_CURES.get(error.errno or 0, 'see to it that this can be read and written')}"
        )
    if not isinstance(error, Exception):
        return f"{type(error).__name__}: {error}\n  code that the experiment names ended the program"
    if isinstance(error, ValueError) or type(error).__module__.startswith("ablate") or debug:
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}\n  this is a fault of ablate; --debug shows where"


_CURES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and run again") | {
    errno.ENOENT: "see to it that it is there",
    errno.EMFILE: "allow more open files (ulimit -n) and run again",
}


def _write_utf8() -> None:
    """Names and reasons may hold any letter, in whatever locale; what is no text must not stop a run either."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _print_json(document: Any) -> None:
    from ablate.terminal import visible_json

    click.echo(visible_json(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)))


class _Verbs(click.Group):
    """The commands; also what they print of themselves may find no place."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse, run and exit."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            with contextlib.suppress(OSError):
                echo(_told(error, debug=False), err=True)
            sys.exit(2)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ablate")
def main() -> None:
    """What does a transformer's architecture choice buy, and what does it cost?

    Write an experiment file, then: python -m ablate run FILE
    """
    _write_utf8()


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
    ran = sweep.run(asked.Wanted(**{**options, "sets": tuple(options["sets"])}), console)
    outcomes = ", ".join(f"{number} {word}" for word, number in sorted(ran.outcomes.items()))
    tried = ", ".join(f"{number} {word}" for word, number in sorted(ran.tuning.items()))
    echo(f"{f'tuning: {tried}; ' if tried else ''}{outcomes}; report: {ran.report or 'not written'}")
    _print_claims([each.document() for each in ran.claims])
    if ran.lost:
        lines = "".join(f"{each}\n" for each in ran.lost)
        echo(
            f"{lines}  this could not be stored: free some space, or see to it that the folders can be written; "
            "then run the same again, which does what is missing",
            err=True,
        )
    return ran.status


def _print_claims(claims: Sequence[Mapping[str, Any]]) -> None:
    """Each claim and its verdict, or why it has none."""
    for each in claims:
        echo(f"{each['verdict']}: {' '.join(each['claim'].split())}" + (f" ({each['why']})" if each["why"] else ""))


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

    facts = commands.plan_facts(asked.Wanted(**{**options, "sets": tuple(options["sets"])}))
    if as_json:
        _print_json(facts)
    else:
        _print_plan(facts)
    return 1 if facts["invalid"] else 0


def _print_plan(facts: Mapping[str, Any]) -> None:
    from ablate.asked import many
    from ablate.fractional import in_words

    counts = facts["counts"]
    echo(f"{facts['name']}: {facts['question'] or ''}".rstrip(": "))
    words = ("raw", "excluded", "invalid", "merged", "planned")
    numbers = ", ".join(f"{counts[word]} {word}" for word in words)
    trials = f"{many(counts['trials'], 'trial')}, {facts['stored']} of them stored"
    shared = f"{facts['device']}, {facts['workers']} at a time, {many(facts['threads'], 'thread')} each"
    echo(f"{numbers} variants; {trials}; {shared}")
    if facts["of_other_threads"]:
        echo(facts["of_other_threads"])
    if facts["design"] and "aliases" in facts["design"]:
        for line in in_words(facts["design"]):
            echo(line)
    if tuning := facts.get("tuning"):
        _print_tuning(tuning, len(facts["variants"]))
    if any(value for name, value in facts["profile"].items() if name != "rounds"):
        echo(f"profile: {_in_words(facts['profile'])}")
    for name in facts["plug_ins"]:
        echo(f"runs your own code: {name} ({', '.join(facts['plug_in_files'][name]) or 'no file found'})")
    heads = ("variant", "params", "active", "FLOPs/token", "KV bytes/token", "tensors ~", "time/trial ~")
    rows = [
        (
            each["name"],
            f"{each['params_total']:,}",
            f"{each['params_active']:,}",
            _number(each["flops_per_token"]),
            _number(each["kv_cache_bytes_per_token"]),
            f"{each['predicted_memory_bytes'] / 2**20:,.0f} MiB",
            _duration(each["predicted_seconds"]),
        )
        for each in facts["variants"]
    ]
    _print_table(heads, rows)
    echo("")
    _print_caches(facts["variants"])
    _print_lengths(facts["variants"])
    for each in facts["variants"]:
        if each["matched"]:
            echo(_matched_line(each["name"], each["matched"]))
    for name, other in facts["same"].items():
        echo(f"the same as {other}: {name}")
    for each in facts["invalid"]:
        echo(f"invalid: {each['variant']}: {each['reason']}")
    _print_claims(facts["claims"])


def _print_tuning(facts: Mapping[str, Any], n_variants: int) -> None:
    """What is searched, with how many trials, and what was chosen."""
    from ablate.asked import many

    what = "; ".join(f"{path} {_listed(values)}" for path, values in facts["settings"].items())
    each, most, n_seeds = facts["points_each"], facts["most_points_each"], len(facts["seeds"])
    seeds = f"seeds {', '.join(map(str, facts['seeds'][:6]))}{', …' * (n_seeds > 6)}"
    grows = f", and where the best lies at an edge up to {(most - each) * n_seeds * n_variants} more" * (most > each)
    done = facts["trials"] - facts["left"]
    tokens = "" if facts["tokens"] is None else f", {facts['tokens']:,} tokens"
    echo(f"tuning ({facts['sampler']}): {what}; {seeds}, none of the experiment's own; on the training split alone")
    echo(
        f"tuning trials: {many(n_variants, 'variant')} x {many(each, 'point')} x {many(n_seeds, 'seed')} = "
        f"{facts['trials']}{tokens}; {done} of them stored{grows}"
    )
    for name, point in facts["chosen"].items():
        edge = " (at the edge of what was tried)" if facts["at_edge"][name] else ""
        echo(f"chosen for {name}: {_in_words(point)}{edge}")


def _listed(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"{values['low']:g} to {values['high']:g}{' (logarithmic)' * values['log']}"
    return ", ".join(map(str, values))


def _in_words(settings: Mapping[str, Any]) -> str:
    """Settings that are given, on one line: `prefill batch 1, tokens 96; lengths 128, 256; rounds 3`."""
    shown = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in settings.items()
        if value
    }
    parts = (
        f"{name} ({_in_words(value)})" if isinstance(value, Mapping) else f"{name.replace('_', ' ')} {value}"
        for name, value in shown.items()
    )
    return "; ".join(parts)


def _print_caches(variants: Sequence[Mapping[str, Any]]) -> None:
    """What one sequence's cache takes at full length, where heads are shared among devices, and when it is large."""
    devices = list(variants[0]["kv_cache_bytes_by_devices"])
    heads = ("variant", "KV cache = weights at", *(f"bytes on each of {n}" for n in devices))
    rows = [
        (
            each["name"],
            _number(each["kv_cache_equals_weights_at_tokens"]),
            *(_number(each["kv_cache_bytes_by_devices"][n]) for n in devices),
        )
        for each in variants
    ]
    _print_table(heads, rows)


def _print_lengths(variants: Sequence[Mapping[str, Any]]) -> None:
    """How long each variant trains, where that is not the same number of steps for all."""
    if len({each["steps"] for each in variants} | {None}) == 2:
        return
    heads = ("variant", "steps", "training tokens", "training FLOPs")
    columns = ("steps", "train_tokens", "train_flops")
    echo("")
    _print_table(heads, [(each["name"], *(_number(each[column]) for column in columns)) for each in variants])
    if any(each["steps"] is None for each in variants):
        echo("how many steps a trial makes in its seconds shows when it ends, and differs between trials")


def _matched_line(name: str, matched: Mapping[str, Any]) -> str:
    """What was changed for an equal budget, and what of the mismatch remains."""
    before, after = (f"{matched[word]:,}" for word in ("before", "after"))
    change = f"{matched['by']} {before} -> {after}" if before != after else f"{matched['by']} stays {before}"
    share = f"{100 * matched['mismatch']:+.2f} % of the baseline's {matched['goal']:,.0f}"
    return f"matched: {name}: {change}; {matched['budget']} {matched['reached']:,.0f} ({share})"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    return "< 1 s" if seconds < 1 else f"{seconds:,.0f} s"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}"


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from tabulate import tabulate

    align = ("left", *["right"] * (len(heads) - 1))
    echo(tabulate(rows, heads, tablefmt="simple", disable_numparse=True, colalign=align if rows else None))


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
        _print_json({"report": str(path), "claims": claims})
    else:
        echo(f"report: {path}")
        _print_claims(claims)
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
        _print_json(found)
        return 0
    for each, choices in found.items():
        echo(f"{each}:")
        width = max(map(len, choices), default=0)
        for name, summary in choices.items():
            echo(f"  {name:<{width}}  {summary}")
    return 0


@main.command()
@click.argument("target")
@click.option("--variant", type=_text, metavar="NAME", help="One variant of an experiment's file.")
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
        _print_json(facts) if as_json else _print_model(facts, facts["summary"])
    elif (Path(target).is_file() and not target.endswith(".py")) or target.endswith((".yaml", ".yml")):
        facts = describing.describe_variants(asked.Wanted(target, sets=sets), variant)
        if as_json:
            _print_json(facts)
        else:
            for each in facts["variants"]:
                _print_model(each, each["variant"])
    else:
        facts = describing.describe_choice(target)
        facts |= {} if plot is None else {"plot": str(plot)}
        _print_json(facts) if as_json else _print_choice(facts)
    return 0


def _print_choice(facts: Mapping[str, Any]) -> None:
    echo(f"{facts['slot']}: {facts['name']}\n\n{facts['text']}\n")
    rows = [
        (key, f["type"], "—" if f["default"] is None else json.dumps(f["default"]), f["bounds"], f["description"])
        for key, f in facts["settings"].items()
    ]
    if rows:
        from tabulate import tabulate

        echo(tabulate(rows, ("setting", "type", "default", "bounds", "meaning"), "simple", disable_numparse=True))
    else:
        echo("no settings")
    if "plot" in facts:
        echo(f"\nplot: {facts['plot']}")


def _print_model(facts: Mapping[str, Any], title: str) -> None:
    echo(f"{title}\n")
    heads = ("stage", "times", "output", "params", "active", "FLOPs/token", "cache/token")
    costs = ("params", "params_active", "flops", "cache")
    rows = [(s["stage"], str(s["times"]), s["output"], *(_number(s[key]) for key in costs)) for s in facts["stages"]]
    _print_table(heads, rows)
    echo("")
    for key in ("params_total", "params_active", "params_non_embedding", "kv_cache_elements_per_token"):
        echo(f"{key}: {_number(facts[key])}")
    if crossed := facts["kv_cache_elements_per_source_token"]:
        echo(f"kv_cache_elements_per_source_token: {_number(crossed)}")
    echo(f"flops_per_token: {_number(facts['flops_per_token'])} (sequences of {facts['flops_at_tokens']})\n")


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

    facts = commands.status(asked.Wanted(**{**options, "sets": tuple(options["sets"])}))
    if as_json:
        _print_json(facts)
        return 0
    outcomes = ", ".join(f"{number} {word}" for word, number in sorted(facts["outcomes"].items())) or "none stored"
    profiled = f" ({facts['only_profiled']} only profiled)" if facts["only_profiled"] else ""
    if tuning := facts.get("tuning"):
        counts = sorted(tuning["outcomes"].items()) + [("not run", tuning["not_run"])] * bool(tuning["not_run"])
        tried = ", ".join(f"{number} {word}" for word, number in counts)
        over = "over" if tuning["is_over"] else f"{tuning['left']} left, as far as is known by now"
        echo(f"{facts['name']}: tuning: {tuning['trials']} trials: {tried}; {over}")
    echo(f"{facts['name']}: {facts['planned']} trials: {outcomes}{profiled}; {facts['left']} left")
    if facts["of_other_threads"]:
        echo(facts["of_other_threads"])
    if facts["rounds_left"]:
        echo(f"rounds of timing: {facts['rounds_left']} left")
    if facts["damaged"]:
        echo(f"damaged: what is stored of {facts['damaged']} of them; ablate results verify tells, run does it again")
    for label in facts["running"]:
        echo(f"running: {label}")
    for each in facts["failed"]:
        echo(f"{each['status']}: {each['variant']} seed {each['seed']}: {each['reason']} (log: {each['log']})")
    _print_claims(facts["claims"])
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
        wanted = asked.Wanted(**{**options, "file": aa, "sets": tuple(options["sets"])})
        return _check_noise(wanted, repeats, as_json)
    if file is None:
        facts = commands.doctor(options["device"])
        _print_json(facts) if as_json else _print_machine(facts)
        return 0
    facts = commands.gates(asked.Wanted(**{**options, "file": file, "sets": tuple(options["sets"])}))
    _print_json(facts) if as_json else _print_gates(facts)
    return 0 if all(each["passed"] for each in facts["variants"]) and not facts["invalid"] else 1


def _check_noise(wanted: Any, repeats: int, as_json: bool) -> int:
    from rich.console import Console

    from ablate import commands
    from ablate.interruption import Interrupted

    try:
        facts = commands.aa(wanted, repeats, Console(stderr=True, highlight=False))
    except Interrupted as signal:
        return 128 + signal.number
    _print_json(facts) if as_json else _print_noise(facts)
    return 0 if facts["inside"] and not facts["failed"] else 1


def _print_noise(facts: Mapping[str, Any]) -> None:
    from tabulate import tabulate

    from ablate.noise import HEADS, lines, verdict

    echo(tabulate(lines(facts), HEADS, "simple", disable_numparse=True))
    echo(f"\n{verdict(facts)}")


def _print_machine(facts: Mapping[str, Any]) -> None:
    from tabulate import tabulate

    from ablate.doctor import lines

    echo(tabulate(lines(facts), ("what", "here", ""), "simple", disable_numparse=True))


def _print_gates(facts: Mapping[str, Any]) -> None:
    from tabulate import tabulate

    from ablate.asked import many

    heads = ("variant", "gate", "result", "detail")
    rows = [(each["variant"], *gate.values()) for each in facts["variants"] for gate in each["gates"]]
    echo(tabulate(rows, heads, "simple", disable_numparse=True))
    for each in facts["invalid"]:
        echo(f"invalid: {each['variant']}: {each['reason']}")
    passed = sum(each["passed"] for each in facts["variants"])
    echo(f"{facts['name']}: {passed} of {many(len(facts['variants']), 'variant')} passed")


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
    if as_json:
        _print_json(facts)
    else:
        _print_faults(facts)
    return 1 if facts["faults"] else 0


def _print_faults(facts: Mapping[str, Any]) -> None:
    from ablate.asked import many

    for each in facts["faults"]:
        echo(f"{each['file']}: {each['fault']}\n  {each['cure']}")
    rows = ", ".join(f"{number} {kind}" for kind, number in facts["stored"].items())
    older = f"; {many(facts['without_checksum'], 'file')} from before there were checksums" * bool(
        facts["without_checksum"]
    )
    found = many(len(facts["faults"]), "fault") if facts["faults"] else "all is well"
    echo(f"{facts['folder']}: {rows}{older}; {found}")


@results.command()
@click.argument("target")
@RESULTS
@JSON
@command
def compact(target: str, results: Path, as_json: bool) -> int:
    """Merge the many small files of an experiment's FILE or folder into one of each kind; the rows stay the same."""
    from ablate import commands

    facts = commands.compact(target, results)
    if as_json:
        _print_json(facts)
        return 0
    merged = ", ".join(f"{number} {kind}" for kind, number in facts["merged"].items())
    removed = f"; removed what killed writers left: {', '.join(facts['removed'])}" if facts["removed"] else ""
    damaged = (
        f"; left alone, for `results verify` to tell of: {', '.join(facts['damaged'])}" if facts["damaged"] else ""
    )
    echo(f"{facts['folder']}: small files merged: {merged}{removed}{damaged}")
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

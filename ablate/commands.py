"""What each verb of the command line does, without a word printed. Heavy imports wait until a verb needs them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ablate import document, plug_in
from ablate.choice import Faults, Settings, SettingsError
from ablate.files import FULL, check_room
from ablate.inside import folder_of
from ablate.mlflow_view import LOCAL_URL, comparison_links
from ablate.results import Results, Store, is_only_profiled, is_store, load, places, told
from ablate.schema import SCHEMAS
from ablate.shelf import COMPACTED
from ablate.tables import ResultsError
from ablate.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console

    from ablate.experiment import Experiment
    from ablate.machine import Resources
    from ablate.mirror import Mirror
    from ablate.plan import VariantPlan
    from ablate.tracking import SyncResult
    from ablate.variant import Trial

_PARTS = (*SCHEMAS, "logs", "checkpoints", "leases")
_REPORT_LEASE = ".report"
_TAKEN = re.compile(r"mlflow\.db.*|mlartifacts|.*\.(db|lock)", re.IGNORECASE)


@dataclass(frozen=True)
class Wanted:
    """What a command line asks for, with the defaults of `run`."""

    file: str
    results: Path = Path("results")
    reports: Path = Path("reports")
    sets: tuple[str, ...] = ()
    device: str = "auto"
    workers: int | None = None
    memory: int | None = None
    max_trials: int = 1000
    retry_failed: bool = False
    fail_fast: bool = False
    only: str | None = None

    def command(self) -> str:
        """The command that runs this again, as one would type it."""
        here = os.path.relpath(self.file) if Path(self.file).resolve().is_relative_to(Path.cwd()) else None
        parts = ["python", "-m", "ablate", "run", here or Path(self.file).name]  # where a home is, is nobody's business
        for change in self.sets:
            parts += ["--set", change]
        return shlex.join(parts)

    def syncing(self) -> str:
        """The command that brings MLflow up to date with it."""
        parts = ["python", "-m", "ablate", "sync", self.file]
        for option, folder in (("--results", self.results), ("--reports", self.reports)):
            parts += [option, str(folder)] if folder != Path(option.removeprefix("--")) else []
        return shlex.join(parts)


@dataclass(frozen=True)
class Ran:
    """How a run ended: outcomes counted, what was there before, where the report is, the exit status, and what could
    not be stored, with the reasons.
    """

    outcomes: Counter[str]
    started: int
    skipped: int
    report: Path | None
    status: int
    lost: tuple[str, ...] = ()


@contextmanager
def _aside() -> Iterator[None]:
    """What a user's own code prints is no result: it goes to standard error."""
    with redirect_stdout(sys.stderr):
        yield


@_aside()
def read(wanted: Wanted) -> Experiment:
    """The experiment, every variant checked; in a child first where code of the user's own is part of it.

    Raises `FileFaults`.
    """
    from ablate import experiment, gatekeeper, plan
    from ablate.variant import of_own_code, own_code

    found = experiment.read(wanted.file, wanted.sets)
    _check_free(found, document.experiment_name(found))
    fatal = gatekeeper.rehearse(found, wanted.sets, wanted.max_trials) if any(own_code(found.data)) else {}
    whole = experiment.Experiment.of(found, wanted.max_trials)
    own = of_own_code(whole.variants)
    return plan.checked(whole, {variant.name: fault for kind, fault in fatal.items() for variant in own[kind]})


def run(wanted: Wanted, console: Console) -> Ran:
    """Plan, train, profile, record, report. Raises `FileFaults` before anything runs if the input is wrong."""
    from ablate import plan
    from ablate.interruption import signals

    experiment = read(wanted)
    plans = plan.plan(experiment, timed=False)
    resources = _resources(wanted, plans)
    plan.check_device(experiment, resources.device)
    _check_writable(wanted, experiment.name)
    with signals() as received:
        ran = _run(wanted, console, experiment, plans, resources, received)
    return replace(ran, status=128 + received[0]) if received else ran


def _run(
    wanted: Wanted,
    console: Console,
    experiment: Experiment,
    plans: list[VariantPlan],
    resources: Resources,
    received: list[int],
) -> Ran:
    from ablate import machine, plan
    from ablate.lease import Leases
    from ablate.progress import Progress
    from ablate.runner import Run, present
    from ablate.tasks import tasks, tidy

    store = Store(wanted.results / experiment.name, create=True)
    names = _names_of_trials(store)
    trials = experiment.trials(resources.device, resources.threads)
    tidy(trials, store)
    queue = tasks(trials, store, retry_failed=wanted.retry_failed, only=wanted.only)
    _check_places(store, [task.trial for task in queue])
    store.remove_leftovers()
    progress = Progress(console, len(queue))
    document = plan.document(experiment, plans, machine.facts(resources), wanted.command())
    with present(Leases(store.folder / "leases"), received):
        store.write_experiment(document)
        running = Run(
            experiment,
            plans,
            store,
            resources,
            progress,
            lambda trial_id: mirror.mirror(trial_id) if mirror else None,
            fail_fast=wanted.fail_fast,
            retry_failed=wanted.retry_failed,
            repeated=wanted.only != "train",
            only=wanted.only,
        )
    rounds_left = len(running.rounds_left())
    opening = _opening(experiment, len(queue), _stored_statuses(store, trials), rounds_left)
    for line in (opening, *_done_again(store, trials)):
        console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
    mirror = _mirror(wanted, store, new=bool(queue or rounds_left), behind=_names_of_trials(store) != names)
    with mirror or nullcontext():
        with progress:
            running.carry_out(queue, received)
        lost = running.keeper.lost()
        folder = None
        try:
            folder = _report_alone(store, wanted.reports / experiment.name, received)
            if mirror:
                mirror.attach(folder.parent)
        except OSError as error:
            lost.append(f"the report: {error.strerror or error}")
    outcomes = _outcomes(_stored_statuses(store, trials), len(trials))
    failed = set(outcomes) - {"ok"} or experiment.invalid or lost or running.failed_rounds()
    return Ran(outcomes, len(queue), len(trials) - len(queue), folder, 1 if failed else 0, tuple(lost))


def _report_alone(store: Store, folder: Path, received: Sequence[int]) -> Path:
    """Write the report while no other run writes one there."""
    from ablate.lease import Leases

    with Leases(folder).wait(_REPORT_LEASE, stopped=lambda: bool(received)) or nullcontext():
        return report(store.load(), folder.parent)


def _check_writable(wanted: Wanted, name: str) -> None:
    """What cannot be written must not be noticed after hours of training."""
    folder_of(wanted.results, name, *_PARTS)
    folder_of(wanted.reports, name, "plots")
    store, report = Store(wanted.results / name), wanted.reports / name
    for folder in (*store.folders(), wanted.results):
        _check_room(folder, 0, "--results")
    for folder in (report, report / "plots"):
        _check_room(folder, _REPORT_BYTES, "--reports")


_REPORT_BYTES, _TRIAL_BYTES = 2**18, 2**16
"""What a report with its plots takes at least, and a trial's three files with its run in MLflow's database."""


def _check_room(folder: Path, size: int, option: str) -> None:
    try:
        check_room(folder, size)
    except OSError as error:
        reason = error.strerror or str(error)
        cure = f"free some space, or give another {option}" if error.errno in FULL else f"give another {option}"
        raise document.FileFaults([f"{folder}: no folder that can be written: {reason}\n  {cure}"]) from None


def _check_places(store: Store, trials: Sequence[Trial]) -> None:
    """There is room for what will be stored, and nothing stands there that a file cannot replace."""
    _check_room(store.folder, _TRIAL_BYTES * len(trials), "--results")
    paths = [shelf.path(trial.trial_id) for shelf in store.shelves.values() for trial in trials]
    for path in [*paths, *(store.log_path(trial.trial_id) for trial in trials), store.folder / "experiment.json"]:
        if path.is_dir() and not path.is_symlink():
            raise document.FileFaults([f"{path}: a folder where a file will be written\n  move it away"])


def _done_again(store: Store, trials: Sequence[Trial]) -> list[str]:
    """Which files cannot be read, so that what they held is done again."""
    ids, lines = {trial.trial_id for trial in trials}, []
    for kind in ("trials", "repeats"):
        for name, fault in store.look(kind).faults.items():
            if kind == "repeats" or Path(name).stem in ids or name in ("", COMPACTED):
                lines.append(f"{told(kind, name, fault)}; what it held is done again where it is missing")
    return lines


def _stored_statuses(store: Store, trials: Sequence[Trial]) -> Counter[str]:
    return Counter(row["status"] for trial in trials if (row := store.trial(trial.trial_id)))


def _names_of_trials(store: Store) -> dict[str, str]:
    """What each trial id is called now."""
    try:
        return {trial_id: variant["name"] for trial_id, (_, _, variant) in places(store.experiment()).items()}
    except ResultsError:
        return {}


def _mirror(wanted: Wanted, store: Store, *, new: bool, behind: bool) -> Mirror | None:
    """The mirror, brought up to date where an earlier run left it behind; None where it has nothing to learn."""
    from ablate.mirror import Mirror

    mirrored = (store.mlflow() or {}).get("attempts", {})
    rows = ((trial_id, store.trial(trial_id)) for trial_id in _names_of_trials(store))
    behind = behind or any(row and mirrored.get(trial_id) != row["attempts"] for trial_id, row in rows)
    return Mirror(wanted.results, store, wanted.syncing(), behind=behind) if new or behind else None


def _resources(wanted: Wanted, plans: Sequence[VariantPlan]) -> Resources:
    from ablate import machine

    return machine.share(
        wanted.device, wanted.workers, max(each.predicted_memory_bytes for each in plans), wanted.memory
    )


def _opening(experiment: Experiment, to_run: int, statuses: Counter[str], rounds_left: int) -> str:
    planned, seeds, total = experiment.counts["planned"], len(experiment.seeds), experiment.counts["trials"]
    size = " ".join([many(planned, "variant"), "x", many(seeds, "seed"), "=", many(total, "trial")])
    failed = {status: number for status, number in sorted(statuses.items()) if status != "ok"}
    rounds = (experiment.baseline.settings.profile.repeats if to_run else rounds_left) or 0
    then = f", and {many(rounds, 'round')} of timing to run" if rounds else ""
    if to_run == 0:
        said = ", ".join(f"{number} {status}" for status, number in failed.items())
        them = "it" if sum(failed.values()) == 1 else "them"
        again = f" ({said}; --retry-failed runs {them} again)" if failed else ""
        return f"{experiment.name}: {size}, all of them stored: nothing to train{again}{then}"
    stored = f", {total - to_run} of them stored" if to_run < total else ""
    return f"{experiment.name}: {size}{stored}, {to_run} to run{then.removesuffix(' to run')}"


def many(number: int, word: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _outcomes(outcomes: Counter[str], planned: int) -> Counter[str]:
    if missing := planned - outcomes.total():
        outcomes["not run"] = missing
    return outcomes


def report(results: Results, reports: Path) -> Path:
    """Write the report from what is stored. Returns the path of `report.md`."""
    from ablate.report import write_report

    mirrored = Store(results.folder).mlflow()
    links = comparison_links(LOCAL_URL, mirrored) if mirrored else {}
    return write_report(results, folder_of(reports, results.folder.resolve().name, "plots"), links)


def stored(target: str, results: Path) -> Results:
    """The results of an experiment file, or of a folder of results. Raises `FileFaults`."""
    folder = Path(target) if Path(target).is_dir() else results / name_of(target)
    try:
        return load(folder)
    except ResultsError as error:
        raise document.FileFaults([f"{error}\n  {_NO_RESULTS}"]) from None


_NO_RESULTS = "run the experiment first, or give its folder of results"


def name_of(file: str) -> str:
    """An experiment's name, read from its file without checking the rest. Raises `FileFaults`."""
    found = document.read(file)
    name = document.experiment_name(found)
    _check_free(found, name)
    return name


def _check_free(found: document.Document, name: str) -> None:
    """Beside the experiments' folders stands what MLflow keeps, and locks."""
    if _TAKEN.fullmatch(name):
        fault = SettingsError(
            ("name",), f"'{name}' is kept for what stands beside it in results", "choose another name"
        )
        raise document.told(found, Faults([fault]))


@_aside()
def plan_facts(wanted: Wanted) -> dict[str, Any]:
    """What `plan --json` gives."""
    from ablate import plan
    from ablate.tasks import tasks

    experiment = read(wanted)
    plans = plan.plan(experiment)
    resources = _resources(wanted, plans)
    trials, store = experiment.trials(resources.device, resources.threads), Store(wanted.results / experiment.name)
    unfinished = tasks(trials, store, retry_failed=True)
    return {
        "name": experiment.name,
        "question": experiment.question,
        "counts": experiment.counts,
        "seeds": experiment.seeds,
        "stored": len(trials) - len(unfinished),
        "device": resources.device,
        "workers": resources.workers,
        "threads": resources.threads,
        "profile": experiment.baseline.settings.profile.model_dump(mode="json"),
        "variants": [each.facts() for each in plans],
        "invalid": [{"variant": each.name, "reason": each.reason} for each in experiment.invalid],
        "same": experiment.same,
        "plug_ins": experiment.plug_ins(),
        "plug_in_files": {name: plug_in.files(name) for name in experiment.plug_ins()},
    }


@_aside()
def status(wanted: Wanted) -> dict[str, Any]:
    """Trials by outcome, what runs now, what is left."""
    from ablate import plan
    from ablate.runner import running_now
    from ablate.tasks import tasks

    experiment = read(wanted)
    resources = _resources(wanted, plan.plan(experiment, timed=False))
    trials = experiment.trials(resources.device, resources.threads)
    store = Store(wanted.results / experiment.name)
    rows = [row for trial in trials if (row := store.trial(trial.trial_id))]
    outcomes = Counter(row["status"] for row in rows)
    return {
        "name": experiment.name,
        "planned": len(trials),
        "outcomes": dict(outcomes),
        "running": running_now(store),
        "only_profiled": sum(map(is_only_profiled, rows)),
        "left": len(tasks(trials, store, retry_failed=False)),
        "rounds_left": _rounds_left(experiment, store, resources),
        "failed": [
            {key: row[key] for key in ("variant", "seed", "status", "phase", "reason", "log")}
            for row in rows
            if row["status"] != "ok"
        ],
    }


def _rounds_left(experiment: Experiment, store: Store, resources: Resources) -> int:
    """Of the repeats that the file asks for: all as long as the baseline has no trial that ended `ok`."""
    from ablate import rounds

    repeats = experiment.baseline.settings.profile.repeats or 0
    found = rounds.of_experiment(experiment, store, resources)
    return repeats if found is None else len(rounds.left(found, store, repeats, retry_failed=False))


def verify(target: str, results: Path) -> dict[str, Any]:
    """What is stored of an experiment, all of it checked. Raises `FileFaults` where nothing is."""
    from ablate.verify import verify

    return verify(_store(target, results))


def compact(target: str, results: Path) -> dict[str, Any]:
    """Few files in the place of many, with the same rows. Raises `FileFaults` where nothing is."""
    from ablate.compact import compact

    store = _store(target, results)
    try:
        return compact(store)
    except TimeoutError:
        raise document.FileFaults([f"{store.folder}: somebody else is writing there\n  try again later"]) from None


def _store(target: str, results: Path) -> Store:
    folder = Path(target) if Path(target).is_dir() else results / name_of(target)
    if not is_store(folder):
        raise document.FileFaults(
            [f"no results in {folder}\n  run the experiment first, or give its folder of results"]
        )
    return Store(folder)


def doctor(device: str) -> dict[str, Any]:
    """What this machine can measure, and what not. Raises `SettingsError` where the device is not there."""
    from ablate.doctor import examine
    from ablate.machine import find_device

    return examine(find_device(device))


@_aside()
def aa(wanted: Wanted, repeats: int, console: Console) -> dict[str, Any]:
    """A file's baseline, or a model of this machine's own, timed against itself. Raises `FileFaults`, `Interrupted`."""
    from ablate import machine, noise, plan
    from ablate.interruption import Interrupted, signals
    from ablate.progress import Progress

    experiment = read(wanted) if wanted.file else noise.own_experiment()
    resources = machine.share(wanted.device, 1, bytes_each=0)
    plan.check_device(experiment, resources.device)
    with Progress(console, 0) as progress, signals() as received:
        found = noise.check(experiment, resources, repeats, lambda: bool(received), progress)
        if found is None:
            raise Interrupted(received[0])
    return found


@_aside()
def gates(wanted: Wanted) -> dict[str, Any]:
    """What each gate says of each variant; none is trained, and nothing stored. Raises `FileFaults`."""
    from ablate import child, gatekeeper, machine

    experiment = read(wanted)
    workers = machine.share("cpu", wanted.workers, bytes_each=0).workers
    with child.environment(threads=1):
        child.warm_up(child.context("cpu"))
    with TemporaryDirectory() as folder:
        logs = {variant.name: Path(folder, f"{i}.log") for i, variant in enumerate(experiment.variants)}
        checked = list(gatekeeper.check(logs, experiment.variants, workers, lambda: False))
    said = {each.variant.name: [asdict(verdict) for verdict in each.verdicts] for each in checked}
    passed = {each.variant.name: each.fault is None for each in checked}
    names = [variant.name for variant in experiment.variants]
    return {
        "name": experiment.name,
        "variants": [{"variant": name, "passed": passed[name], "gates": said[name]} for name in names],
        "invalid": [{"variant": each.name, "reason": each.reason} for each in experiment.invalid],
    }


def sync(target: str, results: Path, reports: Path) -> SyncResult:
    """Bring MLflow up to date from what is stored, and with the report that was written of it."""
    from ablate.tracking import Tracker

    store = Store(stored(target, results).folder)
    return Tracker.connect(results, store).sync(reports / store.folder.name)


@_aside()
def describe_choice(word: str) -> dict[str, Any]:
    """Settings and source of a choice, given as `slot/name` or as a name; also of a file's section. Raises `Faults`."""
    from ablate import registry
    from ablate.settings import ProfileSettings, TrainSettings

    sections: dict[str, type[Settings]] = {"train": TrainSettings, "profile": ProfileSettings}
    if section := sections.get(word):
        text = inspect.cleandoc(section.__doc__ or "")
        facts = {"slot": "section", "name": word, "summary": text.partition("\n")[0], "text": text}
        return {**facts, "settings": _settings_facts(section.model_json_schema())}

    slot, name = _slot_and_name(word)
    kind = registry.config_class(slot, name)
    text = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    facts = {"slot": slot, "name": name, "summary": text.partition("\n")[0], "text": text}
    return {**facts, "settings": _settings_facts(kind.model_json_schema())}


@_aside()
def plot_position(word: str, file: Path) -> None:
    """Draw a position scheme, with its defaults, into a PNG file. Raises `Faults` for what is none."""
    from ablate import registry
    from ablate.position import PositionChoice
    from ablate.position_plot import png

    slot, name = ("", word) if word.startswith("preset/") or word.endswith((".yaml", ".yml")) else _slot_and_name(word)
    choice = registry.configure(slot, name) if slot == "position" else None
    if not isinstance(choice, PositionChoice):
        raise Faults([SettingsError((), f"only a position scheme can be plotted, not {word}", "give position/NAME")])
    if file.suffix.lower() != ".png":
        raise Faults([SettingsError((), f"{file}: a plot is a PNG file", f"write --plot {file.with_suffix('.png')}")])
    if importlib.util.find_spec("matplotlib") is None:
        raise Faults([SettingsError((), "matplotlib, which draws, is not installed", "pip install matplotlib")])
    file.write_bytes(png(choice))


def _slot_and_name(word: str) -> tuple[str, str]:
    """`slot/name`, whose name may be that of a user's own file; a built-in name may stand alone."""
    from ablate import catalogue, registry
    from ablate.choice import unknown

    slots = (*catalogue.SLOTS, *catalogue.SOURCES)
    slot, _, name = word.partition("/")
    if slot in slots and name:
        return slot, name
    if "." in word:
        return registry.slot_of(word), word
    known = [(slot, name) for slot in slots for name in catalogue.names(slot)]
    if found := [each for each in known if each[1] == word]:
        return found[0]
    names = [*(f"{slot}/{name}" for slot, name in known), *(name for _, name in known)]
    names += [*(f"preset/{name}" for name in catalogue.names(catalogue.PRESETS)), "train", "profile"]
    raise Faults([unknown(word, names, "choice", ())])


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_NO_BOUND = 2**53  # what a number can hold says nothing of the setting


def _settings_facts(schema: dict[str, Any]) -> dict[str, Any]:
    """What each setting is; those of settings below it follow with its name in front."""
    found = {}
    for key, field in schema["properties"].items():
        if key == "name":
            continue
        found[key] = _field_facts(field)
        for reference in (kind["$ref"] for kind in _kinds(field) if "$ref" in kind):
            below = schema["$defs"][reference.rpartition("/")[2]]["properties"]
            found |= {f"{key}.{each}": _field_facts(own) for each, own in below.items() if each != "name"}
    return found


def _field_facts(field: dict[str, Any]) -> dict[str, Any]:
    kinds = _kinds(field)
    bounds = {sign: kinds[0][key] for key, sign in _BOUNDS.items() if abs(kinds[0].get(key, _NO_BOUND)) < _NO_BOUND}
    kind = " | ".join(map(_kind_in_words, kinds))
    facts = {"type": kind, "default": field.get("default"), "description": field.get("description", "")}
    return {**facts, "bounds": " ".join(f"{sign} {value}" for sign, value in bounds.items())}


def _kinds(field: dict[str, Any]) -> list[dict[str, Any]]:
    return [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]


def _kind_in_words(kind: dict[str, Any]) -> str:
    if "$ref" in kind:
        return "settings"
    words = kind.get("enum") or [kind.get("const", kind.get("type", "any"))]
    return " | ".join(map(str, words))


def describe_preset(name: str) -> dict[str, Any]:
    """Settings and totals of a preset. Raises `Faults`."""
    from ablate import catalogue, presets
    from ablate.building import model_settings

    settings = model_settings({"preset": name})
    summary = catalogue.text(catalogue.PRESETS, name)
    known = {"preset": name, "summary": summary, "scales": presets.scales(name)}
    return {**known, **_model_facts(settings, settings.max_seq_len)}


@_aside()
def describe_variants(wanted: Wanted, only: str | None) -> dict[str, Any]:
    """The shapes and costs, stage by stage, of an experiment's variants, or of one of them. Raises `FileFaults`."""
    experiment = read(wanted)
    known = [variant.name for variant in experiment.variants]
    if only is not None and only not in known:
        raise document.FileFaults([f"{wanted.file}: no variant '{only}'\n  known: {', '.join(known)}"])
    variants = [v for v in experiment.variants if only in (None, v.name)]
    facts = [{"variant": v.name, **_model_facts(v.settings.model, v.settings.train.length)} for v in variants]
    return {"name": experiment.name, "variants": facts}


def _model_facts(settings: Any, tokens: int) -> dict[str, Any]:
    from ablate.cost import cache_elements, cost, stages

    price, empty = cost(settings, tokens), cache_elements(settings, 0, 0)
    one, source = cache_elements(settings, 1, 0), cache_elements(settings, 0, 1)
    told = [{key: value for key, value in stage.items() if key != "terms"} for stage in stages(settings, tokens)]
    return {
        "params_total": price.params_total,
        "params_active": price.params_active,
        "params_embedding": price.params_embedding,
        "params_non_embedding": price.params_non_embedding,
        "flops_per_token": price.flops_per_token,
        "flops_at_tokens": tokens,
        "kv_cache_elements_per_token": None if one is None or empty is None else one - empty,
        "kv_cache_elements_per_source_token": None if source is None or empty is None else source - empty,
        "stages": told,
        "settings": settings.model_dump(mode="json"),
    }


def ui(results: Path, port: int, names: Sequence[str]) -> int:
    """MLflow's UI over the store until it is stopped."""
    from ablate.mlflow_ui import serve

    return serve(results, port, list(names) or None, lambda line: print(visible(line), flush=True))

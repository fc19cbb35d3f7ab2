"""What the verbs print for people, out of the same facts that `--json` gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ablate.terminal import echo


def print_claims(claims: Sequence[Mapping[str, Any]]) -> None:
    """Each claim and its verdict, or why it has none."""
    for each in claims:
        echo(f"{each['verdict']}: {' '.join(each['claim'].split())}" + (f" ({each['why']})" if each["why"] else ""))


def print_plan(facts: Mapping[str, Any]) -> None:
    """What would run, and what each variant costs."""
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
    print_claims(facts["claims"])


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


def print_choice(facts: Mapping[str, Any]) -> None:
    """A choice: what it is, and its settings."""
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


def print_model(facts: Mapping[str, Any], title: str) -> None:
    """A model, stage by stage."""
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


def print_status(facts: Mapping[str, Any]) -> None:
    """The trials by outcome, what runs, and what is left."""
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
    print_claims(facts["claims"])


def print_noise(facts: Mapping[str, Any]) -> None:
    """How noisy times are here."""
    from tabulate import tabulate

    from ablate.noise import HEADS, lines, verdict

    echo(tabulate(lines(facts), HEADS, "simple", disable_numparse=True))
    echo(f"\n{verdict(facts)}")


def print_machine(facts: Mapping[str, Any]) -> None:
    """What this machine can measure."""
    from tabulate import tabulate

    from ablate.doctor import lines

    echo(tabulate(lines(facts), ("what", "here", ""), "simple", disable_numparse=True))


def print_gates(facts: Mapping[str, Any]) -> None:
    """Which variants passed which gates."""
    from tabulate import tabulate

    from ablate.asked import many

    heads = ("variant", "gate", "result", "detail")
    rows = [(each["variant"], *gate.values()) for each in facts["variants"] for gate in each["gates"]]
    echo(tabulate(rows, heads, "simple", disable_numparse=True))
    for each in facts["invalid"]:
        echo(f"invalid: {each['variant']}: {each['reason']}")
    passed = sum(each["passed"] for each in facts["variants"])
    echo(f"{facts['name']}: {passed} of {many(len(facts['variants']), 'variant')} passed")


def print_faults(facts: Mapping[str, Any]) -> None:
    """What is damaged of what is stored."""
    from ablate.asked import many

    for each in facts["faults"]:
        echo(f"{each['file']}: {each['fault']}\n  {each['cure']}")
    rows = ", ".join(f"{number} {kind}" for kind, number in facts["stored"].items())
    older = f"; {many(facts['without_checksum'], 'file')} from before there were checksums" * bool(
        facts["without_checksum"]
    )
    found = many(len(facts["faults"]), "fault") if facts["faults"] else "all is well"
    echo(f"{facts['folder']}: {rows}{older}; {found}")


def print_compacted(facts: Mapping[str, Any]) -> None:
    """Which files were merged."""
    merged = ", ".join(f"{number} {kind}" for kind, number in facts["merged"].items())
    removed = f"; removed what killed writers left: {', '.join(facts['removed'])}" if facts["removed"] else ""
    damaged = (
        f"; left alone, for `results verify` to tell of: {', '.join(facts['damaged'])}" if facts["damaged"] else ""
    )
    echo(f"{facts['folder']}: small files merged: {merged}{removed}{damaged}")


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

"""The quickstart with few steps: as it stands, after a lack of memory, in fp32, by another kernel, twice the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from gpu_checks import rows
from gpu_checks.ledger import Failed, Setup, Stage, expect, on_cuda
from gpu_checks.runs import Ran, earlier, run

FILE = "experiments/quickstart.yaml"

MOE = "{feed_forward: {name: moe, n_experts: 8, top_k: 2, d_ff: 84}}"

FEW = f"{{gqa: {{attention: {{name: gqa, n_kv_heads: 2}}}}, moe: {MOE}}}"

SHORT = {"seeds": 1, "train.steps": 30, "train.warmup_steps": 3, "train.eval_every": 15, "variants": FEW}

QUICK = {
    "baseline.n_layers": 1,
    "train.steps": 4,
    "train.batch_tokens": 256,
    "train.eval_every": 4,
    "train.eval_tokens": 256,
    "profile.rounds": 1,
    "variants": f"{{moe: {MOE}}}",
}

OTHERS = {
    "huge": "{vocab_size: 2M, train: {batch_tokens: 65536}}",
    "moe": MOE,
    "fp32": "{train: {precision: fp32}}",
    "flex": "{attention: {name: mha, kernel: flex}, train: {precision: fp32}}",
    "steady": f"{{{MOE[1:-1]}, train: {{deterministic: true}}}}",
    "steady_again": f"{{{MOE[1:-1]}, train: {{deterministic: true, eval_every: 2}}}}",
}
"""In this order. `steady_again` differs in nothing but how often it is evaluated, which must change no bit."""


def short(setup: Setup) -> dict[str, object]:
    """Few steps, in bf16."""
    return SHORT | (QUICK if setup.quick else {}) | {"train.precision": "bf16"}


def bf16(setup: Setup) -> Ran:
    """Two of its variants in bf16."""
    return run(setup, "bf16", FILE, short(setup), keep=True)


def the_cache_has_the_known_size(ran: Ran) -> str:
    """The first variant caches two vectors of its heads a token and layer, in the width of the precision."""
    row = ran.row(ran.names[0])
    model, width = json.loads(row["config"])["model"], {"fp32": 4, "bf16": 2}[row["precision"]]
    known = 2 * model["n_layers"] * model["n_heads"] * model["attention"]["head_dim"] * width
    return expect(row["kv_cache_bytes_per_token"] == known, f"{row['kv_cache_bytes_per_token']} of {known} bytes")


def nothing_was_compiled(ran: Ran) -> str:
    """Where nothing asks for it, nothing is compiled."""
    compiled = ran.trials["compile_seconds"].dropna()
    return expect(len(compiled) == 0, "no compile time" if len(compiled) == 0 else rows.told(compiled))


# --- Other ways -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Others:
    """The first run, and the one of other ways."""

    first: Ran
    ran: Ran


def others(setup: Setup) -> Others:
    """After a variant that no memory holds: one of the first run, fp32, a flexible kernel, and one variant twice."""
    named = {name: each for name, each in OTHERS.items() if name != "flex" or setup.device == "cuda"}
    variants = ", ".join(f"{name}: {change}" for name, change in named.items())
    ran = run(setup, "others", FILE, short(setup) | {"variants": f"{{{variants}}}"})
    return Others(earlier(setup, "bf16", FILE), ran)


def a_lack_of_memory_is_a_row(others: Others) -> str:
    """A variant that no memory holds is a row with outcome `oom`, and the command's exit status is 1."""
    row = others.ran.stored("huge")
    if row["status"] != "oom":
        raise Failed(f"{row['status']}: {row['reason']}", others.ran.log(row))
    return expect(others.ran.said.late or others.ran.said.status == 1, str(row["reason"])[:100])


def the_next_trials_are_ok(others: Others) -> str:
    """All other trials, before and after it, are `ok`."""
    names = [name for name in others.ran.names if name != "huge"]
    return ", ".join(f"{name} {others.ran.row(name)['status']}" for name in names)


def memory_does_not_depend_on_the_place(others: Others) -> str:
    """What the next one allocated at most is what it did in another place of the grid, to the byte; what it reserved,
    within 5 %.
    """
    rows = [ran.row("moe") for ran in (others.first, others.ran)]
    allocated, reserved = ([int(row[f"peak_{what}_bytes"]) for row in rows] for what in ("allocated", "reserved"))
    holds = allocated[0] == allocated[1] and abs(reserved[0] / reserved[1] - 1) <= 0.05
    told = (f"{what} {a:,} and {b:,}" for what, (a, b) in {"allocated": allocated, "reserved": reserved}.items())
    return expect(holds, ", ".join(told))


def in_fp32(judge: Callable[[Ran], str]) -> Callable[[Others], str]:
    """The same check of the variant in fp32 alone."""

    def judged(others: Others) -> str:
        return judge(others.ran.of("fp32"))

    judged.__name__, judged.__doc__ = f"fp32_{judge.__name__}", f"In fp32: {judge.__doc__}"
    return judged


def the_flexible_kernel_trains_to_the_same_loss(others: Others) -> str:
    """Flex attention, compiled, ends with the fused one's validation loss within 0.1 %, and is told as a kernel."""
    flex, fused = others.ran.row("flex"), others.ran.row("fp32")
    apart = abs(flex["val_loss"] / fused["val_loss"] - 1)
    told = f"{flex['val_loss']:.5f} and {fused['val_loss']:.5f}; {flex['kernels']}"
    return expect(apart < 1e-3 and "flex" in flex["kernels"], told)


def the_same_bits_come_out(others: Others) -> str:
    """A deterministic mixture of experts ends with the same losses, to the last bit, twice, and its rows say so."""
    twice = [others.ran.row(name) for name in ("steady", "steady_again")]
    losses = [[float(row[name]) for name in ("train_loss", "val_loss")] for row in twice]
    said = all(row["deterministic"] for row in twice)
    return expect(said and losses[0] == losses[1], f"{losses[0]} and {losses[1]}")


FIRST = Stage(
    "quickstart",
    "The quickstart, bf16",
    50,
    bf16,
    (
        rows.every_trial_is_ok,
        rows.it_ran_where_it_should,
        rows.losses_are_finite,
        rows.steps_are_timed,
        rows.parts_make_up_a_step,
        on_cuda(rows.memory_is_told),
        on_cuda(rows.retries_are_recorded),
        the_cache_has_the_known_size,
        rows.the_cache_is_one_size_in_three_ways,
        rows.decoding_is_timed,
        on_cuda(rows.a_fused_attention_ran),
        rows.utilisation_is_a_share,
        on_cuda(rows.surroundings_are_told),
        nothing_was_compiled,
        rows.the_report_is_written,
    ),
)

LATER = Stage(
    "others",
    "The quickstart, in other ways",
    100,
    others,
    (
        a_lack_of_memory_is_a_row,
        the_next_trials_are_ok,
        on_cuda(memory_does_not_depend_on_the_place),
        in_fp32(the_cache_has_the_known_size),
        in_fp32(rows.the_cache_is_one_size_in_three_ways),
        in_fp32(rows.decoding_is_timed),
        on_cuda(in_fp32(rows.a_fused_attention_ran)),
        in_fp32(rows.utilisation_is_a_share),
        on_cuda(the_flexible_kernel_trains_to_the_same_loss),
        the_same_bits_come_out,
    ),
)

"""The quickstart with few steps: in both precisions, after a lack of memory, twice the same, with a flexible kernel."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gpu_checks import rows
from gpu_checks.ledger import Failed, Setup, Stage, expect, on_cuda
from gpu_checks.runs import Ran, earlier, run

FILE = "experiments/quickstart.yaml"

SHORT = {"seeds": 1, "train.steps": 30, "train.warmup_steps": 3, "train.eval_every": 15}

QUICK = {
    "baseline.n_layers": 1,
    "train.steps": 4,
    "train.batch_tokens": 256,
    "train.eval_every": 4,
    "train.eval_tokens": 256,
    "profile.rounds": 1,
    "variants": "{moe: {feed_forward: {name: moe, n_experts: 2, top_k: 1}}}",
}

HUGE = "huge: {vocab_size: 2M, train: {batch_tokens: 65536}}"


def short(setup: Setup, **changed: object) -> dict[str, object]:
    """Few steps; `changed` are settings of `train`."""
    return SHORT | (QUICK if setup.quick else {}) | {f"train.{key}": value for key, value in changed.items()}


def bf16(setup: Setup) -> Ran:
    """All its variants in bf16."""
    return run(setup, "bf16", FILE, short(setup, precision="bf16"), keep=True)


def fp32(setup: Setup) -> Ran:
    """Baseline and GQA in fp32, on a GPU with the flexible kernel too."""
    flex = ", flex: {attention: {name: mha, kernel: flex}}" if setup.device == "cuda" else ""
    variants = {"variants": f"{{gqa: {{attention: {{name: gqa, n_kv_heads: 2}}}}{flex}}}"}
    return run(setup, "fp32", FILE, short(setup, precision="fp32") | variants)


def the_cache_has_the_known_size(ran: Ran) -> str:
    """The baseline caches two vectors of its heads a token and layer, in the width of the precision."""
    row = ran.row("baseline")
    model, width = json.loads(row["config"])["model"], {"fp32": 4, "bf16": 2}[row["precision"]]
    known = 2 * model["n_layers"] * model["n_heads"] * model["attention"]["head_dim"] * width
    return expect(row["kv_cache_bytes_per_token"] == known, f"{row['kv_cache_bytes_per_token']} of {known} bytes")


def nothing_was_compiled(ran: Ran) -> str:
    """Where nothing asks for it, nothing is compiled."""
    compiled = ran.trials["compile_seconds"].dropna()
    return expect(len(compiled) == 0, "no compile time" if len(compiled) == 0 else rows.told(compiled))


def the_flexible_kernel_trains_to_the_same_loss(ran: Ran) -> str:
    """Flex attention, compiled, ends with the baseline's validation loss within 0.1 %, and is told as a kernel."""
    flex, fused = ran.row("flex"), ran.row("baseline")
    apart = abs(flex["val_loss"] / fused["val_loss"] - 1)
    told = f"{flex['val_loss']:.5f} and {fused['val_loss']:.5f}"
    return expect(apart < 1e-3 and "flex" in flex["kernels"], told if apart < 1e-3 else f"{told}: {apart:.2%} apart")


# --- After a lack of memory -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twice:
    """The same variants in two runs."""

    first: Ran
    second: Ran


def after_huge(setup: Setup) -> Twice:
    """Variants of the first stage in another order, after one that no memory holds."""
    moe = "moe: {feed_forward: {name: moe, n_experts: 2, top_k: 1}}"
    moe = moe if setup.quick else "moe: {feed_forward: {name: moe, n_experts: 8, top_k: 2, d_ff: 84}}"
    variants = {"variants": f"{{{HUGE}, {moe}, post_norm: {{block: post_norm}}}}"}
    second = run(setup, "after-huge", FILE, short(setup, precision="bf16") | variants)
    return Twice(earlier(setup, "bf16", FILE), second)


def a_lack_of_memory_is_a_row(twice: Twice) -> str:
    """A variant that no memory holds is a row with outcome `oom`, and the command's exit status is 1."""
    row = twice.second.stored("huge")
    if row["status"] != "oom":
        raise Failed(f"{row['status']}: {row['reason']}", twice.second.log(row))
    return expect(twice.second.said.late or twice.second.said.status == 1, str(row["reason"])[:100])


def the_next_trials_are_ok(twice: Twice) -> str:
    """The trials before and after it are `ok`."""
    others = [name for name in twice.second.names if name != "huge"]
    return ", ".join(f"{name} {twice.second.row(name)['status']}" for name in others)


def memory_does_not_depend_on_the_place(twice: Twice) -> str:
    """What each allocated at most is the same as in the other order, to the byte; what it reserved, within 5 %."""
    names = [name for name in twice.second.names if name in twice.first.names]
    columns = ("peak_allocated_bytes", "peak_reserved_bytes")
    pairs = [
        [int(ran.row(name)[column]) for ran in (twice.first, twice.second)] for column in columns for name in names
    ]
    allocated, reserved = pairs[: len(names)], pairs[len(names) :]
    holds = all(a == b for a, b in allocated) and all(abs(a / b - 1) <= 0.05 for a, b in reserved)
    return expect(holds, ", ".join(f"{name} {a:,} and {b:,}" for name, (a, b) in zip(names, allocated, strict=True)))


# --- Twice the same ---------------------------------------------------------------------------------------------------


def deterministic(setup: Setup) -> Twice:
    """A mixture of experts, whose dispatch is what varies if anything does, twice."""
    moe = {"baseline.feed_forward": "{name: moe, n_experts: 8, top_k: 2, d_ff: 84}", "variants": "{}"}
    sets = short(setup, precision="bf16", deterministic="true") | moe
    return Twice(*(run(setup, f"deterministic-{place}", FILE, sets) for place in ("first", "second")))


def the_same_bits_come_out(twice: Twice) -> str:
    """A deterministic mixture of experts ends with the same losses, to the last bit, in two runs."""
    found = [[float(ran.row("baseline")[name]) for name in ("train_loss", "val_loss")] for ran in vars(twice).values()]
    return expect(found[0] == found[1], f"{found[0]} and {found[1]}")


def the_rows_say_so(twice: Twice) -> str:
    """Their rows say `deterministic`."""
    return expect(all(ran.row("baseline")["deterministic"] for ran in vars(twice).values()), "both")


FIRST = Stage(
    "quickstart",
    "The quickstart, bf16",
    130,
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

LATER = [
    Stage(
        "memory",
        "After a lack of memory, in another order",
        75,
        after_huge,
        (a_lack_of_memory_is_a_row, the_next_trials_are_ok, on_cuda(memory_does_not_depend_on_the_place)),
    ),
    Stage(
        "fp32",
        "The quickstart, fp32",
        90,
        fp32,
        (
            rows.every_trial_is_ok,
            the_cache_has_the_known_size,
            rows.the_cache_is_one_size_in_three_ways,
            rows.decoding_is_timed,
            on_cuda(rows.a_fused_attention_ran),
            rows.utilisation_is_a_share,
            on_cuda(the_flexible_kernel_trains_to_the_same_loss),
        ),
    ),
    Stage("deterministic", "The same bits", 60, deterministic, (the_same_bits_come_out, the_rows_say_so)),
]

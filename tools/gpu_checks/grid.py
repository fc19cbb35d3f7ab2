"""The grid of attentions and experts at a size that keeps a GPU busy: eager, compiled, and how much of it fits."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pandas as pd

from gpu_checks import rows
from gpu_checks.ledger import Failed, Setup, Skipped, Stage, expect, on_cuda
from gpu_checks.runs import Ran, earlier, run

FILE = "experiments/grid.yaml"

SIZE = {
    "baseline.d_model": 1024,
    "baseline.n_layers": 4,
    "baseline.n_heads": 16,
    "seeds": 1,
    "train.steps": 300,
    "train.batch_tokens": 8192,
    "train.warmup_steps": 15,
    "train.eval_every": 300,
    "train.lr": "3e-4",
    "profile": "{prefill: {batch: [8], tokens: [512]}, decode: {batch: [1, 32], context: [512], new_tokens: 32}}",
}

QUICK = {
    "baseline.d_model": 64,
    "baseline.n_layers": 1,
    "baseline.n_heads": 4,
    "train.steps": 4,
    "train.batch_tokens": 256,
    "train.seq_len": 64,
    "train.warmup_steps": 1,
    "train.eval_every": 4,
    "train.eval_tokens": 256,
    "profile": "{prefill: {tokens: [32]}, decode: {context: [32], new_tokens: 4}, rounds: 1}",
}

VARIANTS = {
    "mla": "{attention: {name: mla, kv_lora_rank: 256, qk_rope_head_dim: 32}}",
    "moe": "{feed_forward: {name: moe, n_experts: 8, top_k: 2, d_ff: 1360}}",
    "deep": "{n_layers: 16}",
}

QUICK_VARIANTS = {
    "mla": "{attention: {name: mla, kv_lora_rank: 16, qk_rope_head_dim: 8}}",
    "deep": "{n_layers: 4}",
}


def sized(setup: Setup, *left_out: str) -> dict[str, object]:
    """The settings, with the variants but those left out."""
    variants = QUICK_VARIANTS if setup.quick else VARIANTS
    named = ", ".join(f"{name}: {change}" for name, change in variants.items() if name not in left_out)
    return SIZE | (QUICK if setup.quick else {}) | {"variants": f"{{{named}}}"}


def eager(setup: Setup) -> Ran:
    """As it stands."""
    return run(setup, "eager", FILE, sized(setup), keep=True)


def four_times_the_layers_take_longer(ran: Ran) -> str:
    """A variant of four times the layers takes 2 to 6 times as long to train and to decode: no launch is timed. (On the
    CPU, where calls wait, and at a tiny size: longer.)
    """
    deep, base = ran.row("deep"), ran.row("baseline")
    names = ("step_seconds_p50", "decode_seconds_per_token_p50")
    ratios = {name: float(deep[name]) / float(base[name]) for name in names}
    told = ", ".join(f"{name} {ratio:.2f} times" for name, ratio in ratios.items())
    low, high = (2.0, 6.0) if ran.setup.device == "cuda" and not ran.setup.quick else (1.0, math.inf)
    return expect(all(low < ratio < high for ratio in ratios.values()), told)


def the_latent_is_read_as_it_lies(ran: Ran) -> str:
    """MLA says which way its latent was read in decoding, and caches less than the baseline does."""
    mla, base = ran.row("mla"), ran.row("baseline")
    sizes = [int(row["kv_cache_bytes_per_token"]) for row in (mla, base)]
    paths = [name for name in json.loads(mla["kernels"])["decode"] if name.startswith("path ")]
    return expect(paths and sizes[0] < sizes[1], f"{', '.join(paths)}; {sizes[0]} and {sizes[1]} bytes a token")


def bandwidth_is_a_share(ran: Ran) -> str:
    """Decoding uses more than nothing and no more than all of the memory bandwidth that was measured here."""
    if "decode_bandwidth_share" not in ran.results.trials:
        raise Skipped("not built: there is no column decode_bandwidth_share")
    shares = ran.every("decode_bandwidth_share")["decode_bandwidth_share"].astype(float)
    return expect(((shares > 0) & (shares <= 1)).all(), rows.told(shares, "{:.1%}"))


# --- Compiled ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Both:
    """The same variants compiled and eager."""

    compiled: Ran
    eager: Ran

    @property
    def pairs(self) -> dict[str, tuple[pd.Series, pd.Series]]:
        """Rows of each variant, compiled and eager."""
        return {name: (self.compiled.row(name), self.eager.row(name)) for name in self.compiled.names}


def compiled(setup: Setup) -> Both:
    """The same with `train.compile`; what makes nothing new but takes time is left out."""
    sets = sized(setup, "deep", "mla") | {"train.compile": "true", "profile": "{}"}
    return Both(run(setup, "compiled", FILE, sets), earlier(setup, "eager", FILE))


def every_compiled_trial_is_ok(both: Both) -> str:
    """Every variant is `ok` compiled too."""
    return f"{len(both.pairs)} trials"


def the_rows_say_compiled(both: Both) -> str:
    """The rows say `compiled`, and have compile time, graph breaks and recompiles."""
    found = both.compiled.every("compiled", "compile_seconds", "graph_breaks", "recompiles")
    if not found["compiled"].all():
        faults = both.compiled.trials["compile_fault"].dropna()
        raise Failed(f"not compiled: {', '.join(f'{name}: {why}' for name, why in faults.items())}")
    told = (
        f"{name} {row.compile_seconds:.1f} s, {row.graph_breaks}, {row.recompiles}" for name, row in found.iterrows()
    )
    return "; ".join(told)


def the_losses_are_those_of_eager(both: Both) -> str:
    """Validation losses are within 2 % of those that eager training ended with."""
    found = {name: (float(new["val_loss"]), float(old["val_loss"])) for name, (new, old) in both.pairs.items()}
    told = ", ".join(f"{name} {new:.4f} and {old:.4f}" for name, (new, old) in found.items())
    return expect(all(abs(new / old - 1) < 0.02 for new, old in found.values()), told)


def compile_time_is_in_no_step(both: Both) -> str:
    """The slowest tenth of the steps begins at less than twice the median: no step has compile time in it."""
    found = both.compiled.every("step_seconds_p50", "step_seconds_p90").astype(float)
    ratios = found["step_seconds_p90"] / found["step_seconds_p50"]
    return expect((ratios < 2).all(), rows.told(ratios, "{:.2f}"))


def the_steps_are_not_slower(both: Both) -> str:
    """A compiled step takes at most 1.2 times as long as an eager one."""
    ratios = {
        n: float(new["step_seconds_p50"]) / float(old["step_seconds_p50"]) for n, (new, old) in both.pairs.items()
    }
    return expect(all(ratio < 1.2 for ratio in ratios.values()), ", ".join(f"{n} {r:.2f}" for n, r in ratios.items()))


def its_utilisation_is_a_share(both: Both) -> str:
    """MFU and HFU are over 0 and at most 1, compiled too."""
    return rows.utilisation_is_a_share(both.compiled)


# --- What fits --------------------------------------------------------------------------------------------------------


WIDE = {"baseline.d_model": 64, "baseline.n_layers": 1, "baseline.n_heads": 4, "baseline.vocab_size": 131072}
"""What fits of it is few tokens, since the logits fill the memory: no try takes long."""


def capacity(setup: Setup) -> Ran:
    """The grid's baseline with a wide vocabulary, asked how much of it fits."""
    sets = sized(setup) | {"variants": "{}", "profile": "{max_batch: true}", "train.steps": 4, "train.warmup_steps": 1}
    sets |= {} if setup.quick else WIDE
    return run(setup, "capacity", FILE, sets)


def the_largest_are_told(ran: Ran) -> str:
    """The largest batch and length that fit are whole numbers over 0, each with what ended the search."""
    names = ("largest_batch", "largest_length", "largest_batch_limit", "largest_length_limit")
    row = ran.every(*names).iloc[0]
    told = ", ".join(f"{name} {row[name]}" for name in names)
    return expect(row["largest_batch"] > 0 and row["largest_length"] > 0, told)


FIRST = Stage(
    "grid",
    "The profile grid, bf16, eager",
    70,
    eager,
    (
        rows.every_trial_is_ok,
        four_times_the_layers_take_longer,
        rows.losses_are_finite,
        rows.steps_are_timed,
        rows.parts_make_up_a_step,
        on_cuda(rows.memory_is_told),
        on_cuda(rows.live_tensors_are_within_what_is_allocated),
        on_cuda(rows.retries_are_recorded),
        rows.the_cache_is_one_size_in_three_ways,
        rows.decoding_is_timed,
        the_latent_is_read_as_it_lies,
        bandwidth_is_a_share,
        on_cuda(rows.a_fused_attention_ran),
        rows.utilisation_is_a_share,
        on_cuda(rows.utilisation_by_the_data_sheet_is_a_share),
        on_cuda(rows.energy_is_plausible),
        on_cuda(rows.surroundings_are_told),
        rows.the_report_is_written,
    ),
)

COMPILED = Stage(
    "compiled",
    "The profile grid, bf16, compiled",
    70,
    compiled,
    (
        every_compiled_trial_is_ok,
        the_rows_say_compiled,
        the_losses_are_those_of_eager,
        on_cuda(compile_time_is_in_no_step),
        on_cuda(the_steps_are_not_slower),
        its_utilisation_is_a_share,
    ),
)

CAPACITY = Stage("capacity", "What fits", 65, capacity, (the_largest_are_told,))

"""The grid's baseline over growing lengths, and timed again in rounds of fresh processes."""

from __future__ import annotations

from itertools import pairwise

from gpu_checks.grid import FILE, sized
from gpu_checks.ledger import Failed, Setup, Stage, expect
from gpu_checks.runs import Ran, run

ROUNDS = 2
STEP = "step_seconds_p50"


def again(setup: Setup) -> Ran:
    """A few steps, the lengths, and then the rounds: the baseline and the baseline again."""
    lengths = [16, 32, 64] if setup.quick else [128, 256, 512]
    profile = f"{{lengths: {lengths}, repeats: {ROUNDS}, prefill: {{tokens: [32]}}}}"
    few = {"variants": "{}", "profile": profile, "train.steps": 4, "train.warmup_steps": 1}
    return run(setup, "again", FILE, sized(setup) | few)


def time_and_memory_grow(ran: Ran) -> str:
    """Of each longer sequence a training pass takes more memory, and of the longest it takes at least as much time."""
    points = {metric: _by_length(ran, metric) for metric in ("training_pass_bytes_p50", "training_pass_seconds_p50")}
    memory, seconds = points.values()
    growing = all(small < large for small, large in pairwise(memory))
    told = ", ".join(
        f"{size / 2**20:.1f} MiB in {time * 1e3:.1f} ms" for size, time in zip(memory, seconds, strict=True)
    )
    return expect(len(memory) == 3 and growing and 0 < seconds[0] <= 1.5 * seconds[-1], told)


def every_round_is_whole(ran: Ran) -> str:
    """Every member of every round ends as `ok`, in the order of the rounds, the baseline once more in each."""
    rows = ran.results.repeats.drop_duplicates("place").sort_values("place")
    order = [(int(row["round"]), bool(row["is_partner"])) for _, row in rows.iterrows()]
    whole = [(number, partner) for number in range(ROUNDS) for partner in (False, True)]
    return expect(set(rows["status"]) == {"ok"} and order == whole, f"{len(order)} of {len(whole)} members")


def rounds_time_what_trials_do(ran: Ran) -> str:
    """A step in the rounds takes between a third and three times as long as in the trial."""
    rows = ran.results.repeats
    values = rows["value"][rows["metric"] == STEP].astype(float)
    if not len(values):
        raise Failed("no step was timed")
    ratio = values.median() / float(ran.row("baseline")[STEP])
    return expect(1 / 3 < ratio < 3, f"{ratio:.2f} times")


def _by_length(ran: Ran, metric: str) -> list[float]:
    rows = ran.results.profiles
    chosen = rows[(rows["phase"] == "lengths") & (rows["metric"] == metric)]
    return [float(value) for value in chosen.sort_values("context")["value"]]


STAGE = Stage(
    "again",
    "Growing lengths, and rounds",
    45,
    again,
    (time_and_memory_grow, every_round_is_whole, rounds_time_what_trials_do),
)

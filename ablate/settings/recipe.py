"""The training recipe."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ablate.choice import Count, Rate, Real, Settings, SettingsError, Whole, as_whole
from ablate.settings.meant import where_meant


class OptimizerSettings(Settings):
    """How weights are updated."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    betas: list[Rate] | None = Field([0.9, 0.95], min_length=2, max_length=2, description="decay of Adam's averages")
    eps: Real | None = Field(1e-8, gt=0, description="Adam's guard against division by zero")
    momentum: Rate | None = Field(0.9, description="of SGD")
    weight_decay: Real = Field(0.1, ge=0, description="on matrices only, never on norms and biases")

    def resolve(self) -> OptimizerSettings:
        """A copy that says nothing of what this optimizer does not have."""
        adaptive = self.name != "sgd"
        return where_meant(self, betas=adaptive, eps=adaptive, momentum=not adaptive)


OF_NO_NUMBER = ("max_seconds", "checkpoint_every", "keep_checkpoints")
"""Settings that determine no number of a training: no part of its identity, and the same for all variants."""

BUDGETS = ("steps", "tokens", "flops", "seconds", "tokens_per_param")
"""The ways to say how long to train; the file gives one of them."""

ADDED = ("flops", "seconds", "tokens_per_param", "data_seed", "init_seed")
"""Settings that there were not always. Where they say nothing they are no part of an identity: results that were
stored before keep theirs."""

ENDLESS = 2**53
"""Steps; more than any run makes."""

Amount = Annotated[float, BeforeValidator(as_whole), Field(gt=0)]
Seed = Annotated[Whole, Field(ge=0, lt=2**31)]


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class TrainSettings(Settings):
    """The recipe. Exactly one of `steps`, `tokens`, `flops`, `seconds` and `tokens_per_param` says how long."""

    steps: Count | None = Field(None, description="optimizer steps")
    tokens: Count | None = Field(None, description="training tokens; rounded up to whole steps")
    flops: Amount | None = Field(
        None, description="FLOPs of the whole training, 3 times those of the forward passes; rounded up to whole steps"
    )
    seconds: Amount | None = Field(
        None,
        description="seconds of training, evaluations and checkpoints left out; the schedule follows the share of them "
        "that has passed, and how many steps that is differs between trials",
    )
    tokens_per_param: Amount | None = Field(
        None,
        description="training tokens for each parameter that a token meets; Hoffmann et al. (2022, arXiv 2203.15556) "
        "found about 20",
    )
    seq_len: Count | None = Field(None, description="tokens of a training sequence; max_seq_len unless given")
    batch_tokens: Count = Field(8192, description="tokens of one optimizer step")
    accumulate: Count = Field(
        1, description="pieces in which a step's batch is computed; dropout draws other masks with another number"
    )
    lr: Real = Field(1e-3, gt=0, description="peak learning rate; a factor for `schedule: noam`")
    schedule: Literal["constant", "linear", "cosine", "noam"] = "cosine"
    warmup_steps: Whole = Field(0, ge=0, description="steps of linear warm-up; the peak is reached at its end")
    final_lr: Rate | None = Field(0.1, description="where linear and cosine end, as a fraction of the peak")
    optimizer: Annotated[OptimizerSettings, BeforeValidator(_named)] = OptimizerSettings()
    grad_clip: Real | None = Field(1.0, gt=0, description="largest gradient norm; null for none")
    label_smoothing: Rate = Field(0.0, description="of the training loss; held-out losses are without")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="fp32, or bf16 autocast over fp32 weights")
    eval_every: Count | None = Field(None, description="steps between evaluations; a tenth of the run unless given")
    data_seed: Seed | None = Field(None, description="of the order of the data; the trial's own unless given")
    init_seed: Seed | None = Field(None, description="of the weights at the start; the trial's own unless given")
    eval_tokens: Count | None = Field(65_536, description="held-out tokens of an evaluation; null for all of them")
    threads: Count | None = Field(None, description="CPU threads; what this process may use unless given")
    compile: bool = Field(False, description="training steps run through torch.compile; all else runs as it is written")
    deterministic: bool = Field(False, description="refuse operators whose result varies from run to run")
    max_seconds: Real | None = Field(None, gt=0, description="the trial is ended as `timeout` after this")
    checkpoint_every: Count | None = Field(
        None, description="steps between checkpoints; about a minute of training unless given"
    )
    keep_checkpoints: bool = Field(False, description="the last two stay when the trial has ended")

    @property
    def length(self) -> int:
        """`seq_len` once resolved."""
        assert self.seq_len is not None, "resolve() comes first"
        return self.seq_len

    @property
    def n_steps(self) -> int:
        """Optimizer steps of the whole run; where its seconds are counted instead, more than any run makes."""
        if self.seconds is not None:
            return ENDLESS
        return self.steps or math.ceil((self.tokens or 0) / self.batch_tokens)

    @property
    def planned_steps(self) -> int | None:
        """The same, None where nobody knows before it is over."""
        return None if self.seconds is not None else self.n_steps

    def seed_of_weights(self, seed: int) -> int:
        """What a trial with this seed draws its weights from."""
        return seed if self.init_seed is None else self.init_seed

    def resolve(self, max_seq_len: int) -> TrainSettings:
        """A copy in which every default stands as a number, and the length as steps where no model is needed for it."""
        update = {"seq_len": self.seq_len or max_seq_len, "optimizer": self.optimizer.resolve()}
        copy = where_meant(self.model_copy(update=update), final_lr=self.schedule in ("linear", "cosine"))
        return copy if self.steps is self.tokens is None else copy.lasting(self.n_steps)

    def lasting(self, steps: int) -> TrainSettings:
        """A copy whose length is given as steps."""
        every = self.eval_every or max(1, steps // 10)
        return self.model_copy(update={**dict.fromkeys(BUDGETS), "steps": steps, "eval_every": every})

    def faults(self) -> list[SettingsError]:
        """Settings that cannot go together."""
        found = []
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            ways = f"{', '.join(map(repr, BUDGETS[:-1]))} and {BUDGETS[-1]!r}"
            found.append(SettingsError((), f"exactly one of {ways} says how long to train", "give one"))
        elif given[0] in ("steps", "tokens"):
            found += self.warmup_faults()
        if self.seconds is not None and self.max_seconds is not None and self.max_seconds <= self.seconds:
            message = f"max_seconds {self.max_seconds:g} ends the trial before its {self.seconds:g} seconds of training"
            found.append(SettingsError(("max_seconds",), message, "give more, or leave it out"))
        if self.schedule == "noam" and self.warmup_steps == 0:
            found.append(SettingsError(("warmup_steps",), "schedule noam needs a warm-up", "give warmup_steps"))
        return found

    def warmup_faults(self) -> list[SettingsError]:
        """A warm-up that is longer than the run. Only where the run's steps are known."""
        if self.warmup_steps <= self.n_steps:
            return []
        message = f"warmup_steps {self.warmup_steps} is more than the {self.n_steps} steps of the run"
        return [SettingsError(("warmup_steps",), message, f"at most {self.n_steps}")]

    def length_faults(self, max_seq_len: int) -> list[SettingsError]:
        """Lengths that do not fit the model, or do not come out even. Only for resolved settings."""
        found = []
        if self.length > max_seq_len:
            message = f"seq_len {self.length} is more than max_seq_len {max_seq_len}"
            found.append(SettingsError(("seq_len",), message, "raise max_seq_len or shorten seq_len"))
        if self.batch_tokens % (self.length * self.accumulate):
            pieces = f"{self.accumulate} pieces of " if self.accumulate > 1 else ""
            message = f"batch_tokens {self.batch_tokens} is not a multiple of {pieces}seq_len {self.length}"
            near = max(1, self.batch_tokens // (self.length * self.accumulate)) * self.length * self.accumulate
            found.append(SettingsError(("batch_tokens",), message, f"for example {near}"))
        return found

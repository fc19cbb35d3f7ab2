"""The training recipe."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ablate.choice import Count, Rate, Real, Settings, SettingsError, Whole
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


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class TrainSettings(Settings):
    """The recipe. Exactly one of `steps` and `tokens` says how long."""

    steps: Count | None = Field(None, description="optimizer steps")
    tokens: Count | None = Field(None, description="training tokens; rounded up to whole steps")
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
        """Optimizer steps of the whole run."""
        return self.steps or math.ceil((self.tokens or 0) / self.batch_tokens)

    def resolve(self, max_seq_len: int) -> TrainSettings:
        """A copy in which every default stands as a number, and the length as steps."""
        every = self.eval_every or max(1, self.n_steps // 10)
        resolved = {"seq_len": self.seq_len or max_seq_len, "steps": self.n_steps, "tokens": None, "eval_every": every}
        copy = self.model_copy(update={**resolved, "optimizer": self.optimizer.resolve()})
        return where_meant(copy, final_lr=self.schedule in ("linear", "cosine"))

    def faults(self) -> list[SettingsError]:
        """Settings that cannot go together."""
        found = []
        if (self.steps is None) == (self.tokens is None):
            found.append(SettingsError((), "exactly one of 'steps' and 'tokens' says how long to train", "give one"))
        elif self.warmup_steps > self.n_steps:
            message = f"warmup_steps {self.warmup_steps} is more than the {self.n_steps} steps of the run"
            found.append(SettingsError(("warmup_steps",), message, f"at most {self.n_steps}"))
        if self.schedule == "noam" and self.warmup_steps == 0:
            found.append(SettingsError(("warmup_steps",), "schedule noam needs a warm-up", "give warmup_steps"))
        return found

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

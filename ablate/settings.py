"""A variant's settings, typed: the model, the training recipe, what is profiled. Defaults have their home here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from ablate import registry
from ablate.attention import AttentionChoice
from ablate.block import BlockChoice
from ablate.choice import (
    Choice,
    Count,
    Faults,
    Path,
    Problem,
    Rate,
    Real,
    Settings,
    SettingsError,
    Shape,
    Size,
    Whole,
    validated,
)
from ablate.data import DataChoice
from ablate.feed_forward import FeedForwardChoice
from ablate.norm import NormChoice
from ablate.position import PositionChoice

LAYER_SLOTS = ("attention", "feed_forward", "norm", "block")
S = TypeVar("S", bound=Settings)


def _where_meant(settings: S, **meant: bool) -> S:
    """A copy in which settings that mean nothing are None, and those that mean something are not."""
    fields = type(settings).model_fields
    given = {key: getattr(settings, key) for key in meant}
    values = {key: fields[key].default if value is None else value for key, value in given.items()}
    return settings.model_copy(update={key: values[key] if means else None for key, means in meant.items()})


class Dropout(Settings):
    """Rates of dropout; a bare number in the file means all three."""

    embedding: Rate = Field(0.0, description="on the embeddings")
    attention: Rate = Field(0.0, description="on the attention weights")
    residual: Rate = Field(0.0, description="on what a sublayer adds")


def _spread(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"embedding": value, "attention": value, "residual": value}
    return value


class LayerRule(Settings):
    """An exception for some layers; of several that apply the last wins, slot by slot."""

    every: Count | None = Field(None, description="layers n, 2n, 3n, … counted from 1")
    first: Count | None = Field(None, description="the first n layers")
    attention: SerializeAsAny[AttentionChoice] | None = None
    feed_forward: SerializeAsAny[FeedForwardChoice] | None = None
    norm: SerializeAsAny[NormChoice] | None = None
    block: SerializeAsAny[BlockChoice] | None = None

    @model_validator(mode="after")
    def _says_where_and_what(self) -> Self:
        if self.every is None and self.first is None:
            cure = "say which layers, as in `every: 2`"
            raise SettingsError((), "a rule for layers needs 'every' or 'first'", cure)
        if all(getattr(self, slot) is None for slot in LAYER_SLOTS):
            cure = f"give one of: {', '.join(LAYER_SLOTS)}"
            raise SettingsError((), "a rule for layers needs a choice for them", cure)
        return self

    def applies(self, layer: int) -> bool:
        """Whether the rule is for layer `layer`, counted from 0."""
        by_step = self.every is not None and (layer + 1) % self.every == 0
        return by_step or (self.first is not None and layer < self.first)


class LayerSettings(Settings):
    """What one layer is made of."""

    attention: SerializeAsAny[AttentionChoice]
    feed_forward: SerializeAsAny[FeedForwardChoice]
    norm: SerializeAsAny[NormChoice]
    block: SerializeAsAny[BlockChoice]


class ModelSettings(Settings):
    """The architecture of one variant."""

    d_model: Size = Field(description="width of the residual path")
    n_layers: Count = Field(le=10_000, description="number of layers")
    n_heads: Size = Field(description="number of query heads")
    max_seq_len: Size = Field(description="longest sequence, in tokens")
    vocab_size: Size | None = Field(None, description="number of tokens; the tokenizer's unless given")
    attention: SerializeAsAny[AttentionChoice]
    position: SerializeAsAny[PositionChoice]
    feed_forward: SerializeAsAny[FeedForwardChoice]
    norm: SerializeAsAny[NormChoice]
    block: SerializeAsAny[BlockChoice]
    layers: list[LayerRule] = Field([], description="exceptions: [{every: 2, feed_forward: moe}]; later entries win")
    dropout: Annotated[Dropout, BeforeValidator(_spread)] = Field(Dropout(), description="a number, or one a place")
    tie_embeddings: bool = Field(False, description="whether the output head is the embedding")
    embed_scale: bool = Field(False, description="whether embeddings are multiplied by √d_model")
    init: Literal["normal", "xavier"] = Field("normal", description="how matrices are drawn")
    init_std: Real | None = Field(0.02, gt=0, description="standard deviation of `init: normal`")

    @property
    def shape(self) -> Shape:
        """The numbers that the slots share."""
        assert self.vocab_size is not None, "resolved() comes first"
        return Shape(
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            max_seq_len=self.max_seq_len,
            vocab_size=self.vocab_size,
            attention_dropout=self.dropout.attention,
        )

    def layer(self, index: int) -> LayerSettings:
        """What layer `index`, counted from 0, is made of."""
        slots = {slot: getattr(self, slot) for slot in LAYER_SLOTS}
        for rule in self.layers:
            if rule.applies(index):
                slots |= {slot: given for slot in LAYER_SLOTS if (given := getattr(rule, slot)) is not None}
        return LayerSettings.model_construct(**slots)

    def distinct_layers(self) -> list[tuple[LayerSettings, int]]:
        """The different layers, each with how often it occurs."""
        found: list[tuple[LayerSettings, int]] = []
        for layer in map(self.layer, range(self.n_layers)) if self.layers else [self.layer(0)] * self.n_layers:
            same = next((i for i, (known, _) in enumerate(found) if known == layer), None)
            if same is None:
                found.append((layer, 1))
            else:
                found[same] = (layer, found[same][1] + 1)
        return found


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
        return _where_meant(self, betas=adaptive, eps=adaptive, momentum=not adaptive)


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
    deterministic: bool = Field(False, description="refuse operators whose result varies from run to run")
    max_seconds: Real | None = Field(None, gt=0, description="the trial is ended as `timeout` after this")

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
        return _where_meant(copy, final_lr=self.schedule in ("linear", "cosine"))

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


class PrefillSettings(Settings):
    """Reading a prompt: every batch with every length."""

    batch: list[Count] = Field([1], min_length=1, description="sequences at once")
    tokens: list[Count] = Field(min_length=1, description="tokens of a prompt")


class DecodeSettings(Settings):
    """Writing token by token: every batch with every context."""

    batch: list[Count] = Field([1], min_length=1, description="sequences at once")
    context: list[Count] = Field(min_length=1, description="tokens in the cache before the first new one")
    new_tokens: Count = Field(32, description="tokens written")


class ProfileSettings(Settings):
    """What is measured beside training."""

    prefill: PrefillSettings | None = None
    decode: DecodeSettings | None = None
    rounds: Count = Field(3, description="times that each cell is measured, after one warm-up")

    def faults(self, max_seq_len: int) -> list[SettingsError]:
        """Lengths beyond what the model can take."""
        found = []
        for tokens in self.prefill.tokens if self.prefill else []:
            if tokens > max_seq_len:
                message = f"prefill of {tokens} tokens is more than max_seq_len {max_seq_len}"
                cure = "raise max_seq_len or shorten the prompt"
                found.append(SettingsError(("prefill", "tokens"), message, cure))
        for context in self.decode.context if self.decode else []:
            if self.decode and (total := context + self.decode.new_tokens) > max_seq_len:
                message = f"context + new_tokens is {total}, more than max_seq_len {max_seq_len}"
                cure = f"raise max_seq_len, or lower context {context} or new_tokens {self.decode.new_tokens}"
                found.append(SettingsError(("decode", "context"), message, cure))
        return found


class VariantSettings(Settings):
    """Everything that determines the numbers of a variant, but the seed."""

    model: ModelSettings
    train: TrainSettings
    data: SerializeAsAny[DataChoice]
    profile: ProfileSettings


def typed(tree: Mapping[str, Any]) -> VariantSettings:
    """The plain sections `model`, `train`, `data`, `profile` as typed settings. Raises `Faults` with every fault found.

    Checks each setting by itself; `resolved` checks them together.
    """
    faults: list[SettingsError] = []
    data = _collect(faults, lambda: registry.configure("data", tree["data"], ("data",)))
    model = _collect(faults, lambda: _model(tree["model"]))
    train = _collect(faults, lambda: validated(TrainSettings, tree["train"], ("train",)))
    profile = _collect(faults, lambda: validated(ProfileSettings, tree["profile"], ("profile",)))
    if faults:
        raise Faults(faults)
    return VariantSettings.model_construct(model=model, train=train, data=data, profile=profile)


def _collect(faults: list[SettingsError], make: Any) -> Any:
    try:
        return make()
    except Faults as found:
        faults.extend(found.faults)
        return None


def _model(raw: Mapping[str, Any]) -> ModelSettings:
    faults: list[SettingsError] = []
    ready = {**raw, **_choices(raw, (), faults)}
    faulty = {fault.path[:1] for fault in faults}
    if isinstance(rules := raw.get("layers"), list):
        found = (_collect(faults, partial(_rule, rule, ("layers", i), faults)) for i, rule in enumerate(rules))
        ready["layers"] = [rule for rule in found if rule is not None]
    others: list[SettingsError] = []
    model = _collect(others, lambda: validated(ModelSettings, ready))
    faults += [fault for fault in others if fault.path[:1] not in faulty]
    if faults:
        raise Faults(faults)
    return cast(ModelSettings, model)


def _rule(raw: object, path: Path, faults: list[SettingsError]) -> LayerRule:
    return validated(LayerRule, {**raw, **_choices(raw, path, faults)} if isinstance(raw, Mapping) else raw, path)


def _choices(raw: Mapping[str, Any], path: Path, faults: list[SettingsError]) -> dict[str, Choice]:
    """The slots of `raw`, each as its choice's settings; an empty one stands in for what is faulty, and reported.

    A rule, which has a `path`, may leave slots at nothing; a model may not.
    """
    ready: dict[str, Choice] = {}
    for slot in registry.SLOTS:
        if slot in raw and not (raw[slot] is None and path):
            choice = _collect(faults, lambda slot=slot: registry.configure(slot, raw[slot], (*path, slot)))
            ready[slot] = choice or registry.slot_base(slot)()
    return ready


def resolved(settings: VariantSettings, vocab_size: int = 1) -> VariantSettings:
    """A copy in which every default stands as a value. Raises `Faults` for what cannot work together.

    `vocab_size` is the data's: the model's own where it does not say, and the least it may be.
    """
    model = settings.model.model_copy(update={"vocab_size": settings.model.vocab_size or vocab_size})
    shape = model.shape
    faults = [fault.below(("train",)) for fault in settings.train.faults()]
    if shape.vocab_size < vocab_size:
        message = f"vocab_size {shape.vocab_size} is less than the {vocab_size} tokens of the data"
        faults.append(SettingsError(("vocab_size",), message, f"leave it out, or give at least {vocab_size}"))
    updates: dict[str, Any] = {slot: _resolve(faults, getattr(model, slot), shape, (slot,)) for slot in LAYER_SLOTS}
    updates["layers"] = [
        rule.model_copy(update={s: _resolve(faults, getattr(rule, s), shape, ("layers", i, s)) for s in LAYER_SLOTS})
        for i, rule in enumerate(model.layers)
    ]
    faults += _idle_rules(model)
    model = _where_meant(model.model_copy(update=updates), init_std=model.init == "normal")
    if not faults:
        train = settings.train.resolve(model.max_seq_len)
        faults += [fault.below(("train",)) for fault in train.length_faults(model.max_seq_len)]
        faults += [fault.below(("profile",)) for fault in settings.profile.faults(model.max_seq_len)]
        faults += _pairings(model, settings.model)
    if faults:
        raise Faults(faults)
    return settings.model_copy(update={"model": model, "train": train})


def _idle_rules(model: ModelSettings) -> list[SettingsError]:
    cure = f"take it out, or let it apply within {model.n_layers}"
    return [
        SettingsError(("layers", i), f"the rule is for none of the {model.n_layers} layers", cure)
        for i, rule in enumerate(model.layers)
        if not any(map(rule.applies, range(model.n_layers)))
    ]


def _resolve(faults: list[SettingsError], choice: Any, shape: Shape, path: Path) -> Any:
    if not hasattr(choice, "resolve"):
        return choice
    try:
        done = choice.resolve(shape)
    except SettingsError as fault:
        faults.append(fault.below(path))
        return choice
    except Faults as found:
        faults.extend(fault.below(path) for fault in found.faults)
        return choice
    faults.extend(_placed(problem, path) for problem in done.problems(shape))
    return done


def _placed(problem: Problem, path: Path) -> SettingsError:
    return problem.below(path) if isinstance(problem, SettingsError) else SettingsError(path, problem)


def _pairings(model: ModelSettings, given: ModelSettings) -> list[SettingsError]:
    """Position schemes with the attention of each layer: by the hooks that one needs and the other offers.

    A width that cannot be rotated is told where the file `given` says it, if it does.
    """
    found: list[SettingsError] = []
    position = model.position
    for layer, _ in model.distinct_layers():
        for hook in sorted(position.needs - layer.attention.offers):
            message = f"position {position.name} needs an attention that can {hook} scores or heads"
            message = f"{message}; {layer.attention.name} cannot"
            found.append(SettingsError(("position",), message, "choose another position or another attention"))
        if position.needs <= layer.attention.offers:
            problems = position.problems(model.shape, layer.attention.rotary_dim(model.shape))
            said = layer.attention.rotary_setting
            width = getattr(given.attention, said, None) if layer.attention == model.attention else None
            found += [_placed(problem, ("attention", said) if width else ("position",)) for problem in problems]
    return list({fault.message: fault for fault in found}.values())

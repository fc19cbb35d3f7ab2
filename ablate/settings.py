"""A variant's settings, typed: the model, the training recipe, what is profiled. Defaults have their home here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
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

LAYER_SLOTS = ("attention", "cross_attention", "feed_forward", "norm", "block", "position")
"""What one layer can have of its own."""

CROSS = "cross_attention"
SLOT_OF = {place: place for place in LAYER_SLOTS} | {CROSS: "attention"}
"""The places of a layer, and the slot that each is filled from."""

SPECIAL_TOKENS = {"decoder": 0, "encoder": 1, "encoder_decoder": 1}
"""Tokens that a family needs beside the data's: an encoder masks with one, an encoder-decoder starts with one."""

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
    at: list[Count] | None = Field(None, min_length=1, description="these layers, counted from 1")
    attention: SerializeAsAny[AttentionChoice] | None = None
    cross_attention: SerializeAsAny[AttentionChoice] | None = None
    feed_forward: SerializeAsAny[FeedForwardChoice] | None = None
    norm: SerializeAsAny[NormChoice] | None = None
    block: SerializeAsAny[BlockChoice] | None = None
    position: SerializeAsAny[PositionChoice] | None = None

    @model_validator(mode="after")
    def _says_where_and_what(self) -> Self:
        if self.every is None and self.first is None and self.at is None:
            cure = "say which layers, as in `every: 2`"
            raise SettingsError((), "a rule for layers needs 'every', 'first' or 'at'", cure)
        if all(getattr(self, slot) is None for slot in LAYER_SLOTS):
            cure = f"give one of: {', '.join(LAYER_SLOTS)}"
            raise SettingsError((), "a rule for layers needs a choice for them", cure)
        return self

    def applies(self, layer: int) -> bool:
        """Whether the rule is for layer `layer`, counted from 0."""
        by_step = self.every is not None and (layer + 1) % self.every == 0
        at_start = self.first is not None and layer < self.first
        return by_step or at_start or layer + 1 in (self.at or ())


def without_cross(rules: Sequence[LayerRule]) -> list[LayerRule]:
    """The rules as they are for a stack that reads no other sequence; those that say nothing else are gone."""
    left = [rule.model_copy(update={CROSS: None}) for rule in rules]
    return [rule for rule in left if any(getattr(rule, slot) is not None for slot in LAYER_SLOTS)]


class LayerSettings(Settings):
    """What one layer is made of."""

    attention: SerializeAsAny[AttentionChoice]
    cross_attention: SerializeAsAny[AttentionChoice] | None = None
    feed_forward: SerializeAsAny[FeedForwardChoice]
    norm: SerializeAsAny[NormChoice]
    block: SerializeAsAny[BlockChoice]
    position: SerializeAsAny[PositionChoice]

    @property
    def n_sublayers(self) -> int:
        """Attention and feed-forward, and between them what reads the other sequence, if anything does."""
        return 2 if self.cross_attention is None else 3

    @property
    def n_norms(self) -> int:
        """Norms that the layer holds."""
        return self.block.n_norms(self.n_sublayers)

    def rotary_dim(self, shape: Shape) -> int:
        """The width of the heads that this layer's position scheme turns or looks at, 0 where it does neither."""
        return self.attention.rotary_dim(shape) if self.position.needs & {"rotate", "keys"} else 0


@dataclass(frozen=True)
class StackSettings:
    """The layers of an encoder or a decoder. `usual` is a layer that no rule is for."""

    name: str
    shape: Shape
    usual: LayerSettings
    rules: list[LayerRule]

    def layer(self, index: int) -> LayerSettings:
        """What layer `index`, counted from 0, is made of."""
        own = [rule for rule in self.rules if rule.applies(index)]
        slots = {slot: given for rule in own for slot in LAYER_SLOTS if (given := getattr(rule, slot)) is not None}
        return self.usual.model_copy(update=slots) if slots else self.usual

    @property
    def layers(self) -> list[LayerSettings]:
        """All of them, from the first to the last."""
        return [self.layer(index) for index in range(self.shape.n_layers)]

    @property
    def last(self) -> LayerSettings:
        """The last one, whose block says how the stack ends."""
        return self.layer(self.shape.n_layers - 1)

    def distinct_layers(self) -> list[tuple[LayerSettings, int]]:
        """The different layers, each with how often it occurs."""
        if not self.rules:
            return [(self.usual, self.shape.n_layers)]
        found: dict[tuple[bool, ...], int] = {}
        times: Counter[tuple[bool, ...]] = Counter()
        for index in range(self.shape.n_layers):
            kind = tuple(rule.applies(index) for rule in self.rules)
            found.setdefault(kind, index)
            times[kind] += 1
        merged: list[tuple[LayerSettings, int]] = []
        for kind, index in found.items():
            layer = self.layer(index)
            same = next((i for i, (known, _) in enumerate(merged) if known == layer), len(merged))
            merged[same:] = [(layer, times[kind] + (merged[same][1] if same < len(merged) else 0)), *merged[same + 1 :]]
        return merged

    def rules_by_layer(self) -> list[LayerRule]:
        """The layers that are not as usual, by their numbers: each kind of them is one rule."""
        kinds: list[tuple[dict[str, Any], list[int]]] = []
        for number, layer in enumerate(self.layers if self.rules else [], 1):
            own = {s: choice for s in LAYER_SLOTS if (choice := getattr(layer, s)) != getattr(self.usual, s)}
            same = next((numbers for slots, numbers in kinds if slots == own), None)
            if own and same is None:
                kinds.append((own, [number]))
            elif own and same is not None:
                same.append(number)
        return [LayerRule(at=numbers, **slots) for slots, numbers in kinds]

    def each_layer_once(self) -> dict[str, Any]:
        """How deep the stack is without repetitions, and the rules that make it so."""
        layers = [layer for layer, _ in self.distinct_layers()]
        slots = [{slot: getattr(layer, slot) for slot in LAYER_SLOTS} for layer in layers]
        rules = [LayerRule.model_construct(at=[index], **own) for index, own in enumerate(slots, 1)]
        return {"n_layers": len(layers), "layers": rules if self.rules else []}

    def schemes(self) -> tuple[list[Scheme], list[int]]:
        """The position modules, and which of them each layer uses.

        The first is the one that adds to the embeddings, if any does. Layers share a module unless its choice says that
        each needs one.
        """
        first = self.scheme(self.usual)
        modules, used = [first] if first.choice.embeds else [], list[int]()
        for scheme in map(self.scheme, self.layers):
            if not (scheme.choice.shared and scheme in modules):
                modules.append(scheme)
            used.append(modules.index(scheme) if scheme.choice.shared else len(modules) - 1)
        return modules, used

    def scheme(self, layer: LayerSettings) -> Scheme:
        """How positions enter the layer: as its attention looks, both ways or back alone."""
        shape = replace(self.shape, causal=layer.attention.is_causal(self.shape))
        return Scheme(layer.position, shape, layer.rotary_dim(shape))


@dataclass(frozen=True)
class Scheme:
    """A position choice in the shape that it is for, with the width of the heads that it turns or looks at."""

    choice: PositionChoice
    shape: Shape
    rotary_dim: int


class HeadSettings(Settings):
    """How the last hidden states become logits."""

    transform: bool | None = Field(None, description="projection, GELU and norm before (BERT); encoders unless given")
    bias: bool | Literal["fixed"] | None = Field(
        None, description="added to the logits, trained or `fixed` (BART); where there is a transform unless given"
    )
    scale: bool = Field(False, description="whether hidden states are divided by √d_model (T5)")
    softcap: Real | None = Field(None, gt=0, description="logits are bounded by softcap · tanh(logit / softcap)")

    def resolve(self, family: str) -> HeadSettings:
        """A copy that says what an encoder has."""
        transform = family == "encoder" if self.transform is None else self.transform
        return self.model_copy(update={"transform": transform, "bias": transform if self.bias is None else self.bias})


class EncoderSettings(Settings):
    """What is different in the encoder of an encoder-decoder."""

    n_layers: Count | None = Field(None, le=10_000, description="number of layers; as the decoder unless given")
    n_heads: Size | None = Field(None, description="number of query heads; as the decoder unless given")
    attention: SerializeAsAny[AttentionChoice] | None = None
    feed_forward: SerializeAsAny[FeedForwardChoice] | None = None
    norm: SerializeAsAny[NormChoice] | None = None
    block: SerializeAsAny[BlockChoice] | None = None
    position: SerializeAsAny[PositionChoice] | None = None
    layers: list[LayerRule] | None = Field(None, description="exceptions; as in the decoder unless given")


class ModelSettings(Settings):
    """The architecture of one variant."""

    family: Literal["decoder", "encoder", "encoder_decoder"] = Field(
        "decoder", description="causal; bidirectional with masked tokens; or one of each, the second reading the first"
    )
    d_model: Size = Field(description="width of the residual path")
    n_layers: Count = Field(le=10_000, description="number of layers")
    n_heads: Size = Field(description="number of query heads")
    max_seq_len: Size = Field(description="longest sequence, in tokens")
    vocab_size: Size | None = Field(None, description="number of tokens; the tokenizer's unless given")
    d_embed: Size | None = Field(None, description="width of the embeddings; d_model unless given")
    attention: SerializeAsAny[AttentionChoice]
    cross_attention: SerializeAsAny[AttentionChoice] | None = None
    position: SerializeAsAny[PositionChoice]
    feed_forward: SerializeAsAny[FeedForwardChoice]
    norm: SerializeAsAny[NormChoice]
    block: SerializeAsAny[BlockChoice]
    layers: list[LayerRule] = Field([], description="exceptions: [{every: 2, feed_forward: moe}]; later entries win")
    encoder: EncoderSettings | None = Field(None, description="what is different in an encoder-decoder's encoder")
    dropout: Annotated[Dropout, BeforeValidator(_spread)] = Field(Dropout(), description="a number, or one a place")
    tie_embeddings: bool = Field(False, description="whether the output head is the embedding")
    embed_scale: bool = Field(False, description="whether embeddings are multiplied by √d_model")
    embed_norm: bool = Field(False, description="whether embeddings are normalised before the first layer")
    n_token_types: Whole = Field(
        0, ge=0, le=2**24, description="kinds of tokens that have an embedding of their own (BERT)"
    )
    head: HeadSettings = HeadSettings()
    init: Literal["normal", "xavier"] = Field("normal", description="how matrices are drawn")
    init_std: Real | None = Field(0.02, gt=0, description="standard deviation of `init: normal`")

    @property
    def shape(self) -> Shape:
        """The numbers that the slots of the main stack share: the decoder's, or an encoder's where it stands alone."""
        return self.stacks[-1].shape

    @property
    def is_causal(self) -> bool:
        """Whether no output depends on a later token: what decoding token by token rests on."""
        stack = self.stacks[-1]
        return all(layer.attention.is_causal(stack.shape) for layer, _ in stack.distinct_layers())

    @property
    def n_special_tokens(self) -> int:
        """Tokens beside those of the data, at the end of the vocabulary."""
        return SPECIAL_TOKENS[self.family]

    @property
    def stacks(self) -> list[StackSettings]:
        """The encoder before the decoder, or the one that there is."""
        assert self.vocab_size is not None, "resolved() comes first"
        if self.family == "encoder_decoder":
            return [self._encoder(), self._stack("decoder", self.n_layers)]
        return [self._stack(self.family, self.n_layers)]

    def thinned(self) -> ModelSettings:
        """The same model with each different layer once: all that there is to see of it, however deep it is."""
        *encoders, main = self.stacks
        updates = main.each_layer_once()
        if encoders:
            own = self.encoder or EncoderSettings()
            updates["encoder"] = own.model_copy(update=encoders[0].each_layer_once())
        return self.model_copy(update=updates)

    def _stack(self, name: str, n_layers: int, **slots: Any) -> StackSettings:
        other = slots.pop("partner_layers", self._partner_layers(name))
        shape = Shape(
            d_model=self.d_model,
            n_layers=n_layers,
            n_heads=slots.pop("n_heads", self.n_heads),
            max_seq_len=self.max_seq_len,
            vocab_size=self.vocab_size or 0,
            attention_dropout=self.dropout.attention,
            residual_dropout=self.dropout.residual,
            causal=name == "decoder",
            partner_layers=other,
        )
        rules = slots.pop("layers", self.layers)
        usual = LayerSettings.model_construct(**{slot: getattr(self, slot) for slot in LAYER_SLOTS} | slots)
        return StackSettings(name, shape, usual, rules)

    def _partner_layers(self, name: str) -> int:
        if self.family != "encoder_decoder":
            return 0
        own = self.encoder.n_layers if self.encoder else None
        return own or self.n_layers if name == "decoder" else self.n_layers

    def _encoder(self) -> StackSettings:
        own = self.encoder or EncoderSettings()
        given = {key: value for key in ENCODER_OWN if (value := getattr(own, key)) is not None}
        rules = without_cross(given.pop("layers", self.layers))
        n_layers = given.pop("n_layers", self.n_layers)
        return self._stack("encoder", n_layers, **given, layers=rules, cross_attention=None)


ENCODER_OWN = tuple(EncoderSettings.model_fields)


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
    compile: bool = Field(False, description="training steps run through torch.compile; all else runs as it is written")
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


def _listed(value: object) -> object:
    """A single number stands for a list of one."""
    return value if isinstance(value, list) else [value]


class DecodeSettings(Settings):
    """Writing token by token: every batch with every context and every number of new tokens."""

    batch: list[Count] = Field([1], min_length=1, description="sequences at once")
    context: list[Count] = Field(min_length=1, description="tokens in the cache before the first new one")
    new_tokens: Annotated[list[Count], BeforeValidator(_listed)] = Field(
        [32], min_length=1, description="tokens written; a number or several"
    )

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """Every batch, context and number of new tokens that is measured."""
        return list(product(self.batch, self.context, self.new_tokens))


class ProfileSettings(Settings):
    """What is measured beside training."""

    prefill: PrefillSettings | None = None
    decode: DecodeSettings | None = None
    lengths: list[Annotated[Count, Field(ge=2)]] = Field(
        [], description="sequence lengths over which the growth of time and memory is measured; 2 or more"
    )
    rounds: Count = Field(3, description="times that each cell is measured, after one warm-up")
    repeats: Count | None = Field(
        None,
        description="rounds in which every variant is timed again in a fresh process, one after the other, the "
        "baseline first and last",
    )
    max_batch: bool = Field(False, description="whether the largest batch and sequence are sought that training fits")

    def faults(self, max_seq_len: int) -> list[SettingsError]:
        """Lengths beyond what the model can take, and too few to see a growth."""
        found = []
        for tokens in self.prefill.tokens if self.prefill else []:
            if tokens > max_seq_len:
                message = f"prefill of {tokens} tokens is more than max_seq_len {max_seq_len}"
                cure = "raise max_seq_len or shorten the prompt"
                found.append(SettingsError(("prefill", "tokens"), message, cure))
        for _, context, new_tokens in self.decode.cells if self.decode else []:
            if (total := context + new_tokens) > max_seq_len:
                message = f"context + new_tokens is {total}, more than max_seq_len {max_seq_len}"
                cure = f"raise max_seq_len, or lower context {context} or new_tokens {new_tokens}"
                found.append(SettingsError(("decode", "context"), message, cure))
        return [*found, *self._length_faults(max_seq_len)]

    def _length_faults(self, max_seq_len: int) -> Iterator[SettingsError]:
        for place, length in enumerate(self.lengths):
            if length > max_seq_len:
                message = f"a length of {length} tokens is more than max_seq_len {max_seq_len}"
                yield SettingsError(("lengths", place), message, "raise max_seq_len or take the length out")
        if len(set(self.lengths)) == 1:
            message = f"one length, {self.lengths[0]}, shows no growth"
            yield SettingsError(("lengths",), message, "give at least two different lengths, or none")


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
    usual = {slot: raw.get(slot) for slot in registry.SLOTS}
    ready = {**raw, **_choices(raw, usual, (), faults), **_rules(raw, raw, (), faults)}
    if isinstance(own := raw.get("encoder"), Mapping):
        ready["encoder"] = _collect(faults, lambda: _encoder(own, raw, faults))
    faulty = {fault.path[:1] for fault in faults}
    others: list[SettingsError] = []
    model = _collect(others, lambda: validated(ModelSettings, ready))
    faults += [fault for fault in others if fault.path[:1] not in faulty]
    if faults:
        raise Faults(faults)
    return cast(ModelSettings, model)


def _encoder(raw: Mapping[str, Any], usual: Mapping[str, Any], faults: list[SettingsError]) -> EncoderSettings:
    path = ("encoder",)
    for i, rule in enumerate(rules if isinstance(rules := raw.get("layers"), list) else []):
        if isinstance(rule, Mapping) and CROSS in rule:
            message = "an encoder reads no other sequence, and has no cross_attention"
            faults.append(SettingsError((*path, "layers", i, CROSS), message, "take it out"))
    own = {place: _continued(given, usual.get(place)) for place in SLOT_OF if (given := raw.get(place)) is not None}
    ready = {**raw, **_choices(raw, usual, path, faults), **_rules(raw, {**usual, **own}, path, faults)}
    return validated(EncoderSettings, ready, path)


def _rules(
    raw: Mapping[str, Any], usual: Mapping[str, Any], path: Path, faults: list[SettingsError]
) -> dict[str, list[LayerRule]]:
    if not isinstance(rules := raw.get("layers"), list):
        return {}
    places = ((*path, "layers", i) for i in range(len(rules)))
    found = [
        _collect(faults, partial(_rule, rule, usual, place, faults)) for rule, place in zip(rules, places, strict=True)
    ]
    return {"layers": [rule for rule in found if rule is not None]}


def _rule(raw: object, usual: Mapping[str, Any], path: Path, faults: list[SettingsError]) -> LayerRule:
    ready = {**raw, **_choices(raw, usual, path, faults)} if isinstance(raw, Mapping) else raw
    return validated(LayerRule, ready, path)


def _choices(
    raw: Mapping[str, Any], usual: Mapping[str, Any], path: Path, faults: list[SettingsError]
) -> dict[str, Choice]:
    """The slots of `raw`, each as its choice's settings; an empty one stands in for what is faulty, and reported.

    What is inside an exception, which has a `path`, may be left at nothing; it goes on from the `usual` choice where it
    does not name another.
    """
    ready: dict[str, Choice] = {}
    for place, slot in SLOT_OF.items():
        if place in raw and not (raw[place] is None and (path or place not in registry.SLOTS)):
            given = _continued(raw[place], usual.get(place) or usual.get(slot))
            choice = _collect(
                faults, lambda slot=slot, given=given, at=(*path, place): registry.configure(slot, given, at)
            )
            ready[place] = choice or registry.slot_base(slot)()
    return ready


def _continued(raw: Any, usual: Any) -> Any:
    """A choice that names no other one, over what the usual choice says."""
    own, base = ({"name": each} if isinstance(each, str) else each for each in (raw, usual))
    if isinstance(own, Mapping) and isinstance(base, Mapping) and own.get("name", base.get("name")) == base.get("name"):
        return _merged(base, own)
    return raw


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


# --- Resolution -------------------------------------------------------------------------------------------------------


def resolved(settings: VariantSettings, vocab_size: int = 1) -> VariantSettings:
    """A copy in which every default stands as a value. Raises `Faults` for what cannot work together.

    `vocab_size` is the data's: with the family's special tokens the model's own where it does not say, and the least it
    may be.
    """
    given = settings.model
    faults = [fault.below(("train",)) for fault in settings.train.faults()]
    least = vocab_size + given.n_special_tokens
    if given.vocab_size is not None and given.vocab_size < least:
        beside = f" and the {given.family}'s own {given.n_special_tokens}" if given.n_special_tokens else ""
        message = f"vocab_size {given.vocab_size} is less than the {vocab_size} tokens of the data{beside}"
        cure = f"give at least {least}, or leave it out where the file gives it"
        faults.append(SettingsError(("vocab_size",), message, cure))
    model = _resolved_model(given.model_copy(update={"vocab_size": given.vocab_size or least}), faults)
    faults += _idle_rules(model)
    if not faults:
        train = settings.train.resolve(model.max_seq_len)
        faults += [fault.below(("train",)) for fault in train.length_faults(model.max_seq_len)]
        faults += [fault.below(("profile",)) for fault in settings.profile.faults(model.max_seq_len)]
        faults += _pairings(model, given)
    if faults:
        raise Faults({(fault.path, fault.message): fault for fault in faults}.values())
    return settings.model_copy(update={"model": _in_one_form(model), "train": train})


def _resolved_model(model: ModelSettings, faults: list[SettingsError]) -> ModelSettings:
    """The model with every slot of every stack as it is meant, and nothing that means nothing in its family."""
    crossed = None
    if model.family == "encoder_decoder":
        crossed = model.cross_attention or model.attention.crossing()
        crossed = crossed.model_copy(update={"causal": None})
    rules = model.layers if crossed else without_cross(model.layers)
    model = model.model_copy(update={CROSS: crossed, "layers": rules})
    shapes = {stack.name: stack.shape for stack in model.stacks}
    shape = shapes.get("decoder") or shapes["encoder"]
    updates = _resolved_slots(model, shape, (), faults)
    updates["layers"] = _resolved_rules(model.layers, shape, ("layers",), faults)
    updates["head"] = model.head.resolve(model.family)
    updates["encoder"] = _resolved_encoder(model, shapes["encoder"], faults) if crossed else None
    updates["d_embed"] = model.d_embed or model.d_model
    return _where_meant(model.model_copy(update=updates), init_std=model.init == "normal")


def _in_one_form(model: ModelSettings) -> ModelSettings:
    """Rules for layers in the one form that they all have, so that equal models have equal settings."""
    *encoders, main = model.stacks
    updates: dict[str, Any] = {"layers": main.rules_by_layer()}
    if encoders and model.encoder:
        updates["encoder"] = model.encoder.model_copy(update={"layers": encoders[0].rules_by_layer()})
    return model.model_copy(update=updates)


def _resolved_encoder(model: ModelSettings, shape: Shape, faults: list[SettingsError]) -> EncoderSettings:
    own = model.encoder or EncoderSettings()
    numbers = {"n_layers": shape.n_layers, "n_heads": shape.n_heads}
    taken = {slot: getattr(own, slot) or getattr(model, slot) for slot in registry.SLOTS}
    rules, path = (own.layers, ("encoder", "layers")) if own.layers is not None else (model.layers, ("layers",))
    rules = without_cross(rules)
    whole = own.model_copy(update={**numbers, **taken})
    ready = _resolved_slots(whole, shape, ("encoder",), faults)
    return whole.model_copy(update={**ready, "layers": _resolved_rules(rules, shape, path, faults)})


def _resolved_rules(rules: list[LayerRule], shape: Shape, path: Path, faults: list[SettingsError]) -> list[LayerRule]:
    return [rule.model_copy(update=_resolved_slots(rule, shape, (*path, i), faults)) for i, rule in enumerate(rules)]


def _resolved_slots(holder: Settings, shape: Shape, path: Path, faults: list[SettingsError]) -> dict[str, Any]:
    """The choices that `holder` has, each resolved in the shape that it is for."""
    crossing = replace(shape, cross=True)
    given = {place: choice for place in SLOT_OF if (choice := getattr(holder, place, None)) is not None}
    return {
        place: _resolve(faults, choice, crossing if place == CROSS else shape, (*path, place))
        for place, choice in given.items()
    }


def _resolve(faults: list[SettingsError], choice: Any, shape: Shape, path: Path) -> Any:
    try:
        done = choice.resolve(shape)
    except SettingsError as fault:
        faults.append(fault.below(path))
        return choice
    except Faults as found:
        faults.extend(fault.below(path) for fault in found.faults)
        return choice
    if path[-1] != "position" and (problems := getattr(done, "problems", None)):
        faults.extend(_placed(problem, path) for problem in problems(shape))
    return done


def _placed(problem: Problem, path: Path) -> SettingsError:
    return problem.below(path) if isinstance(problem, SettingsError) else SettingsError(path, problem)


def _idle_rules(model: ModelSettings) -> list[SettingsError]:
    return [
        SettingsError(
            ("layers", i) if stack.rules is model.layers else ("encoder", "layers", i),
            f"the rule is for layers that are none of the {stack.shape.n_layers}"
            if rule.at
            else f"the rule is for none of the {stack.shape.n_layers} layers",
            f"take it out, or let it apply within {stack.shape.n_layers}",
        )
        for stack in model.stacks
        for i, rule in enumerate(stack.rules)
        if not any(map(rule.applies, range(stack.shape.n_layers))) or max(rule.at or [0]) > stack.shape.n_layers
    ]


# --- What goes with what ----------------------------------------------------------------------------------------------


def _pairings(model: ModelSettings, given: ModelSettings) -> list[SettingsError]:
    """What each layer's choices need of one another and do not find; each sentence once."""
    found = [
        fault
        for stack in model.stacks
        for layer, _ in stack.distinct_layers()
        for fault in (*_attention_faults(layer, stack), *_position_faults(layer, stack, given))
    ]
    return list({fault.message: fault for fault in found}.values())


def _attention_faults(layer: LayerSettings, stack: StackSettings) -> Iterator[SettingsError]:
    attention, crossed = layer.attention, layer.cross_attention
    if not attention.is_causal(stack.shape) and "bidirectional" not in attention.offers:
        message = f"attention {attention.name} only goes forward; the {stack.name} must look both ways"
        yield SettingsError(("attention",), message, "choose another attention there")
    if crossed is not None and "cross" not in crossed.offers:
        message = f"attention {crossed.name} cannot read another sequence, as a decoder's cross attention must"
        yield SettingsError((CROSS,), message, f"choose another {CROSS}")


def _position_faults(layer: LayerSettings, stack: StackSettings, given: ModelSettings) -> Iterator[SettingsError]:
    """The hooks that a position scheme needs; a width that cannot be rotated is told where the file says it."""
    position, attention = layer.position, layer.attention
    usual = stack.usual.position
    if position.embeds and position != usual:
        message = f"position {position.name} adds to the embeddings, which no single layer has"
        yield SettingsError(("layers",), message, "choose it for the whole model, or another one for the layer")
    if usual.embeds and position != usual and not position.needs:
        message = f"position {usual.name} adds to the embeddings, and no layer is without it"
        yield SettingsError(("layers",), message, "take the position out of the rule")
    if missing := " and ".join(HOOKS[hook] for hook in sorted(position.needs - attention.offers)):
        message = f"position {position.name} needs an attention that can {missing}; {attention.name} cannot"
        yield SettingsError(("position",), message, "choose another position or another attention")
    else:
        said = attention.rotary_setting
        width = getattr(given.attention, said, None) if type(attention) is type(given.attention) else None
        for problem in position.problems(stack.scheme(layer).shape, attention.rotary_dim(stack.shape)):
            own = isinstance(problem, SettingsError) and problem.path
            yield _placed(problem, ("attention", said) if width and not own else ("position",))


HOOKS = {"rotate": "rotate heads", "bias": "bias scores", "keys": "show the keys that it scores"}

"""The architecture of a variant."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from ablate.attention import AttentionChoice
from ablate.block import BlockChoice
from ablate.choice import Count, Rate, Real, Settings, Shape, Size, Whole
from ablate.feed_forward import FeedForwardChoice
from ablate.norm import NormChoice
from ablate.position import PositionChoice
from ablate.settings.layer import LAYER_SLOTS, LayerRule, LayerSettings, without_cross
from ablate.settings.stack import StackSettings

SPECIAL_TOKENS = {"decoder": 0, "encoder": 1, "encoder_decoder": 1}
"""Tokens that a family needs beside the data's: an encoder masks with one, an encoder-decoder starts with one."""


class Dropout(Settings):
    """Rates of dropout; a bare number in the file means all three."""

    embedding: Rate = Field(0.0, description="on the embeddings")
    attention: Rate = Field(0.0, description="on the attention weights")
    residual: Rate = Field(0.0, description="on what a sublayer adds")


def _spread(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"embedding": value, "attention": value, "residual": value}
    return value


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

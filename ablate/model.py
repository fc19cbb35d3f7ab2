"""The transformer, assembled from its slots. Nothing here knows which choices they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.feed_forward import value_path
from ablate.init import initialise
from ablate.position import Position
from ablate.settings import HeadSettings, LayerSettings, ModelSettings, StackSettings


class ModelCache:
    """The caches of all layers, how many tokens they hold, and which tokens of the other sequence are real.

    Of a decoder that reads another sequence, `crossed` holds what its layers keep of that one.
    """

    def __init__(self, layers: list[Any], crossed: list[Any] | None = None) -> None:
        self.layers = layers
        self.crossed = crossed or []
        self.length = 0
        self.source_mask: Tensor | None = None

    def written_bytes(self) -> int:
        """Bytes of the entries written, read off the live tensors."""
        return sum(layer.written_bytes() for layer in (*self.layers, *self.crossed))

    def allocated_bytes(self) -> int:
        """Bytes held, written or not."""
        return sum(layer.allocated_bytes() for layer in (*self.layers, *self.crossed))


@dataclass(frozen=True)
class Memory:
    """The other sequence as a layer sees it: its hidden states, which of them are real, what the cache has of them."""

    tokens: Tensor | None
    mask: Tensor | None
    cache: Any


class Layer(nn.Module):
    """One layer: sublayers, norms, and the block that wires them."""

    def __init__(self, settings: LayerSettings, stack: StackSettings) -> None:
        super().__init__()
        shape = stack.shape
        self.attention = settings.attention.build(shape)
        if settings.cross_attention is not None:
            self.cross_attention = settings.cross_attention.build(replace(shape, cross=True))
        self.feed_forward = settings.feed_forward.build(shape)
        self.norms = nn.ModuleList(settings.norm.build(shape.d_model) for _ in range(settings.n_norms))
        self.block = settings.block.build(shape)
        self.value_gain = settings.block.value_gain(shape)

    def forward(
        self,
        x: Tensor,
        position: Position,
        start: int,
        mask: Tensor | None = None,
        cache: Any = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""
        own = None if mask is None else mask[:, -x.shape[1] :]
        sublayers = [lambda h: self.attention(h, position, start, mask, cache)]
        if memory is not None:
            sublayers.append(
                lambda h: self.cross_attention(h, _NOWHERE, start, memory.mask, memory.cache, memory.tokens)
            )
        sublayers.append(lambda h: self.feed_forward(h, own))
        norms = [partial(_normed, norm, mask=own) for norm in self.norms]
        out: Tensor = self.block(x, norms, sublayers)
        return out


_NOWHERE = Position()
"""Between two sequences there are no distances."""


class Stack(nn.Module):
    """The layers of an encoder or a decoder, from embeddings to hidden states, `(B, T, D)` to `(B, T, D)`."""

    def __init__(self, settings: StackSettings, embedding_dropout: float, embed_norm: bool) -> None:
        super().__init__()
        self.settings = settings
        shape, usual, last = settings.shape, settings.usual, settings.last
        schemes, self._scheme_of = settings.schemes()
        self.positions = nn.ModuleList(each.choice.build(each.shape, each.rotary_dim) for each in schemes)
        self.embed_norm = usual.norm.build(shape.d_model) if embed_norm else nn.Identity()
        self.dropout = nn.Dropout(embedding_dropout)
        self.layers = nn.ModuleList(Layer(layer, settings) for layer in settings.layers)
        self.final_norm = last.norm.build(shape.d_model) if last.block.final_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: ModelCache | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of the tokens `ids` `(B, T)` embedded as `x`, which follow those in the cache."""
        start = cache.length if cache else 0
        real = None if mask is None else mask[:, -x.shape[1] :]
        if self.settings.usual.position.embeds:
            x = self._position(0).embed(x, start, ids)
        x = self.dropout(_normed(self.embed_norm, x, real))
        for i, layer in enumerate(self.layers):
            kept = cache.layers[i] if cache else None
            other = Memory(memory, memory_mask, cache.crossed[i] if cache else None) if self._reads_another else None
            x = layer(x, self._position(self._scheme_of[i]), start, mask, kept, other)
        if cache:
            cache.length += x.shape[1]
        return _normed(self.final_norm, x, real)

    def new_cache(self, batch: int, tokens: int, source_tokens: int, like: Tensor) -> ModelCache:
        """Room for `tokens` tokens of `batch` sequences, and for what is kept of `source_tokens` tokens of another."""
        layers: list[Any] = list(self.layers)
        own = [layer.attention.new_cache(batch, tokens, like.dtype, like.device) for layer in layers]
        if not self._reads_another:
            return ModelCache(own)
        room = (batch, source_tokens, like.dtype, like.device)
        return ModelCache(own, [layer.cross_attention.new_cache(*room) for layer in layers])

    @property
    def _reads_another(self) -> bool:
        return self.settings.usual.cross_attention is not None

    def _position(self, index: int) -> Position:
        return cast(Position, self.positions[index])


def _normed(norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    out: Tensor = norm(x, mask=mask) if hasattr(norm, "reads_mask") else norm(x)
    return out


class Embedding(nn.Module):
    """Token ids `(B, T)` to vectors `(B, T, D)`: looked up, widened, scaled, and told their type."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        d_model, width = settings.d_model, settings.d_embed or settings.d_model
        self.tokens = nn.Embedding(settings.vocab_size or 0, width)
        self.project = nn.Linear(width, d_model, bias=False) if width != d_model else nn.Identity()
        self.scale = d_model**0.5 if settings.embed_scale else None
        if settings.n_token_types:
            self.types = nn.Embedding(settings.n_token_types, d_model)

    def forward(self, ids: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """Without `type_ids` `(B, T)` all tokens are of type 0."""
        x: Tensor = self.project(self.tokens(ids))
        if self.scale is not None:
            x = x * self.scale
        if hasattr(self, "types"):
            x = x + (self.types.weight[0] if type_ids is None else self.types(type_ids))
        elif type_ids is not None:
            raise ValueError("token_type_ids are given to a model without token types")
        return x


class Head(nn.Module):
    """Hidden states `(B, T, D)` to logits `(B, T, vocab_size)`."""

    def __init__(self, settings: ModelSettings, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        head, d_model, width = settings.head, settings.d_model, settings.d_embed or settings.d_model
        if head.transform:
            self.transform, self.norm = nn.Linear(d_model, d_model), norm(d_model)
        self.project = nn.Linear(d_model, width, bias=False) if width != d_model else nn.Identity()
        self.output = nn.Linear(width, settings.vocab_size or 0, bias=head.bias is True)
        if head.bias == "fixed":
            self.bias: Tensor
            self.register_buffer("bias", torch.zeros(settings.vocab_size or 0))
        self.scale = d_model**-0.5 if head.scale else None
        self.settings: HeadSettings = head

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """BERT's transform where there is one, then the product with every token's vector."""
        if self.settings.transform:
            x = _normed(self.norm, F.gelu(self.transform(x)), mask)
        if self.scale is not None:
            x = x * self.scale
        logits: Tensor = self.output(self.project(x))
        if self.settings.bias == "fixed":
            logits = logits + self.bias
        if (cap := self.settings.softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits


class Transformer(nn.Module):
    """Token ids to logits `(B, T, vocab_size)`: a decoder, an encoder, or an encoder that a decoder reads."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = Embedding(settings)
        for stack in settings.stacks:
            self.add_module(stack.name, Stack(stack, settings.dropout.embedding, settings.embed_norm))
        self._last = settings.stacks[-1].name
        self.head = Head(settings, settings.stacks[-1].usual.norm.build)
        if settings.tie_embeddings:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(
        self,
        input_ids: Tensor | None,
        decoder_input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """Logits of every position.

        `attention_mask` `(B, keys)` is True (or 1) where a token of `input_ids` is real. With a `cache` the tokens
        follow those in it, and are appended. An encoder-decoder gives the logits of `decoder_input_ids`; once its cache
        has seen `input_ids`, these are not read again and may be None.
        """
        mask = None if attention_mask is None else attention_mask.bool()
        if self.settings.family == "encoder_decoder":
            return self._decoded(input_ids, decoder_input_ids, mask, cache)
        if input_ids is None or decoder_input_ids is not None:
            raise ValueError(f"a model of family '{self.settings.family}' reads input_ids alone")
        x = self.embedding(input_ids, token_type_ids)
        real = None if mask is None else mask[:, -input_ids.shape[1] :]
        logits: Tensor = self.head(self._main(x, input_ids, mask, cache), real)
        return logits

    def _decoded(
        self, source: Tensor | None, target: Tensor | None, mask: Tensor | None, cache: ModelCache | None
    ) -> Tensor:
        if target is None:
            raise ValueError("a model of family 'encoder_decoder' reads input_ids and decoder_input_ids")
        memory = None
        if cache is None or not cache.length:
            if source is None:
                raise ValueError("input_ids are needed until they are in the cache")
            memory = self._stack("encoder")(self.embedding(source), source, mask)
            if cache is not None:
                cache.source_mask = mask
        elif cache is not None:
            mask = cache.source_mask
        hidden = self._main(self.embedding(target), target, None, cache, memory, mask)
        logits: Tensor = self.head(hidden)
        return logits

    @property
    def _main(self) -> Stack:
        return self._stack(self._last)

    def _stack(self, name: str) -> Stack:
        return cast(Stack, getattr(self, name))

    def new_cache(self, batch: int, tokens: int, source_tokens: int = 0) -> ModelCache:
        """Room for `tokens` tokens of `batch` sequences, in the dtype and on the device of the weights.

        An encoder-decoder also keeps what its layers make of `source_tokens` tokens of `input_ids`.
        """
        return self._main.new_cache(batch, tokens, source_tokens, self.embedding.tokens.weight)


def build(settings: ModelSettings, seed: int = 0) -> Transformer:
    """The model on the CPU in float32, its weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(settings)
    initialise(model, settings.init, settings.init_std or 0.0, seed)
    for layer in model.modules():
        if isinstance(layer, Layer) and layer.value_gain != 1.0:
            _gained(layer, layer.value_gain)
    return model


def _gained(layer: Layer, gain: float) -> None:
    """Scale the weights that values go through: the attention's, and the feed-forward network's."""
    mixers = [module for module in (layer.attention, getattr(layer, "cross_attention", None)) if module is not None]
    weights = [weight for mixer in mixers for weight in getattr(mixer, "value_path", list)()]
    for weight in (*weights, *value_path(layer.feed_forward)):
        weight.mul_(gain)

"""The transformer, assembled from its slots. Nothing here knows which choices they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ablate.init import initialise
from ablate.position import Position
from ablate.settings import LayerSettings, ModelSettings


class ModelCache:
    """The caches of all layers, and how many tokens they hold."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.length = 0

    def written_bytes(self) -> int:
        """Bytes of the entries written, read off the live tensors."""
        return sum(layer.written_bytes() for layer in self.layers)

    def allocated_bytes(self) -> int:
        """Bytes held, written or not."""
        return sum(layer.allocated_bytes() for layer in self.layers)


class Layer(nn.Module):
    """One layer: sublayers, and the block that wires them."""

    def __init__(self, settings: LayerSettings, model: ModelSettings) -> None:
        super().__init__()
        self.attention = settings.attention.build(model.shape)
        self.feed_forward = settings.feed_forward.build(model.shape)
        norms = [settings.norm.build(model.d_model) for _ in range(settings.block.n_norms(2))]
        self.block = settings.block.build(norms, model.dropout.residual)

    def forward(self, x: Tensor, position: Position, start: int, mask: Tensor | None, cache: Any) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`."""

        def attend(h: Tensor) -> Tensor:
            out: Tensor = self.attention(h, position, start, mask, cache)
            return out

        def feed(h: Tensor) -> Tensor:
            out: Tensor = self.feed_forward(h, None if mask is None else mask[:, -h.shape[1] :])
            return out

        out: Tensor = self.block(x, (attend, feed))
        return out


class Transformer(nn.Module):
    """A decoder: token ids `(B, T)` to logits `(B, T, vocab_size)`."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        shape = settings.shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.embedding_dropout = nn.Dropout(settings.dropout.embedding)
        self.layers = nn.ModuleList(Layer(settings.layer(i), settings) for i in range(settings.n_layers))
        rotates = "rotate" in settings.position.needs
        widths = [settings.layer(i).attention.rotary_dim(shape) if rotates else 0 for i in range(settings.n_layers)]
        self.positions = nn.ModuleDict(
            {str(width): settings.position.build(shape, width) for width in dict.fromkeys(widths)}
        )
        self._scheme_of = [str(width) for width in widths]
        last = settings.layer(settings.n_layers - 1)
        self.final_norm = last.norm.build(settings.d_model) if last.block.final_norm else nn.Identity()
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        if settings.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: ModelCache | None = None
    ) -> Tensor:
        """Logits of every position.

        `attention_mask` `(B, keys)` is True (or 1) where a token is real. With a `cache` the tokens follow those in
        it, and are appended.
        """
        start = cache.length if cache else 0
        mask = None if attention_mask is None else attention_mask.bool()
        x = self.embedding(input_ids)
        if self.settings.embed_scale:
            x = x * self.settings.d_model**0.5
        x = self._position(0).embed(x, start)
        x = self.embedding_dropout(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, self._position(i), start, mask, cache.layers[i] if cache else None)
        if cache:
            cache.length += input_ids.shape[1]
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def new_cache(self, batch: int, tokens: int) -> ModelCache:
        """Room for `tokens` tokens of `batch` sequences, in the dtype and on the device of the weights."""
        weight = self.embedding.weight
        attentions: list[Any] = [layer.attention for layer in self.layers]
        return ModelCache([a.new_cache(batch, tokens, weight.dtype, weight.device) for a in attentions])

    def _position(self, layer: int) -> Position:
        scheme = self.positions[self._scheme_of[layer]]
        assert isinstance(scheme, Position)
        return scheme


def build(settings: ModelSettings, seed: int = 0) -> Transformer:
    """The model on the CPU in float32, its weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(settings)
    initialise(model, settings.init, settings.init_std or 0.0, seed)
    return model

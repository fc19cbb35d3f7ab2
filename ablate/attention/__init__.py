"""The `attention` slot: what mixes information between tokens. One file a choice.

A choice's module is called as `module(x, position, start, mask, cache, memory)`:

* `x` is `(B, T, D)` and so is the result;
* `position` is the position scheme's module (see `ablate.position`), whose hooks the choice calls without asking which
  scheme it is; `start` is the index of the first of the T tokens in its sequence;
* `mask` is `(B, keys)` bool over the cached and the new tokens, True where one is real, or None;
* `cache` is what `module.new_cache(batch, tokens, dtype, device)` gave, or None; with one, the module appends the new
  tokens' entries and attends to everything in it;
* `memory` is `(B, S, D)` where the module was built for a shape that is `cross`: the tokens of the other sequence,
  which `mask` is then about. With a cache it is read at the first call alone, and may be None later.

A module with several ways to the same result says in `module.path` which one it took last. If they are ways to read its
cache, it lists them in `decode_paths` and takes the one in `decode_path`, which may be set: a profile measures each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from pydantic import Field
from torch import nn

from ablate.attention._scores import Scoring as Scoring
from ablate.attention._scores import attend as attend
from ablate.cache import Cache as Cache
from ablate.choice import Choice, Problem, SettingsError, Shape


class AttentionChoice(Choice):
    """Settings, module, cache and cost of one way to mix tokens."""

    offers: ClassVar[frozenset[str]] = frozenset({"rotate", "bias"})
    """What the module can do: call a position scheme's hooks ("rotate", "bias"); give the biases its keys as they are
    multiplied with the queries ("keys"); do without causality ("bidirectional"); read another sequence ("cross").
    What needs more is refused."""

    rotary_setting: ClassVar[str] = "head_dim"
    """The setting that `rotary_dim` is, where it is given."""

    causal: bool | None = Field(None, description="whether later tokens are hidden; as the family has it unless given")

    def is_causal(self, shape: Shape) -> bool:
        """Whether later tokens are hidden in this shape."""
        return not shape.cross and (shape.causal if self.causal is None else self.causal)

    def crossing(self) -> Self:
        """A copy for reading another sequence: without what only makes sense within one."""
        return self.model_copy(update={"causal": None})

    def problems(self, shape: Shape) -> Sequence[Problem]:
        """Why these (resolved) settings cannot work in this shape, one sentence each."""
        return []

    def rotary_dim(self, shape: Shape) -> int:
        """Width of the part of each query and key that a position scheme may rotate."""
        return even_head_dim(shape)

    def build(self, shape: Shape) -> nn.Module:
        """The module. Weights are drawn later, by `ablate.init`."""
        raise NotImplementedError(f"attention '{self.name}' has no build(shape)")

    def params(self, shape: Shape) -> int:
        """Parameters of one layer's module."""
        from ablate.meta import count_parameters

        return count_parameters(lambda: self.build(shape))

    def flops(
        self, shape: Shape, tokens: int, *, discount: bool = True, source_tokens: int = 0
    ) -> dict[str, float] | None:
        """FLOPs a token of one forward pass over `tokens` tokens, by term.

        A query is charged for the keys that it may see; without the `discount` for all, as counters do. In a `cross`
        shape the keys are those of `source_tokens` tokens, and projecting them is shared among the `tokens`.

        Matrix products only, a multiply-add as two. None where the choice does not say: then the report says "n/a".
        """
        return None

    def cache_elements(self, shape: Shape, tokens: int) -> int | None:
        """Numbers that one layer keeps for one sequence of `tokens` tokens. None where the choice does not say."""
        return None

    def cache_elements_per_device(self, shape: Shape, tokens: int, devices: int) -> int | None:
        """Of these the numbers on the fullest of so many devices that share the heads among them.

        None where the choice does not say, or the heads do not come out even.
        """
        return None


def share_of_heads(elements: int | None, n_heads: int, n_kv_heads: int, devices: int) -> int | None:
    """Of `elements` numbers, as many of each key/value head, those on the fullest of `devices`.

    Each device gets n_heads / devices query heads, one after the other, and a copy of every key/value head that they
    read. None where the query heads do not come out even.
    """
    if elements is None or n_heads % devices:
        return None
    share, group = n_heads // devices, n_heads // n_kv_heads
    fullest = max((first + share - 1) // group - first // group + 1 for first in range(0, n_heads, share))
    return elements * fullest // n_kv_heads


def visible_keys(tokens: int, causal: bool, window: int | None = None, chunk: int | None = None) -> float:
    """Keys that a query sees on average over a sequence of `tokens` tokens.

    A `window` holds a query's own token and so many less one on each side that it may see, a `chunk` its block.
    """
    if chunk is not None and chunk < tokens:
        whole, rest = divmod(tokens, chunk)
        parts = [(chunk, visible_keys(chunk, causal, window))] * whole + [(rest, visible_keys(rest, causal, window))]
        return sum(size * keys for size, keys in parts) / tokens
    reach = min(window or tokens, tokens)
    one_side = reach * tokens - reach * (reach - 1) // 2
    return (one_side if causal else 2 * one_side - tokens) / tokens if tokens else 0.0


def even_head_dim(shape: Shape) -> int:
    """d_model / n_heads. Raises `SettingsError` where that is not a whole number."""
    if shape.d_model % shape.n_heads:
        message = f"d_model {shape.d_model} is not divisible by n_heads {shape.n_heads}"
        raise SettingsError((), message, "change one of the two, or give head_dim")
    return shape.d_model // shape.n_heads


Base = AttentionChoice

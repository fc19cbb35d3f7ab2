"""The `attention` slot: what mixes information between tokens. One file a choice.

A choice's module is called as `module(x, position, start, mask, cache)`:

* `x` is `(B, T, D)` and so is the result;
* `position` is the position scheme's module (see `ablate.position`), whose hooks the choice calls without asking which
  scheme it is; `start` is the index of the first of the T tokens in its sequence;
* `mask` is `(B, keys)` bool over the cached and the new tokens, True where one is real, or None;
* `cache` is what `module.new_cache(batch, tokens, dtype, device)` gave, or None; with one, the module appends the new
  tokens' entries and attends to everything in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from torch import nn

from ablate.attention._scores import attend as attend
from ablate.cache import Cache as Cache
from ablate.choice import Choice, Problem, SettingsError, Shape


class AttentionChoice(Choice):
    """Settings, module, cache and cost of one way to mix tokens."""

    offers: ClassVar[frozenset[str]] = frozenset({"rotate", "bias"})
    """The position hooks that the module calls; a scheme that needs another is refused."""

    rotary_setting: ClassVar[str] = "head_dim"
    """The setting that `rotary_dim` is, where it is given."""

    def resolve(self, shape: Shape) -> Self:
        """A copy in which every default that depends on the shape stands as a number."""
        return self

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

    def flops(self, shape: Shape, tokens: int, *, discount: bool = True) -> dict[str, float] | None:
        """FLOPs a token of one forward pass over `tokens` tokens, by term.

        A causal choice is charged for the keys that a query may see; without the `discount` for all, as counters do.

        Matrix products only, a multiply-add as two. None where the choice does not say: then the report says "n/a".
        """
        return None

    def cache_elements(self, shape: Shape, tokens: int) -> int | None:
        """Numbers that one layer keeps for one sequence of `tokens` tokens. None where the choice does not say."""
        return None


def visible_keys(tokens: int, causal: bool) -> float:
    """Keys that a query sees on average over a sequence of `tokens` tokens."""
    return (tokens + 1) / 2 if causal else float(tokens)


def even_head_dim(shape: Shape) -> int:
    """d_model / n_heads. Raises `SettingsError` where that is not a whole number."""
    if shape.d_model % shape.n_heads:
        message = f"d_model {shape.d_model} is not divisible by n_heads {shape.n_heads}"
        raise SettingsError((), message, "change one of the two, or give head_dim")
    return shape.d_model // shape.n_heads


Base = AttentionChoice

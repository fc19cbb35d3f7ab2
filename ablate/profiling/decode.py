"""Reading a prompt and writing token by token: first whether the cache is right, then how fast it is.

Prefill is the time to the first token. Decoding n tokens takes n - 1 further steps, whose time by n - 1 is the time per
token. The last token is fed as well, outside the time, so that the cache ends with all of them in it. Making room for
the cache is outside the time too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ablate import cost
from ablate.model import Transformer, build
from ablate.profiling.clock import Clock, spread
from ablate.settings import DecodeSettings, ProfileSettings

TOLERANCE = 1e-4
"""Largest difference of cached and full logits, as a fraction of the logits' standard deviation."""

CHECKED_STEPS = 8
"""Tokens that the check decodes after the prompt."""

Prompts = Callable[[int, int], Tensor]
"""Token ids `(batch, tokens)` on the model's device, the same at every call."""


@dataclass
class Profile:
    """Rows of `profiles`, the columns of `trials` that its first cells give, and what was wrong."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Generation:
    """One prompt read and some tokens written: the times, and the bytes of the cache at the end."""

    prefill_seconds: float
    seconds_per_token: float | None
    written_bytes: int
    allocated_bytes: int


def profile(model: Transformer, settings: ProfileSettings, precision: str, prompts: Prompts, clock: Clock) -> Profile:
    """Measure every cell of `settings` with a model of that precision whose cache is known to be right."""
    found = Profile()
    model.eval()
    for phase, batch, context, new_tokens in _cells(settings):
        runs = [generate(model, prompts(batch, context), new_tokens, clock) for _ in range(settings.rounds + 1)][1:]
        values = _prefill(runs, batch * context)
        if phase == "decode":
            values |= _decode(runs, batch)
            promised = cost.cache_bytes(model.settings, batch, context + new_tokens, precision)
            found.problems += _broken_promise(promised, runs[-1].written_bytes, batch, context + new_tokens)
        for metric, (value, width) in values.items():
            cell = {"phase": phase, "batch": batch, "context": context}
            found.rows.append({**cell, "metric": metric, "value": value, "spread": width})
            found.columns.setdefault(metric, value)
    return found


def _cells(settings: ProfileSettings) -> Iterator[tuple[str, int, int, int]]:
    """Phase, batch, context and new tokens. Prefill comes first: its first cell fills the columns, else decoding's."""
    if settings.prefill:
        for batch in settings.prefill.batch:
            for tokens in settings.prefill.tokens:
                yield "prefill", batch, tokens, 0
    if settings.decode:
        for batch in settings.decode.batch:
            for context in settings.decode.context:
                yield "decode", batch, context, settings.decode.new_tokens


@torch.inference_mode()
def generate(model: Any, prompt: Tensor, new_tokens: int, clock: Clock) -> Generation:
    """Continue `prompt` `(B, T)` greedily by `new_tokens` tokens, which may be none."""
    cache = model.new_cache(prompt.shape[0], prompt.shape[1] + new_tokens)
    begin = clock.mark()
    token = model(prompt, cache=cache)[:, -1:].argmax(-1)
    first = clock.mark()
    for _ in range(new_tokens - 1):
        token = model(token, cache=cache)[:, -1:].argmax(-1)
    last = clock.mark()
    if new_tokens:
        model(token, cache=cache)
    further = new_tokens - 1
    return Generation(
        clock.seconds(begin, first),
        clock.seconds(first, last) / further if further > 0 else None,
        cache.written_bytes(),
        cache.allocated_bytes(),
    )


Values = dict[str, tuple[float, float | None]]


def _prefill(runs: list[Generation], tokens: int) -> Values:
    seconds = [run.prefill_seconds for run in runs]
    rates = [tokens / each for each in seconds]
    return {
        "prefill_tokens_per_second": (tokens / median(seconds), spread(rates)),
        "prefill_seconds_p50": (median(seconds), spread(seconds)),
    }


def _decode(runs: list[Generation], batch: int) -> Values:
    written, allocated = runs[-1].written_bytes, runs[-1].allocated_bytes
    values: Values = {
        "kv_cache_bytes_measured": (written, None),
        "kv_cache_bytes_allocated": (allocated - written, None),
    }
    seconds = [run.seconds_per_token for run in runs if run.seconds_per_token is not None]
    if seconds:
        rates = [batch / each for each in seconds]
        values["decode_tokens_per_second"] = (batch / median(seconds), spread(rates))
        values["decode_seconds_per_token_p50"] = (median(seconds), spread(seconds))
    return values


def _broken_promise(promised: int | None, written: int, batch: int, tokens: int) -> list[str]:
    if promised is None or promised == written:
        return []
    return [f"the cache of {batch} x {tokens} tokens holds {written} bytes, not the {promised} that were promised"]


# --- Whether the cache is right ---------------------------------------------------------------------------------------


def cache_mismatch(model: Transformer, settings: DecodeSettings, prompts: Prompts) -> str | None:
    """What is wrong with the cache, over a prompt of the first context and some tokens one by one; None if nothing is.

    A difference in float32 counts if float64 shows it too: a router that stands between two experts may choose another
    one for the last bit of a logit, and is right both times.
    """
    context = settings.context[0]
    tokens = prompts(2, context + min(settings.new_tokens, CHECKED_STEPS))
    difference = cache_difference(model, tokens, context)
    if difference <= TOLERANCE:
        return None
    exact = cache_difference(copy_as(model, torch.float64), tokens, context)
    if exact <= TOLERANCE:
        return None
    return f"cached and full logits differ by {exact:.3g} standard deviations, more than {TOLERANCE:g}"


@torch.inference_mode()
def cache_difference(model: Transformer, tokens: Tensor, context: int) -> float:
    """The largest difference of any logit with and without a cache, in standard deviations of all of them."""
    model.eval()
    full = model(tokens)
    cache = model.new_cache(*tokens.shape)
    pieces = [tokens[:, :context], *(tokens[:, i : i + 1] for i in range(context, tokens.shape[1]))]
    parts = [model(piece, cache=cache) for piece in pieces]
    largest = (torch.cat(parts, dim=1) - full).abs().max()
    return 0.0 if largest == 0 else float(largest / full.std())


def copy_as(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy with weights of another dtype, on the same device, in evaluation mode."""
    fresh = build(model.settings)
    fresh.load_state_dict(model.state_dict())
    return fresh.to(model.embedding.weight.device, dtype).eval()

"""Reading a prompt and writing token by token: first whether the cache is right, then how fast it is.

Prefill is the time to the first token. Decoding n tokens takes n - 1 further steps, whose time by n - 1 is the time per
token. The last token is fed as well, outside the time, so that the cache ends with all of them in it. Making room for
the cache is outside the time too.

The cache is measured in three ways that must agree: by the formula, by its live tensors, and by what memory holds after
a generation that it did not hold before, so that nothing is kept elsewhere.

A decoder goes on where its prompt ends. An encoder-decoder's prompt is its source: prefill is the encoder's pass over
it and the decoder's first step, from the start token. An encoder has no more than a prefill, its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ablate import cost
from ablate.model import Transformer, build
from ablate.objectives import special_token
from ablate.profiling.clock import Clock, spread
from ablate.profiling.live import LiveBytes
from ablate.settings import DecodeSettings, ModelSettings, ProfileSettings, VariantSettings

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
    """One prompt read and some tokens written: the times, and the bytes of the cache at the end, 0 without one."""

    prefill_seconds: float
    seconds_per_token: float | None
    written_bytes: int
    allocated_bytes: int


def refusal(settings: ModelSettings) -> str | None:
    """Why such a model cannot write token by token; None where it can."""
    if settings.family == "encoder":
        return "an encoder fills in tokens, and writes none"
    return None if settings.is_causal else "what it writes would depend on tokens that are not written yet"


def feasible(settings: VariantSettings) -> VariantSettings:
    """A copy that asks for no decoding where the model cannot."""
    if refusal(settings.model) is None:
        return settings
    return settings.model_copy(update={"profile": settings.profile.model_copy(update={"decode": None})})


class Writer:
    """A model that reads prompts `(B, T)` and goes on token by token, with room for `new_tokens` in its cache."""

    def __init__(self, model: Transformer, prompt: Tensor, new_tokens: int) -> None:
        self.model, self.given = model, {"input_ids": prompt}
        if model.settings.family == "encoder_decoder":
            self.given["decoder_input_ids"] = prompt.new_full((len(prompt), 1), special_token(model.settings))
        self.writes_to = list(self.given)[-1]
        room = cached(model.settings, prompt.shape[1], new_tokens)
        self.cache = None if refusal(model.settings) else model.new_cache(len(prompt), *room)

    def read(self) -> Tensor:
        """Logits `(B, …, vocab_size)` of the prompt, or of the start token after it."""
        logits: Tensor = self.model(**self.given, cache=self.cache)
        return logits

    def write(self, token: Tensor) -> Tensor:
        """Logits `(B, 1, vocab_size)` after one more token `(B, 1)`."""
        logits: Tensor = self.model(**self.given | {self.writes_to: token}, cache=self.cache)
        return logits

    def at_once(self, tokens: Tensor) -> Tensor:
        """The logits of `read`, then those of `write` for each of the tokens `(B, n)`: in one pass without a cache."""
        whole = torch.cat([self.given[self.writes_to], tokens], dim=1)
        logits: Tensor = self.model(**self.given | {self.writes_to: whole})
        return logits


def cached(settings: ModelSettings, context: int, new_tokens: int) -> tuple[int, int]:
    """Tokens of its own text, and of a source, that a cache holds after a prompt and new tokens."""
    return (1 + new_tokens, context) if settings.family == "encoder_decoder" else (context + new_tokens, 0)


def profile(model: Transformer, settings: ProfileSettings, precision: str, prompts: Prompts, clock: Clock) -> Profile:
    """Measure every cell of `settings` with a model of that precision whose cache is known to be right."""
    found = Profile()
    model.eval()
    for phase, batch, context, new_tokens in _cells(settings):
        runs = [generate(model, prompts(batch, context), new_tokens, clock) for _ in range(settings.rounds + 1)][1:]
        values = _prefill(runs, batch * context)
        if phase == "decode":
            values |= _decode(runs, batch)
            tokens, source_tokens = cached(model.settings, context, new_tokens)
            promised = cost.cache_bytes(model.settings, batch, tokens, precision, source_tokens)
            held = held_bytes(model, prompts(batch, context), new_tokens)
            values["kv_cache_bytes_held"] = (held, None)
            found.problems += _disagreement(promised, runs[-1], held, f"{batch} x {context + new_tokens}")
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
def generate(model: Transformer, prompt: Tensor, new_tokens: int, clock: Clock) -> Generation:
    """Continue `prompt` `(B, T)` greedily by `new_tokens` tokens, which may be none."""
    writer = Writer(model, prompt, new_tokens)
    begin = clock.mark()
    token = writer.read()[:, -1:].argmax(-1)
    first = clock.mark()
    for _ in range(new_tokens - 1):
        token = writer.write(token)[:, -1:].argmax(-1)
    last = clock.mark()
    if new_tokens:
        writer.write(token)
    further = new_tokens - 1
    return Generation(
        clock.seconds(begin, first),
        clock.seconds(first, last) / further if further > 0 else None,
        writer.cache.written_bytes() if writer.cache else 0,
        writer.cache.allocated_bytes() if writer.cache else 0,
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


def _disagreement(promised: int | None, run: Generation, held: int, tokens: str) -> Iterator[str]:
    written, allocated = run.written_bytes, run.allocated_bytes
    if promised not in (None, written):
        yield f"the cache of {tokens} tokens holds {written} bytes, not the {promised} that were promised"
    if held != allocated:
        yield f"{held} bytes stay in memory for {tokens} tokens, not the {allocated} that the cache has room for"


@torch.no_grad()
def held_bytes(model: Transformer, prompt: Tensor, new_tokens: int) -> int:
    """Bytes that continuing `prompt` `(B, T)` leaves in memory as long as its cache lives.

    On a GPU as the allocator counts what it was asked for, elsewhere by the live tensors. What modules keep of their
    last pass, whatever it was, is not of the cache.
    """

    def generated(tokens: Tensor, n: int) -> Any:
        writer = Writer(model, tokens, n)
        writer.read()
        for _ in range(n):
            writer.write(prompt[:, :1])
        return writer.cache

    with _byte_counter(prompt.device) as count:
        generated(prompt[:, :1], 1)
        before = count()
        cache = generated(prompt, new_tokens)
        held: int = count() - before
        del cache
    return held


@contextmanager
def _byte_counter(device: torch.device) -> Iterator[Callable[[], int]]:
    """What tells the bytes in memory; on a CPU those of the tensors made since."""
    if device.type == "cuda":
        yield lambda: int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])
        return
    with LiveBytes() as live:
        yield lambda: live.made


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
    prompt, new = tokens[:, :context], tokens[:, context:]
    writer = Writer(model, prompt, new.shape[1])
    full = writer.at_once(new)
    parts = [writer.read(), *(writer.write(token) for token in new.split(1, dim=1))]
    largest = (torch.cat(parts, dim=1) - full).abs().max()
    return 0.0 if largest == 0 else float(largest / full.std())


def copy_as(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy with weights of another dtype, on the same device, in evaluation mode."""
    fresh = build(model.settings)
    fresh.load_state_dict(model.state_dict())
    return fresh.to(next(model.parameters()).device, dtype).eval()

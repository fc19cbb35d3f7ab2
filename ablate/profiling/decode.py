"""Reading a prompt and writing token by token: first whether the cache is right, then how fast it is.

Prefill is the time to the first token, and each cell's own. Decoding n tokens takes n - 1 further steps, whose time by
n - 1 is the time per token; a single one has none. The last token is fed as well, outside the time, so that the cache
ends with all of them in it. Making room for the cache is outside the time too.

The cache is measured in three ways that must agree: by the formula, by its live tensors, and by what memory holds after
a generation that it did not hold before, so that nothing is kept elsewhere.

A decoder goes on where its prompt ends. An encoder-decoder's prompt is its source: prefill is the encoder's pass over
it and the decoder's first step, from the start token. An encoder has no more than a prefill, its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ablate import cost
from ablate.model import Transformer, build
from ablate.objectives import special_token
from ablate.profiling import bandwidth, paths
from ablate.profiling.clock import Clock, series, spread
from ablate.profiling.live import LiveBytes
from ablate.pulse import beat
from ablate.settings import DecodeSettings, ModelSettings, ProfileSettings, VariantSettings

TOLERANCE = 1e-4
"""Largest difference of cached and full logits, as a fraction of the logits' standard deviation."""

CHECKED_STEPS = 8
"""Tokens that the check decodes after the prompt."""

Prompts = Callable[[int, int], Tensor]
"""Token ids `(batch, tokens)` on the model's device, the same at every call."""


Row = dict[str, Any]
"""Of `profiles`."""


@dataclass
class Profile:
    """Rows of `profiles`, the columns of `trials` that its first cells give, and what was wrong."""

    rows: list[Row] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, place: Row, rows: list[Row]) -> None:
        """What was measured there; of what is not known there is no row."""
        self.rows += [place | row for row in rows if row["value"] is not None]
        self.fill(rows)

    def fill(self, rows: list[Row]) -> None:
        """Columns that no cell before this one has filled."""
        for row in rows:
            if row.get("sample") is None:
                self.columns.setdefault(row["metric"], row["value"])


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
        beat()
        logits: Tensor = self.model(**self.given, cache=self.cache)
        return logits

    def write(self, token: Tensor) -> Tensor:
        """Logits `(B, 1, vocab_size)` after one more token `(B, 1)`."""
        beat()
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


def profile(
    model: Transformer,
    settings: ProfileSettings,
    precision: str,
    prompts: Prompts,
    clock: Clock,
    copy_bytes_per_second: float | None = None,
) -> Profile:
    """Measure every cell of `settings` with a model of that precision whose cache is known to be right.

    A model with several ways to read its cache decodes each cell in each of them. Prefill comes first, and the way that
    the settings choose: the first cell fills the columns, those of further tokens the first that has one.
    """
    found = Profile()
    model.eval()
    grid = product(settings.prefill.batch, settings.prefill.tokens) if settings.prefill else ()
    for batch, tokens in grid:
        runs = _rounds(model, prompts(batch, tokens), 0, settings.rounds, clock)
        found.add({"phase": "prefill", "batch": batch, "context": tokens}, _prefill(runs, batch * tokens))
    ways = paths.ways(model) if settings.decode else []
    for cell, way in product(settings.decode.cells if settings.decode else [], ways):
        with paths.taking(model, way):
            _measure_cell(found, model, Cell(*cell, precision), prompts, settings.rounds, clock, copy_bytes_per_second)
    return found


@dataclass(frozen=True)
class Cell:
    """So many sequences at once, tokens before the first new one, new tokens, and the precision of all."""

    batch: int
    context: int
    new_tokens: int
    precision: str

    def cache_bytes(self, settings: ModelSettings) -> int | None:
        """What the cache must hold at the end."""
        tokens, source_tokens = cached(settings, self.context, self.new_tokens)
        return cost.cache_bytes(settings, self.batch, tokens, self.precision, source_tokens)


def _measure_cell(
    found: Profile,
    model: Transformer,
    cell: Cell,
    prompts: Prompts,
    rounds: int,
    clock: Clock,
    copy_bytes_per_second: float | None,
) -> None:
    """Decode in one cell, the way that the model takes now."""
    prompt = prompts(cell.batch, cell.context)
    runs = _rounds(model, prompt, cell.new_tokens, rounds, clock)
    held = held_bytes(model, prompt, cell.new_tokens)
    read = bandwidth.step_bytes(model.settings, cell.batch, cell.context, cell.new_tokens, cell.precision)
    place = {"phase": "decode", "batch": cell.batch, "context": cell.context, "new_tokens": cell.new_tokens}
    rows = [*_decode(runs, cell.batch), *_shares(runs, read, copy_bytes_per_second)]
    name = paths.name_of(paths.taken(model))
    found.add(place | {"path": name}, [*rows, figure("kv_cache_bytes_held", held)])
    found.fill(_prefill(runs, cell.batch * cell.context))
    size = f"{cell.batch} x {cell.context + cell.new_tokens} tokens" + (f" (path {name})" if name else "")
    found.problems += _disagreement(cell.cache_bytes(model.settings), runs[-1], held, size)


def _rounds(model: Transformer, prompt: Tensor, new_tokens: int, rounds: int, clock: Clock) -> list[Generation]:
    """All but the first, which is the warm-up."""
    return [generate(model, prompt, new_tokens, clock) for _ in range(rounds + 1)][1:]


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


def _prefill(runs: list[Generation], tokens: int) -> list[Row]:
    seconds = [run.prefill_seconds for run in runs]
    return [_rate("prefill_tokens_per_second", tokens, seconds), *series("prefill_seconds", seconds)]


def _decode(runs: list[Generation], batch: int) -> list[Row]:
    written, allocated = runs[-1].written_bytes, runs[-1].allocated_bytes
    rows = series("time_to_first_token_seconds", [run.prefill_seconds for run in runs])
    if seconds := _per_token(runs):
        rows += [_rate("decode_tokens_per_second", batch, seconds), *series("decode_seconds_per_token", seconds)]
    bytes_ = {"kv_cache_bytes_measured": written, "kv_cache_bytes_allocated": allocated - written}
    return [*rows, *(figure(metric, value) for metric, value in bytes_.items())]


def _shares(runs: list[Generation], read: int | None, copy_bytes_per_second: float | None) -> list[Row]:
    """A step writes a token of each sequence, so that its time is that per token."""
    if not (seconds := _per_token(runs)):
        return []
    shares = [bandwidth.share(read, each, copy_bytes_per_second) for each in seconds]
    known = [each for each in shares if each is not None]
    value = bandwidth.share(read, median(seconds), copy_bytes_per_second)
    return [figure("decode_bandwidth_share", value, spread(known) if known else None)]


def _per_token(runs: list[Generation]) -> list[float]:
    return [run.seconds_per_token for run in runs if run.seconds_per_token is not None]


def _rate(metric: str, work: int, seconds: list[float]) -> Row:
    return figure(metric, work / median(seconds), spread([work / each for each in seconds]))


def figure(metric: str, value: float | None, width: float | None = None) -> Row:
    """A row of `profiles` that stands alone."""
    return {"metric": metric, "value": value, "spread": width}


def _disagreement(promised: int | None, run: Generation, held: int, tokens: str) -> Iterator[str]:
    written, allocated = run.written_bytes, run.allocated_bytes
    if promised not in (None, written):
        yield f"the cache of {tokens} holds {written} bytes, not the {promised} that were promised"
    if held != allocated:
        yield f"{held} bytes stay in memory for {tokens}, not the {allocated} that the cache has room for"


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
    """What is wrong with the cache, over a prompt and some tokens one by one; None if nothing is.

    However the cache can be read, in the first cell and in the longest, whose last logits alone are held. The check is
    in float32, whatever precision is timed: in bfloat16 the same sums in another order differ too. A difference counts
    if float64 shows it too: a router that stands between two experts may choose another one for the last bit of a
    logit, and is right both times.
    """
    first, longest = ((of(settings.context), of(settings.new_tokens)) for of in (itemgetter(0), max))
    for (context, new_tokens), way in product(dict.fromkeys([first, longest]), paths.ways(model)):
        given = (prompts(2, context + min(new_tokens, CHECKED_STEPS)), context, (context, new_tokens) == first)
        if _difference(model, way, *given) <= TOLERANCE:
            continue
        if (exact := _difference(copy_as(model, torch.float64), way, *given)) <= TOLERANCE:
            continue
        taken = f" (path {name})" if (name := paths.name_of(way)) else ""
        return f"cached and full logits differ by {exact:.3g} standard deviations, more than {TOLERANCE:g}{taken}"
    return None


def _difference(model: Transformer, way: paths.Way, tokens: Tensor, context: int, whole: bool) -> float:
    with paths.taking(model, way):
        return cache_difference(model, tokens, context, whole=whole)


@torch.inference_mode()
def cache_difference(model: Transformer, tokens: Tensor, context: int, *, whole: bool = True) -> float:
    """The largest difference of any logit with and without a cache, in standard deviations of all of them.

    Of the prompt's logits only the last if not `whole`: all of them may be more than the rest of the profile needs.
    """
    model.eval()
    prompt, new = tokens[:, :context], tokens[:, context:]
    writer = Writer(model, prompt, new.shape[1])

    def kept(logits: Tensor, last: int) -> Tensor:
        return logits if whole else logits[:, -last:].clone()

    full = kept(writer.at_once(new), 1 + new.shape[1])
    parts = [kept(writer.read(), 1), *(writer.write(token) for token in new.split(1, dim=1))]
    largest = (torch.cat(parts, dim=1) - full).abs().max()
    return 0.0 if largest == 0 else float(largest / full.std())


def as_served(model: Transformer, precision: str) -> Transformer:
    """The model that reads prompts and decodes: itself in fp32, else a copy with weights of that precision."""
    return model.eval() if precision == "fp32" else copy_as(model, torch.bfloat16)


def copy_as(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy with weights of another dtype, on the same device, in evaluation mode."""
    fresh = build(model.settings)
    fresh.load_state_dict(model.state_dict())
    return fresh.to(next(model.parameters()).device, dtype).eval()

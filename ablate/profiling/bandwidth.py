"""How much of the memory's bandwidth decoding used: the bytes that a step must read, by the speed of a bare copy.

A step that writes one token of each sequence must read

* every weight that it computes with, once, in the dtype of decoding: of experts those that the token is sent to, the
  output head in full, and of the tables of embeddings only the rows that are looked up, which an output head that is
  the same table has in it;
* the cache of the whole batch, as it is in the middle of the generation: after context + new_tokens // 2 tokens.

What is written, hidden states and whatever else a kernel moves are not among it. The speed is that of a copy of a
buffer that no cache holds, read and written (see `ablate.profiling.calibrate`). So the share is 1 where memory does
nothing but bring what is needed, and more where the processor's own caches hold a part of it, as with small models:
that is no fault.

It is None where the bytes are not known: for several sequences with experts of which each token meets some, since they
may share them or not; for a decoder that reads another sequence, some of whose weights only the prompt needs; where a
choice does not tell its cost; and where no copy was measured.
"""

from __future__ import annotations

from ablate import cost
from ablate.settings import ModelSettings


def step_bytes(settings: ModelSettings, batch: int, context: int, new_tokens: int, precision: str) -> int | None:
    """What one step of decoding in the middle of a generation must read."""
    weights = weight_elements(settings, batch)
    cache = cost.cache_bytes(settings, batch, context + new_tokens // 2, precision)
    return None if weights is None or cache is None else cost.BYTES[precision] * weights + cache


def weight_elements(settings: ModelSettings, batch: int) -> int | None:
    """The weights among it."""
    found = cost.cost(settings, 1)
    unsure = batch > 1 and found.params_active < found.params_total
    if settings.family == "encoder_decoder" or found.flops is None or unsure:
        return None
    return found.params_active - found.params_embedding + _of_tables(settings, batch)


def _of_tables(settings: ModelSettings, batch: int) -> int:
    """Of a tied table all; else a row for each sequence. Of other tables, of positions and types, one row for all."""
    width = settings.d_embed or settings.d_model
    others = [stage for stage in cost.stages(settings, 1) if stage["kind"] == "embedding"][1:]
    rows = settings.shape.vocab_size if settings.tie_embeddings else batch
    return rows * width + len(others) * settings.d_model


def share(read_bytes: int | None, seconds: float, copy_bytes_per_second: float | None) -> float | None:
    """Of the bandwidth that a copy has, in a step of so many `seconds`."""
    if read_bytes is None or not copy_bytes_per_second or seconds <= 0:
        return None
    return read_bytes / seconds / copy_bytes_per_second

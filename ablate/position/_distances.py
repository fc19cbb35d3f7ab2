"""Where queries and keys stand to each other: what biases of distances share."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(n_queries: int, n_keys: int, start: int, first: int, device: torch.device) -> Tensor:
    """Every key's place minus every query's, from the lowest up: `(n_queries + n_keys - 1,)`."""
    lowest = first - (start + n_queries - 1)
    return torch.arange(lowest, lowest + n_queries + n_keys - 1, device=device)


def by_pair(values: Tensor, n_queries: int) -> Tensor:
    """A value a distance, in the order of `distances`, as one a pair: `(H, T + K - 1)` to `(H, T, K)`."""
    rows: Tensor = values.unfold(-1, values.shape[-1] - n_queries + 1, 1).flip(-2)
    return rows


def shifted(values: Tensor, n_keys: int) -> Tensor:
    """Each query's own value a distance as one a pair: `(…, T, W)` to `(…, T, K)`, for W of K to T + K - 1.

    Row t has its keys from column T - 1 - t on. With one column more and all rows in one line, they begin W after those
    of the row before. Keys whose distance is beyond the W have values of other pairs.
    """
    n_queries, width = values.shape[-2:]
    line = torch.nn.functional.pad(values, (0, 1)).flatten(-2)
    rows: Tensor = line[..., n_queries - 1 : n_queries - 1 + n_queries * width].unflatten(-1, (n_queries, width))
    return rows[..., :n_keys]

"""The points of the curves so far, in some twenty bytes each, so that a long training can be kept with them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np


class Curve:
    """Points in the order in which they came. Each has a step, a split, a metric and a value."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], int] = {}
        self._steps, self._kinds, self._values = array("q"), array("i"), array("d")

    def add(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Points of one step and split."""
        for metric, value in values.items():
            self._steps.append(step)
            self._kinds.append(self._names.setdefault((split, metric), len(self._names)))
            self._values.append(value)

    def records(self) -> Iterator[tuple[int, str, dict[str, float]]]:
        """Step, split and values by metric, as they were added."""
        names = list(self._names)
        points = zip(self._steps, (names[kind] for kind in self._kinds), self._values, strict=True)
        for (step, split), each in groupby(points, lambda point: (point[0], point[1][0])):
            yield step, split, {metric: value for _, (_, metric), value in each}

    @property
    def names(self) -> list[tuple[str, str]]:
        """Splits and metrics, by the numbers that stand for them in `columns`."""
        return list(self._names)

    def columns(self) -> dict[str, np.ndarray]:
        """All points as arrays of one length."""
        return {"steps": np.array(self._steps), "kinds": np.array(self._kinds), "values": np.array(self._values)}

    @classmethod
    def of(cls, names: Sequence[Sequence[str]], columns: Mapping[str, np.ndarray]) -> Curve:
        """What `names` and `columns` were of. Raises `ValueError` where they do not belong together."""
        curve = cls()
        curve._names = {(split, metric): kind for kind, (split, metric) in enumerate(names)}
        steps, kinds, values = (columns[name] for name in ("steps", "kinds", "values"))
        if not len(steps) == len(kinds) == len(values) or (len(kinds) and not 0 <= kinds.max() < len(names)):
            raise ValueError("points of a curve that do not belong together")
        curve._steps.extend(steps.tolist())
        curve._kinds.extend(kinds.tolist())
        curve._values.extend(values.tolist())
        return curve

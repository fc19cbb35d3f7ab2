"""What interleaved repeats say: the times of each member by round, and whether the baseline differs from itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ablate.metrics import TIMED, Timing
from ablate.stats import Ranks, Ratio, TimingVerdict, by_rank, corrected, finite, paired_ratio

Row = Mapping[str, Any]

Said = TimingVerdict | Literal["withheld", "A/A too coarse"]
"""What is said of a time: its verdict, or why it has none."""

_WHERE = ("torch", "device_name", "gpu_uuid")


@dataclass(frozen=True)
class Rounds:
    """The rows of one contrast, in the order in which they were measured."""

    rows: Sequence[Row]

    @classmethod
    def latest(cls, rows: Sequence[Row]) -> Rounds:
        """Those of the contrast that was measured last, where there are several, and of where that was: rounds of
        another device or torch are not compared with.
        """
        in_order = sorted(rows, key=lambda row: (str(row["started_at"]), row["place"] or 0))
        own = [row for row in in_order if row["timing_id"] == in_order[-1]["timing_id"]]
        told = [_where(row) for row in own if _where(row)]
        elsewhere = {row["round"] for row in own if _where(row) not in (None, *told[-1:])}
        return cls([row for row in own if row["round"] not in elsewhere])

    @cached_property
    def baseline(self) -> str | None:
        """The name of the variant that is timed twice in each round."""
        return next((str(row["variant"]) for row in self.rows if row["is_partner"]), None)

    @cached_property
    def members(self) -> list[str]:
        """The names of the variants in their order, the baseline once."""
        return list(dict.fromkeys(str(row["variant"]) for row in self.rows if not row["is_partner"]))

    @cached_property
    def numbers(self) -> list[int]:
        """The rounds that there are."""
        return sorted({int(row["round"]) for row in self.rows})

    @cached_property
    def timings(self) -> list[Timing]:
        """What was timed."""
        return [kind for kind, metric in TIMED.items() if any(row["metric"] == metric for row in self.rows)]

    def values(self, kind: Timing, variant: str | None, *, partner: bool = False) -> dict[int, float]:
        """Seconds by round of a member that ended well."""
        found = {}
        for row in self.rows:
            own = row["variant"] == variant and bool(row["is_partner"]) == partner and row["status"] == "ok"
            if own and row["metric"] == TIMED[kind] and (value := finite(row["value"])) is not None and value > 0:
                found[int(row["round"])] = value
        return found

    def against_baseline(self, kind: Timing, variant: str) -> Ratio:
        """A variant by the baseline at the beginning of its round, as one of all that are compared."""
        return self._ratios.get((kind, variant)) or paired_ratio({}, {})

    def by_rank(self, kind: Timing, variant: str) -> Ranks | None:
        """The same by the ranks of the times alone; None where no round has both."""
        return self._ranks.get((kind, variant))

    @cached_property
    def contrasts(self) -> list[tuple[Timing, str]]:
        """All that is compared with the baseline: each time of each variant that some round has of both."""
        others = [name for name in self.members if name != self.baseline]
        return [(kind, name) for kind in self.timings for name in others if self._pair(kind, name)[0]]

    @cached_property
    def _ratios(self) -> dict[tuple[Timing, str], Ratio]:
        return corrected({each: paired_ratio(*self._pair(*each)) for each in self.contrasts})

    @cached_property
    def _ranks(self) -> dict[tuple[Timing, str], Ranks]:
        pairs = {each: self._pair(*each) for each in self.contrasts}
        return by_rank({key: (list(own.values()), list(base.values())) for key, (own, base) in pairs.items()})

    def _pair(self, kind: Timing, variant: str) -> tuple[dict[int, float], dict[int, float]]:
        """The times of a variant and of the baseline, in the rounds that have both."""
        own, base = self.values(kind, variant), self.values(kind, self.baseline)
        common = [each for each in own if each in base]
        return {each: own[each] for each in common}, {each: base[each] for each in common}

    def against_itself(self, kind: Timing) -> Ratio:
        """The baseline at the end of a round by the baseline at its beginning: the A/A check."""
        again = self.values(kind, self.baseline, partner=True)
        return paired_ratio(again, self.values(kind, self.baseline))

    def verdict(self, kind: Timing, variant: str) -> Said:
        """What may be said of a variant's time: nothing unless the baseline does not differ from itself.

        A check that would miss much says nothing of what it would miss. What it would see, it did not see: a variant
        whose whole interval lies beyond that differs by more than the order of a round, or chance, gives.
        """
        check, measured = self.against_itself(kind), self.against_baseline(kind, variant)
        if measured.n == 0:
            return measured.verdict
        if not check.holds_equality or check.visible is None:
            return "withheld"
        if check.is_coarse and not measured.is_beyond(check.visible):
            return "A/A too coarse"
        return measured.verdict


def _where(row: Row) -> tuple[Any, ...] | None:
    """What a row was measured with and on; None where it ended before it could tell."""
    return tuple(row[name] for name in _WHERE) if row["torch"] is not None else None

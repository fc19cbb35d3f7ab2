"""What may be said of numbers that are noisy: means, paired differences, ratios, growth, and how sure each is.

Verdicts refuse to call a difference inside the noise, and one that only the number of contrasts let through.
"""

from ablate.stats.bootstrap import LEAST_RESAMPLED, resampled_interval
from ablate.stats.growth import PowerLaw, power_law
from ablate.stats.many import corrected, holm
from ablate.stats.paired import Difference, Verdict, hedges_g, paired_difference
from ablate.stats.power import (
    COARSEST,
    MOST_REPEATS,
    POWER,
    SOUGHT,
    power,
    repeats_needed,
    seeds_needed,
    smallest_difference,
    smallest_visible,
    upper_sd,
    visible_by_interval,
)
from ablate.stats.ranks import Ranks, by_rank, rounds_to_decide
from ablate.stats.ratios import MOST_HIDDEN, Ratio, TimingVerdict, paired_ratio
from ablate.stats.student import ALPHA, CONFIDENCE
from ablate.stats.values import Summary, finite, summarize, values_by_seed

__all__ = [
    "ALPHA",
    "COARSEST",
    "CONFIDENCE",
    "LEAST_RESAMPLED",
    "MOST_HIDDEN",
    "MOST_REPEATS",
    "POWER",
    "SOUGHT",
    "Difference",
    "PowerLaw",
    "Ranks",
    "Ratio",
    "Summary",
    "TimingVerdict",
    "Verdict",
    "by_rank",
    "corrected",
    "finite",
    "hedges_g",
    "holm",
    "paired_difference",
    "paired_ratio",
    "power",
    "power_law",
    "repeats_needed",
    "resampled_interval",
    "rounds_to_decide",
    "seeds_needed",
    "smallest_difference",
    "smallest_visible",
    "summarize",
    "upper_sd",
    "values_by_seed",
    "visible_by_interval",
]

"""Robust aggregators of clients' updates, with settings that the command line can override."""

import dataclasses
from collections.abc import Mapping

from fedpax.aggregators import (
    Aggregator,
    bulyan,
    coordinate_median,
    geometric_median,
    krum,
    trimmed_mean,
)
from fedpax.checks import COUNT, COUNT_OR_ZERO, Range, check_ranges
from fedpax.experiments.client_aggregators import AggregatorConfig


@dataclasses.dataclass(frozen=True)
class CoordinateMedian(AggregatorConfig):
    """The median of each coordinate."""

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the median."""
        return coordinate_median()


@dataclasses.dataclass(frozen=True)
class TrimmedMean(AggregatorConfig):
    """The mean of each coordinate without its largest and smallest values.

    Attributes:
        trim_fraction: share of the values that is left out at each end, below 0.5.
    """

    trim_fraction: float = 0.1

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "aggregator", trim_fraction=Range(least=0, below=0.5))

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return trimmed_mean(self.trim_fraction)


@dataclasses.dataclass(frozen=True)
class Krum(AggregatorConfig):
    """Krum, or Multi-Krum: the updates that are nearest to others.

    Attributes:
        num_byzantine: f, number of clients that may send wrong updates.
        num_selected: number of updates that are averaged; 1 for Krum.
    """

    num_byzantine: int = 1
    num_selected: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "aggregator", num_byzantine=COUNT_OR_ZERO, num_selected=COUNT)

    def limits(self, cohort_size: int) -> Mapping[str, int]:
        """Return the largest `num_byzantine`, (n - 3) // 2, and `num_selected`, n - f - 2."""
        return {
            "num_byzantine": (cohort_size - 3) // 2,
            "num_selected": cohort_size - self.num_byzantine - 2,
        }

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make Krum."""
        return krum(self.num_byzantine, num_selected=self.num_selected)


@dataclasses.dataclass(frozen=True)
class Bulyan(AggregatorConfig):
    """Bulyan: Krum, and then the values nearest to the median of each coordinate.

    Attributes:
        num_byzantine: f, number of clients that may send wrong updates.
    """

    num_byzantine: int = 1

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "aggregator", num_byzantine=COUNT_OR_ZERO)

    def limits(self, cohort_size: int) -> Mapping[str, int]:
        """Return the largest `num_byzantine`, (n - 3) // 4."""
        return {"num_byzantine": (cohort_size - 3) // 4}

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make Bulyan."""
        return bulyan(self.num_byzantine)


@dataclasses.dataclass(frozen=True)
class GeometricMedian(AggregatorConfig):
    """The geometric median, by smoothed Weiszfeld iterations.

    Attributes:
        num_iterations: number of iterations.
    """

    num_iterations: int = 8

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "aggregator", num_iterations=COUNT)

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the median."""
        return geometric_median(num_iterations=self.num_iterations)

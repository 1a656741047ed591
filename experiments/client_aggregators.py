"""Aggregators as configuration: how the updates of an experiment's clients are combined."""

import abc
import dataclasses
from typing import Literal

from fedpax.aggregators import (
    Aggregator,
    adaptive_clip,
    bulyan,
    chain,
    clip_by_norm,
    codecs,
    compressed_mean,
    coordinate_median,
    geometric_median,
    krum,
    mean,
    private_mean,
    private_secure_mean,
    quantized_mean,
    secure_mean,
    trimmed_mean,
)
from fedpax.experiments.ranges import (
    COUNT,
    COUNT_OR_ZERO,
    DECAY,
    FRACTION,
    LEVELS,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    check_ranges,
)


@dataclasses.dataclass(frozen=True)
class AggregatorConfig(abc.ABC):
    """An aggregator; the base class of the aggregators."""

    @abc.abstractmethod
    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the aggregator.

        Args:
            seed: random seed of its noise, masks and roundings.
            expected_participants: number of clients in a round; the average with Poisson sampling.
        """


@dataclasses.dataclass(frozen=True)
class Mean(AggregatorConfig):
    """The weighted mean."""

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return mean()


@dataclasses.dataclass(frozen=True)
class ClippedMean(AggregatorConfig):
    """The weighted mean of updates that are clipped to a norm.

    Attributes:
        max_norm: largest norm of an update; with `quantile`, that of the first round.
        quantile: quantile of the updates' norms that the largest norm follows. Default None: the
            norm is fixed.
    """

    max_norm: float = 1.0
    quantile: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "aggregator", max_norm=POSITIVE, quantile=FRACTION)

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make clipping and the mean."""
        if self.quantile is None:
            return chain(clip_by_norm(self.max_norm), mean())
        clip = adaptive_clip(initial_norm=self.max_norm, quantile=self.quantile, seed=seed)
        return chain(clip, mean())


@dataclasses.dataclass(frozen=True)
class PrivateMean(AggregatorConfig):
    """The mean with central differential privacy for clients: clipping, and noise on the server.

    Attributes:
        max_norm: largest norm of an update; with `quantile`, that of the first round.
        noise_multiplier: standard deviation of the noise of the sum, divided by `max_norm`.
        quantile: quantile of the updates' norms that the largest norm follows. Default None: the
            norm is fixed.
    """

    max_norm: float = 1.0
    noise_multiplier: float = 1.0
    quantile: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(
            self,
            "aggregator",
            max_norm=POSITIVE,
            noise_multiplier=NON_NEGATIVE,
            quantile=FRACTION,
        )

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return private_mean(
            max_norm=self.max_norm,
            noise_multiplier=self.noise_multiplier,
            seed=seed,
            expected_participants=expected_participants,
            quantile=self.quantile,
        )


@dataclasses.dataclass(frozen=True)
class SecureMean(AggregatorConfig):
    """The mean by secure aggregation: integers under masks that cancel in the sum.

    Attributes:
        max_value: largest absolute value of an entry; larger ones are clipped.
        bits: bits of the integers.
        num_neighbors: number of clients that each client shares masks with, even. Default None:
            all others.
    """

    max_value: float = 1.0
    bits: int = 16
    num_neighbors: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "aggregator", max_value=POSITIVE, bits=COUNT, num_neighbors=COUNT)

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return secure_mean(
            max_value=self.max_value, bits=self.bits, seed=seed, num_neighbors=self.num_neighbors
        )


@dataclasses.dataclass(frozen=True)
class PrivateSecureMean(AggregatorConfig):
    """The mean with distributed differential privacy: noise of all clients in a secure sum.

    Attributes:
        max_norm: largest norm of an update.
        noise_multiplier: standard deviation of the noise of the sum, divided by `max_norm`.
        min_participants: least number of clients that are present; with fewer, the result is 0.
            Default None: all of them.
        num_neighbors: as for `SecureMean`.
    """

    max_norm: float = 1.0
    noise_multiplier: float = 1.0
    min_participants: int | None = None
    num_neighbors: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(
            self,
            "aggregator",
            max_norm=POSITIVE,
            noise_multiplier=POSITIVE,
            min_participants=COUNT,
            num_neighbors=COUNT,
        )

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return private_secure_mean(
            max_norm=self.max_norm,
            noise_multiplier=self.noise_multiplier,
            seed=seed,
            min_participants=self.min_participants,
            num_neighbors=self.num_neighbors,
        )


@dataclasses.dataclass(frozen=True)
class QuantizedMean(AggregatorConfig):
    """The mean of updates on a few levels, whose packed integers an all-reduce sums.

    Attributes:
        num_levels: number of levels of an entry.
    """

    num_levels: int = 16

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "aggregator", num_levels=LEVELS)

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return quantized_mean(self.num_levels)


@dataclasses.dataclass(frozen=True)
class CompressedMean(AggregatorConfig):
    """The mean of updates that a codec of `fedpax.aggregators.codecs` compresses.

    Attributes:
        codec: name of the codec.
        bits: bits of an entry for "uniform". Default None: 4.
        fraction: share of the entries that "top_k" and "random_k" send. Default None: 1/64.
        rotated: whether a random rotation comes before the codec.
        error_feedback: whether what a codec leaves out is added to the update of the next round.
            The codecs that are biased need it: "sign", "e3m0" and "top_k".
    """

    codec: Literal["uniform", "drive", "terngrad", "sign", "e3m0", "top_k", "random_k"] = "uniform"
    bits: int | None = None
    fraction: float | None = None
    rotated: bool = False
    error_feedback: bool = False

    def __post_init__(self) -> None:
        """Check the ranges, and that the codec has the settings.

        Raises:
            ValueError: a number is out of range, or the codec does not use it.
        """
        check_ranges(self, "aggregator", bits=COUNT, fraction=PROBABILITY)
        for name, users in {"bits": ("uniform",), "fraction": ("top_k", "random_k")}.items():
            if getattr(self, name) is not None and self.codec not in users:
                raise ValueError(
                    f"aggregator.{name}={getattr(self, name)} has no effect with codec="
                    f"{self.codec!r}. Leave it out, or choose codec={users[0]!r}."
                )

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        codec = self._codec()
        return compressed_mean(
            codecs.rotated(codec) if self.rotated else codec,
            error_feedback=self.error_feedback,
            seed=seed,
        )

    def _codec(self) -> codecs.Codec:
        match self.codec:
            case "uniform":
                return codecs.uniform(self.bits or 4)
            case "top_k":
                return codecs.top_k(self.fraction or 1 / 64)
            case "random_k":
                return codecs.random_k(self.fraction or 1 / 64, unbiased=not self.error_feedback)
            case "drive":
                return codecs.drive(unbiased=not self.error_feedback)
            case name:
                return {"terngrad": codecs.terngrad, "sign": codecs.sign, "e3m0": codecs.e3m0}[
                    name
                ]()


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
        check_ranges(self, "aggregator", trim_fraction=DECAY)

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return trimmed_mean(self.trim_fraction)


@dataclasses.dataclass(frozen=True)
class Krum(AggregatorConfig):
    """Krum, or Multi-Krum: the updates that are nearest to others.

    Attributes:
        num_byzantine: largest number of clients that lie.
        num_selected: number of updates that are averaged; 1 for Krum.
    """

    num_byzantine: int = 1
    num_selected: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "aggregator", num_byzantine=COUNT_OR_ZERO, num_selected=COUNT)

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make Krum."""
        return krum(self.num_byzantine, num_selected=self.num_selected)


@dataclasses.dataclass(frozen=True)
class Bulyan(AggregatorConfig):
    """Bulyan: Krum, and then the values nearest to the median of each coordinate.

    Attributes:
        num_byzantine: largest number of clients that lie.
    """

    num_byzantine: int = 1

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "aggregator", num_byzantine=COUNT_OR_ZERO)

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

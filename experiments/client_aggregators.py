"""Aggregators as configuration: how the updates of an experiment's clients are combined."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Literal

from fedpax.aggregators import (
    Aggregator,
    adaptive_clip,
    chain,
    clip_by_norm,
    codecs,
    compressed_mean,
    mean,
    private_mean,
    private_secure_mean,
    quantized_mean,
    secure_mean,
)
from fedpax.checks import (
    COUNT,
    EVEN,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    IntRange,
    check_ranges,
)
from fedpax.errors import ArgumentError

CodecName = Literal["uniform", "drive", "terngrad", "sign", "e3m0", "top_k", "random_k"]
"""The names of the codecs."""


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

    def limits(self, cohort_size: int) -> Mapping[str, int]:
        """Return the largest value of each setting that the size of a cohort limits, by name."""
        return {}

    def check_cohort(self, cohort_size: int) -> None:
        """Check that the settings fit the size of a cohort.

        Args:
            cohort_size: number of clients in a round; the largest number with Poisson sampling.

        Raises:
            ValueError: a setting is too large.
        """
        for name, most in self.limits(cohort_size).items():
            value = getattr(self, name)
            if value is None or value <= most:
                continue
            at = f"aggregator.{name}={value} with cohort.size={cohort_size}"
            try:
                dataclasses.replace(self, **{name: most})
            except ValueError:  # the limit is below the smallest value of the setting
                raise ArgumentError(f"{at}: too few clients. Use a larger --cohort.size.") from None
            raise ArgumentError(
                f"{at}: expected at most {most}. Set --aggregator.{name} to at most {most}, or "
                "change --cohort.size."
            )


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
        """Make the mean.

        Raises:
            ValueError: with `quantile`, the noise is too large for the number of clients.
        """
        if self.quantile is not None and self.noise_multiplier >= (
            most := expected_participants / 10
        ):
            raise ArgumentError(
                f"aggregator.noise_multiplier={self.noise_multiplier} with aggregator.quantile="
                f"{self.quantile}: expected a number below {most:g}, a tenth of the clients of a "
                "round. The noisy number of clipped updates alone would spend the privacy budget. "
                "Lower --aggregator.noise_multiplier, set --aggregator.quantile=None, or have more "
                "clients in a round with --cohort.size or --cohort.sampling_probability."
            )
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
        bits: bits of the integers, 2 to 24.
        num_neighbors: number of clients that each client shares masks with, even. Default None:
            all others.
    """

    max_value: float = 1.0
    bits: int = 16
    num_neighbors: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(
            self,
            "aggregator",
            max_value=POSITIVE,
            bits=IntRange(least=2, most=24),
            num_neighbors=EVEN,
        )

    def limits(self, cohort_size: int) -> Mapping[str, int]:
        """Return the largest `bits`, whose sums fit 32 bits, and `num_neighbors`."""
        bits = ((2**31 - 1) // cohort_size + 1).bit_length()
        return {"bits": bits, "num_neighbors": _most_neighbors(cohort_size)}

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
            num_neighbors=EVEN,
        )

    def limits(self, cohort_size: int) -> Mapping[str, int]:
        """Return the largest `min_participants` and `num_neighbors`."""
        return {"min_participants": cohort_size, "num_neighbors": _most_neighbors(cohort_size)}

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

    It has error feedback. With sampled clients, the residual of one client is added to the update
    of another.

    Attributes:
        num_levels: number of levels of an entry.
    """

    num_levels: int = 16

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "aggregator", num_levels=IntRange(least=2, most=256))

    def make(self, seed: int, expected_participants: float) -> Aggregator:
        """Make the mean."""
        return quantized_mean(self.num_levels)


@dataclasses.dataclass(frozen=True)
class CompressedMean(AggregatorConfig):
    """The mean of updates that a codec of `fedpax.aggregators.codecs` compresses.

    Attributes:
        codec: name of the codec.
        bits: bits of an entry for "uniform", 1 to 16. Default None: 4.
        fraction: share of the entries that "top_k" and "random_k" send. Default None: 1/64.
        rotated: whether a random rotation comes before the codec.
        error_feedback: whether the part of an update that is not sent is added to the next update.
            With sampled clients, the residual of one client is added to the update of another.
            "sign" and "top_k" are biased and need it to converge. "e3m0" is biased too, but
            Streaming DiLoCo uses it without error feedback. "terngrad" and "uniform" below 5 bits
            are too inexact for it.
    """

    codec: CodecName = "uniform"
    bits: int | None = None
    fraction: float | None = None
    rotated: bool = False
    error_feedback: bool = False

    def __post_init__(self) -> None:
        """Check the codec and the ranges, and that the codec has the settings.

        Raises:
            ValueError: there is no codec of this name, a number is out of range, the codec does not
                use it, or the codec cannot have error feedback.
        """
        check_ranges(self, "aggregator", bits=IntRange(least=1, most=16), fraction=PROBABILITY)
        for name, users in {"bits": ("uniform",), "fraction": ("top_k", "random_k")}.items():
            if getattr(self, name) is not None and self.codec not in users:
                raise ArgumentError(
                    f"aggregator.{name}={getattr(self, name)} has no effect with aggregator.codec="
                    f"{self.codec}. Leave out --aggregator.{name}, or set --aggregator.codec="
                    f"{' or '.join(users)}."
                )
        if self.error_feedback and not self._codec().contractive:
            other = "bits to 5 or more" if self.codec == "uniform" else "codec to another codec"
            raise ArgumentError(
                f"aggregator.error_feedback=True with aggregator.codec={self.codec}: its error can "
                "be larger than the update, so that what is left out could grow without bound. Set "
                f"--aggregator.error_feedback=False, or set --aggregator.{other}."
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


def _most_neighbors(cohort_size: int) -> int:
    """Return the largest even number of other clients."""
    return (cohort_size - 1) // 2 * 2

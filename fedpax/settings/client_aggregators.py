"""Aggregators as configuration: the functions of `fedpax.aggregators`, with their settings."""

import bisect
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from fedpax import aggregators
from fedpax.aggregators import Aggregator, chain, codecs
from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.settings.function_settings import FunctionSettings, accepted, is_choice

CODEC_DEFAULTS: Mapping[str, float] = {"bits": 4, "fraction": 1 / 64}
"""The values with which experiments begin, of settings that a codec requires."""

_CODECS: Mapping[str, Callable[..., codecs.Codec]] = {
    name: codec
    for name in codecs.__all__
    if inspect.isfunction(codec := getattr(codecs, name))
    and name != "float32"  # does not compress
    and is_choice(codec, CODEC_DEFAULTS, codecs.Codec)
}
"""The codecs by name."""

if TYPE_CHECKING:
    CodecName = str
else:
    CodecName = Literal[tuple(_CODECS)]


def _required(codec: str) -> list[str]:
    parameters = inspect.signature(_CODECS[codec]).parameters
    return [
        name
        for name in CODEC_DEFAULTS
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    ]


NOISY_DEVIATION = 0.1
"""With noise, the least deviation of a column as a share of half its range."""


class StatisticsAggregator(NamedTuple):
    """The aggregator of means and variances, as arguments of `fit_features`."""

    aggregator: Aggregator
    # `number of entries -> largest absolute value of an entry`, or None if the aggregator limits no
    # update
    limit: Callable[[int], float] | None = None
    least_deviation: float = 0.0  # the least deviation of a column as a share of half its range


@dataclasses.dataclass(frozen=True)
class AggregatorConfig(FunctionSettings):
    """An aggregator; the base class of the aggregators."""

    group = "aggregator"
    given: ClassVar[Mapping[str, Any]] = {
        "seed": 0,
        "expected_participants": 1e30,
        "releases_before": 0,
    }
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "private_mean": {"max_norm": 1.0, "noise_multiplier": 1.0},
        "private_secure_mean": {"max_norm": 1.0, "noise_multiplier": 1.0},
        "secure_mean": {"max_value": 1.0},
        "quantized_mean": {"num_levels": 16},
        "trimmed_mean": {"trim_fraction": 0.1},
        "krum": {"num_byzantine": 1},
        "bulyan": {"num_byzantine": 1},
    }

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        """Return the aggregators of `fedpax.aggregators`, by name."""
        known = {name: getattr(aggregators, name) for name in aggregators.__all__}
        known |= {"clipped_mean": _clipped_mean, "compressed_mean": _compressed_mean}
        return {
            name: function
            for name, function in known.items()
            if inspect.isfunction(function) and is_choice(function, cls.given, Aggregator)
        }

    @property
    def counts_alike(self) -> bool:
        """Return whether each client counts alike, with few or many examples."""
        aggregator: Aggregator = self.call(self.given)
        return aggregator.counts_alike

    def make(self, seed: int, expected_participants: float, releases_before: int = 0) -> Aggregator:
        """Make the aggregator; a private one counts releases before the first round too."""
        if hasattr(self, "count_stddev"):
            _check_noise(self, expected_participants)
        aggregator: Aggregator = self.call(
            {
                "seed": seed,
                "expected_participants": expected_participants,
                "releases_before": releases_before,
            }
        )
        return aggregator

    def for_statistics(self, seed: int, num_clients: int) -> StatisticsAggregator:
        """Make the aggregator of a run for its means and variances."""
        # Few numbers, sent once, are not compressed; a clipping norm that follows a quantile keeps
        # its first value.
        settings: Any = self
        fields = {field.name for field in dataclasses.fields(self)}
        if {"codec", "num_levels"} & fields:
            settings = aggregator("mean")
        elif "quantile" in fields and settings.quantile is not None:
            settings = dataclasses.replace(settings, quantile=None)
        settings.check_cohort(num_clients, of_all=True)
        made = settings.make((seed + 0x5EED5) % 2**31, num_clients)
        if "max_norm" in fields:
            least = NOISY_DEVIATION if getattr(settings, "noise_multiplier", 0) else 0.0
            return StatisticsAggregator(made, lambda n: settings.max_norm / n**0.5, least)
        if "max_value" in fields:
            return StatisticsAggregator(made, lambda n: settings.max_value)
        return StatisticsAggregator(made)

    def limits(self, cohort_size: int) -> Mapping[str, int]:
        """Return the largest value of each setting that the size of a cohort limits, by name."""
        made: Aggregator = self.call(self.given)
        limits = {} if made.limits is None else made.limits(cohort_size)
        return {name: most for name, most in limits.items() if hasattr(self, name)}

    def least_clients(self, cohort_size: int) -> int:
        """Return the fewest clients that settings take which fit the size of a cohort."""

        def is_taken(number: int) -> bool:
            try:
                self.check_cohort(number)
            except ArgumentError:
                return False
            return True

        return 1 + bisect.bisect_left(range(1, cohort_size), True, key=is_taken)

    def check_cohort(self, cohort_size: int, *, of_all: bool = False) -> None:
        """Check that the settings fit the size of a cohort, or the number of all clients."""
        size, more = f"cohort.size={cohort_size}", "use a larger --cohort.size"
        if of_all:
            size = count_of(cohort_size, "client") + " in all"
            more = "add clients, or choose another --aggregator"
        share = getattr(self, "trim_fraction", 0)
        if 0 < share * cohort_size < 1 - 1e-9:
            least = math.ceil(1000 / cohort_size) / 1000
            remedy = f"Set --aggregator.trim_fraction={least:g} or more"
            raise ArgumentError(
                f"aggregator.trim_fraction={share:g} with {size} leaves out no client, expected a "
                f"client at each end. {remedy if cohort_size > 2 else more.capitalize()}, or 0 for "
                "the mean of all clients."
            )
        for name, most in self.limits(cohort_size).items():
            value = getattr(self, name)
            if value is None or value <= most:
                continue
            at = f"aggregator.{name}={value} with {size}"
            try:
                dataclasses.replace(self, **{name: most})
            except ValueError:  # the limit is below the smallest value of the setting
                raise ArgumentError(f"{at}: too few clients. {more.capitalize()}.") from None
            raise ArgumentError(
                f"{at}: expected at most {most}. Set --aggregator.{name} to at most {most}, or "
                f"{more if of_all else 'change --cohort.size'}."
            )


def aggregator(function: str | Callable[..., Aggregator], **settings: Any) -> AggregatorConfig:
    """Configure an aggregator, for the field `aggregator` of an experiment.

    The command line then takes `--aggregator=krum --aggregator.num_byzantine=2`.

    Args:
        function: the name of an aggregator, or a function of one's own that returns an
            `Aggregator`. It can have the arguments `seed`, `expected_participants` and
            `releases_before`, which the experiment gives. Its other arguments are numbers, texts or
            choices, or have defaults.
        **settings: values of these other arguments.

    Raises:
        ValueError: there is no such aggregator, or a setting is out of range.

    Example:
        >>> aggregator("krum", num_byzantine=2).num_selected
        1
    """
    return AggregatorConfig.configure(function, settings)


def __getattr__(name: str) -> Any:
    """Return the configuration class of an aggregator, as older runs name it."""
    return AggregatorConfig.named(name)


def _clipped_mean(  # noqa: D417, --help shows the arguments that it states
    max_norm: float = 1.0, quantile: float | None = None, *, seed: int
) -> Aggregator:
    """Average updates by weight after clipping them to a norm.

    Args:
        max_norm: largest norm of an update; with `quantile`, in the first round.
        quantile: quantile of the updates' norms that the largest norm follows. Default None: the
            norm is fixed.
    """
    clip = aggregators.clip_by_norm(max_norm)
    if quantile is not None:
        clip = aggregators.adaptive_clip(initial_norm=max_norm, quantile=quantile, seed=seed)
    return chain(clip, aggregators.mean())


def _compressed_mean(  # noqa: D417, --help shows the arguments that it states
    codec: CodecName = "uniform",
    bits: int | None = None,
    fraction: float | None = None,
    rotated: bool = False,
    error_feedback: bool = False,
    *,
    seed: int,
) -> Aggregator:
    """Average updates that a codec of `fedpax.aggregators.codecs` compresses.

    Args:
        codec: name of the codec.
        bits: bits of an entry for "uniform", 1 to 16. Default None: 4.
        fraction: share of the entries that "top_k" and "random_k" send. Default None: 1/64.
        rotated: whether a random rotation comes before the codec.
        error_feedback: whether the part of an update that is not sent is added to the next update.
            With sampled clients, the residual of one client is added to the update of another.
            "sign" and "top_k" need it to converge. "terngrad" and "uniform" below 5 bits are too
            inexact for it.

    Raises:
        ValueError: a number is out of range, the codec does not use it, or the codec cannot have
            error feedback.
    """
    given = {name: x for name, x in (("bits", bits), ("fraction", fraction)) if x is not None}
    for name, value in given.items():
        users = [user for user in _CODECS if name in _required(user)]
        if codec not in users:
            raise ArgumentError(
                f"aggregator.{name}={value} has no effect with aggregator.codec={codec}. Leave out "
                f"--aggregator.{name}, or set --aggregator.codec={' or '.join(users)}."
            )
    make = _CODECS[codec]
    settings: dict[str, Any] = {name: CODEC_DEFAULTS[name] for name in _required(codec)} | given
    made = make(**settings, **accepted(make, {"unbiased": not error_feedback}))
    if error_feedback and not made.contractive:
        change = "bits to 5 or more" if codec == "uniform" else "codec to another codec"
        raise ArgumentError(
            f"aggregator.error_feedback=True with aggregator.codec={codec}: its error can be "
            "larger than the update, so that what is left out could grow without bound. Set "
            f"--aggregator.error_feedback=False, or set --aggregator.{change}."
        )
    return aggregators.compressed_mean(
        codecs.rotated(made) if rotated else made, error_feedback=error_feedback, seed=seed
    )


def _check_noise(settings: Any, expected_participants: float) -> None:
    """Check that the count of an adaptive norm leaves room for the noise."""
    most = expected_participants / 10
    if settings.quantile is None or settings.count_stddev is not None:
        return
    if settings.noise_multiplier >= most:
        raise ArgumentError(
            f"aggregator.noise_multiplier={settings.noise_multiplier} with aggregator.quantile="
            f"{settings.quantile}: expected a number below {most:g}, a tenth of the clients of a "
            "round. The noisy number of clipped updates alone would spend the privacy budget. "
            "Lower --aggregator.noise_multiplier, set --aggregator.quantile=None, or have more "
            "clients in a round with --cohort.size or --cohort.sampling_probability."
        )

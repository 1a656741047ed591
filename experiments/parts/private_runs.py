"""Check a private run, and state its epsilon and the values without noise when it starts."""

from collections.abc import Sequence
from typing import Protocol

from fedpax.aggregators import Aggregator, PrivacyAccountant, privacy_spent
from fedpax.console import count_of
from fedpax.data import ClientSampler
from fedpax.errors import ArgumentError, ConfigurationError, MissingPackageError
from fedpax.settings.client_aggregators import AggregatorConfig
from fedpax.settings.client_methods import MethodConfig
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.training.startup_report import METRICS_HAVE_NO_NOISE
from fedpax.training.training_config import TrainingConfig


class PrivateRun(Protocol):
    """The fields of an experiment with clients that decide what is private."""

    @property
    def method(self) -> MethodConfig:
        """The method."""
        ...

    @property
    def aggregator(self) -> AggregatorConfig:
        """The aggregator."""
        ...

    @property
    def cohort(self) -> CohortConfig:
        """The clients of a round."""
        ...

    @property
    def training(self) -> TrainingConfig:
        """The training loop."""
        ...

    @property
    def releases_before(self) -> int:
        """The number of private releases before the first round."""
        ...

    @property
    def disclosures(self) -> Sequence[str]:
        """Lines on facts about the data that clients tell before the first round."""
        ...


def configured_accountant(config: AggregatorConfig) -> PrivacyAccountant | None:
    """Return the accountant of an aggregator's rounds; None if it is not private."""
    accountant: PrivacyAccountant | None = config.call(config.given).accountant
    return accountant


def make_aggregator(experiment: PrivateRun, sampler: ClientSampler) -> Aggregator:
    """Make the aggregator for the clients of a sampler."""
    seed, expected = experiment.cohort.seed, sampler.expected_participants
    return experiment.aggregator.make(seed, expected, experiment.releases_before)


def check_private(experiment: PrivateRun) -> None:
    """Check that a private aggregator fits the method, and the clients of a round."""
    method, aggregator = experiment.method, experiment.aggregator
    if method.has_aggregator and configured_accountant(aggregator) is not None:
        method.check_private(f"aggregator={aggregator.function.__name__}", method.sent_exactly)
    is_sampled = experiment.cohort.sampling_probability is not None
    if is_sampled and getattr(aggregator, "min_participants", 0) is None:
        raise ArgumentError(
            "aggregator.min_participants=None with cohort.sampling_probability: the result is "
            "0 unless all --cohort.size clients join a round. Set "
            "--aggregator.min_participants to a number that nearly all rounds have."
        )


def check_noise_is_kept(former: AggregatorConfig, new: AggregatorConfig) -> None:
    """Check that a resumed private run has the noise that it began with.

    Its accountant has one noise multiplier.
    """
    accountant, before = configured_accountant(new), configured_accountant(former)
    if accountant is None:
        return
    noise = None if before is None else before.noise_multiplier
    if noise != accountant.noise_multiplier:
        raise ConfigurationError(
            f"aggregator.noise_multiplier is {accountant.noise_multiplier:g}, and the run began "
            f"with {'no noise' if noise is None else f'{noise:g}'}: epsilon would count its rounds "
            "with the new noise. Set the former --aggregator, or another --job_log_dir to start a "
            "new run."
        )


def describe_privacy(experiment: PrivateRun, *, in_stages: bool = False) -> tuple[str, ...]:
    """Return lines that state epsilon and what has no noise; none if the run is not private."""
    accountant = configured_accountant(experiment.aggregator)
    if accountant is None:
        has_no_noise = getattr(experiment.aggregator, "noise_multiplier", None) == 0
        return ("no noise: aggregator.noise_multiplier is 0, and no epsilon holds",) * has_no_noise
    method, training, rounds = experiment.method, experiment.training, experiment.training.rounds
    accountant = accountant._replace(releases_before=experiment.releases_before)
    epsilon = accountant.epsilon(rounds)
    before = " and the release of statistics before them" if accountant.releases_before else ""
    lines = [
        f"private: epsilon {epsilon:.4g} of the model for delta {accountant.delta:g}, after "
        f"{count_of(rounds, 'round')}{before}, for a client whose updates count or are 0, without "
        "amplification by sampling",
        METRICS_HAVE_NO_NOISE,
        *experiment.disclosures,
    ]
    chosen = {"keep_best": training.keep_best, "stop_after": training.stop_after}
    if fields := " and ".join(f"training.{name}={x}" for name, x in chosen.items() if x):
        lines.append(
            f"not private: the choice of a round by {fields}, from exact metrics of held-out "
            "examples, which epsilon does not count"
        )
    if not in_stages:
        lines += _describe_amplification(experiment, accountant)
        lines.append(
            "simulated in one program: the noise is drawn from "
            f"cohort.seed={experiment.cohort.seed}, which config.json holds. A reader who knows "
            "the seed can subtract the noise, and no epsilon holds"
        )
    elif not hasattr(experiment.aggregator, "min_participants"):
        lines.append(
            "noise: drawn here, from the operating system, anew in each round. It is not sent, and "
            "no seed gives it; this process sees what it hides"
        )
    if not method.function.__module__.startswith("fedpax."):
        lines.append(
            f"epsilon holds if nothing but updates changes the state of {method.function.__name__}:"
            " see what clients send in fedpax.stages(...).explain()"
        )
    return tuple(lines)


def _describe_amplification(experiment: PrivateRun, accountant: PrivacyAccountant) -> list[str]:
    """State the smaller epsilon of Poisson sampling in one program."""
    # It holds if the output does not show who joined: `private_mean` adds its noise to any round; a
    # mean with `min_participants` can be exactly 0. Sites know `cohort.seed`, and so who joined.
    probability = experiment.cohort.sampling_probability
    is_private_mean = isinstance(experiment.aggregator, AggregatorConfig.of("private_mean"))
    if probability is None or not is_private_mean:
        return []
    try:
        epsilon = privacy_spent(
            noise_multiplier=accountant.noise_multiplier,
            num_rounds=experiment.training.rounds,
            delta=accountant.delta,
            sampling_probability=probability,
            releases_before=accountant.releases_before,
        )
    except MissingPackageError:
        return ["install fedpax[privacy] for epsilon with amplification by Poisson sampling"]
    return [
        f"private: epsilon {epsilon:.4g} with amplification by Poisson sampling of the rounds, for "
        "a reader of the model alone, who knows neither cohort.seed nor which clients join a round"
    ]

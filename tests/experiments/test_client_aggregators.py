"""The aggregators as experiments, alone, with methods, and with Poisson sampling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax import Cohort
from fedpax.experiments.aggregators import AGGREGATORS
from fedpax.experiments.catalog import find_group
from fedpax.experiments.client_aggregators import (
    ClippedMean,
    CompressedMean,
    Krum,
    Mean,
    PrivateMean,
    PrivateSecureMean,
    QuantizedMean,
    SecureMean,
    TrimmedMean,
)
from fedpax.experiments.client_methods import ClientTraining
from fedpax.experiments.fedavg_clients import CohortConfig
from fedpax.experiments.fedavg_synthetic import fedavg_synthetic
from fedpax.experiments.fedbuff_images import fedbuff_digits
from fedpax.experiments.methods import METHODS, PERSONAL_METHODS
from fedpax.training.algorithm import RESERVED_METRICS
from fedpax.training.saved_params import load_params
from fedpax.training.trainer import train

CLIENTS = 8


def loss_fn(w, batch):
    return jnp.mean((batch - w) ** 2), {}


def training(aggregator, server) -> ClientTraining:
    made = aggregator.make(3, CLIENTS)
    return ClientTraining(CLIENTS, CLIENTS, 0.1, server.make(), 1, made)


COHORT = Cohort(
    np.random.default_rng(0).normal(3, 5, (CLIENTS, 4, 2, 96)).astype(np.float32),
    client_ids=np.arange(CLIENTS),
)


def method_of(experiment, aggregator):
    method = experiment.method
    algorithm = method.make(loss_fn, training(aggregator, experiment.server))
    init = method.make_init(lambda key: jax.random.normal(key, 96))
    return algorithm, algorithm.init(init(jax.random.key(0)))


@functools.cache
def round_of(aggregator):
    algorithm, state = method_of(fedavg_synthetic(), aggregator)
    return jax.jit(algorithm.round)(state, COHORT)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_round_with_each_aggregator_is_another_one_than_with_the_mean(name: str) -> None:
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, ClippedMean):
        aggregator = dataclasses.replace(aggregator, max_norm=0.1)  # the first updates are small
    state, metrics = round_of(aggregator)
    mean, _ = round_of(Mean())
    assert np.isfinite(metrics["loss"]) and np.isfinite(state.params).all()
    assert not RESERVED_METRICS & set(metrics)  # the training loop would refuse the aggregator
    assert np.array_equal(state.params, mean.params) == (name == "mean")


@pytest.mark.parametrize("name", {**METHODS, **PERSONAL_METHODS})
def test_each_method_takes_an_aggregator(name: str) -> None:
    fields = {**METHODS, **PERSONAL_METHODS}[name]
    experiment = dataclasses.replace(fedavg_synthetic(), **fields)
    algorithm, state = method_of(experiment, PrivateMean())
    _, metrics = jax.eval_shape(algorithm.round, state, COHORT)
    assert "noise_stddev" in metrics


def test_the_aggregator_of_an_experiment_is_trained_with(tmp_path) -> None:
    experiment = dataclasses.replace(
        fedavg_synthetic(),
        aggregator=PrivateMean(max_norm=1e-6, noise_multiplier=0.0),
        cohort=CohortConfig(size=10, max_steps=2),
    )
    experiment = dataclasses.replace(
        experiment, training=dataclasses.replace(experiment.training, rounds=2)
    )
    run = experiment.build()
    init = run.algorithm.init(run.init(jax.random.key(experiment.training.seed)))
    train(experiment, tmp_path)
    after = load_params(tmp_path)
    moved = [np.sum((a - b) ** 2) for a, b in zip(leaves(after), leaves(init.params), strict=True)]
    assert 0 < np.sqrt(sum(moved)) < 3e-6  # two rounds of at most 1e-6


def test_poisson_cohorts_have_the_expected_participants_as_denominator() -> None:
    experiment = dataclasses.replace(
        fedavg_synthetic(),
        aggregator=PrivateMean(max_norm=2.0, noise_multiplier=0.5),
        cohort=CohortConfig(size=24, max_steps=2, sampling_probability=0.2),
    )
    run = experiment.build()
    state = run.algorithm.init(run.init(jax.random.key(0)))
    step, present = jax.jit(run.algorithm.round), []
    for _ in range(5):
        cohort = next(run.cohorts)
        present.append(int(np.sum(np.asarray(cohort.client_ids) >= 0)))
        state, metrics = step(state, cohort)
        # 30 clients join with probability 0.2.
        assert metrics["noise_stddev"] == pytest.approx(0.5 * 2.0 / 6, rel=1e-5)
    assert len(set(present)) > 1 and max(present) < 24


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClippedMean(max_norm=0.0), r"aggregator.max_norm=0.0: .* Set --aggregator.max_no"),
        (lambda: PrivateMean(noise_multiplier=-1.0), "aggregator.noise_multiplier=-1.0: expected"),
        (lambda: PrivateSecureMean(noise_multiplier=0.0), "aggregator.noise_multiplier=0.0: expec"),
        (lambda: SecureMean(bits=0), "aggregator.bits=0: expected"),
        (lambda: QuantizedMean(num_levels=1), "aggregator.num_levels=1: expected"),
        (lambda: TrimmedMean(trim_fraction=1.0), "aggregator.trim_fraction=1.0: expected"),
        (lambda: Krum(num_byzantine=-1), "aggregator.num_byzantine=-1: expected"),
        (lambda: CompressedMean(bits=2, codec="sign"), "bits=2 has no effect .* codec='uniform'"),
        (lambda: CompressedMean(fraction=0.1), "fraction=0.1 has no effect .* codec='top_k'"),
        (lambda: CohortConfig(size=3, sampling_probability=0.0), "cohort.sampling_probability=0.0"),
        (
            lambda: dataclasses.replace(
                fedavg_synthetic(),
                aggregator=PrivateSecureMean(),
                cohort=CohortConfig(size=20, sampling_probability=0.1),
            ),
            "Set --aggregator.min_participants",
        ),
        (
            lambda: dataclasses.replace(
                fedbuff_digits(),
                cohort=dataclasses.replace(fedbuff_digits().cohort, sampling_probability=0.1),
            ),
            "sampling_probability=0.1 has no effect: clients arrive",
        ),
    ],
)
def test_bad_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_group_has_the_problem_of_the_methods() -> None:
    group, methods = find_group("aggregators_digits"), find_group("methods_digits")
    assert group.target == methods.target
    assert group.experiments["mean"] == methods.experiments["fedavg"]
    assert list(group.experiments) == list(AGGREGATORS)

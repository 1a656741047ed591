"""The aggregators as experiments, alone, with methods, and with Poisson sampling."""

import dataclasses
import functools
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax import Cohort
from fedpax.checkpoints.saved_state import load_params
from fedpax.experiments.catalog import find_group
from fedpax.experiments.experiment_groups import AGGREGATORS, METHODS, PERSONAL_METHODS
from fedpax.experiments.fedavg_synthetic import fedavg_synthetic
from fedpax.experiments.fedbuff_images import fedbuff_digits
from fedpax.run_files.metrics import RESERVED_METRICS
from fedpax.settings.client_aggregators import (
    AggregatorConfig,
    Bulyan,
    ClippedMean,
    CodecName,
    CompressedMean,
    Krum,
    Mean,
    PrivateMean,
    PrivateSecureMean,
    QuantizedMean,
    SecureMean,
    TrimmedMean,
)
from fedpax.settings.client_methods import ClientTraining
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.training.trainer import train

CLIENTS = 9  # 8 others, to which secure_mean adds masks four at a time

# Compilation takes most of the time, and each program runs a few times only.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


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
def rounds_of(aggregator):
    """A round of clients that count alike, and one of clients of more and more examples."""
    algorithm, state = method_of(fedavg_synthetic(), aggregator)
    step = quick_jit(algorithm.round)
    ones, rising = np.ones(CLIENTS, np.float32), np.arange(1, CLIENTS + 1, dtype=np.float32)
    return tuple(step(state, COHORT._replace(num_examples=sizes)) for sizes in (ones, rising))


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", [*AGGREGATORS, "clip_by_norm"])
def test_a_round_with_each_aggregator_is_another_one_than_with_the_mean(name: str) -> None:
    aggregator = {**AGGREGATORS, "clip_by_norm": ClippedMean()}[name]
    if isinstance(aggregator, ClippedMean):
        aggregator = dataclasses.replace(aggregator, max_norm=0.1)  # the first updates are small
    (state, metrics), (of_sizes, _) = rounds_of(aggregator)
    (mean, _), _ = rounds_of(Mean())
    assert np.isfinite(metrics["loss"]) and np.isfinite(state.params).all()
    assert not RESERVED_METRICS & set(metrics)  # the training loop would refuse the aggregator
    assert np.array_equal(state.params, mean.params) == (name == "mean")
    assert np.array_equal(state.params, of_sizes.params) == aggregator.counts_alike


@pytest.mark.parametrize("name", {**METHODS, **PERSONAL_METHODS})
def test_each_method_takes_an_aggregator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**METHODS, **PERSONAL_METHODS}[name]
    experiment = fedavg_synthetic()
    monkeypatch.setattr(type(experiment), "takes_clusters", True)
    experiment = dataclasses.replace(experiment, **fields)
    algorithm, state = method_of(experiment, PrivateMean(noise_multiplier=0.0))
    _, metrics = jax.eval_shape(algorithm.round, state, COHORT)
    assert "noise_stddev" in metrics


@pytest.fixture(scope="module")
def poisson_rounds():
    """Run five rounds; return the first and last parameters, and clients and noise by round."""
    experiment = dataclasses.replace(
        fedavg_synthetic(),
        aggregator=PrivateMean(max_norm=1e-6, noise_multiplier=0.5),
        cohort=CohortConfig(size=24, max_steps=2, sampling_probability=0.2),
    )
    run = experiment.build()
    first = state = run.algorithm.init(
        jax.tree.map(
            lambda leaf: np.random.default_rng(0).normal(size=leaf.shape).astype(leaf.dtype),
            jax.eval_shape(run.init, jax.random.key(0)),
        )
    )
    step, present, noise = quick_jit(run.algorithm.round), [], []
    for _ in range(5):
        cohort = next(run.cohorts)
        present.append(int(np.sum(np.asarray(cohort.client_ids) >= 0)))
        state, metrics = step(state, cohort)
        noise.append(metrics["noise_stddev"])
    return leaves(first.params), leaves(state.params), present, noise


def test_the_aggregator_of_an_experiment_is_trained_with(poisson_rounds) -> None:
    before, after, *_ = poisson_rounds
    moved = [np.sum((a - b) ** 2) for a, b in zip(after, before, strict=True)]
    # Of each round: 24 clients of norm 1e-6 divided by 6, and less than the norm of the noise.
    assert 0 < np.sqrt(sum(moved)) < 5 * 2 * 4e-6


def test_poisson_cohorts_have_the_expected_participants_as_denominator(poisson_rounds) -> None:
    _, _, present, noise = poisson_rounds
    # 30 clients join with probability 0.2.
    assert noise == pytest.approx([0.5 * 1e-6 / 6] * 5, rel=1e-5)
    assert len(set(present)) > 1 and max(present) < 24


@pytest.mark.slow
def test_the_training_loop_uses_the_aggregator(tmp_path) -> None:
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClippedMean(max_norm=0.0), r"aggregator.max_norm=0.0: .* Set --aggregator.max_no"),
        (lambda: PrivateMean(noise_multiplier=-1.0), "aggregator.noise_multiplier=-1.0: expected"),
        (lambda: PrivateSecureMean(noise_multiplier=0.0), "aggregator.noise_multiplier=0.0: expec"),
        (lambda: SecureMean(bits=1), "aggregator.bits=1: expected an int from 2 to 24. Set --ag"),
        (
            lambda: SecureMean(num_neighbors=3),
            "aggregator.num_neighbors=3: expected an even int of at least 2",
        ),
        (
            lambda: PrivateSecureMean(num_neighbors=1),
            "aggregator.num_neighbors=1: expected an even",
        ),
        (lambda: QuantizedMean(num_levels=1), "aggregator.num_levels=1: expected"),
        (
            lambda: TrimmedMean(trim_fraction=0.5),
            "aggregator.trim_fraction=0.5: .* below 0.5. Set -",
        ),
        (lambda: Krum(num_byzantine=-1), "aggregator.num_byzantine=-1: expected"),
        (lambda: CompressedMean(bits=17), "aggregator.bits=17: expected an int from 1 to 16"),
        (
            lambda: CompressedMean(bits=2, codec="sign"),
            "bits=2 has no effect .* --aggregator.codec=uniform",
        ),
        (
            lambda: CompressedMean(fraction=0.1),
            "fraction=0.1 has no effect .* --aggregator.codec=random_k or top_k",
        ),
        (
            lambda: CompressedMean(codec="foo"),
            "aggregator.codec='foo': expected one of drive, e3m0, .* uniform. Set --",
        ),
        (
            lambda: CompressedMean(codec="terngrad", error_feedback=True),
            "--aggregator.error_feedback=False, or set --aggregator.codec to another codec",
        ),
        (
            lambda: CompressedMean(error_feedback=True),
            "--aggregator.error_feedback=False, or set --aggregator.bits to 5 or more",
        ),
        (
            lambda: PrivateMean(quantile=0.5).make(0, 10),
            "expected a number below 1, .* Lower --aggregator.noise_multiplier, set --aggregat",
        ),
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
            "sampling_probability=0.1 has no effect: .* Leave out --cohort.sampling_probability",
        ),
    ],
)
def test_bad_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


VALUES = {int: (0, 1, 2, 3, 4, 5, 16, 17, 24, 25, 256, 257), float: (0.0, 0.3, 0.5, 1.0, 1.5, 30.0)}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_library_takes_what_a_configuration_takes(name: str) -> None:
    base = AGGREGATORS[name]
    hints = get_type_hints(type(base))
    changes = [
        {field: value}
        for field, hint in hints.items()
        for kind, values in VALUES.items()
        if kind in (hint, *get_args(hint))
        for value in values
    ]
    for change in changes:
        try:
            config = dataclasses.replace(base, **change)
        except ValueError as error:
            assert f"--aggregator.{next(iter(change))}" in str(error)
        else:
            config.make(0, 1e3)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("codec", get_args(CodecName))
def test_error_feedback_is_refused_where_the_library_refuses_it(codec: str, rotated: bool) -> None:
    settings = {"codec": codec, "rotated": rotated, "error_feedback": True}
    if codec == "terngrad":
        with pytest.raises(ValueError, match=r"Set --aggregator\.error_feedback=False"):
            CompressedMean(**settings)
    else:
        CompressedMean(**settings, bits=5 if codec == "uniform" else None).make(0, 10)


@pytest.mark.parametrize(
    ("aggregator", "size"),
    [
        (SecureMean(), 300),
        (PrivateSecureMean(), 9),
        (Krum(), 10),
        (Krum(num_byzantine=0), 9),
        (Bulyan(), 11),
    ],
)
def test_the_limits_of_a_cohort_are_those_of_the_library(aggregator, size: int) -> None:
    experiment = dataclasses.replace(fedavg_synthetic(), cohort=CohortConfig(size=size))

    def trace(config) -> None:
        made = config.make(3, size)

        @fedpax.program(clients=size)
        def aggregate(updates):
            return made.aggregate(made.init(None), updates, None)

        jax.eval_shape(aggregate, jax.ShapeDtypeStruct((size, 2), np.float32))

    for name, most in aggregator.limits(size).items():
        step = 2 if name == "num_neighbors" else 1
        largest, above = (
            dataclasses.replace(aggregator, **{name: value}) for value in (most, most + step)
        )
        trace(dataclasses.replace(experiment, aggregator=largest).aggregator)
        with pytest.raises(ValueError, match=name):
            trace(above)
        with pytest.raises(
            ValueError, match=rf"cohort\.size={size}: .* Set --aggregator\.{name} to"
        ):
            dataclasses.replace(experiment, aggregator=above)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", AggregatorConfig.functions())
def test_a_cohort_that_an_aggregator_takes_is_one_of_the_library(name: str, size: int) -> None:
    """`limits` has every setting that the library compares with the number of participants."""
    base = AggregatorConfig.of(name)()
    numbers = [f.name for f in dataclasses.fields(base) if int in (f.type, *get_args(f.type))]
    for change in [{}, *({field: value} for field in numbers for value in (1, 4, 9))]:
        try:
            config = dataclasses.replace(base, **change)
            config.check_cohort(size)
        except ValueError:
            continue
        made = config.make(3, size)
        init = fedpax.program(clients=size)(made.init)
        aggregate = fedpax.program(clients=size)(made.aggregate)
        state = jax.eval_shape(init, jnp.zeros(2))
        jax.eval_shape(aggregate, state, jnp.zeros((size, 2)), jnp.ones(size))


@pytest.mark.parametrize(
    ("share", "size", "remedy"),
    [(0.1, 8, "Set --aggregator.trim_fraction=0.125 or more, or 0"), (0.4, 2, "Use a larger --")],
)
def test_a_trimmed_mean_that_trims_no_client_is_told(share: float, size: int, remedy: str) -> None:
    """0.1 of 8 clients is none of them: one faulty client would move the model as in a mean."""
    change = functools.partial(dataclasses.replace, fedavg_synthetic())
    config = TrimmedMean(trim_fraction=share)
    with pytest.raises(ValueError, match=rf"with cohort\.size={size} leaves out no.*{remedy}"):
        change(aggregator=config, cohort=CohortConfig(size=size))
    change(aggregator=TrimmedMean(trim_fraction=0.0), cohort=CohortConfig(size=size))
    change(aggregator=TrimmedMean(trim_fraction=0.1), cohort=CohortConfig(size=10))


def near_krum(num_byzantine: int = 1, trim_fraction: float = 0.0) -> fedpax.aggregators.Aggregator:
    """Select updates, with an aggregator of this test."""
    return fedpax.aggregators.krum(num_byzantine)


def test_an_aggregator_of_another_name_has_the_rules_of_its_settings() -> None:
    config = AggregatorConfig.of(near_krum)
    config().check_cohort(5)
    with pytest.raises(ValueError, match=r"num_byzantine=2 .*: expected at most 1"):
        config(num_byzantine=2).check_cohort(5)
    with pytest.raises(ValueError, match=r"size=5 leaves out no client.*trim_fraction=0\.2 or"):
        config(trim_fraction=0.1).check_cohort(5)


@pytest.mark.parametrize(
    "aggregator",
    [Krum(), Bulyan(), SecureMean(num_neighbors=2), PrivateSecureMean(num_neighbors=2)],
)
def test_a_cohort_too_small_for_any_value_of_a_setting(aggregator) -> None:
    with pytest.raises(ValueError, match=r"with cohort\.size=2: too few clients\. Use a larger -"):
        dataclasses.replace(fedavg_synthetic(), aggregator=aggregator, cohort=CohortConfig(size=2))


def test_the_group_has_the_problem_of_the_methods() -> None:
    group, methods = find_group("aggregators_digits"), find_group("methods_digits")
    assert group.target == methods.target
    assert group.experiments["mean"] == methods.experiments["fedavg"]
    assert list(group.experiments) == list(AGGREGATORS)
    used = {config.function for config in AGGREGATORS.values()}
    assert used == {AggregatorConfig.of(name).function for name in AggregatorConfig.functions()}

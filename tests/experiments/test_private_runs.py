"""What a private run sends without noise: no method with an epsilon lets it change the model."""

import dataclasses
import functools
import re
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax import Cohort
from fedpax.aggregators import (
    PrivacyAccountant,
    adaptive_clip,
    chain,
    privacy_spent,
    private_mean,
)
from fedpax.algorithms import async_diloco, fedavg, fedbuff
from fedpax.errors import ConfigurationError
from fedpax.experiments.fedavg_synthetic import fedavg_synthetic
from fedpax.experiments.fedbuff_images import fedbuff_digits
from fedpax.run_files.configuration import write_configuration
from fedpax.settings.client_aggregators import aggregator
from fedpax.settings.client_methods import ClientTraining, MethodConfig, method
from fedpax.training.resume_checks import check_configuration

N = 4
COHORT = Cohort(
    np.random.default_rng(0).normal(size=(N, 2, 2, 5)).astype(np.float32),
    client_ids=np.arange(N),
)
METHODS = [name for name in MethodConfig.functions() if method(name).has_aggregator]
PRIVATE = ("private_mean", "private_secure_mean")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def loss_fn(w, batch):
    return jnp.mean((batch - w) ** 2), {"accuracy": jnp.mean(batch > w)}


def algorithm_and_state(name: str, combine: str):
    config, made = method(name), aggregator(combine).make(3, N)
    settings = ClientTraining(N, N, 0.1, optax.sgd(1.0), 1, made)
    algorithm = config.call(settings.arguments(loss_fn))  # unchecked
    init = config.make_init(lambda key: jax.random.normal(key, 5))
    return algorithm, algorithm.init(init(jax.random.key(0)))


@functools.cache
def sent_for_the_state(name: str, combine: str) -> Counter[str]:
    """Return what participants send if only the state is asked for, and no metric."""
    algorithm, state = algorithm_and_state(name, combine)
    stages = fedpax.stages(lambda s, c: algorithm.round(s, c)[0], state, COHORT)
    sent = [v for stage in stages for v in (*stage.terms, *stage.shown)]
    return Counter(f"{v.name.partition('[')[0]} {v.dtype}" for v in sent)


@pytest.mark.parametrize("combine", ["private_mean", slow("private_secure_mean")])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_sends_more_than_updates_states_it(name: str, combine: str) -> None:
    algorithm, state = algorithm_and_state(name, combine)
    more = sent_for_the_state(name, combine) - sent_for_the_state("fedavg", combine)
    updates = {
        f"sum of {word} {kind}" for word in ("bound", "send") for kind in ("float32", "int32")
    }
    more = {sent for sent in more if sent not in updates}
    _, metrics = jax.eval_shape(algorithm.round, state, COHORT)
    if (name, combine) == ("feddyn", "private_secure_mean"):  # it sums the number itself
        assert more == {"sum of <lambda> float32"}
        more = set()
    assert bool(more) == (algorithm.sent_exactly is not None), more
    assert ("epsilon" in metrics) == (algorithm.sent_exactly is None)


@pytest.mark.parametrize("combine", PRIVATE)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scaffold", "changes of controls"),
        ("mime", "gradients at the shared model"),
        ("self_tuning_fedavg", "losses and gradients"),
        ("fednova", "numbers of local steps"),
    ],
)
def test_a_run_whose_model_no_epsilon_covers_is_refused(
    name: str, words: str, combine: str
) -> None:
    fields = {"method": method(name), "aggregator": aggregator(combine)}
    message = f"method={name} with aggregator={combine}: clients send {words}.*Set --method to one"
    with pytest.raises(ValueError, match=message) as error:
        dataclasses.replace(fedavg_synthetic(), **fields)
    listed = re.search(r"to one of (.*?), or set another", str(error.value))
    assert listed is not None
    covered = listed[1].split(", ")
    assert {"fedavg", "fedprox", "ditto"} <= {*covered} and name not in covered
    for other in covered:
        dataclasses.replace(fedavg_synthetic(), **fields | {"method": method(other)})


def without_aggregator(loss_fn, *, cohort_size, client_optimizer) -> fedpax.FederatedAlgorithm:
    return fedavg(loss_fn, cohort_size=cohort_size, client_optimizer=client_optimizer)


@pytest.mark.parametrize("combine", PRIVATE)
@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("scaffold", "clients send changes of controls too, which change the model and have no"),
        (without_aggregator, "has no argument aggregator, so that nothing gets noise"),
    ],
)
def test_an_own_experiment_cannot_make_a_method_that_no_epsilon_covers(
    chosen, words: str, combine: str
) -> None:
    settings = ClientTraining(N, N, 0.1, optax.sgd(1.0), 1, aggregator(combine).make(3, N))
    with pytest.raises(ValueError, match=f"with a private aggregator: .*{words}"):
        method(chosen).make(loss_fn, settings)
    method(chosen).make(loss_fn, settings._replace(aggregator=None))
    clipped = settings._replace(
        aggregator=aggregator("private_mean", noise_multiplier=0.0).make(3, N)
    )
    if chosen is without_aggregator:
        with pytest.raises(ValueError, match=r"no effect: without_aggregator\(\) has no argument"):
            method(chosen).make(loss_fn, clipped)
    else:
        method(chosen).make(loss_fn, clipped)
    method("fedavg").make(loss_fn, settings)


def test_a_mean_without_noise_goes_with_each_method() -> None:
    clipped = aggregator("private_mean", noise_multiplier=0.0)
    run = dataclasses.replace(fedavg_synthetic(), method=method("scaffold"), aggregator=clipped)
    notes = run.build().notes
    assert not [line for line in notes if "private" in line]
    assert "no noise: aggregator.noise_multiplier is 0, and no epsilon holds" in notes


def own_method(
    loss_fn, *, cohort_size, client_optimizer, aggregator=None
) -> fedpax.FederatedAlgorithm:
    return fedavg(
        loss_fn,
        cohort_size=cohort_size,
        client_optimizer=client_optimizer,
        aggregator=aggregator,
    )


@pytest.mark.parametrize("combine", PRIVATE)
def test_a_private_run_resumes_with_its_noise(combine: str, tmp_path: Path) -> None:
    runs = {
        noise: dataclasses.replace(
            fedavg_synthetic(),
            aggregator=aggregator(combine if noise else "private_mean", noise_multiplier=noise),
        )
        for noise in (0.5, 4.0, 0.0)
    }
    write_configuration(tmp_path, runs[0.5], "")
    allowed = {"allow_config_change": ["aggregator"]}
    for change in ({"delta": 1e-4}, {"max_norm": 0.1}):
        settings = aggregator(combine, noise_multiplier=0.5, **change)
        changed = dataclasses.replace(runs[0.5], aggregator=settings)
        check_configuration(tmp_path, changed, **allowed)
    check_configuration(tmp_path, runs[0.0], **allowed)
    words = "noise_multiplier is 4, and the run began with 0.5: epsilon would count"
    with pytest.raises(ConfigurationError, match=words):
        check_configuration(tmp_path, runs[4.0], **allowed)
    write_configuration(tmp_path, runs[0.0], "")
    with pytest.raises(ConfigurationError, match="the run began with no noise"):
        check_configuration(tmp_path, runs[4.0], **allowed)


@pytest.mark.parametrize("combine", PRIVATE)
def test_a_private_run_tells_its_epsilon_and_what_has_no_noise(combine: str) -> None:
    run = dataclasses.replace(
        fedavg_synthetic(), aggregator=aggregator(combine, noise_multiplier=3.0, delta=1e-4)
    )
    rounds = run.training.rounds
    epsilon = PrivacyAccountant(3.0, 1e-4, 0, combine != "private_mean").epsilon(rounds)
    notes = run.build().notes
    start = f"private: epsilon {epsilon:.4g} of the model for delta 0.0001, after {rounds} rounds,"
    assert notes[0].startswith(start) and len(notes) == 3
    assert "not private: the metrics of clients, such as the loss, metrics of held-out" in notes[1]
    assert notes[2].startswith("simulated in one program: the noise is drawn from cohort.seed=0")
    # In stages, the coordinator draws noise, or each participant of a secure sum its share.
    in_stages = run.coordinate(30).notes
    assert in_stages[:2] == notes[:2]
    drawn_here = [line.startswith("noise: drawn here, from the operating") for line in in_stages]
    assert drawn_here[2:] == ([] if combine == "private_secure_mean" else [True])
    own = dataclasses.replace(run, method=method(own_method))
    assert "own_method: see what clients send in fedpax.stages" in own.build().notes[3]


def test_only_poisson_sampling_in_one_program_is_told_as_amplified(monkeypatch) -> None:
    pytest.importorskip("dp_accounting")
    config = aggregator("private_mean", noise_multiplier=3.0, delta=1e-4)
    fixed = dataclasses.replace(fedavg_synthetic(), aggregator=config)
    cohort = dataclasses.replace(fixed.cohort, size=30, sampling_probability=0.1)
    run = dataclasses.replace(fixed, cohort=cohort)
    told = "private: epsilon {:.4g} with amplification by Poisson sampling of the rounds".format
    settings = {"noise_multiplier": 3.0, "num_rounds": run.training.rounds, "delta": 1e-4}
    line = told(privacy_spent(sampling_probability=0.1, **settings))
    assert [note.startswith(line) for note in run.build().notes] == [False, False, True, False]
    # A site knows the seed, and so which of its clients join a round; a secure sum of too few
    # clients is 0, which shows that too few joined; and a fixed size has other neighbours.
    secure = aggregator("private_secure_mean", noise_multiplier=3.0, min_participants=5)
    for other in (
        run.coordinate(30),
        dataclasses.replace(run, aggregator=secure).build(),
        fixed.build(),
    ):
        assert not any("with amplification" in note for note in other.notes)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "dp_accounting", None)
        assert run.build().notes[2].startswith("install fedpax[privacy] for epsilon with")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"keep_best": "loss"}, "training.keep_best=loss, from exact metrics of held-out"),
        ({"stop_after": 2}, "training.stop_after=2, from exact metrics of held-out"),
        ({"keep_best": "loss", "stop_after": 2}, "keep_best=loss and training.stop_after=2, from"),
    ],
)
def test_a_round_that_is_chosen_by_exact_metrics_is_told(settings: dict, told: str) -> None:
    run = fedavg_synthetic()
    training = dataclasses.replace(run.training, evaluate_every=1, **settings)
    run = dataclasses.replace(run, training=training)
    assert not any("held-out" in line for line in run.build().notes)
    private = dataclasses.replace(run, aggregator=aggregator("private_mean", noise_multiplier=3.0))
    lines = [line for line in private.build().notes if "not private: the choice of a" in line]
    assert len(lines) == 1 and told in lines[0]


@pytest.mark.parametrize("combine", PRIVATE)
def test_the_metric_counts_releases_before_the_first_round(combine: str) -> None:
    made = aggregator(combine, noise_multiplier=2.0).make(0, N, 1)

    @jax.jit
    @fedpax.program(clients=N)
    def average(state, updates):
        return made.aggregate(state, updates, None)

    updates, state = jnp.asarray(COHORT.batches[:, 0, 0]), made.init(None)
    for releases in (2, 3):
        _, state, metrics = average(state, updates)
        accountant = PrivacyAccountant(2.0, 1e-6, discrete=combine != "private_mean")
        expected = accountant.epsilon(releases)
        assert metrics["epsilon"] == pytest.approx(expected, rel=1e-5)
    assert made.accountant.epsilon(2) == pytest.approx(expected, rel=1e-5)


def test_an_exact_count_of_norms_leaves_no_epsilon() -> None:
    private = private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0)
    combined = chain(adaptive_clip(initial_norm=1.0), private)
    algorithm = fedavg(loss_fn, cohort_size=N, client_optimizer=optax.sgd(0.1), aggregator=combined)
    _, metrics = jax.eval_shape(algorithm.round, algorithm.init(jnp.zeros(5)), COHORT)
    assert combined.accountant is None and "epsilon" not in metrics
    assert "noise_stddev" in metrics and private.accountant is not None


def test_a_client_that_arrives_twice_in_a_round_leaves_no_epsilon() -> None:
    private = private_mean(max_norm=1.0, noise_multiplier=2.0, seed=0)
    algorithm = fedbuff(
        loss_fn, buffer_size=N, max_staleness=0, client_optimizer=optax.sgd(0.1), aggregator=private
    )
    _, metrics = jax.eval_shape(algorithm.round, algorithm.init(jnp.zeros(5)), COHORT)
    assert "noise_stddev" in metrics and "epsilon" not in metrics
    experiment = fedbuff_digits()
    _, population = experiment.read_clients()
    arrivals = np.asarray(experiment.order(population).client_ids)
    assert any(len(set(row)) < len(row) for row in arrivals.tolist())
    with pytest.raises(
        ValueError, match=r"private_mean: a client can arrive twice in a round.*Set"
    ):
        dataclasses.replace(experiment, aggregator=aggregator("private_mean"))


def test_an_average_over_the_combinations_of_a_round_states_no_epsilon() -> None:
    private = private_mean(max_norm=1.0, noise_multiplier=2.0, seed=0)
    algorithm = async_diloco(
        loss_fn, islands=N, inner_optimizer=optax.sgd(0.1), learning_rate=0.1, aggregator=private
    )
    _, metrics = jax.eval_shape(
        algorithm.round, algorithm.init(jnp.zeros(5)), Cohort(COHORT.batches)
    )
    assert "noise_stddev" in metrics and "epsilon" not in metrics

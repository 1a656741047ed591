"""Noise on server and participants, and the private mean: variance, sensitivity, determinism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.aggregators import add_local_noise, add_noise, chain, mean, private_mean
from fedpax.aggregators.private_mean import split_noise
from fedpax.algorithms import diloco, fedavg

N, SIZE = 8, 20_000
SETTINGS = {
    "server": chain(add_noise(0.5, seed=1), mean()),
    "participants": chain(add_local_noise(0.5, seed=1), mean()),
    "private": private_mean(max_norm=2.0, noise_multiplier=1.5, seed=1),
    "adaptive": private_mean(
        max_norm=2.0, noise_multiplier=1.5, seed=1, quantile=0.5, count_stddev=2.0
    ),
}
# The standard deviation of the noise of each coordinate of the aggregate.
STDDEV = {
    "server": 0.5,
    "participants": 0.5 / np.sqrt(N),
    "private": 1.5 * 2.0 / N,
    "adaptive": (1.5**-2 - 4.0**-2) ** -0.5 * 2.0 / N,
}


@functools.cache
def combine(name):
    aggregator = SETTINGS[name]

    @jax.jit
    @fedpax.program(clients=N)
    def combine(state, updates, weights):
        return aggregator.aggregate(state, updates, weights)

    def run(updates, weights=None, state=None):
        weights = np.ones(N, np.float32) if weights is None else weights
        return combine(aggregator.init(None) if state is None else state, updates, weights)

    return run


def zeros():
    return {"a": np.zeros((N, SIZE), np.float32), "b": np.zeros((N, 3), np.float32)}


def check_normal(noise, stddev):
    """Mean, variance and quantiles of normal noise, at five standard errors each."""
    noise = np.float64(noise).ravel() / stddev
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size)
    assert abs(noise.var() - 1) < 5 * np.sqrt(2 / noise.size)
    inside = np.mean(np.abs(noise) < 1)
    assert abs(inside - 0.6827) < 5 * np.sqrt(0.6827 * 0.3173 / noise.size)
    assert abs(np.mean(noise > 1.6449) - 0.05) < 5 * np.sqrt(0.05 * 0.95 / noise.size)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_noise_has_the_stated_variance_and_is_fresh_each_round(name):
    first, state, metrics = combine(name)(zeros())
    if name == "adaptive":
        state = state._replace(max_norm=jnp.float32(2.0))  # as in the first round
    second, _, _ = combine(name)(zeros(), state=state)
    again, _, _ = combine(name)(zeros())
    for noise in (first, second):
        check_normal(noise["a"], STDDEV[name])
    if "noise_stddev" in metrics:
        assert metrics["noise_stddev"] == pytest.approx(STDDEV[name], rel=1e-5)
    np.testing.assert_array_equal(first["a"], again["a"])
    correlation = np.corrcoef(first["a"], second["a"])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(SIZE)
    assert abs(np.corrcoef(first["a"][:-1], first["a"][1:])[0, 1]) < 5 / np.sqrt(SIZE)
    assert not np.isin(first["b"], first["a"]).all()


@pytest.mark.slow
def test_seeds_and_kinds_of_noise_are_independent():
    noises = {}
    for seed in (1, 2):
        for name, transform in (("server", add_noise), ("participants", add_local_noise)):
            aggregator = chain(transform(1.0, seed=seed), mean())

            @fedpax.program(clients=1)
            def average(x, aggregator=aggregator):
                return aggregator.aggregate(aggregator.init(None), x, None)[0]

            noises[seed, name] = average(jnp.zeros((1, SIZE)))
    correlations = np.corrcoef(list(noises.values()))[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(SIZE)


def test_participants_draw_independent_noise():
    def first(aggregator):
        def aggregate(state, updates, weights):
            return updates, state, {}

        return aggregator._replace(aggregate=aggregate)

    aggregator = add_local_noise(1.0, seed=0)(first(mean()))

    @jax.jit
    @fedpax.program(clients=N)
    def noisy(updates):
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    noise = noisy(np.zeros((N, SIZE), np.float32))
    check_normal(noise, 1.0)
    assert np.abs(np.corrcoef(noise)[np.triu_indices(N, 1)]).max() < 5 / np.sqrt(SIZE)


def draw(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        "a": np.float32(scale * rng.standard_normal((N, SIZE))),
        "b": np.float32(scale * rng.standard_normal((N, 3))),
    }


def signal(name, updates, weights=None):
    """The aggregate without its noise."""
    noisy, _, _ = combine(name)(updates, weights)
    noise, _, _ = combine(name)(zeros(), weights)
    return jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), noisy, noise)


@pytest.mark.parametrize("name", ["private", "adaptive"])
def test_the_private_mean_clips_and_ignores_weights_and_absentees(name):
    updates = draw(scale=0.02)  # norms of about 2.8
    here = np.array([1, 1, 0, 1, 1, 0, 1, 1])
    for values in updates.values():
        values[0] *= 0.01  # not clipped
        values[2] = np.nan  # absent
        values[3] = np.inf  # present, counts as 0
    result = signal(name, updates, np.float32(here * [3, 1, 1, 5, 1, 1, 100, 1]))
    norms = np.sqrt(sum(np.sum(np.float64(x) ** 2, 1) for x in updates.values()))
    scale = np.where(here & np.isfinite(norms), np.minimum(1, 2.0 / norms), 0)
    for key, x in updates.items():
        x = np.where(np.isfinite(x), x, 0)
        np.testing.assert_allclose(result[key], np.sum(scale[:, None] * x, 0) / N, atol=1e-6)


def test_a_participant_changes_the_sum_by_at_most_the_norm():
    """The sensitivity: any change of one update or its weight moves the mean by 2 C / n."""
    base = signal("private", draw(scale=10.0))
    for change in ("absent", "flipped", "huge"):
        updates, weights = draw(scale=10.0), np.ones(N, np.float32)
        if change == "absent":
            weights[4] = 0
        for x in updates.values():
            x[4] = {"absent": np.nan, "flipped": -x[4], "huge": 1e9 * np.sign(x[4])}[change]
        moved = signal("private", updates, weights)
        distance = np.sqrt(sum(np.sum((moved[k] - base[k]) ** 2) for k in base))
        bound = 2.0 / N * (1 if change == "absent" else 2)
        assert 0.1 * bound < distance < 1.0001 * bound


def test_adaptive_norms_follow_the_noisy_count():
    """Without noise of the updates: the count is centred, over the expected participants."""
    aggregator = private_mean(
        max_norm=1.0,
        noise_multiplier=0.0,
        seed=0,
        quantile=0.5,
        learning_rate=0.2,
        count_stddev=0.0,
        expected_participants=10,
    )

    @jax.jit
    @fedpax.program(clients=N)
    def average(state, x, weights):
        return aggregator.aggregate(state, x, weights)

    state, norm = aggregator.init(None), 1.0
    x, weights = np.float32([0.5, 3, 1.5, 9, 9, 1.2, 1.1, 0.1]), np.float32([1] * 6 + [0] * 2)
    for _ in range(10):
        aggregate, state, metrics = average(state, x, weights)
        assert metrics["max_norm"] == pytest.approx(norm, rel=1e-5)
        assert aggregate == pytest.approx(np.minimum(x, norm)[:6].sum() / 10, rel=1e-5)
        count = np.sum((x <= norm)[:6] - 0.5)
        norm *= np.exp(-0.2 * (0.5 + count / 10 - 0.5))
    assert norm > 1.2


def test_expected_participants_is_the_denominator():
    aggregator = private_mean(max_norm=1.0, noise_multiplier=0.0, seed=0, expected_participants=2.5)

    @fedpax.program(clients=N)
    def average(x, weights):
        return aggregator.aggregate(aggregator.init(None), x, weights)[0]

    x, weights = jnp.full(N, 0.5), jnp.arange(N) < 3
    assert average(x, weights).item() == pytest.approx(0.5 * 3 / 2.5)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (AxisType.Auto, ("adaptive",)),
        *[
            pytest.param(k, SETTINGS, marks=pytest.mark.slow)
            for k in (AxisType.Auto, AxisType.Explicit)
        ],
    ],
)
def test_the_noise_is_the_same_on_any_mesh(kind, names):
    updates = {"a": np.zeros((N, 6, 4), np.float32)}
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=(kind, kind))

    @jax.jit
    @fedpax.program(clients=N)
    def combine_all(updates):
        return {
            name: SETTINGS[name].aggregate(SETTINGS[name].init(None), updates, None)[0]
            for name in names
        }

    expected = combine_all(updates)
    specs = {"a": P("clients", "fsdp")}
    with jax.set_mesh(mesh):
        result = combine_all(
            {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in updates.items()}
        )
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5), result, expected)


@pytest.mark.slow
def test_bfloat16_updates():
    updates = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), draw(scale=0.02))
    for name in ("private",):
        aggregate, _, _ = combine(name)(updates)
        wide, _, _ = combine(name)(jax.tree.map(np.float32, updates))
        assert aggregate["a"].dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(aggregate["a"]), wide["a"], atol=0.02)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("diloco", marks=pytest.mark.slow)])
def test_a_private_method_learns(method):
    truth = np.float32([1.0, -2.0, 3.0])
    x = np.float32(np.random.default_rng(0).standard_normal((N, 2, 16, 3)))
    cohort = fedpax.Cohort({"x": x, "y": x @ truth}, num_examples=np.arange(N))
    aggregator = private_mean(
        max_norm=0.1, noise_multiplier=0.1, seed=0, quantile=0.5, count_stddev=0.5
    )

    def loss_fn(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2), {}

    if method == "fedavg":
        algorithm = fedavg(
            loss_fn, cohort_size=N, client_optimizer=optax.sgd(0.1), aggregator=aggregator
        )
    else:
        algorithm = diloco(
            loss_fn, islands=N, inner_optimizer=optax.sgd(0.1), aggregator=aggregator
        )
    state, step = algorithm.init(jnp.zeros(3)), jax.jit(algorithm.round)
    for _ in range(60):
        state, _ = step(state, cohort)
    assert np.linalg.norm(state.params - truth) < 0.3
    assert state.aggregator_state.round == 60


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_norm": -1.0}, ValueError, "max_norm is -1.0, expected"),
        ({"noise_multiplier": -0.1}, ValueError, "noise_multiplier is -0.1, .* at least 0"),
        (
            {"noise_multiplier": None},
            TypeError,
            "noise_multiplier is None, expected a finite",
        ),
        ({"expected_participants": 0}, ValueError, "expected_participants is 0"),
        ({"quantile": 1.5}, ValueError, "quantile is 1.5, expected a number from 0 to 1"),
        ({"count_stddev": 3.0}, ValueError, "but quantile is None.* Pass quantile=0.5"),
        (
            {"quantile": 0.5, "count_stddev": 0.5},
            ValueError,
            "count_stddev is 0.5, expected more than .* Pass a larger count_stddev",
        ),
    ],
)
def test_bad_settings_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        private_mean(**{"max_norm": 1.0, "noise_multiplier": 1.0, "seed": 0} | arguments)


def test_a_default_count_noise_that_is_too_small_is_refused():
    """m / 20 of 8 participants is below z / 2."""
    aggregator = private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0, quantile=0.5)

    @fedpax.program(clients=N)
    def average(x):
        return aggregator.aggregate(aggregator.init(None), x, None)[0]

    with pytest.raises(ValueError, match=r"count_stddev is 0\.4, .* Pass a larger count_stddev"):
        average(jnp.zeros(N))


@pytest.mark.parametrize("make", [add_noise, add_local_noise])
def test_a_negative_stddev_is_refused(make):
    with pytest.raises(ValueError, match=r"stddev is -1\.0, expected .* at least 0"):
        make(-1.0, seed=0)


def test_the_split_of_the_noise_spends_what_the_whole_would():
    """Gaussian mechanisms compose: the inverse squares of their noise multipliers add up."""
    for z, stddev in ((0.5, 5.0), (1.0, 0.6), (3.0, 100.0)):
        updates, count = split_noise(z, stddev), 2 * stddev
        assert updates**-2 + count**-2 == pytest.approx(z**-2)
    assert split_noise(1.0, 1e9) == pytest.approx(1.0)

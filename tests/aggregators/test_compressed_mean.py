"""The mean of compressed updates: against NumPy, and by its laws."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressed_updates import SPARSELOCO, N, draw, exchange, zero_state

import fedpax
from fedpax.aggregators import Aggregator, chain, codecs, compressed_mean
from fedpax.aggregators.compressed_mean import CompressedMeanState
from fedpax.algorithms import diloco, fedavg


def initial(aggregator, params, participants=N):
    return fedpax.program(islands=participants)(aggregator.init)(params)


def test_equals_numpy_over_rounds_with_weights_and_absent_participants():
    decay, weights = 0.9, np.array([[1, 5, 2, 0], [0, 1, 0, 3], [1, 1, 1, 1]], np.int32)
    step = exchange(compressed_mean(codecs.top_k(0.25), error_feedback=True, decay=decay))
    x = draw(3, N, 3, 8)
    x[0, 3] = np.nan  # absent
    state, residual = zero_state(x[0]), np.zeros((N, 3, 8))
    for r in range(3):
        mean, state = step(state, x[r], weights[r])
        expected = np.zeros((3, 8))
        for i in np.flatnonzero(weights[r]):
            unsent = N * weights[r, i] / weights[r].sum() * np.float64(x[r, i])
            unsent += decay * residual[i]
            largest = np.argsort(-np.abs(unsent), axis=None)[:6]
            sent = np.zeros(24)
            sent[largest] = unsent.ravel()[largest]
            residual[i] = unsent - sent.reshape(3, 8)
            expected += sent.reshape(3, 8) / N
        np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.residual, residual, rtol=1e-4, atol=1e-5)
        assert state.round == r + 1


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codecs.top_k(0.25), marks=pytest.mark.slow),
        codecs.top_k(0.5, values=codecs.sign(bits=2)),
    ],
)
def test_the_derivative_is_zero_as_that_of_rounding(codec):
    step = exchange(compressed_mean(codec, error_feedback=True))
    x = draw(N, 8)

    @jax.jit
    @jax.value_and_grad
    def second_mean(x):
        _, state = step(zero_state(x), x, jnp.ones(N))
        return jnp.sum(step(state, x, jnp.ones(N))[0] ** 2)

    value, gradient = second_mean(x)
    assert value > 0 and not np.any(gradient)


@pytest.mark.parametrize(
    "codec", [codecs.sign(), codecs.rotated(codecs.e3m0()), SPARSELOCO], ids=range(3)
)
def test_the_error_telescopes_and_stays_bounded(codec):
    """The means sum up to the exact weighted ones but for the mean residual."""
    rounds, rng = 60, np.random.default_rng(0)
    x, weights = draw(rounds, N, 40), np.float32(rng.integers(0, 4, (rounds, N)))
    weights[:, 0] += 1
    step = exchange(compressed_mean(codec, error_feedback=True))
    state, total, exact, sizes = zero_state(x[0]), 0.0, 0.0, []
    for own, w in zip(x, weights, strict=True):
        mean, state = step(state, own, w)
        total = total + np.float64(mean)
        exact = exact + np.average(np.float64(own), axis=0, weights=w)
        sizes.append(np.linalg.norm(state.residual))
    np.testing.assert_allclose(total + np.mean(state.residual, axis=0), exact, atol=1e-4)
    assert 0 < np.mean(sizes[40:]) < 1.3 * np.mean(sizes[20:40])


MANY = 16


@functools.cache
def average_equal_updates():
    """Make `state -> (mean, state)` of many equal updates of two equal leaves, and one of these."""
    x = draw(50)
    both = {name: np.broadcast_to(x, (MANY, 50)) for name in "ab"}
    step = exchange(compressed_mean(codecs.terngrad()), MANY)
    return functools.partial(step, updates=both), x


def test_unbiased_and_better_with_more_participants():
    (average, x), rounds = average_equal_updates(), 200
    state, means = CompressedMeanState(jnp.int32(0), None), []
    for _ in range(rounds):
        mean, state = average(state)
        means.append(np.float64(mean["a"]))
    means = np.array(means)
    assert np.all(np.abs(means.mean(0) - x) < 5 * means.std(0) / np.sqrt(rounds) + 1e-5)
    # Participants' errors are independent: the variance is 1/16 of one participant's.
    size = np.abs(np.float64(x))
    alone = np.sum(size * (size.max() - size))
    assert np.sum((means - x) ** 2) / rounds == pytest.approx(alone / MANY, rel=0.1)


def test_keys_differ_by_round_and_leaf():
    average, _ = average_equal_updates()
    start = CompressedMeanState(jnp.int32(0), None)
    first, after = average(start)
    chex.assert_trees_all_equal(first, average(start)[0])
    for other in (first["b"], average(after)[0]["a"]):
        assert np.any(np.abs(first["a"] - other) > 1e-3)


def test_keys_differ_by_seed():
    results = []
    for seed in (0, 0, 1):
        aggregator = compressed_mean(codecs.random_k(0.1), seed=seed)
        state = initial(aggregator, jnp.zeros(60), 1)
        results.append(exchange(aggregator, 1)(state, draw(1, 60))[0])
    np.testing.assert_array_equal(results[0], results[1])
    assert np.any(results[0] != results[2])


def test_weights_that_sum_to_zero_send_nothing():
    aggregator = compressed_mean(codecs.sign(), error_feedback=True)
    state = CompressedMeanState(jnp.int32(7), draw(N, 5))
    mean, after = exchange(aggregator)(state, np.full((N, 5), np.nan, np.float32), np.zeros(N))
    assert not np.any(mean)
    chex.assert_trees_all_equal(after.residual, state.residual)


def test_bfloat16_updates_and_an_empty_tree():
    aggregator = compressed_mean(codecs.e3m0(), error_feedback=True)
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.bfloat16(1)}
    state = initial(aggregator, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.residual)} == {jnp.dtype("float32")}
    x = jax.tree.map(lambda p: draw(N, *p.shape).astype(jnp.bfloat16), params)
    mean, state = exchange(aggregator)(state, x)
    for own, sent, left in zip(*map(jax.tree.leaves, (x, mean, state.residual)), strict=True):
        assert sent.dtype == jnp.bfloat16 and left.dtype == jnp.float32
        exact = np.float32(own).mean(0) - left.mean(0)  # in float32, then rounded once
        np.testing.assert_allclose(np.float32(sent), exact, rtol=2**-8, atol=1e-6)
    assert exchange(aggregator)(initial(aggregator, {}), {})[0] == {}


def test_the_derivative_is_zero():
    aggregator = compressed_mean(codecs.drive(unbiased=False), error_feedback=True)
    step, x = exchange(aggregator), draw(N, 30)

    @jax.jit
    @jax.grad
    def gradient(x):
        mean, state = step(zero_state(x), x)
        return jnp.sum(mean**2) + jnp.sum(state.residual)

    assert not np.any(gradient(x))


# ---- in programs and methods


def test_streaming_equals_unfused():
    aggregator = compressed_mean(codecs.terngrad())
    x, weights = draw(N, 300), np.float32([1, 0, 2, 5])
    results = [
        exchange(aggregator, chunk_size=size)(CompressedMeanState(0, None), x, weights)[0]
        for size in (None, 3)
    ]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_the_clients():
    """Each client makes an update of 1 MB from a number."""
    aggregator = compressed_mean(codecs.e3m0())

    def temporaries(clients):
        @fedpax.program(clients=clients, chunk_size=1)
        def average(params, scales):
            updates = fedpax.federated_map(lambda scale: scale * jnp.sin(params), scales)
            return aggregator.aggregate(CompressedMeanState(0, None), updates, None)[0]

        types = (
            jax.ShapeDtypeStruct((2**18,), "float32"),
            jax.ShapeDtypeStruct((clients,), "float32"),
        )
        return jax.jit(average).lower(*types).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(64), temporaries(1024)
    assert few < 64 * 2**20 / 2
    assert many < few + 1024 * 16


def halve(inner):
    def aggregate(state, updates, weights):
        updates = fedpax.federated_map(lambda u: jax.tree.map(lambda x: x / 2, u), updates)
        return inner.aggregate(state, updates, weights)

    return Aggregator(inner.init, aggregate)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("diloco", marks=pytest.mark.slow)])
def test_methods_take_it_in_a_chain(method):
    """With exact values it is the mean; with signs the model still learns."""
    loss = lambda w, batch: (jnp.mean((batch @ w - jnp.sum(batch, axis=-1)) ** 2), {})
    cohort = fedpax.Cohort(draw(N, 3, 8, 5))

    def build(aggregator):
        if method == "fedavg":
            return fedavg(
                loss, cohort_size=N, client_optimizer=optax.sgd(0.1), aggregator=aggregator
            )
        return diloco(
            loss,
            islands=N,
            inner_optimizer=optax.sgd(0.1),
            outer_optimizer=optax.sgd(1.0),
            aggregator=aggregator,
        )

    def train(aggregator, rounds):
        algorithm = build(aggregator)
        state, step = algorithm.init(jnp.zeros(5)), jax.jit(algorithm.round)
        for _ in range(rounds):
            state, metrics = step(state, cohort)
        return state, metrics["loss"]

    (exact, _), (plain, start) = (train(a, 1) for a in (compressed_mean(codecs.float32()), None))
    np.testing.assert_allclose(exact.params, plain.params, rtol=1e-5, atol=1e-6)
    state, loss_after = train(chain(halve, compressed_mean(codecs.sign(), error_feedback=True)), 20)
    assert loss_after < start / 4
    assert state.aggregator_state.round == 20
    chex.assert_shape(state.aggregator_state.residual, (N, 5))


@pytest.mark.slow
def test_the_cost_of_a_program_counts_encoded_bytes():
    aggregator = compressed_mean(SPARSELOCO, error_feedback=True)
    params = {"w": jnp.zeros((40, 50)), "b": jnp.zeros(7)}
    x = jax.tree.map(lambda p: draw(N, *p.shape), params)

    @fedpax.program(clients=N)
    def average(state, updates):
        return aggregator.aggregate(state, updates, None)

    cost = fedpax.cost(average, zero_state(x), x).placements["clients"]
    assert 8 * cost.sent_bytes == codecs.wire_bits(SPARSELOCO, params)
    assert cost.reduced_bytes == 4 * 2007


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((4,), {}, TypeError, "codec is a int, expected a codec"),
        ((codecs.e3m0,), {}, TypeError, r"codec is a function.*Call its function"),
        ((codecs.sign(),), {"decay": 0.5}, ValueError, "Set error_feedback=True, or leave decay"),
        (
            (codecs.sign(),),
            {"decay": 1.5, "error_feedback": True},
            ValueError,
            r"decay is 1\.5.*Use 1\.0 to forget nothing",
        ),
        (
            (codecs.top_k(0.1),),
            {"mean_codec": codecs.e3m0()},
            ValueError,
            r"blocks of 1,024 entries.*of 4,096\. Pass block_size=4096",
        ),
        ((codecs.sign(),), {"mean_codec": 4}, TypeError, "mean_codec is a int, expected a codec"),
        (
            (codecs.drive(),),
            {"error_feedback": True},
            ValueError,
            r"not contractive.*drive\(unbiased=False\)",
        ),
    ],
)
def test_arguments_are_checked(arguments, options, error, message):
    with pytest.raises(error, match=message):
        compressed_mean(*arguments, **options)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"updates\['n'\] has dtype int32.*Use .*mean\(\)"):
        exchange(compressed_mean(codecs.e3m0()))(
            CompressedMeanState(0, None), {"n": np.ones(N, np.int32)}
        )

"""A map waits for a later phase that reads its results, where this saves a run or memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from program_table import normal

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean, federated_sum
from fedpax.aggregators import codecs, compressed_mean, quantized_mean
from fedpax.algorithms import fedavg

N, SIZE = 8, 24


def train(w, x):
    return jnp.sin(w) * x


def runs_of_train(fn, *args):
    """Return how often a compiled round runs `train`: its sines."""
    return jax.jit(fn).lower(*args).as_text().count("stablehlo.sine")


def weigh(examples):
    return jnp.sum(examples, dtype=jnp.float32)


def scaled_before_the_mean(clients, wrap=lambda fn: fn):
    """Make a round whose clients need the sum of computed weights, as compressed means do."""

    @fedpax.program(clients=clients, chunk_size=1)
    def round(w, x, examples):
        weights = federated_map(weigh, examples)
        share = federated_map(
            lambda n, total: n / total, weights, federated_broadcast(federated_sum(weights))
        )
        updates, losses = federated_map(
            wrap(lambda w, x: (train(w, x), jnp.sum(x))), federated_broadcast(w), x
        )
        scaled = federated_map(lambda u, s: jnp.round(64 * s * u), updates, share)
        return federated_sum(scaled) / 64, federated_mean(losses)

    return round


def temporaries(program, *args, **settings):
    compiled = jax.jit(program, **settings).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def arguments(clients):
    examples = np.random.default_rng(0).integers(1, 9, (clients, 3))
    return normal(SIZE), normal(clients, SIZE, seed=1), examples


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint])
def test_clients_wait_for_the_sum_of_their_weights(wrap):
    w, x, examples = arguments(N)
    round = scaled_before_the_mean(N, wrap)
    assert runs_of_train(round, w, x, examples) == 1
    mean, loss = round(w, x, examples)
    share = examples.sum(1) / examples.sum()
    expected = np.round(64 * share[:, None] * np.sin(np.float64(w)) * x).sum(0) / 64
    np.testing.assert_allclose(mean, expected, atol=1e-5)
    np.testing.assert_allclose(loss, np.float64(x).sum(1).mean(), rtol=1e-5)
    text = fedpax.explain(round, w, x, examples)
    assert "rematerialized" not in text and f"float32[{N},{SIZE}]" not in text


def test_memory_is_flat_without_checkpoint():
    def stored(clients):
        return temporaries(scaled_before_the_mean(clients), *arguments(clients))

    per_client = (stored(4096) - stored(1024)) / (4096 - 1024)
    assert per_client <= 8  # the weights, not the updates


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [1, 4, None])
@pytest.mark.parametrize(
    "aggregator",
    [quantized_mean(4), compressed_mean(codecs.top_k(1 / 4), error_feedback=True)],
    ids=["quantized_mean", "error_feedback"],
)
def test_clients_with_their_own_numbers_of_steps_train_once(aggregator, chunk_size):
    def loss_fn(w, x):
        return jnp.sum(jnp.sin(w) * x), {}  # the gradient has one cosine

    algorithm = fedavg(
        loss_fn,
        cohort_size=N,
        client_optimizer=optax.sgd(0.1),
        aggregator=aggregator,
        chunk_size=chunk_size,
    )
    state = algorithm.init(jnp.ones(SIZE))
    cohort = fedpax.Cohort(normal(N, 2, SIZE), num_steps=np.arange(N, dtype=np.int32) % 3)
    text = jax.jit(algorithm.round).lower(state, cohort).as_text()
    assert text.count("stablehlo.cosine") == 1
    assert "rematerialized" not in fedpax.explain(algorithm.round, state, cohort)


def test_a_map_with_a_small_result_does_not_wait():
    @fedpax.program(clients=N, chunk_size=1)
    def spread(w, x):
        updates = federated_map(train, federated_broadcast(w), x)
        norms = federated_map(jnp.linalg.norm, updates)
        largest = fedpax.federated_max(updates)
        return largest, federated_mean(
            federated_map(lambda n, m: n / m[0], norms, federated_broadcast(largest))
        )

    w, x, _ = arguments(N)
    text = fedpax.explain(spread, w, x)
    assert f"float32[{N}]: a later phase reads it" in text
    assert f"float32[{N},{SIZE}]" not in text


def test_reductions_that_the_server_needs_are_not_postponed():
    @fedpax.program(clients=N, chunk_size=1)
    def two_phases(w, x):
        updates = federated_map(train, federated_broadcast(w), x)
        mean = federated_mean(updates)
        return federated_mean(
            federated_map(lambda u, m: (u - m) ** 2, updates, federated_broadcast(mean))
        )

    w, x, _ = arguments(N)
    text = fedpax.explain(two_phases, w, x)
    assert "phase 0: 1 map, 1 reduction" in text and "phase 1: 1 map, 1 reduction" in text
    updates = np.sin(np.float64(w)) * x
    np.testing.assert_allclose(two_phases(w, x), updates.var(0), atol=1e-5)


def test_a_map_does_not_wait_if_two_loops_then_read_its_argument():
    """A donated state that a later loop reads is copied before it is overwritten."""
    clients, size = 64, 256

    @fedpax.program(clients=clients, chunk_size=1)
    def program(states, x, examples):
        total = federated_sum(federated_map(weigh, examples))
        new = federated_map(train, states, x)
        norms = federated_map(jnp.linalg.norm, states)
        share = lambda norm, total: norm / total
        return new, federated_mean(federated_map(share, norms, federated_broadcast(total)))

    states = normal(clients, size)
    args = states, normal(clients, size, seed=1), normal(clients, 3)
    assert temporaries(program, *args, donate_argnums=0) < states.nbytes


def test_a_map_does_not_wait_if_the_server_then_computes_for_all():
    clients, size = 64, 32

    @fedpax.program(clients=clients, chunk_size=1)
    def program(x, weights):
        updates = federated_map(jnp.sin, x)
        total = federated_sum(federated_map(jnp.tanh, weights)) + jnp.sum(federated_mean(updates))
        scaled = updates * total
        products = jnp.sort(scaled[:, :, None] * scaled[:, None], axis=1)
        median = jnp.sort(products[:, 0, 0])[clients // 2]
        shares = federated_map(lambda n, t: n * t, weights, federated_broadcast(total))
        return federated_mean(
            federated_map(lambda s, m: s * m, shares, federated_broadcast(median))
        )

    # The products of one client at a time.
    assert temporaries(program, normal(clients, size), normal(clients)) < 4 * clients * size**2 / 4


def test_a_map_does_not_wait_for_a_loop_of_larger_chunks():
    clients, size = 64, 64

    @fedpax.program(clients=clients)
    def program(x, rows):
        pairs = lambda row: jnp.sum(jnp.sort(jnp.sort(row[:, None] * row[None], 0), 1)[0])
        weights = federated_map(pairs, rows, chunk_size=1)
        total = federated_sum(weights)
        updates = federated_map(jnp.sin, x)
        scale = lambda u, w, t: jnp.round(u * w / t)
        return federated_sum(federated_map(scale, updates, weights, federated_broadcast(total)))

    text = fedpax.explain(program, normal(clients, 4 * size), normal(clients, size))
    assert "phase 0: 2 maps, 1 reduction, chunk_size=1" in text


def watched(trained, loss, total):
    """Make a round that calls a function in the map, and two with results of reductions."""

    @fedpax.program(clients=N, chunk_size=1)
    def round(w, x, examples):
        weights = federated_map(weigh, examples)
        sum_of_weights = federated_sum(weights)

        def local(w, x):
            trained(x[0])
            return train(w, x), jnp.sum(x)

        updates, losses = federated_map(local, federated_broadcast(w), x)
        loss(federated_mean(losses))
        total(sum_of_weights)
        share = lambda u, n, t: u * n / t
        return federated_sum(
            federated_map(share, updates, weights, federated_broadcast(sum_of_weights))
        )

    return round


@pytest.mark.parametrize("first", ["trained", "loss"])
def test_ordered_effects_keep_their_order(first):
    seen = []
    record = lambda name: lambda v: io_callback(lambda _: seen.append(name), None, v, ordered=True)
    functions = {"trained": lambda v: None, "loss": lambda v: None, "total": record("total")}
    functions[first] = record(first)
    jax.block_until_ready(jax.jit(watched(**functions))(*arguments(N)))
    jax.effects_barrier()
    assert seen == [first] * (N if first == "trained" else 1) + ["total"]


@pytest.mark.parametrize("steps", ["server map", "map server", "map map server server map"])
def test_effects_of_independent_equations_keep_the_order_of_the_program(steps):
    seen = []
    where = steps.split()

    @fedpax.program(clients=N, chunk_size=1)
    def program(x, n):
        total = federated_sum(federated_map(jnp.sin, n))
        sums = []
        for i, place in enumerate(where):

            def record(v, i=i):
                io_callback(lambda _: seen.append(i), None, v, ordered=True)
                return jnp.cos(v)

            sums += [record(total) if place == "server" else federated_map(record, x + i)]
        return sums

    jax.block_until_ready(jax.jit(program)(normal(N), normal(N)))
    jax.effects_barrier()
    for i, place in enumerate(where):
        assert seen.count(i) == (1 if place == "server" else N)
        if place == "server":  # participants of maps in one loop take turns
            before, after = seen[: seen.index(i)], seen[seen.index(i) + 1 :]
            assert max(before, default=-1) < i < min(after, default=len(where))


def test_a_map_with_the_only_effect_waits(capfd):
    nothing = lambda v: None
    round = watched(lambda v: jax.debug.print("trained {}", v), nothing, nothing)
    args = arguments(N)
    assert f"float32[{N},{SIZE}]" not in fedpax.explain(round, *args)
    jax.block_until_ready(round(*args))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("trained") == N

"""Means under masks: exact sums for any dropouts, and masked updates that look random."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.aggregators import chain, clip_by_norm, secure_mean
from fedpax.aggregators.secure_mean import left_over, make_graph, mask
from fedpax.algorithms import diloco, fedavg

N, R, BITS = 8, 2.0, 12
STEP = R / (2 ** (BITS - 1) - 1)


@functools.cache
def combine(num_neighbors=2, bits=BITS):
    """Make `(updates, weights=None, round=0) -> (mean, metrics)`, compiled."""
    aggregator = secure_mean(max_value=R, bits=bits, num_neighbors=num_neighbors, seed=3)

    @fedpax.program(clients=N)
    def combine(updates, weights, round):
        state = aggregator.init(None)._replace(round=round)
        mean, state, metrics = aggregator.aggregate(state, updates, weights)
        return mean, metrics

    compiled = jax.jit(combine)
    return lambda updates, weights=None, round=0: compiled(
        updates, np.ones(N, np.float32) if weights is None else np.float32(weights), round
    )


def draw(seed=0):
    rng = np.random.default_rng(seed)
    return {"b": np.float32(rng.standard_normal(N)), "w": np.float32(rng.standard_normal((N, 6)))}


def recovered(mean, count):
    """The sum of integers that a mean was decoded from."""
    return np.round(np.float64(mean) * max(count, 1) / STEP)


def integer_sum(updates, present):
    """The sum without masks, in Python's integers."""
    codes = {k: np.round(np.clip(x, -R, R) / np.float32(STEP)) for k, x in updates.items()}
    return {k: np.int64(x)[present].sum(0) for k, x in codes.items()}


@pytest.mark.parametrize("num_neighbors", [pytest.param(None, marks=pytest.mark.slow), 2])
@hypothesis.given(present=st.lists(st.booleans(), min_size=N, max_size=N), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=15)
def test_masks_cancel_to_the_bit_for_any_dropouts(num_neighbors, present, seed):
    updates, here = draw(seed), np.array(present)
    mean, metrics = combine(num_neighbors)(updates, 2.5 * here, seed)
    for key, total in integer_sum(updates, here).items():
        np.testing.assert_array_equal(recovered(mean[key], here.sum()), total)
        np.testing.assert_allclose(mean[key], STEP * total / max(here.sum(), 1), rtol=1e-6)
    outside = [np.abs(updates["b"])[:, None] > R, np.abs(updates["w"]) > R]
    fraction = np.concatenate(outside, 1)[here].mean() if here.any() else 0.0
    assert metrics["clipped_entry_fraction"] == pytest.approx(fraction, abs=1e-6)
    assert metrics["num_present"] == here.sum()


def test_the_mean_is_exact_up_to_quantization():
    updates = draw(1)
    mean, _ = combine()(updates)
    for key, x in updates.items():
        np.testing.assert_allclose(mean[key], np.clip(x, -R, R).mean(0), atol=STEP / 2 + 1e-6)


def test_liars_are_clipped_and_nan_is_zero():
    updates = draw(2)
    updates["w"][0, :3] = [np.nan, np.inf, -np.inf]
    mean, _ = combine()(updates)
    updates["w"][0, :3] = [0.0, R, -R]
    np.testing.assert_array_equal(mean["w"], combine()(updates)[0]["w"])


@pytest.mark.parametrize("num_neighbors", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_masked_update_looks_uniform_and_independent_of_the_update(num_neighbors):
    size = 4096
    graph = make_graph(jax.random.key(0), N, num_neighbors)
    masked = jax.jit(jax.vmap(lambda codes, i: mask([codes], i, graph)[0]))
    rng = np.random.default_rng(0)
    small = np.uint32(rng.integers(0, 100, (N, size)))
    zeros = np.zeros((N, size), np.uint32)
    sent = np.asarray(masked(small, np.arange(N)))
    # Masks are added modulo 2^32, independently of what they hide.
    np.testing.assert_array_equal(sent - small, masked(zeros, np.arange(N)))
    for message in sent:
        counts = np.bincount(message >> 26, minlength=64)  # 64 bins of 64 expected
        chi_square = np.sum((counts - 64) ** 2 / 64)
        assert 63 - 5 * np.sqrt(126) < chi_square < 63 + 5 * np.sqrt(126)
        bits = np.unpackbits(message.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
    correlation = np.corrcoef(np.float64(sent))[np.triu_indices(N, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(size)


def test_masks_are_those_of_pairs_and_fresh_each_round():
    """The sum of all masked zeros is the sum of the self masks: shared masks cancel."""
    zeros = np.zeros((N, 8), np.uint32)

    @functools.partial(jax.jit, static_argnums=1)
    def masks(key, num_neighbors):
        graph = make_graph(key, N, num_neighbors)
        masked = jax.vmap(lambda codes, i: mask([codes], i, graph)[0])(zeros, np.arange(N))
        own = jax.vmap(lambda i: left_over([((8,), None)], i, graph, jnp.ones(N, bool))[0])
        return masked, own(np.arange(N))

    for num_neighbors in (None, 4):
        masked, own = masks(jax.random.key(1), num_neighbors)
        np.testing.assert_array_equal(masked.sum(0), own.sum(0))
        assert (masked != own).all()
        assert (masked != masks(jax.random.key(2), num_neighbors)[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_neighbors", [4, None])
def test_neighbours_are_mutual(num_neighbors):
    """Each has the stated number of neighbours, found by whose absence changes the masks left."""
    graph = make_graph(jax.random.key(1), N, num_neighbors)

    def left(i, absent):
        return left_over([((2,), None)], i, graph, jnp.arange(N) != absent)[0]

    pairs = jax.vmap(jax.vmap(left, (None, 0)), (0, None))(jnp.arange(N), jnp.arange(N))
    nobody = jax.vmap(left, (0, None))(jnp.arange(N), -1)
    linked = np.any(np.asarray(pairs) != np.asarray(nobody)[:, None], -1)
    np.testing.assert_array_equal(linked, linked.T)
    np.testing.assert_array_equal(linked.sum(1), N - 1 if num_neighbors is None else num_neighbors)
    assert not linked.diagonal().any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=(kind, kind))
    updates, weights = draw(4), np.float32([1, 1, 0, 1, 1, 0, 1, 1])
    expected, _ = combine(2)(updates, weights)
    specs = {"b": P("clients"), "w": P("clients", "fsdp")}
    with jax.set_mesh(mesh):
        placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in updates.items()}
        aggregate, _ = combine(2)(placed, weights)
    for key in updates:
        np.testing.assert_array_equal(recovered(aggregate[key], 6), recovered(expected[key], 6))


@pytest.mark.slow
def test_bfloat16_updates():
    updates = {key: x.astype(jnp.bfloat16) for key, x in draw(5).items()}
    mean, _ = combine()(updates)
    wide, _ = combine()({key: np.float32(x) for key, x in updates.items()})
    for key in updates:
        assert mean[key].dtype == jnp.bfloat16
        np.testing.assert_array_equal(mean[key], wide[key].astype(jnp.bfloat16))


def test_cost_counts_32_bit_words_per_entry():
    aggregator = secure_mean(max_value=R)

    @fedpax.program(clients=N)
    def round(x):
        updates = fedpax.federated_map(lambda x: {"w": x.astype(jnp.bfloat16)}, x)
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    clients = fedpax.cost(round, jnp.ones((N, 6))).placements["clients"]
    sent = {t.name: (t.num_bytes, t.sent_bytes) for t in clients.reduced}
    # The masks that the server recomputes are not among them.
    assert sent.pop("sum of send['w']") == (2 * 6, 4 * 6)
    assert max(sent.values(), default=(0, 0)) <= (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "diloco"])
def test_a_method_with_secure_aggregation_learns(method):
    truth = np.float32([1.0, -2.0, 3.0])
    x = np.float32(np.random.default_rng(0).standard_normal((N, 2, 16, 3)))
    cohort = fedpax.Cohort({"x": x, "y": x @ truth}, num_steps=np.array([2] * 6 + [0] * 2))
    aggregator = chain(clip_by_norm(1.0), secure_mean(max_value=1.0, num_neighbors=4))

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
    for _ in range(30):
        state, metrics = step(state, cohort)
    np.testing.assert_allclose(state.params, truth, atol=0.05)
    assert metrics["num_present"] == 6


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_value": 0.0}, ValueError, "max_value is 0.0, expected a positive finite number"),
        ({"max_value": np.inf}, ValueError, "max_value is inf, expected a positive finite number"),
        ({"max_value": 1.0, "bits": 1}, ValueError, "bits is 1, expected an int from 2 to 24"),
        (
            {"max_value": 1.0, "bits": 25},
            ValueError,
            "bits is 25, expected an int from 2 to 24",
        ),
        ({"max_value": 1.0, "bits": 8.0}, TypeError, "bits is 8.0, expected an int"),
        ({"max_value": 1.0, "num_neighbors": 3}, ValueError, "expected an even int.* Use 4"),
        ({"max_value": 1.0, "num_neighbors": 0}, ValueError, "num_neighbors is 0, .* at least 2"),
    ],
)
def test_bad_settings_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        secure_mean(**arguments)


@pytest.mark.parametrize(
    ("participants", "bits", "num_neighbors", "words"),
    [
        (1025, 22, None, r"1,025 participants' .* does not fit 32 bits\. Use at most bits=21"),
        (4, 8, 4, "num_neighbors is 4, expected fewer than the 4 participants. Leave it None"),
    ],
)
def test_sums_that_can_overflow_and_too_many_neighbours_are_refused(
    participants, bits, num_neighbors, words
):
    aggregator = secure_mean(max_value=1.0, bits=bits, num_neighbors=num_neighbors)

    @fedpax.program(clients=participants)
    def combine(updates):
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    with pytest.raises(ValueError, match=words):
        jax.eval_shape(combine, jax.ShapeDtypeStruct((participants, 2), jnp.float32))


@pytest.mark.slow
def test_the_largest_sum_does_not_overflow():
    aggregator = secure_mean(max_value=1.0, bits=21, num_neighbors=2)

    @fedpax.program(clients=1024)
    def combine(updates):
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    combine = jax.jit(combine)
    for value in (1.0, -1.0):
        assert combine(np.full(1024, value, np.float32)).item() == pytest.approx(value)


def test_an_empty_tree():
    assert combine()({})[0] == {}


def test_a_single_participant_has_its_own_mean():
    aggregator = secure_mean(max_value=1.0, bits=16, seed=0)

    @fedpax.program(clients=1)
    def average(updates):
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    np.testing.assert_allclose(average(np.full((1, 3), 0.5, np.float32)), 0.5, atol=1e-4)

"""Laws of every aggregator: absent participants, dtypes, empty updates, settings."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_aggregator import AGGREGATORS, N

import fedpax
from fedpax import aggregators
from fedpax.aggregators import codecs
from fedpax.aggregators.aggregator import present

PARAMS = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
ABSENT = 2
WEIGHTS = np.float32([1, 2, 0, 1, 1, 3, 1, 1])
ONES = np.ones(N, np.float32)
# They compile for seconds.
SLOW = (
    *("private_secure_mean", "secure_mean", "krum selected", "bulyan"),
    "compressed_mean unbiased",
)


@functools.cache
def run(name):
    """Make `(state, updates, weights) -> (aggregate, state, metrics)`, a program."""
    return fedpax.program(clients=N)(AGGREGATORS[name].aggregate)


@functools.cache
def compiled(name):
    return jax.jit(run(name))


def initial(name, params):
    return fedpax.program(clients=N)(AGGREGATORS[name].init)(params)


def draw(seed):
    rng = np.random.default_rng(seed)
    return {k: np.float32(rng.standard_normal((N, *p.shape))) for k, p in PARAMS.items()}


def test_the_table_has_every_aggregator():
    """A function that returns an aggregator or a transformation is in `AGGREGATORS`."""
    made = {
        name
        for name in aggregators.__all__
        if inspect.isfunction(function := getattr(aggregators, name))
        and "Aggregator" in str(inspect.signature(function).return_annotation)
    }
    assert made - {"chain"} == {name.split()[0] for name in AGGREGATORS}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in AGGREGATORS]
)
def test_an_absent_participant_has_no_effect(name):
    """With NaN and infinity it gives what it gives with zeros, and keeps its residual."""
    step = compiled(name)
    _, state, _ = step(initial(name, PARAMS), draw(0), ONES)
    updates, without = draw(1), draw(1)
    updates["w"][ABSENT], updates["b"][ABSENT] = np.nan, np.inf
    for x in without.values():
        x[ABSENT] = 0.0
    expected = step(state, without, WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, step(state, updates, WEIGHTS), expected)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(expected))
    if getattr(state, "residual", None) is not None:
        for old, new in zip(*map(jax.tree.leaves, (state, expected[1])), strict=True):
            if np.ndim(old):
                np.testing.assert_array_equal(new[ABSENT], old[ABSENT])
                assert np.any(new != old)


# A mean that multiplies by the weights: as `federated_mean`, which uses them as given.
WEIGHTED = ("mean", "add_noise", "add_local_noise", "quantized_mean", "clip_by_norm")
WEIGHTED += ("adaptive_clip", "compressed_mean", "compressed_mean unbiased")


@pytest.mark.parametrize("weight", [-1.0, -np.inf, np.nan])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n
        for n in AGGREGATORS
        if n not in WEIGHTED
    ],
)
def test_a_participant_whose_weight_is_negative_or_nan_is_absent(name, weight):
    """A private mean counted an update of weight -1, and with it the metric of its norm."""
    step, state = compiled(name), initial(name, PARAMS)
    wrong = WEIGHTS.copy()
    wrong[ABSENT] = weight
    expected = step(state, draw(1), WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, step(state, draw(1), wrong), expected)
    counted = step(state, draw(1), np.where(WEIGHTS, WEIGHTS, 1))
    leaves = zip(*map(jax.tree.leaves, (counted[0], expected[0])), strict=True)
    assert any(np.any(a != b) for a, b in leaves) or "krum" in name  # it takes few updates


def test_every_present_participant_has_a_weight_above_0():
    """The metrics and the quantile of a clipping count present participants alone."""
    weights = [1, 0, -1, np.nan, np.inf, -np.inf, 1e-30, 2]
    result = fedpax.program(clients=N)(present)(np.float32(weights))
    assert result.tolist() == [True, False, False, False, True, False, True, True]
    assert fedpax.program(clients=N)(lambda: present(None))().all()


@pytest.mark.parametrize("weight", [-1.0, np.nan])
def test_a_weighted_mean_uses_each_weight_as_given(weight):
    weights = np.where(WEIGHTS, WEIGHTS, np.float32(weight))
    (mean, _, _), updates = compiled("mean")(initial("mean", PARAMS), draw(1), weights), draw(1)
    expected = np.einsum("n,n...->...", weights, updates["w"].astype(np.float64)) / weights.sum()
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["quantized_mean", "compressed_mean"])
def test_an_absent_participant_sends_nothing(name):
    """The present ones' residuals and the mean are what they are without the absent one."""
    x, weights = {"w": draw(3)["w"]}, np.float32([1, 1, 0, 1, 0, 1, 0, 1])
    here = weights != 0
    state = initial(name, {"w": PARAMS["w"]})
    mean, after, _ = compiled(name)(state, x, weights)
    alone = fedpax.program(clients=5)(AGGREGATORS[name].aggregate)
    residual = {"w": np.zeros((5, 2, 3), np.float32)}
    scaled = {"w": N / 5 * x["w"][here]}  # residuals are of n w_i / sum(w) x_i
    expected, left, _ = jax.jit(alone)(state._replace(residual=residual), scaled, None)
    np.testing.assert_allclose(mean["w"], 5 / N * expected["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.residual["w"][here], left.residual["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_round_keeps_dtypes(name):
    """The aggregate has the dtype of the updates, and the state keeps its dtype."""
    params = {"w": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.zeros(3)}
    state = initial(name, params)
    updates = {k: jax.ShapeDtypeStruct((N, *p.shape), p.dtype) for k, p in params.items()}
    weights = jax.ShapeDtypeStruct((N,), jnp.float32)
    aggregated, after, _ = jax.eval_shape(run(name), state, updates, weights)
    types = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert types(aggregated) == types(params)
    assert types(after) == types(state)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("name", AGGREGATORS)
def test_an_empty_update_gives_an_empty_aggregate(name, weights):
    aggregated, _, metrics = jax.eval_shape(
        lambda state: run(name)(state, {}, weights), initial(name, {})
    )
    assert aggregated == {}
    assert all(m.shape == () for m in metrics.values())


def test_metrics_of_leaves_without_entries_are_finite():
    updates = {"w": draw(0)["b"], "none": np.zeros((N, 0), np.float32)}
    _, _, metrics = compiled("secure_mean")(initial("secure_mean", updates), updates, None)
    assert metrics["clipped_entry_fraction"] == np.mean(np.abs(updates["w"]) > 2.0)


SETTINGS = {
    "clip_by_norm": lambda x: aggregators.clip_by_norm(x),
    "adaptive_clip": lambda x: aggregators.adaptive_clip(initial_norm=x),
    "add_noise": lambda x: aggregators.add_noise(x, seed=0),
    "add_local_noise": lambda x: aggregators.add_local_noise(x, seed=0),
    "private_mean": lambda x: aggregators.private_mean(max_norm=x, noise_multiplier=1.0, seed=0),
    "private_secure_mean": lambda x: aggregators.private_secure_mean(
        max_norm=1.0, noise_multiplier=x, seed=0
    ),
    "secure_mean": lambda x: aggregators.secure_mean(max_value=x),
    "compressed_mean": lambda x: aggregators.compressed_mean(
        codecs.sign(), error_feedback=True, decay=x
    ),
    "trimmed_mean": lambda x: aggregators.trimmed_mean(x),
    "geometric_median": lambda x: aggregators.geometric_median(smoothing=x),
    "top_k": lambda x: codecs.top_k(x),
    "random_k": lambda x: codecs.random_k(x),
    "terngrad": lambda x: codecs.terngrad(clip=x),
    "privacy_spent": lambda x: aggregators.privacy_spent(
        noise_multiplier=x, num_rounds=1, delta=1e-6
    ),
}
COUNTS = {
    "krum": lambda k: aggregators.krum(k),
    "bulyan": lambda k: aggregators.bulyan(k),
    "geometric_median": lambda k: aggregators.geometric_median(num_iterations=k),
    "secure_mean": lambda k: aggregators.secure_mean(max_value=1.0, bits=k),
    "private_secure_mean": lambda k: aggregators.private_secure_mean(
        max_norm=1.0, noise_multiplier=1.0, seed=0, min_participants=k
    ),
    "quantized_mean": lambda k: aggregators.quantized_mean(k),
    "uniform": lambda k: codecs.uniform(k),
    "sign": lambda k: codecs.sign(k),
    "drive": lambda k: codecs.drive(block_size=k),
    "privacy_spent": lambda k: aggregators.privacy_spent(
        noise_multiplier=1.0, num_rounds=k, delta=1e-6
    ),
}
SEEDS = {
    "adaptive_clip": lambda s: aggregators.adaptive_clip(initial_norm=1.0, seed=s),
    "add_noise": lambda s: aggregators.add_noise(1.0, seed=s),
    "add_local_noise": lambda s: aggregators.add_local_noise(1.0, seed=s),
    "private_mean": lambda s: aggregators.private_mean(max_norm=1.0, noise_multiplier=1.0, seed=s),
    "private_secure_mean": lambda s: aggregators.private_secure_mean(
        max_norm=1.0, noise_multiplier=1.0, seed=s
    ),
    "secure_mean": lambda s: aggregators.secure_mean(max_value=1.0, seed=s),
    "compressed_mean": lambda s: aggregators.compressed_mean(codecs.sign(), seed=s),
}
# The function, the argument, its value, what is expected, and a remedy.
MESSAGE = r"^{}\(\): \w+ is {}, expected .+\. [A-Z].*\.$"


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_no_finite_number_in_range_are_refused_with_a_remedy(name):
    SETTINGS[name](np.float32(0.25))  # NumPy scalars are numbers
    for value in (math.nan, math.inf, -math.inf, -1.0):
        with pytest.raises(ValueError, match=MESSAGE.format(name, value)):
            SETTINGS[name](value)
    for value in ("1", None, True, 1j):
        if value is not None or name != "terngrad":
            with pytest.raises(TypeError, match=r"expected a (positive |finite )*number"):
                SETTINGS[name](value)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_are_no_int_in_range_are_refused_with_a_remedy(name):
    COUNTS[name](np.int64(2))  # NumPy integers are ints
    with pytest.raises(ValueError, match=MESSAGE.format(name, -1)):
        COUNTS[name](-1)
    for value in (2.0, "2", True):
        with pytest.raises(TypeError, match="expected an int"):
            COUNTS[name](value)


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_that_are_no_int_are_refused_at_once(name):
    SEEDS[name](np.uint32(3))
    for seed in (None, 1.5):
        with pytest.raises(TypeError, match=rf"{name}\(\): seed is {seed}, .* Pass an int"):
            SEEDS[name](seed)


def test_errors_name_the_function_that_was_called():
    aggregator = aggregators.private_secure_mean(
        max_norm=1.0, noise_multiplier=1.0, seed=0, num_neighbors=N
    )
    average = fedpax.program(clients=N)(aggregator.aggregate)
    with pytest.raises(ValueError, match=r"^private_secure_mean\(\): num_neighbors is 8"):
        jax.eval_shape(average, aggregator.init(None), np.ones(N, np.float32), None)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in AGGREGATORS]
)
def test_an_aggregate_is_finite_beside_nan_where_it_says_so(name):
    updates = draw(2)
    for x in updates.values():
        x[ABSENT] = np.nan
    aggregate, _, metrics = compiled(name)(initial(name, PARAMS), updates, ONES)
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves(aggregate))
    # Codecs of signs or of the largest entries send numbers in the place of NaN.
    assert finite == AGGREGATORS[name].tolerates_non_finite or "compressed" in name
    assert all(np.isfinite(x) for x in metrics.values())

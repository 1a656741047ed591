"""PAPA: its forms, and what they keep."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from method_problem import assert_close, loss_fn, random_params, random_rounds
from method_table import trainer
from numpy_island_methods import papa as papa_reference
from numpy_methods import sgd

import fedpax
from fedpax import Cohort
from fedpax.algorithms import branch_train_merge, papa, papa_2, papa_all
from fedpax.algorithms.papa import random_pairs
from fedpax.deploy import run_local
from fedpax.hlo.collectives import collectives
from fedpax.parallel.mesh import make_mesh

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")

ISLANDS = 5
SETTINGS = {"islands": ISLANDS, "optimizer": optax.sgd(0.2, momentum=0.8)}


def run(algorithm, rounds=2):
    state, step = (
        algorithm.init(jax.tree.map(jnp.asarray, random_params())),
        jax.jit(algorithm.round),
    )
    for batches in random_rounds(rounds, ISLANDS):
        state, metrics = step(state, Cohort(batches))
    return state, metrics


@pytest.mark.slow
def test_the_ends_of_alpha():
    """0 is PAPA-all, and with 1 nothing is communicated."""
    pushed, replaced = run(papa(loss_fn, alpha=0.0, **SETTINGS)), run(papa_all(loss_fn, **SETTINGS))
    assert_close(pushed, replaced)
    for leaf in jax.tree.leaves(replaced[0].local_params):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
    apart, metrics = run(papa(loss_fn, alpha=1.0, **SETTINGS))
    experts, expected = run(branch_train_merge(loss_fn, **SETTINGS))
    assert_close(
        (apart.local_params, apart.params, metrics),
        (experts.expert_params, experts.params, expected),
    )


compiled_pairs = jax.jit(random_pairs, static_argnums=1)


@settings(max_examples=40)
@given(st.sampled_from([2, 3, 5, 12]), st.integers(0, 1000))
def test_random_pairs_differ(n, seed):
    pairs = np.asarray(compiled_pairs(jax.random.key(seed), n))
    assert pairs.shape == (n, 2)
    assert np.all((pairs[:, 0] >= 0) & (pairs[:, 0] < pairs[:, 1]) & (pairs[:, 1] < n))
    assert len(np.unique(pairs, axis=0)) == (n if n > 2 else 1)


def test_every_pair_is_equally_probable_for_every_island():
    """So the average of the population is kept in expectation."""
    draws, n = 6000, 4
    keys = jax.random.split(jax.random.key(1), draws)
    pairs = np.asarray(jax.jit(jax.vmap(lambda key: random_pairs(key, n)))(keys))
    share = 1 / 6
    for i, pair in itertools.product(range(n), itertools.combinations(range(n), 2)):
        result = np.mean(np.all(pairs[:, i] == pair, axis=-1))
        assert abs(result - share) < 4 * np.sqrt(share * (1 - share) / draws)
    models = np.random.default_rng(0).normal(size=n)
    averages = models[pairs].mean(axis=-1).mean(axis=0)
    np.testing.assert_allclose(averages, models.mean(), atol=0.03)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("islands", [2, 3, 8])
def test_each_model_becomes_the_average_of_its_pair(islands, dtype):
    """Exactly: half of a model has no rounding. A model that is NaN stays out of other pairs."""
    algorithm = papa_2(
        lambda w, x: (jnp.sum(w) * jnp.mean(x), {}), islands=islands, optimizer=optax.sgd(0.0)
    )
    models = np.random.default_rng(islands).normal(size=(islands, 5)).astype(dtype)
    models[0, 3:] = np.nan, np.inf
    state = algorithm.init(jnp.zeros(5, dtype))._replace(
        local_params=jnp.asarray(models), round=jnp.int32(7)
    )
    after, _ = jax.jit(algorithm.round)(state, Cohort(np.ones((islands, 1, 2), np.float32)))
    pairs = compiled_pairs(jax.random.fold_in(jax.random.key(0), 7), islands)
    assert after.local_params.dtype == dtype
    for model, (a, b) in zip(np.asarray(after.local_params), pairs.tolist(), strict=True):
        average = (models[a] + models[b]) / 2
        np.testing.assert_array_equal(model.astype("float32"), average.astype("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8 automatic", "8 explicit"])
def test_random_pairs_pass_a_ring_without_an_all_gather(mesh):
    """All that is reduced are the metrics; models are received one at a time."""
    compiled = trainer("PAPA-2", mesh)
    communication = [
        c for c in collectives(compiled.round.as_text(), compiled.mesh) if "islands" in c.axes
    ]
    assert {c.kind for c in communication} == {"all-reduce", "collective-permute"}
    reduced = [c for c in communication if c.kind == "all-reduce"]
    assert {shape for c in reduced for shape in c.shapes} == {"f32[]"}
    sent = [c for c in communication if c.kind == "collective-permute"]
    assert sum(len(c.shapes) for c in sent) == len(random_params())
    assert all(c.executions == 7 for c in sent)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_islands():
    model, temporaries = 4 * 300 * 300, []
    for islands in (3, 8):
        mesh = make_mesh(islands=islands, devices=jax.devices()[:islands])
        with jax.set_mesh(mesh):
            algorithm = papa_2(
                lambda w, x: (jnp.sum(w) * jnp.mean(x), {}),
                islands=islands,
                optimizer=optax.sgd(0.1),
            )
            placed = NamedSharding(mesh, PartitionSpec("islands"))
            state = jax.tree.map(
                lambda x, placed=placed: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=placed if x.ndim else None
                ),
                jax.eval_shape(algorithm.init, jnp.zeros((300, 300))),
            )
            cohort = Cohort(np.ones((islands, 1, 2), np.float32))
            compiled = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert max(temporaries) < 4 * model
    assert temporaries[1] - temporaries[0] < 0.1 * model


@pytest.mark.slow
def test_rotations_keep_the_average_and_halve_the_difference():
    algorithm = papa_2(loss_fn, pairs="rotation", **SETTINGS)
    apart, _ = run(branch_train_merge(loss_fn, **SETTINGS), rounds=1)
    paired, _ = run(algorithm, rounds=1)
    assert_close(paired.params, apart.params)
    for name, models in paired.local_params.items():
        own = np.asarray(apart.expert_params[name])
        candidates = [(own + np.roll(own, -c, axis=0)) / 2 for c in range(1, ISLANDS)]
        errors = [np.abs(models - candidate).max() for candidate in candidates]
        assert min(errors) < 1e-6 < sorted(errors)[1]


@pytest.mark.parametrize("pairs", ["random", "rotation"])
def test_one_model_is_its_own_average(pairs):
    algorithm = papa_2(
        lambda w, x: (jnp.sum((w - x) ** 2), {}), islands=1, optimizer=optax.sgd(0.5), pairs=pairs
    )
    state, _ = algorithm.round(algorithm.init(jnp.zeros(3)), Cohort(jnp.ones((1, 1, 3))))
    np.testing.assert_array_equal(state.local_params, np.ones((1, 3)))


def test_unknown_pairs_raise():
    with pytest.raises(ValueError, match=r"pairs is 'all', .* Pass \"random\", as the authors"):
        papa_2(loss_fn, pairs="all", **SETTINGS)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_alpha_out_of_range_raises(alpha):
    with pytest.raises(ValueError, match=r"Pass 0\.99, or 0.0 for papa_all"):
        papa(loss_fn, alpha=alpha, **SETTINGS)


def test_a_round_is_differentiable_in_alpha():
    """Against central differences of the NumPy reference, in float64."""
    rounds = random_rounds(2, ISLANDS)
    start = {name: np.float64(p) for name, p in random_params().items()}
    direction = {name: np.random.default_rng(3).normal(size=p.shape) for name, p in start.items()}

    def along(params):
        return sum((params[name] * d).sum() for name, d in direction.items())

    def after(alpha):
        algorithm = papa(loss_fn, islands=ISLANDS, optimizer=optax.sgd(0.2), alpha=alpha)
        state = algorithm.init(jax.tree.map(jnp.asarray, start))
        for batches in rounds:
            state, _ = algorithm.round(state, Cohort(batches))
        return along(state.params)

    def expected(alpha):
        return along(papa_reference(start, rounds, sgd(0.2), lambda r: alpha)[-1][0])

    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(after))(0.6)
    difference = (expected(0.6 + 1e-5) - expected(0.6 - 1e-5)) / 2e-5
    assert abs(difference) > 1e-4
    np.testing.assert_allclose(slope, difference, rtol=1e-6)


def test_an_island_whose_partner_does_not_answer_keeps_its_model():
    """In stages, the missing model must not count as zeros."""
    algorithm = papa_2(
        lambda w, x: (jnp.mean((w - x) ** 2), {}),
        islands=3,
        optimizer=optax.sgd(0.5),
        pairs="rotation",
    )
    state = algorithm.init(jnp.float32(0.0))
    cohort = Cohort(jnp.array([[[1.0]], [[5.0]], [[7.0]]]))  # w = 1, 5 and 7
    stages = fedpax.stages(algorithm.round, state, cohort)
    collected = set()
    for r in range(6):
        state = state._replace(round=jnp.int32(r))
        after, _ = run_local(stages, state, cohort, participants=[0, 1])
        collected.add(tuple(after.local_params.tolist()))
    assert collected == {(3.0, 5.0, 0.0), (1.0, 3.0, 0.0)}  # by rotation; the third keeps its state

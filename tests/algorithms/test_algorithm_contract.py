"""The contract of `FederatedAlgorithm`, for every method."""

import chex
import jax
import jax.numpy as jnp
import method_problem
import method_table
import numpy as np
import optax
import pytest
from method_problem import PARTICIPANTS, assert_close, loss_fn, random_params, random_rounds
from method_table import (
    METHODS,
    every_method,
    mark_slow,
    place_batches,
    problem,
    run_eager,
    trainer,
)

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import data_parallel, diloco, fedavg

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")


on_each_kind_of_mesh = pytest.mark.parametrize("mesh", ["none", "4x2 explicit", "4x2 automatic"])

# Methods whose participants have partners, or a region, by their place.
BY_POSITION = ("NoLoCo", "PAPA-2", "PAPA-2, rotation", "HALoS")


@pytest.mark.each_value
@on_each_kind_of_mesh
@every_method
def test_a_round_keeps_the_structure_shapes_dtypes_and_shardings_of_the_state(name: str, mesh: str):
    compiled = trainer(name, mesh)
    params, (batches,), (weights,) = problem(1)
    old = compiled.start(params)
    kind = [(x.shape, x.dtype, x.weak_type, x.sharding) for x in jax.tree.leaves(old)]
    new, _ = compiled.round(old, compiled.cohort(batches, weights))
    assert type(new) is type(old)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for leaf, (shape, dtype, weak_type, sharding) in zip(jax.tree.leaves(new), kind, strict=True):
        assert (leaf.shape, leaf.dtype, leaf.weak_type) == (shape, dtype, weak_type)
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert jax.tree.structure(new.params) == jax.tree.structure(params)


@pytest.mark.each_value
@on_each_kind_of_mesh
@every_method
def test_the_state_can_be_donated(name: str, mesh: str):
    compiled = trainer(name, mesh)
    params, (batches,), (weights,) = problem(1)
    state = compiled.start(params)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    compiled.round(state, compiled.cohort(batches, weights))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert compiled.round.memory_analysis().alias_size_in_bytes == held


@every_method
def test_donating_the_state_keeps_the_params_of_init(name: str):
    params = jax.tree.map(jnp.asarray, problem(1)[0])
    state = METHODS[name].algorithm().init(params)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(jnp.copy, s), donate_argnums=0)(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@every_method
def test_jit_equals_eager(name: str):
    assert_close(trainer(name, "none").run(*problem(2)), run_eager(name, "none", *problem(2)))


@pytest.mark.parametrize(
    "mesh",
    [
        "none",
        *[pytest.param(f"4x2 {k}", marks=pytest.mark.slow) for k in ("automatic", "explicit")],
    ],
)
@every_method
def test_later_rounds_do_not_retrace(name: str, mesh: str):
    compiled = trainer(name, mesh)
    params, rounds, weights = problem(3)
    chex.clear_trace_counter()  # it counts by the function's name
    step = jax.jit(chex.assert_max_traces(compiled.algorithm.round, n=1))
    state = compiled.start(params)
    with method_table.use(compiled.mesh):
        for batches, n in zip(rounds, weights, strict=True):
            state, _ = step(state, compiled.cohort(batches, n))


@every_method
def test_abstract_evaluation_agrees(name: str):
    algorithm = METHODS[name].algorithm()
    compiled = trainer(name, "none")
    params, rounds, weights = problem(1)
    state = compiled.start(params)
    shapes = jax.eval_shape(algorithm.init, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, shapes)
    cohort = compiled.cohort(rounds[0], weights[0])
    after = jax.eval_shape(algorithm.round, shapes, cohort)
    chex.assert_trees_all_equal_shapes_and_dtypes(compiled.round(state, cohort), after)


@pytest.mark.each_value
@on_each_kind_of_mesh
@every_method
def test_training_resumes_from_a_checkpoint(name: str, mesh: str, tmp_path):
    """Bitwise: all state is in the leaves."""
    compiled = trainer(name, mesh)
    params, rounds, weights = problem(3)
    unbroken = compiled.run(params, rounds, weights)
    saved, _ = unbroken[0]
    np.savez(tmp_path / "state.npz", *jax.tree.leaves(saved))

    with np.load(tmp_path / "state.npz") as file:
        leaves = [file[key] for key in file.files]
    fresh = compiled.start(random_params(seed=1))
    state = jax.tree.unflatten(
        jax.tree.structure(fresh),
        [
            jax.device_put(leaf, like.sharding)
            for leaf, like in zip(leaves, jax.tree.leaves(fresh), strict=True)
        ],
    )
    with method_table.use(compiled.mesh):
        for batches, n in zip(rounds[1:], weights[1:], strict=True):
            state, metrics = compiled.round(state, compiled.cohort(batches, n))
    chex.assert_trees_all_equal((state, metrics), unbroken[-1])


@every_method
def test_metrics_are_scalars_with_the_loss_and_what_the_loss_function_reports(name: str):
    for _, metrics in trainer(name, "none").run(*problem(2)):
        assert metrics.keys() - {"personal_loss"} == {"loss", "confidence", "correct"}
        assert all(m.shape == () and m.dtype == np.float32 for m in metrics.values())
        assert 0 < metrics["loss"] < 5
        assert 0.2 < metrics["confidence"] < 1
        assert 0 <= metrics["correct"] <= method_problem.BATCH


@pytest.mark.parametrize("name", mark_slow(n for n in METHODS if n not in BY_POSITION))
def test_the_order_of_participants_does_not_matter(name: str):
    """Permuted participants, with their placed state, give the permuted placed state."""
    compiled = trainer(name, "none")
    params, rounds, weights = problem(2)
    order = np.random.default_rng(0).permutation(PARTICIPANTS)
    moved = [jax.tree.map(lambda b: b[order], batches) for batches in rounds]
    kept = placed_leaves(name)
    for (state, metrics), (other, other_metrics) in zip(
        compiled.run(params, rounds, weights),
        compiled.run(params, moved, weights[:, order]),
        strict=True,
    ):
        assert_close((state.params, metrics), (other.params, other_metrics))
        assert_close(
            [
                leaf[order] if placed else leaf
                for leaf, placed in zip(jax.tree.leaves(state), kept, strict=True)
            ],
            jax.tree.leaves(other),
        )


def placed_leaves(name: str) -> list[bool]:
    """Tell which leaves of the state grow with the number of participants."""
    few, many = (
        jax.tree.leaves(jax.eval_shape(METHODS[name].algorithm(n).init, random_params()))
        for n in (PARTICIPANTS, PARTICIPANTS + 1)
    )
    return [a.shape != b.shape for a, b in zip(few, many, strict=True)]


def test_methods_with_placed_state():
    assert not any(placed_leaves("FedAdam"))
    assert not any(placed_leaves("data parallelism"))
    # AdamW's count and its two moments of each of the four parameters.
    assert sum(placed_leaves("DiLoCo")) == 1 + 2 * 4


# ---- one participant, server learning rate 1


def adamw() -> optax.GradientTransformation:
    return optax.adamw(optax.linear_schedule(0.02, 0.002, 8), weight_decay=0.1)


ALONE = {
    "FedAvg": lambda: fedavg(loss_fn, cohort_size=1, client_optimizer=adamw()),
    "DiLoCo": lambda: diloco(
        loss_fn, islands=1, inner_optimizer=adamw(), outer_optimizer=optax.sgd(1.0)
    ),
    "data parallelism": lambda: data_parallel(loss_fn, islands=1, optimizer=adamw()),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_participant_is_plain_local_training(name: str):
    algorithm: FederatedAlgorithm = ALONE[name]()
    params = jax.tree.map(jnp.asarray, random_params())
    state, step = algorithm.init(params), jax.jit(algorithm.round)
    optimizer = adamw()

    @jax.jit
    def plain(params, optimizer_state, batch):
        (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, {**aux, "loss": loss}

    optimizer_state = optimizer.init(params)
    for batches in random_rounds(2, participants=1):
        state, metrics = step(state, Cohort(place_batches(batches, None, "")))
        if name == "FedAvg":  # its clients keep no state
            optimizer_state = optimizer.init(params)
        reports = []
        for t in range(method_problem.STEPS):
            batch = jax.tree.map(lambda b, t=t: b[0, t], batches)
            params, optimizer_state, report = plain(params, optimizer_state, batch)
            reports.append(report)
        assert_close(state.params, params)
        assert_close(metrics, jax.tree.map(lambda *ms: np.mean(ms), *reports))

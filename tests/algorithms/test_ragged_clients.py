"""Clients with different numbers of steps and examples."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_federated_methods as references
import numpy_methods as reference
import optax
import pytest
from method_problem import BATCH, PARTICIPANTS, POPULATION, STEPS, assert_close, loss_fn
from method_table import mesh_of, place_batches, place_params, problem, use

from fedpax import Cohort
from fedpax.algorithms import (
    choose_cluster,
    fedavg,
    fine_tuning_evaluation,
    local_steps,
    mime,
    mime_lite,
    scaffold,
)

RATE, BETA = 0.2, 0.8


@functools.cache  # compiled once for all tests of the same shapes
def algorithm(chunk_size=1, loss=loss_fn):
    return fedavg(
        loss,
        cohort_size=PARTICIPANTS,
        client_optimizer=optax.sgd(RATE, momentum=BETA),
        chunk_size=chunk_size,
    )


def random_steps(seed=0):
    """Draw numbers of steps from 0 to all, in random order."""
    rng = np.random.default_rng((seed, 3))
    return rng.permutation(np.resize(np.arange(STEPS + 1), PARTICIPANTS)).astype(np.int32)


def client_by_client(params, batches, weights, steps):
    """Compute the round client by client, each on its own batches."""
    client = reference.momentum(RATE, BETA)
    x = {name: np.float64(p) for name, p in params.items()}
    ends, reports, shares = [], [], []
    for i, n in enumerate(steps):
        if n:
            own = reference.participant(batches, i)[:n]
            y, _, metrics = reference.train(x, client, client.init(x), own)
            ends.append(y)
            reports.append(metrics)
            shares.append(weights[i])
        else:
            assert weights[i] == 0
    return reference.weighted_mean(ends, shares), reference.weighted_mean(reports, shares)


@pytest.mark.parametrize(
    ("mesh_name", "chunk_size"),
    [
        ("none", 3),  # chunks of clients of other lengths
        ("4x2 automatic", 1),
        ("8 explicit", None),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("none", 1),
                ("none", None),
                ("4x2 explicit", 1),
                ("4x2 mixed", 2),
                ("8 explicit", 1),
            )
        ],
    ],
)
def test_a_round_equals_training_each_client_alone(mesh_name, chunk_size):
    params, (batches,), (weights,) = problem(1)
    steps = random_steps()
    weights = np.where(steps, weights, 0).astype(np.int32)
    mesh = mesh_of(mesh_name, "clients")
    method = algorithm(chunk_size)
    with use(mesh):
        state = method.init(place_params(params, mesh))
        cohort = place_batches(Cohort(batches, weights, steps), mesh, "clients")
        state, metrics = jax.jit(method.round)(state, cohort)
    assert_close((state.params, metrics), client_by_client(params, batches, weights, steps))


def test_num_steps_of_all_steps_equals_no_num_steps():
    params, (batches,), (weights,) = problem(1)
    method = algorithm()
    state = method.init(jax.tree.map(jnp.asarray, params))
    step = jax.jit(method.round)
    wanted = step(state, Cohort(batches, weights))
    for steps in (np.full(PARTICIPANTS, STEPS), jnp.asarray(np.full(PARTICIPANTS, STEPS + 5))):
        assert_close(step(state, Cohort(batches, weights, steps)), wanted)


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_a_client_runs_only_its_own_steps(chunk_size):
    """Count steps at run time: a chunk takes the steps of its longest client, and no more."""
    seen = collections.Counter()

    def counted(params, batch):
        jax.debug.callback(lambda c: seen.update([int(c)]), batch["client"][0])
        return loss_fn(params, {name: batch[name] for name in ("x", "label")})

    params, (batches,), (weights,) = problem(1)
    batches["client"] = np.broadcast_to(
        np.arange(PARTICIPANTS)[:, None, None], (PARTICIPANTS, STEPS, BATCH)
    )
    steps = random_steps(1)
    method = algorithm(chunk_size, counted)
    state = method.init(jax.tree.map(jnp.asarray, params))
    jax.block_until_ready(jax.jit(method.round)(state, Cohort(batches, weights, steps)))
    jax.effects_barrier()
    chunks = [steps[i : i + chunk_size] for i in range(0, PARTICIPANTS, chunk_size)]
    wanted = [chunk.max() for chunk in chunks for _ in chunk]
    assert [seen[i] for i in range(PARTICIPANTS)] == wanted


def masked_loss(params, batch):
    logits = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"]) @ params["out"]
    log_odds = jax.nn.log_softmax(params["scale"] * logits)
    chosen = jnp.take_along_axis(log_odds, batch["label"][:, None], axis=1)[:, 0]
    return -jnp.sum(jnp.where(batch["mask"], chosen, 0)) / jnp.sum(batch["mask"]), {}


def partly_filled(batches, examples):
    """Mark the first examples of each client; the others hold values that would be seen."""
    place = np.arange(STEPS * BATCH).reshape(STEPS, BATCH)
    mask = place < examples[:, None, None]
    x = np.where(mask[..., None], batches["x"], 1e4).astype(np.float32)
    return {**batches, "x": x, "mask": mask}


def test_masked_examples_do_not_count():
    """A batch that is not full trains on its examples alone, whatever its padding holds."""
    params, (batches,), _ = problem(1)
    examples = np.random.default_rng(5).integers(1, STEPS * BATCH + 1, size=PARTICIPANTS)
    batches = partly_filled(batches, examples)
    steps = -(-examples // BATCH)
    method = algorithm(1, masked_loss)
    state = method.init(jax.tree.map(jnp.asarray, params))
    state, metrics = jax.jit(method.round)(state, Cohort(batches, examples, steps))

    client = reference.momentum(RATE, BETA)
    x = {name: np.float64(p) for name, p in params.items()}
    ends, losses = [], []
    for i in range(PARTICIPANTS):
        own = [
            {name: b[i, t][batches["mask"][i, t]] for name, b in batches.items()}
            for t in range(steps[i])
        ]
        y, _, report = reference.train(x, client, client.init(x), own)
        ends.append(y)
        losses.append({"loss": report["loss"]})
    assert_close(state.params, reference.weighted_mean(ends, examples))
    assert_close(metrics, reference.weighted_mean(losses, examples))


@pytest.mark.parametrize(
    "name", ["mime", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mime_lite", "scaffold"))]
)
def test_the_gradient_at_the_servers_model_is_over_all_examples(name):
    """The papers' grad f_i(x): a batch that is not full counts by its examples."""
    params, rounds, _ = problem(2)
    examples = 1 + np.random.default_rng(6).permutation(STEPS * BATCH)[:PARTICIPANTS]
    rounds = [partly_filled(batches, examples) for batches in rounds]
    x = {key: np.float64(p) for key, p in params.items()}
    if name == "scaffold":
        method = scaffold(
            masked_loss,
            cohort_size=PARTICIPANTS,
            num_clients=POPULATION,
            client_optimizer=optax.sgd(RATE),
            option="I",
        )
        wanted = references.scaffold(x, rounds, [examples] * 2, RATE, 1.0, "I")
    else:
        method = (mime if name == "mime" else mime_lite)(
            masked_loss,
            cohort_size=PARTICIPANTS,
            client_optimizer=optax.sgd(RATE, momentum=BETA),
        )
        base = references.base_momentum(BETA)
        wanted = references.mime(x, rounds, [examples] * 2, RATE, base, name == "mime")
    state, step = method.init(jax.tree.map(jnp.asarray, params)), jax.jit(method.round)
    weights = None if name == "scaffold" else examples
    for batches, (model, report) in zip(rounds, wanted, strict=True):
        ids = examples.astype(np.int32) - 1
        state, metrics = step(state, Cohort(batches, weights, client_ids=ids))
        assert_close((state.params, metrics), (model, {"loss": report["loss"]}))


def test_the_loss_of_a_model_is_over_all_examples():
    """A batch that is not full counts by its examples in evaluation and in a choice of clusters."""
    random = np.random.default_rng(7)
    sizes = 1 + random.permutation(STEPS * BATCH)[:PARTICIPANTS]
    mask = np.arange(STEPS * BATCH).reshape(STEPS, BATCH) < sizes[:, None, None]
    x = random.normal(size=mask.shape).astype(np.float32)
    steps = -(-sizes // BATCH)
    cohort = Cohort({"x": x, "mask": mask}, sizes, steps)

    def loss_fn(w, batch):
        errors = jnp.where(batch["mask"], jnp.square(batch["x"] - w), 0)
        above = jnp.sum(batch["mask"] & (batch["x"] > w))  # an integer
        return jnp.sum(errors) / jnp.sum(batch["mask"]), {"above": above}

    evaluate = fine_tuning_evaluation(
        loss_fn, cohort_size=PARTICIPANTS, client_optimizer=optax.sgd(RATE)
    )
    metrics = jax.jit(evaluate)(jnp.float32(0.3), cohort, cohort)
    examples = np.float64(x[mask])
    above = np.sum(mask & (x > np.float32(0.3)), axis=-1)
    wanted = {
        "loss": np.mean(np.square(examples - 0.3)),
        "above": np.average(above, weights=np.sum(mask, axis=-1)),
    }
    assert_close({name: metrics[name] for name in wanted}, wanted)

    models = np.float32([0.2, -0.3, 0.6])
    choose = jax.jit(functools.partial(choose_cluster, loss_fn))
    for own, own_mask, count in zip(x, mask, steps, strict=True):
        losses = [np.mean(np.square(np.float64(own[own_mask]) - float(w))) for w in models]
        chosen = choose(models, {"x": own, "mask": own_mask}, count)
        assert chosen == np.argmin(losses)


def test_a_cohort_without_steps_changes_nothing():
    params, (batches,), _ = problem(1)
    method = algorithm()
    state = method.init(jax.tree.map(jnp.asarray, params))
    no_steps = np.zeros(PARTICIPANTS, np.int32)
    after, metrics = jax.jit(method.round)(state, Cohort(batches, no_steps, no_steps))
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    assert all(float(value) == 0 for value in metrics.values())


def test_forward_derivatives_equal_those_without_num_steps():
    params, (batches,), _ = problem(1)
    params = jax.tree.map(jnp.asarray, params)
    own = jax.tree.map(lambda b: b[0], batches)
    descent = optax.sgd(RATE, momentum=BETA)
    rng = np.random.default_rng(7)
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)

    def after(steps):
        return lambda x: local_steps(loss_fn, descent, x, descent.init(x), own, steps)[0]

    ragged = jax.jit(lambda n: jax.jvp(after(n), (params,), (direction,)))(STEPS)
    assert_close(ragged, jax.jit(lambda: jax.jvp(after(None), (params,), (direction,)))())


@pytest.mark.parametrize("steps", [1.5, np.ones(2, int)])
def test_num_steps_must_be_one_integer_per_client(steps):
    params, (batches,), _ = problem(1)
    params = jax.tree.map(jnp.asarray, params)
    own = jax.tree.map(lambda b: b[0], batches)
    descent = optax.sgd(RATE)
    with pytest.raises(TypeError, match="expected one integer per participant"):
        local_steps(loss_fn, descent, params, descent.init(params), own, steps)

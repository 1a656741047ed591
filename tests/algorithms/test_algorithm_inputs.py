"""Other kinds of models, batches and metrics; input that raises, and its messages."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import method_problem
import method_table
import numpy as np
import optax
import pytest
from flax import nnx
from island_method_table import ISLAND_METHODS
from method_problem import assert_close
from method_table import METHODS, every_method, mesh_of, place_batches, place_params, problem, use

from fedpax import Cohort, federated_mean, program
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import data_parallel, diloco, fedavg
from fedpax.parallel.mesh import make_mesh

ALGORITHMS = {
    "FedAvg": lambda loss_fn, n: fedavg(loss_fn, cohort_size=n, client_optimizer=optax.sgd(0.1)),
    "DiLoCo": lambda loss_fn, n: diloco(loss_fn, islands=n, inner_optimizer=optax.adamw(0.1)),
    "data parallelism": lambda loss_fn, n: data_parallel(
        loss_fn, islands=n, optimizer=optax.adamw(0.1)
    ),
}
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.mark.parametrize(
    ("name", "mesh_name"),
    [
        ("DiLoCo", "none"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("FedAdam", "none"),
                ("data parallelism", "none"),
                ("FedAdam", "4x2 explicit"),
                ("DiLoCo", "4x2 automatic"),
                ("data parallelism", "4x2 explicit"),
                *[(name, "none") for name in ISLAND_METHODS],
            )
        ],
    ],
)
def test_bfloat16(name: str, mesh_name: str):
    """The state stays bfloat16, metrics are float32, and training agrees with float32."""
    method = METHODS[name]
    params, rounds, weights = problem(2)
    rates = method.rates
    if name in ISLAND_METHODS:  # so that two rounds move each parameter by more than its rounding
        rates = rates._replace(local=4 * rates.local)
    mesh, algorithm = mesh_of(mesh_name, method.placement), method.algorithm(rates=rates)
    step = jax.jit(algorithm.round)
    with use(mesh):
        small = place_params({k: p.astype(jnp.bfloat16) for k, p in params.items()}, mesh)
        state = algorithm.init(small)
        floats = {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.int32}
        # Muon's coefficients and the residuals of a codec are float32.
        if name not in ("MuLoCo", "SparseLoCo"):
            assert floats == {jnp.dtype(jnp.bfloat16)}
        for batches, n in zip(rounds, weights, strict=True):
            batches = {**batches, "x": batches["x"].astype(jnp.bfloat16)}
            cohort = place_batches(method.cohort(batches, n), mesh, method.placement)
            new, metrics = step(state, cohort)
            assert jax.tree.map(jnp.dtype, jax.tree.map(lambda x: x.dtype, new)) == jax.tree.map(
                lambda x: x.dtype, state
            )
            state = new
    assert {m.dtype for m in metrics.values()} == {jnp.dtype(jnp.float32)}
    (wanted, wanted_metrics) = method.reference(params, rounds, weights, rates)[-1]
    for leaf, want in wanted.items():
        moved = np.abs(want - params[leaf]).max()
        assert moved > 0.02
        # bfloat16 has 8 bits: a parameter near 1 is rounded by 0.004 at each of some steps.
        np.testing.assert_allclose(np.float32(state.params[leaf]), want, atol=0.03, rtol=0.03)
    np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=0.03)


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.placement == "islands"]
)
def test_the_types_of_islands_in_bfloat16(name: str):
    """Abstractly: no leaf of the state changes its dtype, and metrics are float32."""
    method = METHODS[name]
    params, (batches,), (weights,) = problem(1)
    algorithm = method.algorithm()
    small = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    state = jax.eval_shape(algorithm.init, small)
    cohort = method.cohort({**batches, "x": jnp.asarray(batches["x"], jnp.bfloat16)}, weights)
    after, metrics = jax.eval_shape(algorithm.round, state, cohort)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {metric.dtype for metric in metrics.values()} == {jnp.dtype(jnp.float32)}


# ---- a model of one vector, quick to compile


def tokens_loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Compute a loss of integer batches, with metrics that are an int, a bool and a number."""
    vectors = params["embedding"][batch["tokens"]]
    loss = jnp.mean((vectors.sum(-1) - params["shift"]) ** 2 * batch["mask"])
    return loss, {
        "tokens": jnp.sum(batch["mask"]),
        "odd": jnp.sum(batch["tokens"]) % 2 == 1,
        "constant": 2.5,
    }


@every_algorithm
def test_integer_batches_and_metrics_of_any_type(name: str):
    rng = np.random.default_rng(0)
    batches = {
        "tokens": rng.integers(0, 16, size=(4, 3, 2, 5)).astype(np.int32),
        "mask": rng.integers(0, 2, size=(4, 3, 2, 5)).astype(np.uint8),
    }
    params = {"embedding": jnp.asarray(rng.normal(size=(16, 3)), jnp.float32), "shift": 0.5}
    params["shift"] = jnp.float32(params["shift"])
    algorithm = ALGORITHMS[name](tokens_loss, 4)
    state, metrics = algorithm.round(algorithm.init(params), Cohort(batches))
    assert np.abs(state.params["embedding"] - params["embedding"]).max() > 1e-3
    assert all(m.dtype == jnp.float32 and m.shape == () for m in metrics.values())
    odd = batches["tokens"].sum((2, 3)) % 2 == 1
    assert 0 < odd.mean() < 1
    expected = {"tokens": batches["mask"].sum((2, 3)).mean(), "odd": odd.mean(), "constant": 2.5}
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-6)


def noisy_loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    (w, b), nothing = params["layers"]
    assert nothing is None
    x, key_or_noise = batch
    noise = key_or_noise
    if jnp.issubdtype(noise.dtype, jax.dtypes.prng_key):
        noise = jax.random.normal(noise, x.shape)
    return jnp.mean((x @ w + b + noise @ w) ** 2), {}


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["none", "4x2 automatic", "4x2 explicit"])
@every_algorithm
def test_random_keys_in_batches_and_nested_trees(name: str, mesh_name: str):
    """A random key per step, as for dropout, equals giving its noise."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 3, 2, 5)), jnp.float32)
    keys = jax.random.split(jax.random.key(3), (4, 3))
    noise = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (2, 5))))(keys)
    w, b = rng.normal(size=5), rng.normal()
    params = {"layers": ((jnp.asarray(w, jnp.float32), jnp.float32(b)), None)}
    algorithm = ALGORITHMS[name](noisy_loss, 4)
    mesh = mesh_of(mesh_name, METHODS[name].placement)
    with use(mesh):
        state = algorithm.init(params)
        result = algorithm.round(state, Cohort((x, keys)))
        expected = algorithm.round(state, Cohort((x, noise)))
    assert_close(result, expected)
    assert jax.tree.structure(result[0].params) == jax.tree.structure(params)


@pytest.mark.slow
@every_method
def test_several_models_at_once(name: str):
    """`vmap` over models equals training each model alone."""
    method = METHODS[name]
    algorithm = method.algorithm()
    _, (batches,), (weights,) = problem(1)
    models = [method_problem.random_params(seed) for seed in (0, 1, 2)]

    def train(params):
        return algorithm.round(algorithm.init(params), method.cohort(batches, weights))

    together = jax.jit(jax.vmap(train))(jax.tree.map(lambda *p: np.stack(p), *models))
    for i, params in enumerate(models):
        (alone,) = method_table.trainer(name, "none").run(params, [batches], [weights])
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone)


# ---- input that raises


def line(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    return jnp.mean((params * batch["x"] - batch["y"]) ** 2), {}


def small(name: str, n: int = 4) -> tuple[FederatedAlgorithm, Any]:
    algorithm = ALGORITHMS[name](line, n)
    return algorithm, algorithm.init(jnp.float32(1.0))


def batch(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (
            {"x": batch(3, 2, 5), "y": batch(3, 2, 5)},
            r"batches\['x'\] has shape \[3, 2, 5\], expected \[4.* Pass (cohort_size|islands)=3 to "
            r"\w+, or a cohort of 4 participants to the round",
        ),
        (
            {"x": batch(4, 2, 5), "y": batch(5, 2, 5)},
            r"batches\['y'\] has shape \[5, 2, 5\], expected \[4.* Stack the participants' batches",
        ),
    ],
    ids=["all leaves", "one leaf"],
)
@every_algorithm
def test_batches_of_another_number_of_participants_raise(name: str, batches: Any, words: str):
    algorithm, state = small(name)
    with pytest.raises(ValueError, match=words):
        algorithm.round(state, Cohort(batches))


@every_algorithm
def test_batches_without_a_step_raise(name: str):
    algorithm, state = small(name)
    with pytest.raises(ValueError, match=r"\['y'\] has shape \[4, 0, 5\], .* at least one batch"):
        algorithm.round(state, Cohort({"x": batch(4, 2, 5), "y": batch(4, 0, 5)}))


@every_algorithm
def test_batches_of_different_numbers_of_steps_raise(name: str):
    algorithm, state = small(name)
    with pytest.raises(ValueError, match=r"batches\['y'\] has 2 and .* has 3. Pad the"):
        algorithm.round(state, Cohort({"x": batch(4, 3, 5), "y": batch(4, 2, 5)}))


@pytest.mark.each_value
@pytest.mark.parametrize("axis", ["fsdp only", "placement"])
@every_algorithm
def test_a_mesh_that_does_not_divide_the_participants(name: str, axis: str):
    """The mesh raises only where participants are sharded over it."""
    algorithm, state = small(name, n=6)
    batches = {"x": batch(6, 2, 5), "y": batch(6, 2, 5)}
    if axis == "placement":
        mesh = make_mesh(**{METHODS[name].placement: 4, "fsdp": 2})
        with use(mesh), pytest.raises(ValueError, match="Use 4 or 8 participants"):
            algorithm.round(state, Cohort(batches))
    else:
        with use(make_mesh(fsdp=8)):
            result = algorithm.round(state, Cohort(batches))
        assert_close(result, algorithm.round(state, Cohort(batches)))


@pytest.mark.parametrize(
    ("participants", "error", "words"),
    [
        (0, ValueError, "=0, expected at least one participant"),
        (4.0, TypeError, "=4.0 of type float, expected an int"),
    ],
)
@every_algorithm
def test_an_invalid_number_of_participants_raises(name, participants, error, words):
    with pytest.raises(error, match=words):
        ALGORITHMS[name](line, participants)


# ---- what the loss function returns beside the loss


@every_algorithm
def test_a_loss_without_metrics(name: str):
    algorithm = ALGORITHMS[name](lambda w, x: (jnp.mean((w - x) ** 2), None), 2)
    _, metrics = algorithm.round(algorithm.init(jnp.ones(2)), Cohort(jnp.zeros((2, 1, 3, 2))))
    assert {key: value.item() for key, value in metrics.items() if key == "loss"} == {"loss": 1.0}


@every_algorithm
@pytest.mark.parametrize(
    ("aux", "error", "words"),
    [
        (jnp.zeros(()), TypeError, "array float32.*beside the loss, expected a dict of metrics"),
        ((), TypeError, "loss_fn returned a tuple of 0 beside the loss"),
        ({"loss": 0.0}, ValueError, "Leave it out, or rename it"),
        ({0: jnp.zeros(())}, TypeError, "a metric named 0, expected a text"),
    ],
)
def test_metrics_that_are_no_dict_raise(name: str, aux: Any, error: type[Exception], words: str):
    algorithm = ALGORITHMS[name](lambda w, x: (jnp.mean((w - x) ** 2), aux), 2)
    with pytest.raises(error, match=words):
        algorithm.round(algorithm.init(jnp.ones(2)), Cohort(jnp.zeros((2, 1, 3, 2))))


@pytest.mark.parametrize("name", METHODS)
def test_a_random_key_among_the_parameters_points_to_the_split(name: str):
    params, _, _ = problem(1)
    method = METHODS[name]
    algorithm = method.algorithm(rates=method.rates)
    with pytest.raises(TypeError, match=r"params\['rngs'\] is a random key.*nnx\.split\(model"):
        algorithm.init(params | {"rngs": jax.random.key(0)})


def test_a_flax_model_among_the_parameters_points_to_the_split():
    class Dropped(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear, self.dropout = nnx.Linear(2, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    model = Dropped(nnx.Rngs(0))
    algorithm = ALGORITHMS["FedAvg"](lambda params, batch: (0.0, {}), 2)
    for params, path in (
        (model, "dropout.rngs.key"),
        (nnx.state(model), "['dropout']['rngs']['key']"),
    ):
        with pytest.raises(TypeError, match=re.escape(path) + r".*is a random key.*nnx\.split"):
            algorithm.init(params)
    with pytest.raises(TypeError) as raised:
        algorithm.init(nnx.state(model))
    split, merge = re.findall(r"nnx\.split\([^)]*\)|nnx\.merge\([^)]*\)", str(raised.value))
    graphdef, params, rest = eval(split, {"nnx": nnx, "model": model})  # as the message says

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, None]:
        scope = {"nnx": nnx, "graphdef": graphdef, "params": params, "rest": rest}
        again = eval(merge, scope)
        return jnp.mean(again.dropout(again.linear(batch)) ** 2), None

    trained = ALGORITHMS["FedAvg"](loss_fn, 2)
    state, metrics = jax.jit(trained.round)(trained.init(params), Cohort(jnp.ones((2, 3, 4, 2))))
    assert metrics["loss"] > 0 and (state.params["linear"]["bias"][...] != 0).all()
    counts = nnx.state(model, (nnx.Param, nnx.RngCount))
    with pytest.raises(TypeError, match=r"\['count'\].* has dtype uint32, expected.*nnx\.split"):
        algorithm.round(algorithm.init(counts), Cohort(jnp.ones((2, 1, 3))))
    with pytest.raises(TypeError, match=r"x\['dropout'\]\['rngs'\]\['key'\].*nnx\.split"):
        program(clients=1)(federated_mean)(
            {"dropout": {"rngs": {"key": jax.random.split(jax.random.key(0), 1)}}}
        )

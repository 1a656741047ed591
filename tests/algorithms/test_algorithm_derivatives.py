"""A round is differentiable: in the parameters, the learning rates and the clients' weights.

Checked against central differences of the NumPy reference, so that no automatic derivative is
shared. All in float64: Adam's division makes much of float32's rounding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_problem import Method, Rates, random_params, random_rounds, random_weights
from method_table import MESHES, METHODS, mesh_of, place, place_params, use

from fedpax import Cohort

CLIENTS, ROUNDS, STEPS = 4, 2, 2
STEP = 1e-5  # of the differences, whose error is about its square
# Metrics are float32 in any case, so derivatives through them are good to about 1e-7.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
OFTEN = {("DiLoCo", "4x2 automatic")}


def start(method: Method) -> dict[str, Any]:
    """Return the point of differentiation. Two rounds, so that the first server rate matters."""
    rates = {name: np.float64(rate) for name, rate in method.rates._asdict().items() if rate}
    weights = {"weights": random_weights(ROUNDS, CLIENTS) / 10} if method.weighted else {}
    params = {name: np.float64(p) for name, p in random_params().items()}
    return {**params, **rates, **weights}


def split(point: dict[str, Any]) -> tuple[dict[str, Any], Rates]:
    params = {name: point[name] for name in random_params()}
    return params, Rates(point["local"], point.get("server"))


def along(params: dict[str, Any], module: Any) -> Any:
    """One number of the final parameters: their product with a random vector."""
    rng = np.random.default_rng(5)
    return sum(module.sum(p * rng.normal(size=p.shape)) for _, p in sorted(params.items()))


def differentiable(method: Method, mesh: Any) -> Callable[[dict[str, Any]], jax.Array]:
    rounds = jax.tree.map(lambda *b: np.stack(b), *random_rounds(ROUNDS, CLIENTS, STEPS))
    sizes = jnp.asarray(random_weights(ROUNDS, CLIENTS))
    rounds = jax.tree.map(lambda b: place(b, mesh, (None, method.placement, None, "fsdp")), rounds)

    def objective(point):
        params, rates = split(point)
        algorithm = method.algorithm(CLIENTS, rates)

        def step(state, given):
            batches, weights, client_ids = given
            weights = weights if method.weighted else None
            client_ids = client_ids if method.keeps_client_state else None
            return algorithm.round(state, Cohort(batches, weights, client_ids=client_ids))

        given = (rounds, point.get("weights", sizes), sizes - 1)
        state, metrics = jax.lax.scan(step, algorithm.init(params), given)
        return along(state.params, jnp) + metrics["loss"].sum()

    return objective


def reference(method: Method) -> Callable[[dict[str, Any]], float]:
    rounds = random_rounds(ROUNDS, CLIENTS, STEPS)

    def objective(point):
        params, rates = split(point)
        sizes = random_weights(ROUNDS, CLIENTS)
        history = method.reference(params, rounds, point.get("weights", sizes), rates)
        losses = sum(metrics["loss"] for _, metrics in history)
        return along(history[-1][0], np) + losses

    return objective


@pytest.mark.parametrize(
    ("name", "mesh_name"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in OFTEN else pytest.mark.slow)
        for name in METHODS
        # By definition, these leave a part out: the second order, and what is sent compressed.
        if name not in ("Per-FedAvg (FO)", "SparseLoCo")
        for mesh in MESHES
        if not mesh.startswith("8")  # more devices than clients
    ],
)
def test_gradient(name: str, mesh_name: str):
    method = METHODS[name]
    point, expected = start(method), reference(method)
    mesh = mesh_of(mesh_name, method.placement)
    with jax.enable_x64(True), use(mesh):
        placed = point | place_params(split(point)[0], mesh)
        derivative = jax.jit(
            jax.value_and_grad(differentiable(method, mesh)),
            compiler_options={"xla_backend_optimization_level": 0},  # it is run only once
        )
        value, gradient = jax.device_get(derivative(placed))
    np.testing.assert_allclose(value, expected(point), rtol=1e-6)
    rng = np.random.default_rng(7)
    for leaf, slope in gradient.items():
        assert slope.dtype == np.float64
        direction = rng.normal(size=slope.shape)
        ahead, behind = (
            expected(point | {leaf: point[leaf] + step * direction}) for step in (STEP, -STEP)
        )
        difference = (ahead - behind) / (2 * STEP)
        assert abs(difference) > 1e-4
        got = np.sum(slope * direction)
        np.testing.assert_allclose(got, difference, err_msg=leaf, **TOLERANCE)

"""Every method with settings for the tests, and the small random problem that they train on.

A new method joins `METHODS`, for its contract and its reference, and, if it takes an aggregator,
also `METHODS` of `test_any_aggregator`, for absent and non-finite participants, and for its stages;
`test_method_tables` fails for a method that a table lacks. The methods in `QUICK` stand for the
others in the quick tests: `every_method` marks the rest as slow.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from asynchronous_method_table import ASYNCHRONOUS_METHODS
from federated_method_table import FEDERATED_METHODS
from island_method_table import ISLAND_METHODS
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from method_problem import (
    PARAMS,
    PARTICIPANTS,
    Method,
    Rates,
    loss_fn,
    random_params,
    random_rounds,
    random_weights,
)
from method_problem import assert_close as assert_close

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import data_parallel, diloco, fedavg, server_adam
from fedpax.training.compiled_round import state_shardings


def _fedavg(rates: Rates, client: Callable, server: Callable | None, refer: tuple) -> Method:
    """Make a FedAvg from optimizers that are functions of the learning rates."""
    refer_client, refer_server = refer
    return Method(
        "clients",
        rates,
        lambda clients, r: fedavg(
            loss_fn,
            cohort_size=clients,
            client_optimizer=client(r.local),
            server_optimizer=server and server(r.server),
        ),
        lambda x, rounds, n, r: reference.fedavg(
            x, rounds, n, refer_client(r.local), refer_server and refer_server(r.server)
        ),
        weighted=True,
    )


METHODS = {
    "FedAvg": _fedavg(Rates(0.2, None), optax.sgd, None, (reference.sgd, None)),
    "FedAdam": _fedavg(
        Rates(0.1, 0.05),
        lambda rate: optax.sgd(rate, momentum=0.8),
        lambda rate: server_adam(rate, b1=0.9, b2=0.99, tau=1e-3),
        (
            lambda rate: reference.momentum(rate, 0.8),
            lambda rate: reference.server_optimizer("adam", rate, 0.9, 0.99, 1e-3),
        ),
    ),
    "DiLoCo": Method(
        "islands",
        Rates(0.01, 0.5),
        lambda islands, r: diloco(
            loss_fn,
            islands=islands,
            inner_optimizer=optax.adamw(r.local, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.1),
            outer_optimizer=optax.sgd(r.server, momentum=0.8, nesterov=True),
        ),
        lambda x, rounds, _, r: reference.diloco(
            x, rounds, reference.adam(r.local, 0.9, 0.99, 1e-6, decay=0.1), r.server, 0.8
        ),
    ),
    "data parallelism": Method(
        "islands",
        Rates(0.01, None),
        lambda islands, r: data_parallel(
            loss_fn,
            islands=islands,
            optimizer=optax.adamw(r.local, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.1),
        ),
        lambda x, rounds, _, r: reference.data_parallel(
            x, rounds, reference.adam(r.local, 0.9, 0.99, 1e-6, decay=0.1)
        ),
    ),
}

METHODS |= FEDERATED_METHODS | ISLAND_METHODS | ASYNCHRONOUS_METHODS

OFTEN = ("FedAvg", "FedAdam", "DiLoCo", "data parallelism")
QUICK = OFTEN[1:]  # FedAdam is FedAvg with an optimizer of the server


def mark_slow(names: Iterable[str]) -> list[Any]:
    """Return names as parameters of a test, those outside `QUICK` marked as slow."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


every_method = pytest.mark.parametrize("name", mark_slow(METHODS))


# ---- meshes: the placement's axis over 8 devices, or over 4 and fsdp over 2; axes of each type

_TYPES = {
    "automatic": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
MESHES = ("none", "8 automatic", "8 explicit", "4x2 automatic", "4x2 explicit", "4x2 mixed")


def mesh_of(name: str, placement: str) -> Mesh | None:
    """Make the mesh called `name`; "none" is no mesh and one device."""
    if name == "none":
        return None
    size, kind = name.split()
    sizes = tuple(map(int, size.split("x")))
    names = (placement, "fsdp")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=_TYPES[kind][: len(sizes)])


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Set the mesh, if there is one."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def place(leaf: Any, mesh: Mesh | None, axes: Sequence[str | None]) -> jax.Array:
    """Put an array on the mesh, its dimensions sharded over the axes that the mesh has."""
    if mesh is None:
        return jnp.asarray(leaf)
    spec = [axis if axis in mesh.axis_names else None for axis in axes[: jnp.ndim(leaf)]]
    return jax.device_put(leaf, NamedSharding(mesh, P(*spec)))


def place_params(params: Any, mesh: Mesh | None) -> Any:
    """Shard parameters over fsdp."""
    return {name: place(leaf, mesh, PARAMS[name]) for name, leaf in params.items()}


def place_batches(batches: Any, mesh: Mesh | None, placement: str) -> Any:
    """Shard participants over their axis, and each batch over fsdp."""
    return jax.tree.map(lambda leaf: place(leaf, mesh, (placement, None, "fsdp")), batches)


class Trainer(NamedTuple):
    """A method on a mesh with a compiled round, which raises for states sharded otherwise."""

    method: Method
    mesh: Mesh | None
    algorithm: FederatedAlgorithm
    round: jax.stages.Compiled  # donates the state

    def start(self, params: Any) -> Any:
        """Make the initial state, sharded as its parameters are."""
        with use(self.mesh):
            return fresh_state(self.algorithm, self.method.placement, params, self.mesh)

    def cohort(self, batches: Any, weights: Any) -> Cohort:
        """Make the cohort of a round, on the mesh."""
        return place_batches(self.method.cohort(batches, weights), self.mesh, self.method.placement)

    def run(self, params: Any, rounds: Sequence[Any], weights: Sequence[Any]) -> list[tuple]:
        """Return state and metrics after each round, as NumPy arrays."""
        state, history = self.start(params), []
        with use(self.mesh):
            for batches, n in zip(rounds, weights, strict=True):
                state, metrics = self.round(state, self.cohort(batches, n))
                history.append(jax.device_get((state, metrics)))
        return history


def fresh_state(
    algorithm: FederatedAlgorithm,
    placement: str,
    params: Any,
    mesh: Mesh | None,
    participants: int = PARTICIPANTS,
) -> Any:
    """Run `init`; all state of a parameter gets the parameter's sharding."""
    params = place_params(params, mesh)
    if mesh is None:
        return jax.jit(algorithm.init)(params)
    shardings = state_shardings(
        jax.eval_shape(algorithm.init, params),
        params,
        jax.tree.map(lambda p: p.sharding, params),
        mesh,
        placement=placement,
        num_participants=participants,
    )
    return jax.jit(algorithm.init, out_shardings=shardings)(params)


@functools.cache
def trainer(name: str, mesh_name: str) -> Trainer:
    """Compile the method `name` for the mesh `mesh_name`; shared by the tests of a process."""
    method = METHODS[name]
    mesh = mesh_of(mesh_name, method.placement)
    algorithm = method.algorithm()
    with use(mesh):
        state = fresh_state(algorithm, method.placement, random_params(), mesh)
        cohort = method.cohort(random_rounds(1)[0], random_weights(1)[0])
        cohort = place_batches(cohort, mesh, method.placement)
        # As in training. The compiler finds these shardings by itself for the methods in `OFTEN`.
        ends = None if name in OFTEN or mesh is None else jax.tree.map(lambda x: x.sharding, state)
        step = jax.jit(algorithm.round, donate_argnums=0, out_shardings=(ends, None))
        compiled = step.lower(state, cohort).compile()
    return Trainer(method, mesh, algorithm, compiled)


def run_eager(name: str, mesh_name: str, params: Any, rounds: Any, weights: Any) -> list[tuple]:
    """Return state and metrics after each round, without `jax.jit`."""
    method = METHODS[name]
    mesh = mesh_of(mesh_name, method.placement)
    algorithm = method.algorithm()
    history = []
    with use(mesh):
        state = algorithm.init(place_params(params, mesh))
        for batches, n in zip(rounds, weights, strict=True):
            cohort = place_batches(method.cohort(batches, n), mesh, method.placement)
            state, metrics = algorithm.round(state, cohort)
            history.append((state, metrics))
    return history


def problem(rounds: int, seed: int = 0) -> tuple[Any, list, np.ndarray]:
    """Draw parameters, batches and weights of some rounds."""
    return random_params(seed), random_rounds(rounds, seed=seed), random_weights(rounds, seed=seed)

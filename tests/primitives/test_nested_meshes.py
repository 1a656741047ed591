"""Clients inside islands, on meshes with the axes of both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean, federated_sum

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


# ---- clients inside islands


@fedpax.program(islands=2, clients=4)
def nested(w, x):
    def island(x):
        at_clients = federated_broadcast(w, placement="clients")
        moved = federated_map(lambda w, x: jnp.sin(w * x), at_clients, x)
        return federated_mean(moved)

    means = federated_map(island, x, placement="islands")
    return jnp.sum(federated_sum(means, placement="islands") ** 2)


def nested_plainly(w, x):
    return jnp.sum(jnp.sum(jnp.mean(jnp.sin(w * x), 1), 0) ** 2)


NESTED_MESHES = {
    "both": {"islands": 2, "clients": 4},
    "clients alone": {"clients": 4, "model": 2},
    "islands alone": {"islands": 2, "model": 4},
}


@pytest.mark.each_value
@pytest.mark.parametrize("axes", [None, *NESTED_MESHES])
@pytest.mark.parametrize(
    "types",
    [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)],
    ids=["auto", "explicit", "mixed"],
)
def test_clients_inside_islands(types, axes):
    if axes is None and types != (AUTO, AUTO):
        pytest.skip("no mesh has no types")
    w, x = normal(2), normal(2, 4, 2)
    sizes = NESTED_MESHES.get(axes, {"elsewhere": 1, "nowhere": 1})
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=types,
        devices=jax.devices()[: int(np.prod(list(sizes.values())))],
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P(*[a if a in sizes else None for a in ("islands", "clients")]))
        value = nested(w, placed)
        gradients = jax.jit(jax.grad(nested, argnums=(0, 1)))(w, placed)
    assert_close(value, nested_plainly(w, x))
    assert_close(gradients, jax.grad(nested_plainly, argnums=(0, 1))(w, x))

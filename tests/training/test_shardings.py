import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.clients import client_store
from fedpax.parallel.mesh import make_mesh
from fedpax.training.compiled_round import state_shardings

NUM_ISLANDS = 4


class State(NamedTuple):
    params: Any
    inner: Any  # one per island
    outer: Any
    key: jax.Array


def init(params: Any) -> State:
    def placed(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (NUM_ISLANDS, *x.shape))

    inner = jax.tree.map(placed, optax.adam(1e-3).init(params))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True).init(params)
    return State(params, inner, outer, jax.random.key(0))


def specs(mesh: Mesh, params: Any, params_specs: Any, num_participants: int = NUM_ISLANDS) -> Any:
    shardings = state_shardings(
        jax.eval_shape(init, params),
        params,
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), params_specs),
        mesh,
        placement="islands",
        num_participants=num_participants,
    )
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"w": like(6, 8), "layer": {"w": like(3, 6, 8), "scale": like()}}
SPECS = {
    "w": PartitionSpec("fsdp"),
    "layer": {"w": PartitionSpec(None, None, "fsdp"), "scale": PartitionSpec()},
}


def test_each_kind_of_state_leaf_gets_its_sharding() -> None:
    result = specs(make_mesh(islands=4, fsdp=2), PARAMS, SPECS)
    assert result.params == SPECS
    adam = result.inner[0]
    for moment in (adam.mu, adam.nu):
        assert moment["w"] == PartitionSpec("islands", "fsdp")
        assert moment["layer"]["w"] == PartitionSpec("islands", None, None, "fsdp")
        assert moment["layer"]["scale"] == PartitionSpec("islands")
    assert adam.count == PartitionSpec("islands")  # one count per island
    assert result.outer[0].trace == SPECS
    assert result.key == PartitionSpec()


def test_leaves_are_matched_to_parameters_by_their_longest_path() -> None:
    # Both are called w and have the same shape.
    params = {"w": like(6, 8), "layer": {"w": like(6, 8)}}
    wanted = {"w": PartitionSpec("fsdp"), "layer": {"w": PartitionSpec(None, "fsdp")}}
    result = specs(make_mesh(islands=4, fsdp=2), params, wanted)
    assert result.outer[0].trace == wanted
    assert result.inner[0].mu["layer"]["w"] == PartitionSpec("islands", None, "fsdp")


@pytest.mark.parametrize(
    "mesh", [dict(fsdp=8), dict(islands=8)], ids=["no such axis", "axis that does not divide"]
)
def test_a_placement_that_the_mesh_cannot_shard_is_replicated(mesh: dict[str, int]) -> None:
    replicated = jax.tree.map(lambda _: PartitionSpec(), PARAMS)
    result = specs(make_mesh(**mesh), PARAMS, replicated)
    assert set(jax.tree.leaves(result)) == {PartitionSpec()}


@pytest.mark.parametrize("rows", [2, NUM_ISLANDS])
def test_rows_of_stacked_layers_are_sharded_as_the_layers(rows: int) -> None:
    """A fragment's momentum, and islands' residuals of it; vectors per island stay placed."""
    mesh = make_mesh(islands=4, fsdp=2)
    params = {"stack": like(6, 8, 2), "scale": like(6, 8), "bias": like(6)}
    wanted = {"stack": PartitionSpec(None, "fsdp"), "scale": PartitionSpec(None, "fsdp")}
    given = wanted | {"bias": PartitionSpec()}
    server = {"stack": like(rows, 8, 2), "scale": like(rows, 8), "bias": like(NUM_ISLANDS)}
    placed = {"stack": like(4, rows, 8, 2), "scale": like(4, rows, 8)}
    result = state_shardings(
        {"server": server, "placed": placed, "vectors": {"scale": like(rows, 8)}},
        params,
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), given),
        mesh,
        placement="islands",
        num_participants=NUM_ISLANDS,
    )
    spec = jax.tree.map(lambda sharding: sharding.spec, result)
    assert spec["server"]["stack"] == PartitionSpec(None, "fsdp")
    assert spec["server"]["bias"] == PartitionSpec("islands")
    assert spec["server"]["scale"] == PartitionSpec(None, "fsdp")
    as_rows, as_vectors = PartitionSpec(None, "fsdp"), PartitionSpec("islands", None)
    assert spec["vectors"]["scale"] == (as_vectors if rows == NUM_ISLANDS else as_rows)
    for leaf in spec["placed"].values():
        assert leaf == PartitionSpec("islands", None, "fsdp")


def test_a_single_array_as_parameters() -> None:
    result = specs(make_mesh(islands=4, fsdp=2), like(8), PartitionSpec("fsdp"))
    assert result.params == PartitionSpec("fsdp")
    assert result.inner[0].mu == PartitionSpec("islands", "fsdp")
    assert result.inner[0].count == PartitionSpec("islands")


def test_the_state_can_be_created_on_the_derived_shardings() -> None:
    mesh = make_mesh(islands=4, fsdp=2)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), PARAMS)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(mesh, PARAMS, SPECS))
    state = jax.jit(init, out_shardings=shardings)(params)
    moment = state.inner[0].mu["layer"]["w"]
    assert moment.addressable_shards[0].data.shape == (1, 3, 6, 4)


def test_shardings_of_another_structure_raise() -> None:
    mesh = make_mesh(islands=4, fsdp=2)
    with pytest.raises(ValueError, match="Pass one NamedSharding for each parameter"):
        specs(mesh, PARAMS, SPECS | {"extra": PartitionSpec()})


def test_rows_of_a_client_store_are_sharded_over_the_placement() -> None:
    """The population's size is another than the cohort's; a store as long as it is no exception."""
    mesh = make_mesh(islands=4, fsdp=2)
    for num_clients in (NUM_ISLANDS, 50):
        with jax.set_mesh(mesh):
            make = functools.partial(client_store, num_clients=num_clients, placement="islands")
            store = jax.eval_shape(make, {"kept": PARAMS, "steps": like()})
        result = state_shardings(
            {"clients": store},
            PARAMS,
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS),
            mesh,
            placement="islands",
            num_participants=NUM_ISLANDS,
        )
        spec = jax.tree.map(lambda sharding: sharding.spec, result)["clients"].rows
        assert spec["kept"]["w"] == PartitionSpec("islands", "fsdp")
        assert spec["kept"]["layer"]["w"] == PartitionSpec("islands", None, None, "fsdp")
        assert spec["steps"] == PartitionSpec("islands")

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fedpax.parallel.axes import RULES, constrain, explicit_spec, partition_spec, shardings

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual
CUBE = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))


def make_mesh(types: tuple[AxisType, ...] = (AUTO, AUTO)) -> Mesh:
    return jax.make_mesh((4, 2), ("islands", "fsdp"), axis_types=types)


def draw(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("logical", "expected"),
    [
        (("embed", "mlp"), ("fsdp", "tensor")),
        (("layers", "embed", "heads", "head_dim"), (None, "fsdp", "tensor", None)),
        (("batch", "sequence", None), (("data", "fsdp"), None, None)),
        (("batch", "embed"), (("data", "fsdp"), None)),  # fsdp is taken
        (("embed", "batch"), ("fsdp", "data")),
        (("mlp", "heads"), ("tensor", None)),
        ((), ()),
    ],
)
def test_rules_give_the_spec(logical: tuple[str, ...], expected: tuple[Any, ...]) -> None:
    assert partition_spec(logical, CUBE) == PartitionSpec(*expected)


def test_axes_that_the_mesh_lacks_are_skipped() -> None:
    mesh = AbstractMesh((2,), ("fsdp",))
    assert partition_spec(("batch", "sequence", "mlp"), mesh) == PartitionSpec("fsdp", None, None)
    assert partition_spec(("batch", "mlp"), AbstractMesh((8,), ("clients",))) == PartitionSpec(
        None, None
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 6), (("data", "fsdp"), "tensor")),
        ((4, 6), ("data", "tensor")),  # 2 divides 4, 2 x 4 does not
        ((12, 5), ("data", None)),
        ((3, 0), (None, "tensor")),
    ],
)
def test_axes_that_do_not_divide_are_skipped(shape: Any, expected: Any) -> None:
    assert partition_spec(("batch", "mlp"), CUBE, shape=shape) == PartitionSpec(*expected)


def test_manual_axes_are_skipped() -> None:
    mesh = AbstractMesh((2, 2), ("data", "fsdp"), axis_types=(MANUAL, AUTO))
    assert partition_spec(("batch", "embed"), mesh) == PartitionSpec("fsdp", None)


def test_rules_can_be_replaced() -> None:
    rules = {**RULES, "embed": None, "experts": ("fsdp", "tensor")}
    assert partition_spec(("experts", "embed", "mlp"), CUBE, rules) == PartitionSpec(
        ("fsdp", "tensor"), None, None
    )


def test_an_unknown_name_raises() -> None:
    with pytest.raises(ValueError, match=r"'embedd'.*use one of .*embed, .*rules=\{\*\*RULES"):
        partition_spec(("embedd",), CUBE)
    with pytest.raises(ValueError, match="'embedd'"):
        constrain(jnp.asarray(draw(3)), ("embedd",))


def test_a_wrong_number_of_names_raises() -> None:
    with pytest.raises(ValueError, match=r"names 1 axes.*shape \(3, 4\): pass one name, or None"):
        constrain(jnp.asarray(draw(3, 4)), ("embed",))
    with pytest.raises(ValueError, match=r"names 2 axes.*shape \(3,\)"):
        shardings({"w": ("embed", "mlp")}, {"w": draw(3)}, make_mesh())


def test_shardings_follow_the_tree() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("islands", "fsdp", "tensor"), axis_types=(AUTO,) * 3)
    params = {"up": {"kernel": draw(6, 4), "bias": draw(5)}, "scale": np.float32(1)}
    logical = {"up": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}, "scale": ()}
    result = shardings(logical, params, mesh)
    assert result == {
        "up": {
            "kernel": NamedSharding(mesh, PartitionSpec("fsdp", "tensor")),
            "bias": NamedSharding(mesh, PartitionSpec(None)),  # 2 does not divide 5
        },
        "scale": NamedSharding(mesh, PartitionSpec()),
    }
    placed = jax.device_put(params, result)
    assert placed["up"]["kernel"].addressable_shards[0].data.shape == (3, 2)
    with pytest.raises(ValueError):
        shardings({"up": logical["up"]}, params, mesh)


def test_no_mesh_leaves_a_value_alone() -> None:
    x = jnp.asarray(draw(4, 6))
    assert constrain(x, ("batch", "embed")) is x
    jaxpr = jax.make_jaxpr(lambda x: constrain(x, ("batch", "embed")))(x)
    assert not jaxpr.eqns
    assert explicit_spec(("batch", "embed"), x.shape) is None


def test_a_mesh_without_model_axes_leaves_a_value_alone() -> None:
    x = draw(8, 6)
    with jax.set_mesh(jax.make_mesh((8,), ("clients",), axis_types=(AUTO,))):
        assert not jax.make_jaxpr(lambda x: constrain(x, ("batch", None)))(x).eqns


TYPES = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)]


@pytest.mark.each_value
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("way", ["plain", "vmap", "spmd_axis_name", "shard_map"])
def test_constrain_shards_and_changes_no_value(types: tuple[AxisType, ...], way: str) -> None:
    """sin of x [islands, batch, features] and its gradient, on an islands x fsdp mesh."""
    mesh, x, split = make_mesh(types), draw(4, 6, 8), PartitionSpec("islands")

    def local(x: jax.Array) -> jax.Array:
        return 2 * constrain(jnp.sin(x), ("batch", None))

    def on_each(x: jax.Array) -> jax.Array:
        match way:
            case "plain":
                return 2 * constrain(jnp.sin(x), (None, "batch", None))
            case "vmap":
                return jax.vmap(local)(x)
            case "spmd_axis_name":
                return jax.vmap(local, spmd_axis_name="islands")(x)
        return jax.shard_map(
            lambda x: local(x[0])[None], in_specs=split, out_specs=split, axis_names={"islands"}
        )(x)

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, split))
        result = jax.jit(on_each)(placed)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(on_each(x) ** 2)))(placed)
        text = jax.jit(on_each).lower(placed).as_text()
    np.testing.assert_allclose(result, 2 * np.sin(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, 8 * np.sin(x) * np.cos(x), rtol=1e-4, atol=1e-5)
    assert "sharding_constraint" in text  # so both kinds of constraint are written
    if way != "shard_map":  # there the way out of the map decides
        assert result.sharding.spec[1] == "fsdp"


def test_explicit_axes_without_a_rule_keep_their_sharding() -> None:
    mesh = make_mesh((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        x = jax.device_put(draw(8, 6), NamedSharding(mesh, PartitionSpec("islands")))
        spec = jax.typeof(constrain(x, ("batch", None))).sharding.spec
        assert spec == PartitionSpec(("islands", "fsdp"), None)
        assert jax.typeof(constrain(x, (None, "embed"))).sharding.spec == PartitionSpec(
            "islands", "fsdp"
        )
        # Of 4 rows, an island has one, which fsdp cannot cut.
        x = jax.device_put(draw(4, 6), NamedSharding(mesh, PartitionSpec("islands")))
        assert jax.typeof(constrain(x, ("batch", None))).sharding.spec == PartitionSpec(
            "islands", None
        )


def test_explicit_spec_has_explicit_axes_alone() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(EXPLICIT, AUTO))
    with jax.set_mesh(mesh):
        assert explicit_spec(("batch", "mlp"), (8, 6)) == PartitionSpec("data", None)
        assert explicit_spec(("batch", "mlp"), (6, 6)) == PartitionSpec(None, None)

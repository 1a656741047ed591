import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.parallel.axes import check_divisible

MESH = AbstractMesh((4, 2), ("data", "fsdp"))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("shapes", "spec", "words"),
    [
        (
            {"w": array(3, 5)},
            P(None, "fsdp"),
            r"The mesh axis fsdp=2 does not divide axis 1 of cohort\['w'\], of size 5: make that "
            r"size 4 or 6, change the mesh \(--mesh\.fsdp\), or leave the axis unsharded",
        ),
        (
            {"x": [array(12)]},
            P(("data", "fsdp")),
            r"The mesh axes data=4 x fsdp=2 do not divide axis 0 of cohort\['x'\]\[0\], of size "
            r"12: make that size 8 or 16, change the mesh \(--mesh\.data\)",
        ),
        (array(1, 8), P("data"), r"axis 0 of cohort, of size 1: make that size 4, change"),
        (
            {"steps": array()},
            P("data"),
            r"has 1 entries, but cohort\['steps'\] has shape \(\): pass at most 0",
        ),
    ],
)
def test_an_array_that_does_not_divide_is_named(shapes, spec: P, words: str):
    with pytest.raises(ValueError, match=words):
        check_divisible("cohort", shapes, NamedSharding(MESH, spec))


def test_shardings_can_be_a_prefix_of_the_tree():
    shapes = {"a": {"w": array(4), "b": array(8)}, "b": array(5)}
    fitting = {"a": NamedSharding(MESH, P("data")), "b": NamedSharding(MESH, P(None))}
    check_divisible("params", shapes, fitting)
    with pytest.raises(ValueError, match=r"axis 0 of params\['b'\]"):
        check_divisible("params", shapes, fitting | {"b": NamedSharding(MESH, P("fsdp"))})


def test_arrays_that_divide_pass():
    check_divisible("x", array(8, 3), NamedSharding(MESH, P(("data", "fsdp"), None)))
    check_divisible("x", array(0), NamedSharding(MESH, P("data")))
    check_divisible("x", array(3), jax.sharding.SingleDeviceSharding(jax.devices()[0]))

"""Sizes of a mesh beside the devices of a topology."""

from fedpax.parallel.mesh import MeshConfig
from fedpax.planning import find_topology
from fedpax.planning.ahead_of_time import describe_misfit, fitting_sizes


def test_a_mesh_of_other_size_is_described():
    assert describe_misfit("islands", MeshConfig(islands=2), find_topology("cpu:1")) == (
        "islands uses 2 devices (islands=2), cpu:1 has 1. Use all: --mesh.islands=1. Or plan for "
        "--topology=cpu:2."
    )
    assert describe_misfit("islands", MeshConfig(fsdp=-1), find_topology("cpu:1")) is None


def test_sizes_that_take_all_devices_are_near_the_stated_ones():
    assert fitting_sizes({"islands": 4}, 8) == {"islands": 4, "fsdp": 2}
    assert fitting_sizes({"islands": 4, "fsdp": 2}, 4) == {"islands": 4, "fsdp": 1}
    assert fitting_sizes({"clients": 4}, 8) == {"clients": 8}
    assert fitting_sizes({"islands": 4, "fsdp": -1}, 6) == {"islands": 2, "fsdp": -1}

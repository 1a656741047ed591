import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from fedpax.chips import CHIPS
from fedpax.hlo.collectives import Collective
from fedpax.planning.topology import Route, Topology, axis_routes, find_route, min_seconds

BYTES = 3_000_000


@dataclass(frozen=True)
class TorusDevice:
    id: int
    coords: tuple[int, ...]
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    process_index: int = 0


def torus(chip: str, *shape: int, slices: int = 1) -> Topology:
    """Make a topology whose devices are ordered by coordinates, the last one fastest."""
    per_chip = CHIPS[chip].devices_per_chip
    devices = [
        TorusDevice(1000 * number + i, tuple(map(int, place)), number, i % per_chip)
        for number in range(slices)
        for i, place in enumerate(
            place for place in np.ndindex(*shape) for _ in range(per_chip)
        )
    ]  # fmt: skip
    return Topology(chip, CHIPS[chip], shape, slices, tuple(devices))


def mesh_of(topology: Topology, **sizes: int) -> Mesh:
    devices = np.array(topology.devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def collective(kind: str, mesh: Mesh, *axes: str) -> Collective:
    """Make a collective of BYTES over some axes of a mesh; a permutation is a ring."""
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    last = [mesh.axis_names.index(axis) for axis in axes]
    rest = [i for i in range(positions.ndim) if i not in last]
    size = math.prod(mesh.shape[axis] for axis in axes)
    groups = positions.transpose(rest + last).reshape(-1, size).tolist()
    if kind == "collective-permute":
        groups = [[g[i], g[(i + 1) % size]] for g in groups for i in range(size)]
    groups = tuple(map(tuple, groups))
    return Collective(kind, axes, (), BYTES, 1, False, False, groups, "c")


def timed(kind: str, topology: Topology, mesh: Mesh, *axes: str) -> float | None:
    result = collective(kind, mesh, *axes)
    return min_seconds(result, find_route(result.groups, mesh, topology), mesh, topology)


@pytest.mark.parametrize(
    ("topology", "sizes", "routes"),
    [
        (torus("v5p", 4, 8), {"data": 4, "fsdp": 8}, ["ICI (ring of 4)", "ICI (ring of 8)"]),
        (torus("v5e", 4, 16), {"data": 4, "fsdp": 16}, ["ICI (line of 4)", "ICI (ring of 16)"]),
        (torus("v5p", 4, 4, 4), {"fsdp": 64}, ["ICI (ring of 4 x ring of 4 x ring of 4)"]),
        (torus("v5p", 8), {"data": 2, "fsdp": 4}, ["ICI (line of 2)", "ICI (line of 4)"]),
        (torus("v5p", 2, 2), {"fsdp": 4, "stage": 1}, ["ICI (line of 2 x line of 2)", ""]),
        (
            torus("v5e", 4, 4, slices=2),
            {"islands": 2, "fsdp": 16},
            ["DCN (2 slices)", "ICI (line of 4 x line of 4)"],
        ),
        (
            torus("v5e", 4, 4, slices=2),
            {"islands": 8, "fsdp": 4},
            ["ICI (line of 4) + DCN (2 slices)", "ICI (line of 4)"],
        ),
        (torus("tpu7x", 4, 4), {"fsdp": 16, "tensor": 2}, ["ICI (ring of 4 x ring of 4)",
                                                          "within a chip"]),
    ],
)  # fmt: skip
def test_axes_have_the_networks_of_their_chips(
    topology: Topology, sizes: dict[str, int], routes: list[str]
):
    mesh = mesh_of(topology, **sizes)
    assert [
        " + ".join(map(str, axis_routes(mesh, axis, topology))) for axis in mesh.axis_names
    ] == routes


def test_simulated_devices_communicate_within_the_host():
    topology = Topology("cpu:8", None, (), 1, tuple(jax.devices()))
    mesh = mesh_of(topology, islands=4, fsdp=2)
    assert [axis_routes(mesh, axis, topology) for axis in mesh.axis_names] == [
        [Route("host", 4)],
        [Route("host", 2)],
    ]
    assert timed("all-reduce", topology, mesh, "islands") is None


# The bytes, in units of a shard, on the busiest link in one direction for a collective of n chips
# in a ring or a line: a simulation that sends every shard hop by hop along the shortest path.
def busiest_link(kind: str, n: int, ring: bool) -> float:
    load = np.zeros((n, 2))  # of the link that leaves chip i to the right, to the left
    share = {"all-gather": 1.0, "reduce-scatter": 1 / n, "all-to-all": 1 / n}[kind]
    for source in range(n):
        reached: dict[int, set[int]] = {0: set(), 1: set()}
        for target in range(n):
            right, left = (target - source) % n, (source - target) % n
            if not ring:
                ways = [(0, target - source)] if target > source else [(1, source - target)]
            elif right == left:
                ways = [(0, right), (1, left)]
            else:
                ways = [(0, right)] if right < left else [(1, left)]
            if target == source:
                continue
            for direction, hops in ways:
                for hop in range(hops):
                    at = (source + (hop if direction == 0 else -hop)) % n
                    if kind == "all-to-all":  # a different shard for each target
                        load[at, direction] += share / len(ways)
                    elif at not in reached[direction]:  # forwarded, so it counts once per link
                        reached[direction].add(at)
                        load[at, direction] += share / (2 if ring and right == left else 1)
    return float(load.max())


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize("ring", [True, False])
def test_times_equal_a_simulation_of_the_links(kind: str, n: int, ring: bool):
    # A line is part of a longer dimension, so it does not close to a ring.
    topology = torus("v5p", n if ring else 2 * n)
    mesh = mesh_of(topology, fsdp=n) if ring else mesh_of(topology, data=2, fsdp=n)
    loads = BYTES * busiest_link(kind, n, ring) / topology.chip.link_bandwidth
    # On a ring, halves of a shard arrive from both sides; whole hops differ by at most 1.
    assert timed(kind, topology, mesh, "fsdp") == pytest.approx(loads, rel=1 / (n - 1))
    assert timed(kind, topology, mesh, "fsdp") <= loads * (1 + 1e-9)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    topology = torus("v5e", 4, 4)
    mesh = mesh_of(topology, data=4, fsdp=4)
    whole = timed("all-reduce", topology, mesh, "fsdp")
    scattered = timed("reduce-scatter", topology, mesh, "fsdp")
    gathered = timed("all-gather", topology, mesh, "fsdp") / 4  # of a quarter of the bytes
    assert whole == pytest.approx(scattered + gathered)
    # Over both dimensions there are twice the links.
    both = timed("all-reduce", topology, mesh, "data", "fsdp")
    assert both == pytest.approx(whole * (15 / 16) / (3 / 4) / 2)


def test_a_permutation_can_use_both_directions():
    topology = torus("v5p", 8)
    mesh = mesh_of(topology, stage=8)
    expected = BYTES / (2 * topology.chip.link_bandwidth)
    assert timed("collective-permute", topology, mesh, "stage") == pytest.approx(expected)


def test_between_slices_the_chips_of_a_slice_share_the_work():
    topology = torus("v5e", 4, 4, slices=2)
    mesh = mesh_of(topology, islands=2, fsdp=16)
    chip = topology.chip
    alone = timed("all-reduce", topology, mesh, "islands")
    assert alone == pytest.approx(BYTES / chip.dcn_bandwidth)  # 2 (2 - 1) / 2
    together = timed("all-reduce", topology, mesh, "islands", "fsdp")
    assert together == pytest.approx(alone / 16)
    assert timed("all-gather", topology, mesh, "islands") == pytest.approx(alone)
    assert timed("collective-permute", topology, mesh, "islands") == pytest.approx(alone)


def test_two_devices_of_a_chip_share_its_links():
    topology = torus("tpu7x", 4, 4)
    mesh = mesh_of(topology, fsdp=16, tensor=2)
    link = topology.chip.link_bandwidth
    assert timed("all-gather", topology, mesh, "tensor") == 0.0
    # Each of two groups has half of the four directions of the two rings.
    assert timed("all-gather", topology, mesh, "fsdp") == pytest.approx(15 * BYTES / (2 * link))
    # One group of all devices: a chip sends the shards of both devices over all of its links.
    both = timed("all-gather", topology, mesh, "fsdp", "tensor")
    assert both == pytest.approx(15 * 2 * BYTES / (4 * link))

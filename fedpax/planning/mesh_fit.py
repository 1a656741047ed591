"""The sizes of a mesh, compared with the devices of a topology."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedpax.parallel.mesh import MeshConfig
from fedpax.planning.topology import Topology


def describe_misfit(name: str, mesh: MeshConfig, topology: Topology) -> str | None:
    """Describe a mesh that needs another number of devices than a topology has.

    Args:
        name: name of the experiment.
        mesh: the sizes of the mesh's axes. If all are 1, one device of any number is enough.
        topology: the devices.

    Returns:
        The numbers, sizes that take all devices, and a topology of the mesh's size. None if the
        mesh has the topology's number of devices.

    Example:
        >>> from fedpax.planning.topology import find_topology
        >>> print(describe_misfit("islands", MeshConfig(islands=2), find_topology("cpu:1")))
        islands uses 2 devices (islands=2), cpu:1 has 1. Use all: --mesh.islands=1. Or plan for
        --topology=cpu:2.
        >>> print(describe_misfit("islands", MeshConfig(fsdp=-1), find_topology("cpu:1")))
        None
    """
    sizes = {axis: size for axis, size in mesh.stated.items() if size != 1}
    total, needed = len(topology.devices), math.prod(size for size in sizes.values() if size != -1)
    takes_rest = -1 in sizes.values()
    if not sizes or total == needed or (takes_rest and total % needed == 0):
        return None
    count = f"a multiple of {needed:,} devices" if takes_rest else f"{needed:,} devices"
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    fitting = fitting_sizes(sizes, total)
    change = (
        f"Change {' and '.join(f'--mesh.{axis}' for axis in sizes)}, or"
        if fitting is None
        else f"Use all: {' '.join(f'--mesh.{axis}={size}' for axis, size in fitting.items())}. Or"
    )
    nearest = max(1, total // needed) * needed if takes_rest else needed
    kind, _, _ = topology.name.partition(":")
    other = f"--topology={kind}:{nearest}" if topology.shape == () else f"{nearest:,} devices"
    return (
        f"{name} uses {count} ({axes}), {topology.name}"
        f"{f' in {topology.slices} slices' if topology.slices > 1 else ''} has {total:,}. "
        f"{change} plan for {other}."
    )


def fitting_sizes(sizes: Mapping[str, int], total: int) -> dict[str, int] | None:
    """Return sizes near the given ones that take all devices.

    Additional devices go to the axis `clients` if the mesh has it, otherwise to `fsdp`. Other sizes
    only become smaller, to divisors of the given ones, so that they still divide what they divided.

    Args:
        sizes: the sizes other than 1, by axis; -1: all remaining devices.
        total: number of devices.

    Returns:
        The sizes, or None if none are near.

    Example:
        >>> fitting_sizes({"islands": 4}, 8)
        {'islands': 4, 'fsdp': 2}
        >>> fitting_sizes({"islands": 4, "fsdp": 2}, 4), fitting_sizes({"clients": 4}, 8)
        ({'islands': 4, 'fsdp': 1}, {'clients': 8})
        >>> fitting_sizes({"islands": 4, "fsdp": -1}, 6)
        {'islands': 2, 'fsdp': -1}
    """
    needed = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values() and total % needed == 0:
        axis = "clients" if "clients" in sizes else "fsdp"
        return {**sizes, axis: sizes.get(axis, 1) * (total // needed)}
    for axis in reversed(list(sizes)):  # the axes of placements are the first ones
        others = 1 if sizes[axis] == -1 else needed // sizes[axis]
        if sizes[axis] == -1 or total % others:
            continue
        smaller = math.gcd(sizes[axis], total // others)
        if -1 in sizes.values() or smaller * others == total:
            return {**sizes, axis: smaller}
    return None

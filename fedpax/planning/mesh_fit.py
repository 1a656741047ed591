"""The sizes of a mesh, compared with the devices of a topology."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedpax.parallel.mesh import MeshConfig
from fedpax.planning.topology import Topology


def describe_misfit(name: str, mesh: MeshConfig, topology: Topology) -> str | None:
    """Describe a mesh that needs another number of devices than the topology's; else None."""
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
    device, _, _ = topology.name.partition(":")
    other = f"--topology={device}:{nearest}" if topology.shape == () else f"{nearest:,} devices"
    return (
        f"{name} uses {count} ({axes}), {topology.name}"
        f"{f' in {topology.slices} slices' if topology.slices > 1 else ''} has {total:,}. "
        f"{change} plan for {other}."
    )


def fitting_sizes(sizes: Mapping[str, int], total: int) -> dict[str, int] | None:
    """Return sizes near the given ones that take all devices; None if none are near."""
    # Additional devices go to the axis `clients` if the mesh has it, otherwise to `fsdp`. Other
    # sizes only become smaller, to divisors of the given ones, so that they still divide the same
    # array dimensions.
    needed = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values() and total % needed == 0:
        axis = "clients" if "clients" in sizes else "fsdp"
        return {**sizes, axis: sizes.get(axis, 1) * (total // needed)}
    for axis in reversed(list(sizes)):  # the axes of placements are the first ones
        other_sizes = 1 if sizes[axis] == -1 else needed // sizes[axis]
        if sizes[axis] == -1 or total % other_sizes:
            continue
        smaller = math.gcd(sizes[axis], total // other_sizes)
        if -1 in sizes.values() or smaller * other_sizes == total:
            return {**sizes, axis: smaller}
    return None

"""The sizes of a mesh that are not stated: they follow from the experiment and the devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fedpax.parallel.mesh import SINGLE_DEVICE, MeshConfig, MeshSizeError

PLACEMENTS = ("islands", "clients")
# The axes that shard a step, in the order in which they take devices.
_SHARDING = ("fsdp", "tensor", "sequence")


class ShardedSize(NamedTuple):
    """A size of an experiment that axes of the mesh divide."""

    field: str  # such as "data.batch_size"
    size: int
    axes: tuple[str, ...]  # their product divides it


def follow(
    mesh: MeshConfig, sharded: Sequence[ShardedSize], num_devices: int, slices: int = 1
) -> MeshConfig:
    """Set the sizes of a mesh that are not stated, so that it takes all devices."""
    # One axis after another takes as many of the remaining devices as divide its sizes. With one
    # island on several slices, `data` runs between the slices. A mesh of one device stays, and so
    # does one whose stated sizes do not divide the devices: `make` raises.
    stated = mesh.stated
    fixed = math.prod(size for size in stated.values() if size != -1)
    if not sharded or mesh == SINGLE_DEVICE or num_devices % fixed:
        return mesh
    sizes, left = {**stated}, num_devices // fixed
    for axis in _order(mesh, sharded):
        limits = [
            item.size // math.prod(max(sizes.get(other, 1), 1) for other in item.axes)
            for item in sharded
            if axis in item.axes
        ]
        if axis == "data" and axis not in stated:
            between = slices > 1 and all(sizes.get(name, 1) == 1 for name in PLACEMENTS)
            limits.append(slices if between else 1)
        # An axis that divides no size, such as the stages of a pipeline, takes all that are left.
        sizes[axis] = math.gcd(left, *limits)
        left //= sizes[axis]
    if left > 1:
        raise MeshSizeError(_misfit(mesh, sizes, sharded, num_devices, left))
    return MeshConfig(**{name: size for name, size in sizes.items() if size > 1 or name in stated})


def simulated_count(mesh: MeshConfig, sharded: Sequence[ShardedSize], cores: int) -> int:
    """Return the number of devices for a CPU to simulate."""
    # One device for each island, unless the mesh states their axis. A mesh that takes all devices
    # (-1), and one of clients without a stated axis, get one device per core, as far as clients can
    # share them: clients on one device occupy one core.
    sizes = mesh.stated
    for item in sharded:
        if item.axes == ("islands",):
            sizes.setdefault("islands", item.size)
        elif item.axes == ("clients",):
            sizes.setdefault("clients", -1)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values():
        return fixed
    whole = dataclasses.replace(mesh, **sizes)
    for count in range(cores - cores % fixed, fixed, -fixed):
        try:
            follow(whole, sharded, count)
        except MeshSizeError:
            continue
        return count
    return fixed


def _order(mesh: MeshConfig, sharded: Sequence[ShardedSize]) -> Iterator[str]:
    divided = {axis for item in sharded for axis in item.axes} - {*mesh.stated}
    yield from (axis for axis in PLACEMENTS if axis in divided)
    yield from (axis for axis, size in mesh.stated.items() if size == -1)
    yield from (axis for axis in ("data", *_SHARDING) if axis in divided)


def _misfit(
    mesh: MeshConfig,
    sizes: dict[str, int],
    sharded: Sequence[ShardedSize],
    num_devices: int,
    left: int,
) -> str:
    """Describe devices that the axes cannot share, and the fields that let them."""
    used = {axis: size for axis, size in sizes.items() if size > 1}
    limits = ", ".join(f"{item.field}={item.size}" for item in sharded)
    remedies = []
    for item in sharded:
        # The first axis of a size can take all that are left, if it is not stated.
        axis = next((axis for axis in item.axes if axis in (*PLACEMENTS, "fsdp")), None)
        if axis is None or mesh.stated.get(axis, -1) != -1:
            continue
        share = math.prod(sizes.get(other, 1) for other in item.axes) * left
        if axis in PLACEMENTS:
            if item.size == 1:
                continue
            share = num_devices // math.prod(n for n in mesh.stated.values() if n != -1)
        remedies.append(f"--{item.field}={math.lcm(item.size, share) if axis == 'fsdp' else share}")
    remedy = f"Set {' or '.join(remedies)}." if remedies else "Leave out --mesh.fsdp."
    shown = ", ".join(f"{axis}={size}" for axis, size in used.items()) or "one device"
    return (
        f"{num_devices} devices cannot share {limits}: the largest mesh ({shown}) has "
        f"{num_devices // left}. {remedy}"
    )

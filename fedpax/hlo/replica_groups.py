"""The groups of devices of a collective, as positions in a mesh, read from its line of HLO."""

from __future__ import annotations

import itertools
import math
import re

import jax
import numpy as np

from fedpax.errors import ArgumentError
from fedpax.hlo import parsing
from fedpax.hlo.shapes import integers

Groups = tuple[tuple[int, ...], ...]


def program_positions(module: parsing.Module, mesh: jax.sharding.Mesh) -> list[list[int]]:
    """Return the positions in the mesh of the devices 0, 1, ... of each copy of a program."""
    # With several TPU slices, the text is the program of one slice. Its devices are numbered in
    # mesh order, and every slice runs a copy of the program.
    if module.num_devices in (1, mesh.size):
        return [list(range(mesh.size))]
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(getattr(device, "slice_index", 0), []).append(position)
    if any(len(members) != module.num_devices for members in slices.values()):
        raise ArgumentError(
            f"text is a program for {module.num_devices} devices, but the mesh {dict(mesh.shape)} "
            f"has {mesh.size}. Pass the mesh that the program was compiled for."
        )
    return list(slices.values())


def groups(
    instruction: parsing.Instruction, mesh: jax.sharding.Mesh, copies: list[list[int]]
) -> Groups:
    """Return the groups of a collective of more than one device, as positions in the mesh."""
    # For a collective-permute, the groups are the pairs (source, target).
    return tuple(
        group for group in _groups(instruction.attributes, mesh, copies) if len(set(group)) > 1
    )


def _groups(text: str, mesh: jax.sharding.Mesh, copies: list[list[int]]) -> Groups:
    target = re.search(r'_xla_megascale_target=(\{.*?\}\}|"[^"]*")', text)
    if target:
        return _slice_groups(target.group(1), mesh)
    pairs = re.search(r"source_target_pairs=\"?\{((?:\{[\d,]+\},?)*)\}", text)
    if pairs:
        groups = _lists(pairs.group(1))
    else:
        groups = _replica_groups(text) or [list(range(len(copies[0])))]
    return tuple(tuple(copy[member] for member in group) for copy in copies for group in groups)


def _replica_groups(text: str) -> list[list[int]]:
    """Read replica groups in any of XLA's formats; an empty list means all devices."""
    named = re.search(  # mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S*)\))? \{([^}]*)\}", text
    )
    if named:
        return _named_groups(*named.groups())
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    if iota:  # [4,2]<=[2,4]T(1,0)
        return _iota(iota.group(2)).reshape(integers(iota.group(1))).tolist()
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text)  # {{0,1},{2,3}}
    return _lists(listed.group(1)) if listed else []


def _named_groups(axes: str, device_ids: str | None, over: str) -> list[list[int]]:
    """Read groups over named axes; 'b':(2)4 is a sub-axis of size 4 of b, after one of size 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    if not device_ids:
        devices = np.arange(math.prod(sizes.values()))
    elif device_ids.startswith("["):
        devices = _iota(device_ids)
    else:
        devices = np.array(integers(device_ids))
    # Split every axis at the bounds of the sub-axes that the collective runs over.
    sub_axes = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    ]
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        mine = [(before, before * part) for other, before, part in sub_axes if other == name]
        cuts = sorted({1, size, *(cut for bounds in mine for cut in bounds)})
        for before, after in itertools.pairwise(cuts):
            if any(start <= before and after <= end for start, end in mine):
                grouped.append(len(shape))
            shape.append(after // before)
    members = math.prod(shape[dimension] for dimension in grouped)
    kept = [dimension for dimension in range(len(shape)) if dimension not in grouped]
    return devices.reshape(shape).transpose(kept + grouped).reshape(-1, members).tolist()


def _slice_groups(target: str, mesh: jax.sharding.Mesh) -> Groups:
    """Read the groups of a transfer between TPU slices, which refers to devices by their ids."""
    position = {device.id: index for index, device in enumerate(mesh.devices.flat)}
    product = re.fullmatch(r'"\{([\d,]+)\}x\{(\d+):(\d+)\}"', target)
    if not product:  # {{100000,200000},...} or {{100000->200000},...}
        groups = _lists(target[1:-1].replace("->", ","))
        return tuple(tuple(position[member] for member in group) for group in groups)
    # "{1,2}x{0:3}": device i of slice 1 with device i of slice 2, for i from 0 to 3.
    slices: dict[int, list[int]] = {}
    for device in sorted(mesh.devices.flat, key=lambda device: device.id):
        slices.setdefault(device.slice_index + 1, []).append(position[device.id])
    chosen = [slices[index] for index in integers(product.group(1))]
    first, last = int(product.group(2)), int(product.group(3))
    return tuple(zip(*(members[first : last + 1] for members in chosen), strict=True))


def _iota(text: str) -> np.ndarray:
    """Read `[2,4]T(1,0)`: the integers 0, 1, ... in this shape, transposed."""
    shape, _, order = text.partition("T")
    devices = np.arange(math.prod(integers(shape))).reshape(integers(shape))
    return devices.transpose(integers(order)) if order else devices


def _lists(text: str) -> list[list[int]]:
    return [integers(part) for part in re.findall(r"\{([\d,]*)\}", text)]

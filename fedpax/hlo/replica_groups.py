"""Which devices of a mesh take part together in a collective, read from its line of HLO."""

from __future__ import annotations

import itertools
import math
import re

import jax
import numpy as np

from fedpax.hlo import parsing

Groups = tuple[tuple[int, ...], ...]


def positions(module: parsing.Module, mesh: jax.sharding.Mesh) -> list[list[int]]:
    """Positions in the mesh of the devices that a program numbers 0, 1, ...

    Over several TPU slices the text is the program of one slice, its devices numbered in mesh
    order, and every slice runs a copy of it.

    Args:
      module: the program.
      mesh: the mesh that it was compiled for.

    Returns:
      For each copy of the program, the positions in `mesh.devices.flat` of its devices.

    Raises:
      ValueError: the program is one for another number of devices.
    """
    if module.partitions in (1, mesh.size):
        return [list(range(mesh.size))]
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(getattr(device, "slice_index", 0), []).append(position)
    if any(len(members) != module.partitions for members in slices.values()):
        raise ValueError(
            f"text is a program for {module.partitions} devices, but the mesh {dict(mesh.shape)} "
            f"has {mesh.size}. Pass the mesh that the program was compiled for."
        )
    return list(slices.values())


def groups(
    instruction: parsing.Instruction, mesh: jax.sharding.Mesh, copies: list[list[int]]
) -> Groups:
    """The devices that a collective joins, as positions in `mesh.devices.flat`.

    Args:
      instruction: the collective.
      mesh: the mesh that the program was compiled for.
      copies: what `positions` returns for the program.

    Returns:
      The groups of more than one device; of a permutation, the pairs (source, target).
    """
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
    """Replica groups in each of XLA's spellings; none means all devices."""
    named = re.search(  # mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S*)\))? \{([^}]*)\}", text
    )
    if named:
        return _named_groups(*named.groups())
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    if iota:  # [4,2]<=[2,4]T(1,0)
        return _iota(iota.group(2)).reshape(_integers(iota.group(1))).tolist()
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text)  # {{0,1},{2,3}}
    return _lists(listed.group(1)) if listed else []


def _named_groups(axes: str, device_ids: str | None, over: str) -> list[list[int]]:
    """Groups over named axes; 'b':(2)4 is the part of size 4 of axis b, behind one of size 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    if not device_ids:
        devices = np.arange(math.prod(sizes.values()))
    elif device_ids.startswith("["):
        devices = _iota(device_ids)
    else:
        devices = np.array(_integers(device_ids))
    # Cut every axis where one of the parts that the collective runs over begins or ends.
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    ]
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        mine = [(before, before * part) for other, before, part in parts if other == name]
        cuts = sorted({1, size, *(cut for ends in mine for cut in ends)})
        for before, after in itertools.pairwise(cuts):
            if any(start <= before and after <= end for start, end in mine):
                grouped.append(len(shape))
            shape.append(after // before)
    members = math.prod(shape[dimension] for dimension in grouped)
    others = [dimension for dimension in range(len(shape)) if dimension not in grouped]
    return devices.reshape(shape).transpose(others + grouped).reshape(-1, members).tolist()


def _slice_groups(target: str, mesh: jax.sharding.Mesh) -> Groups:
    """Groups of a transfer between TPU slices, which names devices by their ids."""
    position = {device.id: index for index, device in enumerate(mesh.devices.flat)}
    product = re.fullmatch(r'"\{([\d,]+)\}x\{(\d+):(\d+)\}"', target)
    if not product:  # {{100000,200000},...} or {{100000->200000},...}
        groups = _lists(target[1:-1].replace("->", ","))
        return tuple(tuple(position[member] for member in group) for group in groups)
    # "{1,2}x{0:3}": each of a slice's devices 0 to 3 with its like in slices 1 and 2.
    slices: dict[int, list[int]] = {}
    for device in sorted(mesh.devices.flat, key=lambda device: device.id):
        slices.setdefault(device.slice_index + 1, []).append(position[device.id])
    chosen = [slices[index] for index in _integers(product.group(1))]
    first, last = int(product.group(2)), int(product.group(3))
    return tuple(zip(*(members[first : last + 1] for members in chosen), strict=True))


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: the integers from 0 in that shape, transposed."""
    shape, _, order = text.partition("T")
    devices = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return devices.transpose(_integers(order)) if order else devices


def _lists(text: str) -> list[list[int]]:
    return [_integers(part) for part in re.findall(r"\{([\d,]*)\}", text)]


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]

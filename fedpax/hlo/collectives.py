"""The collectives of a compiled program: their kinds, mesh axes, bytes and executions."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpax.errors import ArgumentError
from fedpax.hlo import parsing, trip_counts
from fedpax.hlo.parsing import integers, shape_bytes
from fedpax.primitives.client_rows import MOVED_ROWS

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Names of transfers between TPU slices in the text -> kinds of collectives.
_TRANSFERS = {"ONE_TO_ONE": "collective-permute"} | {
    kind.replace("-", "_").upper(): kind for kind in _KINDS
}


class Collective(NamedTuple):
    """One collective of a compiled program."""

    kind: str  # "all-reduce", "all-gather", "reduce-scatter", "collective-permute",
    axes: tuple[str, ...]  # the mesh axes along which the devices of a group differ
    shapes: tuple[str, ...]  # the operands on one device, as HLO writes them, such as "f32[64,512]"
    bytes: int  # size of these operands; not the bytes on the network, see `operand_bytes_along`
    # Executions in one execution of the program; None if it is known only at run time (a while loop
    # that waits for a value, a branch of a conditional).
    executions: int | None
    in_loop: bool
    between_slices: bool
    # The groups of devices, as positions in `mesh.devices.flat`; for a collective-permute, the
    # pairs (source, target).
    groups: tuple[tuple[int, ...], ...]
    name: str
    moves_client_rows: bool = False  # whether it moves rows of a client store, if any have to move

    def __str__(self) -> str:
        times = "an unknown number of times" if self.executions is None else f"{self.executions}x"
        where = ", in a loop" if self.in_loop else ""
        network = ", between slices" if self.between_slices else ""
        return (
            f"{self.kind} over {', '.join(self.axes)}: {self.bytes:,} bytes, "
            f"{times}{where}{network} ({', '.join(self.shapes)})"
        )


def collectives(text: str, mesh: jax.sharding.Mesh) -> list[Collective]:
    """List the collectives of a compiled program, for CPU, GPU or TPU, in the order of its text."""
    # An asynchronous collective (a start and a done, or a chain of fusions on a TPU) is listed
    # once. Groups of one device, and permutations that move nothing, are not listed.
    module = parsing.parse(text)
    copies = program_positions(module, mesh)
    executions = trip_counts.executions(module)
    listed = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            kind = _kind(computation, instruction)
            if kind is None or computation.name not in executions:
                continue
            groups = groups_of(instruction, mesh, copies)
            if not groups:
                continue
            shapes = _operand_shapes(computation, instruction)
            listed.append(
                Collective(
                    kind=kind,
                    axes=tuple(axis for axis in mesh.axis_names if _spans(groups, axis, mesh)),
                    shapes=shapes,
                    bytes=sum(math.ceil(shape_bytes(shape)) for shape in shapes),
                    executions=executions[computation.name].times,
                    in_loop=executions[computation.name].in_loop,
                    between_slices="_xla_megascale_target" in instruction.attributes,
                    groups=groups,
                    name=instruction.name,
                    moves_client_rows=f'{MOVED_ROWS}="true"' in instruction.attributes,
                )
            )
    return listed


def operand_bytes_along(text: str, mesh: jax.sharding.Mesh, axis: str) -> int:
    """Sum the operand bytes that one device passes to collectives along a mesh axis."""
    # Of the device with the largest sum. A collective over `axis` and another axis counts in full.
    # Rows of a client store that move in a loop are left out. A CPU sends bfloat16 as float32, and
    # a TPU pads small operands between slices.
    totals = np.zeros(mesh.size, np.int64)
    for collective in collectives(text, mesh):
        if axis not in collective.axes or collective.moves_client_rows:
            continue
        if collective.executions is None:
            raise ArgumentError(
                f"cannot count the bytes over {axis}: {collective.name} is inside a while loop of "
                "unknown length or a branch of a conditional. Use lax.scan or lax.fori_loop with "
                "a fixed number of steps, or sum over collectives(text, mesh) yourself."
            )
        callers: set[int] = set()
        for group in collective.groups:
            if _spans([group], axis, mesh):
                permute = collective.kind == "collective-permute"
                callers.update(group[:1] if permute else group)
        totals[list(callers)] += collective.bytes * collective.executions
    return int(totals.max())


def _kind(computation: parsing.Computation, instruction: parsing.Instruction) -> str | None:
    """Return the kind of a collective; None for any other instruction."""
    kind = instruction.opcode.removesuffix("-start")
    if instruction.opcode == "send":
        transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        if transfer:
            return _TRANSFERS.get(transfer.group(1), transfer.group(1))
        return "collective-permute" if "source_target_pairs=" in instruction.attributes else None
    if kind not in _KINDS:
        return None
    # A TPU splits an asynchronous collective over several fusions; the first one counts.
    chain = re.search(
        r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"', instruction.attributes
    )
    if chain and chain.group(1) != "-1":
        return None
    # A TPU's reduce-scatter is a fusion of this name: an all-reduce and a slice of its result.
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind


def _spans(groups: Sequence[Sequence[int]], axis: str, mesh: jax.sharding.Mesh) -> bool:
    """Return whether the devices of any group differ in their coordinate along the axis."""
    shape, index = mesh.devices.shape, mesh.axis_names.index(axis)
    stride = math.prod(shape[index + 1 :])
    return any(len({p // stride % shape[index] for p in group}) > 1 for group in groups)


def _operand_shapes(
    computation: parsing.Computation, instruction: parsing.Instruction
) -> tuple[str, ...]:
    """Return the operands as HLO writes them, without layouts and tokens."""
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    arrays = [array for shape in shapes for array in re.findall(r"\w+\[[\d,<=]*\]", shape)]
    return tuple(array for array in arrays if not array.startswith("token"))


# ---- the groups of devices of a collective, as positions in a mesh, read from its line of HLO

Groups = tuple[tuple[int, ...], ...]


def program_positions(module: parsing.Module, mesh: jax.sharding.Mesh) -> list[list[int]]:
    """Return the positions in the mesh of the devices 0, 1, ... of each copy of a program."""
    # With several TPU slices, every slice runs a copy of the program, whose devices are numbered in
    # mesh order.
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


def groups_of(
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

"""The collectives of a compiled program: their kinds, mesh axes, bytes and executions.

They are read from the compiled text, not from the jaxpr, because the compiler adds collectives
(for automatic axes), merges them (all leaves of a tree in one all-reduce), splits them (over
several slices) and moves them out of loops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpax.errors import ArgumentError
from fedpax.hlo import parsing, replica_groups, trip_counts
from fedpax.hlo.shapes import shape_bytes
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
    # Number of executions in one execution of the program; None if it is known only at run time (a
    # while loop that waits for a value, a branch of a conditional).
    executions: int | None
    in_loop: bool  # whether the collective is inside a loop
    between_slices: bool  # whether it uses the network between TPU slices
    # The groups of devices, as positions in `mesh.devices.flat`; for a collective-permute, the
    # pairs (source, target).
    groups: tuple[tuple[int, ...], ...]
    name: str  # name of the instruction in the text
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
    # once. Collectives that move nothing are not listed: groups of one device, and permutations
    # that send every shard to its own device.
    module = parsing.parse(text)
    copies = replica_groups.program_positions(module, mesh)
    executions = trip_counts.executions(module)
    listed = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            kind = _kind(computation, instruction)
            if kind is None or computation.name not in executions:
                continue
            groups = replica_groups.groups(instruction, mesh, copies)
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
    # The operand bytes of each collective whose groups span `axis`, times its executions, on the
    # device with the largest sum.
    # - These are not the bytes on the network, which depend on the algorithm. On a ring of n
    #   devices, each device sends 2 (n - 1) / n times the operand in an all-reduce, and n - 1 times
    #   in an all-gather.
    # - A collective over `axis` and another axis counts in full.
    # - Rows of a client store that move in the loop over a cohort are left out: their number
    #   depends on the cohort.
    # - Dtypes are as in the compiled program: a CPU sends bfloat16 as float32, and a TPU pads
    #   small operands that it sends between slices.
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

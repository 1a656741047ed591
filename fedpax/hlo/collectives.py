"""The collectives of a compiled program: which there are, over which mesh axes, how many bytes.

A count that holds for the program as it really runs is read from the compiled text, not from the
jaxpr: the compiler adds collectives (automatic axes), merges them (all leaves of a tree in one
all-reduce), splits them (over several slices) and moves them out of loops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpax.hlo import parsing, replica_groups, trip_counts

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# What TPU slices send to each other goes by these names in the text.
_TRANSFERS = {"ONE_TO_ONE": "collective-permute"} | {
    kind.replace("-", "_").upper(): kind for kind in _KINDS
}


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      kind: what it does: "all-reduce", "all-gather", "reduce-scatter", "collective-permute" ...
      axes: the mesh axes that it runs over: along which the devices of a group differ.
      shapes: its operands on one device, as HLO writes them, such as "f32[64,512]".
      bytes: size of these operands.
      executions: how often it runs in one execution of the program; None if that is known only
        at run time (a while loop that waits for a value, a branch of a conditional).
      in_loop: whether it stands inside a loop.
      between_slices: whether it goes over the network between TPU slices.
      groups: the devices that take part together, as positions in `mesh.devices.flat`; of a
        collective-permute, the pairs (source, target).
      name: the instruction's name in the text.
    """

    kind: str
    axes: tuple[str, ...]
    shapes: tuple[str, ...]
    bytes: int
    executions: int | None
    in_loop: bool
    between_slices: bool
    groups: tuple[tuple[int, ...], ...]
    name: str

    def __str__(self) -> str:
        times = "an unknown number of times" if self.executions is None else f"{self.executions}x"
        place = ", in a loop" if self.in_loop else ""
        network = ", between slices" if self.between_slices else ""
        return (
            f"{self.kind} over {', '.join(self.axes)}: {self.bytes:,} bytes, "
            f"{times}{place}{network} ({', '.join(self.shapes)})"
        )


def collectives(text: str, mesh: jax.sharding.Mesh) -> list[Collective]:
    """Lists the collectives of a compiled program.

    An asynchronous collective (a start and a done, or TPU's chain of fusions) counts once.
    Those that move nothing are left out: groups of one device, permutations in place.

    Args:
      text: the compiled text, `jax.jit(f).lower(...).compile().as_text()`, of CPU, GPU or TPU.
      mesh: the mesh that the program was compiled for.

    Returns:
      The collectives, in the order of the text.

    Raises:
      ValueError: the text is not a compiled program, or of another number of devices.

    Example:
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> rows = NamedSharding(mesh, PartitionSpec("fsdp"))
      >>> x = jax.ShapeDtypeStruct((jax.device_count(), 4), "float32", sharding=rows)
      >>> text = jax.jit(lambda x: x.sum(0)).lower(x).compile().as_text()
      >>> all(collective.axes == ("fsdp",) for collective in collectives(text, mesh))
      True
    """
    module = parsing.read(text)
    copies = replica_groups.positions(module, mesh)
    runs = trip_counts.executions(module)
    found = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            kind = _kind(computation, instruction)
            if kind is None or computation.name not in runs:
                continue
            groups = replica_groups.groups(instruction, mesh, copies)
            if not groups:
                continue
            shapes = _operand_shapes(computation, instruction)
            found.append(
                Collective(
                    kind=kind,
                    axes=tuple(axis for axis in mesh.axis_names if _along(groups, axis, mesh)),
                    shapes=shapes,
                    bytes=sum(map(_bytes, shapes)),
                    executions=runs[computation.name].times,
                    in_loop=runs[computation.name].in_loop,
                    between_slices="_xla_megascale_target" in instruction.attributes,
                    groups=groups,
                    name=instruction.name,
                )
            )
    return found


def placement_bytes(text: str, mesh: jax.sharding.Mesh, axis: str) -> int:
    """Bytes that one device hands over to collectives along a mesh axis, in one execution.

    The sum, over the collectives whose groups spread along `axis`, of the size of their operands
    on one device times how often they run; of the device with the most. What the network carries
    for it depends on the algorithm and is not counted: a ring all-reduce over n devices sends
    2 (n - 1) / n times the operand, an all-gather n - 1 times. A collective over `axis` and
    another axis counts in full. Types are those of the compiled program: a CPU sends bfloat16 as
    float32, and a TPU pads small operands that it sends between slices.

    Args:
      text: the compiled text, `jax.jit(f).lower(...).compile().as_text()`, of CPU, GPU or TPU.
      mesh: the mesh that the program was compiled for.
      axis: name of the mesh axis, such as a placement's.

    Returns:
      Bytes; 0 if nothing is sent along the axis, or if the mesh does not have it.

    Raises:
      ValueError: a collective along the axis runs an unknown number of times.

    Example:
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> mesh = jax.make_mesh((1,), ("islands",), devices=jax.devices()[:1])
      >>> text = jax.jit(lambda x: x.sum(0)).lower(jax.numpy.ones((8, 4))).compile().as_text()
      >>> placement_bytes(text, mesh, "islands")
      0
    """
    sent = np.zeros(mesh.size, np.int64)
    for collective in collectives(text, mesh):
        if axis not in collective.axes:
            continue
        if collective.executions is None:
            raise ValueError(
                f"cannot count the bytes over {axis}: {collective.name} is inside a while loop of "
                "unknown length or a branch of a conditional. Use lax.scan or lax.fori_loop with "
                "a fixed number of steps, or add up collectives(text, mesh) yourself."
            )
        senders: set[int] = set()
        for group in collective.groups:
            if _along([group], axis, mesh):
                permute = collective.kind == "collective-permute"
                senders.update(group[:1] if permute else group)
        sent[list(senders)] += collective.bytes * collective.executions
    return int(sent.max())


def _kind(computation: parsing.Computation, instruction: parsing.Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    if instruction.opcode == "send":
        transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        if transfer:
            return _TRANSFERS.get(transfer.group(1), transfer.group(1))
        return "collective-permute" if "source_target_pairs=" in instruction.attributes else None
    if kind not in _KINDS:
        return None
    # A TPU splits an asynchronous collective over several fusions: count the one that starts it.
    chain = re.search(
        r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"', instruction.attributes
    )
    if chain and chain.group(1) != "-1":
        return None
    # A TPU's reduce-scatter is a fusion of that name: an all-reduce and the slice of its result.
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind


def _along(groups: Sequence[Sequence[int]], axis: str, mesh: jax.sharding.Mesh) -> bool:
    """Whether the devices of any group differ in their coordinate on the axis."""
    shape, index = mesh.devices.shape, mesh.axis_names.index(axis)
    stride = math.prod(shape[index + 1 :])
    return any(len({p // stride % shape[index] for p in group}) > 1 for group in groups)


def _operand_shapes(
    computation: parsing.Computation, instruction: parsing.Instruction
) -> tuple[str, ...]:
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    arrays = [array for shape in shapes for array in re.findall(r"\w+\[[\d,<=]*\]", shape)]
    return tuple(array for array in arrays if not array.startswith("token"))


def _bytes(shape: str) -> int:
    dtype, sizes = shape[:-1].split("[")
    width = re.search(r"\d+", dtype)  # bf16, f8e4m3fn, s4; the one without is pred
    bits = int(width.group()) if width else 8
    return math.ceil(math.prod(map(int, re.findall(r"\d+", sizes))) * bits / 8)

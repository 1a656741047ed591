"""FLOPs and memory traffic of a compiled program, counted from its text."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from fedpax.hlo import trip_counts
from fedpax.hlo.parsing import (
    Computation,
    Instruction,
    Module,
    arrays,
    dimensions,
    integers,
    main_memory_bytes,
    shape_bytes,
)

# Kernels of splash attention: the suffix of the block sizes in the kernel's metadata -> the number
# of matmuls of all queries with all keys.
_SPLASH = {"": 2, "_dkv": 4, "_dq": 3}


def matmul_flops(computation: Computation, instruction: Instruction) -> float | None:
    """Return the FLOPs of a matmul, convolution or kernel, 2 per multiplication; else 0."""
    # None for a kernel that does not state its FLOPs. The instructions that it calls do not count.
    attributes = instruction.attributes
    if instruction.opcode == "dot":
        return _dot(computation, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode != "custom-call":
        return 0.0
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    name = target.group(1) if target else ""
    if name.startswith("__cublas$"):
        return _dot(computation, instruction, r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    if name == "tpu_custom_call":
        cost = re.search(r'"cost_estimate":\{"flops":"?(\d+)', attributes)
        return float(cost.group(1)) if cost else _splash(computation, instruction)
    return None if name.startswith(("__cudnn$", "__gpu$")) else 0.0


def operand_dtype(computation: Computation, instruction: Instruction) -> str:
    """Return the dtype of a matmul's operands as HLO writes it, such as "bf16"; "" if unknown."""
    cublas = 'custom_call_target="__cublas$' in instruction.attributes
    grouped = instruction.opcode == "custom-call" and instruction.name.startswith("ragged-dot")
    if instruction.opcode not in ("dot", "convolution") and not cublas and not grouped:
        return ""
    # A TPU's kernel for grouped matmuls takes the group sizes first and the matrices last.
    operand = instruction.operands[-1 if grouped else 0]
    return computation.instructions[operand].shape.partition("[")[0]


def _splash(computation: Computation, instruction: Instruction) -> float | None:
    """Return the FLOPs of a splash attention kernel; None for any other kernel."""
    # Queries are [..., heads, queries, features]. The first operand has an entry for each pair of
    # blocks that the kernel visits. A kernel that visits all pairs is taken for causal attention:
    # half of its blocks are empty.
    blocks = {
        ending: [
            int(size)
            for side in ("q", "kv")
            for size in re.findall(rf"\bblock_{side}{ending}\b\W*(\d+)", instruction.attributes)
        ]
        for ending in _SPLASH
    }
    # The metadata of the forward kernel has the block sizes of the other kernels too.
    ending = next((ending for ending, sizes in blocks.items() if len(sizes) == 2), None)
    if ending is None or "splash" not in instruction.name + instruction.attributes:
        return None
    operands = [dimensions(computation.instructions[name].shape) for name in instruction.operands]
    visited, *inputs = [shape for shape in operands if len(shape) >= 3]
    *heads, queries, features = next(shape for shape in inputs if shape != visited)
    pairs = math.prod(visited[-2:]) * math.prod(blocks[ending])
    if pairs >= queries * queries:
        pairs = queries * queries // 2
    return 2.0 * _SPLASH[ending] * math.prod(heads) * pairs * features


def _dot(computation: Computation, instruction: Instruction, contracting: str) -> float:
    """Return the FLOPs of a matmul; the pattern `contracting` finds its contracted dimensions."""
    left = dimensions(computation.instructions[instruction.operands[0]].shape)
    match = re.search(contracting, instruction.attributes)
    inner = math.prod(left[i] for i in integers(match.group(1))) if match else 1
    return 2.0 * math.prod(dimensions(instruction.shape)) * inner


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of a convolution, without those on padding and on holes of the input."""
    # A TPU writes matmuls as convolutions, batched ones over an input that is mostly holes
    # (dilation).
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, f"{instruction.name} has no dim_labels"
    left, right = (computation.instructions[name].shape for name in instruction.operands[:2])
    given = dict(zip(labels[1], dimensions(left), strict=True))
    kernel = dict(zip(labels[2], dimensions(right), strict=True))
    result = dict(zip(labels[3], dimensions(instruction.shape), strict=True))
    match = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", match.group(1))) if match else {}

    def window_setting(name: str, dimension: int, default: str) -> list[int]:
        text = window.get(name)
        return [int(n) for n in (text.split("x")[dimension] if text else default).split("_")]

    positions = 1
    for dimension in range(len(given) - 2):
        label = str(dimension)
        (stride,) = window_setting("stride", dimension, "1")
        (holes,) = window_setting("lhs_dilate", dimension, "1")
        (spread,) = window_setting("rhs_dilate", dimension, "1")
        before = window_setting("pad", dimension, "0_0")[0]
        position = (
            np.arange(result[label])[:, None] * stride
            + np.arange(kernel[label])[None, :] * spread
            - before
        )
        inside = (
            (position >= 0) & (position <= (given[label] - 1) * holes) & (position % holes == 0)
        )
        positions *= int(inside.sum())
    return 2.0 * result["b"] * result["f"] * kernel["i"] * positions


# Instructions without their own memory traffic: they rename existing values, or call
# computations whose instructions are counted.
_NO_TRAFFIC = {
    "after-all",
    "async-done",
    "async-start",
    "async-update",
    "bitcast",
    "call",
    "call-start",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
_SLICES = ("dynamic-slice", "gather", "slice")
_FUSIONS = ("fusion", "fusion-start")  # a GPU runs independent fusions at the same time


def memory_traffic(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Return the bytes that an instruction reads from and writes to main memory."""
    # 0 for instructions that call computations.
    opcode = instruction.opcode
    if opcode in _NO_TRAFFIC or opcode.endswith("-done"):
        return 0.0
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    if opcode in _FUSIONS:
        body = module.computations[instruction.reference("calls")]
        read = sum(_fusion_reads(module, body, i, shape)[0] for i, shape in enumerate(shapes))
        # The result of a start contains the operands.
        result = instruction.shape if opcode == "fusion" else body.root.shape
        return read + _fusion_writes(module, body, body.root, result)
    if opcode in _SLICES:
        return 2 * main_memory_bytes(instruction.shape)
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * main_memory_bytes(shapes[-1] if opcode == "scatter" else shapes[1])
    written = main_memory_bytes(instruction.shape)
    read = sum(map(main_memory_bytes, shapes))
    if not opcode.endswith("-start"):
        return read + written
    if opcode == "slice-start":  # its result is the tuple (operand, slice, context)
        slice_shape = arrays(instruction.shape)[1]
        return shape_bytes(slice_shape) * (read > 0) + main_memory_bytes(slice_shape)
    return max(written, read)  # the results of other starts contain their operands


_HOST = "S(5)"  # the host's memory, in a layout


def host_transfers(computation: Computation, instruction: Instruction) -> float:
    """Return the bytes that an instruction moves between the memories of device and host."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return 0.0
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    if opcode == "dynamic-update-slice":
        ends = [shapes[1], shapes[0]]
        moved = shapes[1]
    else:
        results = arrays(instruction.shape)
        if instruction.opcode.endswith("-start"):  # the context is a scalar
            results = [s for s in results if not s.startswith("u32[]")] or results
        moved = results[-1]
        # The result of a copy-start is the tuple (destination, source, context).
        ends = arrays(instruction.shape)[:2] if opcode == "copy" else [shapes[0], moved]
        if len(ends) == 1:
            ends.append(shapes[0])
    differ = len({_HOST in shape for shape in ends}) == 2
    return shape_bytes(moved) if differ else 0.0


def _fusion_reads(module: Module, body: Computation, index: int, shape: str) -> tuple[float, bool]:
    """Return the bytes that a fusion reads of one operand, and whether it returns the operand."""
    whole = main_memory_bytes(shape)
    users = _users(body)
    start = next(
        line.name
        for line in body.instructions.values()
        if line.opcode == "parameter" and int(line.arguments) == index
    )
    needed, pending, returned = 0.0, [start], False
    while pending:
        name = pending.pop()
        returned |= name == body.root.name
        for user in users.get(name, []):
            first = user.operands[0] == name
            if user.opcode in ("bitcast", "get-tuple-element", "tuple"):
                pending.append(user.name)
            elif user.opcode in _SLICES and first:
                needed += shape_bytes(user.shape)
            elif user.opcode == "dynamic-update-slice" and first:
                pass  # an update in place does not read it
            elif user.opcode == "fusion":  # nested, such as a bitcast
                inner = module.computations[user.reference("calls")]
                for position, operand in enumerate(user.operands):
                    if operand == name:
                        inner_reads, same = _fusion_reads(module, inner, position, shape)
                        needed += inner_reads
                        pending += [user.name] if same else []
            else:
                return whole, returned
    return min(needed, whole), returned


def _fusion_writes(module: Module, body: Computation, root: Instruction, shape: str) -> float:
    while root.opcode == "bitcast":
        root = body.instructions[root.operands[0]]
    if root.opcode == "tuple":
        parts = arrays(shape)
        lines = [body.instructions[name] for name in root.operands]
        if len(parts) == len(lines):
            return sum(
                _fusion_writes(module, body, line, part)
                for line, part in zip(lines, parts, strict=True)
            )
    if root.opcode == "dynamic-update-slice":
        return min(shape_bytes(body.instructions[root.operands[1]].shape), main_memory_bytes(shape))
    if root.opcode == "fusion":
        inner = module.computations[root.reference("calls")]
        return _fusion_writes(module, inner, inner.root, shape)
    return main_memory_bytes(shape)


def _users(body: Computation) -> dict[str, list[Instruction]]:
    """Map each instruction's name to the instructions that use its result."""
    users: dict[str, list[Instruction]] = {}
    for line in body.instructions.values():
        for name in line.operands:
            users.setdefault(name, []).append(line)
    return users


class ProgramCosts(NamedTuple):
    """The costs of one execution of a program on one device, as `CompiledPlan` describes them."""

    matmul_flops: float
    int8_flops: float
    fp8_flops: float
    memory_traffic: float
    host_transfers: float
    uncounted_kernels: tuple[str, ...]
    unknown_trip_counts: tuple[str, ...]


def count_costs(module: Module) -> ProgramCosts:
    """Count the matmul FLOPs and the memory traffic of a program."""
    # - Every instruction reads its operands and writes its result. A fusion is one instruction.
    # - A slice, or an update in place, counts the bytes of the slice, not of the array.
    # - Values that a TPU keeps in its vector memory have no traffic.
    # - A conditional counts its costliest branch, a loop of unknown trip count its body once.
    # - A kernel counts if it states its FLOPs, or is a splash attention kernel or cuBLAS matmul.
    trips = trip_counts.trip_counts(module)
    uncounted_kernels: list[str] = []
    unknown_trip_counts: list[str] = []

    @functools.cache
    def cost_of_computation(name: str) -> _Cost:
        computation, total = module.computations[name], _ZERO
        for instruction in computation.instructions.values():
            flops = matmul_flops(computation, instruction)
            if flops is None:
                uncounted_kernels.append(instruction.name)
            cost = _Cost.of_matmul(flops or 0.0, operand_dtype(computation, instruction))._replace(
                memory_traffic=memory_traffic(module, computation, instruction),
                host_transfers=host_transfers(computation, instruction),
            )
            total = total.plus(cost).plus(cost_of_callees(instruction))
        return total

    def cost_of_callees(instruction: Instruction) -> _Cost:
        """Return the cost of the computations that an instruction calls."""
        match instruction.opcode:
            case "while":
                count = trips[instruction.name]
                if count is None:
                    unknown_trip_counts.append(instruction.name)
                body = cost_of_computation(instruction.reference("body"))
                return _ZERO.plus(body, times=1 if count is None else count)
            case "conditional":
                branches = map(cost_of_computation, trip_counts.callees(instruction))
                return _Cost(*(max(values) for values in zip(*branches, strict=True)))
            case "fusion" | "fusion-start":  # its memory traffic counts as one instruction
                body = cost_of_computation(instruction.reference("calls"))
                return body._replace(memory_traffic=0.0, host_transfers=0.0)
            case "call" | "call-start" | "async-start":
                callees = map(cost_of_computation, trip_counts.callees(instruction))
                return functools.reduce(_Cost.plus, callees, _ZERO)
        return _ZERO  # functions of single elements, such as a reduction's, do not count

    total = cost_of_computation(module.entry)
    return ProgramCosts(*total, tuple(uncounted_kernels), tuple(unknown_trip_counts))


class _Cost(NamedTuple):
    """The cost of one execution of a computation."""

    matmul_flops: float
    int8_flops: float
    fp8_flops: float
    memory_traffic: float
    host_transfers: float

    @classmethod
    def of_matmul(cls, flops: float, dtype: str) -> _Cost:
        """Make the cost of a matmul with operands of a dtype."""
        int8 = flops if dtype in ("s8", "u8") else 0.0
        fp8 = flops if dtype.startswith("f8") else 0.0
        return cls(flops, int8, fp8, 0.0, 0.0)

    def plus(self, other: _Cost, times: int = 1) -> _Cost:
        """Add a cost `times` times."""
        return _Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


_ZERO = _Cost(0.0, 0.0, 0.0, 0.0, 0.0)

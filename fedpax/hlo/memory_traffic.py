"""Bytes that an instruction moves, from and to main memory, and between device and host."""

from __future__ import annotations

from fedpax.hlo.parsing import Computation, Instruction, Module
from fedpax.hlo.shapes import arrays, main_memory_bytes, shape_bytes

# Instructions without memory traffic of their own: they rename existing values, or call
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


def memory_traffic(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Return the bytes that an instruction reads from and writes to main memory."""
    # 0 for instructions that call computations, whose instructions count themselves.
    opcode = instruction.opcode
    if opcode in _NO_TRAFFIC or opcode.endswith("-done"):
        return 0.0
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    if opcode == "fusion":
        body = module.computations[instruction.reference("calls")]
        read = sum(_fusion_reads(module, body, i, shape)[0] for i, shape in enumerate(shapes))
        return read + _fusion_writes(module, body, body.root, instruction.shape)
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
    """Return the bytes that a fusion writes."""
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

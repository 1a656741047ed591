"""FLOPs and memory traffic of a compiled program, counted from its text.

`jax.stages.Compiled.cost_analysis` counts the body of a loop once. Here the body of a loop counts
as often as it runs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from fedpax.hlo import trip_counts
from fedpax.hlo.matmul_flops import matmul_flops, operand_dtype
from fedpax.hlo.memory_traffic import host_transfers, memory_traffic
from fedpax.hlo.parsing import Instruction, Module


class ProgramCosts(NamedTuple):
    """The costs of one execution of a program on one device."""

    matmul_flops: float  # FLOPs of matmuls and convolutions, of any dtype
    int8_flops: float  # the part of them with 8-bit integer operands
    fp8_flops: float  # the part of them with 8-bit float operands
    memory_traffic: float  # bytes read from and written to the device's main memory
    # Bytes moved between the memories of device and host, in either direction.
    host_transfers: float
    # Names of kernels (custom calls) that do not state their FLOPs.
    uncounted_kernels: tuple[str, ...]
    # Names of loops whose trip count is known only at run time; their bodies count once.
    unknown_trip_counts: tuple[str, ...]


def count_costs(module: Module) -> ProgramCosts:
    """Count the matmul FLOPs and the memory traffic of a program."""
    # - Every instruction reads its operands and writes its result. A fusion is one instruction.
    # - A slice, or an update in place, counts the bytes of the slice, not of the array.
    # - Values that a TPU keeps in its vector memory have no traffic.
    # - A conditional counts its costliest branch.
    # - A loop counts its body times its trip count; an unknown trip count is taken as 1.
    # - A kernel (custom call) counts if it states its FLOPs, or is a splash attention kernel or a
    #   cuBLAS matmul.
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
            case "fusion":  # its memory traffic counts as one instruction
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

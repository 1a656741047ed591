"""Trip counts of the loops of a compiled program, and executions of its computations."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from fedpax.hlo.parsing import Computation, Instruction, Module


class Executions(NamedTuple):
    """The executions of a computation in one execution of the program."""

    times: int | None  # None: known only at run time
    in_loop: bool


def executions(module: Module) -> dict[str, Executions]:
    """Count the executions of each computation that runs in one execution of a program."""
    # Trip counts of nested loops multiply, and calls add up. The number is unknown in a loop that
    # waits for a value, and in branches of conditionals.
    sites = _call_sites(module)

    @functools.cache
    def runs(name: str) -> Executions:
        total: int | None = int(name == module.entry)
        in_loop = False
        for caller, call in sites.get(name, []):
            outer = runs(caller.name)
            if outer.times == 0:
                continue
            times = _times(module, sites, caller, call, name)
            if total is None or outer.times is None or times is None:
                total = None
            else:
                total += outer.times * times
            in_loop |= outer.in_loop or call.opcode == "while"
        return Executions(total, in_loop)

    counted = {name: runs(name) for name in module.computations}
    return {name: run for name, run in counted.items() if run.times != 0}


def trip_counts(module: Module) -> dict[str, int | None]:
    """Find the trip count of each loop by its name; None if it is known only at run time."""
    sites = _call_sites(module)
    return {
        loop.name: _trip_count(module, sites, caller, loop)
        for caller in module.computations.values()
        for loop in caller.instructions.values()
        if loop.opcode == "while"
    }


def callees(call: Instruction) -> list[str]:
    """Return the names of the computations that an instruction calls or contains."""
    single = r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    several = r"\b(?:branch|called)_computations=\{([^}]*)\}"
    lists = " ".join(re.findall(several, call.attributes))
    return re.findall(single, call.attributes) + re.findall(r"%([\w.\-]+)", lists)


_CallSites = dict[str, list[tuple[Computation, Instruction]]]


def _call_sites(module: Module) -> _CallSites:
    """Map each computation to its callers: pairs (calling computation, instruction)."""
    sites: _CallSites = {}
    for caller in module.computations.values():
        for call in caller.instructions.values():
            if call.opcode.endswith(("-done", "-update")):
                continue  # its start is the call
            for callee in callees(call):
                sites.setdefault(callee, []).append((caller, call))
    return sites


def _times(
    module: Module, sites: _CallSites, caller: Computation, call: Instruction, callee: str
) -> int | None:
    """Return the executions of a callee per execution of the call; None if unknown."""
    if call.opcode == "while":
        return (
            _trip_count(module, sites, caller, call) if callee == call.reference("body") else None
        )
    return None if call.opcode == "conditional" else 1


class _UnknownError(Exception):
    """A value that is known only at run time."""


class _Computed(NamedTuple):
    """The result of an instruction, and a function that finds its computation's parameters."""

    computation: Computation
    instruction: Instruction
    parameter: Callable[[int], _Computed]

    def operand(self, index: int) -> _Computed:
        """Return an operand of the instruction."""
        name = self.instruction.operands[index]
        return self._replace(instruction=self.computation.instructions[name])

    def inside(self, module: Module) -> _Computed:
        """Return the result inside the computation that a fusion or call runs."""
        reference = self.instruction.reference
        callee = module.computations[reference("calls") or reference("to_apply")]
        return _Computed(callee, callee.root, self.operand)


def _trip_count(
    module: Module, sites: _CallSites, caller: Computation, loop: Instruction
) -> int | None:
    """Return the trip count of a while loop; None if it is known only at run time."""
    # CPU and GPU programs state it. In TPU programs the loop's counter is evaluated at the first
    # three tests of the condition, and extrapolated linearly.
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations[loop.reference("condition")]
    body = module.computations[loop.reference("body")]
    state = _Computed(caller, loop, _parameters_of(sites, caller)).operand(0)
    margins: list[int] = []
    try:
        for _ in range(3):
            # The only parameter of the body and of the condition is the state of the loop.
            parameter = functools.partial(lambda state, index: state, state)
            direction, margin = _comparison(module, _Computed(condition, condition.root, parameter))
            margins.append(margin)
            state = _Computed(body, body.root, parameter)
    except _UnknownError:
        return None
    if direction in ("GT", "GE"):
        margins = [-margin for margin in margins]
    step = margins[1] - margins[0]
    if step <= 0 or margins[2] - margins[1] != step:
        return None
    if direction in ("LT", "GT"):
        return max(0, math.ceil(-margins[0] / step))
    return max(0, -margins[0] // step + 1) if direction in ("LE", "GE") else None


def _parameters_of(sites: _CallSites, computation: Computation) -> Callable[[int], _Computed]:
    """Return a function that finds the arguments of a computation with a single call."""

    def parameter(index: int) -> _Computed:
        callers = sites.get(computation.name, [])
        if len(callers) != 1 or callers[0][1].opcode not in ("call", "fusion"):
            raise _UnknownError
        caller, call = callers[0]
        return _Computed(caller, call, _parameters_of(sites, caller)).operand(index)

    return parameter


def _comparison(module: Module, test: _Computed) -> tuple[str, int]:
    """Return the direction of a comparison, and its left side minus its right."""
    if test.instruction.opcode in ("fusion", "call"):
        return _comparison(module, test.inside(module))
    direction = re.search(r"direction=(\w+)", test.instruction.attributes)
    if test.instruction.opcode != "compare" or not direction:
        raise _UnknownError
    return direction.group(1), _evaluate(module, test.operand(0)) - _evaluate(
        module, test.operand(1)
    )


def _evaluate(module: Module, value: _Computed, element: int | None = None) -> int:
    """Return a scalar integer, or the integer at an index of a tuple."""
    instruction = value.instruction
    match instruction.opcode:
        case "parameter":
            return _evaluate(module, value.parameter(int(instruction.arguments)), element)
        case "tuple" if element is not None:
            return _evaluate(module, value.operand(element))
        case "get-tuple-element" if element is None:
            index = re.search(r"index=(\d+)", instruction.attributes)
            assert index is not None, f"{instruction.name} has no index"
            return _evaluate(module, value.operand(0), int(index.group(1)))
        case "bitcast" | "convert" | "copy" | "copy-done" | "copy-start":
            return _evaluate(module, value.operand(0), element)
        case "fusion" | "call":
            return _evaluate(module, value.inside(module), element)
        case "constant" if re.fullmatch(r"-?\d+", instruction.arguments):
            return int(instruction.arguments)
        case "add":
            return _evaluate(module, value.operand(0)) + _evaluate(module, value.operand(1))
        case "subtract":
            return _evaluate(module, value.operand(0)) - _evaluate(module, value.operand(1))
    raise _UnknownError

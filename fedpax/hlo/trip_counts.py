"""How often each computation of a compiled program runs, loops inside loops multiplied."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from fedpax.hlo.parsing import Computation, Instruction, Module


class Executions(NamedTuple):
    """How often a computation runs in one execution of the program."""

    times: int | None  # None: only running it can tell
    in_loop: bool


def executions(module: Module) -> dict[str, Executions]:
    """Counts how often each computation of a program runs.

    A loop of fixed length runs its body that often; loops inside loops multiply, and calls from
    several places add up. Unknown are loops that wait for a value and branches of conditionals.

    Args:
      module: the program.

    Returns:
      The executions by the computation's name; those that never run are left out.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedpax.hlo import parsing
      >>> def doubled(x):
      ...     return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=7)[0]
      >>> text = jax.jit(doubled).lower(jnp.ones((4, 4))).compile().as_text()
      >>> max(runs.times for runs in executions(parsing.read(text)).values() if runs.times)
      7
    """
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

    found = {name: runs(name) for name in module.computations}
    return {name: run for name, run in found.items() if run.times != 0}


def trip_counts(module: Module) -> dict[str, int | None]:
    """Counts how often each loop of a program runs its body, each time that it is reached.

    Args:
      module: the program.

    Returns:
      The counts by the names of the `while` instructions; None where only running it can tell.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedpax.hlo import parsing
      >>> def doubled(x):
      ...     return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=7)[0]
      >>> text = jax.jit(doubled).lower(jnp.ones((4, 4))).compile().as_text()
      >>> list(trip_counts(parsing.read(text)).values())
      [7]
    """
    sites = _call_sites(module)
    return {
        loop.name: _trip_count(module, sites, caller, loop)
        for caller in module.computations.values()
        for loop in caller.instructions.values()
        if loop.opcode == "while"
    }


def callees(call: Instruction) -> list[str]:
    """The computations that an instruction runs, or has inside."""
    single = r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    several = r"\b(?:branch|called)_computations=\{([^}]*)\}"
    lists = " ".join(re.findall(several, call.attributes))
    return re.findall(single, call.attributes) + re.findall(r"%([\w.\-]+)", lists)


_Sites = dict[str, list[tuple[Computation, Instruction]]]


def _call_sites(module: Module) -> _Sites:
    """Where each computation is called: in which computation, by which instruction."""
    sites: _Sites = {}
    for caller in module.computations.values():
        for call in caller.instructions.values():
            if call.opcode.endswith(("-done", "-update")):
                continue  # its start has called already
            for callee in callees(call):
                sites.setdefault(callee, []).append((caller, call))
    return sites


def _times(
    module: Module, sites: _Sites, caller: Computation, call: Instruction, callee: str
) -> int | None:
    """How often one execution of a call runs what it calls."""
    if call.opcode == "while":
        return _trip_count(module, sites, caller, call) if callee == call.refers("body") else None
    return None if call.opcode == "conditional" else 1


class _UnknownError(Exception):
    """A value that the text alone does not tell."""


class _Place(NamedTuple):
    """An instruction, and where its computation's parameters come from."""

    computation: Computation
    instruction: Instruction
    parameter: Callable[[int], _Place]

    def operand(self, index: int) -> _Place:
        name = self.instruction.operands[index]
        return self._replace(instruction=self.computation.instructions[name])

    def inside(self, module: Module) -> _Place:
        """The result of the computation that a fusion or call runs."""
        refers = self.instruction.refers
        callee = module.computations[refers("calls") or refers("to_apply")]
        return _Place(callee, callee.root, self.operand)


def _trip_count(
    module: Module, sites: _Sites, caller: Computation, loop: Instruction
) -> int | None:
    """How often a while loop runs its body; None if only running it can tell.

    CPU and GPU write the number down. TPU does not: there the loop's counter is evaluated at the
    first, second and third test of the condition, and the line through them solved.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations[loop.refers("condition")]
    body = module.computations[loop.refers("body")]
    state = _Place(caller, loop, _outside(sites, caller)).operand(0)
    margins: list[int] = []
    try:
        for _ in range(3):
            bound = functools.partial(_always, state)
            direction, margin = _comparison(module, _Place(condition, condition.root, bound))
            margins.append(margin)
            state = _Place(body, body.root, bound)
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


def _always(place: _Place, index: int) -> _Place:
    """The one parameter of a loop's body and condition: its state."""
    return place


def _outside(sites: _Sites, computation: Computation) -> Callable[[int], _Place]:
    """Where the parameters of a computation come from, if it is called in one place, once."""

    def parameter(index: int) -> _Place:
        callers = sites.get(computation.name, [])
        if len(callers) != 1 or callers[0][1].opcode not in ("call", "fusion"):
            raise _UnknownError
        caller, call = callers[0]
        return _Place(caller, call, _outside(sites, caller)).operand(index)

    return parameter


def _comparison(module: Module, test: _Place) -> tuple[str, int]:
    """Direction of a comparison, and its left side less its right."""
    if test.instruction.opcode in ("fusion", "call"):
        return _comparison(module, test.inside(module))
    direction = re.search(r"direction=(\w+)", test.instruction.attributes)
    if test.instruction.opcode != "compare" or not direction:
        raise _UnknownError
    return direction.group(1), _value(module, test.operand(0)) - _value(module, test.operand(1))


def _value(module: Module, place: _Place, element: int | None = None) -> int:
    """Value of a scalar integer, or of an element of a tuple."""
    instruction = place.instruction
    match instruction.opcode:
        case "parameter":
            return _value(module, place.parameter(int(instruction.arguments)), element)
        case "tuple" if element is not None:
            return _value(module, place.operand(element))
        case "get-tuple-element" if element is None:
            index = re.search(r"index=(\d+)", instruction.attributes)
            assert index is not None, f"{instruction.name} does not say which element it takes"
            return _value(module, place.operand(0), int(index.group(1)))
        case "bitcast" | "convert" | "copy" | "copy-done" | "copy-start":
            return _value(module, place.operand(0), element)
        case "fusion" | "call":
            return _value(module, place.inside(module), element)
        case "constant" if re.fullmatch(r"-?\d+", instruction.arguments):
            return int(instruction.arguments)
        case "add":
            return _value(module, place.operand(0)) + _value(module, place.operand(1))
        case "subtract":
            return _value(module, place.operand(0)) - _value(module, place.operand(1))
    raise _UnknownError

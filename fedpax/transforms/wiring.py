"""The server's parts of a plan as functions of flat arrays with numbers, for an export."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import Literal, Var, aval_of
from fedpax.transforms.client_stages import ClientStage
from fedpax.transforms.server_parts import ServerParts
from fedpax.transforms.streaming_plan import Atom, StreamingPlan


class Part(NamedTuple):
    """A part of the server's work, whose values have numbers."""

    run: Callable[..., list[Any]]  # `(*inputs, *terms of the stage before) -> results`
    types: list[jax.ShapeDtypeStruct]  # types of the arguments of `run`
    inputs: list[int]  # numbers of the inputs
    results: list[int]  # numbers of the results
    # the stage that follows; None at the end, or where participants have nothing to do
    stage: int | None
    shared: list[int]  # numbers of the values that the stage shares
    rows: list[int]  # numbers of the values of which participants receive their rows
    shown: list[int]  # numbers of the values that participants show


class Wiring(NamedTuple):
    """The server's parts."""

    parts: list[Part]  # the parts, in order
    arguments: dict[str, int]  # name of an argument that the server reads -> its number
    results: dict[str, int]  # name of a result of the server -> its number


def output_of(plan: StreamingPlan, values: dict[Var, Any], v: Atom) -> Any:
    """Return a result of a program, given the values that the server has."""
    if isinstance(v, Literal):
        return jnp.asarray(v.val, aval_of(v).dtype)
    axis = plan.axis[v] if plan.is_stored(v) else 0
    return jnp.moveaxis(values[v], 0, axis) if axis else values[v]


def wire(
    plan: StreamingPlan,
    server: ServerParts,
    stages: Sequence[ClientStage],
    constants: Sequence[Any],
    arguments: Sequence[str],
    results: Sequence[str],
) -> Wiring:
    """Make a function of each part of the server, with numbers for its values."""
    fixed = dict(zip(plan.jaxpr.constvars, constants, strict=True))
    outputs = server.outputs[: len(results)]
    numbers: dict[Var, int] = {}
    by_phase = {stage.phase: stage for stage in stages}

    def number(v: Var) -> int:
        return numbers.setdefault(v, len(numbers))

    def make(index: int) -> Part:
        before, stage = by_phase.get(index - 1), by_phase.get(index)
        is_first, is_last = index == 0, index == server.number - 1
        needed = [*server.inputs[index]]
        if is_last:
            computed = server.results[index]
            read = (v for v in outputs if isinstance(v, Var) and v not in computed)
            needed = list(dict.fromkeys([*needed, *read]))
        given = [v for v in needed if not (is_first and v in fixed)]

        def run(*flat: Any) -> list[Any]:
            values = {**(fixed if is_first else {}), **dict(zip(given, flat, strict=False))}
            sent = flat[len(given) :]
            totals = [] if before is None else [sent[i] for i in before.places]
            inputs = [values[v] for v in server.inputs[index]]
            values.update(
                zip(server.results[index], server.run(index, inputs, totals), strict=True)
            )
            whole = [values[v] for v in server.results[index]]
            if is_first:
                whole += [jnp.asarray(x) for x in fixed.values()]
            return whole + ([output_of(plan, values, v) for v in outputs] if is_last else [])

        types = [_type(plan, v) for v in given]
        if before is not None:
            types += [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in before.messages.terms]
        returned = [*server.results[index], *(fixed if is_first else ())]
        part = Part(
            run,
            types,
            [number(v) for v in given],
            [number(v) for v in returned],
            None if stage is None else stage.number,
            [number(v) for v in stage.shared] if stage is not None else [],
            [number(v) for v in stage.rows] if stage is not None else [],
            [number(v) for v in stage.shown] if stage is not None else [],
        )
        return part

    named = dict(zip(arguments, map(number, plan.jaxpr.invars), strict=False))
    parts = [make(index) for index in range(server.number)]
    final = [len(numbers) + i for i in range(len(outputs))]
    parts[-1].results.extend(final)
    read = {number for part in parts for number in (*part.inputs, *part.shared, *part.rows)}
    named = {name: number for name, number in named.items() if number in read}
    return Wiring(parts, named, dict(zip(results, final, strict=True)))


def _type(plan: StreamingPlan, v: Var) -> jax.ShapeDtypeStruct:
    """Return the type of a value as the server holds it: stored values have participants first."""
    aval = aval_of(v)
    axis = plan.axis[v] if plan.is_stored(v) else 0
    shape = [size for i, size in enumerate(aval.shape) if i != axis]
    return jax.ShapeDtypeStruct((*aval.shape[axis : axis + 1], *shape), aval.dtype)

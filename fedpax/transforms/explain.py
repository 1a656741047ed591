"""How a program runs, in words."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    aval_of,
    eliminate_dead_code,
    inner_jaxprs,
)
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.program import federated_program_p
from fedpax.transforms.phases import plan_phases
from fedpax.transforms.streaming import inline, is_federated, placements_of


def explain(program: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Says how the streaming pass runs a program, and what it had to store of each participant.

    Args:
        program: a function decorated with `fedpax.program`, or one that calls such functions, for
            example its gradient.
        *args: what it is called with: arrays, or `jax.ShapeDtypeStruct`s.
        **kwargs: likewise.

    Returns:
        A few lines of text: for each program and phase, what one loop runs, reduces and stores,
        and for each stored value who needs it.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=4, chunk_size=1)
        ... def mean_square(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** 2, x))
        >>> print(fedpax.explain(mean_square, 1.0, jnp.zeros((4, 3))))
        program mean_square
          clients=4, phase 0: 1 map, 1 reduction, 1 at once on a device; nothing is stored.
    """
    closed = jax.make_jaxpr(program)(*args, **kwargs)
    lines = [line for eqn in _programs(closed.jaxpr) for line in _explain_program(eqn)]
    return "\n".join(lines) or "There is no fedpax program in this function."


def _programs(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is federated_program_p:
            yield eqn  # which explains those inside of it
            continue
        for inner in inner_jaxprs(eqn):
            yield from _programs(inner)


def _explain_program(eqn: JaxprEqn) -> Iterator[str]:
    yield f"program {eqn.params['name']}"
    yield from (f"  {line}" for line in _explain_jaxpr(eqn.params["jaxpr"]))


def _explain_jaxpr(closed: ClosedJaxpr) -> Iterator[str]:
    closed = eliminate_dead_code(inline(closed, inside=lambda inner: inner))
    if not is_federated(closed.jaxpr):
        yield "No map runs in it: there is nothing to stream."
    for placement in placements_of(closed.jaxpr):
        plan = plan_phases(closed.jaxpr, placement)
        for phase in sorted(plan.loops):
            chunk_size = plan.chunk_size(phase)
            stored = plan.stored[phase]
            own, again = plan.maps(phase)
            runs = [_count(len(own), "map")] if own or not again else []
            runs += [f"{_count(len(again), 'map')} again"] if again else []
            yield (
                f"{placement}, phase {phase}: {', '.join(runs)}, "
                f"{_count(len(plan.reductions.get(phase, ())), 'reduction')}, "
                f"{'all' if chunk_size is None else chunk_size} at once on a device; "
                + ("stored of each participant:" if stored else "nothing is stored.")
            )
            yield from (f"  {aval_of(v).str_short()}: {why}" for v, why in stored.items())
            for eqn in (*own, *again):
                if is_federated(eqn.params["jaxpr"].jaxpr):
                    yield f"  inside, on one of the {placement.name}:"
                    yield from (f"    {line}" for line in _explain_jaxpr(eqn.params["jaxpr"]))
    for eqn in closed.jaxpr.eqns:
        for where, inner in _control_flow(eqn):
            if is_federated(inner.jaxpr):
                yield f"{where}:"
                yield from (f"  {line}" for line in _explain_jaxpr(inner))


def _control_flow(eqn: JaxprEqn) -> Iterator[tuple[str, ClosedJaxpr]]:
    """What a loop or a conditional runs, and when: each is streamed by itself."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            yield f"in a loop of {_count(params['length'], 'step')}", params["jaxpr"]
        case "while":
            yield "in a while loop", params["body_jaxpr"]
            yield "in the condition of a while loop", params["cond_jaxpr"]
        case "cond":
            for i, branch in enumerate(params["branches"]):
                yield f"in branch {i} of a conditional", branch
        case name if eqn.primitive is not federated_map_p:
            for inner in inner_jaxprs(eqn):
                yield f"in {name!r}", ClosedJaxpr(inner, ())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

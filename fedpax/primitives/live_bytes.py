"""How much memory a function needs, estimated from its jaxpr."""

import math

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var, aval_of, inner_jaxprs


def live_bytes(jaxpr: Jaxpr) -> int:
    """The most bytes that are alive at once, run equation by equation.

    An upper estimate: a compiler fuses equations, and then never holds what lies between them.

    Args:
        jaxpr: any; its arguments and constants count while something still reads them.

    Returns:
        Bytes, over all devices.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sum(jnp.outer(x, x)))(jnp.ones(10))
        >>> live_bytes(jaxpr.jaxpr) >= 4 * 10 * 10
        True
    """
    last_use: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last_use.update({v: i for v in eqn.invars if isinstance(v, Var)})
    last_use.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)})
    alive = {v: size_of(v) for v in (*jaxpr.constvars, *jaxpr.invars) if v in last_use}
    now = most = sum(alive.values())
    for i, eqn in enumerate(jaxpr.eqns):
        made = {v: size_of(v) for v in eqn.outvars}
        now += sum(made.values())
        most = max(most, now + _inside(eqn))
        alive |= made
        for v in {v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var)}:
            if last_use.get(v, i) == i:
                now -= alive.pop(v, 0)
    return most


def size_of(v: Var | Literal) -> int:
    """The bytes of a value."""
    aval = aval_of(v)
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


def _inside(eqn: JaxprEqn) -> int:
    """What the functions of an equation need besides its arguments and its results."""
    outside = sum(map(size_of, (*eqn.invars, *eqn.outvars)))
    return max((max(0, live_bytes(inner) - outside) for inner in inner_jaxprs(eqn)), default=0)

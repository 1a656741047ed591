"""An estimate of a function's peak memory from its jaxpr."""

import math

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var, aval_of
from fedpax.primitives.jaxpr_analysis import inner_jaxprs


def peak_live_bytes(jaxpr: Jaxpr) -> int:
    """Compute the peak number of live bytes when a jaxpr runs equation by equation.

    This is an upper estimate: a compiler fuses equations and does not store values between them.
    """
    last_use: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last_use.update({v: i for v in eqn.invars if isinstance(v, Var)})
    last_use.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)})
    alive = {v: num_bytes(v) for v in (*jaxpr.constvars, *jaxpr.invars) if v in last_use}
    current = peak = sum(alive.values())
    for i, eqn in enumerate(jaxpr.eqns):
        results = {v: num_bytes(v) for v in eqn.outvars}
        current += sum(results.values())
        peak = max(peak, current + _inner_peak(eqn))
        alive |= results
        for v in {v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var)}:
            if last_use.get(v, i) == i:
                current -= alive.pop(v, 0)
    return peak


def num_bytes(v: Var | Literal) -> int:
    """Compute the size of a value in bytes."""
    aval = aval_of(v)
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


def _inner_peak(eqn: JaxprEqn) -> int:
    """Compute the bytes that an equation's inner jaxprs need beyond its arguments and results."""
    outside = sum(map(num_bytes, (*eqn.invars, *eqn.outvars)))
    return max((max(0, peak_live_bytes(inner) - outside) for inner in inner_jaxprs(eqn)), default=0)
